"""Train a reward model on preferences between a policy's answers, or calibrate one from elsewhere.

    python -m policyopt.train_reward runs/quickstart --out=rewards/sums
    python -m policyopt.train_reward MODEL --data=FILE.jsonl --out=rewards/mine --learning_rate=1e-5
    python -m policyopt.train_reward MODEL --data=FILE.jsonl --calibrate=DOWNLOADED

Answers to the same problem are told apart by the task's own scorer. The model starts from the
policy's trunk. The folder is a Hugging Face one, of a sequence classifier of one label; how well
scores agree with preferences on problems that it was not trained on is printed, and written to
preferences.json, and calibration.json says what scores are like. A run uses it by
--config.reward=reward_model --config.reward_kw="{'path': 'rewards/sums'}".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from policyopt import answers as answers_lib
from policyopt import (
    evaluate,
    metrics,
    policy,
    preferences,
    reward_model,
    reward_training,
    sharding,
)
from policyopt.evaluate_plan import Plan, add_data, add_draws, add_policy, plan
from policyopt.optimizer import OptimizerConfig
from policyopt.preferences import Agreement, PreferencesConfig
from policyopt.rewards import Calibration
from policyopt.rewards.scored import CALIBRATION, TEMPLATE
from policyopt.rewards.steps import make_case
from policyopt.sampling import RowErrors
from policyopt.sampling.config import check_config

RECORDS = 'metrics.jsonl'
SIZES = ('problems', 'answers', 'pairs', 'held_out', 'batch', 'epochs', 'flip')
TRAINING = ('held_out', 'batch', 'epochs', 'flip', 'learning_rate', 'warmup_steps')


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(
        prog='python -m policyopt.train_reward',
        description="A reward model from preferences between a policy's own answers, or the "
        'calibration of one that is there.',
        allow_abbrev=False,
    )
    add_policy(p)
    to = p.add_mutually_exclusive_group(required=True)
    to.add_argument('--out', help='new folder for the reward model')
    to.add_argument(
        '--calibrate',
        help='folder of a reward model: compare its scores with the true rewards, print how they '
        'agree, and write calibration.json there; nothing is trained',
    )
    p.add_argument('--template', help="with --calibrate: the row's text, as of reward_model")
    p.add_argument('--seed', type=int, default=0, help='of problems, answers, pairs (default: 0)')
    default = PreferencesConfig(OptimizerConfig())
    how = p.add_argument_group('answers and pairs')
    how.add_argument('--problems', type=int, help=f'at most, by chance ({default.problems})')
    how.add_argument('--answers', type=int, help=f'drawn to each ({default.answers})')
    how.add_argument('--pairs', type=int, help=f'of a problem, at most ({default.pairs})')
    how = p.add_argument_group('training')
    how.add_argument('--held_out', type=float, help=f'share of problems ({default.held_out})')
    how.add_argument('--batch', type=int, help=f'pairs of a step ({default.batch})')
    how.add_argument('--epochs', type=int, help=f'passes over the pairs ({default.epochs})')
    how.add_argument('--flip', type=float, help=f'share turned round ({default.flip})')
    how.add_argument('--learning_rate', type=float, help=f'({default.optimizer.learning_rate:g})')
    how.add_argument('--warmup_steps', type=int, help=f'({default.optimizer.warmup_steps})')
    add_draws(p)
    add_data(p, 'train')
    return p


def read(options: argparse.Namespace) -> tuple[Plan, PreferencesConfig]:
    """What is to be done, checked before a parameter is read; ValueError, TypeError or OSError."""
    options.what = options.what or options.workdir
    if options.calibrate is None and options.template is not None:
        raise ValueError('--template has no effect without --calibrate')
    if options.calibrate is not None:
        given = [name for name in TRAINING if getattr(options, name) is not None]
        if given:
            raise ValueError(f'--{given[0]} has no effect with --calibrate, which trains nothing')
    fields = {n: getattr(options, n) for n in SIZES if getattr(options, n) is not None}
    rates = ('learning_rate', 'warmup_steps')
    rates = {n: getattr(options, n) for n in rates if getattr(options, n) is not None}
    config = PreferencesConfig(OptimizerConfig(**rates), **fields)
    if options.split is None and options.data is None:
        options.split = 'train'
    options.k, options.samples, options.limit = None, config.answers, None
    return plan(options), config


def run(options: argparse.Namespace) -> Agreement:
    """Draw and compare answers; train a model and write it, or calibrate one."""
    job, config = read(options)
    found = None if options.calibrate is None else reward_model.load(options.calibrate)
    which = policy.load(job.source, job.step, job.which, problems=job.problems is None)
    check_config(which.model, job.sampling)
    problems = evaluate.problems_of(job, which)
    order = np.random.default_rng(job.seed).permutation(len(problems.items))[: config.problems]
    items = [problems.items[i] for i in order]
    print(f'{which}: {len(items)} problems, {config.answers} answers to each', flush=True)
    with contextlib.closing(problems.judge):
        answers = answers_lib.draw(
            which.model,
            which.params,
            items,
            problems.judge,
            jax.random.key(job.seed),
            job.sampling,
            samples=config.answers,
            prompt_width=max(len(item.ids) for item in items),
            engine=job.engine,
            title='answers',
            on_error='record',
            steps=problems.steps,
        )
    if found is not None:
        form = options.template or TEMPLATE
        agreed, known = measure(which, found, items, answers, config, form, options)
        write(Path(str(options.calibrate)), known)
        return agreed
    assert job.out is not None
    compared = reward_training.compare(items, answers, config, job.seed)
    job.out.mkdir(parents=True, exist_ok=True)
    records = job.out / RECORDS

    def record(step: int, values: dict[str, float]) -> None:
        metrics.append(records, 'preferences', step, values)

    trained = reward_training.train(which.model, which.params, compared, config, job.seed, record)
    reward_training.save(trained, job.out)
    return trained.epochs[-1]


def measure(
    which: policy.Policy,
    found: reward_model.RewardModel,
    items: Sequence[Any],
    answers: answers_lib.Answers,
    config: PreferencesConfig,
    template: str,
    options: argparse.Namespace,
) -> tuple[Agreement, Calibration]:
    """How a reward model that is there agrees with preferences, and what its scores are like."""
    make = make_case(None, which.model.tokenizer.decode)
    row = reward_model.make_rows(
        found.model.tokenizer, which.model.tokenizer, template, options.calibrate
    )
    keys = [
        (p, a)
        for p in range(len(items))
        for a in range(config.answers)
        if not np.isnan(answers.rewards[p, a])
    ]
    rows = [row(make(items[p], answers.ids[p][a])) for p, a in keys]
    kept = [i for i, ids in enumerate(rows) if len(ids) <= found.model.config.max_length]
    if len(kept) < len(rows):
        print(f'{len(rows) - len(kept)} of {len(rows)} rows are too long, and left out')
    scores = reward_model.scores(found.model, found.params, [rows[i] for i in kept], config.batch)
    true = np.array([answers.rewards[keys[i]] for i in kept])
    by_key = dict(zip([keys[i] for i in kept], scores.tolist(), strict=True))
    texts = [[tuple(ids) for ids in row] for row in answers.ids]
    pairs = preferences.make_pairs(answers.rewards, texts, config.pairs, options.seed)
    pairs = [p for p in pairs if {(p.problem, p.chosen), (p.problem, p.rejected)} <= by_key.keys()]
    known = reward_model.calibrate(scores, true)
    return preferences.agreement(pairs, by_key, options.seed), known


def write(folder: Path, known: Calibration) -> None:
    """Write the calibration of a model."""
    (folder / CALIBRATION).write_text(json.dumps(known._asdict(), indent=2) + '\n')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    options = parser().parse_args(argv)
    sharding.ask_libtpu()
    try:
        agreed = run(options)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return 130
    except RowErrors as error:
        print(f'error: an answer could not be drawn: {error}', file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    where = '' if options.calibrate else ', held out'
    print(f'the better answer scores higher in {agreed}{where}')
    print(f'reward model: {options.out or options.calibrate}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
