"""What a claim of the literature is here: how it is measured, what is drawn, how it is judged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from policyopt import at_k, disk

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')

Word = Literal['reproduced', 'not reproduced', 'inconclusive']
Numbers = Mapping[str, Any]  # of one seed, as JSON has them


class Verdict(NamedTuple):
    """What came out.

    Attributes:
      word: the verdict.
      effect: what `value` is, in words.
      value, interval: of the effect, over seeds; the interval covers 95 %.
      text: one paragraph.
    """

    word: Word
    effect: str
    value: float
    interval: tuple[float, float]
    text: str


class Place(NamedTuple):
    """Where one seed is measured.

    Attributes:
      seed: of everything random.
      folder: of what seeds and claims share, such as warm-started policies.
      fast: sizes of a test, at which nothing is learnt.
    """

    seed: int
    folder: Path
    fast: bool = False


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim and how it is checked.

    Attributes:
      text: the claim, in a sentence.
      source: arXiv id, or what else says so.
      published: the published numbers.
      minutes: of one seed on one core, about; policies that claims share are made once, in 1 to 3
        minutes each.
      measure: numbers of one seed.
      judge: the verdict on those of all seeds.
      draw: (matplotlib Figure, numbers of all seeds) -> None.
    """

    text: str
    source: str
    published: str
    minutes: float
    measure: Callable[[Place], Numbers]
    judge: Callable[[Sequence[Numbers]], Verdict]
    draw: Callable[[Any, Sequence[Numbers]], None]


def interval(values: Any) -> tuple[float, tuple[float, float]]:
    """Mean over seeds and its 95 % percentile-bootstrap interval; values [seeds].

    From five seeds or fewer it is too narrow: no resample leaves their range.
    """
    values = np.asarray(values, np.float64)
    low, high = np.quantile(at_k.resampled(values[:, None], 0)[:, 0], [0.025, 0.975])
    return float(values.mean()), (float(low), float(high))


def decide(low: float, high: float, needed: float) -> Word:
    """'reproduced' where the whole interval is at least `needed`, 'not ...' where all is below."""
    if low >= needed:
        return 'reproduced'
    return 'not reproduced' if high < needed else 'inconclusive'


def together(*words: Word) -> Word:
    """The verdict on a claim with several parts, all of which have to hold."""
    for word in ('not reproduced', 'inconclusive'):
        if word in words:
            return word
    return 'reproduced'


def spread(seeds: Sequence[Numbers], *names: str) -> np.ndarray:
    """The entry at `names` of each seed, stacked: [seeds,...] float64."""
    out = []
    for numbers in seeds:
        value: Any = numbers
        for name in names:
            value = value[name]
        out.append(np.asarray(value, np.float64))
    return np.stack(out)


def line(axis: Any, x: Any, values: np.ndarray, label: str, colour: str) -> None:
    """Mean over seeds, values [seeds,n], with the range of the seeds behind it."""
    axis.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
    axis.plot(x, values.mean(0), color=colour, lw=2, label=label)


def tidy(*axes: Any) -> None:
    """A grid that stays behind, and no box."""
    for axis in axes:
        axis.grid(alpha=0.25, lw=0.5)
        axis.spines[['top', 'right']].set_visible(False)


def save(path: Path, content: Any) -> None:
    """Write JSON so that it is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.whole(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + '\n')
