"""What a run says of itself: numbers from metrics, a JSONL file, a live display, curves."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich import console as rich_console
from rich import progress as rich_progress
from rich import table as rich_table

from policyopt.types import Metrics, add_metrics

# What the live display shows: name of the metric, label, format.
SHOWN = (
    ('loss', 'loss', '.3f'),
    ('reward', 'reward', '.3f'),
    ('accuracy', 'accuracy', '.1%'),
    ('held_out', 'held-out', '.1%'),
    ('length', 'length', '.1f'),
    ('policy/frozen', 'frozen', '.1%'),
    ('kl_behavior/k3', 'KL', '.2g'),
    ('entropy', 'entropy', '.2f'),
    ('tokens_per_second', 'tokens/s', ',.0f'),
    ('rollout/not_sampled', 'not sampled', '.1%'),
)
USUAL = {'rollout/not_sampled': 0.0}  # not worth a look


@jax.jit
def _scalars(parts: Sequence[Metrics]) -> dict[str, Any]:
    numbers = {}
    for name, metric in functools.reduce(add_metrics, parts).items():
        if hasattr(metric, 'quantile'):
            for q in (0.01, 0.5, 0.99):
                numbers[f'{name}/p{round(100 * q)}'] = metric.quantile(q)
        else:
            numbers[name] = metric.value
    return numbers


def numbers(*parts: Metrics) -> dict[str, float]:
    """The sum of metrics as plain numbers: values; of a histogram its 1, 50 and 99 % quantiles."""
    return {name: float(x) for name, x in jax.device_get(_scalars(parts)).items()}


def append(path: Path, stage: str, step: int, values: Mapping[str, Any]) -> None:
    """Append one record to a JSONL file; NaN and infinity, which JSON lacks, become null."""
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }
    with open(path, 'a', encoding='utf-8') as file:
        file.write(json.dumps({'stage': stage, 'step': step, **clean}) + '\n')


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file."""
    with open(path, encoding='utf-8') as file:
        return [json.loads(line) for line in file]


class Compiles:
    """Counts the programs that XLA compiles while it is open, as a context manager.

    A step that compiles again after the first ones changed a shape, and pays seconds for it.
    """

    def __init__(self):
        self._count = 0

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        self._count += event == '/jax/core/compile/backend_compile_duration'

    def take(self) -> int:
        """Programs compiled since the last call."""
        count, self._count = self._count, 0
        return count

    def __enter__(self) -> Compiles:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *error: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)


class Display:
    """Progress of one stage: a live line in a terminal, a plain line now and then elsewhere.

    Use it as a context manager and call `update` after each step.
    """

    def __init__(self, title: str, total: int, console: rich_console.Console | None = None):
        self._title, self._total = title, total
        self._console = console or rich_console.Console()
        self._every = max(total // 20, 1)
        self._first: tuple[int, float] | None = None  # the first step compiles: it says nothing
        self._live: rich_progress.Progress | None = None
        if self._console.is_terminal:
            whole = rich_table.Column(no_wrap=True)
            self._live = rich_progress.Progress(
                rich_progress.TextColumn('{task.description}', table_column=whole),
                rich_progress.MofNCompleteColumn(table_column=whole.copy()),
                rich_progress.TimeRemainingColumn(table_column=whole.copy()),
                # Last, since a narrow terminal cuts it off.
                rich_progress.TextColumn(
                    '{task.fields[shown]}',
                    table_column=rich_table.Column(no_wrap=True, overflow='ellipsis', ratio=1),
                ),
                console=self._console,
                expand=True,
            )
            self._task = self._live.add_task(title, total=total, shown='')

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a step (counted from 1) that `SHOWN` names."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        shown = '  '.join(
            f'{label} {values[name]:{form}}'
            for name, label, form in SHOWN
            if name in values and values[name] != USUAL.get(name)
        )
        if self._live:
            self._live.update(self._task, completed=step, shown=shown)
        elif step == 1 or step % self._every == 0 or step == self._total:
            print(f'{self._title} {step}/{self._total}  {shown}{self._left(step, now)}', flush=True)

    def _left(self, step: int, now: float) -> str:
        first, then = self._first or (step, now)
        if step == first:
            return ''
        left = round((now - then) / (step - first) * (self._total - step))
        return f'  {left // 60}:{left % 60:02d} left'


def draw_curves(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> bool:
    """Draw accuracy, KL, frozen share and entropy of the RL steps into a PNG file.

    Returns False, and draws nothing, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state, no display
    except ModuleNotFoundError:
        return False
    steps = [r for r in records if r['stage'] == 'rl']
    tests = [r for r in records if r['stage'] == 'evaluation']
    figure = Figure(figsize=(9, 6), layout='constrained')
    figure.suptitle(title)
    panels = figure.subplots(2, 2)
    chosen = (
        ('accuracy', 'accuracy'),
        ('kl_behavior/k3', 'KL to the sampler (nats per token)'),
        ('policy/frozen', 'share of tokens without gradient'),
        ('entropy', 'entropy (nats per token)'),
    )
    for panel, (name, label) in zip(panels.flat, chosen, strict=True):
        points = [(r['step'], r[name]) for r in steps if r.get(name) is not None]
        panel.plot(
            *zip(*points, strict=True) if points else ([], []), color='0.6', label='rollouts'
        )
        panel.set(xlabel='RL step', ylabel=label)
    if tests:
        value = [r['held_out'] for r in tests]
        spread = [
            [v - r['low'] for v, r in zip(value, tests, strict=True)],
            [r['high'] - v for v, r in zip(value, tests, strict=True)],
        ]
        panels.flat[0].errorbar(
            [r['step'] for r in tests], value, spread, fmt='o-', capsize=3, label='held-out'
        )
    panels.flat[0].legend()
    figure.savefig(path, dpi=120)
    return True
