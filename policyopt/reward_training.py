"""A reward model from preferences: answers drawn and told apart, a head on the trunk, the loss."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyopt import answers as answers_lib
from policyopt import data, hosts, layout, metrics, models, preferences, reward_model
from policyopt import optimizer as optimizer_lib
from policyopt.answers import Answers
from policyopt.preferences import Agreement, Pair, PreferencesConfig
from policyopt.reward_model import FOLDER, RewardModel, pad, width_of
from policyopt.rewards import Calibration
from policyopt.rewards.scored import CALIBRATION
from policyopt.types import Array

SUMMARY = 'preferences.json'
FIRST = 1e-2  # standard deviation of the fresh head times sqrt(width), by which scores begin


class Compared(NamedTuple):
    """Answers to problems, and pairs of them.

    Attributes:
      rows: by (problem, answer), ids of prompt and answer.
      values: by (problem, answer), the true rewards.
      train, held_out: pairs; no problem is on both sides.
      side: by (problem, answer), whether the problem is held out.
    """

    rows: Mapping[tuple[int, int], list[int]]
    values: Mapping[tuple[int, int], float]
    train: list[Pair]
    held_out: list[Pair]
    side: Mapping[tuple[int, int], bool]


class Trained(NamedTuple):
    """A reward model, and how it agrees with held-out preferences after each epoch."""

    found: RewardModel
    epochs: list[Agreement]


def compare(
    items: Sequence[data.Item], answers: Answers, config: PreferencesConfig, seed: int
) -> Compared:
    """Pairs of the answers to each problem, by their true rewards.

    Raises ValueError where one side has none, as where answers are all right or all wrong.
    """
    pairs = preferences.make_pairs(
        answers.rewards, [[tuple(a) for a in row] for row in answers.ids], config.pairs, seed
    )
    order = np.random.default_rng(seed).permutation(len(items))
    held_out = set(order[: max(1, round(config.held_out * len(items)))].tolist())
    both = {
        (p, a): [*item.ids, *ids]
        for p, item in enumerate(items)
        for a, ids in enumerate(answers.ids[p])
        if not math.isnan(answers.rewards[p, a])
    }
    train = [pair for pair in pairs if pair.problem not in held_out]
    kept = [pair for pair in pairs if pair.problem in held_out]
    for name, side in (('train on', train), ('hold out', kept)):
        if not side:
            raise ValueError(
                f'preferences: of {len(items)} problems with {config.answers} answers each, no two '
                f'answers of different reward are there to {name}: the policy is always right, or '
                'always wrong. More problems or answers, a higher temperature, or another warm '
                'start help'
            )
    return Compared(
        rows=both,
        values={key: float(answers.rewards[key]) for key in both},
        train=preferences.flipped(train, config.flip, seed),
        held_out=kept,
        side={key: key[0] in held_out for key in both},
    )


def first(policy: models.Model, params: Any, key: Array) -> tuple[models.Model, Any]:
    """A reward model on the policy's trunk: float32 copies of its parameters, and a fresh head.

    It has no output matrix, so that its folder is that of a sequence classifier; adapters are
    merged into their kernels.
    """
    policy, params = models.merge(policy, params)
    config = dataclasses.replace(
        policy.config, value_head=False, reward_head=True, tied=True, param_dtype='float32'
    )
    model = models.build(config, policy.tokenizer, dict(policy.rules))
    fresh = layout.init(model, key)
    head = jax.random.normal(key, fresh['reward'].shape) * (FIRST / math.sqrt(config.embed_dim))
    start = {name: jax.tree.map(jnp.copy, params.get(name, fresh[name])) for name in fresh}
    return model, optimizer_lib.masters({**start, 'reward': head})


def make_step(model: models.Model, optimizer: Any) -> Callable[..., Any]:
    """Build step(params, opt_state, tokens [2B,T], length [2B], weights [B]) -> the next, metrics.

    The first B rows are preferred to the others, pair by pair. Jitted; params and state are
    donated. A loss or gradient that is not finite changes nothing, and metric `skipped` says so.
    """

    def loss_of(params: Any, tokens: Array, length: Array, weights: Array):
        valid = jnp.arange(tokens.shape[1]) < length[:, None]
        found = model.reward(params, model.hidden(params, tokens, valid=valid).hidden, length)
        better, worse = jnp.split(found, 2)
        return preferences.bradley_terry(better, worse, weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, tokens: Array, length: Array, weights: Array):
        grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, margin), grads = grad(params, tokens, length, weights)
        ok = jnp.isfinite(loss) & jnp.isfinite(optimizer_lib.norm(grads))
        params, opt_state, _ = optimizer_lib.apply(optimizer, grads, opt_state, params, ok)
        right = jnp.sum(weights * (margin > 0))
        return params, opt_state, {'loss': loss, 'pair_accuracy': right, 'skipped': 1 - ok}

    return step


def batches(
    compared: Compared, size: int, epoch: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens [2B,T], length [2B] and weights [B] of one pass over the pairs, in a seeded order.

    The last batch is filled up with empty pairs of weight 0.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(compared.train))
    for start in range(0, len(order), size):
        pairs = [compared.train[i] for i in order[start : start + size]]
        better = [compared.rows[p.problem, p.chosen] for p in pairs]
        worse = [compared.rows[p.problem, p.rejected] for p in pairs]
        width = width_of(max(map(len, better + worse)))
        sides = [pad(side, size, width) for side in (better, worse)]
        tokens, length = (np.concatenate(x) for x in zip(*sides, strict=True))
        weights = (np.arange(size) < len(pairs)) / np.float32(len(pairs))
        yield tokens, length, weights.astype(np.float32)


def train(
    policy: models.Model,
    params: Any,
    compared: Compared,
    config: PreferencesConfig,
    seed: int,
    record: Callable[[int, dict[str, float]], None],
    check: Callable[[], None] = lambda: None,
) -> Trained:
    """Train a reward model on pairs, from the policy's trunk.

    Args:
      policy, params: where it starts; the params stay as they are.
      compared: answers and pairs.
      config: says how long, and by which optimizer.
      seed: of the head and of the order of the pairs.
      record: is told of each step, (number, values), and of the agreement after each epoch.
      check: called before each step; may raise.
    """
    model, params = first(policy, params, jax.random.key(seed))
    optimizer = optimizer_lib.make_optimizer(config.optimizer)
    opt_state = jax.jit(optimizer.init)(params)
    step, number = make_step(model, optimizer), 0
    epochs: list[Agreement] = []
    steps = config.epochs * -(-len(compared.train) // config.batch)
    with metrics.Display('preferences', steps) as display:
        for epoch in range(config.epochs):
            for batch in batches(compared, config.batch, epoch, seed):
                check()
                params, opt_state, found = step(params, opt_state, *batch)
                number += 1
                values = {name: float(x) for name, x in found.items()}
                record(number, values)
                display.update(number, values)
            scores = score_all(model, params, compared, 2 * config.batch)
            epochs.append(preferences.agreement(compared.held_out, scores, seed))
            record(number, {f'held_out/{k}': v for k, v in epochs[-1]._asdict().items()})
    known = calibration_of(compared, scores)
    return Trained(RewardModel(model, params, known), epochs)


def score_all(
    model: models.Model, params: Any, compared: Compared, batch: int
) -> dict[tuple[int, int], float]:
    """Scores of the answers to held-out problems."""
    keys = [key for key in compared.rows if compared.side[key]]
    found = reward_model.scores(model, params, [compared.rows[key] for key in keys], batch)
    return dict(zip(keys, found.tolist(), strict=True))


def calibration_of(compared: Compared, scores: Mapping[tuple[int, int], float]) -> Calibration:
    """Calibration on the answers to held-out problems."""
    true = np.array([compared.values[key] for key in scores])
    return reward_model.calibrate(np.array(list(scores.values())), true)


def save(trained: Trained, folder: Path) -> None:
    """Write a reward model as a Hugging Face folder, with its calibration and how it agrees.

    By the first process, for all.
    """
    model, params, known = trained.found
    models.save(model, params, folder)
    assert known is not None
    if not hosts.first():
        return
    summary = [agreed._asdict() for agreed in trained.epochs]
    for name, content in ((SUMMARY, summary), (CALIBRATION, known._asdict())):
        (folder / name).write_text(json.dumps(content, indent=2) + '\n')


# ============================================================================ in a run


def stage(setup: Any, params: Any, workdir: Path, records: Path, check: Callable[[], None]) -> None:
    """Train the reward model of a run (`config.preferences`) and write it to its folder.

    Args:
      setup: of the run.
      params: of the policy, after the warm start.
      workdir, records: folder of the run, and the file of its results.
      check: called now and then; may raise, as where the process is to end.
    """
    c = setup.config
    config: PreferencesConfig = c.preferences
    items = next(data.batches(setup.task.train, config.problems, c.seed + 2))
    answers = answers_lib.draw(
        setup.model,
        params,
        items,
        setup.measure,
        jax.random.fold_in(jax.random.key(c.seed), 2),
        c.sampling,
        samples=config.answers,
        prompt_width=setup.task.prompt_width,
        batch=c.rollout.prompts * c.rollout.group_size // c.rollout.chunks,
        on_error='record',
        steps=c.rollout.steps,
    )
    compared = compare(items, answers, config, c.seed)

    def record(step: int, values: dict[str, float]) -> None:
        metrics.append(records, 'preferences', step, values)

    trained = train(setup.model, params, compared, config, c.seed, record, check)
    save(trained, workdir / FOLDER)
    print(f'reward model: right on {trained.epochs[-1]}, held out', flush=True)


def give(setup: Any, workdir: Path) -> None:
    """Have the judge of a run use the reward model in its folder, where the run trains one."""
    if setup.config.preferences is None:
        return
    folder = hosts.by_first(lambda: workdir.resolve() / FOLDER)  # others have a folder of their own
    setup.judge.give(reward_model.load(folder, setup.mesh, dict(setup.model.rules)))
