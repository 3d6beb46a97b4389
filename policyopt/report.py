"""Report on runs: a dashboard in one figure, and a page with tables and sample answers.

    python -m policyopt.report runs/quickstart
    python -m policyopt.report runs/gspo --compare=runs/grpo,runs/sapo --out=reports/ratios

Works on finished runs and on those that are still going. With --compare, runs are drawn on the same
panels, and tables say in what they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policyopt import checks, dashboard, settings
from policyopt.disk import whole
from policyopt.runs import Run, Series, read_all, smooth, width_of
from policyopt.workdir import DASHBOARD, PAGE

COMPARED = 'comparison'  # name of figure and page of several runs
SETTLED = 2  # steps that may compile after each start


class Files(NamedTuple):
    """What was written; `figure` is None where there is none."""

    page: Path
    figure: Path | None


class Row(NamedTuple):
    """A metric of the summary.

    Attributes:
      name: in words.
      metric, stage: where it is.
      form: of its numbers.
      best: which of its values is the best; None where neither end is.
    """

    name: str
    metric: str
    form: str
    best: Callable[[np.ndarray], np.intp] | None = None
    stage: str = 'rl'


ROWS = (
    Row('held-out accuracy', 'held_out', '.1%', np.argmax, 'evaluation'),
    Row('sampled accuracy', 'accuracy', '.1%', np.argmax),
    Row('reward', 'reward', '.3f', np.argmax),
    Row('length (tokens)', 'length', '.1f'),
    Row('turns of a row', 'turns/mean', '.2f'),
    Row('reward of a turn', 'turns/reward', '.3f', np.argmax),
    Row('cut off at the limit', 'truncated', '.1%'),
    Row('KL to the sampler (nats per token)', 'kl_behavior/k3', '.2g'),
    Row('KL to the reference (nats per token)', 'kl_reference/k3', '.2g'),
    Row('entropy (nats per token)', 'entropy', '.3f'),
    Row('frozen tokens', 'policy/frozen', '.1%'),
    Row('gradient norm', 'grad_norm', '.3g'),
    Row('update norm', 'update_norm', '.3g'),
    Row('explained variance of the critic', 'value/explained_variance', '.2f', np.argmax),
)


def rows_of(runs: Sequence[Run], more: Sequence[str]) -> list[Row]:
    """Rows of the summary: those above, tasks of a mixture after all of them, and asked ones."""
    tasks = dict.fromkeys(name for run in runs for name in run.group('held_out', 'evaluation'))
    form, best = ROWS[0].form, ROWS[0].best
    parts = [
        Row(f'held-out accuracy, {name}', f'held_out/{name}', form, best, 'evaluation')
        for name in tasks
    ]
    return [ROWS[0], *parts, *ROWS[1:], *(Row(name, name, '.3g') for name in more)]


# ============================================================================ the page


def write(
    workdir: Path,
    *,
    compare: Sequence[Path] = (),
    out: Path | None = None,
    more: Sequence[str] = (),
) -> Files:
    """Write figure and page of the run in `workdir`, compared with those in other folders.

    Args:
      workdir: of the run.
      compare: folders of other runs.
      out: folder of the files; by default that of the run.
      more: metrics of RL steps that get a panel and a row of their own.

    Raises ValueError, with the nearest name, for a folder without a run and an unknown metric.
    """
    runs = read_all([workdir, *compare])
    check_metrics(runs, more)
    out = out or workdir
    out.mkdir(parents=True, exist_ok=True)
    figure = out / (f'{COMPARED}.png' if compare else DASHBOARD)
    page = out / (f'{COMPARED}.md' if compare else PAGE)
    drawn = dashboard.draw(figure, runs, more)
    parts = comparison(runs, more) if compare else single(runs[0], more)
    picture = [f'![Dashboard]({figure.name})'] if drawn else []
    text = '\n\n'.join([*list(parts)[:1], *picture, *list(parts)[1:]])
    with whole(page) as partial:
        partial.write_text(text + '\n', encoding='utf-8')
    return Files(page, figure if drawn else None)


def check_metrics(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Raise ValueError for a metric that no run has, with the nearest spelling."""
    known = sorted({name for run in runs for name in run.names()})
    for name in names:
        if name not in known:
            raise ValueError(f'no run has a metric `{name}`.{checks.nearest(name, known)}')


def single(run: Run, more: Sequence[str] = ()) -> list[str]:
    """Paragraphs of the page of one run, its title first."""
    parts = [f'# {run.title}\n\n{state(run)}']
    parts.append('## Summary\n\n' + summary(run, more))
    parts.append('## What was unusual\n\n' + '\n'.join(f'- {line}' for line in unusual(run)))
    if lines := [x for start in run.starts for x in command_lines(start)]:
        parts.append('## Settings\n\n' + '\n'.join(dict.fromkeys(lines)))
    if answers := sample_table(run):
        parts.append('## Answers to held-out problems\n\n' + answers)
    return parts


def state(run: Run) -> str:
    """How far a run has come, in a sentence."""
    total = run.config.get('steps')
    of = f' of {total}' if total else ''
    how = 'finished' if run.finished else 'not finished'
    again = len(run.starts) - 1
    resumed = f', resumed {again} time{"s" if again > 1 else ""}' if again > 0 else ''
    text = f'`{run.folder}`: {how}, {run.steps}{of} RL steps{resumed}.'
    warm = run.series('held_out', 'warm_start')
    if warm:
        text += (
            f' The warm start took {warm.steps[-1]:.0f} steps, to a held-out accuracy of '
            f'{warm.values[-1]:.1%}.'
        )
    if not run.steps:
        text += ' There is no RL step yet, so nothing to draw.'
    return text


def summary(run: Run, more: Sequence[str] = ()) -> str:
    """Start, end and best of each metric, means over as many steps as the figure smooths over."""
    width = width_of(run.steps)
    rows = []
    for row in rows_of([run], more):
        series = run.series(row.metric, row.stage)
        if not series:
            continue
        values = smoothed(series, row, width)
        best = ''
        if row.best is not None:
            at = int(row.best(values))
            best = f'{values[at]:{row.form}} (step {series.steps[at]:.0f})'
        ends = [f'{values[i]:{row.form}}' for i in (0, -1)]
        if row.metric == 'held_out':
            ends = [end + interval(run, i) for end, i in zip(ends, (0, -1), strict=True)]
        rows.append((row.name, *ends, best))
    if not rows:
        return 'Nothing is measured yet.'
    note = f'\n\nOf RL steps, means of {width} steps.' if width > 1 else ''
    return table(('metric', 'start', 'end', 'best'), rows) + note


def smoothed(series: Series, row: Row, width: int) -> np.ndarray:
    """Values as the figure shows them: measurements as they are, steps as running means."""
    return series.values if row.stage != 'rl' else smooth(series.values, width)


def interval(run: Run, index: int) -> str:
    """' (LOW to HIGH)' of a measurement, '' where it is not recorded."""
    low, high = (run.series(name, 'evaluation') for name in ('low', 'high'))
    if not low or not high:
        return ''
    return f' ({low.values[index]:.1%} to {high.values[index]:.1%})'


def unusual(run: Run) -> Iterator[str]:
    """What should not happen in a run, or seldom; a line that says so where nothing did."""
    found = list(_unusual(run))
    yield from found or ['Nothing.']


def _unusual(run: Run) -> Iterator[str]:
    for name, what in (
        ('skipped', 'updates were skipped, their loss or gradient not being finite'),
        ('rollout/not_sampled', 'answers could not be drawn, their logits not being finite'),
        ('rollout/not_judged', 'answers got no reward: the judge failed on them'),
        ('turns/failed', 'environments of rows raised, or gave no answer'),
        ('turns/late', 'environments of rows took too long'),
        ('turns/overflow', 'environments of rows gave too many tokens'),
        ('ratio/nonfinite', 'log-ratios were not finite'),
        ('ratio/extreme', 'ratios were beyond exp(20)'),
    ):
        series = run.series(name)
        bad = series.values > 0
        if bad.any():
            yield (
                f'In {bad.sum()} of {len(bad)} steps {what} ({where(series.steps[bad])}; up to '
                f'{series.values.max():.1%} of a step).'
            )
    kept = run.series('rollout/kept')
    if (short := kept.values < 1).any():
        yield (
            f'In {short.sum()} of {len(short)} steps the batch was not filled '
            f'({where(kept.steps[short])}; at worst {kept.values.min():.1%} of its rows): the '
            'algorithm, or dynamic_sampling, dropped groups of equal rewards.'
        )
    missing = [n for n in run.names() if len(run.series(n).steps) < _count(run, n)]
    if missing:
        yield f'Values that were not finite: {", ".join(f"`{n}`" for n in missing)}.'
    if late := recompiles(run):
        yield (
            f'Programs were compiled after the first {SETTLED} steps of a start, at '
            f'{where(late)}: a shape changed, which costs seconds.'
        )


def _count(run: Run, name: str) -> int:
    return sum(r['stage'] == 'rl' and name in r for r in run.records)


def where(steps: Sequence[int] | np.ndarray) -> str:
    """Steps in words: all of few, first and last of many."""
    shown = [f'{step:.0f}' for step in steps]
    if len(shown) > 6:
        return f'steps {shown[0]} to {shown[-1]}'
    return f'step{"s" if len(shown) > 1 else ""} {", ".join(shown)}'


def recompiles(run: Run) -> list[int]:
    """Steps that compiled a program though the process had done `SETTLED` steps."""
    late, done = [], 0
    for record in run.timings:
        if record['stage'] == 'start':
            done = 0
        elif record['stage'] == 'rl':
            done += 1
            if record.get('compiles', 0) and done > SETTLED:
                late.append(record['step'])
    return late


def command_lines(start: Mapping[str, Any]) -> Iterator[str]:
    """What a process was started with, where that is recorded."""
    if start.get('config_file'):
        changed = [f'`{name} = {value!r}`' for name, value in start.get('overrides', {}).items()]
        what = f', with {", ".join(changed)}' if changed else ', as it is'
        yield f'- `{start["config_file"]}`{what}'


def sample_table(run: Run) -> str:
    """Some held-out problems with the answers at the first and the last evaluation."""
    steps = sorted({r['step'] for r in run.samples})
    if not steps:
        return ''
    shown = steps[:1] + steps[1:][-1:]
    answers = {(r['step'], r['problem']): r for r in run.samples}
    rows = []
    for first in [r for r in run.samples if r['step'] == shown[0]]:
        found = [answers.get((step, first['problem'])) for step in shown]
        marks = [f'{cell(r["answer"])} {"✓" if r["right"] else "✗"}' if r else '' for r in found]
        rows.append((cell(first['problem']), cell(first['expected']), *marks))
    return table(('problem', 'right answer', *(f'step {step}' for step in shown)), rows)


# ============================================================================ several runs


def comparison(runs: Sequence[Run], more: Sequence[str] = ()) -> list[str]:
    """Paragraphs of the page of several runs, its title first."""
    width = width_of(max(run.steps for run in runs))
    parts = [
        f'# {dashboard.title_of(runs)}\n\n' + '\n'.join(f'- **{r.name}**: {state(r)}' for r in runs)
    ]
    rows = []
    for row in rows_of(runs, more):
        found = [run.series(row.metric, row.stage) for run in runs]
        if any(found):
            cells = [last(run, row, s, width) for run, s in zip(runs, found, strict=True)]
            rows.append((row.name, *cells))
    heading = 'metric at the end'
    parts.append('## Results\n\n' + table((heading, *(run.name for run in runs)), rows))
    parts.append('## Settings that differ\n\n' + differing(runs))
    lines = [f'- **{run.name}**: {line}' for run in runs for line in _unusual(run)]
    parts.append('## What was unusual\n\n' + ('\n'.join(lines) or 'Nothing.'))
    return parts


def last(run: Run, row: Row, series: Series, width: int) -> str:
    """The end of a metric, '-' where the run has none."""
    if not series:
        return '-'
    text = f'{smoothed(series, row, width)[-1]:{row.form}}'
    return text + (interval(run, -1) if row.metric == 'held_out' else '')


def differing(runs: Sequence[Run]) -> str:
    """Table of the fields of the configs that are not the same in all runs."""
    if missing := [run.name for run in runs if not run.config]:
        return f'Not known: {", ".join(missing)} has no config.json.'
    flat = [settings.flat(run.config) for run in runs]
    names = sorted(set().union(*flat))
    rows = []
    for name in names:
        values = [repr(f[name]) if name in f else '-' for f in flat]
        if len(set(values)) > 1:
            rows.append((f'`{name}`', *(cell(v) for v in values)))
    if not rows:
        return 'None.'
    return table(('field', *(run.name for run in runs)), rows)


# ============================================================================ Markdown


def cell(text: str) -> str:
    """A text as it can stand in a table."""
    text = ' '.join(str(text).split())
    text = text if len(text) <= 120 else text[:119] + '…'
    return text.replace('\\', '\\\\').replace('|', '\\|').replace('<', '&lt;')


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


# ============================================================================ command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    parser = argparse.ArgumentParser(
        prog='python -m policyopt.report',
        description='Draw the dashboard of a run, finished or not, and write a page about it.',
    )
    parser.add_argument('workdir', type=Path, help='folder of the run')
    parser.add_argument(
        '--compare', default='', help='folders of other runs, separated by commas, to be drawn over'
    )
    parser.add_argument(
        '--out', type=Path, help='folder for figure and page (default: that of the run)'
    )
    parser.add_argument(
        '--metrics',
        default='',
        help='metrics of RL steps, separated by commas, that get a panel and a row of their own',
    )
    options = parser.parse_args(argv)
    try:
        files = write(
            options.workdir,
            compare=[Path(p) for p in options.compare.split(',') if p],
            out=options.out,
            more=[name for name in options.metrics.split(',') if name],
        )
    except (ValueError, OSError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        return 2
    if files.figure is None:
        why = "there is no RL step yet, or matplotlib is missing: pip install 'policyopt[figures]'"
        print(f'no figure: {why}')
    else:
        print(f'figure: {files.figure}')
    print(f'page: {files.page}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
