"""What to evaluate, and how: the flags of `python -m policyopt.evaluate`, checked."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from policyopt import checks, policy, recipe, reward_judge, rewards, settings
from policyopt.data import benchmark
from policyopt.sampling import EngineConfig, SamplingConfig

MAX_NEW_TOKENS = 256  # of a model that comes with no run
SAMPLING = ('max_new_tokens', 'top_p', 'top_k', 'min_p')  # flags that are fields of its config
JUDGING = ('reward', 'reward_kw', 'deadline')
DATA_FLAGS = (
    'split',
    'data_kw',
    'data_size',
    'data_seed',
    'data_form',
    'prompt_field',
    'answer_field',
    'on_bad_row',
    *JUDGING,
)


class Plan(NamedTuple):
    """An evaluation that may begin.

    Attributes:
      source: of the policy.
      step, which: of the checkpoint; see `policy.find`.
      problems, judge: as read, and what judges answers to them; None for the run's own.
      split: of the problems.
      on_bad_row: of problems that don't fit the model.
      ks, samples, seed, limit: as the flags say.
      sampling: how answers are drawn.
      engine: what draws them.
      out: folder for the results; None for none.
    """

    source: policy.Source
    step: int | None
    which: policy.Which
    problems: benchmark.Problems | None
    judge: rewards.Judge | None
    split: str
    on_bad_row: Any
    ks: tuple[int, ...]
    samples: int
    seed: int
    limit: int | None
    sampling: SamplingConfig
    engine: EngineConfig
    out: Path | None


def plan(options: argparse.Namespace) -> Plan:
    """Check all that can be checked before a parameter is read.

    Raises ValueError, TypeError or OSError.
    """
    ks, samples = _counts(options.k, options.samples)
    for name, low in (('slots', 1), ('seed', 0)):
        checks.number(name, getattr(options, name), low)
    if options.limit is not None:
        checks.number('limit', options.limit, 1)
    source = policy.find(options.what, options.step, options.params)
    sampling, engine = _sampling(source.config, options, samples)
    problems = judge = None
    if options.data is not None:
        problems = benchmark.read(_benchmark(options))
        judge = _judge(source.config or {}, options, problems.scorer)
    elif source.config is None:
        raise ValueError(f'{source.path} is a model, which has no problems of its own: give --data')
    else:
        given = [n for n in DATA_FLAGS if n != 'split' and getattr(options, n) is not None]
        if given:
            raise ValueError(f"--{given[0]} has no effect on a run's own problems: give --data")
        checks.one_of('split', options.split or 'held_out', ('held_out', 'train', 'all'))
    out = None if options.out is None else Path(options.out)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f'--out {out} is there already; name a new folder')
    return Plan(
        source=source,
        step=options.step,
        which=options.params,
        problems=problems,
        judge=judge,
        split=options.split or ('held_out' if problems is None else 'all'),
        on_bad_row=options.on_bad_row or 'error',
        ks=ks,
        samples=samples,
        seed=options.seed,
        limit=options.limit,
        sampling=sampling,
        engine=engine,
        out=out,
    )


def _counts(k: str | None, samples: int | None) -> tuple[tuple[int, ...], int]:
    """The list of k and the answers to each problem, either from the other where it is left out."""
    try:
        ks = sorted({int(part) for part in k.split(',')}) if k else []
    except ValueError:
        raise ValueError(f'k is {k!r}; legal are whole numbers with commas, as in 1,4,16') from None
    n = samples if samples is not None else max([1, *ks])
    checks.number('samples', n, 1)
    ks = ks or [2**i for i in range(n.bit_length()) if 2**i <= n]
    if ks[0] < 1 or ks[-1] > n:
        wrong = ks[0] if ks[0] < 1 else ks[-1]
        raise ValueError(f'k is {wrong}; legal is 1 to the {n} answers to a problem (--samples)')
    return tuple(ks), n


def _sampling(
    config: Mapping[str, Any] | None, options: argparse.Namespace, samples: int
) -> tuple[SamplingConfig, EngineConfig]:
    """How answers are drawn: as the run draws them, but for what the flags say."""
    base, temperature, engine = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS), 0.0, None
    if config is not None:
        base = settings.read(SamplingConfig, config['sampling'], 'config.sampling')
        section = settings.read(recipe.Evaluation, config['evaluation'], 'config.evaluation')
        temperature = section.temperature
        if sizes := config.get('rollout', {}).get('engine'):
            engine = settings.read(EngineConfig, sizes, 'config.rollout.engine')
    if options.temperature is not None:
        temperature = options.temperature
    elif samples > 1 and temperature == 0:
        temperature = base.temperature
    if temperature == 0 and samples > 1:
        raise ValueError(
            f'temperature is 0, at which all {samples} answers to a problem are the same; legal is '
            'one above 0, or --samples=1'
        )
    changes = {n: getattr(options, n) for n in SAMPLING if getattr(options, n) is not None}
    sampling = dataclasses.replace(base.at_temperature(temperature), **changes)
    slots = options.slots
    if engine is None:
        sizes: dict[str, Any] = dict(
            refill=max(1, slots // 8), prefill_rows=min(8, slots), steps=32
        )
        engine = EngineConfig(slots=slots, **sizes)
    shrunk = {n: min(getattr(engine, n) or slots, slots) for n in ('refill', 'prefill_rows')}
    return sampling, dataclasses.replace(engine, slots=slots, min_slots=None, size=None, **shrunk)


def _benchmark(options: argparse.Namespace) -> benchmark.BenchmarkConfig:
    names = {'data_size': 'size', 'data_seed': 'seed', 'data_form': 'form', 'data_kw': 'kw'}
    flags = [n for n in DATA_FLAGS if n not in JUDGING and getattr(options, n) is not None]
    fields = {names.get(name, name): getattr(options, name) for name in flags}
    if 'kw' in fields:
        fields['kw'] = _json('data_kw', fields['kw'])
    found = settings.read(benchmark.BenchmarkConfig, {'source': options.data, **fields}, 'data')
    found.check_effect(fields)  # a default, too, where it was asked for
    return found


def _judge(
    config: Mapping[str, Any], options: argparse.Namespace, scorer: rewards.Spec
) -> rewards.Judge:
    """What judges answers to problems that are not the run's: its reward, or the one asked for."""
    name, kw = config.get('reward', 'graded'), config.get('reward_kw', {})
    if options.reward is not None:
        name, kw = options.reward, {}
    if options.reward_kw is not None:
        kw = _json('reward_kw', options.reward_kw)
    spec = rewards.read(name, kw, scorer, 'reward')
    if reward_judge.uses(spec) and options.reward is not None:
        raise ValueError(
            f'--reward {name} reads a reward model, which says what an answer scores and not '
            'whether it is right; legal is a reward without one'
        )
    if reward_judge.uses(spec):
        spec = reward_judge.truth_of(spec, scorer)
    given = settings.read(rewards.JudgeConfig, config.get('judge', {}), 'config.judge')
    limits = given if given.workers else rewards.JudgeConfig()
    if options.deadline is not None:
        limits = dataclasses.replace(limits, deadline=options.deadline)
    return rewards.make_judge(spec, limits)


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f'{name} is {text!r}, which is no JSON: {error}') from None
    if not isinstance(found, dict):
        raise ValueError(f'{name} is {text!r}; legal is a JSON object')
    return found


# ============================================================================ flags


def parser() -> argparse.ArgumentParser:
    """The flags of `python -m policyopt.evaluate`."""
    p = argparse.ArgumentParser(
        prog='python -m policyopt.evaluate',
        description='avg@n, pass@k and majority votes of a policy, with 95 %% intervals.',
        allow_abbrev=False,
    )
    add_policy(p)
    p.add_argument('--k', help='numbers with commas (default: powers of two up to --samples)')
    p.add_argument('--samples', type=int, help='answers to a problem (default: the largest k)')
    p.add_argument('--seed', type=int, default=0, help='of answers and intervals (default: 0)')
    p.add_argument('--limit', type=int, help='of problems, the first of each task')
    p.add_argument('--out', help='new folder for summary, samples and figure')
    add_draws(p)
    add_data(p, 'held out')
    return p


def add_policy(p: argparse.ArgumentParser) -> None:
    """Flags that say which policy."""
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument(
        'what', nargs='?', help='a run (its --workdir), a Hugging Face folder, a GGUF'
    )
    what.add_argument('--workdir', help='the same, as policyopt.train calls it')
    policy.add_flags(p)


def add_draws(p: argparse.ArgumentParser) -> None:
    """Flags that say how answers are drawn."""
    p.add_argument('--slots', type=int, default=64, help='answers drawn at once (default: 64)')
    draws = p.add_argument_group('how answers are drawn (default: as the run draws them)')
    draws.add_argument(
        '--temperature',
        type=float,
        help="default: the run's evaluation.temperature (0 without a run); where that is 0 and "
        'there are several answers, its sampling.temperature (1)',
    )
    draws.add_argument('--top_p', type=float, help='shortest set of tokens with this mass')
    draws.add_argument('--top_k', type=int, help='so many most probable tokens')
    draws.add_argument('--min_p', type=float, help='share of the largest probability')
    draws.add_argument('--max_new_tokens', type=int, help=f'without a run: {MAX_NEW_TOKENS}')


def add_data(p: argparse.ArgumentParser, own: str) -> None:
    """Flags that say which problems; `own` is the split of a run that is the default."""
    data = p.add_argument_group(f"problems (default: the run's own, {own})")
    data.add_argument(
        '--data',
        help='a JSONL file, a folder that a tfds builder prepared, a reasoning-gym dataset',
    )
    data.add_argument('--split', help='held_out, train or all; of a folder, one of its own')
    data.add_argument('--data_kw', help='settings of a reasoning-gym dataset, JSON')
    data.add_argument('--data_size', type=int, help='problems of it that are generated (500)')
    data.add_argument('--data_seed', type=int, help='of the generator (0)')
    data.add_argument('--data_form', help="'full', or 'compact' as in 4+5=, for sums (full)")
    data.add_argument('--prompt_field', help='name in a file or folder (prompt)')
    data.add_argument('--answer_field', help='name in a file or folder (answer)')
    data.add_argument('--on_bad_row', help="'error', or 'skip' with a warning (error)")
    data.add_argument(
        '--reward',
        help="what judges answers, as config.reward (the run's; graded without one, by the "
        'scorer of the problems)',
    )
    data.add_argument('--reward_kw', help='its arguments, JSON')
    data.add_argument('--deadline', type=float, help="seconds to judge an answer (the run's; 5)")
