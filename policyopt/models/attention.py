"""Causal grouped-query attention: one function, exact, backends by name.

    out[t] = sum_s p[t,s] v[s],   p[t] = softmax(q[t] k[s] / sqrt(hd)) over the keys s <= t in sight

blocked: query blocks that each see only their own prefix of the keys, as matmuls batched over rows
    and key heads. No custom kernel, so it runs anywhere; the default on CPU.
splash: the kernel that jax ships for TPU; the default there. It has no scale, so queries are scaled
    in their own type first: one rounding more in half precision, unless hd is a power of 4.
cudnn, xla: `jax.nn.dot_product_attention`; cudnn is the default on GPU in half precision ('blocked'
    in float32, which cudnn does not take). xla holds all scores at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from policyopt import sharding
from policyopt.checks import one_of
from policyopt.models.config import ATTENTION
from policyopt.sharding import DEFAULT_RULES, Rules, mesh_spec
from policyopt.types import Array

ROWS = 128  # a query block of 'blocked' is a multiple of this
BLOCKS = 8  # and there are at most this many, of different widths, for compile time's sake
LOOPED = 256  # a wider block is a loop over this many queries at a time
LANES = 128  # splash works on multiples of this


def default_backend(dtype: Any) -> str:
    """Backend for whole sequences on this platform."""
    platform = sharding.platform()
    if platform == 'gpu' and jnp.dtype(dtype).itemsize == 2:
        return 'cudnn'
    return 'splash' if platform == 'tpu' else 'blocked'


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    valid: Array | None = None,
    segments: Array | None = None,
    backend: str = 'auto',
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
    rules: Rules = DEFAULT_RULES,
) -> Array:
    """Causal softmax attention; scores and softmax in float32 at least.

    Args:
      q: [B,T,H,hd].
      k, v: [B,T,KV,hd], KV dividing H.
      valid: [B,T] bool, True on real tokens, which come first (right padding): the keys that may
        be seen. Under jit that cannot be checked, and backends would differ on other masks.
      segments: [B,T] int, a query sees keys of its own segment only.
      backend: 'auto', 'blocked', 'splash', 'cudnn' or 'xla'.
      precision: of the two matmuls.
      rules: mesh axes of 'batch' and 'heads', which 'splash' needs to be told.

    Returns:
      [B,T,H,hd] in q's dtype. What stands at queries that are not valid themselves is finite and
      otherwise up to the backend.
    """
    chex.assert_rank([q, k, v], 4)
    chex.assert_equal_shape([k, v])
    one_of('attention', backend, ATTENTION)
    if backend == 'auto':
        backend = default_backend(q.dtype)
    if backend == 'splash':
        return _splash(q, k, v, valid, segments, precision, rules)
    if backend == 'blocked':
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return _blocked(q, k, v, valid, segments, None, precision)
    return _library(q, k, v, valid, segments, None, precision, backend)


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    offset: Array,
    *,
    backend: str = 'auto',
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Array:
    """The same of queries behind a cache: they see what stands before and at their own position.

    Args:
      q: [B,T,H,hd].
      k, v: [B,KV,S,hd], as a cache holds them, those of the queries among them.
      offset: [B] int, query t of row b stands at position offset[b] + t.
      backend: 'xla', or any other of `attention`'s for 'blocked': the kernels for whole sequences
        can't.
      precision: of the two matmuls.

    Returns:
      [B,T,H,hd] in q's dtype.
    """
    chex.assert_rank([q, k, v], 4)
    chex.assert_equal_shape([k, v])
    one_of('attention', backend, ATTENTION)
    if backend == 'xla':
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return _library(q, k, v, None, None, offset, precision, backend)
    return _blocked(q, k, v, None, None, offset, precision)


def _mask(
    at: Array, seen: int, valid: Array | None, own: Array | None, segments: Array | None
) -> Array:
    """[B or 1, queries, seen] bool: key s is at or before `at`, valid, of the query's segment."""
    mask = jnp.arange(seen) <= at[:, :, None]
    if valid is not None:
        mask &= valid[:, None, :seen] != 0
    if own is not None and segments is not None:
        mask &= own[:, :, None] == segments[:, None, :seen]
    return mask


def _attend(q: Array, k: Array, v: Array, mask: Array, precision: Any) -> Array:
    """One block: q [B,KV,n*G,hd] with the G queries of a position together, mask [B or 1,n,S]."""
    rows, groups, queries, width = q.shape
    count, seen = mask.shape[1:]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=wide)
    scores = product('bkqd,bksd->bkqs', q, k) * width**-0.5
    scores = scores.reshape(rows, groups, count, queries // count, seen)
    scores = jnp.where(mask[:, None, :, None], scores, jnp.finfo(wide).min)
    scores = scores.reshape(rows, groups, queries, seen)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    # Dividing after the product: it is the smaller array.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (product('bkqs,bksd->bkqd', weights.astype(v.dtype), v) / total).astype(q.dtype)


def _blocked(q, k, v, valid, segments, offset, precision):
    """q [B,T,H,hd], k, v [B,KV,S,hd] -> [B,T,H,hd]."""
    rows, length, heads, width = q.shape
    groups, size = k.shape[1:3]
    per = heads // groups
    q = q.reshape(rows, length, groups, per, width).transpose(0, 2, 1, 3, 4)
    q = q.reshape(rows, groups, length * per, width)

    def block(start: Array | int, count: int, seen: int) -> Array:
        at = start + jnp.arange(count)[None]
        own = None
        if offset is not None:
            at = at + offset[:, None]
        if segments is not None:
            own = jax.lax.dynamic_slice_in_dim(segments, start, count, axis=1)
        queries = jax.lax.dynamic_slice_in_dim(q, start * per, count * per, axis=2)
        mask = _mask(at, seen, valid, own, segments)
        return _attend(queries, k[:, :, :seen], v[:, :, :seen], mask, precision)

    span = ROWS * math.ceil(length / (ROWS * BLOCKS))
    out = []
    for start in range(0, length, span):
        count = min(span, length - start)
        seen = size if offset is not None else start + count
        out.extend(_loop(block, start, count, seen))
    joined = jnp.concatenate(out, axis=2) if len(out) > 1 else out[0]
    joined = joined.reshape(rows, groups, length, per, width).transpose(0, 2, 1, 3, 4)
    return joined.reshape(rows, length, heads, width)


def _loop(block: Any, start: int, count: int, seen: int) -> list[Array]:
    """A block, LOOPED queries at a time, whose scores the backward pass computes again.

    On CPU that takes as long as to keep them: 1.22 s and 1.21 s of an update of 8 x 256 tokens.
    """
    whole, rest = divmod(count, LOOPED)
    out = []
    if whole:
        body = jax.checkpoint(lambda at: block(at, LOOPED, seen), prevent_cse=False)
        parts = jax.lax.map(body, start + LOOPED * jnp.arange(whole))  # [whole,B,KV,n*G,hd]
        parts = jnp.moveaxis(parts, 0, 2)
        out.append(parts.reshape(*parts.shape[:2], -1, parts.shape[-1]))
    if rest:
        last = start + count - rest
        out.append(jax.checkpoint(lambda: block(last, rest, seen), prevent_cse=False)())
    return out


def _library(q, k, v, valid, segments, offset, precision, implementation):
    """`jax.nn.dot_product_attention`: padding as lengths, segments and offsets as a mask."""
    length, size = q.shape[1], k.shape[1]
    mask = lengths = None
    if segments is not None or offset is not None:
        at = jnp.arange(length)[None]
        at = at if offset is None else at + offset[:, None]
        mask = _mask(at, size, valid, segments, segments)[:, None]
    elif valid is not None:
        # A mask would be read for every score; with lengths the kernel skips whole tiles. An empty
        # row sees its first key, so that its softmax is over something.
        lengths = jnp.maximum(jnp.sum(valid != 0, axis=1, dtype=jnp.int32), 1)
    with jax.default_matmul_precision(precision.name.lower()):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=mask is None,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )


def _splash(q, k, v, valid, segments, precision, rules):
    """The kernel on each device's rows and heads, on sequences padded to a multiple of 128."""
    rows, length, heads, width = q.shape
    groups = k.shape[2]
    padded = LANES * math.ceil(length / LANES)
    short = ((0, 0), (0, padded - length))
    ids = jnp.zeros((rows, length), jnp.int32) if segments is None else segments
    if valid is not None:
        # Padding is a segment of its own; no sequence has the smallest id.
        ids = jnp.where(valid != 0, ids, jnp.iinfo(jnp.int32).min)
    ids = jnp.pad(ids, short, constant_values=jnp.iinfo(jnp.int32).min)

    def by_head(x: Array) -> Array:
        return jnp.pad(x, (*short, (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    def local(q: Array, k: Array, v: Array, ids: Array) -> Array:
        kernel = _kernel(q.shape[1], padded, sharding.platform() != 'tpu')
        return jax.vmap(kernel)(q, k, v, ids)

    axes = mesh_spec(('batch', 'kv_heads'), (rows, groups), rules)
    if axes is not None:
        batch = jax.sharding.PartitionSpec(*axes[:1])
        local = jax.shard_map(
            local, in_specs=(axes, axes, axes, batch), out_specs=axes, check_vma=False
        )
    # Half-precision products are exact already, and the kernel's compiler refuses to split them.
    name = precision.name.lower() if q.dtype.itemsize > 2 else 'default'
    scaled = by_head(q * jnp.asarray(width**-0.5, q.dtype))
    out = _at_precision(local, name)(scaled, by_head(k), by_head(v), ids)
    return out.transpose(0, 2, 1, 3)[:, :length].astype(q.dtype)


def _at_precision(function: Any, name: str) -> Any:
    """function with its matmuls at this precision, those of its own backward pass too.

    A default precision holds for what is traced inside it, and the kernel's backward pass is traced
    later, when the caller has left it.
    """

    @jax.custom_vjp
    def wrapped(*args: Array) -> Array:
        with jax.default_matmul_precision(name):
            return function(*args)

    def forward(*args: Array) -> tuple[Array, Any]:
        with jax.default_matmul_precision(name):
            return jax.vjp(function, *args)

    def backward(pull: Any, cotangent: Array) -> Any:
        with jax.default_matmul_precision(name):
            return pull(cotangent)

    wrapped.defvjp(forward, backward)
    return wrapped


def _kernel(heads: int, length: int, interpret: bool) -> Any:
    """Splash attention of one row: (q [H,T,hd], k, v [KV,T,hd], ids [T]) -> [H,T,hd]."""
    # Only TPU runs need the kernel, and importing Pallas takes a second.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    size = next(n for n in (512, 256, LANES) if length % n == 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=size,
            block_kv=size,
            block_q_dkv=size,
            block_kv_dkv=size,
            block_q_dq=size,
            block_kv_dq=size,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    return lambda q, k, v, ids: kernel(q, k, v, splash.SegmentIds(q=ids, kv=ids))
