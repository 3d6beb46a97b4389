"""Matmuls of rows sorted by group, each group with its own matrix; dropless, by backend name.

    y[s] = x[s] @ w[group of s]

'blocked' walks the groups in blocks of rows with a loop over the blocks that hold rows, forward and
backward; it is the fast one on CPU. 'ragged' is `jax.lax.ragged_dot`, which TPU and GPU compile to
grouped kernels (on CPU it multiplies every row with every matrix).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from policyopt.types import Array

BACKENDS = ('blocked', 'ragged')
MAX_BLOCK = 128


class Layout(NamedTuple):
    """Entries sorted by group, as rows of a buffer.

    Attributes:
      source: [S] int32, the entry that each row holds; -1 for rows that hold none.
      row: [M] int32, the row that holds each entry; -1 for entries without a group.
      sizes: [G] int32, rows per group; group g starts where group g - 1 ends.
    """

    source: Array
    row: Array
    sizes: Array


def default_backend() -> str:
    """'blocked' on CPU, 'ragged' elsewhere, by the platform jax runs on by default."""
    return 'blocked' if jax.default_backend() == 'cpu' else 'ragged'


def block_rows(entries: int, groups: int) -> int:
    """Rows per block: a power of two from 8 to 128, about the mean group size at most."""
    mean = max(entries // max(groups, 1), 1)
    return int(min(max(1 << (mean - 1).bit_length(), 8), MAX_BLOCK))


def sort_by_group(ids: Array, groups: int, slack: int) -> Layout:
    """Lay out entries with group ids [M] by group; ids outside 0..groups-1 get no row.

    The buffer has M + slack rows. The order within a group is that of the entries.
    """
    chex.assert_rank(ids, 1)
    entries = ids.shape[0]
    known = (ids >= 0) & (ids < groups)
    key = jnp.where(known, ids, groups).astype(jnp.int32)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    sizes = jnp.sum(key[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)
    used = jnp.arange(entries) < jnp.sum(sizes)
    row = (
        jnp.zeros(entries, jnp.int32)
        .at[order]
        .set(jnp.where(used, jnp.arange(entries, dtype=jnp.int32), -1), unique_indices=True)
    )
    source = jnp.pad(jnp.where(used, order, -1), (0, slack), constant_values=-1)
    return Layout(source, row, sizes)


def _rows(x: Array, index: Array) -> Array:
    return jnp.where((index >= 0)[:, None], x[jnp.maximum(index, 0)], 0)


@jax.custom_vjp
def take_rows(x: Array, index: Array, inverse: Array) -> Array:
    """x[index], 0 where index is -1: [R,D] -> [S,D], with gathers in the backward pass as well.

    inverse [R,c] names for each row of x the rows of the result that hold it, -1 for none; the
    gradient of a row is the sum over them. Nothing is scattered.
    """
    del inverse
    return _rows(x, index)


def _take_rows_forward(x, index, inverse):
    return _rows(x, index), inverse


def _take_rows_backward(inverse, grad):
    total = _rows(grad, inverse[:, 0])
    for column in range(1, inverse.shape[1]):
        total = total + _rows(grad, inverse[:, column])
    return total, None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


class _Blocks(NamedTuple):
    """Blocks of rows that hold any: expert and first row of each, and how many there are."""

    expert: Array
    start: Array
    used: Array


def _blocks(sizes: Array, rows: int, block: int) -> _Blocks:
    ends = jnp.cumsum(-(-sizes // block))
    index = jnp.arange(rows // block + sizes.shape[0])
    expert = jnp.minimum(jnp.searchsorted(ends, index, side='right'), sizes.shape[0] - 1)
    first = jnp.cumsum(sizes) - sizes
    nth = index - (ends - (-(-sizes // block)))[expert]
    return _Blocks(
        expert.astype(jnp.int32), (first[expert] + nth * block).astype(jnp.int32), ends[-1]
    )


def _dot(a, b, contract, precision):
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=wide
    )


def _block_product(x, w, sizes, block, precision, transpose):
    """x[s] @ w[g] or x[s] @ w[g].T for every row.

    A block that reaches past its group writes into the rows of the next one, which comes later and
    writes its own.
    """
    blocks = _blocks(sizes, x.shape[0], block)
    axis = 1 if transpose else 0

    def body(i, y):
        rows = jax.lax.dynamic_slice_in_dim(x, blocks.start[i], block)
        out = _dot(rows, w[blocks.expert[i]], ((1,), (axis,)), precision)
        return jax.lax.dynamic_update_slice_in_dim(y, out.astype(y.dtype), blocks.start[i], 0)

    y = jnp.zeros((x.shape[0], w.shape[1 if transpose else 2]), x.dtype)
    return jax.lax.fori_loop(0, blocks.used, body, y)


def _block_weight_gradient(x, grad, sizes, block, precision, dtype):
    """dw[g] = sum over rows of group g of the outer product of x and grad."""
    first = jnp.cumsum(sizes) - sizes
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def group(g, dw):
        def body(i, total):
            start = first[g] + i * block
            keep = jnp.arange(block) < sizes[g] - i * block
            rows = jax.lax.dynamic_slice_in_dim(x, start, block)
            rows = jnp.where(keep[:, None], rows, 0)
            columns = jax.lax.dynamic_slice_in_dim(grad, start, block)
            return total + _dot(rows, columns, ((0,), (0,)), precision)

        zero = jnp.zeros((x.shape[1], grad.shape[1]), wide)
        total = jax.lax.fori_loop(0, -(-sizes[g] // block), body, zero)
        return jax.lax.dynamic_update_index_in_dim(dw, total.astype(dtype), g, 0)

    dw = jnp.zeros((sizes.shape[0], x.shape[1], grad.shape[1]), dtype)
    return jax.lax.fori_loop(0, sizes.shape[0], group, dw)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _blocked(x, w, sizes, block, precision):
    return _block_product(x, w, sizes, block, precision, transpose=False)


def _blocked_forward(x, w, sizes, block, precision):
    return _blocked(x, w, sizes, block, precision), (x, w, sizes)


def _blocked_backward(block, precision, saved, grad):
    x, w, sizes = saved
    dx = _block_product(grad, w, sizes, block, precision, transpose=True)
    dw = _block_weight_gradient(x, grad, sizes, block, precision, w.dtype)
    return dx, dw, None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def grouped_matmul(
    x: Array, w: Array, sizes: Array, *, backend: str, block: int, precision: Any
) -> Array:
    """x [S,D] sorted by group, w [G,D,F], sizes [G] int32 -> [S,F] in x's dtype.

    Products add up in float32 at least. Rows past the last group must be 0, and 'blocked' needs
    `block` of them; what the result holds there is unspecified, and finite.
    """
    chex.assert_rank([x, w, sizes], [2, 3, 1])
    chex.assert_equal(x.dtype, w.dtype)
    if backend == 'blocked':
        return _blocked(x, w, sizes, block, precision)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jax.lax.ragged_dot(x, w, sizes, precision=precision, preferred_element_type=wide)
    return y.astype(x.dtype)
