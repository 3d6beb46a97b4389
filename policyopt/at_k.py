"""Several answers to each problem, summed up: pass@k, majority votes, intervals."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 4000  # of the bootstrap: the ends of a 95 % interval move by a few hundredths of it


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f'k is {k}; legal is 1 to the {n} answers there are to a problem')


def pass_at_k(correct: Any, n: int, k: int) -> np.ndarray:
    """Probability that one of k answers, drawn from n without replacement, is right.

    `1 - C(n-c, k) / C(n, k)` (arXiv:2107.03374), which is unbiased for k fresh answers; computed as
    `1 - prod_{i=n-c+1..n} (1 - k/i)` in logarithms, so that nothing overflows or cancels.

    Args:
      correct: [P] int, right answers of n to each problem.
      n: answers to each problem.
      k: 1 to n.

    Returns [P] float64. Raises ValueError for another k, or counts outside 0 to n.
    """
    correct = np.asarray(correct)
    _check_k(k, n)
    if np.any((correct < 0) | (correct > n)):
        raise ValueError(f'correct has {correct.min()} to {correct.max()}; legal is 0 to {n}')
    logs = np.log1p(-k / np.arange(n, k, -1))  # with more than n - k right, no draw misses all
    table = np.full(n + 1, 1.0)
    table[: n - k + 1] = -np.expm1(np.concatenate([[0.0], np.cumsum(logs)]))
    return table[correct]


def majority_at_k(sizes: Sequence[int], right: Sequence[bool], k: int) -> float:
    """Probability that a vote among k answers, drawn without replacement, elects a right one.

    Answers of a class are equal to each other. The largest class among the k wins; tied ones get
    equal shares. The value is exact, over all subsets, not sampled.

    Args:
      sizes: answers of each class; n is their sum.
      right: whether each class is right.
      k: 1 to n.

    Raises ValueError for another k.
    """
    _check_k(k, sum(sizes))
    key = [tuple(sorted(s for s, r in zip(sizes, right, strict=True) if r == x)) for x in (1, 0)]
    return _majority(*key, k)


@functools.lru_cache(maxsize=4096)
def _majority(right: tuple[int, ...], wrong: tuple[int, ...], k: int) -> float:
    """Sum over right classes and their counts a: P(a of it, none above a, t others at a) / (t+1).

    Counts of a subset are independent binomials, given that they sum to k: every number below is a
    probability, whatever n is.
    """
    n = sum(right) + sum(wrong)
    p = (k + 0.5) / (n + 1)
    total = 0.0
    for i, own in enumerate(right):
        others = right[:i] + right[i + 1 :] + wrong
        for a in range(-(-k // (len(others) + 1)), min(own, k) + 1):
            total += _binomial(own, p)[a] * _others(others, a, k - a, p)
    return float(total / _binomial(n, p)[k])


def _others(sizes: Sequence[int], a: int, rest: int, p: float) -> float:
    """Sum over t of P(the classes have `rest` in all, none above a, t of them a) / (t + 1)."""
    free = _binomial(sum(s for s in sizes if s < a), p)[: rest + 1]  # these can't reach a
    ties = rest // a
    state = np.zeros((ties + 1, rest + 1))  # by classes at a, and by answers
    state[0, : len(free)] = free
    for size in (s for s in sizes if s >= a):
        chance = _binomial(size, p)
        new = np.zeros_like(state)
        for count in range(min(a - 1, rest) + 1):
            new[:, count:] += chance[count] * state[:, : rest + 1 - count]
        if a <= rest:
            new[1:, a:] += chance[a] * state[:-1, : rest + 1 - a]
        state = new
    return float(np.sum(state[:, rest] / np.arange(1, ties + 2)))


@functools.lru_cache(maxsize=1024)
def _binomial(n: int, p: float) -> np.ndarray:
    """Probabilities of 0 to n successes."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    counts = np.arange(n + 1)
    choose = factorials[n] - factorials - factorials[::-1]
    return np.exp(choose + counts * math.log(p) + (n - counts) * math.log1p(-p))


def wilson(correct: float, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a proportion, at z standard normal deviates; (0, 1) for total 0."""
    if total == 0:
        return 0.0, 1.0
    share = correct / total
    centre = share + z**2 / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    scale = 1 + z**2 / total
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def intervals(values: Any, seed: int, single: bool) -> np.ndarray:
    """95 % intervals of means over problems, for values in [0, 1]: [P,M] to [2,M], low and high.

    With a single answer to each problem, Wilson's. Else the percentile bootstrap over problems,
    which are what was drawn at random: answers to one problem are not independent. Where all
    problems have the same value, resamples have it too, and Wilson's for so many problems stands
    in. Columns share their resamples.
    """
    values = np.asarray(values, np.float64)
    problems = len(values)
    scored = np.array([wilson(column.sum(), problems) for column in values.T]).T
    if single or problems == 0:
        return scored
    found = np.quantile(resampled(values, seed), [0.025, 0.975], axis=0)
    return np.where(np.ptp(values, axis=0) == 0, scored, found)


def resampled(values: np.ndarray, seed: int, count: int = RESAMPLES) -> np.ndarray:
    """Means [count,M] of values [P,M], each over P problems drawn with replacement."""
    rng, problems = np.random.default_rng(seed), len(values)
    chunk = max(1, min(count, 2**22 // problems))
    means = []
    for start in range(0, count, chunk):
        size = (min(chunk, count - start), problems)
        drawn = rng.integers(problems, size=size)
        flat = (drawn + problems * np.arange(size[0])[:, None]).ravel()
        weights = np.bincount(flat, minlength=size[0] * problems).reshape(size)
        means.append(weights @ values / problems)
    return np.concatenate(means)


# ============================================================================ summaries


class Figure(NamedTuple):
    """A mean over problems and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f'{self.value:.1%} ({self.low:.1%} to {self.high:.1%})'


def summary(
    correct: Any, votes: Sequence[Sequence[int]], ks: Sequence[int], seed: int
) -> dict[str, Figure]:
    """avg@n, pass@k and, for k above 1, maj@k, of [P,n] right answers and their vote classes.

    With n = 1 the accuracy, avg@1, is all there is to say.
    """
    correct = np.asarray(correct, bool)
    n = correct.shape[1]
    columns = {f'avg@{n}': correct.mean(axis=1)}
    if n > 1:
        columns |= {f'pass@{k}': pass_at_k(correct.sum(axis=1), n, k) for k in ks}
        columns |= {f'maj@{k}': _votes(correct, votes, k) for k in ks if k > 1}
    values = np.stack(list(columns.values()), axis=1)
    low, high = intervals(values, seed, single=n == 1)
    means = values.mean(axis=0) if len(values) else np.zeros(values.shape[1])
    found = zip(columns, means, low, high, strict=True)
    return {name: Figure(*map(float, numbers)) for name, *numbers in found}


def _votes(correct: np.ndarray, votes: Sequence[Sequence[int]], k: int) -> np.ndarray:
    found = []
    for marks, numbers in zip(correct, votes, strict=True):
        ids, sizes = np.unique(numbers, return_counts=True)
        right = [bool(marks[list(numbers).index(i)]) for i in ids]
        found.append(majority_at_k(sizes.tolist(), right, k))
    return np.array(found)


def curve_ks(n: int, count: int = 24) -> list[int]:
    """Some k from 1 to n, evenly on a logarithmic scale."""
    return sorted({round(k) for k in np.geomspace(1, n, count)})


def draw(path: Path, correct: Any, found: Mapping[str, Figure], seed: int, title: str) -> bool:
    """Draw pass@k with its band, and maj@k where `found` has it, against k into a PNG file.

    Returns False, and draws nothing, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Canvas  # without pyplot: no state, no display
    except ModuleNotFoundError:
        return False
    correct = np.asarray(correct, bool)
    n = correct.shape[1]
    ks = curve_ks(n)
    values = np.stack([pass_at_k(correct.sum(axis=1), n, k) for k in ks], axis=1)
    low, high = intervals(values, seed, single=n == 1)
    canvas = Canvas(figsize=(5, 3.5), layout='constrained')
    axis = canvas.subplots()
    axis.fill_between(ks, low, high, alpha=0.2)
    axis.plot(ks, values.mean(axis=0), 'o-', markersize=3, label='pass@k')
    voted = {int(name[4:]): each for name, each in found.items() if name.startswith('maj@')}
    if voted:
        spread = np.array([[e.value - e.low, e.high - e.value] for e in voted.values()]).T
        means = [each.value for each in voted.values()]
        axis.errorbar(list(voted), means, spread, fmt='s--', markersize=4, capsize=3, label='maj@k')
    axis.set_xscale('log', base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f'{x:g}')
    axis.set(xlabel='answers to a problem (k)', ylabel='share of problems', title=title)
    axis.legend()
    canvas.savefig(path, dpi=120)
    return True
