"""Preferences between answers: pairs, the loss of Bradley and Terry, and how well scores agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import checks, masked
from policyopt.optimizer import OptimizerConfig
from policyopt.types import Array


@dataclasses.dataclass(frozen=True)
class PreferencesConfig:
    """How a reward model is trained: pairs of the policy's own answers, told apart by the truth.

    The truth is the task's own scorer (or that of `audited`). The model starts from the policy,
    with a fresh head.

    Attributes:
      optimizer: of the reward model.
      problems: whose answers are compared, from those to train on.
      answers: drawn to each, as the run draws.
      pairs: of a problem, at most.
      held_out: share of the problems that pairs are not trained on: for the accuracy that is
        reported, and the calibration.
      batch: pairs of a step.
      epochs: passes over the pairs. More than one tends to overfit (2203.02155).
      flip: share of the pairs to train on whose preference is turned round, as that of people who
        err.
    """

    optimizer: OptimizerConfig
    problems: int = 512
    answers: int = 8
    pairs: int = 4
    held_out: float = 0.25
    batch: int = 32
    epochs: int = 1
    flip: float = 0.0

    def __post_init__(self):
        for name, low in (('problems', 2), ('answers', 2), ('pairs', 1), ('batch', 1)):
            checks.number(f'preferences.{name}', getattr(self, name), low)
        checks.number('preferences.epochs', self.epochs, 1)
        checks.number('preferences.flip', self.flip, 0, 0.5)
        if not 0 < self.held_out < 1:
            raise ValueError(f'preferences.held_out is {self.held_out}; legal is in (0, 1)')


class Pair(NamedTuple):
    """Two answers to a problem: its number, and those of the better and the worse one."""

    problem: int
    chosen: int
    rejected: int


def bradley_terry(
    chosen: Array, rejected: Array, weights: Array | None = None
) -> tuple[Array, Array]:
    """-sum_i w_i log sigmoid(r(x_i, y+_i) - r(x_i, y-_i)): the loss, and the margins [B].

    The negative log-likelihood of the preferences where P(y+ > y-) = sigmoid(r+ - r-) (1706.03741,
    2203.02155). A constant added to all scores changes nothing, so that scores have no zero of
    their own.

    Args:
      chosen, rejected: [B] scores, floating.
      weights: [B]; None for 1/B each. A pair of weight 0 matters to nothing, NaN included.
    """
    chex.assert_rank([chosen, rejected], 1)
    chex.assert_equal_shape([chosen, rejected])
    if weights is None:
        weights = jnp.full(chosen.shape, 1 / len(chosen), chosen.dtype)
    margin = masked.select(weights, chosen) - masked.select(weights, rejected)
    return jnp.sum(weights * jax.nn.softplus(-margin)), margin


def make_pairs(
    values: np.ndarray, texts: Sequence[Sequence[Any]], limit: int, seed: int
) -> list[Pair]:
    """Pairs of answers of different value to one problem, at most `limit` a problem, by chance.

    Args:
      values: [P,n] true rewards; NaN takes an answer out.
      texts: P lists of n answers, in any form. Of equal ones, the first counts.
      limit: of a problem.
      seed: of the choice among more.
    """
    rng, found = np.random.default_rng(seed), []
    for problem, row in enumerate(values):
        first = {}
        for answer, text in enumerate(texts[problem]):
            first.setdefault(tuple(text), answer)
        kept = [i for i in first.values() if not np.isnan(row[i])]
        pairs = [Pair(problem, i, j) for i in kept for j in kept if row[i] > row[j]]
        chosen = rng.permutation(len(pairs))[:limit]
        found += [pairs[i] for i in sorted(chosen)]
    return found


def flipped(pairs: Sequence[Pair], share: float, seed: int) -> list[Pair]:
    """The pairs, of which this share, taken by chance, has chosen and rejected exchanged."""
    wrong = set(np.random.default_rng(seed).permutation(len(pairs))[: round(share * len(pairs))])
    return [Pair(p.problem, p.rejected, p.chosen) if i in wrong else p for i, p in enumerate(pairs)]


class Agreement(NamedTuple):
    """How well scores agree with preferences.

    Attributes:
      loss: of Bradley and Terry, in nats a pair.
      accuracy: share of pairs whose chosen answer scores higher; equal scores count half.
      low, high: 95 % interval of the accuracy, by the bootstrap over problems: pairs of one
        problem are not independent.
      pairs, problems: how many there are.
    """

    loss: float
    accuracy: float
    low: float
    high: float
    pairs: int
    problems: int

    def __str__(self) -> str:
        return (
            f'{self.accuracy:.1%} ({self.low:.1%} to {self.high:.1%}) of {self.pairs} pairs of '
            f'{self.problems} problems, loss {self.loss:.3f}'
        )


def agreement(
    pairs: Sequence[Pair],
    scores: Mapping[tuple[int, int], float],
    seed: int = 0,
    resamples: int = 2000,
) -> Agreement:
    """How well scores of answers, by (problem, answer), agree with pairs.

    Raises ValueError without any pair.
    """
    if not pairs:
        raise ValueError('there is no pair to compare scores with')
    margins = np.array([scores[p.problem, p.chosen] - scores[p.problem, p.rejected] for p in pairs])
    right = np.where(margins == 0, 0.5, margins > 0)
    _, at = np.unique([p.problem for p in pairs], return_inverse=True)
    hits, counts = np.bincount(at, weights=right), np.bincount(at)
    draws = np.random.default_rng(seed).integers(len(hits), size=(resamples, len(hits)))
    shares = hits[draws].sum(1) / counts[draws].sum(1)
    low, high = np.quantile(shares, [0.025, 0.975])
    loss = float(np.mean(np.logaddexp(0, -margins)))
    return Agreement(loss, float(right.mean()), float(low), float(high), len(pairs), len(hits))
