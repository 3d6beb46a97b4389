"""A decoder as pure functions of a plain params dict."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from policyopt.models import adapters as adapters_lib
from policyopt.models import stack
from policyopt.models.adapters import AdapterConfig
from policyopt.models.attention import attention, cached_attention
from policyopt.models.cache import CACHE, Cache, init_cache, read, write
from policyopt.models.config import ModelConfig
from policyopt.models.layers import Block, Trunk, initialise, rms_norm, rope_table
from policyopt.sharding import DEFAULT_RULES, Rules, constrain, make_rules
from policyopt.types import Array

Params = dict[str, Any]
ACTIVATION = ('batch', 'length', None)


class Hidden(NamedTuple):
    """What the trunk says of each token.

    Attributes:
      hidden: [B,T,D], states after the final norm.
      routing: [B,T,L_moe,k] int8 or int16, the experts used in each mixture layer (layer i of the
        axis is the i-th 'moe' of `config.kinds`), -1 on padding; None for a dense model.
      aux: {} for a dense model; else `load_balance`, `router_z` and `replay_agreement`, each a
        `Mean` over tokens and mixture layers, and `load` [L_moe,E], tokens each expert took.
    """

    hidden: Array
    routing: Array | None
    aux: dict[str, Array]


class Output(NamedTuple):
    """Logits [B,T,V] float32 (logits[:, t] predict token t + 1), routing and aux as in Hidden."""

    logits: Array
    routing: Array | None
    aux: dict[str, Array]


def _modules(config: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Name -> (graphdef, abstract state with axes) of the trunk and of each kind of layer.

    Raises ValueError for a float64 field while jax_enable_x64 is off: jax would make it float32.
    """
    if not jax.config.read('jax_enable_x64'):
        for field in ('dtype', 'param_dtype'):
            if getattr(config, field) == 'float64':
                raise ValueError(
                    f"{field}='float64' needs jax_enable_x64; legal without it: float32 and "
                    'narrower'
                )
    return _split(config)


@functools.lru_cache(maxsize=64)
def _split(config: ModelConfig) -> dict[str, tuple[Any, Any]]:
    names = ('trunk', *dict.fromkeys(config.kinds))
    return {
        name: nnx.split(nnx.eval_shape(functools.partial(_make, config, name))) for name in names
    }


def _make(config: ModelConfig, name: str) -> nnx.Module:
    return Trunk(config) if name == 'trunk' else Block(config, name)


def _merge(config: ModelConfig, name: str, params: Params) -> Any:
    return nnx.merge(_modules(config)[name][0], params)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder: its config, its tokenizer, and pure functions of a params dict.

    Params are a nested dict of arrays: `embed` [V,D], `norm` [D], `head` [V,D] where untied,
    `value` and `reward` [D] where configured, and one dict for each kind of layer whose arrays
    are stacked over the layers of that kind; and `adapters`, where the model has some, in the same
    form: without that entry they are off. Hashable, so that it can be closed over or static.
    """

    config: ModelConfig
    tokenizer: Any = dataclasses.field(default=None, compare=False)
    rules: Rules = DEFAULT_RULES
    adapters: AdapterConfig | None = None

    def init(self, key: Array) -> Params:
        """Fresh params from a key; jit it with out_shardings to make them sharded."""
        kinds, parts = self.config.kinds, _modules(self.config)
        keys = jax.random.split(key, len(parts))
        params: Params = {}
        for part_key, (name, (_, state)) in zip(keys, parts.items(), strict=True):
            if name == 'trunk':
                params |= initialise(state, part_key)
            else:
                params[name] = initialise(state, part_key, (kinds.count(name),))
        if self.adapters is not None:
            own = jax.random.fold_in(key, len(parts))
            params[adapters_lib.KEY] = adapters_lib.init(self.adapters, params, own)
        return params

    def axes(self) -> Params:
        """Logical axes of each parameter, as `init` lays them out; leaves are tuples of names."""

        def named(state: Any, lead: tuple[str, ...]) -> Params:
            flat = nnx.to_flat_state(state)
            return traverse_util.unflatten_dict(
                {path: lead + leaf.get_metadata()['axes'] for path, leaf in flat}
            )

        trunk, *kinds = _modules(self.config).items()
        base = named(trunk[1][1], ()) | {
            kind: named(state, ('layers',)) for kind, (_, state) in kinds
        }
        if self.adapters is None:
            return base
        return base | {adapters_lib.KEY: adapters_lib.axes(self.adapters, base)}

    def shapes(self) -> Params:
        """jax.ShapeDtypeStruct of each parameter."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def head(self, params: Params) -> Array:
        """Output matrix [V,D]: the embedding where tied."""
        return params['embed'] if self.config.tied else params['head']

    def hidden(
        self,
        params: Params,
        tokens: Array,
        *,
        valid: Array | None = None,
        positions: Array | None = None,
        segments: Array | None = None,
        routing: Array | None = None,
    ) -> Hidden:
        """States after the final norm.

        Args:
          params: as `init` makes them.
          tokens: [B,T] int.
          valid: [B,T] bool, True on real tokens (right padding); None where all are.
          positions: [B,T] int for the rotation; by default 0..T-1, from 0 in each segment.
          segments: [B,T] int, id of the sequence a token belongs to in a packed row; sequences
            are contiguous and see only themselves.
          routing: [B,T,L_moe,k] experts to replay, -1 where there is none.
        """
        chex.assert_rank(tokens, 2)
        chex.assert_equal_shape([a for a in (tokens, valid, positions, segments) if a is not None])
        config = self.config
        if positions is None:
            positions = _positions(tokens, segments)
        rope = rope_table(config, positions)
        attend = functools.partial(
            attention,
            backend=config.attention,
            precision=config.lax_precision,
            rules=self.rules,
        )

        def mix(layer, state, q, k, v):
            del layer
            return attend(q, k, v, valid=valid, segments=segments), state

        x = self._embed(params, tokens)
        x, _, routing, aux = self._layers(params, x, None, mix, rope, valid, routing)
        return Hidden(rms_norm(x, params['norm'], config.norm_eps), routing, aux)

    def apply(self, params: Params, tokens: Array, **kwargs: Any) -> Output:
        """Logits [B,T,V], float32 at least; arguments as in `hidden`."""
        out = self.hidden(params, tokens, **kwargs)
        return Output(self.logits(params, out.hidden), out.routing, out.aux)

    def logits(self, params: Params, hidden: Array) -> Array:
        """hidden [...,D] @ head^T -> [...,V], float32 at least."""
        flat = jnp.einsum(
            'nd,vd->nv',
            hidden.reshape(-1, hidden.shape[-1]),
            self.head(params).astype(hidden.dtype),
            precision=self.config.lax_precision,
            preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32),
        )
        return flat.reshape(*hidden.shape[:-1], -1)

    def value(self, params: Params, hidden: Array) -> Array:
        """Scalar per token, float32: hidden [...,D] -> [...]; needs config.value_head."""
        return self._scalar(params, 'value', hidden)

    def reward(self, params: Params, hidden: Array, length: Array | None = None) -> Array:
        """Scalar per row, float32, read at its last token: hidden [B,T,D], length [B] -> [B]."""
        if length is None:
            last = hidden[:, -1]
        else:
            index = jnp.maximum(length - 1, 0)[:, None, None]
            last = jnp.take_along_axis(hidden, index, axis=1)[:, 0]
        return self._scalar(params, 'reward', last)

    def init_cache(self, batch: int, size: int) -> Cache:
        """Empty cache of `batch` rows, `size` tokens each; under jit on a mesh, laid out on it."""
        cache = init_cache(self.config, batch, size)
        return dataclasses.replace(cache, k=self._split(cache.k), v=self._split(cache.v))

    def _split(self, cache: Array) -> Array:
        return constrain(cache, CACHE, self.rules)

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Array,
        count: Array,
        *,
        routing: Array | None = None,
        bucket: int | None = None,
    ) -> tuple[Hidden, Cache]:
        """Append count[b] tokens to row b of the cache at its own length, and their states.

        Prefill, one-token decode and the extension by tool output are this one function.

        Args:
          params: as `init` makes them.
          cache: as `init_cache` makes it or `extend` returns it.
          tokens: [B,C] int; those past `count` change nothing, and their states mean nothing.
          count: [B] int, at most C each; 0 leaves a row as it is.
          routing: [B,C,L_moe,k] experts to replay, -1 where there is none.
          bucket: static; attention reads the first `bucket` cache positions only. It must be at
            least each row's new length: what lies past it is not seen. None: the whole cache.

        What it can't check under jit: that length + count stays within the cache and the bucket.
        Tokens past the cache's end are dropped.
        """
        chex.assert_rank(tokens, 2)
        chex.assert_equal_shape([count, cache.length])
        config, width = self.config, tokens.shape[1]
        rope = rope_table(config, cache.length[:, None] + jnp.arange(width)[None])
        size = cache.size if bucket is None else min(bucket, cache.size)
        attend = functools.partial(
            cached_attention, backend=config.attention, precision=config.lax_precision
        )

        def mix(layer, state, q, k, v):
            at = layer, cache.length, count
            keys = self._split(write(state[0], *at, k, self.rules))
            values = self._split(write(state[1], *at, v, self.rules))
            seen = read(keys, layer, size), read(values, layer, size, cache.length + count)
            return attend(q, *seen, cache.length), (keys, values)

        valid = jnp.arange(width)[None] < count[:, None]
        x = self._embed(params, tokens)
        x, (k, v), routing, aux = self._layers(
            params, x, (cache.k, cache.v), mix, rope, valid, routing
        )
        hidden = rms_norm(x, params['norm'], config.norm_eps)
        return Hidden(hidden, routing, aux), Cache(k=k, v=v, length=cache.length + count)

    def _embed(self, params: Params, tokens: Array) -> Array:
        # A lookup in a table that is split both ways would gather all of it on every device.
        table = constrain(params['embed'], ('vocab', None), self.rules)
        return constrain(table[tokens].astype(self.config.compute_dtype), ACTIVATION, self.rules)

    def _scalar(self, params: Params, name: str, hidden: Array) -> Array:
        if name not in params:
            raise ValueError(f'the model has no {name} head: set config.{name}_head=True')
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        return jnp.einsum(
            '...d,d->...',
            hidden.astype(wide),
            params[name].astype(wide),
            precision=self.config.lax_precision,
        )

    def _layers(self, params, x, state, mix, rope, valid, routing):
        """All layers: x, state, routing [B,T,L_moe,k] or None, aux."""
        config, rules = self.config, self.rules
        if routing is not None:
            _check_routing(config, x, routing)
            routing = jnp.moveaxis(routing, 2, 0)

        tuned = params.get(adapters_lib.KEY, {})
        if tuned and self.adapters is None:
            raise ValueError('params have adapters, but the model has none: use `attach`')

        def layer(kind, index, carry, layer_params, recorded):
            (x, state), (own, low) = carry, layer_params
            block = _merge(config, kind, own)
            attend = functools.partial(mix, index, state)
            low = adapters_lib.ready(low, self.adapters, config.compute_dtype)
            x, state, record = block(x, rope, attend, valid, recorded, rules, low)
            return (constrain(x, ACTIVATION, rules), state), record

        stacked = {kind: (params[kind], tuned.get(kind)) for kind in config.kinds}
        (x, state), records = stack.run(
            layer, (x, state), stacked, config.kinds, {'moe': routing}, config.remat
        )
        if 'moe' not in records:
            return x, state, None, {}
        used, aux = records['moe']
        total = {
            name: jax.tree.map(lambda a: jnp.sum(a, axis=0), value) if name != 'load' else value
            for name, value in aux.items()
        }
        return x, state, jnp.moveaxis(used, 0, 2), total


def _check_routing(config: ModelConfig, x: Array, routing: Array) -> None:
    if config.moe is None:
        raise ValueError('routing is given, but the model has no mixture-of-experts layer')
    chex.assert_type(routing, int)
    chex.assert_shape(routing, (*x.shape[:2], config.kinds.count('moe'), config.moe.top_k))


def _positions(tokens: Array, segments: Array | None) -> Array:
    """0..T-1, counted from 0 in each segment; [B,T] int32."""
    steps = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segments is None:
        return steps
    starts = jnp.concatenate(
        [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    return steps - jax.lax.cummax(jnp.where(starts, steps, 0), axis=1)


def build(config: ModelConfig, tokenizer: Any = None, rules: Any = None) -> Model:
    """Model of this config; `rules` maps logical axes to mesh axes (`sharding.make_rules`)."""
    return Model(config=config, tokenizer=tokenizer, rules=make_rules(rules))
