"""The key-value cache: an explicit pytree with a length per row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from policyopt.models.config import ModelConfig
from policyopt.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens seen so far.

    Attributes:
      k: [L,B,S,KV,hd], rotated keys.
      v: [L,B,S,KV,hd], values. What stands at or past a row's length, NaN included, changes
        nothing, here and in k.
      length: [B] int32, tokens of each row.
    """

    k: Array
    v: Array
    length: Array


def init_cache(config: ModelConfig, batch: int, size: int) -> Cache:
    """Empty cache of `batch` rows, `size` tokens each."""
    shape = (config.num_layers, batch, size, config.num_kv_heads, config.head_dim)
    return Cache(
        k=jnp.zeros(shape, config.compute_dtype),
        v=jnp.zeros(shape, config.compute_dtype),
        length=jnp.zeros((batch,), jnp.int32),
    )


def write(cache: Array, layer: Array, at: Array, new: Array) -> Array:
    """cache [L,B,S,KV,hd] with new [B,C,KV,hd] at positions at [B,C]; positions >= S drop."""
    rows = jnp.arange(at.shape[0])[:, None]
    return cache.at[layer, rows, at].set(new.astype(cache.dtype), mode='drop', unique_indices=True)


def read(cache: Array, layer: Array, size: int, length: Array | None = None) -> Array:
    """The first `size` positions of a layer: cache [L,B,S,KV,hd] -> [B,size,KV,hd].

    With `length` [B], positions at or past it are 0. Attention gives values there the weight 0, and
    0 x NaN would be NaN.
    """
    _, rows, _, *rest = cache.shape
    start = (layer, *(0,) * (cache.ndim - 1))
    out = jax.lax.dynamic_slice(cache, start, (1, rows, size, *rest))[0]
    if length is None:
        return out
    written = jnp.arange(size) < length[:, None]
    return jnp.where(written[:, :, None, None], out, 0)


def places(cache: Cache, count: Array, width: int) -> Array:
    """Positions [B,width] that new tokens take; past `count`, distinct positions out of range."""
    step = jnp.arange(width)[None]
    size = cache.k.shape[2]
    return jnp.where(step < count[:, None], cache.length[:, None] + step, size + step)
