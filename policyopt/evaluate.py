"""How good a policy is: accuracy, pass@k and majority votes, with intervals.

    python -m policyopt.evaluate runs/quickstart
    python -m policyopt.evaluate runs/quickstart --step=100 --k=1,4,16
    python -m policyopt.evaluate MODEL --data=FILE.jsonl --k=1,8 --samples=32 --out=results

A run is evaluated on its own held-out problems, or on any others with --data.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from policyopt import answers as answers_lib
from policyopt import at_k, policy, sharding
from policyopt import turns as turns_lib
from policyopt.answers import Answers
from policyopt.at_k import wilson
from policyopt.data import Item, benchmark
from policyopt.disk import whole
from policyopt.evaluate_plan import Plan, parser, plan
from policyopt.recipe import Setup
from policyopt.rewards import Judge, JudgeError, Page, StepsConfig
from policyopt.sampling import EngineConfig, Finish, RowErrors, SamplingConfig
from policyopt.sampling.config import check_config

SUMMARY, SAMPLES, CURVE = 'evaluation.json', 'samples.jsonl', 'pass_at_k.png'


class Accuracy(NamedTuple):
    """Correct answers of all, and what was answered.

    Attributes:
      correct: number of answers with full marks.
      total: number of problems.
      answers: text of every answer, in the problems' order.
      right: whether it got full marks, of every answer.
      turns: of the answers to the first problems, as `turns.spelled` has them.
    """

    correct: int
    total: int
    answers: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()
    turns: tuple[list[dict[str, Any]], ...] = ()

    @property
    def value(self) -> float:
        """Share of correct answers."""
        return self.correct / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 % interval of the share."""
        return wilson(self.correct, self.total)

    def __str__(self) -> str:
        low, high = self.interval
        return f'{self.value:.1%} ({low:.1%} to {high:.1%}, {self.correct} of {self.total})'


def accuracy(
    model: Any,
    params: Any,
    items: Sequence[Item],
    judge: Judge,
    key: jax.Array,
    config: SamplingConfig,
    *,
    prompt_width: int,
    batch: int | None = None,
    engine: EngineConfig | None = None,
    page: Page | None = None,
    steps: StepsConfig | None = None,
    spelled: int = 0,
) -> Accuracy:
    """Answer every item once and judge the answers; arguments as of `answers.draw`.

    The turns of the first `spelled` answers come along, where they have an environment. Answers
    without a reward and those whose logits are not finite numbers do not count as correct.
    """
    found = answers_lib.draw(
        model,
        params,
        items,
        judge,
        key,
        config,
        prompt_width=prompt_width,
        batch=batch,
        engine=engine,
        on_error='record',
        page=page,
        steps=steps,
    )
    right = found.correct[:, 0]
    texts = tuple(text for (text,) in found.texts)
    turns = ()
    if any(item.play for item in items):
        rows = [row for (row,) in found.turns[:spelled]]
        turns = tuple(turns_lib.spelled(row, model.tokenizer) for row in rows)
    return Accuracy(int(right.sum()), len(items), texts, tuple(right.tolist()), turns)


def held_out(setup: Setup, params: Any, page: Page | None = None) -> Accuracy:
    """Accuracy on the held-out problems of a run; `page` as of `accuracy`."""
    c = setup.config
    drawn: dict[str, Any] = dict(batch=c.evaluation.batch)
    if setup.task.played:
        assert c.rollout.engine is not None
        engine = turns_lib.with_slots(c.rollout.engine, c.evaluation.batch)
        drawn = dict(engine=engine, spelled=c.evaluation.samples)
    return accuracy(
        setup.model,
        params,
        setup.task.held_out,
        setup.measure,
        jax.random.key(c.seed),
        c.sampling.at_temperature(c.evaluation.temperature),
        prompt_width=setup.task.prompt_width,
        page=page,
        steps=c.rollout.steps,
        **drawn,
    )


def by_task(accuracy: Accuracy, items: Sequence[Item]) -> dict[str, Accuracy]:
    """The accuracy on each task's own problems, where they are of several tasks; else {}."""
    rights: dict[str, list[bool]] = {}
    for item, right in zip(items, accuracy.right, strict=True):
        rights.setdefault(item.task, []).append(right)
    if len(rights) < 2:
        return {}
    return {name: Accuracy(sum(right), len(right)) for name, right in rights.items()}


# ============================================================================ several answers


class Evaluated(NamedTuple):
    """What came out.

    Attributes:
      policy: what was evaluated.
      items, answers, votes: problems, answers to them, and the vote class of each answer.
      found: task ('all' for all of them) -> name -> figure.
    """

    policy: policy.Policy
    items: list[Item]
    answers: Answers
    votes: list[list[int]]
    found: dict[str, dict[str, at_k.Figure]]


class Problems(NamedTuple):
    """Problems, and what judges answers to them.

    Attributes:
      items: the problems.
      judge: says which answers are right; to be closed.
      steps: what divides answers, for rewards of steps.
    """

    items: list[Item]
    judge: Judge
    steps: StepsConfig | None = None


def problems_of(job: Plan, which: policy.Policy) -> Problems:
    """The problems of a plan: a run's own, or those that were read; ValueError without any."""
    if job.problems is None or job.judge is None:
        assert which.setup is not None
        task = which.setup.task
        sides = {'held_out': [task.held_out], 'train': [task.train]}
        items = [i for side in sides.get(job.split, [task.held_out, task.train]) for i in side]
        found = Problems(items, which.setup.measure, which.setup.config.rollout.steps)
    else:
        room = which.model.config.max_length - job.sampling.max_new_tokens
        if room < 1:
            raise ValueError(
                f'max_new_tokens is {job.sampling.max_new_tokens}; the model has room for '
                f'{which.model.config.max_length} tokens, prompt and answer'
            )
        items = benchmark.items(job.problems, which.model.tokenizer, room, job.on_bad_row)
        found = Problems(list(items), job.judge)
    if not found.items:
        raise ValueError(f'there is no problem in split {job.split!r}')
    return found


def run(job: Plan) -> Evaluated:
    """Load, answer, judge, sum up."""
    which = policy.load(job.source, job.step, job.which, problems=job.problems is None)
    model = which.model
    check_config(model, job.sampling)
    items, judge, steps = problems_of(job, which)
    items, engine = _limited(items, job.limit), job.engine
    if any(item.play for item in items):
        own = which.setup and which.setup.config.rollout.engine
        assert own is not None
        engine = turns_lib.with_slots(own, engine.slots)
    print(f'{which}: {len(items)} problems, {job.samples} answers to each', flush=True)
    try:
        answers = answers_lib.draw(
            model,
            which.params,
            items,
            judge,
            jax.random.key(job.seed),
            job.sampling,
            samples=job.samples,
            prompt_width=max(len(item.ids) for item in items),
            engine=engine,
            title='answers',
            on_error='record',
            steps=steps,
        )
        votes = answers_lib.vote_classes(items, answers, judge)
    finally:
        judge.close()
    groups = {'all': np.arange(len(items))}
    tasks = dict.fromkeys(item.task for item in items)
    if len(tasks) > 1:
        names = np.array([item.task for item in items])
        groups |= {task: np.flatnonzero(names == task) for task in tasks}
    found = {
        name: at_k.summary(answers.correct[rows], [votes[i] for i in rows], job.ks, job.seed)
        for name, rows in groups.items()
    }
    return Evaluated(which, items, answers, votes, found)


def _limited(items: Sequence[Item], limit: int | None) -> list[Item]:
    """The first `limit` items of each task."""
    kept: list[Item] = []
    counts: dict[str, int] = {}
    for item in items:
        counts[item.task] = counts.get(item.task, 0) + 1
        if limit is None or counts[item.task] <= limit:
            kept.append(item)
    return kept


def describe(job: Plan, done: Evaluated) -> dict[str, Any]:
    """What evaluation.json holds; all but `timing` is the same for the same seed."""
    answers = done.answers
    tokens, lost = int(answers.tokens.sum()), answers.finish == Finish.ERROR
    failed = answers.finish > Finish.ERROR
    return {
        'policy': done.policy.origin,
        'data': job.problems.title if job.problems else 'own',
        'split': job.split,
        'problems': len(done.items),
        'samples': job.samples,
        'seed': job.seed,
        'sampling': dataclasses.asdict(job.sampling),
        'results': {
            task: {name: figure._asdict() for name, figure in figures.items()}
            for task, figures in done.found.items()
        },
        'truncated': float((answers.finish == Finish.LENGTH).mean()),
        'not_sampled': float(lost.mean()),
        'not_judged': float((np.isnan(answers.marks) & ~lost & ~failed).mean()),
        'environment_failed': float(failed.mean()),
        'tokens': tokens,
        'timing': {'seconds': answers.seconds, 'tokens_per_second': tokens / answers.seconds},
    }


def show(job: Plan, done: Evaluated) -> None:
    """Print the figures as a table, a column for each task."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title='with 95 % intervals', title_justify='left')
    table.add_column('')
    for task in done.found:
        table.add_column(task, justify='right')
    for name in done.found['all']:
        table.add_row(name, *(str(figures[name]) for figures in done.found.values()))
    Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True).print(table)
    said = describe(job, done)
    print(
        f'{said["problems"]} problems x {said["samples"]} answers, '
        f'{said["tokens"] / done.answers.tokens.size:.1f} tokens each, {said["truncated"]:.1%} cut '
        f'off at {job.sampling.max_new_tokens}, {said["not_judged"]:.1%} not judged, '
        f'{said["not_sampled"]:.1%} not drawn (logits not finite); '
        f'{said["timing"]["tokens_per_second"]:,.0f} tokens/s, compilation included'
    )


def write(job: Plan, done: Evaluated, out: Path) -> None:
    """Write samples, figure and, where these are whole, the summary."""
    with whole(out / SAMPLES) as partial:
        tokenizer = done.policy.model.tokenizer
        answers_lib.write_samples(partial, done.items, done.answers, done.votes, tokenizer)
    title = f'{done.policy.origin["path"]}, {len(done.items)} problems'
    drawn = at_k.draw(out / CURVE, done.answers.correct, done.found['all'], job.seed, title)
    text = json.dumps(describe(job, done), indent=2, default=str) + '\n'
    with whole(out / SUMMARY) as partial:
        partial.write_text(text, encoding='utf-8')
    print(f'results: {out}' + ('' if drawn else '; no figure, matplotlib is not installed'))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    options = parser().parse_args(argv)
    sharding.ask_libtpu()
    options.what = options.what or options.workdir
    try:
        job = plan(options)
        if job.out is not None:  # now, since what can't be written would be drawn for nothing
            job.out.mkdir(parents=True, exist_ok=True)
        done = run(job)
        show(job, done)
        if job.out is not None:
            write(job, done, job.out)
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return 130
    except RowErrors as error:
        print(f'error: an answer could not be drawn: {error}', file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, JudgeError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
