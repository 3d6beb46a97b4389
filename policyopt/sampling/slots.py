"""The jitted steps of the slot engine: prefill, admit, decode n tokens, feed observations.

Each is a pure function of parameters, cache and small per-slot arrays; parameters are an argument,
so new weights take effect with the next call and nothing is compiled. Compiled once for each prompt
bucket (prefill, admit) or attention bucket (decode, feed).

Shapes: N slots, S cache size, R prompts of a prefill of width P, M rows admitted at once or slots
that decode together.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policyopt import sharding
from policyopt.sampling.config import Finish
from policyopt.sampling.rules import Next, Rules, Static, next_token
from policyopt.types import Array, struct


@struct
class Live:
    """Rows between two calls; made on the host of numpy arrays.

    Attributes:
      active: [M] bool, rows that decode.
      fed: [M] int32, the token drawn last, not yet in the cache.
      drawn: [M] int32, tokens drawn so far.
      keys: [M,...] uint32, key data of each row.
    """

    active: Array
    fed: Array
    drawn: Array
    keys: Array


@struct
class Prefix:
    """Prompts in a cache of their own, to be copied into slots.

    Attributes:
      k, v: [L,R,KV,P,hd].
      length: [R] int32.
      logits: [R,V] float32, of the first token to draw.
      routing: [R,P,L_moe,k], None for dense models.
    """

    k: Array
    v: Array
    length: Array
    logits: Array
    routing: Array | None


class Records(NamedTuple):
    """What n decode steps did; entries past `steps` are empty.

    Attributes:
      steps: scalar int32, steps really taken.
      fed: [n,M] bool, a token of this slot went through the model.
      drew: [n,M] bool, a token was drawn.
      token, logp, logp_full: [n,M].
      support: [n,M,K], None where not truncated.
      routing: [n,M,L_moe,k] of the token fed, None for dense models.
      finish, fault: [M] int32, how each active slot stands at the end.
    """

    steps: Array
    fed: Array
    drew: Array
    token: Array
    logp: Array
    logp_full: Array
    support: Array | None
    routing: Array | None
    finish: Array
    fault: Array


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def empty(model: Any, slots: int, size: int) -> Any:
    """An empty cache of N slots, laid out on the ambient mesh."""
    return model.init_cache(slots, size)


@functools.partial(jax.jit, static_argnames=('model',))
def prefill(model: Any, params: Any, tokens: Array, count: Array, routing: Array | None) -> Prefix:
    """tokens [R,P] with count [R] real ones, and routing [R,P,L_moe,k] to replay or None."""
    rows, width = tokens.shape
    cache = model.init_cache(rows, width)
    hidden, cache = model.extend(params, cache, tokens, count, routing=routing)
    last = hidden.hidden[jnp.arange(rows), jnp.maximum(count - 1, 0)]
    return Prefix(
        k=cache.k,
        v=cache.v,
        length=cache.length,
        logits=model.logits(params, last),
        routing=hidden.routing,
    )


@functools.partial(jax.jit, static_argnames=('bucket',), donate_argnames=('into',))
def move(into: Any, cache: Any, source: Array, target: Array, *, bucket: int) -> Any:
    """Copy rows of a cache into another, which is donated, bit for bit.

    Args:
      into, cache: two caches of one model and size.
      source: [M] int32, rows of `cache`.
      target: [M] int32, where they go; past the last row of `into` for those that only fill up the
        shape.
      bucket: tokens of a row to copy.
    """

    def put(old: Array, new: Array) -> Array:
        return old.at[:, target, :, :bucket].set(new[:, source, :, :bucket], mode='drop')

    return dataclasses.replace(
        into,
        k=put(into.k, cache.k),
        v=put(into.v, cache.v),
        length=into.length.at[target].set(cache.length[source], mode='drop'),
    )


@functools.partial(jax.jit, static_argnames=('static', 'impl'), donate_argnames=('cache',))
def admit(
    cache: Any,
    constraint: Any,
    prefix: Prefix,
    source: Array,
    slots: Array,
    fresh: Any,
    live: Live,
    rules: Rules,
    *,
    static: Static,
    impl: Any,
) -> tuple[Any, Any, Next]:
    """Copy prompts into slots and draw the first token of each.

    Args:
      cache: of the engine; donated.
      constraint: state [N] of the constraint, or None.
      prefix: prompts that `prefill` ran.
      source: [M] int32, row of the prefix.
      slots: [M] int32, where it goes; N for the rows that only fill up the shape.
      fresh: state [M] of the constraint for the new rows, or None.
      live, rules: of the new rows, [M].
    """
    width = prefix.k.shape[3]

    def put(into: Array, new: Array) -> Array:
        return into.at[:, slots, :, :width].set(new[:, source], mode='drop')

    cache = dataclasses.replace(
        cache,
        k=put(cache.k, prefix.k),
        v=put(cache.v, prefix.v),
        length=cache.length.at[slots].set(prefix.length[source], mode='drop'),
    )
    keys = jax.random.wrap_key_data(live.keys, impl=impl)
    new = next_token(static, rules, keys, live.drawn, fresh, prefix.logits[source])
    if static.constraint is not None:
        moved = _advance(static, fresh, new, new.finish != Finish.ERROR)
        constraint = jax.tree.map(
            lambda old, x: old.at[slots].set(x, mode='drop'), constraint, moved
        )
    return cache, constraint, new


@functools.partial(
    jax.jit,
    static_argnames=('model', 'static', 'impl', 'steps', 'bucket', 'gather'),
    donate_argnames=('cache',),
)
def decode(
    model: Any,
    params: Any,
    cache: Any,
    constraint: Any,
    live: Live,
    rules: Rules,
    slots: Array | None,
    patience: Array,
    *,
    static: Static,
    impl: Any,
    steps: int,
    bucket: int,
    gather: bool = False,
) -> tuple[Any, Any, Records]:
    """Up to `steps` tokens for every active slot.

    Ends early when no slot is active, or when `patience` slots have ended: then a waiting prompt
    can have their place.

    Args:
      cache, constraint: of all N slots; the cache is donated.
      live, rules: of the M slots that decode.
      slots: [M] int32, which these are; N for rows that only fill up the shape. None: all N, in
        order, and nothing is copied.
      bucket: as in `model.extend`.
      gather: see `EngineConfig`.
    """
    if gather:
        model, params = _gathered(model, params)
    whole = cache, constraint
    cache, constraint = _take(cache, constraint, slots, bucket)
    keys = jax.random.wrap_key_data(live.keys, impl=impl)

    def going(carry: Any) -> Array:
        _, _, live, records = carry
        ended = jnp.sum(records.finish > Finish.RUNNING)
        return (records.steps < steps) & jnp.any(live.active) & (ended < patience)

    def body(carry: Any) -> Any:
        cache, constraint, live, records = carry
        active = live.active
        hidden, cache = model.extend(
            params, cache, live.fed[:, None], active.astype(jnp.int32), bucket=bucket
        )
        logits = model.logits(params, hidden.hidden[:, 0])
        new = next_token(static, rules, keys, live.drawn, constraint, logits)
        drew = active & (new.finish != Finish.ERROR)
        constraint = _advance(static, constraint, new, drew)
        records = _record(records, new, active, drew, hidden.routing)
        live = Live(
            active=active & (new.finish == Finish.RUNNING),
            fed=jnp.where(drew, new.draw.token, live.fed),
            drawn=live.drawn + drew,
            keys=live.keys,
        )
        return cache, constraint, live, records

    records = _no_records(model, params, cache, live.active, static, steps, bucket)
    carry = (cache, constraint, jax.tree.map(jnp.asarray, live), records)
    cache, constraint, _, records = jax.lax.while_loop(going, body, carry)
    return *_put(*whole, cache, constraint, slots), records


def _gathered(model: Any, params: Any) -> tuple[Any, Any]:
    """Parameters as `sharding.gathered_rules` lay them out, and the model of those rules."""
    rules = sharding.gathered_rules(model.rules)
    pin = functools.partial(sharding.constrain, rules=rules)
    axes = {name: axes for name, axes in model.axes().items() if name in params}
    return dataclasses.replace(model, rules=rules), jax.tree.map(pin, params, axes)


def _take(cache: Any, constraint: Any, slots: Array | None, bucket: int) -> tuple[Any, Any]:
    """Cache, as far as `bucket`, and state of these slots alone."""
    if slots is None:
        return cache, constraint
    take = functools.partial(jnp.take, indices=slots, mode='clip')
    small = dataclasses.replace(
        cache,
        k=take(cache.k[:, :, :, :bucket], axis=1),
        v=take(cache.v[:, :, :, :bucket], axis=1),
        length=take(cache.length, axis=0),
    )
    return small, jax.tree.map(functools.partial(take, axis=0), constraint)


def _put(cache: Any, constraint: Any, small: Any, state: Any, slots: Array | None):
    """The inverse of `_take`: cache and state of all slots."""
    if slots is None:
        return small, state
    width = small.size
    cache = dataclasses.replace(
        cache,
        k=cache.k.at[:, slots, :, :width].set(small.k, mode='drop'),
        v=cache.v.at[:, slots, :, :width].set(small.v, mode='drop'),
        length=cache.length.at[slots].set(small.length, mode='drop'),
    )
    put = lambda old, x: old.at[slots].set(x, mode='drop')  # noqa: E731
    return cache, jax.tree.map(put, constraint, state)


def _no_records(model, params, cache, active, static, steps, bucket) -> Records:
    """Room for what `steps` steps do."""
    rows = active.shape[0]
    shapes = jax.eval_shape(
        lambda p, c, t: model.extend(p, c, t, jnp.zeros_like(c.length), bucket=bucket)[0].routing,
        params,
        cache,
        jnp.zeros((rows, 1), jnp.int32),
    )

    def empty(*shape: int, dtype: Any = jnp.float32, fill: int = 0) -> Array:
        return jnp.full((steps, rows, *shape), fill, dtype)

    return Records(
        steps=jnp.zeros((), jnp.int32),
        fed=empty(dtype=bool),
        drew=empty(dtype=bool),
        token=empty(dtype=jnp.int32),
        logp=empty(),
        logp_full=empty(),
        support=None if static.size is None else empty(static.size, dtype=jnp.int32, fill=-1),
        routing=None if shapes is None else empty(*shapes.shape[2:], dtype=shapes.dtype, fill=-1),
        finish=jnp.where(active, Finish.RUNNING, -1).astype(jnp.int32),
        fault=jnp.zeros(rows, jnp.int32),
    )


def _record(records: Records, new: Next, active: Array, drew: Array, routing: Any) -> Records:
    """One step more."""
    written: dict[str, Any] = dict(
        fed=active,
        drew=drew,
        token=new.draw.token,
        logp=new.draw.logp,
        logp_full=new.draw.logp_full,
    )
    if records.support is not None:
        written['support'] = new.draw.support
    if records.routing is not None:
        written['routing'] = routing[:, 0]
    at = records.steps
    return records._replace(
        steps=at + 1,
        finish=jnp.where(active, new.finish, records.finish),
        fault=jnp.where(active, new.draw.fault, records.fault),
        **{name: getattr(records, name).at[at].set(x) for name, x in written.items()},
    )


@functools.partial(
    jax.jit, static_argnames=('model', 'static', 'impl', 'bucket'), donate_argnames=('cache',)
)
def feed(
    model: Any,
    params: Any,
    cache: Any,
    constraint: Any,
    tokens: Array,
    count: Array,
    draws: Array,
    live: Live,
    rules: Rules,
    *,
    static: Static,
    impl: Any,
    bucket: int,
) -> tuple[Any, Any, Next, Array | None]:
    """Append count [N] of tokens [N,C] to the slots, and draw a token where `draws` [N].

    Returns cache, constraint, the draw, and the routing [N,C,L_moe,k] of what was fed.
    """
    hidden, cache = model.extend(params, cache, tokens, count, bucket=bucket)
    rows = jnp.arange(count.shape[0])
    last = hidden.hidden[rows, jnp.maximum(count - 1, 0)]
    keys = jax.random.wrap_key_data(live.keys, impl=impl)
    new = next_token(static, rules, keys, live.drawn, constraint, model.logits(params, last))
    constraint = _advance(static, constraint, new, draws & (new.finish != Finish.ERROR))
    return cache, constraint, new, hidden.routing


def _advance(static: Static, state: Any, new: Next, drew: Array) -> Any:
    """State of the constraint after a draw, as it was in rows that drew nothing."""
    if static.constraint is None:
        return state
    moved = static.constraint.advance(state, new.draw.token)

    def pick(old: Array, x: Array) -> Array:
        return jnp.where(drew.reshape(-1, *(1,) * (x.ndim - 1)), x, old)

    return jax.tree.map(pick, state, moved)
