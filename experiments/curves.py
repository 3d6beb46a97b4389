"""What learning curves come to, and how they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.claim import COLOURS, Numbers, line, spread, tidy

DASHES = ('-', '--', '-.', ':')


def collapse(steps: Sequence[int], accuracy: Sequence[float]) -> float:
    """First step from which accuracy stays below half of its peak until then; NaN without one."""
    values = np.asarray(accuracy, np.float64)
    lost = values < np.maximum.accumulate(values) / 2
    if not lost[-1]:
        return float('nan')
    last = np.flatnonzero(~lost)
    return float(steps[last[-1] + 1])


def area(curves: Mapping[str, Any]) -> float:
    """Mean held-out accuracy after the first step, over the run."""
    return float(np.mean(curves['accuracy'][1:]))


def areas(seeds: Sequence[Numbers], arm: str) -> np.ndarray:
    """Of an arm: [seeds]."""
    return np.array([area(numbers[arm]) for numbers in seeds])


def last(seeds: Sequence[Numbers], arm: str, measurements: int = 3) -> np.ndarray:
    """Mean of an arm's last few measurements of held-out accuracy: [seeds]."""
    return spread(seeds, arm, 'accuracy')[:, -measurements:].mean(1)


def means(seeds: Sequence[Numbers], arm: str, name: str) -> np.ndarray:
    """Mean over the run of another curve: [seeds]."""
    return spread(seeds, arm, name).mean(1)


def collapses(seeds: Sequence[Numbers], arm: str) -> np.ndarray:
    """Step at which each seed of an arm collapses, NaN where it does not: [seeds]."""
    found = [numbers[arm] for numbers in seeds]
    return np.array([collapse(curves['step'], curves['accuracy']) for curves in found])


def rate(seeds: Sequence[Numbers], arm: str) -> float:
    """Share of seeds that collapse."""
    return float(np.isfinite(collapses(seeds, arm)).mean())


def how_many(seeds: Sequence[Numbers], arm: str) -> str:
    """Collapses in words: `2 of 5`."""
    return f'{np.isfinite(collapses(seeds, arm)).sum()} of {len(seeds)}'


def draw(
    axis: Any,
    seeds: Sequence[Numbers],
    arms: Mapping[str, str],
    ranges: bool = True,
) -> None:
    """Held-out accuracy of arms (name -> label), means over seeds, their range behind them."""
    for i, (arm, label) in enumerate(arms.items()):
        step, accuracy = seeds[0][arm]['step'], spread(seeds, arm, 'accuracy')
        if ranges:
            line(axis, step, accuracy, label, COLOURS[i % 6])
        else:
            axis.plot(step, accuracy.mean(0), color=COLOURS[i % 6], lw=2, label=label)
        axis.lines[-1].set_linestyle(DASHES[i % 4])
    axis.set(xlabel='RL step')
    axis.axhline(0, color='none')  # so that it is in the picture
    tidy(axis)
