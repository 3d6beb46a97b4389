"""Traces of chosen RL steps, by jax.profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

FOLDER = 'profile'


def parse(text: str) -> tuple[int, int]:
    """First and last step of `--profile`, both traced: `3:5`, or `4` for one step.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r'(\d+)(?::(\d+))?', text.strip())
    first, last = (int(x or match[1]) for x in match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f'--profile is {text!r}; legal is FIRST:LAST, RL steps counted from 1, such as 3:5, or '
            'one step'
        )
    return first, last


class Profile:
    """Traces steps `first` to `last` into a folder, as a context manager around the RL stage.

    The first steps compile; a later one shows what a step takes.

    Args:
      first, last: RL steps, both traced.
      folder: of the traces; a trace of another run of the same steps is kept beside it.
    """

    def __init__(self, first: int, last: int, folder: Path):
        self._first, self._last, self._folder, self._open = first, last, folder, False

    @property
    def last(self) -> int:
        """The last step that is traced."""
        return self._last

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open:  # the stage ended early
            self._stop(print)

    def before(self, step: int, say: Callable[[str], Any]) -> None:
        """Begin the trace where the step is the first one, or the first of a resumed run."""
        if not self._open and self._first <= step <= self._last:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._open, self._first = True, step
        elif step > self._last and self._first:
            say(f'RL steps {self._first} to {self._last} are past: --profile traced none of them')
            self._first = 0

    def after(self, step: int, say: Callable[[str], Any]) -> None:
        """End the trace where the step was the last one, and say where it is."""
        if self._open and step == self._last:
            self._stop(say)

    def _stop(self, say: Callable[[str], Any]) -> None:
        self._open = False
        jax.profiler.stop_trace()
        traces = (self._folder / 'plugins' / 'profile').glob('*/perfetto_trace.json.gz')
        newest = max(traces, key=lambda path: path.stat().st_mtime)
        say(
            f'profile of RL steps {self._first} to {self._last}: open {newest} at '
            f'https://ui.perfetto.dev, or run `tensorboard --logdir {self._folder}` (package xprof)'
        )
        self._first = 0
