"""Learning curves of arms: named sets of changes from one configuration, from the same policies.

An arm is a run from the warm-started policy of a seed; curves of each seed are kept in the folder,
so that claims share arms and a stopped command goes on. All seeds of an arm in a process run the
same compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies, sources
from experiments.claim import Place, save
from policyopt import data, evaluate, masked, recipe, reinforce, stopping
from policyopt import loop as loop_lib
from policyopt.types import TokenBatch

# The rate is the largest of those tried on seed 100, of 3e-4, 5e-4 and 1e-3, at which GRPO learns.
STEPS, EVERY = 80, 5  # RL steps of a run, and between measurements of held-out accuracy
MINIBATCHES, RATE, WARMUP = 8, 3e-4, 8
# What is kept of the numbers of a step: name here, name there.
KEPT = dict(
    reward='reward',
    entropy='entropy',
    stopped='policy/stopped',
    norm='grad_norm',
    length='length',
    skipped='skipped',
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
      algorithm: name, or import path of a factory.
      kw: its arguments.
      changes: fields of a run's config, as of `policies.config`; they replace those of `base`.
      sampler: how the sampler's parameters differ from the trainer's: `bits` of their fractions are
        kept, the rest is rounded away (8 of bfloat16's, 4 of an 8-bit float's); `router` is the
        standard deviation of noise on the router's matrix, over that of its entries; `stale` is
        how many steps they are behind.
    """

    algorithm: str
    kw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sampler: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, fast: bool) -> dict[str, Any]:
        """Changes from `policies.config` with what all arms share."""
        out: dict[str, Any] = dict(
            minibatches=2 if fast else MINIBATCHES,
            optimizer=dict(learning_rate=RATE, warmup_steps=WARMUP),
            replay=dict(support=True, routing='rollout'),
        )
        for name, value in self.changes.items():
            if fast and name in ('minibatches', 'rollout'):  # a test has its own
                continue
            old = out.get(name)
            out[name] = old | value if isinstance(old, dict) else value
        return out | dict(algorithm=self.algorithm, algorithm_kw=self.kw)


def key_of(arm: Arm, steps: int, every: int, fast: bool) -> str:
    """Name of the curves that an arm gives, by the code as it is."""
    code = [sources.digest(__name__)]
    if arm.algorithm.startswith('experiments.'):
        code.append(sources.digest(arm.algorithm.rpartition('.')[0]))
    named = [dataclasses.asdict(arm), arm.config(fast), steps, every, fast, code]
    text = json.dumps(named, default=repr, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def curves(place: Place, arm: Arm, steps: int = STEPS, every: int = EVERY) -> dict[str, Any]:
    """Curves of one seed: those in the folder, or run now and left there.

    Returns:
      `step` and `accuracy`, held-out and greedy, before the first step and after each `every`; and
      means over the steps in between, of KEPT and of `variance` and `first_variance`, those of the
      tokens' log-ratios in the minibatches after the first and in it.
    """
    if place.fast:
        steps, every = 2, 1
    path = place.folder / 'curves' / f'{key_of(arm, steps, every, place.fast)}-{place.seed}.json'
    if not path.is_file():
        save(path, run(place, arm, steps, every))
    return json.loads(path.read_text())


@functools.cache
def _built(key: str, fast: bool, folder: Path) -> tuple[recipe.Setup, loop_lib.Loop]:
    arm = _ARMS[key]
    setup = recipe.prepare(policies.config(Place(0, folder, fast), **arm.config(fast)))
    return setup, loop_lib.make_loop(setup, folder, None, stopping.Stop())


_ARMS: dict[str, Arm] = {}  # of _built, whose arguments are hashed


def run(place: Place, arm: Arm, steps: int, every: int) -> dict[str, Any]:
    """The curves of one seed, as of `curves`."""
    key = key_of(arm, steps, every, place.fast)
    _ARMS[key] = arm
    setup, loop = _built(key, place.fast, place.folder)
    setup = setup._replace(config=dataclasses.replace(setup.config, seed=place.seed))
    source = data.batches(setup.task.train, setup.config.rollout.prompts, place.seed + 1)
    collect = otherwise(loop.collect, **arm.sampler) if arm.sampler else loop.collect
    loop = loop._replace(source=source, collect=collect)
    point = loop_lib.new_point(setup, loop, policies.warm(setup, place), None, 1)
    out: dict[str, Any] = {'step': [0], 'accuracy': [right(setup, point.state.params)]}
    window: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        done = reinforce.rl_step(setup, loop, point, step)
        point = point._replace(state=done.state, step=step)
        window.append(numbers(done))
        if step % every == 0:
            out['step'].append(step)
            out['accuracy'].append(right(setup, point.state.params))
            for name in window[0]:
                mean = sum(values[name] for values in window) / len(window)
                out.setdefault(name, []).append(float(f'{mean:.4g}'))
            window = []
    return out


def right(setup: recipe.Setup, params: Any) -> float:
    """Held-out accuracy."""
    return round(evaluate.held_out(setup, params).value, 4)


def numbers(done: reinforce.Step) -> dict[str, float]:
    """What is kept of a step."""
    found = {name: done.values.get(there, 0.0) for name, there in KEPT.items()}
    first, rest = 0.0, 0.0
    if done.sampled:
        first, *others = np.asarray(_variances(done.parts, done.logp_new)).tolist()
        rest = float(np.mean(others)) if others else 0.0
    return found | {'variance': rest, 'first_variance': first}


@jax.jit
def _variances(parts: Sequence[TokenBatch], logp_new: Sequence[Any]) -> Any:
    """Variance of the tokens' log-ratios, of each minibatch."""

    def variance(part: TokenBatch, logp: Any) -> Any:
        log_ratio = masked.select(part.mask, logp - part.logp_old)
        n = jnp.maximum(jnp.sum(part.mask != 0), 1)
        mean = jnp.sum(log_ratio) / n
        return jnp.sum(masked.select(part.mask, (log_ratio - mean) ** 2)) / n

    return jnp.stack([variance(*pair) for pair in zip(parts, logp_new, strict=True)])


def otherwise(collect: Any, bits: int | None = None, router: float = 0.0, stale: int = 0) -> Any:
    """A collector whose sampler has other parameters than the trainer; see `Arm`."""
    held: list[Any] = []

    @jax.jit
    def change(params: Any, key: Any) -> Any:
        def one(path: Any, x: Any) -> Any:
            if bits is not None:
                fraction, exponent = jnp.frexp(x)
                x = jnp.ldexp(jnp.round(fraction * 2**bits) / 2**bits, exponent)
            if router and 'router' in jax.tree_util.keystr(path):
                x = x + router * jnp.std(x) * jax.random.normal(key, x.shape)
            return x

        return jax.tree_util.tree_map_with_path(one, params)

    def sample(state: Any, reference: Any, source: Iterator[Any], key: Any, **named: Any) -> Any:
        params = change(state.params, jax.random.fold_in(key, 1))
        held.append(params)
        del held[: -1 - stale]
        state = dataclasses.replace(state, params=held[0])
        return collect(state, reference, source, key, **named)

    return sample
