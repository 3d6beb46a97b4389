"""Chunked log-softmax of taken tokens, over the vocabulary or a recorded support, with own VJPs.

Tokens come as n chunks of R. A chunk's logits [R,V], or gathered head rows [R,K,D], live only
inside one turn of a loop; the backward pass computes them again and accumulates the head's gradient
in float32. The loops run as many chunks as hold active tokens, whatever the shapes allow for.

Shapes: N tokens in a flat list, D width, V vocabulary, K kept ids. Log-prob and entropy are in
nats, float32 (float64 where hidden states are).

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
import numpy as np
from jax.core import Tracer

from policyopt import masked, sharding
from policyopt.types import Array

HIGHEST = jax.lax.Precision.HIGHEST

# Elements that one chunk of logits [R,V], or of gathered head rows [R,K,D], may have where the
# caller names no chunk size: 128 and 8 MiB in float32.
FULL_ELEMENTS = 2**25
SUPPORT_ELEMENTS = 2**21
# So much more on a TPU: each chunk reads the head and writes its gradient, and with few tokens that
# would take longer than the products.
TPU_FACTOR = 4
# On CPU logits of so many tokens, or so many elements where that is more: they stay in the cache,
# and of the last chunk less is padding.
CPU_ELEMENTS, CPU_TOKENS = 2**22, 256


class Static(NamedTuple):
    """What the chunk loops are compiled for."""

    entropy: bool
    precision: Any


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


def token_logp_entropy(
    hidden: Array,
    head: Array,
    tokens: Array,
    *,
    temperature: Array | float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
    allowed: Array | None = None,
    active: Array | None = None,
    precision: Any = HIGHEST,
) -> tuple[Array, Array | None]:
    """Log-prob of the taken token and entropy of `softmax(head @ hidden / temperature)`.

        logp = l[token] - logsumexp(l),  entropy = -sum_v p_v log p_v,  l = head @ hidden / T

    Memory: a few [chunk,V] arrays and, in the backward pass, one [V,D] accumulator.

    Args:
      hidden: [N,D] float, the state that predicts each token.
      head: [V,D] float. Its gradient is accumulated in float32 whatever its dtype.
      tokens: [N] int, the tokens taken.
      temperature: scalar or [N], > 0. An array: another value compiles nothing. No gradient.
      chunk: tokens per chunk; None chooses by platform (`full_size`): up to 128 MiB of logits,
        512 on TPU. Changes memory and speed only.
      entropy: False returns None for the entropy and does not compute it.
      allowed: [V] bool, tokens that may be drawn; the others have probability 0.
      active: [N] bool, tokens to score. Elsewhere results and gradients are 0, whatever stands
        there, and chunks after the last active token are not computed.
      precision: of the matmuls.

    Returns:
      (logp [N], entropy [N] or None). NaN for a token outside `allowed` or the vocabulary and
      for a traced temperature <= 0: -inf would pass through a ratio as a silent zero.

    Raises:
      ValueError: a temperature known at trace time is not > 0, or chunk < 1.
    """
    chex.assert_rank([hidden, head, tokens], [2, 2, 1])
    chex.assert_equal_shape_prefix([hidden, tokens], 1)
    vocab = head.shape[0]
    size = full_size(vocab) if chunk is None else chunk_size(chunk, 1, 1)
    rows = _flat_rows(hidden, tokens, temperature, active, None, size)
    return _unflatten(
        score_rows(Static(entropy, precision), rows, head, allowed), tokens.shape[0], entropy
    )


def support_logp_entropy(
    hidden: Array,
    head: Array,
    tokens: Array,
    support: Array,
    *,
    temperature: Array | float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
    active: Array | None = None,
    precision: Any = HIGHEST,
) -> tuple[Array, Array | None]:
    """Log-prob of the taken token and entropy of a softmax over the kept token ids only.

        logp = l[token] - logsumexp_{v in support} l[v],  l[v] = head[v] @ hidden / T

    Temperature first, then the softmax over the support. Only the K named rows of `head` are
    read, and only they get gradient; nothing of size N x V exists.

    Args:
      hidden, head, tokens, temperature, entropy, active, precision: as `token_logp_entropy`.
      support: [N,K] int, distinct kept ids, -1 pads anywhere.
      chunk: tokens per chunk; None takes about 8 MiB of gathered head rows, 32 on TPU.

    Returns:
      (logp [N], entropy [N] or None). NaN where the taken token is not in its support, an id is
      beyond the vocabulary, or a traced temperature <= 0; `check_support` names such positions
      on the host. Repeated ids are not detected here.

    Raises:
      ValueError: a temperature known at trace time is not > 0, or chunk < 1.
    """
    chex.assert_rank([hidden, head, tokens, support], [2, 2, 1, 2])
    chex.assert_equal_shape_prefix([hidden, tokens, support], 1)
    kept = support.shape[1], head.shape[1]
    size = support_size(*kept) if chunk is None else chunk_size(chunk, 1, 1)
    rows = _flat_rows(hidden, tokens, temperature, active, support, size)
    return _unflatten(score_rows(Static(entropy, precision), rows, head), tokens.shape[0], entropy)


def check_temperature(temperature: Array | float, hidden: Array) -> Array:
    """Temperature without gradient, float32 or hidden's dtype if wider; NaN where it is not > 0.

    Raises ValueError where the value is known, that is, not traced.
    """
    if not isinstance(temperature, Tracer):
        bad = ~(np.asarray(temperature) > 0)
        if np.any(bad) or not np.all(np.isfinite(np.asarray(temperature))):
            raise ValueError(
                f'temperature={temperature}: scoring needs a finite temperature > 0. A greedy '
                'rollout (temperature 0) has log-prob 0 everywhere and cannot be trained on.'
            )
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    heat = jax.lax.stop_gradient(jnp.asarray(temperature, wide))
    return jnp.where(heat > 0, heat, jnp.nan)


def chunk_size(chunk: int | None, per_token: int, budget: int) -> int:
    """Tokens per chunk: the caller's, or as many as keep per_token x size within budget."""
    if chunk is None:
        size = max(1, budget // max(per_token, 1))
        return size if size < 64 else size // 64 * 64  # whole tiles of the matmul
    if chunk < 1:
        raise ValueError(f'chunk={chunk}: tokens per chunk must be >= 1, or None to choose.')
    return chunk


def full_size(vocab: int) -> int:
    """Tokens of a chunk of logits [R,V], by the platform of what is being traced."""
    budget = FULL_ELEMENTS
    if sharding.platform() == 'tpu':
        budget *= TPU_FACTOR
    elif sharding.platform() == 'cpu':
        budget = min(budget, max(CPU_ELEMENTS, CPU_TOKENS * vocab))
    return chunk_size(None, vocab, budget)


def support_size(kept: int, width: int) -> int:
    """Tokens of a chunk of gathered head rows [R,K,D], likewise."""
    budget = SUPPORT_ELEMENTS * (TPU_FACTOR if sharding.platform() == 'tpu' else 1)
    return chunk_size(None, kept * width, budget)


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
        moment = jnp.sum(jnp.where(weight > 0, weight * shifted, 0), axis=1)
        entropy = log_sum - moment / total
    return _Stats(taken - log_sum, entropy, top, log_sum)


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

    C is V and the head rows are the head [V,D], or C is K and they are the gathered [R,K,D]. A
    token that no column stands for gets column C, which reads as NaN.
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
    source = head.astype(rows.hidden.dtype) if rows.support is None else head

    def body(i, carry):
        d_hidden, d_head = carry
        row = _take(rows, i)
        scaled, slot, used = _chunk_logits(static, row, source, allowed)
        d = _row_cotangent(static, scaled, slot, *jax.tree.map(lambda x: x[i], (stats, g)))
        d = jnp.where(row.active[:, None], d / row.temperature[:, None], 0)
        d_row, d_head = _chunk_pullback(static, row, used, d.astype(row.hidden.dtype), d_head)
        return d_hidden.at[i].set(d_row.astype(d_hidden.dtype)), d_head

    init = jnp.zeros_like(rows.hidden), jnp.zeros(head.shape, rows.temperature.dtype)
    d_hidden, d_head = jax.lax.fori_loop(0, _used(rows), body, init)
    d_rows: Any = Rows(d_hidden, None, None, None)  # type: ignore[arg-type]
    return d_rows, d_head.astype(head.dtype), None


_score_rows.defvjp(_score_rows_forward, _score_rows_backward)


def _take(rows: Rows, i: Array) -> Rows:
    """Chunk i, with harmless values in its inactive rows."""
    row = jax.tree.map(lambda x: x[i], rows)
    return row._replace(
        hidden=masked.select(row.active[:, None], row.hidden),
        temperature=jnp.where(row.active, row.temperature, 1),
    )


def _used(rows: Rows) -> Array:
    """Number of chunks up to the last one with an active token."""
    some = jnp.any(rows.active, axis=1)
    return jnp.max(jnp.where(some, jnp.arange(1, some.size + 1), 0), initial=0)


def _flat_rows(
    hidden: Array,
    tokens: Array,
    temperature: Array | float,
    active: Array | None,
    support: Array | None,
    size: int,
) -> Rows:
    """N tokens as chunks [n,size], the last one padded with inactive tokens."""
    n = tokens.shape[0]
    size = max(1, min(size, n))
    pad = -n % size
    active = jnp.ones(n, bool) if active is None else active != 0
    heat = jnp.broadcast_to(check_temperature(temperature, hidden), (n,))
    rows = Rows(hidden, tokens, heat, active, support)

    def cut(x):
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape((n + pad) // size, size, *x.shape[1:])

    return jax.tree.map(cut, rows)


def _unflatten(stats: tuple[Array, Array], n: int, entropy: bool) -> tuple[Array, Array | None]:
    """Undo `_flat_rows` on results."""
    return stats[0].ravel()[:n], stats[1].ravel()[:n] if entropy else None
