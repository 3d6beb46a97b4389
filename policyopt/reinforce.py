"""The RL stage: new answers, updates on them, measurements, checkpoints; from any step on."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from policyopt import batches as batches_lib
from policyopt import evaluate, hosts, metrics, recipe, settings, sharding, staleness, stopping
from policyopt import rollout as rollout_lib
from policyopt import turns as turns_lib
from policyopt.checkpoint import fingerprint
from policyopt.critic import POSITIONS
from policyopt.learner import TrainState
from policyopt.loop import Loop, Point, save
from policyopt.models import adapters
from policyopt.recipe import Setup
from policyopt.reference import Reference
from policyopt.state import averaged
from policyopt.types import TokenBatch
from policyopt.workdir import SAMPLES


def reinforce(setup: Setup, loop: Loop, point: Point) -> Any:
    """Improve the policy by its own rewarded answers; returns the parameters to be used."""
    c = setup.config
    if point.step == 0:
        point = point._replace(state=pretrain_values(setup, loop, point.state, point.reference))
    shown = {}
    if point.step < c.steps:
        print(explanation(setup), flush=True)
    with (
        metrics.Display('RL', c.steps, start=point.step) as display,
        metrics.Compiles() as compiles,
        loop.profile or contextlib.nullcontext() as profile,
        loop.stop.patience(),
    ):
        for step in range(point.step + 1, c.steps + 1):
            if profile is not None:
                profile.before(step, display.note)
            compiles.take()  # of an evaluation or a save after the step before
            began = time.monotonic()
            done = rl_step(setup, loop, point, step)
            reference = point.reference and point.reference.update(step, done.state.params)
            point = point._replace(state=done.state, reference=reference, step=step)
            times = done.times | {'seconds': time.monotonic() - began, 'compiles': compiles.take()}
            if loop.stream is not None:
                times |= loop.stream.idle(times['seconds'], times.get('sample_seconds', 0.0))
            times['tokens_per_second'] = done.values['rollout/tokens'] / times['seconds']
            metrics.append(loop.records, 'rl', step, done.values)
            metrics.append(loop.timings, 'rl', step, times | {'time': time.time()})
            if profile is not None:
                profile.after(step, display.note)
            if step % c.evaluation.every == 0 and step < c.steps:
                accuracy = record_accuracy(setup, averaged(point.state), loop, step)
                shown = {'held_out': accuracy.value}
            display.update(step, done.values | times | shown)
            for line in remarks(setup, done.values):
                display.note(line)
            if step == c.steps and done.sampled:
                path = loop.workdir / 'batches' / f'batch_{step:06d}.npz'
                save_last(done.parts, done.logp_new[-len(done.parts) :], path)
            point = point._replace(skipped=count_skipped(setup, loop, point, done))
            save_if_due(setup, loop, point)
    return averaged(point.state)


class Step(NamedTuple):
    """One RL step.

    Attributes:
      state: after it.
      values: results.
      times: seconds, by name, and what else depends on the clock.
      parts: minibatches of a pass.
      logp_new: what the loss saw, of each update of all passes.
      skipped: whether it was skipped, of each update of all passes.
      controllers: values that the losses read.
      sampled: False where nothing could be sampled to learn from: there was no update then, all
        count as skipped, and `parts` has the rows.
    """

    state: TrainState
    values: dict[str, float]
    times: dict[str, float]
    parts: list[TokenBatch]
    logp_new: list[Any]
    skipped: list[bool]
    controllers: Mapping[str, Any] = types.MappingProxyType({})
    sampled: bool = True


def rl_step(setup: Setup, loop: Loop, point: Point, step: int) -> Step:
    """New answers and the updates on them."""
    c = setup.config
    state, reference = point.state, point.reference
    watch, scored = metrics.Stopwatch(), None
    key = jax.random.fold_in(state.key, step)
    try:
        collected = loop.collect(
            state,
            reference and reference.of(state.params),
            loop.source,
            key,
            version=step - 1,
            watch=watch,
            page=None if loop.stream else loop.page('rl', step, step),
            stream=loop.stream,
        )
    except rollout_lib.NotSampled as error:
        values = error.metrics | streamed(loop, error.batch, step) | {'skipped': 1.0}
        missed = [True] * (c.epochs * c.minibatches)
        return Step(
            state,
            values,
            seconds_of(watch),
            [error.batch],
            [],
            missed,
            state.controllers,
            sampled=False,
        )
    parts = minibatches(setup, collected.batch)
    began = time.monotonic()
    if c.logp_old == 'recomputed':
        parts = [loop.learner.recompute(state.params, part) for part in parts]
        scored = metrics.when_ready([part.logp_old for part in parts])
    found, logp_new = [], []
    for epoch in range(c.epochs):
        for number, part in enumerate(parts):
            seen = (
                fingerprint(adapters.trained(state.params)) if step in loop.save_batches else None
            )
            state, values, logp = loop.learner.update(state, part)
            state, values = fit_critic(setup, loop, state, part, values)
            found.append(values)
            logp_new.append(logp)
            if seen is not None:
                path = loop.workdir / 'batches' / f'update_{step:06d}_{len(found)}.npz'
                origin = origin_of(c, step, epoch + 1, number + 1, seen, controllers_of(values))
                save_part(path, origin, part, logp)
    state = loop.learner.adapt(state, found[-1])
    if loop.stream is not None:
        loop.stream.run_ahead()
    numbers = collected.metrics | streamed(loop, collected.batch, step) | metrics.numbers(*found)
    skipped = [bool(x) for x in hosts.fetch([m['skipped'].total for m in found])]
    rescored = scored.result() - began if scored else 0.0
    times = seconds_of(watch, update=time.monotonic() - began - rescored, rescored=rescored)
    times |= collected.timings
    return Step(state, numbers, times, parts, logp_new, skipped, controllers_of(found[0]))


def streamed(loop: Loop, batch: TokenBatch, step: int) -> dict[str, float]:
    """Numbers for the log of rows that were drawn ahead; none where they were not."""
    if loop.stream is None:
        return {}
    version, mask = hosts.fetch((batch.version, batch.mask))
    found = staleness.ages(version, mask, step - 1)
    return staleness.describe(found, loop.stream.bound) | loop.stream.describe()


def minibatches(setup: Setup, batch: TokenBatch) -> list[TokenBatch]:
    """The minibatches of a pass, on the devices already; buckets are filled on the host."""
    parts = rollout_lib.minibatches(batch, setup.config.minibatches)
    if setup.config.length_buckets is not None:
        return parts
    return [sharding.feed(part, setup.model.rules) for part in parts]


def fit_critic(
    setup: Setup, loop: Loop, state: TrainState, part: TokenBatch, values: dict[str, Any]
) -> tuple[TrainState, dict[str, Any]]:
    """Fit the critic of a natural-gradient algorithm after a step of it; the metrics of both.

    Explained variance is that from before.
    """
    if loop.learner.value_fit is None:
        return state, values
    found: dict[str, Any] = {}
    for _ in range(setup.config.critic.fits or 0):  # type: ignore[union-attr]
        state, found = loop.learner.value_fit(state, part)
    return state, {**found, **values}


def seconds_of(
    watch: metrics.Stopwatch, update: float = 0.0, rescored: float = 0.0
) -> dict[str, float]:
    """Seconds that a step spent on each thing, for the log."""
    spent = watch.seconds | {'update': update}
    spent['score'] = spent.get('score', 0.0) + rescored
    return {f'{name}_seconds': value for name, value in spent.items()}


def controllers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the controllers were at an update, from its metrics."""
    named = ((name.partition('controller/')[2], value) for name, value in values.items())
    return {name: value.total for name, value in named if name}


def origin_of(
    config: recipe.RunConfig,
    step: int,
    epoch: int,
    minibatch: int,
    params: int | None,
    controllers: Mapping[str, Any],
) -> batches_lib.Origin:
    """Where a minibatch comes from, as files say it."""
    values = {name: float(value) for name, value in controllers.items()}
    return batches_lib.Origin(step, epoch, minibatch, params, values, settings.flat(config))


def save_part(path: Path, origin: batches_lib.Origin, part: TokenBatch, logp_new: Any) -> None:
    """Save a minibatch with the log-probs that its loss saw."""
    arrays = hosts.fetch({**vars(part), 'logp_new': logp_new})
    batches_lib.save_minibatch(path, origin, **arrays)


def count_skipped(setup: Setup, loop: Loop, point: Point, done: Step) -> int:
    """Skipped updates in a row up to this step.

    Raises Unstable where they reach the config's `max_skipped`; the batch of the last is saved.
    """
    limit = setup.config.max_skipped
    count, index = stopping.skipped_in_a_row(point.skipped, done.skipped, limit)
    if index is None:
        return count
    path = loop.workdir / 'batches' / f'offending_{point.step:06d}.npz'
    # A skipped update leaves the parameters as it saw them.
    seen = None
    if all(done.skipped[index:]):
        seen = fingerprint(adapters.trained(done.state.params))
    if done.sampled:
        epoch, number = divmod(index, len(done.parts))
        place, part, logp_new = (epoch + 1, number + 1), done.parts[number], done.logp_new[index]
    else:
        place, part, logp_new = (0, 0), done.parts[0], None
    origin = origin_of(setup.config, point.step, *place, seen, done.controllers)
    save_part(path, origin, part, logp_new)
    saved = loop.checkpoints.steps() if loop.checkpoints else []
    last = f'the last checkpoint is of step {saved[-1]}' if saved else 'there is no checkpoint'
    why = f'the loss or gradient of {count} updates in a row was not finite (max_skipped)'
    if not done.sampled:
        why = f'{count} updates in a row came to nothing (max_skipped), as logits are not finite'
    raise stopping.Unstable(
        f'{why}, the last at RL step {point.step}: its minibatch is in {path}, which python -m '
        f'policyopt.inspect shows; {last}. A lower optimizer.learning_rate or optimizer.clip_norm '
        'may help, in another --workdir'
    )


def save_if_due(setup: Setup, loop: Loop, point: Point) -> None:
    """Save now and then, and before a step whose minibatches are wanted; after a SIGTERM, exit.

    Not while updates are being skipped: what they start from may be what is wrong, and should not
    push out checkpoints from before.
    """
    c, step = setup.config, point.step
    asked = loop.stop.agreed()
    if loop.checkpoints is None:
        if asked:
            print('SIGTERM: stopped, and nothing saved (checkpoint.every is off)', flush=True)
            raise SystemExit(0)
        return
    wanted = step % (c.checkpoint.every or 1) == 0 or step + 1 in loop.save_batches
    due = wanted and point.skipped == 0
    pretrained = step == 1 and c.critic is not None and c.critic.pretrain is not None
    if due or pretrained or step == c.steps or asked:
        save(loop, point)
    if asked:
        loop.checkpoints.wait()
        print(f'SIGTERM: saved after RL step {step}; the same command goes on', flush=True)
        raise SystemExit(0)


def pretrain_values(
    setup: Setup, loop: Loop, state: TrainState, reference: Reference | None
) -> TrainState:
    """Fit the critic to Monte-Carlo returns of the frozen policy until its stop rule says so."""
    c = setup.config
    if c.critic is None or c.critic.pretrain is None:
        return state
    assert loop.learner.value_update is not None
    stop = c.critic.pretrain
    losses: list[float] = []
    explained: list[float] = []
    numbers: dict[str, float] = {}
    with metrics.Display('value pretraining', stop.max_steps) as display:
        while not (losses and stop(losses, explained)):
            loop.stop.check()
            step = len(losses) + 1
            key = jax.random.fold_in(jax.random.fold_in(state.key, 0), step)
            collected = loop.collect(
                state,
                reference and reference.of(state.params),
                loop.source,
                key,
                page=loop.page('value_pretraining', step, 1),
            )
            found = []
            for part in minibatches(setup, collected.batch):
                state, values = loop.learner.value_update(state, part)
                found.append(values)
            numbers = collected.metrics | metrics.numbers(*found)
            losses.append(numbers['value/loss'])
            explained.append(numbers['value/explained_variance'])
            numbers['value/settled'] = float(stop.settled(losses, explained))
            metrics.append(loop.records, 'value_pretraining', step, numbers)
            display.update(step, numbers)
    print(pretrained(numbers, len(losses)), flush=True)
    return state


def pretrained(values: Mapping[str, float], steps: int) -> str:
    """How value pretraining ended, from the numbers of its last step."""
    why = 'value loss and explained variance have settled'
    if not values['value/settled']:
        why = 'critic.pretrain.max_steps, though they have not settled'
    first, last = (values[f'value/explained_at/{i}'] for i in (0, POSITIONS - 1))
    return (
        f'value pretraining of {steps} steps: {why}; explained variance '
        f'{values["value/explained_variance"]:.2f}, {first:.2f} in the first tenth of an answer, '
        f'{last:.2f} in the last'
    )


def record_accuracy(setup: Setup, params: Any, loop: Loop, step: int) -> evaluate.Accuracy:
    """Measure held-out accuracy and write it down, with some of the answers."""
    began = time.monotonic()
    accuracy = evaluate.held_out(setup, params, loop.page('evaluation', step, step))
    low, high = accuracy.interval
    values = {'held_out': accuracy.value, 'low': low, 'high': high}
    items = setup.task.held_out
    for name, part in evaluate.by_task(accuracy, items).items():
        values |= {f'held_out/{name}': part.value}
    metrics.append(loop.records, 'evaluation', step, values)
    shown = list(zip(items, accuracy.answers, accuracy.right, strict=True))
    for number, (item, answer, right) in enumerate(shown[: setup.config.evaluation.samples]):
        row = {'problem': item.prompt, 'expected': item.answer, 'answer': answer, 'right': right}
        if number < len(accuracy.turns):
            row['turns'] = accuracy.turns[number]
        metrics.append(loop.workdir / SAMPLES, 'evaluation', step, row)
    times = {'seconds': time.monotonic() - began, 'time': time.time()}
    metrics.append(loop.timings, 'evaluation', step, times)
    return accuracy


def explanation(setup: Setup) -> str:
    """What the numbers that are shown are."""
    c = setup.config
    how = 'greedy' if c.evaluation.temperature == 0 else f'temperature {c.evaluation.temperature}'
    by = 'the parameters' if c.ema is None else 'the moving average of the parameters'
    ahead = ''
    if c.asynchronous is not None:
        ahead = (
            '; staleness: RL steps between the policy that drew a token and the one that learns '
            'from it, mean; idle slots: those of all decode steps that drew none'
        )
    return (
        'sampled accuracy: right answers of all drawn in a step; held-out accuracy: right answers '
        f'to {len(setup.task.held_out)} problems never trained on, {how}, by {by}; frozen: tokens '
        'outside the clip range, without gradient; KL to the sampler and entropy: nats a token'
        f'{ahead}'
    )


def remarks(setup: Setup, values: Mapping[str, float]) -> Iterator[str]:
    """What is to be explained where it first happens."""
    c = setup.config.rollout
    if values.get('rollout/kept', 1) < 1:
        yield (
            f'a step found fewer than its {c.prompts * c.group_size} rows in rollout.max_rounds='
            f'{c.max_rounds} rounds, and trained on those it had (`kept` is their share): the '
            'algorithm or dynamic_sampling drops groups of equal rewards, of which there are many '
            'where the policy is always right or always wrong'
        )
    if values['rollout/not_judged'] > 0:
        yield 'some answers got no reward: the judge failed on them, and they are left out'
    if any(values.get(f'turns/{name}', 0) > 0 for name in turns_lib.FAULTS):
        yield 'environments of some rows failed: these have no reward, and are left out'
    if values['skipped'] > 0:
        yield 'an update was skipped: its loss or gradient was not finite'


def save_last(parts: list[TokenBatch], logp_new: list[Any], path: Path) -> None:
    """Save the minibatches of the last pass with the log-probs that it saw, for calibration."""
    fields = ('logp_old', 'logp_behavior', 'mask', 'advantages', 'rewards', 'group', 'positive')
    named = [{name: getattr(part, name) for name in fields} for part in parts]
    logp_new, *each = hosts.fetch([logp_new, *named])
    arrays = {name: np.concatenate([part[name] for part in each]) for name in fields}
    number = np.repeat(1 + np.arange(len(parts)), [len(part.mask) for part in parts])
    batches_lib.save_batch(path, logp_new=np.concatenate(logp_new), minibatch=number, **arrays)
