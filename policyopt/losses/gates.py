"""Gate slot: (LossInputs, log_ratio) -> [B,T], multiplies the policy term, carries no gradient.

Gates never touch denominators or penalties. `log_ratio` is the algorithm's own; a gate that looks
at another ratio takes it as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from policyopt import checks, masked
from policyopt.types import Array, LossInputs, require

Gate = Callable[[LossInputs, Array], Array]
_LEVELS = ('token', 'sequence', 'product')


def _row_level(x: Array, mask: Array, level: str) -> Array:
    """x itself, its row mean, or its row sum; [B,T] -> [B,T] or [B,1]."""
    if level == 'token':
        return masked.select(mask, x)
    reduce = masked.row_mean if level == 'sequence' else masked.row_sum
    return reduce(x, mask)[:, None]


def _correction(inputs: LossInputs, level: str, part: str) -> Array:
    """pi_old / pi_behavior: [B,T] or [B,1]."""
    behavior = require(inputs, 'logp_behavior', part)
    return masked.bounded_exp(_row_level(inputs.logp_old - behavior, inputs.mask, level))


def _check_level(level: str) -> None:
    if level not in _LEVELS:
        raise ValueError(f'unknown level {level!r}.{checks.nearest(str(level), _LEVELS)}')


@checks.factory('gate')
def off_policy_sequence(delta: float = 0.5) -> Gate:
    """0 where A_t < 0 and mean_t(logp_behavior - logp_new) of the row > delta; else 1.

    Off-policy sequence masking of DeepSeek-V3.2 (2512.02556). The drift is measured against the
    sampler. A_t = 0 keeps, and a dropped row keeps its penalties.

    Args:
      delta: nats per token. Unpublished: 0.5 is a choice.
    """
    checks.number('delta', delta, 0)

    def gate(inputs: LossInputs, log_ratio: Array) -> Array:
        behavior = require(inputs, 'logp_behavior', 'off_policy_sequence')
        drift = masked.row_mean(behavior - inputs.logp_new, inputs.mask)
        dropped = (inputs.advantages < 0) & (drift > delta)[:, None]
        return jnp.where(dropped, 0, jnp.ones_like(log_ratio))

    return gate


@checks.factory('gate')
def truncated_importance(cap: float = 2.0, level: str = 'token') -> Gate:
    """min(rho, cap), rho = pi_old / pi_behavior: truncated importance sampling.

    Corrects for a sampler whose probabilities differ from the trainer's.

    Args:
      cap: largest weight; infinity for the plain weight. Unpublished as a standard value.
      level: `token`; `sequence` for the geometric mean over the row; `product` for the product.
    """
    checks.number('cap', cap, 0)
    _check_level(level)

    def gate(inputs: LossInputs, log_ratio: Array) -> Array:
        rho = _correction(inputs, level, 'truncated_importance')
        return jnp.broadcast_to(jnp.minimum(rho, cap), log_ratio.shape)

    return gate


@checks.factory('gate')
def masked_importance(low: float = 0.5, high: float = 5.0, level: str = 'token') -> Gate:
    """rho where low <= rho <= high, else 0; rho = pi_old / pi_behavior (IcePop).

    Args:
      low: smallest weight kept.
      high: largest weight kept.
      level: as in `truncated_importance`.
    """
    checks.number('low', low, 0)
    checks.number('high', high, low)
    _check_level(level)

    def gate(inputs: LossInputs, log_ratio: Array) -> Array:
        rho = _correction(inputs, level, 'masked_importance')
        kept = jnp.where((rho >= low) & (rho <= high), rho, 0)
        return jnp.broadcast_to(kept, log_ratio.shape)

    return gate


@checks.factory('gate')
def trust_mask(low: float, high: float, ratio: Callable[[LossInputs], Array]) -> Gate:
    """0 where `clipped(low, high)` on the given ratio has no slope, else 1.

    Args:
      low: as in `clipped`.
      high: as in `clipped`.
      ratio: a member of the ratio slot, which the mask looks at.
    """
    checks.number('low', low, 0, 1)
    checks.number('high', high, 0)

    def gate(inputs: LossInputs, log_ratio: Array) -> Array:
        u = masked.bounded_exp(ratio(inputs))
        stopped = masked.clip_stops(u, inputs.advantages, low, high)
        return jnp.where(stopped, 0, jnp.ones_like(log_ratio))

    return gate


@checks.factory('gate')
def detached_weight(ratio: Callable[[LossInputs], Any]) -> Gate:
    """exp of the given ratio as a weight without gradient: sg[rho] in the ablation grid."""
    return lambda inputs, log_ratio: masked.bounded_exp(ratio(inputs))


def read(value: Any, where: str) -> Any:
    """The gates that a config asks for: names of this module, or sections.

    Args:
      value: 'truncated_importance', {'gate': 'truncated_importance', ARGUMENTS}, or several of them
        in a list; a gate passes.
      where: name of the argument, for errors.

    Raises ValueError or TypeError, with the nearest spelling.
    """
    if not isinstance(value, list | tuple):
        return read([value], where)
    known = [name for name, v in globals().items() if getattr(v, 'slot', '') == 'gate']
    found = []
    for gate in value:
        section = {'gate': gate} if isinstance(gate, str) else gate
        if callable(gate):
            found.append(gate)
            continue
        name = section.get('gate') if isinstance(section, Mapping) else None
        if not isinstance(name, str):
            raise ValueError(
                f"{where} has {gate!r}; legal is a name, or {{'gate': NAME, ARGUMENTS}}."
                f'{checks.nearest("", known)}'
            )
        if name not in known:
            raise ValueError(
                f'{where} has {name!r}, which is no gate.{checks.nearest(name, known)}'
            )
        found.append(globals()[name](**{k: v for k, v in section.items() if k != 'gate'}))
    return found
