"""Ratio slot: LossInputs -> log-ratio [B,T], zero off-mask.

With l_t = logp_new - logp_old, n the policy tokens of a row and sg the stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from policyopt import checks, masked
from policyopt.types import Array, LossInputs, require

Ratio = Callable[[LossInputs], Array]


def _token_log_ratio(inputs: LossInputs) -> Array:
    return masked.select(inputs.mask, inputs.logp_new - inputs.logp_old)


def _spread(rows: Array, inputs: LossInputs) -> Array:
    return masked.select(inputs.mask, jnp.broadcast_to(rows[:, None], inputs.mask.shape))


def _straight_through(log_ratio: Array, inputs: LossInputs) -> Array:
    """sg[log_ratio] in value, the token's own log-prob in gradient."""
    own = inputs.logp_new - jax.lax.stop_gradient(inputs.logp_new)
    return masked.select(inputs.mask, jax.lax.stop_gradient(log_ratio) + own)


@checks.factory('ratio')
def token_ratio() -> Ratio:
    """l_t: one ratio per token (PPO 1707.06347, GRPO 2402.03300)."""
    return lambda inputs: _token_log_ratio(inputs)


@checks.factory('ratio')
def behavior_ratio() -> Ratio:
    """logp_new - logp_behavior per token: the ratio to the sampler (MiniRL 2512.01374)."""

    def ratio(inputs: LossInputs) -> Array:
        behavior = require(inputs, 'logp_behavior', 'behavior_ratio')
        return masked.select(inputs.mask, inputs.logp_new - behavior)

    return ratio


@checks.factory('ratio')
def sequence_ratio() -> Ratio:
    """mean_t l_t at every token of the row: log of the geometric mean (GSPO 2507.18071)."""

    def ratio(inputs: LossInputs) -> Array:
        return _spread(masked.row_mean(_token_log_ratio(inputs), inputs.mask), inputs)

    return ratio


@checks.factory('ratio')
def sequence_token_ratio() -> Ratio:
    """sg[mean_t l_t] + logp_new - sg[logp_new]: the row's value, the token's gradient.

    GSPO-token (2507.18071): allows one advantage per token.
    """
    sequence = sequence_ratio()
    return lambda inputs: _straight_through(sequence(inputs), inputs)


@checks.factory('ratio')
def segment_ratio(per_token: bool = False) -> Ratio:
    """Mean of l_t over the token's segment: turns or reasoning steps, from `inputs.segment`.

    One segment per row is `sequence_ratio`; one token per segment is `token_ratio`.

    Args:
      per_token: as in `sequence_token_ratio`, the segment's value with the token's own gradient.
    """

    def ratio(inputs: LossInputs) -> Array:
        segment = require(inputs, 'segment', 'segment_ratio')
        log_ratio = masked.segment_mean(_token_log_ratio(inputs), inputs.mask, segment)
        if per_token:
            return _straight_through(log_ratio, inputs)
        return masked.select(inputs.mask, log_ratio)

    return ratio


@checks.factory('ratio')
def unnormalised_sequence_ratio() -> Ratio:
    """sum_t l_t at every token of the row: the true importance weight of the row.

    The sum is clipped to +-20 nats before exp, without gradient beyond; the metric `extreme`
    counts such tokens.
    """

    def ratio(inputs: LossInputs) -> Array:
        total = masked.row_sum(_token_log_ratio(inputs), inputs.mask)
        return _spread(jnp.clip(total, -masked.EXTREME, masked.EXTREME), inputs)

    return ratio


@checks.factory('ratio')
def arithmetic_mean_ratio() -> Ratio:
    """log mean_t exp(l_t) at every token of the row.

    Not GSPO's ratio: a form in circulation that lost the logarithm. Kept as an ablation.
    """

    def ratio(inputs: LossInputs) -> Array:
        log_ratio = jnp.where(inputs.mask != 0, _token_log_ratio(inputs), -jnp.inf)
        # An empty row has nothing to sum: give logsumexp one finite entry, and drop the row after.
        n = masked.count(inputs.mask).astype(log_ratio.dtype)
        log_ratio = jnp.where((n > 0)[:, None], log_ratio, 0)
        mean = jax.nn.logsumexp(log_ratio, axis=-1) - jnp.log(jnp.maximum(n, 1))
        return _spread(mean, inputs)

    return ratio


@checks.factory('ratio')
def clipped_sequence_ratio(clip: float = 0.4) -> Ratio:
    """mean_t of l_t cut to +clip where A_t > 0 and to -clip where A_t < 0 (GMPO 2507.20673).

    Only the side that would over-reward is cut, inside the mean; a cut token has no gradient.
    """
    checks.number('clip', clip, low=0)

    def ratio(inputs: LossInputs) -> Array:
        log_ratio = _token_log_ratio(inputs)
        up, down = inputs.advantages > 0, inputs.advantages < 0
        log_ratio = jnp.where(up & (log_ratio > clip), clip, log_ratio)
        log_ratio = jnp.where(down & (log_ratio < -clip), -clip, log_ratio)
        return _spread(masked.row_mean(log_ratio, inputs.mask), inputs)

    return ratio
