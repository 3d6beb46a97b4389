"""What a run says of itself: numbers from metrics, a JSONL file, times, a live display."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import console as rich_console
from rich import progress as rich_progress
from rich import table as rich_table

from policyopt import hosts
from policyopt.types import Metrics, add_metrics

# What the live display shows: name of the metric, label, format.
SHOWN = (
    ('loss', 'loss', '.3f'),
    ('reward', 'reward', '.3f'),
    ('accuracy', 'sampled accuracy', '.1%'),
    ('held_out', 'held-out accuracy', '.1%'),
    ('length', 'length', '.1f'),
    ('policy/frozen', 'frozen', '.1%'),
    ('kl_behavior/k3', 'KL', '.2g'),
    ('entropy', 'entropy', '.2f'),
    ('tokens_per_second', 'tokens/s', ',.0f'),
    ('staleness', 'staleness', '.2f'),
    ('async/idle', 'idle slots', '.0%'),
    ('async/dropped', 'dropped', '.0%'),
    ('rollout/kept', 'kept', '.0%'),
    ('rollout/not_sampled', 'not sampled', '.1%'),
    ('rollout/not_judged', 'without reward', '.1%'),
    ('skipped', 'skipped updates', '.0%'),
)
USUAL = {  # not worth a look
    'async/dropped': 0.0,
    'rollout/kept': 1.0,
    'rollout/not_sampled': 0.0,
    'rollout/not_judged': 0.0,
    'skipped': 0.0,
}
COMPILING = 'compiling ...'


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
    """The sum of metrics as plain numbers: values; of a histogram its 1, 50 and 99 % quantiles.

    The elements of an array are `NAME/0`, `NAME/1`, ...
    """
    found: dict[str, float] = {}
    for name, x in hosts.fetch(_scalars(parts)).items():
        if np.ndim(x):
            found |= {f'{name}/{i}': float(element) for i, element in enumerate(x)}
        else:
            found[name] = float(x)
    return found


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


def change(gain: float) -> str:
    """A change of a share in words: `a gain of 3.5 points`."""
    points = round(100 * abs(gain), 1)
    if not points:
        return 'no change'
    return f'a {"gain" if gain > 0 else "loss"} of {points:.1f} points'


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


class Stopwatch:
    """Seconds by name, in `seconds`: `with watch('sample'): ...` adds what the block took."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def when_ready(arrays: Any) -> concurrent.futures.Future[float]:
    """The time.monotonic() at which arrays that are being computed are there.

    A thread waits for them, so that whoever dispatched them need not.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(lambda: (jax.block_until_ready(arrays), time.monotonic())[1])
    pool.shutdown(wait=False)
    return future


class Display:
    """Progress of one stage: a live line in a terminal, a plain line now and then elsewhere.

    Use it as a context manager and call `update` after each step.

    Args:
      title: of the stage.
      total: its last step.
      start: steps done already, where a run goes on.
      at_most: whether the stage may end before its last step.
      console: where to show it; the terminal by default.
    """

    def __init__(
        self,
        title: str,
        total: int,
        console: rich_console.Console | None = None,
        *,
        start: int = 0,
        at_most: bool = False,
    ):
        self._title, self._total, self._start, self._at_most = title, total, start, at_most
        self._console = console or rich_console.Console()
        self._every = max(total // 20, 1)
        self._first: tuple[int, float] | None = None  # the first step compiles: it says nothing
        self._said: set[str] = set()
        self._live: rich_progress.Progress | None = None
        if self._console.is_terminal:
            whole = rich_table.Column(no_wrap=True)
            self._live = rich_progress.Progress(
                rich_progress.TextColumn('{task.description}', table_column=whole),
                rich_progress.MofNCompleteColumn(table_column=whole.copy()),
                rich_progress.TextColumn('{task.fields[left]}', table_column=whole.copy()),
                # Last, since a narrow terminal cuts it off.
                rich_progress.TextColumn(
                    '{task.fields[shown]}',
                    table_column=rich_table.Column(no_wrap=True, overflow='ellipsis', ratio=1),
                ),
                console=self._console,
                expand=True,
            )
            self._task = self._live.add_task(
                title, total=total, completed=start, shown=COMPILING, left=''
            )

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        elif self._start < self._total:
            print(f'{self._title} {self._start}/{self._total}  {COMPILING}', flush=True)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a step (counted from 1) that `SHOWN` names."""
        now = time.monotonic()
        first = self._first is None
        self._first = self._first or (step, now)
        shown = '  '.join(
            f'{label} {values[name]:{form}}'
            for name, label, form in SHOWN
            if name in values and values[name] != USUAL.get(name)
        )
        left = self._left(step, now)
        if self._live:
            self._live.update(self._task, completed=step, shown=shown, left=left)
        elif first or step % self._every == 0 or step == self._total:
            tail = f'  {left}' if left else ''
            print(f'{self._title} {step}/{self._total}  {shown}{tail}', flush=True)

    def note(self, text: str) -> None:
        """Print a line above the progress, once: the same text is not repeated."""
        if text in self._said:
            return
        self._said.add(text)
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _left(self, step: int, now: float) -> str:
        first, then = self._first or (step, now)
        if step == first:
            return ''
        left = round((now - then) / (step - first) * (self._total - step))
        return f'{"at most " if self._at_most else ""}{left // 60}:{left % 60:02d} left'
