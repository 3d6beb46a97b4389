"""Train a policy: supervised warm start, then reinforcement learning with any algorithm.

    python -m policyopt.train --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config can be overridden: --config.optimizer.learning_rate=1e-4. A section that the
file leaves out is given as a whole: --config.length_buckets='{"token_budget": 64, "widths": (8,)}'.
Recipes of papers take a model and problems: --config=configs/grpo.py:model=PATH,data=FILE.jsonl
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

from policyopt import batches as batches_lib
from policyopt import data, evaluate, metrics, recipe, warm_start
from policyopt import rollout as rollout_lib
from policyopt.learner import Learner, TrainState
from policyopt.recipe import Setup
from policyopt.reference import Reference, make_reference
from policyopt.types import TokenBatch

# Fields that the file leaves out may be given, too: `recipe.prepare` knows which there are.
_CONFIG = config_flags.DEFINE_config_file(
    'config',
    None,
    'File with get_config(), or FILE:ARGUMENT; the docstring of its get_config says what ARGUMENT '
    'may be. --config.FIELD=VALUE overrides a field, --config.SECTION.FIELD=VALUE a nested one.',
    lock_config=False,
    accept_new_attributes=True,
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for everything that the run writes.')

RECORDS, TIMINGS, CURVES, SETTINGS = 'metrics.jsonl', 'timings.jsonl', 'curves.png', 'config.json'


class Result(NamedTuple):
    """Held-out accuracy before and after reinforcement learning, and where the curves are."""

    before: evaluate.Accuracy
    after: evaluate.Accuracy
    warm_steps: int
    curves: Path | None


# ============================================================================ the folder


def open_workdir(workdir: Path) -> None:
    """Make an empty folder for a run; an earlier run there is moved to WORKDIR-1, -2, ...

    Raises ValueError for a folder that holds anything but a run: nothing is ever overwritten.
    """
    if workdir.exists() and any(workdir.iterdir()):
        if not (workdir / SETTINGS).is_file():
            raise ValueError(
                f'--workdir {workdir} holds files that are no run; name another folder'
            )
        number = 1
        while (aside := workdir.with_name(f'{workdir.name}-{number}')).exists():
            number += 1
        shutil.move(workdir, aside)
        print(f'{workdir} held an earlier run: moved to {aside}')
    workdir.mkdir(parents=True, exist_ok=True)


# ============================================================================ reinforcement


class Loop(NamedTuple):
    """What the steps of the RL stage share.

    Attributes:
      learner, collect: of the run.
      source: batches of problems.
      records, timings: files that numbers go to, results and wall-clock figures.
    """

    learner: Learner
    collect: rollout_lib.Collect
    source: Iterator[list[data.Item]]
    records: Path
    timings: Path


def make_loop(setup: Setup, workdir: Path) -> Loop:
    """Build what the steps of the RL stage share."""
    c = setup.config
    learner = recipe.make_learner(setup)
    replay = [name for name in ('support', 'routing') if getattr(c.replay, name)]
    collect = rollout_lib.make_collector(
        setup.model,
        setup.algorithm,
        setup.judge,
        c.rollout,
        c.sampling,
        setup.task.prompt_width,
        values=learner.values,
        replay=replay,
    )
    source = data.batches(setup.task.train, c.rollout.prompts, c.seed + 1)
    return Loop(learner, collect, source, workdir / RECORDS, workdir / TIMINGS)


def reinforce(setup: Setup, params: Any, workdir: Path) -> Any:
    """Improve the policy by its own rewarded answers; returns the parameters to be used."""
    c = setup.config
    loop = make_loop(setup, workdir)
    reference = make_reference(params, c.reference_every, 'logp_ref' in setup.needed)
    critic = recipe.critic_params(setup, params)
    state = loop.learner.init(params, jax.random.key(c.seed + 1), critic)
    state = pretrain_values(setup, loop, state, reference)
    parts, logp_new, shown = [], [], {}
    with metrics.Display('RL', c.steps) as display, metrics.Compiles() as compiles:
        for step in range(1, c.steps + 1):
            began = time.monotonic()
            state, values, times, parts, logp_new = rl_step(setup, loop, state, reference, step)
            reference = reference and reference.update(step, state.params)
            times['seconds'] = time.monotonic() - began
            times['compiles'] = compiles.take()
            times['tokens_per_second'] = values['rollout/tokens'] / times['seconds']
            metrics.append(loop.records, 'rl', step, values)
            metrics.append(loop.timings, 'rl', step, times | {'time': time.time()})
            if step % c.evaluation.every == 0 and step < c.steps:
                accuracy = record_accuracy(setup, used(state), workdir, step)
                shown = {'held_out': accuracy.value}
            display.update(step, values | times | shown)
    save_last(parts, logp_new, workdir / 'batches' / f'batch_{c.steps:06d}.npz')
    return used(state)


def rl_step(
    setup: Setup, loop: Loop, state: TrainState, reference: Reference | None, step: int
) -> tuple[TrainState, dict[str, float], dict[str, float], list[TokenBatch], list[Any]]:
    """New answers and the updates on them: state, numbers, seconds, minibatches, their logp_new."""
    c = setup.config
    began = time.monotonic()
    key = jax.random.fold_in(state.key, step)
    collected = loop.collect(
        state, reference and reference.params, loop.source, key, version=step - 1
    )
    parts = rollout_lib.minibatches(collected.batch, c.minibatches)
    times = {'sample_seconds': time.monotonic() - began}
    if c.logp_old == 'recomputed':
        parts = [loop.learner.recompute(state.params, part) for part in parts]
    found, logp_new = [], []
    for _ in range(c.epochs):
        logp_new = []
        for part in parts:
            state, values, logp = loop.learner.update(state, part)
            found.append(values)
            logp_new.append(logp)
    state = loop.learner.adapt(state, found[-1])
    numbers = collected.metrics | metrics.numbers(*found)
    times['update_seconds'] = time.monotonic() - began - times['sample_seconds']
    return state, numbers, times, parts, logp_new


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
    with metrics.Display('value pretraining', stop.max_steps) as display:
        while not (losses and stop(losses, explained)):
            step = len(losses) + 1
            key = jax.random.fold_in(jax.random.fold_in(state.key, 0), step)
            collected = loop.collect(
                state, reference and reference.params, loop.source, key, version=0
            )
            found = []
            for part in rollout_lib.minibatches(collected.batch, c.minibatches):
                state, values = loop.learner.value_update(state, part)
                found.append(values)
            numbers = collected.metrics | metrics.numbers(*found)
            losses.append(numbers['value/loss'])
            explained.append(numbers['value/explained_variance'])
            metrics.append(loop.records, 'value_pretraining', step, numbers)
            display.update(step, numbers)
    return state


def used(state: TrainState) -> Any:
    """The parameters that evaluation measures: the moving average where there is one."""
    return state.params if state.ema is None else state.ema


def record_accuracy(setup: Setup, params: Any, workdir: Path, step: int) -> evaluate.Accuracy:
    """Measure held-out accuracy and write it down."""
    accuracy = evaluate.held_out(setup, params)
    low, high = accuracy.interval
    values = {'held_out': accuracy.value, 'low': low, 'high': high}
    metrics.append(workdir / RECORDS, 'evaluation', step, values)
    return accuracy


def save_last(parts: list[TokenBatch], logp_new: list[Any], path: Path) -> None:
    """Save the minibatches of the last pass with the log-probs that it saw, for calibration."""
    fields = ('logp_old', 'logp_behavior', 'mask', 'advantages', 'rewards', 'group', 'positive')
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in fields}
    number = np.repeat(1 + np.arange(len(parts)), [len(part.mask) for part in parts])
    batches_lib.save_batch(path, logp_new=np.concatenate(logp_new), minibatch=number, **arrays)


# ============================================================================ the run


def start(config: Mapping[str, Any], workdir: Path) -> Setup:
    """Check the config and make the folder, before anything is compiled."""
    setup = recipe.prepare(config)
    open_workdir(workdir)
    recipe.write(config, workdir / SETTINGS)
    return setup


def run(setup: Setup, workdir: Path) -> Result:
    """Warm start, measure, reinforce, measure again, report."""
    begin = time.time()
    metrics.append(workdir / TIMINGS, 'start', 0, {'time': begin})
    params = recipe.first_params(setup)
    size = sum(x.size for x in jax.tree.leaves(params))
    print(
        f'{setup.config.algorithm}: {size:,} parameters, {len(setup.task.train):,} problems to '
        f'train on, {len(setup.task.held_out)} held out, on {jax.default_backend()}'
    )
    params, warm_steps = warm_start.warm_start(setup, params, workdir / RECORDS)
    before = record_accuracy(setup, params, workdir, 0)
    print(f'warm start of {warm_steps} steps; held-out accuracy before RL: {before}', flush=True)
    params = reinforce(setup, params, workdir)
    after = record_accuracy(setup, params, workdir, setup.config.steps)
    gain = after.value - before.value
    values = {'before': before.value, 'after': after.value, 'warm_steps': warm_steps}
    metrics.append(workdir / RECORDS, 'result', setup.config.steps, values)
    metrics.append(workdir / TIMINGS, 'result', setup.config.steps, {'time': time.time()})
    curves: Path | None = workdir / CURVES
    records = metrics.read(workdir / RECORDS)
    if not metrics.draw_curves(workdir / CURVES, records, setup.config.algorithm):
        curves = None
    report(setup, before, after)
    print(f'held-out accuracy before RL: {before}')
    print(f'held-out accuracy after RL:  {after}, a gain of {100 * gain:+.1f} points')
    print(f'curves: {curves or "not drawn, matplotlib is not installed"}')
    print(f'everything else: {workdir}; {time.time() - begin:.0f} s in all')
    return Result(before, after, warm_steps, curves)


def report(setup: Setup, before: evaluate.Accuracy, after: evaluate.Accuracy) -> None:
    """Print some held-out problems with the answers before and after."""
    count = min(setup.config.evaluation.samples, len(setup.task.held_out))
    print(f'\n{"problem":>16}  {"right":>8}  {"before":>8}  {"after":>8}')
    for i, item in enumerate(setup.task.held_out[:count]):
        print(f'{item.prompt:>16}  {item.answer:>8}  {before.answers[i]:>8}  {after.answers[i]:>8}')
    print()


def read_flags(argv: list[str]) -> list[str]:
    """Parse the command line, for `app.run`; what is wrong with it ends the program in one line."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, LookupError, ValueError, TypeError, OSError) as error:
        # An error in get_config() comes with its traceback, whose last line says what it was; those
        # of missing sections are wrapped in each other.
        text: object = error
        while isinstance(text, Exception):
            text = text.args[0] if text.args and not isinstance(text, OSError) else str(text)
        lines = [line.strip() for line in str(text).splitlines() if line.strip()]
        trace = any(line.startswith('Traceback') for line in lines)
        raise SystemExit(lines[-1] if trace else ' '.join(lines)) from None


def main(argv: list[str]) -> None:
    """Entry point of `python -m policyopt.train`."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}')
    logging.set_verbosity(logging.WARNING)  # tfds tells of every file that it opens
    workdir = Path(_WORKDIR.value or '')
    try:
        setup = start(_CONFIG.value.to_dict(), workdir)
    except (ValueError, TypeError, OSError) as error:  # of the settings: no traceback needed
        text = ' '.join(str(error).split())
        raise SystemExit(f'{type(error).__name__}: {text}') from error
    try:
        run(setup, workdir)
    except KeyboardInterrupt:
        print(f'interrupted; what was recorded is in {workdir}')
        raise SystemExit(130) from None


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(main, flags_parser=read_flags)
