"""What a run says about its settings: clip range, group size, and signs that it goes wrong.

    python -m policyopt.calibrate runs/quickstart
    python -m policyopt.calibrate runs/a/batches/batch_000040.npz --figures=figures

Of a run, finished or not, the newest saved batch gives the clip range and the group size, its
records the signs; the figures go into its folder. Of a batch alone there are no signs.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policyopt import algorithms, runs, signs
from policyopt.batches import BatchError, find_batch, load_batch, solve_rates
from policyopt.calibration import Calibration, check_share, epsilon, group_size
from policyopt.runs import Run
from policyopt.workdir import RECORDS

FIGURES = 'calibration'  # folder in that of the run
RANGE = 'clip_range.png'
GRID = np.geomspace(1e-6, 10, 141)  # eps of the drawn curves, 20 a decade
SHOWN = (1e-5, 1e-4, 3e-4, 4e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.28, 1.0)


class Source(NamedTuple):
    """What a path names.

    Attributes:
      run: None for a batch alone.
      path: of the batch; None for a run that has saved none yet.
    """

    run: Run | None
    path: Path | None


def find(path: Path) -> Source:
    """The run in a folder with its newest batch, or a batch, or the newest one of a folder of them.

    Raises BatchError or ValueError where there is none.
    """
    run = runs.read(path) if (path / RECORDS).is_file() else None
    try:
        return Source(run, find_batch(path))
    except BatchError:
        if run is None:
            raise
        return Source(run, None)


# ---------------------------------------------------------------- figures


def draw(calibrations: Sequence[Calibration], path: str | os.PathLike) -> None:
    """Save a figure of clip rate against eps, one panel a calibration; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(calibrations), 3.6), layout='constrained')
    axes = figure.subplots(1, len(calibrations), squeeze=False, sharey=True)[0]
    for axis, found in zip(axes, calibrations, strict=True):
        for name, side, colour in (('low', found.low, 'C0'), ('high', found.high, 'C1')):
            axis.plot(GRID, side.rate(GRID), colour, label=f'{name}, per response')
            axis.plot(GRID, side.rate(GRID, 'token'), colour, ls='--', label=f'{name}, per token')
            if np.isfinite(side.eps):
                axis.axvline(side.eps, color=colour, lw=0.8, label=f'eps_{name} {side.eps:.2g}')
        axis.axhline(found.q, color='grey', lw=0.8)
        axis.set(xscale='log', xlabel='eps', ylabel='share clipped', title=f'{found.level} ratio')
        axis.legend(fontsize='small')
    figure.savefig(path)


def draw_all(
    folder: Path,
    calibrations: Sequence[Calibration],
    found: Sequence[tuple[signs.Sign, signs.Found]],
    run: Run | None,
) -> set[str]:
    """Draw clip rates and every sign that the run has numbers of; names of the files.

    Raises ImportError without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = set()
    if calibrations:
        draw(calibrations, folder / RANGE)
        names.add(RANGE)
    for sign, verdict in found:
        assert run is not None
        if signs.draw(folder / f'{sign.name}.png', sign, verdict, run):
            names.add(f'{sign.name}.png')
    return names


# ---------------------------------------------------------------- text


class Page:
    """Text and tables on standard output."""

    def __init__(self):
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line."""
        self._console.print(text, style=style)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; '-' stands for what is NaN."""
        from rich.table import Table

        table = Table(title=title, title_justify='left')
        for column in columns:
            table.add_column(column, justify='right')
        for row in rows:
            table.add_row(*('-' if 'nan' in cell else cell for cell in row))
        self._console.print(table)


def say_ranges(page: Page, found: Sequence[Calibration], own: Sequence[float]) -> None:
    """Suggested clip ranges, and shares clipped at others, the run's own ones among them."""
    rows = []
    for each in found:
        for name, side in (('low', each.low), ('high', each.high)):
            interval = '{:.3g} .. {:.3g}'.format(*side.interval)
            numbers = (str(side.responses), f'{side.eps:.3g}', interval, f'{side.quantile:.3g}')
            rows.append((each.level, f'eps_{name}', *numbers))
    columns = ('ratio', 'side', 'responses', 'eps', '95% interval', 'quantile')
    page.table(f'Clip range that clips {found[0].q:.0%} of each side', columns, rows)
    shown = sorted({*SHOWN, *own})
    for each in found:
        curves = [side.rate(shown, per) for per in ('response', 'token') for side in each.sides]
        rows = [
            (f'{eps:g}{" *" if eps in own else ""}', *(f'{curve[i]:.1%}' for curve in curves))
            for i, eps in enumerate(shown)
        ]
        columns = ('eps', 'low/response', 'high/response', 'low/token', 'high/token')
        page.table(f'Share clipped against eps, {each.level} ratio', columns, rows)
    if own:
        page.say('* of the algorithm, for the ratio that it clips')


def own_range(run: Run | None) -> list[float]:
    """Bounds of the clip of a run's algorithm, ascending; [] where none is known.

    They are its arguments `eps`, `low` and `high`, given or by default, whichever ratio it clips.
    """
    path = '' if run is None else run.config.get('algorithm') or ''
    try:
        arguments = inspect.signature(algorithms.factory(path)).parameters if path else {}
    except ValueError:  # an algorithm of the user's that cannot be imported from here
        arguments = {}
    named = {name: each.default for name, each in arguments.items()}
    named |= {} if run is None else run.config.get('algorithm_kw') or {}
    found = {named[name] for name in ('eps', 'low', 'high') if name in named}
    return sorted(float(x) for x in found if isinstance(x, int | float))


def group_size_line(batch: Mapping[str, Any], degenerate: float, own: int | None = None) -> str:
    """The group size for a batch's solve rates, in words, beside that of the run."""
    try:
        rates = solve_rates(batch)
    except BatchError as error:
        return f'not measured, {error}'
    found = group_size(rates, degenerate)
    what = f'at most {degenerate:.3g} of the groups all right or all wrong'
    if found.size is None:
        text = (
            f'none up to {found.curve.size} leaves {what}: '
            f'{found.floor:.3g} of the prompts were solved always or never'
        )
    else:
        share = found.curve[found.size - 1]
        text = f'{found.size} is the smallest with {what} ({share:.3g} expected)'
    if own is not None and own <= found.curve.size:
        text += f"; the run's {own} leaves {found.curve[own - 1]:.3g}"
    return text


def sign_lines(
    found: Sequence[tuple[signs.Sign, signs.Found]], folder: Path | None, drawn: set[str]
) -> Iterator[tuple[str, str | None]]:
    """Lines of all signs, warnings first, with styles."""
    order = (signs.WARNING, signs.FINE, signs.UNKNOWN)
    for sign, each in sorted(found, key=lambda pair: order.index(pair[1].verdict)):
        style = 'yellow' if each.verdict == signs.WARNING else None
        yield f'{each.verdict}: {sign.title}: {each.text}', style
        if each.verdict != signs.UNKNOWN:
            yield f'  warns: {sign.bound} ({sign.source})', None
        if each.verdict == signs.WARNING:
            yield f'  try: {sign.advice}', None
        if folder is not None and f'{sign.name}.png' in drawn:
            yield f'  figure: {folder / sign.name}.png', None


# ---------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    options = parser().parse_args(argv)
    try:
        check_share('degenerate', options.degenerate)
        check_share('quantile', options.quantile)
        run, path = find(options.path)
        batch = None if path is None else load_batch(path)
        ranges = []
        if batch is not None:
            ranges = [
                epsilon(batch, level, quantile=options.quantile, seed=options.seed)
                for level in ('sequence', 'token')
            ]
        found = [] if run is None else signs.judge(run, batch)
        folder = options.figures or (None if run is None else run.folder / FIGURES)
        drawn: set[str] = set()
        if folder is not None:
            drawn = draw_all(folder, ranges, found, run)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except ImportError:
        print("error: figures need matplotlib: pip install 'policyopt[figures]'", file=sys.stderr)
        return 2
    page = Page()
    if batch is None:
        page.say(f'{options.path}: no batch saved yet (a run saves one at its end): no clip range')
    else:
        page.say(f'{path}: {ranges[0].rows} rows used')
        say_ranges(page, ranges, own_range(run))
        if RANGE in drawn:
            page.say(f'figure: {folder}/{RANGE}')
        size = {} if run is None else run.config.get('rollout') or {}
        line = group_size_line(batch, options.degenerate, size.get('group_size'))
        if run is not None and run.config.get('dynamic_sampling'):
            line += '; dynamic_sampling had dropped groups of equal rewards, so it would be more'
        page.say(f'Group size: {line}')
    for each in ranges:
        for warning in each.warnings:
            page.say(f'warning: {each.level}: {warning}', 'yellow')
    if run is not None:
        page.say(f'\nSigns after {run.steps} RL steps (the mean of the last tenth)')
        for line, style in sign_lines(found, folder, drawn):
            page.say(line, style)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog='python -m policyopt.calibrate',
        description='Suggest clip ranges and a group size from a saved batch of a run, and name '
        'signs that the run goes wrong: length explosion, entropy collapse, clip share, effective '
        'sample size, expert drift, replay share.',
    )
    p.add_argument(
        'path',
        type=Path,
        help='folder of a run, finished or not; or a .npz batch; or a folder of them: the newest '
        'batch_*.npz in it or in its batches/',
    )
    p.add_argument(
        '--quantile', type=float, default=0.1, help='share of each side to clip (default: .1)'
    )
    p.add_argument('--seed', type=int, default=0, help='of the bootstrap (default: 0)')
    p.add_argument(
        '--figures',
        type=Path,
        help=f'folder for a figure of the clip rates and one of each sign (default: {FIGURES}/ in '
        "the run's folder, none for a batch)",
    )
    p.add_argument(
        '--degenerate',
        type=float,
        default=0.1,
        help='largest expected share of groups that are all right or all wrong (default: .1)',
    )
    return p


if __name__ == '__main__':
    sys.exit(main())
