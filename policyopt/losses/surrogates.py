"""Surrogate slot: (log_ratio, advantages) -> objective, elementwise, maximised.

With u = exp(log_ratio), A the advantage and sg the stop-gradient. The slope in log_ratio at u = 1
is A for every member, so that on-policy gradients are REINFORCE's.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from policyopt import checks, masked
from policyopt.types import Array

Surrogate = Callable[[Array, Array], Array]
Coefficient = float | Array


@jax.custom_jvp
def _sigmoid(x: Array) -> Array:
    """Sigmoid whose slope keeps its digits where 1 - sigmoid rounds to 0."""
    return jax.nn.sigmoid(x)


@_sigmoid.defjvp
def _sigmoid_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return jax.nn.sigmoid(x), jax.nn.sigmoid(x) * jax.nn.sigmoid(-x) * dx


def _clipped(u: Array, advantages: Array, low: Coefficient, high: Coefficient) -> Array:
    edge = jnp.where(advantages > 0, 1 + high, 1 - low)
    stopped = masked.clip_stops(u, advantages, low, high)
    return jnp.where(stopped, edge.astype(u.dtype), u) * advantages


@checks.factory('surrogate')
def reinforce() -> Surrogate:
    """log_ratio * A: the score-function gradient, A grad logp (Williams 1992)."""
    return lambda log_ratio, advantages: log_ratio * advantages


@checks.factory('surrogate')
def unclipped() -> Surrogate:
    """u A: the importance-weighted objective (TRPO 1502.05477, PPO-penalty 1707.06347)."""
    return lambda log_ratio, advantages: masked.bounded_exp(log_ratio) * advantages


@checks.factory('surrogate')
def clipped(low: Coefficient = 0.2, high: Coefficient | None = None) -> Surrogate:
    """min(u A, clip(u, 1-low, 1+high) A) (PPO 1707.06347; clip-higher DAPO 2503.14476).

    Slope u A, or 0 where (A > 0 and u > 1+high) or (A < 0 and u < 1-low).

    Args:
      low: distance of the lower bound from 1, in [0, 1].
      high: distance of the upper bound; the same as low where None.
    """
    checks.number('low', low, 0, 1)
    top = low if high is None else checks.number('high', high, 0)
    return lambda log_ratio, advantages: _clipped(
        masked.bounded_exp(log_ratio), advantages, low, top
    )


@checks.factory('surrogate')
def dual_clipped(
    low: Coefficient = 0.2, high: Coefficient | None = None, cap: float = 3.0
) -> Surrogate:
    """`clipped`, and where A < 0 never below cap * A: no slope for u > cap (1912.09729).

    Args:
      low: as in `clipped`.
      high: as in `clipped`.
      cap: above 1.
    """
    checks.number('low', low, 0, 1)
    checks.number('cap', cap, 1 + 1e-6)
    top = low if high is None else checks.number('high', high, 0)

    def surrogate(log_ratio: Array, advantages: Array) -> Array:
        u = masked.bounded_exp(log_ratio)
        objective = _clipped(u, advantages, low, top)
        return jnp.where((advantages < 0) & (u > cap), cap * advantages, objective)

    return surrogate


@checks.factory('surrogate')
def soft_gated(tau_positive: Coefficient = 1.0, tau_negative: Coefficient = 1.05) -> Surrogate:
    """4/tau sigmoid(tau (u-1)) A, tau by the sign of A (SAPO 2511.20347).

    Slope in u: sech^2(tau/2 (u-1)) A. A = 0 counts as negative.
    """
    checks.number('tau_positive', tau_positive, 1e-6)
    checks.number('tau_negative', tau_negative, 1e-6)

    def surrogate(log_ratio: Array, advantages: Array) -> Array:
        tau = jnp.where(advantages > 0, tau_positive, tau_negative).astype(log_ratio.dtype)
        return 4 / tau * _sigmoid(tau * masked.bounded_expm1(log_ratio)) * advantages

    return surrogate


@checks.factory('surrogate')
def truncated_weight(cap: Coefficient = 5.0) -> Surrogate:
    """sg[min(u, cap)] A log_ratio: REINFORCE with a truncated weight (CISPO 2506.13585).

    Every token keeps its gradient; only the weight is bounded.
    """
    checks.number('cap', cap, 0)

    def surrogate(log_ratio: Array, advantages: Array) -> Array:
        weight = jax.lax.stop_gradient(jnp.minimum(masked.bounded_exp(log_ratio), cap))
        return weight * advantages * log_ratio

    return surrogate


@checks.factory('surrogate')
def masked_weight(low: Coefficient = 0.2, high: Coefficient | None = None) -> Surrogate:
    """sg[M u] A log_ratio, M = 0 where `clipped` has no slope: the form of the ablation grid.

    The gradient is that of `clipped`; the value is not.

    Args:
      low: as in `clipped`.
      high: as in `clipped`.
    """
    checks.number('low', low, 0, 1)
    top = low if high is None else checks.number('high', high, 0)

    def surrogate(log_ratio: Array, advantages: Array) -> Array:
        u = masked.bounded_exp(log_ratio)
        weight = jnp.where(masked.clip_stops(u, advantages, low, top), 0, u)
        return jax.lax.stop_gradient(weight) * advantages * log_ratio

    return surrogate
