"""The key-value cache: an explicit pytree with a length per row."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policyopt.models.config import ModelConfig
from policyopt.sharding import DEFAULT_RULES, Rules, mesh_spec
from policyopt.types import Array

# [L,B,KV,S,hd]. Layers and positions are never split: one step writes one of each.
CACHE = (None, 'batch', 'kv_heads', None, 'head_dim')
# Entries [hd] of a cache by index [B,KV,4], windows [C,hd] by index [B,KV,2] of a layer and a
# position. Heads are not part of what is written at once: the TPU compiler would lay the cache out
# by position, and copy it before attention reads it.
_ENTRY = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2,),
    inserted_window_dims=(0, 1, 2, 3),
    scatter_dims_to_operand_dims=(0, 1, 2, 3),
)
_GET = jax.lax.GatherDimensionNumbers(
    offset_dims=(2, 3),
    collapsed_slice_dims=(0,),
    start_index_map=(0, 3),
    operand_batching_dims=(1, 2),
    start_indices_batching_dims=(0, 1),
)
_PUT = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0, 3),
    operand_batching_dims=(1, 2),
    scatter_indices_batching_dims=(0, 1),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens seen so far.

    A head's keys lie together, as attention reads them: no step copies or transposes any.

    Attributes:
      k: [L,B,KV,S,hd], rotated keys.
      v: [L,B,KV,S,hd], values. What stands at or past a row's length, NaN included, changes
        nothing, here and in k.
      length: [B] int32, tokens of each row.
    """

    k: Array
    v: Array
    length: Array

    @property
    def size(self) -> int:
        """Tokens that a row has room for."""
        return self.k.shape[3]


def init_cache(config: ModelConfig, batch: int, size: int) -> Cache:
    """Empty cache of `batch` rows, `size` tokens each."""
    shape = (config.num_layers, batch, config.num_kv_heads, size, config.head_dim)
    return Cache(
        k=jnp.zeros(shape, config.compute_dtype),
        v=jnp.zeros(shape, config.compute_dtype),
        length=jnp.zeros((batch,), jnp.int32),
    )


def write(
    cache: Array,
    layer: Array,
    length: Array,
    count: Array,
    new: Array,
    rules: Rules = DEFAULT_RULES,
) -> Array:
    """cache [L,B,KV,S,hd] with count[b] of new [B,C,KV,hd] behind the length[b] tokens of row b.

    Tokens past the end of the cache are dropped; no other entry changes. On a mesh each device
    writes what it holds itself.
    """
    new = new.astype(cache.dtype).transpose(0, 2, 1, 3)
    local = _write_one if new.shape[2] == 1 else _write_window
    axes = mesh_spec(CACHE, cache.shape, rules)
    if axes is not None:
        # Left to the partitioner, new keys of all rows and heads would go to every device.
        all_of, rows, by_head = PartitionSpec(), PartitionSpec(axes[1]), PartitionSpec(*axes[1:])
        specs = (axes, all_of, rows, rows, by_head)
        local = jax.shard_map(local, in_specs=specs, out_specs=axes, check_vma=False)
    return local(cache, layer, length, count, new)


def _write_one(cache, layer, length, count, new):
    rows, groups, size = cache.shape[1:4]
    at = jnp.where(count > 0, length, size)[:, None]
    shape = rows, groups
    row, head = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in range(2))
    where = jnp.full(shape, layer, jnp.int32), row, head, jnp.broadcast_to(at, shape)
    index = jnp.stack(where, axis=-1)
    rule = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(cache, index, new[:, :, 0], _ENTRY, unique_indices=True, mode=rule)


def _write_window(cache, layer, length, count, new):
    """One window of positions for each row and head: as single positions they are many writes."""
    groups, size, head = cache.shape[2:]
    width = min(new.shape[2], size)
    start = jnp.minimum(length, size - width)
    shift = (length - start)[:, None]  # of the new tokens, in a window moved back to end in time
    padded = jnp.pad(new[:, :, :width], ((0, 0), (0, 0), (width, 0), (0, 0)))
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=1)
    new = jax.vmap(cut)(padded, width - shift[:, 0])
    index = _index(layer, start, groups)
    rule = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    old = jax.lax.gather(cache, index, _GET, (1, 1, 1, width, head), mode=rule)
    token = jnp.arange(width) - shift
    ours = (token >= 0) & (token < count[:, None])
    new = jnp.where(ours[:, None, :, None], new, old)
    return jax.lax.scatter(cache, index, new, _PUT, unique_indices=True, mode=rule)


def _index(layer: Array, at: Array, groups: int) -> Array:
    index = jnp.stack([jnp.full_like(at, layer), at], axis=1)[:, None]
    return jnp.broadcast_to(index, (at.shape[0], groups, 2))


def read(cache: Array, layer: Array, size: int, length: Array | None = None) -> Array:
    """The first `size` positions of a layer: cache [L,B,KV,S,hd] -> [B,KV,size,hd].

    With `length` [B], positions at or past it are 0. Attention gives values there the weight 0, and
    0 x NaN would be NaN.
    """
    _, rows, groups, _, width = cache.shape
    out = jax.lax.dynamic_slice(cache, (layer, 0, 0, 0, 0), (1, rows, groups, size, width))[0]
    if length is None:
        return out
    written = jnp.arange(size) < length[:, None]
    return jnp.where(written[:, None, :, None], out, 0)
