"""Small policies that claims are measured on, warm-started once and kept in a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from configs import quickstart
from experiments.claim import Place
from policyopt import disk, models, optimizer, recipe, rollout, stopping, warm_start
from policyopt import loop as loop_lib

EMBED, EXPERT, LAYERS = 96, 128, 4  # 1.4 million parameters as a mixture, 0.5 million dense
ROUTER_NOISE = 0.1  # of a mismatched sampler
SEP = '/'
# Experts, and one feed-forward layer as wide as those that a token sees.
MIXTURE = dict(expert_dim=EXPERT, moe=dict(experts=8, top_k=2))
DENSE = dict(expert_dim=0, moe=None, mlp_dim=2 * EXPERT)


def config(place: Place, algorithm: str = 'grpo', **changes: Any) -> dict[str, Any]:
    """The quickstart's problems and sizes of about a million parameters, with fields replaced.

    Two-digit sums, answers of four tokens at most, a warm start to 20-40 % of the held-out
    problems; by default a mixture of 8 experts, 2 for each token, nothing truncated.
    Arguments of the algorithm are its defaults, those of the paper.
    """
    c = quickstart.get_config(f'algorithm={algorithm}' + ',tiny=true' * place.fast)
    c.algorithm_kw = {}
    c.seed = place.seed
    if not place.fast:
        c.model = dict(MIXTURE, embed_dim=EMBED, num_layers=LAYERS, num_heads=4, num_kv_heads=4)
        c.warm_start.accuracy = (0.2, 0.4)
        c.evaluation = dict(every=10**6, batch=512, temperature=0.0, samples=0)
    c.sampling = dict(max_new_tokens=c.sampling.max_new_tokens, temperature=1.0)
    c.checkpoint = dict(every=0)
    c.dynamic_sampling = False
    c.ema = None
    c.router = dict()
    out = c.to_dict()
    for name, value in changes.items():
        out[name] = value if name not in out or not isinstance(value, dict) else out[name] | value
    return out


def warm(setup: recipe.Setup, place: Place) -> Any:
    """Parameters of the setup's warm start: those in the folder, or made now and left there."""
    c = setup.config
    named = [c.seed, c.model, c.task, c.warm_start, c.sampling.max_new_tokens]
    digest = hashlib.sha256(json.dumps(named, default=repr, sort_keys=True).encode()).hexdigest()
    path = place.folder / 'policies' / f'{digest[:16]}.npz'
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        records = path.with_suffix('.jsonl')
        records.unlink(missing_ok=True)
        first = recipe.first_params(setup)
        params, _ = warm_start.warm_start(setup, first, records, stopping.Stop())
        with disk.whole(path) as partial, open(partial, 'wb') as file:
            np.savez(file, **traverse_util.flatten_dict(jax.device_get(params), sep=SEP))
    with np.load(path) as held:
        return traverse_util.unflatten_dict({n: jnp.asarray(held[n]) for n in held}, sep=SEP)


def begin(place: Place, **changes: Any) -> tuple[recipe.Setup, loop_lib.Loop, loop_lib.Point]:
    """A run from a warm-started policy, before its first RL step."""
    setup = recipe.prepare(config(place, **changes))
    loop = loop_lib.make_loop(setup, Path(place.folder), None, stopping.Stop())
    return setup, loop, loop_lib.new_point(setup, loop, warm(setup, place), None, 1)


def mismatched(setup: recipe.Setup, loop: loop_lib.Loop, seed: int) -> loop_lib.Loop:
    """The loop with a sampler that differs from the trainer as separate engines do.

    It computes in bfloat16, and normal noise of ROUTER_NOISE times their spread is on its routers'
    weights, the same in every step.
    """
    c = setup.config
    narrow = dataclasses.replace(setup.model.config, dtype='bfloat16')
    collect = rollout.make_collector(
        models.build(narrow, setup.model.tokenizer),
        setup.algorithm,
        setup.judge,
        c.rollout,
        c.sampling,
        setup.task.prompt_width,
    )

    def noisy(path: Any, x: Any) -> Any:
        if optimizer.group([key.key for key in path]) != 'router':
            return x
        return x + ROUTER_NOISE * jnp.std(x) * jax.random.normal(jax.random.key(seed), x.shape)

    def drawn(state: Any, *arguments: Any, **named: Any) -> Any:
        params = jax.tree.map_with_path(noisy, state.params)
        return collect(dataclasses.replace(state, params=params), *arguments, **named)

    return loop._replace(collect=drawn)


def unrecorded(batch: Any, vocab: int, *, support: bool = False, routing: bool = False) -> Any:
    """The batch with support, routing or both as where nothing was recorded.

    Shapes are the same whatever is left out, so that all share programs: a support that is not
    recorded is the whole vocabulary, and experts of -1 are routed live.
    """
    changes = {}
    if batch.support is not None:
        kept = np.asarray(batch.support)
        everything = np.broadcast_to(np.arange(vocab, dtype=kept.dtype), (*kept.shape[:2], vocab))
        padded = np.pad(kept, ((0, 0), (0, 0), (0, vocab - kept.shape[2])), constant_values=-1)
        used = np.any(kept >= 0, axis=2, keepdims=True)
        changes['support'] = np.where(used & support, everything, padded)
    if routing:
        changes['routing'] = np.full_like(batch.routing, -1)
    return dataclasses.replace(batch, **changes)
