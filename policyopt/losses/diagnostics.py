"""What a batch says about itself: ratios, KL estimates, entropy, effective sample size, drift.

Pure functions LossInputs -> Metrics. Every metric adds over microbatches and devices: `Mean`,
`Histogram` (integer counts, exactly) and `EffectiveSampleSize` (log sums, to rounding). All-zero
leaves are the neutral element of each. Off-mask values, NaN included, matter to none; a token of
the mask that is not finite is counted in `ratio/nonfinite` and shows in the means. Nothing here
carries a gradient.

Symbols: l = logp_new - logp_old of a taken token, w = exp(l), rows i with n_i masked tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt.masked import (
    EXTREME,
    bounded_exp,
    count,
    exp_excess,
    row_mean,
    row_sum,
    safe_divide,
    select,
)
from policyopt.types import Array, LossInputs, Mean, Metrics, require, struct

_PER_OCTAVE = 16  # bins between two powers of 2, equally wide
_LOW, _HIGH = -20, 7  # the bins of a side cover 2^-20 = 9.5e-7 to 2^7 = 128
_SIDE = _PER_OCTAVE * (_HIGH - _LOW)


def _edges() -> np.ndarray:
    k = np.arange(_SIDE + 1)
    return 2.0 ** (_LOW + k // _PER_OCTAVE) * (1 + (k % _PER_OCTAVE) / _PER_OCTAVE)


_POSITIVE = _edges()
# Bin k holds EDGES[k-1] <= x < EDGES[k] above 0 and the mirror image below.
EDGES = np.concatenate([-_POSITIVE[::-1], _POSITIVE])
_MIDDLES = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2
CENTRES = np.concatenate([[-(2.0**_HIGH)], -_MIDDLES[::-1], [0.0], _MIDDLES, [2.0**_HIGH]])
RESOLUTION = 0.5 / _PER_OCTAVE  # relative, of a value in its bin; 2^-20 absolute about 0


@struct
class Histogram:
    """Counts of log-ratios (nats) over fixed bins that are symmetric about 0 and add exactly.

    16 bins an octave from 2^-20 to 128 on each side, a zero bin |x| < 2^-20 and an overflow bin on
    each side (NaN counts in the upper one): 867 in all, `EDGES` between them. A bin reads as its
    centre, which is within 1/32 of each of its values relative, or 2^-20 absolute in the zero bin;
    the overflow bins read as +-128. Bins follow from the bits of the float32 value, so that counts
    depend on nothing but the values.

    Attributes:
      counts: [867] int32; exact up to 2^31 values.
    """

    counts: Array

    @classmethod
    def of(cls, x: Array, mask: Array) -> Histogram:
        """Counts of x where mask is nonzero; arrays of one shape."""
        chex.assert_equal_shape([x, mask])
        x = select(mask, x).astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
        # The exponent and the first 4 bits of the fraction number the bins.
        place = (bits >> 19) - (127 + _LOW) * _PER_OCTAVE
        place = jnp.clip(place + 1, 0, _SIDE + 1)
        index = _SIDE + 1 + jnp.where(x < 0, -place, place)
        index = jnp.where(mask != 0, index, CENTRES.size)  # out of range: dropped
        counts = jnp.zeros(CENTRES.size, jnp.int32).at[index.ravel()].add(1, mode='drop')
        return cls(counts=counts)

    @property
    def count(self) -> Array:
        """How many values there are, int32."""
        return jnp.sum(self.counts)

    def quantile(self, q: Any) -> Array:
        """Quantile as np.quantile (linear) has it, of values replaced by their bins' centres.

        It is off by at most 1/32 of the larger of the two neighbouring order statistics, plus
        2^-20, while these are below 128 and fewer than 2^24 values are counted; 0 with none.

        Args:
          q: share in [0, 1], scalar or array.
        """
        ends = jnp.cumsum(self.counts)
        last = jnp.maximum(ends[-1] - 1, 0)
        place = jnp.asarray(q, jnp.float32) * last.astype(jnp.float32)
        below = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, last)
        part = jnp.clip(place - below.astype(jnp.float32), 0, 1)
        low, high = self._ordered(ends, below), self._ordered(ends, jnp.minimum(below + 1, last))
        return jnp.where(ends[-1] > 0, low + part * (high - low), 0)

    @property
    def maximum(self) -> Array:
        """Largest value, as its bin's centre; 128 says 128 or more. 0 with no values."""
        ends = jnp.cumsum(self.counts)
        return jnp.where(ends[-1] > 0, self._ordered(ends, ends[-1] - 1), 0)

    @property
    def minimum(self) -> Array:
        """Smallest value, as its bin's centre; -128 says -128 or less. 0 with no values."""
        ends = jnp.cumsum(self.counts)
        return jnp.where(ends[-1] > 0, self._ordered(ends, jnp.zeros_like(ends[-1])), 0)

    @staticmethod
    def _ordered(ends: Array, rank: Array) -> Array:
        index = jnp.searchsorted(ends, rank, side='right')
        return jnp.asarray(CENTRES, jnp.float32)[jnp.minimum(index, CENTRES.size - 1)]

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(counts=self.counts + other.counts)


@struct
class EffectiveSampleSize:
    """(sum w)^2 / (n sum w^2) of importance weights, held as log sums so that none overflows.

    1 where all weights are equal, 1/n where one outweighs all others (Kish's design effect). The
    value inherits the rounding of the log sums: about 1e-7 of their size.

    Attributes:
      log_sum: scalar, log sum w; 0 where count is 0.
      log_sum_square: scalar, log sum w^2; 0 where count is 0.
      count: scalar, n.
    """

    log_sum: Array
    log_sum_square: Array
    count: Array

    @classmethod
    def of(cls, log_weight: Array, mask: Array) -> EffectiveSampleSize:
        """Of exp(log_weight) where mask is nonzero; arrays of one shape."""
        chex.assert_equal_shape([log_weight, mask])
        n = count(mask, axis=None).astype(log_weight.dtype)
        log_weight = jnp.where(mask != 0, log_weight, -jnp.inf)
        first, second = (jax.nn.logsumexp(k * log_weight) for k in (1, 2))
        return cls(
            log_sum=jnp.where(n > 0, first, 0),
            log_sum_square=jnp.where(n > 0, second, 0),
            count=n,
        )

    @property
    def value(self) -> Array:
        """The share of the sample that is effective, in [1/n, 1]; 0 where count is 0."""
        n = jnp.maximum(self.count, 1)
        share = jnp.exp(2 * self.log_sum - self.log_sum_square - jnp.log(n))
        return jnp.where(self.count > 0, jnp.minimum(share, 1), 0)

    def __add__(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        n = self.count + other.count

        def together(a: Array, b: Array) -> Array:
            a = jnp.where(self.count > 0, a, -jnp.inf)
            b = jnp.where(other.count > 0, b, -jnp.inf)
            return jnp.where(n > 0, jnp.logaddexp(a, b), 0)

        return EffectiveSampleSize(
            log_sum=together(self.log_sum, other.log_sum),
            log_sum_square=together(self.log_sum_square, other.log_sum_square),
            count=n,
        )


def kl_estimates(logp: Array, logp_other: Array, mask: Array, log_weight: Any = None) -> Metrics:
    """Estimates of KL(p||q) from tokens drawn from p, with d = log p - log q of the taken token.

    k1 = d has expectation KL(p||q) but either sign; k3 = exp(-d) - 1 + d has the same expectation
    and is never negative; k2 = d^2 / 2 agrees with it to second order in d only. For tokens drawn
    from another policy b these hold with `log_weight = log p - log b`, whose exp multiplies each.

    Args:
      logp: [B,T] float, log p of the taken tokens.
      logp_other: [B,T] float, log q.
      mask: [B,T].
      log_weight: [B,T] float, or None where the tokens were drawn from p.

    Returns:
      {'k1', 'k2', 'k3'}: token means, in nats.
    """
    chex.assert_equal_shape([logp, logp_other, mask])
    d = select(mask, logp - logp_other)
    weight = 1 if log_weight is None else bounded_exp(select(mask, log_weight))
    estimates = {'k1': d, 'k2': d**2 / 2, 'k3': exp_excess(-d)}
    return {name: Mean.of(weight * value, mask) for name, value in estimates.items()}


def within_row_variance(log_ratio: Array, mask: Array) -> Mean:
    """Mean over rows of the sample variance (ddof 1) of exp(log_ratio) over the row's tokens.

    Rows with fewer than two tokens have none and are not counted. Ratios above exp(20) enter as
    exp(20), so that squares stay finite; `ratio/extreme` counts them.

    Args:
      log_ratio: [B,T] float.
      mask: [B,T].
    """
    chex.assert_equal_shape([log_ratio, mask])
    excess = jnp.expm1(jnp.minimum(select(mask, log_ratio), EXTREME))  # w - 1, exact about w = 1
    n = count(mask).astype(log_ratio.dtype)
    off = excess - row_mean(excess, mask)[:, None]
    return Mean.of(safe_divide(row_sum(off**2, mask), n - 1), n > 1)


def ratio_statistics(inputs: LossInputs) -> Metrics:
    """Statistics of l and w = exp(l), new over old.

    `ratio/mean` of w over tokens (1 in expectation for tokens drawn from old), `ratio/token_log`
    the Histogram of l, `ratio/sequence_log` that of a row's mean of l (the log of GSPO's s_i),
    `ratio/extreme` the share of tokens with |l| >= 20, `ratio/nonfinite` the share where l is NaN
    or infinite, `ratio/row_variance` as `within_row_variance` has it.
    """
    inputs = _prepare(inputs)
    mask, log_ratio = inputs.mask, inputs.logp_new - inputs.logp_old
    return {
        'ratio/mean': Mean.of(bounded_exp(log_ratio), mask),
        'ratio/token_log': Histogram.of(log_ratio, mask),
        'ratio/sequence_log': Histogram.of(row_mean(log_ratio, mask), _rows(mask)),
        'ratio/extreme': Mean.of(_as(jnp.abs(log_ratio) >= EXTREME, log_ratio), mask),
        'ratio/nonfinite': Mean.of(_as(~jnp.isfinite(log_ratio), log_ratio), mask),
        'ratio/row_variance': within_row_variance(log_ratio, mask),
    }


def kl_to_old(inputs: LossInputs) -> Metrics:
    """`kl_old/k1..k3`, KL(old||new): exact in expectation for tokens drawn from old."""
    inputs = _prepare(inputs)
    found = kl_estimates(inputs.logp_old, inputs.logp_new, inputs.mask)
    return {f'kl_old/{name}': mean for name, mean in found.items()}


def kl_to_behavior(inputs: LossInputs) -> Metrics:
    """`kl_behavior/k1..k3`, KL(behaviour||new): exact in expectation, tokens being the sampler's.

    Raises MissingInput without `logp_behavior`.
    """
    inputs = _prepare(inputs)
    behavior = require(inputs, 'logp_behavior', 'kl_to_behavior')
    found = kl_estimates(behavior, inputs.logp_new, inputs.mask)
    return {f'kl_behavior/{name}': mean for name, mean in found.items()}


def kl_to_reference(inputs: LossInputs) -> Metrics:
    """`kl_reference/k1..k3`, KL(new||reference), unweighted: exact in expectation on-policy.

    For tokens drawn from an older policy they are off by the drift since; `kl_estimates` with
    `log_weight = logp_new - logp_old` is not, at the price of the weights' variance. Raises
    MissingInput without `logp_ref`.
    """
    inputs = _prepare(inputs)
    reference = require(inputs, 'logp_ref', 'kl_to_reference')
    found = kl_estimates(inputs.logp_new, reference, inputs.mask)
    return {f'kl_reference/{name}': mean for name, mean in found.items()}


def entropy(inputs: LossInputs) -> Metrics:
    """`entropy`: token mean of the policy's entropy in nats. Raises MissingInput without it."""
    inputs = _prepare(inputs)
    return {'entropy': Mean.of(require(inputs, 'entropy', 'entropy'), inputs.mask)}


def effective_sample_size(inputs: LossInputs) -> Metrics:
    """`ess_old/token` of the tokens' w, `ess_old/sequence` of the rows' product of w.

    `ess_behavior/...` are the same against the sampler, where `logp_behavior` is present.
    """
    inputs = _prepare(inputs)
    bases = {'ess_old': inputs.logp_old, 'ess_behavior': inputs.logp_behavior}
    metrics = {}
    for name, base in bases.items():
        if base is not None:
            log_ratio = inputs.logp_new - base
            rows = row_sum(log_ratio, inputs.mask)
            metrics[f'{name}/token'] = EffectiveSampleSize.of(log_ratio, inputs.mask)
            metrics[f'{name}/sequence'] = EffectiveSampleSize.of(rows, _rows(inputs.mask))
    return metrics


def drift(inputs: LossInputs) -> Metrics:
    """`drift/mean` and Histogram `drift/rows` of mean_t(logp_behavior - logp_new) per row.

    It is what DeepSeek-V3.2's off-policy mask compares with its delta (arXiv:2512.02556). Raises
    MissingInput without `logp_behavior`.
    """
    inputs = _prepare(inputs)
    behavior = require(inputs, 'logp_behavior', 'drift')
    rows = row_mean(behavior - inputs.logp_new, inputs.mask)
    counted = _rows(inputs.mask)
    return {'drift/mean': Mean.of(rows, counted), 'drift/rows': Histogram.of(rows, counted)}


def diagnose(inputs: LossInputs) -> Metrics:
    """All the diagnostics above that the present inputs allow; carries no gradient.

    Args:
      inputs: arrays [B,T]; below float32 they are raised to it.

    Returns:
      name -> Mean, Histogram or EffectiveSampleSize. The names depend on which inputs are None, on
      no value.
    """
    chex.assert_rank(inputs.logp_new, 2)
    parts = [ratio_statistics, kl_to_old, effective_sample_size]
    if inputs.logp_behavior is not None:
        parts += [kl_to_behavior, drift]
    if inputs.logp_ref is not None:
        parts.append(kl_to_reference)
    if inputs.entropy is not None:
        parts.append(entropy)
    metrics: Metrics = {}
    for part in parts:
        metrics |= part(inputs)
    return metrics


def _prepare(inputs: LossInputs) -> LossInputs:
    """Mask as bool; per-token inputs detached, at least float32 and 0 off-mask."""
    mask = jnp.asarray(inputs.mask) != 0
    changes: dict[str, Any] = {'mask': mask}
    for name in ('logp_new', 'logp_old', 'logp_behavior', 'logp_ref', 'entropy'):
        value = getattr(inputs, name)
        if value is not None:
            chex.assert_equal_shape([value, mask])
            value = jnp.asarray(value, jnp.promote_types(jnp.result_type(value), jnp.float32))
            changes[name] = jax.lax.stop_gradient(select(mask, value))
    return dataclasses.replace(inputs, **changes)


def _rows(mask: Array) -> Array:
    """Rows with a token in the mask: [B] bool."""
    return jnp.any(mask, axis=-1)


def _as(flags: Array, like: Array) -> Array:
    return flags.astype(like.dtype)
