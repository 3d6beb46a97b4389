"""Masked, segment and group reductions: NaN-safe, float32, on arrays of shape [B,T] and [B].

A mask multiplication never removes a NaN, so everything here selects with `where` first. `mask`
may be bool, integer or floating; nonzero means "counts".
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from policyopt.types import Array

# exp above this many nats is continued by its tangent: values and gradients of any log-ratio that
# training can meet stay finite in float32, and no gradient is silently cut to zero.
LOG_BOUND = 60.0


def bounded_exp(x: Array) -> Array:
    """exp(x) for x <= 60; above, the tangent line there, so that gradients stay finite and > 0."""
    return jnp.exp(jnp.minimum(x, LOG_BOUND)) * (1 + jnp.maximum(x - LOG_BOUND, 0))


def select(mask: Array, x: Array) -> Array:
    """x where mask is nonzero, 0 elsewhere; NaN elsewhere matters to neither value nor gradient."""
    return jnp.where(mask != 0, x, jnp.zeros((), x.dtype))


def safe_divide(x: Array, n: Array) -> Array:
    """x / n, and 0 where n is 0."""
    return jnp.where(n > 0, x / jnp.where(n > 0, n, 1), 0)


def count(mask: Array, axis: int | None = -1, dtype: jnp.dtype = jnp.float32) -> Array:
    """Nonzero entries of mask along axis, as a float."""
    return jnp.sum(mask != 0, axis=axis, dtype=dtype)


def row_sum(x: Array, mask: Array) -> Array:
    """Sum over the masked tokens of each row: [B,T] -> [B]."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(select(mask, x), axis=-1)


def row_mean(x: Array, mask: Array) -> Array:
    """Mean over the masked tokens of each row, 0 for an empty row: [B,T] -> [B]."""
    return safe_divide(row_sum(x, mask), count(mask, dtype=x.dtype))


def _dense_ids(ids: Array) -> Array:
    """Ids of any value and order as 0..n-1, same shape."""
    _, index = jnp.unique(ids, size=ids.size, return_inverse=True)
    return index.reshape(ids.shape)


def group_sum(x: Array, keep: Array, group: Array) -> Array:
    """For each entry, the sum over entries of its group where keep is nonzero; all [B]."""
    chex.assert_equal_shape([x, keep, group])
    index = _dense_ids(group)
    return jax.ops.segment_sum(select(keep, x), index, num_segments=x.size)[index]


def group_mean(x: Array, keep: Array, group: Array) -> Array:
    """For each entry, the mean over kept entries of its group, 0 where none is kept; all [B]."""
    n = group_sum(jnp.ones_like(x), keep, group)
    return safe_divide(group_sum(x, keep, group), n)


def group_std(x: Array, keep: Array, group: Array, ddof: int = 1) -> Array:
    """For each entry, the standard deviation over kept entries of its group; all [B].

    Exactly 0 where the kept entries are all equal (judged by maximum and minimum, since the mean of
    equal floats need not equal them) and where `ddof` or fewer are kept.
    """
    n = group_sum(jnp.ones_like(x), keep, group)
    centred = x - group_mean(x, keep, group)
    variance = group_sum(jnp.where(keep != 0, centred, 0) ** 2, keep, group)
    std = jnp.sqrt(safe_divide(variance, jnp.maximum(n - ddof, 0)))
    return jnp.where(group_all_equal(x, keep, group), 0, std)


def group_all_equal(x: Array, keep: Array, group: Array) -> Array:
    """For each entry, whether the kept entries of its group are all the same number; [B] bool."""
    index = _dense_ids(group)
    high = jax.ops.segment_max(jnp.where(keep != 0, x, -jnp.inf), index, num_segments=x.size)
    low = jax.ops.segment_min(jnp.where(keep != 0, x, jnp.inf), index, num_segments=x.size)
    return (high <= low)[index]


def segment_ids(segment: Array) -> Array:
    """Per-row segment ids [B,T] as ids unique over the whole batch, 0..B*T-1.

    Only equality within a row matters: each token gets the flat position of the first token of its
    segment in sorted order, by one sort per row.
    """
    chex.assert_rank(segment, 2)
    rows, width = segment.shape
    order = jnp.argsort(segment, axis=-1, stable=True)
    ordered = jnp.take_along_axis(segment, order, axis=-1)
    starts = jnp.concatenate(
        [jnp.zeros((rows, 1), jnp.int32), (ordered[:, 1:] != ordered[:, :-1]).astype(jnp.int32)], 1
    )
    ranks = jnp.cumsum(starts, axis=-1)
    row_index = jnp.arange(rows)[:, None]
    return jnp.zeros((rows, width), jnp.int32).at[row_index, order].set(ranks + row_index * width)


def segment_sum(x: Array, mask: Array, segment: Array) -> Array:
    """For each token, the sum over masked tokens of its row's segment: [B,T] -> [B,T]."""
    chex.assert_equal_shape([x, mask, segment])
    index = segment_ids(segment)
    return jax.ops.segment_sum(select(mask, x).ravel(), index.ravel(), num_segments=x.size)[index]


def segment_mean(x: Array, mask: Array, segment: Array) -> Array:
    """For each token, the mean over masked tokens of its row's segment, 0 for an empty one."""
    n = segment_sum(jnp.ones_like(x), mask, segment)
    return safe_divide(segment_sum(x, mask, segment), n)
