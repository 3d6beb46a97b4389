"""Train a policy: supervised warm start, then reinforcement learning with any algorithm.

    python -m policyopt.train --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config can be overridden: --config.optimizer.learning_rate=1e-4.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from policyopt import algorithms, data, evaluate, losses, metrics, models, rewards, settings
from policyopt import batches as batches_lib
from policyopt import learner as learner_lib
from policyopt import rollout as rollout_lib
from policyopt.sampling import SamplingConfig, allowed_mask
from policyopt.types import Algorithm, Estimates, TokenBatch

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'File with get_config(), or FILE:ARGUMENT.'
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for everything that the run writes.')

RECORDS, CURVES, SETTINGS = 'metrics.jsonl', 'curves.png', 'config.json'


# ============================================================================ settings


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised learning on right answers, until the policy is worth improving.

    Attributes:
      batch: rows of a step.
      max_steps: the run fails where the accuracy is not reached by then.
      every: steps between looks at the held-out accuracy.
      accuracy: (low, high) held-out accuracy; the first look at or above `low` ends the warm start,
        and one above `high` is remarked on. low 0 skips the warm start.
      optimizer: of this stage.
    """

    optimizer: learner_lib.OptimizerConfig
    batch: int = 128
    max_steps: int = 1000
    every: int = 10
    accuracy: tuple[float, float] = (0.25, 0.5)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How held-out accuracy is measured.

    Attributes:
      every: RL steps between measurements; the first and the last are always made.
      batch: rows sampled at once.
      temperature: 0 takes the most probable token.
      samples: answers printed at the end.
    """

    every: int = 25
    batch: int = 512
    temperature: float = 0.0
    samples: int = 8


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything a run is a function of.

    Attributes:
      task: problems; see data.TaskConfig.
      model: fields of models.ModelConfig; the tokenizer gives vocab_size, and the value head comes
        with algorithms that need a critic.
      warm_start: the supervised stage.
      algorithm: import path of a factory, with its arguments in `algorithm_kw`.
      rollout, sampling, optimizer: see their classes.
      steps: RL steps, each of which draws new answers.
      epochs: passes over the rows of a step.
      minibatches: optimizer steps of a pass.
      microbatches: parts of a minibatch, for memory only.
      evaluation: held-out accuracy.
      seed: of parameters, order of the problems and sampling.
    """

    task: data.TaskConfig
    model: Mapping[str, Any]
    warm_start: WarmStart
    algorithm: str
    rollout: rollout_lib.RolloutConfig
    sampling: SamplingConfig
    optimizer: learner_lib.OptimizerConfig
    evaluation: Evaluation
    algorithm_kw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 100
    epochs: int = 1
    minibatches: int = 1
    microbatches: int = 1
    seed: int = 0


class Setup(NamedTuple):
    """What every stage uses."""

    config: RunConfig
    model: Any
    task: data.Task
    judge: rewards.Judge
    algorithm: Algorithm
    width: int  # of a row: prompt and answer


class Result(NamedTuple):
    """Held-out accuracy before and after reinforcement learning, and where the curves are."""

    before: evaluate.Accuracy
    after: evaluate.Accuracy
    warm_steps: int
    curves: Path | None


def prepare(config: Mapping[str, Any]) -> Setup:
    """Check a config and build what it names, before anything is compiled.

    Raises ValueError or TypeError naming the field, its value, what is legal and, for names, the
    nearest spelling.
    """
    c = settings.read(RunConfig, config)
    for name in ('steps', 'epochs', 'minibatches', 'microbatches'):
        if getattr(c, name) < 1:
            raise ValueError(f'config.{name} is {getattr(c, name)}; legal is 1 or more')
    rows = c.rollout.prompts * c.rollout.group_size
    if rows % (c.minibatches * c.microbatches):
        raise ValueError(
            f'config.minibatches * config.microbatches is {c.minibatches * c.microbatches}; legal '
            f'are divisors of the {rows} rows of a step (rollout.prompts * rollout.group_size)'
        )
    if c.sampling.temperature == 0:
        raise ValueError('config.sampling.temperature is 0; training needs one above 0')
    low, high = c.warm_start.accuracy
    if not 0 <= low < high <= 1:
        raise ValueError(
            f'config.warm_start.accuracy is {(low, high)}; legal is 0 <= low < high <= 1'
        )
    algorithm = algorithms.resolve(c.algorithm, **c.algorithm_kw)
    critic = bool(rollout_lib.required_fields(algorithm) & {'values', 'values_old', 'returns'})
    tokenizer = data.arithmetic_tokenizer()
    shape = {'vocab_size': tokenizer.vocab_size, 'value_head': critic, **c.model}
    model_config = settings.read(models.ModelConfig, shape, 'config.model')
    if model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f'config.model.vocab_size is {model_config.vocab_size}; the tokenizer has '
            f'{tokenizer.vocab_size} ids'
        )
    task = data.make_task(c.task, tokenizer)
    longest = max(len(item.answer) for item in (*task.train, *task.held_out)) + 1
    if c.sampling.max_new_tokens < longest:
        raise ValueError(
            f'config.sampling.max_new_tokens is {c.sampling.max_new_tokens}; the longest answer '
            f'with its end of sequence has {longest} tokens'
        )
    return Setup(
        config=c,
        model=models.build(model_config, tokenizer),
        task=task,
        judge=rewards.graded(task.score),
        algorithm=algorithm,
        width=c.task.prompt_width + c.sampling.max_new_tokens,
    )


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


def held_out(setup: Setup, params: Any) -> evaluate.Accuracy:
    """Accuracy on the held-out problems."""
    c = setup.config
    return evaluate.accuracy(
        setup.model,
        params,
        setup.task.held_out,
        setup.judge,
        jax.random.key(c.seed),
        c.sampling.at_temperature(c.evaluation.temperature),
        prompt_width=c.task.prompt_width,
        batch=c.evaluation.batch,
    )


# ============================================================================ warm start


def warm_start(setup: Setup, params: Any, workdir: Path) -> tuple[Any, int]:
    """Imitate right answers until the held-out accuracy is in the window: (params, steps)."""
    c = setup.config.warm_start
    low, high = c.accuracy
    if low == 0:
        return params, 0
    imitate = Algorithm(
        advantages=lambda rollout: Estimates(jnp.zeros_like(rollout.mask)),
        loss=losses.positive_nll(aggregate=losses.token_mean()),
    )
    learner = learner_lib.make_learner(
        setup.model,
        imitate,
        learner_lib.make_optimizer(c.optimizer),
        diagnose=lambda inputs: {},
    )
    state = learner.init(params, jax.random.key(setup.config.seed))
    source = data.batches(setup.task.train, c.batch, setup.config.seed)
    with metrics.Display('warm start', c.max_steps) as display:
        for step in range(1, c.max_steps + 1):
            batch = data.supervised(next(source), setup.model.tokenizer, setup.width)
            state, found, _ = learner.update(state, batch)
            if step % c.every:
                continue
            accuracy = held_out(setup, state.params)
            values = {'loss': float(found['loss'].value), 'held_out': accuracy.value}
            metrics.append(workdir / RECORDS, 'warm_start', step, values)
            display.update(step, values)
            if accuracy.value >= low:
                break
        else:
            raise ValueError(
                f'held-out accuracy is {accuracy} after {c.max_steps} steps of warm start, not '
                f'{low:.0%}: raise warm_start.max_steps or make the task easier'
            )
    if accuracy.value > high:
        print(f'the warm start went past {high:.0%}: look more often (warm_start.every)')
    return state.params, step


# ============================================================================ reinforcement


def reinforce(setup: Setup, params: Any, workdir: Path) -> Any:
    """Improve the policy by its own rewarded answers; returns the parameters."""
    c = setup.config
    reference = jax.tree.map(jnp.copy, params)  # `params` are given away to the first update
    learner = learner_lib.make_learner(
        setup.model,
        setup.algorithm,
        learner_lib.make_optimizer(c.optimizer),
        temperature=c.sampling.temperature,
        allowed=allowed_mask(c.sampling, setup.model.config.vocab_size),
        microbatches=c.microbatches,
    )
    collect = rollout_lib.make_collector(
        setup.model, setup.algorithm, setup.judge, c.rollout, c.sampling, c.task.prompt_width
    )
    state = learner.init(params, jax.random.key(c.seed + 1))
    source = data.batches(setup.task.train, c.rollout.prompts, c.seed + 1)
    parts, logp_new = [], []
    with metrics.Display('RL', c.steps) as display:
        for step in range(1, c.steps + 1):
            began = time.monotonic()
            key = jax.random.fold_in(state.key, step)
            collected = collect(state.params, reference, source, key, version=step - 1)
            parts = rollout_lib.minibatches(collected.batch, c.minibatches)
            found = []
            for _ in range(c.epochs):
                logp_new = []
                for part in parts:
                    state, values, logp = learner.update(state, part)
                    found.append(values)
                    logp_new.append(logp)
            state = learner.adapt(state, found[-1])
            values = collected.metrics | metrics.numbers(*found)
            spent = time.monotonic() - began
            values |= {
                'seconds': spent,
                'tokens_per_second': collected.metrics['rollout/tokens'] / spent,
            }
            metrics.append(workdir / RECORDS, 'rl', step, values)
            display.update(step, values)
            if step % c.evaluation.every == 0 and step < c.steps:
                record_accuracy(setup, state.params, workdir, step)
    save_last(parts, logp_new, workdir / 'batches' / f'batch_{c.steps:06d}.npz')
    return state.params


def record_accuracy(setup: Setup, params: Any, workdir: Path, step: int) -> evaluate.Accuracy:
    """Measure held-out accuracy and write it down."""
    accuracy = held_out(setup, params)
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
    setup = prepare(config)
    open_workdir(workdir)
    (workdir / SETTINGS).write_text(json.dumps(dict(config), indent=2, default=str) + '\n')
    return setup


def run(setup: Setup, workdir: Path) -> Result:
    """Warm start, measure, reinforce, measure again, report."""
    begin = time.monotonic()
    params = jax.jit(setup.model.init)(jax.random.key(setup.config.seed))
    size = sum(x.size for x in jax.tree.leaves(params))
    print(
        f'{setup.config.algorithm}: {size:,} parameters, {len(setup.task.train):,} problems to '
        f'train on, {len(setup.task.held_out)} held out, on {jax.default_backend()}'
    )
    params, warm_steps = warm_start(setup, params, workdir)
    before = record_accuracy(setup, params, workdir, 0)
    print(f'warm start of {warm_steps} steps; held-out accuracy before RL: {before}', flush=True)
    params = reinforce(setup, params, workdir)
    after = record_accuracy(setup, params, workdir, setup.config.steps)
    gain = after.value - before.value
    values = {'before': before.value, 'after': after.value}
    metrics.append(workdir / RECORDS, 'result', setup.config.steps, values)
    curves: Path | None = workdir / CURVES
    records = metrics.read(workdir / RECORDS)
    if not metrics.draw_curves(workdir / CURVES, records, setup.config.algorithm):
        curves = None
    report(setup, before, after)
    print(f'held-out accuracy before RL: {before}')
    print(f'held-out accuracy after RL:  {after}, a gain of {100 * gain:+.1f} points')
    print(f'curves: {curves or "not drawn, matplotlib is not installed"}')
    print(f'everything else: {workdir}; {time.monotonic() - begin:.0f} s in all')
    return Result(before, after, warm_steps, curves)


def report(setup: Setup, before: evaluate.Accuracy, after: evaluate.Accuracy) -> None:
    """Print some held-out problems with the answers before and after."""
    count = min(setup.config.evaluation.samples, len(setup.task.held_out))
    print(f'\n{"problem":>16}  {"right":>8}  {"before":>8}  {"after":>8}')
    for i, item in enumerate(setup.task.held_out[:count]):
        print(f'{item.prompt:>16}  {item.answer:>8}  {before.answers[i]:>8}  {after.answers[i]:>8}')
    print()


def main(argv: list[str]) -> None:
    """Entry point of `python -m policyopt.train`."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}')
    workdir = Path(_WORKDIR.value or '')
    try:
        setup = start(_CONFIG.value.to_dict(), workdir)
    except (ValueError, TypeError) as error:  # what is wrong with the settings; no traceback needed
        raise SystemExit(f'{type(error).__name__}: {error}') from error
    try:
        run(setup, workdir)
    except KeyboardInterrupt:
        print(f'interrupted; what was recorded is in {workdir}')
        raise SystemExit(130) from None


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(main)
