"""The bits of arrays that are saved: digests of them, keys as numbers, layouts to restore into."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyopt import hosts


def fingerprint(tree: Any) -> int:
    """Digest of the bits of all leaves of a tree (no keys): 32 bits, the same on every mesh.

    The sum of each leaf's words, hashed with their positions. A single changed word always shows,
    more of them but for one case in 2^32. Against accidents only.
    """
    # One after the other: programs in flight together that talk between processes can block.
    sums = [hosts.fetch(_sum_of_words(leaf)) for leaf in jax.tree.leaves(tree)]
    return zlib.crc32(np.array(sums, np.uint32).tobytes())


@jax.jit  # by leaf: parameters, moments and averages share their shapes, so few programs do
def _sum_of_words(leaf: jax.Array) -> jax.Array:
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32)
    place, stride = jnp.ones(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place, stride = place + index * np.uint32(stride % 2**32), stride * words.shape[axis]
    return jnp.sum(_mixed(words ^ _mixed(place)), dtype=jnp.uint32)  # one to one in each word


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32-bit words in which every bit depends on all."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def crc(arrays: Mapping[str, np.ndarray]) -> int:
    """Digest of the host's arrays, by name: 32 bits."""
    found = 0
    for name, x in sorted(arrays.items()):
        found = zlib.crc32(f'{name} {x.dtype} {x.shape}'.encode(), found)
        found = zlib.crc32(np.ascontiguousarray(x).tobytes(), found)
    return found


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def plain(tree: Any) -> Any:
    """The tree with the numbers of its keys in their place."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def like(tree: Any, template: Any) -> Any:
    """A plain tree with keys where the template has some, bound to devices only where it is."""

    def leaf(x: jax.Array, wanted: jax.Array) -> jax.Array:
        if not wanted.committed:
            x = jnp.array(np.asarray(x))
        return (
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(wanted)) if _is_key(wanted) else x
        )

    return jax.tree.map(leaf, tree, template)


def abstract(tree: Any) -> Any:
    """Shape, dtype and layout of each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
