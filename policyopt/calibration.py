"""Choose the clip range and the group size from a saved batch.

A clip range only means something against the spread of the ratio it clips: published GSPO ranges
(3e-4, 4e-4) come from answers of thousands of tokens and clip almost everything on short ones. From
the ratios of responses, s_i = exp(mean_t l_t), or of tokens, w_t = exp(l_t), and their advantages:

    eps_high(q) = quantile_{1-q}{u - 1 | A > 0}      eps_low(q) = quantile_{1-q}{1 - u | A < 0}

is the range at which the share q of each side is clipped. Everything here is numpy in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from policyopt import checks
from policyopt.batches import BatchError, check_batch, log_ratio, per_token

FLOOR = 1e-6  # smallest eps suggested; float32 ratios resolve little below
STILL = 2e-5  # |log-ratio| that sampler and scorer differ by at the same weights, in float32
TAIL = 5  # fewest responses expected beyond a quantile that is worth using


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of the clip range: what has A > 0 (high) or A < 0 (low).

    Attributes:
      eps: suggestion, the quantile but at least 1e-6; NaN where the side has no response.
      quantile: 1-q quantile of the excess.
      interval: bootstrap interval of eps over responses.
      responses: how many responses the side has.
      excess: [n] u - 1 (high) or 1 - u (low) of each ratio u, ascending.
      per_response: [n] weight of each ratio such that every response weighs 1.
      per_token: [n] weight of each ratio, the tokens it stands for.
    """

    eps: float
    quantile: float
    interval: tuple[float, float]
    responses: int
    excess: np.ndarray
    per_response: np.ndarray
    per_token: np.ndarray

    def rate(self, eps: Any, per: str = 'response') -> np.ndarray:
        """Share clipped at eps (scalar or array), exactly; NaN where the side is empty.

        Args:
          eps: clip range of this side.
          per: 'response', the mean over responses of the share of their ratios that is clipped, or
            'token', the share of tokens whose ratio is clipped.
        """
        weights = {'response': self.per_response, 'token': self.per_token}[per]
        if not weights.size:
            return np.full(np.shape(eps), np.nan)
        ends = np.concatenate([[0.0], np.cumsum(weights)])
        return (ends[-1] - ends[np.searchsorted(self.excess, eps, side='right')]) / ends[-1]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Clip range of one kind of ratio.

    Attributes:
      level: 'sequence' (s_i) or 'token' (w_t).
      q: share of each side that the suggestion clips.
      low, high: sides A < 0 and A > 0.
      rows: rows used: those of minibatches 2..N, or all where no index was saved.
      warnings: what makes the numbers doubtful, one sentence each.
    """

    level: str
    q: float
    low: Side
    high: Side
    rows: int
    warnings: tuple[str, ...]

    @property
    def sides(self) -> tuple[Side, Side]:
        """(low, high)."""
        return self.low, self.high


def epsilon(
    batch: Mapping[str, Any],
    level: str = 'sequence',
    *,
    quantile: float = 0.1,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Calibration:
    """Clip range at which a share of each side would be clipped, with rate-against-eps curves.

    Uses active ratios (A != 0) of minibatches 2..N: in the first the ratio is 1. At sequence level
    a row's advantage is its mean over the mask. The interval resamples responses, so that tokens of
    one response stay together. It can't know whether the batch is typical: calibrate on a few.

    Args:
      batch: fields of `save_batch`, as from `load_batch`.
      level: 'sequence' for s_i = exp(mean_t l_t), 'token' for w_t.
      quantile: q, the share to clip; in (0, 1).
      resamples: bootstrap resamples.
      confidence: coverage of the interval.
      seed: of the bootstrap.

    Raises:
      BatchError: the batch is unusable, or has only first minibatches.
      ValueError: level or a number is not legal.
    """
    if level not in ('sequence', 'token'):
        raise ValueError(f'level={level!r}.{checks.nearest(level, ("sequence", "token"))}')
    check_share('quantile', quantile)
    check_share('confidence', confidence)
    if resamples < 1:
        raise ValueError(f'resamples={resamples!r}, legal is 1 or more')
    batch, warnings = check_batch(batch), []
    mask = batch['mask'] != 0
    used = mask.any(-1)
    if (index := batch.get('minibatch')) is None:
        warnings.append('no `minibatch` index: first minibatches, of ratio 1, pull eps to 0')
    else:
        used &= index >= 2
        if not used.any():
            raise BatchError('every row is of minibatch 1, where ratios are 1: use 2 or more')
    ratios, advantages = log_ratio(batch)[used], per_token(batch['advantages'], mask)[used]
    row, tokens, excess, side = _units(ratios, advantages, mask[used], level)
    if level == 'sequence' and (mixed := _mixed_rows(advantages, mask[used])):
        warnings.append(f'advantages vary within {mixed} rows: their means are used')
    still = not np.abs(ratios).max(initial=0) > STILL
    if still:
        warnings.append(f'nothing moved: no |log-ratio| above {STILL:g}, the float32 rounding')

    sides = {}
    for name, sign in (('low', -1), ('high', 1)):
        on = side == sign
        rng = np.random.default_rng([seed, sign + 1])
        options = (quantile, resamples, confidence, rng)
        sides[name] = found = _side(sign * excess[on], row[on], tokens[on], *options)
        warnings += _doubts(found, name, 'A > 0' if sign > 0 else 'A < 0', quantile, still)
    return Calibration(
        level=level, q=quantile, rows=int(used.sum()), warnings=tuple(warnings), **sides
    )


def _units(log_ratios, advantages, mask, level):
    """Row, token count, ratio minus 1, and sign of the advantage, of each active ratio."""
    if level == 'token':
        row, column = np.nonzero(mask)
        excess, sign = np.expm1(log_ratios[row, column]), np.sign(advantages[row, column])
        tokens = np.ones(row.size)
    else:
        tokens = mask.sum(-1).astype(float)
        row, excess = np.arange(len(mask)), np.expm1(log_ratios.sum(-1) / tokens)
        sign = np.sign(np.where(mask, advantages, 0).sum(-1))
    active = sign != 0
    return row[active], tokens[active], excess[active], sign[active]


def _side(excess, row, tokens, q, resamples, confidence, rng) -> Side:
    if not excess.size:
        return Side(np.nan, np.nan, (np.nan, np.nan), 0, excess, excess, tokens)
    rows, cluster, per_row = np.unique(row, return_inverse=True, return_counts=True)
    order = np.argsort(excess, kind='stable')
    excess, cluster, tokens = excess[order], cluster[order], tokens[order]
    quantile = float(np.quantile(excess, 1 - q))
    draws = [_resampled_quantile(excess, cluster, rows.size, 1 - q, rng) for _ in range(resamples)]
    tails = (1 - confidence) / 2, (1 + confidence) / 2
    low, high = np.maximum(np.quantile(draws, tails), FLOOR)
    return Side(
        eps=max(quantile, FLOOR),
        quantile=quantile,
        interval=(float(low), float(high)),
        responses=rows.size,
        excess=excess,
        per_response=1 / per_row[cluster],
        per_token=tokens,
    )


def _resampled_quantile(ordered, cluster, n, q, rng) -> float:
    """np.quantile of one bootstrap sample of the n clusters, without building the sample."""
    times = np.bincount(rng.integers(n, size=n), minlength=n)
    ends = np.cumsum(times[cluster])
    place = q * (ends[-1] - 1)
    low, high = ordered[np.searchsorted(ends, [np.floor(place), np.ceil(place)], side='right')]
    return low + (place - np.floor(place)) * (high - low)


def _doubts(side: Side, name: str, which: str, q: float, still: bool) -> list[str]:
    if not side.responses:
        return [f'eps_{name}: no response with {which}']
    doubts = []
    if side.responses * q < TAIL:
        need = int(np.ceil(TAIL / q))
        doubts.append(f'eps_{name}: {side.responses} responses with {which}, below {need}: noisy')
    if side.quantile < 0 and not still:
        way = 'lowered' if which == 'A > 0' else 'raised'
        doubts.append(
            f'eps_{name}: negative quantile {side.quantile:.2g}: updates {way} the probability of '
            f'{1 - q:.0%} or more of what has {which}, the wrong way'
        )
    return doubts


def _mixed_rows(advantages, mask) -> int:
    high = np.where(mask, advantages, -np.inf).max(-1, initial=-np.inf)
    low = np.where(mask, advantages, np.inf).min(-1, initial=np.inf)
    return int(np.sum(high > low))


def check_share(name: str, value: float) -> None:
    """Raise ValueError where a share is not above 0 and below 1."""
    if not 0 < value < 1:
        raise ValueError(f'{name}={value!r}, legal is above 0 and below 1')


# ---------------------------------------------------------------- group size


@dataclasses.dataclass(frozen=True)
class GroupSize:
    """Smallest group that is seldom degenerate.

    Attributes:
      size: smallest G whose expected degenerate share is at most the target; None up to the bound.
      curve: [bound] expected share of degenerate groups for G = 1, 2, ..., bound.
      floor: share of prompts solved always or never, which no group size gets below.
    """

    size: int | None
    curve: np.ndarray
    floor: float


def group_size(rates: Any, degenerate: float = 0.1, bound: int = 1024) -> GroupSize:
    """Smallest G with E_p[p^G + (1-p)^G] <= degenerate, over measured solve rates p of prompts.

    A group of G answers that are all right or all wrong has no advantage. Rates measured from few
    answers are too often exactly 0 or 1, which makes this pessimistic.

    Args:
      rates: [n] solve rates in [0, 1].
      degenerate: largest expected share of degenerate groups, in (0, 1).
      bound: largest G tried.

    Raises:
      ValueError: no rate, a rate outside [0, 1], or an argument that is not legal.
    """
    rates = np.asarray(rates, np.float64)
    check_share('degenerate', degenerate)
    if rates.ndim != 1 or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f'rates must be [n] in [0, 1] with n >= 1, got shape {rates.shape}')
    if bound < 1:
        raise ValueError(f'bound={bound!r}, legal is 1 or more')
    p, times = np.unique(rates, return_counts=True)
    g = np.arange(1, bound + 1)[:, None]
    curve = (p**g + (1 - p) ** g) @ times / rates.size
    fits = np.flatnonzero(curve <= degenerate)
    floor = float(times[(p == 0) | (p == 1)].sum() / rates.size)
    return GroupSize(int(fits[0]) + 1 if fits.size else None, curve, floor)
