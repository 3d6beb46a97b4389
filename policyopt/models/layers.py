"""Layers of a decoder as nnx modules.

Each parameter's shape, logical axes and initialiser are stated once, where the module makes it.
Modules are merged with their arrays inside `transformer.py` and never leave this package.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from policyopt.models.adapters import SWIGLU
from policyopt.models.config import ModelConfig
from policyopt.models.expert_parallel import moe_layer_sharded
from policyopt.sharding import DEFAULT_RULES, Rules, constrain
from policyopt.types import Array

SHARED = 1 << 20  # numbers
# Adapters of some projections of a layer, by name, as `adapters.ready` makes them.
Adapters = Mapping[str, Any]
NONE: Adapters = MappingProxyType({})
# q [B,T,H,hd], k, v [B,T,KV,hd] -> mixed values [B,T,H,hd], and whatever state came of it.
Mix = Callable[[Array, Array, Array], tuple[Array, Any]]


def param(
    config: ModelConfig, shape: tuple[int, ...], axes: tuple[str | None, ...], init: str | float
) -> nnx.Param:
    """Parameter by shape, logical axes and initialiser: 'ones', 'zeros' or a normal's std.

    Modules are made under `nnx.eval_shape` only: the value is never there, `initialise` draws it.
    """
    return nnx.Param(jnp.zeros(shape, jnp.dtype(config.param_dtype)), axes=axes, init=init)


def initialise(state: Any, key: Array, lead: tuple[int, ...] = ()) -> dict[str, Any]:
    """Arrays for an abstract module state, with leading axes `lead`, as a nested dict.

    Parameters of up to SHARED numbers are cut from one draw, since every draw costs a third of a
    second to compile; larger ones are drawn by themselves, so that each can be made sharded.
    """
    leaves = dict(nnx.to_flat_state(state))
    drawn = [path for path, leaf in leaves.items() if isinstance(_init(leaf), float)]
    small = [path for path in drawn if math.prod(leaves[path].shape) <= SHARED]
    sizes = [math.prod(leaves[path].shape) for path in small]
    keys = iter(jax.random.split(key, 1 + len(drawn)))
    cut = {}
    if small:
        shared = jax.random.normal(next(keys), (*lead, sum(sizes)))
        shared = constrain(shared, (None,) * shared.ndim)
        cut = dict(zip(small, jnp.split(shared, np.cumsum(sizes)[:-1], axis=-1), strict=True))
    out = {}
    for path, leaf in leaves.items():
        shape, init = (*lead, *leaf.shape), _init(leaf)
        if isinstance(init, float):
            part = cut[path].reshape(shape) if path in cut else jax.random.normal(next(keys), shape)
            out[path] = (init * part).astype(leaf.dtype)
        else:
            out[path] = jnp.full(shape, 1 if init == 'ones' else 0, leaf.dtype)
    return traverse_util.unflatten_dict(out)


def _init(leaf: Any) -> str | float:
    return leaf.get_metadata()['init']


# Elementwise work is done again in the backward pass: that takes no longer than to write what it
# needs and read it back, and the trunk's memory is a quarter less.
again = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(again, static_argnums=2)
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, statistics in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)


def rope_table(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines [..., hd/2], float32 at least, of each position's rotation angles.

    Frequencies are theta^(-2i/hd); 'linear' scaling divides them by the factor; 'llama3' divides
    those whose wavelength exceeds original_length / low, keeps those below original_length / high
    and interpolates between.
    """
    half = config.head_dim // 2
    wide = jnp.promote_types(config.compute_dtype, jnp.float32)
    inverse = config.rope_theta ** (-jnp.arange(half, dtype=wide) / half)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == 'linear':
        inverse = inverse / scaling.factor
    elif scaling is not None:
        turns = scaling.original_length * inverse / (2 * math.pi)
        keep = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        inverse = keep * inverse + (1 - keep) * inverse / scaling.factor
    angles = positions[..., None].astype(wide) * inverse
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding, halves convention: x [B,T,H,hd], cos and sin [B,T,hd/2]."""
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Projections of grouped-query attention; the mixing itself is the caller's function."""

    def __init__(self, config: ModelConfig):
        width, heads, groups, head = (
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        std = width**-0.5
        out = (heads * head * 2 * config.num_layers) ** -0.5
        kv_axes = ('embed', 'kv_heads', 'head_dim')
        self.q = param(config, (width, heads, head), ('embed', 'heads', 'head_dim'), std)
        self.k = param(config, (width, groups, head), kv_axes, std)
        self.v = param(config, (width, groups, head), kv_axes, std)
        self.o = param(config, (heads, head, width), ('heads', 'head_dim', 'embed'), out)
        if config.qkv_bias:
            self.q_bias = param(config, (heads, head), ('heads', 'head_dim'), 'zeros')
            self.k_bias = param(config, (groups, head), ('kv_heads', 'head_dim'), 'zeros')
            self.v_bias = param(config, (groups, head), ('kv_heads', 'head_dim'), 'zeros')
        if config.qk_norm:
            self.q_norm = param(config, (head,), ('head_dim',), 'ones')
            self.k_norm = param(config, (head,), ('head_dim',), 'ones')
        self.config = config

    def __call__(
        self, x: Array, rope: tuple[Array, Array], mix: Mix, adapters: Adapters = NONE
    ) -> tuple[Array, Any]:
        """x [B,T,D] -> [B,T,D], and the state that `mix` returned."""
        config = self.config

        def project(kernel: Any, name: str) -> Array:
            y = dense(x, kernel[...], config, adapter=adapters.get(name))
            if config.qkv_bias:
                y = y + getattr(self, f'{name}_bias')[...].astype(y.dtype)
            return y

        q, k, v = project(self.q, 'q'), project(self.k, 'k'), project(self.v, 'v')
        if config.qk_norm:
            q = rms_norm(q, self.q_norm[...], config.norm_eps)
            k = rms_norm(k, self.k_norm[...], config.norm_eps)
        out, state = mix(rotate(q, *rope), rotate(k, *rope), v)
        return dense(out, self.o[...], config, 2, adapters.get('o')), state


def dense(
    x: Array,
    kernel: Array,
    config: ModelConfig,
    contract: int = 1,
    adapter: Adapters | None = None,
) -> Array:
    """x [B,T,*in] @ kernel [*in,*out], `contract` axes in, in the config's dtype and precision.

    An adapter adds (x @ a [*in,r]) @ b [r,*out].

    As one matrix product over all tokens: with two token axes XLA transposes copies of the
    activations for the kernel's gradient, which on CPU takes the time of the product again.
    """
    dtype, out = config.compute_dtype, kernel.shape[contract:]
    inner = math.prod(kernel.shape[:contract])

    def product(x: Array, w: Array) -> Array:
        return jnp.einsum(
            'nd,df->nf',
            x,
            w.astype(dtype),
            precision=config.lax_precision,
            preferred_element_type=dtype,
        )

    rows = x.reshape(-1, inner)
    flat = product(rows, kernel.reshape(inner, -1))
    if adapter:
        a, b = adapter['a'], adapter['b']
        flat = flat + product(product(rows, a.reshape(inner, -1)), b.reshape(b.shape[0], -1))
    return flat.reshape(*x.shape[:2], *out)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), arXiv:2002.05202."""

    def __init__(self, config: ModelConfig):
        width, inner = config.embed_dim, config.mlp_dim
        out = (inner * 2 * config.num_layers) ** -0.5
        self.gate = param(config, (width, inner), ('embed', 'mlp'), width**-0.5)
        self.up = param(config, (width, inner), ('embed', 'mlp'), width**-0.5)
        self.down = param(config, (inner, width), ('mlp', 'embed'), out)
        self.config = config

    def __call__(self, x: Array, adapters: Adapters = NONE) -> Array:
        """[B,T,D] -> [B,T,D]."""
        gate = dense(x, self.gate[...], self.config, adapter=adapters.get('gate'))
        up = dense(x, self.up[...], self.config, adapter=adapters.get('up'))
        inner = again(lambda gate, up: jax.nn.silu(gate) * up)(gate, up)
        return dense(inner, self.down[...], self.config, adapter=adapters.get('down'))


class SharedExpert(nnx.Module):
    """Parameters of the feed-forward layer beside the routed experts."""

    def __init__(self, config: ModelConfig, inner: int):
        width = config.embed_dim
        out = (inner * 2 * config.num_layers) ** -0.5
        self.gate = param(config, (width, inner), ('embed', 'mlp'), width**-0.5)
        self.up = param(config, (width, inner), ('embed', 'mlp'), width**-0.5)
        self.down = param(config, (inner, width), ('mlp', 'embed'), out)
        if config.shared_gate:
            self.shared_gate = param(config, (width,), ('embed',), width**-0.5)


class MoE(nnx.Module):
    """Parameters of a mixture of experts; `expert_parallel.moe_layer_sharded` is the layer."""

    def __init__(self, config: ModelConfig):
        moe, width, inner = config.moe, config.embed_dim, config.expert_dim
        assert moe is not None
        out = (inner * 2 * config.num_layers) ** -0.5
        shape, axes = (moe.experts, width, inner), ('experts', 'embed', 'mlp')
        self.router = param(config, (moe.experts, width), (None, 'embed'), width**-0.5)
        self.gate = param(config, shape, axes, width**-0.5)
        self.up = param(config, shape, axes, width**-0.5)
        self.down = param(config, (moe.experts, inner, width), axes[::2] + ('embed',), out)
        if moe.selection_bias:
            self.bias = param(config, (moe.experts,), (None,), 'zeros')
        if moe.shared_experts:
            self.shared = SharedExpert(config, inner * moe.shared_experts)
        self.config = config

    def __call__(
        self,
        x: Array,
        valid: Array | None,
        routing: Array | None,
        rules: Rules,
        adapters: Adapters = NONE,
    ) -> tuple[Array, Any]:
        """x [B,T,D], valid [B,T], routing [B,T,k] -> y [B,T,D], (routing [B,T,k], aux)."""
        rows, length, width = x.shape
        config, moe = self.config, self.config.moe
        assert moe is not None
        params = nnx.to_pure_dict(nnx.state(self))
        for name in ('gate', 'up', 'down', 'shared'):
            if name in params:
                params[name] = jax.tree.map(lambda w: w.astype(config.compute_dtype), params[name])
        if shared := adapters.get('shared'):
            params['shared'] = {**params['shared'], 'adapters': shared}
        params['adapters'] = {name: adapters[name] for name in SWIGLU if name in adapters}
        y, used, aux = moe_layer_sharded(
            x.reshape(-1, width),
            params,
            moe,
            valid=None if valid is None else valid.reshape(-1),
            routing=None if routing is None else routing.reshape(-1, moe.top_k),
            backend=None if config.moe_backend == 'auto' else config.moe_backend,
            rules=rules,
        )
        return y.reshape(x.shape), (used.reshape(rows, length, moe.top_k), aux)


class Block(nnx.Module):
    """Pre-norm residual layer: attention, then a feed-forward layer of the given kind."""

    def __init__(self, config: ModelConfig, kind: str):
        self.norm1 = param(config, (config.embed_dim,), ('embed',), 'ones')
        self.attention = Attention(config)
        self.norm2 = param(config, (config.embed_dim,), ('embed',), 'ones')
        self.mlp = SwiGLU(config) if kind == 'dense' else MoE(config)
        self.config = config

    def __call__(
        self,
        x: Array,
        rope: tuple[Array, Array],
        mix: Mix,
        valid: Array | None = None,
        routing: Array | None = None,
        rules: Rules = DEFAULT_RULES,
        adapters: Adapters = NONE,
    ) -> tuple[Array, Any, Any]:
        """x [B,T,D] -> [B,T,D], state of `mix`, (routing [B,T,k], aux); () of a dense layer."""
        eps, mlp = self.config.norm_eps, adapters.get('mlp', NONE)
        normed = rms_norm(x, self.norm1[...], eps)
        mixed, state = self.attention(normed, rope, mix, adapters.get('attention', NONE))
        x = x + mixed
        inner = rms_norm(x, self.norm2[...], eps)
        if isinstance(self.mlp, SwiGLU):
            return x + self.mlp(inner, mlp), state, ()
        y, record = self.mlp(inner, valid, routing, rules, mlp)
        return x + y, state, record


class Trunk(nnx.Module):
    """Parameters outside the layers: embedding, final norm, head, scalar heads."""

    def __init__(self, config: ModelConfig):
        width, vocab = config.embed_dim, config.vocab_size
        self.embed = param(config, (vocab, width), ('vocab', 'embed'), 0.02)
        self.norm = param(config, (width,), ('embed',), 'ones')
        if not config.tied:
            self.head = param(config, (vocab, width), ('vocab', 'embed'), 0.02)
        for name in ('value', 'reward'):
            if getattr(config, f'{name}_head'):
                # Zeros: a fresh head says 0 everywhere and still has a gradient.
                setattr(self, name, param(config, (width,), ('embed',), 'zeros'))
