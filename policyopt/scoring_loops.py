"""Loops over chunks of tokens: log-softmax of taken tokens and its backward pass, with own VJPs.

Tokens come as n chunks of R. A chunk's logits [R,V], or gathered head rows [R,K,D], live only
inside one turn of a loop; the backward pass computes them again and accumulates the head's gradient
in float32. The loops run as many chunks as hold active tokens, whatever the shapes allow for.

With `Static.block` a turn has the logits [R,C] of C ids of the vocabulary: a block of the head and
of its gradient are read and written once, and used by all chunks meanwhile.

Derivatives: reverse mode, and forward over reverse (`jax.jvp` or `jax.linearize` of `jax.grad`),
which is what Hessian-vector products need. Reverse over reverse raises: loops of a length known
only at run time have no reverse mode.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from policyopt import masked
from policyopt.types import Array


class Static(NamedTuple):
    """What the loops are compiled for."""

    entropy: bool
    precision: Any
    block: int | None = None  # ids of the vocabulary in one turn; None: all


class Rows(NamedTuple):
    """Tokens to score, cut into n chunks of R: leading axes [n,R], or [R] inside the loop."""

    hidden: Array  # [...,D]
    tokens: Array  # int
    temperature: Array  # in the dtype of the results
    active: Array  # bool; the others cost nothing where a whole chunk has none
    support: Array | None = None  # [...,K] int, -1 pads; None: the whole vocabulary


class _Stats(NamedTuple):
    """Per token: results, and what the backward pass needs to rebuild the softmax."""

    logp: Array
    entropy: Array
    top: Array  # the largest scaled logit
    log_sum: Array  # log sum exp(scaled logit - top)


class _Sums(NamedTuple):
    """Per token, of the blocks of the vocabulary that are done, w = exp(scaled logit - top)."""

    top: Array  # the largest scaled logit
    total: Array  # sum w
    moment: Array  # sum w log w
    taken: Array  # the taken token's scaled logit; -inf before its block


def score_rows(
    static: Static, rows: Rows, head: Array, allowed: Array | None = None
) -> tuple[Array, Array]:
    """(logp, entropy) [n,R] of rows already cut into chunks; entropy 0 unless static.entropy.

    Over rows.support where it is given, else over the vocabulary, or the `allowed` [V] part of it.
    """
    chex.assert_equal(rows.hidden.shape[-1], head.shape[1])
    rows, head = jax.tree.map(jnp.asarray, (rows, head))
    if allowed is not None:
        allowed = jnp.asarray(allowed, bool)
        chex.assert_shape(allowed, head.shape[:1])
    return _score_rows(static, rows, head, allowed)


def _row_stats(static: Static, scaled: Array, slot: Array) -> _Stats:
    """Statistics of softmax(scaled [R,C]) with slot [R] taken; -inf entries have probability 0."""
    top = jax.lax.stop_gradient(jnp.max(scaled, axis=1))
    shifted = scaled - top[:, None]
    weight = jnp.exp(shifted)
    total = jnp.sum(weight, axis=1)
    log_sum = jnp.log(total)
    taken = jnp.take_along_axis(shifted, slot[:, None], axis=1, mode='fill')[:, 0]
    taken = jnp.where(taken == -jnp.inf, jnp.nan, taken)
    entropy = jnp.zeros_like(log_sum)
    if static.entropy:
        entropy = log_sum - _moment(weight, shifted) / total
    return _Stats(taken - log_sum, entropy, top, log_sum)


def _moment(weight: Array, log_weight: Array) -> Array:
    """Sum of w log w over columns; weights of 0 count as 0."""
    return jnp.sum(jnp.where(weight > 0, weight * log_weight, 0), axis=1)


def _add_block(static: Static, sums: _Sums, scaled: Array, slot: Array) -> _Sums:
    """Sums with one more block, scaled [R,C]; slot [R] is taken, C where another block has it."""
    top = jax.lax.stop_gradient(jnp.maximum(sums.top, jnp.max(scaled, axis=1)))
    shifted, lower = scaled - top[:, None], sums.top - top
    weight, fade = jnp.exp(shifted), jnp.exp(lower)
    moment = sums.moment
    if static.entropy:
        moment = fade * (moment + sums.total * lower) + _moment(weight, shifted)
    taken = jnp.take_along_axis(scaled, slot[:, None], 1, mode='fill', fill_value=-jnp.inf)[:, 0]
    total = fade * sums.total + jnp.sum(weight, axis=1)
    return _Sums(top, total, moment, jnp.maximum(sums.taken, taken))


def _row_cotangent(
    static: Static, scaled: Array, slot: Array, stats: _Stats, g: tuple[Array, Array]
) -> Array:
    """Cotangent of `scaled`: g_logp (1[taken] - p) - g_entropy p (log p + entropy)."""
    logp = scaled - stats.top[:, None] - stats.log_sum[:, None]
    p = jnp.exp(logp)
    taken = jnp.arange(scaled.shape[1]) == slot[:, None]
    out = g[0][:, None] * (taken - p)
    if static.entropy:
        logp = jnp.where(p > 0, logp, 0)
        out = out - g[1][:, None] * p * (logp + stats.entropy[:, None])
    return jnp.where(scaled == -jnp.inf, 0, out)


def _einsum(static: Static, spec: str, a: Array, b: Array) -> Array:
    """Einsum whose result is float32 at least."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(spec, a, b, precision=static.precision, preferred_element_type=wide)


def _chunk_logits(
    static: Static, row: Rows, head: Array, allowed: Array | None
) -> tuple[Array, Array, Array]:
    """Of one chunk: scaled logits [R,C], -inf where excluded; taken column [R]; head rows used.

    The head rows [C,D] are the head's, all V or a block of them, or C is K and they are the
    gathered [R,K,D]. A token that no column stands for gets column C, which reads as NaN.
    """
    if row.support is None:
        scaled = _einsum(static, 'rd,vd->rv', row.hidden, head) / row.temperature[:, None]
        if allowed is not None:
            scaled = jnp.where(allowed, scaled, -jnp.inf)
        return scaled, jnp.where(row.tokens < 0, head.shape[0], row.tokens), head
    kept = head.at[jnp.maximum(row.support, 0)].get(mode='fill', fill_value=jnp.nan)
    kept = kept.astype(row.hidden.dtype)
    scaled = _einsum(static, 'rd,rkd->rk', row.hidden, kept) / row.temperature[:, None]
    scaled = jnp.where(row.support >= 0, scaled, -jnp.inf)
    match = (row.support == row.tokens[:, None]) & (row.support >= 0)
    slot = jnp.where(jnp.any(match, axis=1), jnp.argmax(match, axis=1), match.shape[1])
    return scaled, slot, kept


def _chunk_cotangent(
    static: Static, i: Array, row: Rows, head: Array, allowed: Array | None, given: Any
) -> tuple[Array, Array]:
    """Of chunk i: cotangent of its logits [R,C] before the temperature, and the head rows used.

    `given` are `_Stats` of all chunks, and the cotangents of their log-probs and entropies.
    """
    scaled, slot, used = _chunk_logits(static, row, head, allowed)
    d = _row_cotangent(static, scaled, slot, *_at(i, given))
    d = jnp.where(row.active[:, None], d / row.temperature[:, None], 0)
    return d.astype(row.hidden.dtype), used


def _chunk_pullback(
    static: Static, row: Rows, used: Array, d: Array, d_head: Array
) -> tuple[Array, Array]:
    """From the logits' cotangent [R,C]: that of the hidden states [R,D], and d_head with its share.

    `used` are the head rows that `_chunk_logits` returned.
    """
    if row.support is None:
        d_head = d_head + _einsum(static, 'rv,rd->vd', d, row.hidden)
        return _einsum(static, 'rv,vd->rd', d, used), d_head
    # Pads go out of range and are dropped; -1 would wrap to the last row of the head.
    at = jnp.where((row.support >= 0) & row.active[:, None], row.support, d_head.shape[0])
    share = d[:, :, None].astype(d_head.dtype) * row.hidden[:, None, :]
    return _einsum(static, 'rk,rkd->rd', d, used), d_head.at[at].add(share, mode='drop')


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score_rows(
    static: Static, rows: Rows, head: Array, allowed: Array | None
) -> tuple[Array, Array]:
    return _score_rows_forward(static, rows, head, allowed)[0]


def _score_rows_forward(static, rows, head, allowed):
    if _in_blocks(static, rows, head):
        stats = _forward_in_blocks(static, rows, head, allowed)
        return (stats.logp, stats.entropy), (rows, head, allowed, stats)
    # The whole head in compute precision once, or gathered rows of it chunk by chunk.
    source = head.astype(rows.hidden.dtype) if rows.support is None else head

    def body(i, out):
        row = _take(rows, i)
        stats = _row_stats(static, *_chunk_logits(static, row, source, allowed)[:2])
        return jax.tree.map(lambda o, s: o.at[i].set(jnp.where(row.active, s, 0)), out, stats)

    zeros = jnp.zeros(rows.tokens.shape, rows.temperature.dtype)
    stats = jax.lax.fori_loop(0, _used(rows), body, _Stats(zeros, zeros, zeros, zeros))
    return (stats.logp, stats.entropy), (rows, head, allowed, stats)


def _score_rows_backward(static, residuals, g):
    rows, head, allowed, stats = residuals
    whole = not _in_blocks(static, rows, head)
    d_hidden, d_head = (_backward if whole else _backward_in_blocks)(
        static, rows, head, allowed, (stats, g)
    )
    d_rows: Any = Rows(d_hidden, None, None, None)  # type: ignore[arg-type]
    return d_rows, d_head.astype(head.dtype), None


_score_rows.defvjp(_score_rows_forward, _score_rows_backward)


def _backward(static, rows, head, allowed, given):
    source = head.astype(rows.hidden.dtype) if rows.support is None else head

    def body(i, carry):
        d_hidden, d_head = carry
        row = _take(rows, i)
        d, used = _chunk_cotangent(static, i, row, source, allowed, given)
        d_row, d_head = _chunk_pullback(static, row, used, d, d_head)
        return d_hidden.at[i].set(d_row.astype(d_hidden.dtype)), d_head

    init = jnp.zeros_like(rows.hidden), jnp.zeros(head.shape, rows.temperature.dtype)
    return jax.lax.fori_loop(0, _used(rows), body, init)


def _in_blocks(static: Static, rows: Rows, head: Array) -> bool:
    """Whether the vocabulary takes several turns."""
    return rows.support is None and static.block is not None and static.block < head.shape[0]


def _block(static, i, rows, head, allowed):
    """Block i of the vocabulary: its first id, head rows [C,D], and [C] which ids count, None: all.

    The last block ends with the vocabulary: ids that the one before it had do not count again.
    """
    size, vocab = static.block, head.shape[0]
    start = jnp.minimum(i * size, vocab - size)
    part = jax.lax.dynamic_slice_in_dim(head, start, size).astype(rows.hidden.dtype)
    counts = start + jnp.arange(size) >= i * size if vocab % size else None
    if allowed is not None:
        free = jax.lax.dynamic_slice_in_dim(allowed, start, size)
        counts = free if counts is None else counts & free
    return start, part, counts


def _forward_in_blocks(static, rows, head, allowed):
    def block(i, sums):
        start, part, counts = _block(static, i, rows, head, allowed)

        def chunk(j, sums):
            row = _within(_take(rows, j), start)
            scaled, slot, _ = _chunk_logits(static, row, part, counts)
            new = _add_block(static, _at(j, sums), scaled, slot)
            return jax.tree.map(lambda x, y: x.at[j].set(y), sums, new)

        return jax.lax.fori_loop(0, used, chunk, sums)

    used, blocks = _used(rows), -(-head.shape[0] // static.block)
    zeros = jnp.zeros(rows.tokens.shape, rows.temperature.dtype)
    lowest = zeros + jnp.finfo(zeros.dtype).min
    sums = jax.lax.fori_loop(0, blocks, block, _Sums(lowest, zeros, zeros, zeros - jnp.inf))
    log_sum = jnp.log(sums.total)
    entropy = log_sum - sums.moment / sums.total if static.entropy else zeros
    taken = jnp.where(sums.taken == -jnp.inf, jnp.nan, sums.taken)
    stats = _Stats(taken - sums.top - log_sum, entropy, sums.top, log_sum)
    return jax.tree.map(lambda x: jnp.where(rows.active, x, 0), stats)


def _backward_in_blocks(static, rows, head, allowed, given):
    def block(i, carry):
        d_hidden, d_head = carry
        start, part, counts = _block(static, i, rows, head, allowed)

        def chunk(j, carry):
            d_hidden, d_part = carry
            row = _within(_take(rows, j), start)
            d, used = _chunk_cotangent(static, j, row, part, counts, given)
            d_row, d_part = _chunk_pullback(static, row, used, d, d_part)
            return d_hidden.at[j].add(d_row), d_part

        d_part = jax.lax.dynamic_slice_in_dim(d_head, start, static.block)
        d_hidden, d_part = jax.lax.fori_loop(0, used, chunk, (d_hidden, d_part))
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_part, start, 0)

    used, blocks = _used(rows), -(-head.shape[0] // static.block)
    wide = rows.temperature.dtype
    init = jnp.zeros(rows.hidden.shape, wide), jnp.zeros(head.shape, wide)
    d_hidden, d_head = jax.lax.fori_loop(0, blocks, block, init)
    return d_hidden.astype(rows.hidden.dtype), d_head


def _within(row: Rows, start: Array) -> Rows:
    """A chunk whose tokens count from `start`; one before it is negative."""
    return row._replace(tokens=row.tokens.astype(jnp.int32) - start)


def _at(i: Array, tree: Any) -> Any:
    """Chunk i of arrays [n,...]."""
    return jax.tree.map(lambda x: x[i], tree)


def _take(rows: Rows, i: Array) -> Rows:
    """Chunk i, with harmless values in its inactive rows."""
    row = _at(i, rows)
    return row._replace(
        hidden=masked.select(row.active[:, None], row.hidden),
        temperature=jnp.where(row.active, row.temperature, 1),
    )


def _used(rows: Rows) -> Array:
    """Number of chunks up to the last one with an active token."""
    some = jnp.any(rows.active, axis=1)
    return jnp.max(jnp.where(some, jnp.arange(1, some.size + 1), 0), initial=0)
