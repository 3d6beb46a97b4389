"""Causal grouped-query attention: one function, backends by name."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from policyopt.types import Array

BLOCK = 128  # query rows of one block


def _softmax_values(scores: Array, mask: Array | None, values: Array, precision) -> Array:
    """softmax(scores) @ values with the division after the product: it is the smaller array."""
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        'bkqs,bksd->bkqd',
        weights.astype(values.dtype),
        values,
        precision=precision,
        preferred_element_type=scores.dtype,
    )
    return out / total


def _blocked(q, k, v, *, valid, segments, offset, precision):
    rows, length, heads, width = q.shape
    size, groups = k.shape[1], k.shape[2]
    q = q.reshape(rows, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    outs = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        seen = stop if offset is None else size
        queries = q[:, :, :, start:stop].reshape(rows, groups, -1, width)
        scores = jnp.einsum(
            'bkqd,bksd->bkqs',
            queries,
            k[:, :, :seen],
            precision=precision,
            preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
        ) * (width**-0.5)
        at = jnp.arange(start, stop)[None]
        if offset is not None:
            at = at + offset[:, None]
        mask = jnp.arange(seen)[None, None] <= at[:, :, None]
        if valid is not None:
            mask &= valid[:, None, :seen]
        if segments is not None:
            mask &= segments[:, start:stop, None] == segments[:, None, :seen]
        scores = scores.reshape(rows, groups, heads // groups, stop - start, seen)
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
        scores = scores.reshape(rows, groups, -1, seen)
        outs.append(
            _softmax_values(scores, None, v[:, :, :seen], precision)
            .reshape(rows, groups, heads // groups, stop - start, width)
            .astype(q.dtype)
        )
    out = jnp.concatenate(outs, axis=3) if len(outs) > 1 else outs[0]
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, width)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    valid: Array | None = None,
    segments: Array | None = None,
    offset: Array | None = None,
    backend: str = 'auto',
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Array:
    """Causal softmax attention, softmax in float32 at least: out[t] = sum_s p[t,s] v[s].

    Args:
      q: [B,T,H,hd].
      k, v: [B,S,KV,hd], KV dividing H; S == T unless `offset` is given.
      valid: [B,S] bool, keys that may be seen.
      segments: [B,T] int, a query sees keys of its own segment; only without `offset`.
      offset: [B] int, query t of row b stands at position offset[b] + t of the keys (a cache).
      backend: by name.
      precision: of the two matmuls.

    Returns:
      [B,T,H,hd] in q's dtype. A query that sees no key gets the mean of the values.
    """
    chex.assert_rank([q, k, v], 4)
    del backend
    return _blocked(q, k, v, valid=valid, segments=segments, offset=offset, precision=precision)
