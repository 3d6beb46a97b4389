"""Feed-forward experts on rows sorted by expert: each expert's matrices meet only its own rows.

    y[n] = sum_j weight[n,j] * down_e(silu(gate_e(x[n])) * up_e(x[n])),   e = ids[n,j]

'blocked' loops over the experts that have rows and over blocks of each one's rows, forward and
backward; it is the fast one on CPU. 'ragged' is three `jax.lax.ragged_dot`, which TPU compiles to
grouped kernels. Elsewhere that depends on the version: on CPU, and on GPUs for which XLA finds no
grouped kernel, every row is multiplied with every expert, E times the work and memory; 'blocked'
is then the way out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from policyopt import sharding
from policyopt.types import Array

BACKENDS = ('blocked', 'ragged')
MIN_BLOCK, MAX_BLOCK = 8, 128
WIDE = 4  # times as many rows has a block where an expert fills it
PACKED_LIMIT = 2**31  # key and entry number sort as one int32 below this, 4 to 10 times faster


class Layout(NamedTuple):
    """Entries sorted by expert, as rows of a buffer.

    Attributes:
      source: [S] int32, the entry that each row holds; -1 for rows that hold none.
      row: [M] int32, the row that holds each entry; -1 for entries without an expert.
      sizes: [E] int32, rows per expert; expert e's rows start where expert e - 1's end.
    """

    source: Array
    row: Array
    sizes: Array


def default_backend() -> str:
    """'blocked' on CPU, 'ragged' elsewhere, by the platform of what is being traced."""
    return 'blocked' if sharding.platform() == 'cpu' else 'ragged'


def block_rows(entries: int, experts: int) -> int:
    """Rows per block: a power of two from 8 to 128, no more than the mean group size rounded up."""
    mean = max(entries // max(experts, 1), 1)
    return min(max(1 << (mean - 1).bit_length(), MIN_BLOCK), MAX_BLOCK)


def sort_by_expert(ids: Array, experts: int, slack: int = 0) -> Layout:
    """Lay out entries with expert ids [M] by expert; ids outside 0..experts-1 get no row.

    The buffer has S = M + slack rows. An expert's rows keep the order of the entries.
    """
    chex.assert_rank(ids, 1)
    entries = ids.shape[0]
    index = jnp.arange(entries, dtype=jnp.int32)
    key = jnp.where((ids >= 0) & (ids < experts), ids, experts).astype(jnp.int32)
    if (experts + 1) * entries < PACKED_LIMIT:
        packed = jnp.sort(key * entries + index)
        order, ordered = packed % entries, packed // entries
    else:
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        ordered = key[order]
    ends = jnp.searchsorted(ordered, jnp.arange(experts), side='right').astype(jnp.int32)
    used = index < ends[-1]
    row = (
        jnp.zeros(entries, jnp.int32).at[order].set(jnp.where(used, index, -1), unique_indices=True)
    )
    source = jnp.pad(jnp.where(used, order, -1), (0, slack), constant_values=-1)
    return Layout(source, row, jnp.diff(ends, prepend=0))


def _rows(x: Array, index: Array) -> Array:
    """x[index], 0 where index is -1."""
    picked = jnp.asarray(x).at[jnp.maximum(index, 0)].get(mode='promise_in_bounds')
    return jnp.where((index >= 0)[:, None], picked, 0)


def _sum_rows(x: Array, index: Array) -> Array:
    """sum_c x[index[:, c]] over columns of index [R,c], -1 adding nothing: [S,D] -> [R,D]."""
    total = _rows(x, index[:, 0])
    for column in range(1, index.shape[1]):
        total = total + _rows(x, index[:, column])
    return total


@jax.custom_vjp
def take_rows(x: Array, index: Array, inverse: Array) -> Array:
    """x[index], 0 where index is -1: [R,D] -> [S,D], with gathers in the backward pass as well.

    inverse [R,c] names for each row of x the rows of the result that hold it, -1 for none; the
    gradient of a row is the sum over them. Nothing is scattered.
    """
    del inverse
    return _rows(x, index)


take_rows.defvjp(
    lambda x, index, inverse: (_rows(x, index), inverse),
    lambda inverse, grad: (_sum_rows(grad, inverse), None, None),
)


def _dot(a: Array, b: Array, axes: tuple[int, int], precision: Any) -> Array:
    """Contract axis axes[0] of a with axes[1] of b, adding up in float32 at least."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=precision,
        preferred_element_type=wide,
    )


def _zeros(shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]) -> Array:
    """Zeros that a loop may turn into something that differs over manual mesh axes."""
    return jax.lax.pcast(jnp.zeros(shape, dtype), axes, to='varying')


def _over_blocks(layout: Layout, block: int, enter, body, leave, carry):
    """Fold `body` over the blocks of rows of every expert that has rows, in order of rows.

    enter(expert) -> state; body(rows of a block, expert's constants, first row, rows left, state,
    carry) -> state, carry; leave(expert, state, carry) -> carry. Where groups are large, blocks
    have WIDE * block rows while these are there, which costs less a row, and then `block`, of which
    less is left empty.
    """
    sizes = layout.sizes
    first = jnp.cumsum(sizes) - sizes
    used = jnp.nonzero(sizes, size=sizes.shape[0], fill_value=0)[0]

    def per_expert(i, carry):
        expert = used[i]
        constants, state = enter(expert)
        start, left = first[expert], sizes[expert]

        def blocks(rows, count, start, left, inner):
            def one(b, inner):
                return body(rows, constants, start + b * rows, left - b * rows, *inner)

            return jax.lax.fori_loop(0, count, one, inner)

        inner = state, carry
        if block == MAX_BLOCK and layout.source.shape[0] >= WIDE * block:
            full = left // (WIDE * block)
            inner = blocks(WIDE * block, full, start, left, inner)
            start, left = start + full * WIDE * block, left - full * WIDE * block
        state, carry = blocks(block, (left + block - 1) // block, start, left, inner)
        return leave(expert, state, carry)

    return jax.lax.fori_loop(0, jnp.sum(sizes > 0), per_expert, carry)


_update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)


def _hidden(rows, gate_up, low, precision):
    """Pre-activations of a block in float32 at least: gate and up projections."""
    g, u = jnp.split(_dot(rows, gate_up, (1, 0), precision), 2, axis=1)
    return _plus(g, rows, low, 'gate', precision), _plus(u, rows, low, 'up', precision)


def _plus(y, rows, low, name, precision):
    """A projection of a block of rows, and what the expert's adapter adds, if it has one."""
    if name not in low:
        return y
    inner = _dot(rows, low[name]['a'], (1, 0), precision).astype(rows.dtype)
    return y + _dot(inner, low[name]['b'], (1, 0), precision)


def _low_backward(rows, low, name, dout, precision):
    """Gradients of what an adapter adds: those of a and b, and of the rows."""
    a, b = low[name]['a'], low[name]['b']
    inner = _dot(rows, a, (1, 0), precision).astype(rows.dtype)
    dinner = _dot(dout, b, (1, 1), precision).astype(rows.dtype)
    da, db = _dot(rows, dinner, (0, 0), precision), _dot(inner, dout, (0, 0), precision)
    return {'a': da, 'b': db}, _dot(dinner, a, (1, 1), precision)


def _side_by_side(gate, up, down):
    """An expert's matrices, gate and up as one: few wide matmuls are faster than many narrow."""
    return jnp.concatenate([gate, up], axis=1), down


def _block_tokens(source, start, left, block, k):
    """Tokens of a block of rows [block]; -1 past the expert's rows, where the next expert's are."""
    source = jax.lax.dynamic_slice_in_dim(source, start, block)
    return jnp.where((jnp.arange(block) < left) & (source >= 0), source // k, -1)


def _blocked_forward(
    x, gate, up, down, weights, layout, adapters, block, axes, precision, save=False
):
    """Result [N,D]; with `save` also the pre-activations [S,F] of gate and up, else ()."""
    k = weights.shape[1]
    slot_weights = _rows(weights.reshape(-1, 1), layout.source)

    def enter(expert):
        low = jax.tree.map(lambda w: w[expert], adapters)
        return (_side_by_side(gate[expert], up[expert], down[expert]), low), ()

    def body(size, constants, start, left, state, carry):
        w, low = constants
        rows = _rows(x, _block_tokens(layout.source, start, left, size, k))
        g, u = hidden = _hidden(rows, w[0], low, precision)
        inner = (jax.nn.silu(g) * u).astype(x.dtype)
        y = _plus(_dot(inner, w[1], (1, 0), precision), inner, low, 'down', precision)
        y = y * jax.lax.dynamic_slice_in_dim(slot_weights, start, size)
        # Rows past the expert's are the next one's, which comes later and writes its own.
        new = (y, *hidden) if save else (y,)
        return state, tuple(
            _update(o, n.astype(o.dtype), start) for o, n in zip(carry, new, strict=True)
        )

    widths = (x.shape[1], *(gate.shape[2],) * 2) if save else (x.shape[1],)
    carry = tuple(_zeros((layout.source.shape[0], n), weights.dtype, axes) for n in widths)
    out, *hidden = _over_blocks(layout, block, enter, body, lambda e, s, c: c, carry)
    return _sum_rows(out, layout.row.reshape(-1, k)), tuple(hidden)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _blocked(x, gate, up, down, weights, layout, adapters, block, axes, precision):
    operands = x, gate, up, down, weights, layout, adapters
    return _blocked_forward(*operands, block, axes, precision)[0]


def _blocked_save(x, gate, up, down, weights, layout, adapters, block, axes, precision):
    operands = x, gate, up, down, weights, layout, adapters
    y, hidden = _blocked_forward(*operands, block, axes, precision, save=True)
    return y, (operands, hidden)


def _blocked_backward(block, axes, precision, saved, dy):
    (x, gate, up, down, weights, layout, adapters), hidden = saved
    k = weights.shape[1]
    slot_weights = _rows(weights.reshape(-1, 1), layout.source)
    wide = weights.dtype

    def enter(expert):
        w = _side_by_side(gate[expert], up[expert], down[expert])
        low = jax.tree.map(lambda w: w[expert], adapters)
        return (w, low), jax.tree.map(lambda x: _zeros(x.shape, wide, axes), low or w)

    def body(size, constants, start, left, state, carry):
        w, low = constants
        grads, dx, dweights = carry
        token = _block_tokens(layout.source, start, left, size, k)
        rows, dout = _rows(x, token), _rows(dy, token).astype(x.dtype)
        # Rows past the expert's are 0, whatever the next one's hold.
        scale, g, u = (
            jnp.where((token >= 0)[:, None], jax.lax.dynamic_slice_in_dim(kept, start, size), 0)
            for kept in (slot_weights, *hidden)
        )
        gated, silu_vjp = jax.vjp(jax.nn.silu, g)
        inner = gated * u
        scaled = (inner * scale).astype(x.dtype)
        dinner = _dot(dout, w[1], (1, 1), precision)
        found: Any = {}
        if 'down' in low:
            # `scaled` has the slot's weight in it; the rows' gradient gets it below.
            found['down'], more = _low_backward(scaled, low, 'down', dout, precision)
            dinner = dinner + more
        dweights = _update(dweights, jnp.sum(inner * dinner, -1, keepdims=True), start)
        dinner = dinner * scale
        dgu = jnp.concatenate([silu_vjp(dinner * u)[0], dinner * gated], axis=1).astype(x.dtype)
        drows = _dot(dgu, w[0], (1, 1), precision)
        if not adapters:
            ddown = _dot(scaled, dout, (0, 0), precision)
            found = (_dot(rows, dgu, (0, 0), precision), ddown)
        for name, part in zip(('gate', 'up'), jnp.split(dgu, 2, axis=1), strict=True):
            if name in low:
                found[name], more = _low_backward(rows, low, name, part, precision)
                drows = drows + more
        state = jax.tree.map(jnp.add, state, found)
        return state, (grads, _update(dx, drows.astype(dx.dtype), start), dweights)

    def leave(expert, state, carry):
        new = state if adapters else (*jnp.split(state[0], 2, axis=1), state[1])

        def put(old, new):
            return jax.lax.dynamic_update_index_in_dim(old, new.astype(old.dtype), expert, 0)

        return jax.tree.map(put, carry[0], new), *carry[1:]

    size = layout.source.shape[0]
    carry = (
        jax.tree.map(lambda w: _zeros(w.shape, w.dtype, axes), adapters or (gate, up, down)),
        _zeros((size, x.shape[1]), wide, axes),
        _zeros((size, 1), wide, axes),
    )
    grads, dx, dweights = _over_blocks(layout, block, enter, body, leave, carry)
    dx = _sum_rows(dx, layout.row.reshape(-1, k)).astype(x.dtype)
    dweights = _rows(dweights, layout.row).reshape(weights.shape)
    if adapters:
        return dx, None, None, None, dweights, None, grads
    return dx, *grads, dweights, None, {}


_blocked.defvjp(_blocked_save, _blocked_backward)


def _ragged(x, gate, up, down, weights, layout, adapters, precision):
    k = weights.shape[1]
    token = jnp.where(layout.source >= 0, layout.source // k, -1)
    rows = take_rows(x, token, layout.row.reshape(-1, k))

    def product(rows, w):
        return jax.lax.ragged_dot(
            rows, w, layout.sizes, precision=precision, preferred_element_type=weights.dtype
        )

    def project(rows, name, w):
        y = product(rows, w)
        if name not in adapters:
            return y
        own = adapters[name]
        return y + product(product(rows, own['a']).astype(x.dtype), own['b'])

    inner = jax.nn.silu(project(rows, 'gate', gate)) * project(rows, 'up', up)
    out = project(inner.astype(x.dtype), 'down', down)
    picked = take_rows(out, layout.row, layout.source[:, None])
    return jnp.sum(picked.reshape(*weights.shape, -1) * weights[:, :, None], axis=1)


def grouped_swiglu(
    x: Array,
    gate: Array,
    up: Array,
    down: Array,
    ids: Array,
    weights: Array,
    *,
    backend: str,
    precision: Any = 'highest',
    axes: tuple[str, ...] = (),
    adapters: Mapping[str, Any] | None = None,
) -> Array:
    """Gate-weighted sum of the chosen experts' outputs for each token, [N,D] float32 at least.

    Args:
      x: [N,D].
      gate, up: [E,D,F] in x's dtype. down: [E,F,D] likewise.
      ids: [N,k] int; ids outside 0..E-1 take no work and add nothing.
      weights: [N,k] float32 (float64 where x is).
      backend: 'blocked' or 'ragged'.
      precision: of the matmuls, which add up in float32 at least.
      axes: inside `shard_map`, the mesh axes that the operands differ over: all of them must differ
        over all of these.
      adapters: low-rank additions by projection (gate, up, down): a [E,in,r] and b [E,r,out] in x's
        dtype add (rows @ a) @ b. With them gate, up and down are constants, without a gradient.

    For the backward pass 'blocked' keeps the pre-activations of gate and up, two arrays of about
    N*k x F in float32 at least, room for all entries even where many are another shard's.
    """
    chex.assert_rank([x, gate, up, down, ids, weights], [2, 3, 3, 3, 2, 2])
    chex.assert_equal_shape([ids, weights])
    chex.assert_trees_all_equal_dtypes(x, gate, up, down)
    experts, adapters = gate.shape[0], dict(adapters or {})
    if adapters:
        gate, up, down = jax.lax.stop_gradient((gate, up, down))
    if backend == 'ragged':
        layout = sort_by_expert(ids.ravel(), experts)
        return _ragged(x, gate, up, down, weights, layout, adapters, precision)
    block = block_rows(ids.size, experts)
    layout = sort_by_expert(ids.ravel(), experts, slack=block)
    return _blocked(x, gate, up, down, weights, layout, adapters, block, axes, precision)
