"""The programs of a run, with the shapes of their arguments: nothing is allocated or computed.

train: `Learner.update` on one minibatch. score: `Learner.recompute`, which is also what a reference
policy costs. prefill and decode: those of the slot engine. Rows are taken to be full: every token
of the width is there, and every one behind the prompt is the policy's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from policyopt import optimizer, recipe, scoring, sharding
from policyopt.models.cache import CACHE
from policyopt.models.router import routing_dtype
from policyopt.sampling import slots as slots_lib
from policyopt.sampling.config import EngineConfig
from policyopt.sampling.rules import make_rules
from policyopt.types import TokenBatch

STEPS = ('train', 'score', 'prefill', 'decode')


class Program(NamedTuple):
    """One program of a run.

    Attributes:
      lower: () -> jax.stages.Lowered.
      tokens: of the whole mesh, that one run of it takes in or draws.
      loops: turns of loops that data decide, see `costs.count`.
      held: bytes on one device by what the arguments are: parameters, optimizer, cache, batch.
      filled: share of its rows that a kernel works on, see `costs.count`.
    """

    lower: Callable[[], Any]
    tokens: int
    loops: Mapping[str, int]
    held: Mapping[str, float]
    filled: Mapping[str, float]


class Sizes(NamedTuple):
    """Rows and tokens of a run's programs.

    Attributes:
      rows: of a minibatch.
      micro: of them, those that go through the model at once.
      width: tokens of a row, prompt and answer.
      prompt: tokens of a prompt.
      slots: rows that decode together.
      steps: tokens that one call of the decoder draws for each.
      prefill: prompts of a prefill.
      gather: whether the decoder gathers weights once for its tokens, see `EngineConfig`.
    """

    rows: int
    micro: int
    width: int
    prompt: int
    slots: int
    steps: int
    prefill: int
    gather: bool = False


def sizes_of(c: Any) -> Sizes:
    """Sizes of a `recipe.RunConfig`; without an engine, of one with a slot for each row of a chunk.

    Raises ValueError for a task that is played in turns, whose rows are as long as its environment
    makes them.
    """
    tasks = [c.task] if c.task is not None else list(c.tasks.values())
    if any(task.environment for task in tasks):
        raise ValueError(
            'config.task is played in turns, and its environment decides how long rows are; legal '
            'is a task whose prompt_width + sampling.max_new_tokens is the longest row'
        )
    prompt = max(task.prompt_width for task in tasks)
    each = c.rollout.prompts * c.rollout.group_size
    engine = c.rollout.engine or EngineConfig(slots=each // c.rollout.chunks)
    rows, micro = each // c.minibatches, each // (c.minibatches * c.microbatches)
    if c.length_buckets is not None:
        micro = max(c.length_buckets.token_budget // c.length_buckets.widths[-1], 1)
    width = prompt + c.sampling.max_new_tokens
    whole = engine.slots, engine.steps, engine.prefill_rows, engine.gather
    return Sizes(rows, micro, width, prompt, *whole)


def programs(setup: recipe.Setup) -> dict[str, Program]:
    """Name -> program of a run, laid out on `setup.mesh`, which there must be."""
    sizes = sizes_of(setup.config)
    sizes, setup = _equal_parts(setup, sizes)
    learner = recipe.make_learner(setup)
    whole = train_state(setup, learner)
    found = _learning(setup, sizes, learner, whole)
    return found | _sampling(setup, sizes, whole.params)


def _within(mesh: Any, lower: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with jax.set_mesh(mesh):
            return lower()

    return run


def _equal_parts(setup: recipe.Setup, sizes: Sizes) -> tuple[Sizes, recipe.Setup]:
    """Length buckets as what they come to for full rows: equal microbatches of the widest."""
    c = setup.config
    if c.length_buckets is None:
        return sizes, setup
    with jax.set_mesh(setup.mesh):
        shards = sharding.batch_shards(setup.model.rules)
    micro = math.gcd(max(sizes.micro // shards, 1) * shards, sizes.rows)
    whole = dataclasses.replace(c, length_buckets=None, microbatches=sizes.rows // micro)
    return sizes._replace(micro=micro), setup._replace(config=whole)


# ============================================================================ learning


def _learning(setup: Any, sizes: Sizes, learner: Any, whole: Any) -> dict[str, Program]:
    batch, mesh = token_batch(setup, sizes), setup.mesh
    held = {
        'parameters': device_bytes(whole.params),
        'optimizer': device_bytes((whole.opt_state, whole.ema, whole.critic)),
        'batch': device_bytes(batch),
    }
    tokens, loops, filled = sizes.rows * sizes.width, _loops(setup, sizes), filled_of(setup)

    def score(params: Any, batch: Any) -> Any:
        return learner.recompute(params, batch).logp_old

    train = _within(mesh, lambda: learner.update.lower(whole, batch))
    scored = _within(mesh, lambda: jax.jit(score).lower(whole.params, batch))
    less = {name: size for name, size in held.items() if name != 'optimizer'}
    return {
        'train': Program(train, tokens, loops, held, filled),
        'score': Program(scored, tokens, loops, less, filled),
    }


def _loops(setup: recipe.Setup, sizes: Sizes) -> dict[str, int]:
    """Turns of the scoring loop, over chunks of active tokens, where all rows are full."""
    c, config = setup.config, setup.model.config
    kept = c.sampling.size(config.vocab_size) if c.replay.support else None
    with jax.set_mesh(setup.mesh):
        shards = sharding.batch_shards(setup.model.rules)
        head = config.vocab_size, config.embed_dim
        size = scoring.tokens_at_once(None, head, kept, setup.model.rules)
    shards = 1 if sizes.micro % shards else shards
    rows = sizes.micro // shards
    size = min(max(size // shards, 1), rows * sizes.width)
    return {'while': -(-rows * (sizes.width - sizes.prompt) // size)}


def filled_of(setup: recipe.Setup) -> dict[str, float]:
    """Share of the rows of `ragged_dot` that are there where tokens choose all experts equally.

    A device's buffer has room for the case that all tokens choose its experts, and the kernel works
    on the rows that did. How many do is decided by the data; assumed here is that every expert gets
    its even part, as a load-balance loss wants. Of the busiest device it is between that and 1.
    """
    if setup.model.config.moe is None:
        return {}
    sizes = dict(setup.mesh.shape)
    shards = math.prod(sizes.get(axis, 1) for axis in dict(setup.model.rules).get('experts', ()))
    return {'ragged-dot': 1 / shards}


def train_state(setup: recipe.Setup, learner: Any) -> Any:
    """Abstract TrainState, laid out on the mesh as the learner's own `init` lays it out."""
    model, own, mesh = setup.model, setup.critic_model, setup.mesh
    # Without the mesh: a layout would be asked of arrays that are not there.
    shapes = jax.eval_shape(optimizer.masters, model.shapes())
    critic = None if own is None else jax.eval_shape(optimizer.masters, own.shapes())
    key = jax.eval_shape(lambda: jax.random.key(0))
    whole = jax.eval_shape(learner.init, shapes, key, critic)
    layouts = [(shapes, sharding.param_shardings(model.axes(), shapes, mesh, model.rules))]
    if own is not None:
        layouts.append((critic, sharding.param_shardings(own.axes(), critic, mesh, own.rules)))
    return _laid_out(whole, layouts, mesh)


def _laid_out(tree: Any, layouts: list[tuple[Any, Any]], mesh: Any) -> Any:
    """Parts of the tree that have the structure of parameters get their layout, others none."""
    known = [(jax.tree.structure(shapes), placed) for shapes, placed in layouts]

    def like_params(x: Any) -> bool:
        return any(jax.tree.structure(x) == structure for structure, _ in known)

    def put(x: Any) -> Any:
        structure = jax.tree.structure(x)
        for own, placed in known:
            if structure == own:
                return jax.tree.map(_abstract, x, placed)
        return _abstract(x, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(put, tree, is_leaf=like_params)


def _abstract(x: Any, placed: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)


def _rows(setup: recipe.Setup, tree: Any) -> Any:
    """Shapes [B,...], their rows split as `sharding.feed` splits them."""

    def one(x: Any) -> Any:
        axes = ('batch',) + (None,) * (len(x.shape) - 1)
        spec = sharding.mesh_spec(axes, x.shape, setup.model.rules) if x.shape else None
        return _abstract(x, NamedSharding(setup.mesh, spec or PartitionSpec()))

    with jax.set_mesh(setup.mesh):
        return jax.tree.map(one, tree)


def token_batch(setup: recipe.Setup, sizes: Sizes) -> TokenBatch:
    """Abstract minibatch, with the fields that the run's rollouts have."""
    c, config, needed = setup.config, setup.model.config, setup.needed
    rows, width = sizes.rows, sizes.width

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    real, whole = array(jnp.float32, width), array(jnp.int32, width)
    fields: dict[str, Any] = dict(tokens=whole, segment=whole, version=whole)
    fields |= dict.fromkeys(('mask', 'advantages', 'logp_old', 'logp_behavior'), real)
    fields |= dict.fromkeys(('length', 'prompt_length', 'group', 'finish'), array(jnp.int32))
    fields |= dict(rewards=array(jnp.float32), positive=array(jnp.bool_))
    fields |= {'logp_ref': real} if 'logp_ref' in needed else {}
    if needed & {'values', 'values_old', 'returns'}:
        fields |= dict(values_old=real, returns=real)
    kept = c.sampling.size(config.vocab_size) if c.replay.support else None
    if kept is not None:
        fields['support'] = array(jnp.int32, width, kept)
    if config.moe is not None and c.replay.routing is not None:
        dtype = routing_dtype(config.moe.experts)
        fields['routing'] = array(dtype, width, config.kinds.count('moe'), config.moe.top_k)
    return _rows(setup, TokenBatch(**fields))


# ============================================================================ sampling


def _sampling(setup: recipe.Setup, sizes: Sizes, params: Any) -> dict[str, Program]:
    model, mesh, c = setup.model, setup.mesh, setup.config
    static, rules = make_rules(model, c.sampling, sizes.slots)
    rules = dataclasses.replace(rules, rows=_rows(setup, rules.rows))
    cache = jax.eval_shape(lambda: model.init_cache(sizes.slots, sizes.width))
    cache = _cache(setup, cache)
    key = jax.random.key(0)
    data = jax.eval_shape(lambda: jax.random.key_data(key))
    ids = jax.ShapeDtypeStruct((sizes.slots,), jnp.int32)
    live = slots_lib.Live(
        active=jax.ShapeDtypeStruct((sizes.slots,), jnp.bool_),  # type: ignore[arg-type]
        fed=ids,  # type: ignore[arg-type]
        drawn=ids,  # type: ignore[arg-type]
        keys=jax.ShapeDtypeStruct((sizes.slots, *data.shape), data.dtype),  # type: ignore[arg-type]
    )
    live, patience = _rows(setup, live), jax.ShapeDtypeStruct((), jnp.int32)
    prompts = jax.ShapeDtypeStruct((sizes.prefill, sizes.prompt), jnp.int32)
    count = jax.ShapeDtypeStruct((sizes.prefill,), jnp.int32)
    prompts, count = _rows(setup, (prompts, count))

    def decode() -> Any:
        return slots_lib.decode.lower(
            model, params, cache, None, live, rules, None, patience,
            static=static, impl=jax.random.key_impl(key), steps=sizes.steps, bucket=sizes.width,
            gather=sizes.gather,
        )  # fmt: skip

    def prefill() -> Any:
        return slots_lib.prefill.lower(model, params, prompts, count, None)

    held, filled = {'parameters': device_bytes(params)}, filled_of(setup)
    return {
        'prefill': Program(_within(mesh, prefill), sizes.prefill * sizes.prompt, {}, held, filled),
        'decode': Program(
            _within(mesh, decode),
            sizes.slots * sizes.steps,
            {'while': sizes.steps},
            held | {'cache': device_bytes(cache)},
            filled,
        ),
    }


def _cache(setup: recipe.Setup, cache: Any) -> Any:
    """An abstract cache, laid out as `Model.init_cache` lays it out."""

    def one(x: Any) -> Any:
        axes = CACHE if len(x.shape) == len(CACHE) else (None,)
        spec = sharding.mesh_spec(axes, x.shape, setup.model.rules)
        return _abstract(x, NamedSharding(setup.mesh, spec or PartitionSpec()))

    with jax.set_mesh(setup.mesh):
        return jax.tree.map(one, cache)


def device_bytes(tree: Any) -> float:
    """Bytes of a device's part of abstract arrays."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        placed = getattr(x, 'sharding', None)
        shape = x.shape if placed is None else placed.shard_shape(x.shape)
        itemsize = 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
        total += math.prod(shape) * itemsize
    return total
