"""Masked, segment and group reductions: NaN-safe, on arrays of shape [B,T] and [B].

Beside them stand the scalar functions that loss parts and diagnostics share.

A mask multiplication never removes a NaN, so everything here selects with `where` first. `mask`
may be bool, integer or floating; nonzero means "counts".
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt.types import Array

# exp above this many nats is continued by its tangent: values and gradients of any log-ratio that
# training can meet stay finite in float32, and no gradient is silently cut to zero.
LOG_BOUND = 60.0
EXTREME = 20.0  # nats; a ratio beyond exp(+-20) says only that two policies no longer agree


def bounded_exp(x: Array) -> Array:
    """exp(x) for x <= 60; above, the tangent line there, so that gradients stay finite and > 0."""
    # `where`, not a product of both branches: a backward pass would meet inf * 0 in the latter.
    inside = jnp.exp(jnp.minimum(x, LOG_BOUND))
    return jnp.where(x > LOG_BOUND, jnp.exp(LOG_BOUND) * (1 + x - LOG_BOUND), inside)


def bounded_expm1(x: Array) -> Array:
    """bounded_exp(x) - 1 without the cancellation near 0."""
    inside = jnp.expm1(jnp.minimum(x, LOG_BOUND))
    return jnp.where(x > LOG_BOUND, jnp.exp(LOG_BOUND) * (1 + x - LOG_BOUND), inside)


def exp_excess(x: Array) -> Array:
    """exp(x) - 1 - x, at least 0, accurate about 0 and bounded as `bounded_exp` is."""
    tiny = jnp.abs(x) < 0.02  # there expm1(x) - x cancels; the series is off by 1e-14
    small = jnp.where(tiny, x, 0)
    series = 1 + small / 3 * (1 + small / 4 * (1 + small / 5 * (1 + small / 6 * (1 + small / 7))))
    return jnp.where(tiny, small**2 / 2 * series, bounded_expm1(x) - x)


def select(mask: Array, x: Array) -> Array:
    """x where mask is nonzero, 0 elsewhere; NaN elsewhere matters to neither value nor gradient."""
    return jnp.where(mask != 0, x, jnp.zeros((), x.dtype))


def safe_divide(x: Array, n: Array) -> Array:
    """x / n, and 0 where n is 0."""
    return jnp.where(n > 0, x / jnp.where(n > 0, n, 1), 0)


def clip_stops(ratio: Array, advantages: Array, low: float | Array, high: float | Array) -> Array:
    """Where a clipped surrogate has no slope: bool, elementwise.

    (A > 0 and ratio > 1 + high) or (A < 0 and ratio < 1 - low): only a move that already went too
    far in the rewarded direction stops.
    """
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))


def count(mask: Array, axis: int | None = -1) -> Array:
    """Nonzero entries of mask along axis, as a float."""
    return jnp.sum(mask != 0, axis=axis, dtype=jnp.result_type(float))


def row_sum(x: Array, mask: Array) -> Array:
    """Sum over the masked tokens of each row: [B,T] -> [B]."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(select(mask, x), axis=-1)


def row_mean(x: Array, mask: Array) -> Array:
    """Mean over the masked tokens of each row, 0 for an empty row: [B,T] -> [B]."""
    return safe_divide(row_sum(x, mask), count(mask).astype(x.dtype))


def position_bins(mask: Array, bins: int) -> Array:
    """How far into its row's masked tokens each of them is: [B,T] int32, 0 to bins - 1, -1 off it.

    Of n tokens the i-th, from 0, is in bin floor(i bins / n); tokens off the mask take no place. A
    row with fewer tokens than bins leaves some of them empty.
    """
    chex.assert_rank(mask, 2)
    keep = mask != 0
    rank = jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - 1
    n = jnp.maximum(jnp.sum(keep, axis=-1, keepdims=True, dtype=jnp.int32), 1)
    return jnp.where(keep, rank * bins // n, -1)


def _rows(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def group_index(group: Array) -> Array:
    """Group ids of any value and order as 0..n-1: [B] -> [B] int32."""
    chex.assert_rank(group, 1)
    if isinstance(group, np.ndarray):  # 64-bit ids are told apart here, where jax would wrap them
        return jnp.asarray(np.unique(group, return_inverse=True)[1], jnp.int32)
    return jnp.unique(group, size=group.size, return_inverse=True)[1].reshape(group.shape)


def group_sum(x: Array, keep: Array, group: Array) -> Array:
    """Sum of the kept entries of each row's group: x, keep [B] or [B,T], group [B] -> [B]."""
    chex.assert_equal_shape([x, keep])
    index = group_index(group)
    rows = jnp.sum(_rows(select(keep, x)), axis=-1)
    return jax.ops.segment_sum(rows, index, num_segments=group.size)[index]


def group_mean(x: Array, keep: Array, group: Array) -> Array:
    """Mean of the kept entries of each row's group, 0 where none is kept; shapes of group_sum."""
    return safe_divide(group_sum(x, keep, group), group_sum(jnp.ones_like(x), keep, group))


def group_std(x: Array, keep: Array, group: Array, ddof: int = 1) -> Array:
    """Standard deviation of the kept entries of each row's group; shapes of group_sum.

    Exactly 0 where the kept entries are all equal (judged by maximum and minimum, since the mean of
    equal floats need not equal them) and where `ddof` or fewer are kept.
    """
    n = group_sum(jnp.ones_like(x), keep, group)
    mean = group_mean(x, keep, group).reshape((-1,) + (1,) * (x.ndim - 1))
    squares = group_sum(jnp.square(select(keep, x - mean)), keep, group)
    std = jnp.sqrt(safe_divide(squares, n - ddof))
    return jnp.where(group_all_equal(x, keep, group), 0, std)


def group_all_equal(x: Array, keep: Array, group: Array) -> Array:
    """Whether the kept entries of each row's group are one and the same number; -> [B] bool."""
    chex.assert_equal_shape([x, keep])
    index = group_index(group)
    high = jnp.max(_rows(jnp.where(keep != 0, x, -jnp.inf)), axis=-1)
    low = jnp.min(_rows(jnp.where(keep != 0, x, jnp.inf)), axis=-1)
    high = jax.ops.segment_max(high, index, num_segments=group.size)
    low = jax.ops.segment_min(low, index, num_segments=group.size)
    return (high <= low)[index]


def _segment_ranks(segment: Array) -> Array:
    """Segment ids of one row, of any value and order, as 0..n-1: [T] -> [T]."""
    order = jnp.argsort(segment, stable=True)
    ordered = segment[order]
    starts = jnp.diff(ordered, prepend=ordered[:1]) != 0
    return jnp.zeros_like(order).at[order].set(jnp.cumsum(starts, dtype=order.dtype))


def segment_sum(x: Array, mask: Array, segment: Array) -> Array:
    """For each token, the sum over masked tokens of its row's segment: [B,T] -> [B,T].

    Only equality of ids within a row matters. Rows stay apart, so a sharded batch moves nothing.
    """
    chex.assert_equal_shape([x, mask, segment])
    chex.assert_rank(segment, 2)

    def row(values: Array, ids: Array) -> Array:
        ranks = _segment_ranks(ids)
        return jax.ops.segment_sum(values, ranks, num_segments=values.size)[ranks]

    return jax.vmap(row)(select(mask, x), segment)


def segment_mean(x: Array, mask: Array, segment: Array) -> Array:
    """For each token, the mean over masked tokens of its row's segment, 0 for an empty one."""
    n = segment_sum(jnp.ones_like(x), mask, segment)
    return safe_divide(segment_sum(x, mask, segment), n)
