"""Decode slots without a token, for three ways to decode answers of unequal length."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from experiments import observed
from experiments.claim import (
    COLOURS,
    Claim,
    Place,
    Verdict,
    decide,
    interval,
    line,
    spread,
    tidy,
    together,
)
from policyopt.simulation import Plan, lock_step, simulate

# 512 answers a step in 64 slots; the update takes no time, as slots do not wait while nothing is
# decoded.
PLAN = Plan(prompts=64, group_size=8, slots=64)
WAYS = {
    'lock-step': (lock_step, PLAN),
    'continuous batching': (simulate, PLAN),
    'asynchronous': (simulate, dataclasses.replace(PLAN, staleness=1)),
}
RANGES = (1.5, 2.0, 3.0, 5.0, 10.0, 20.0)  # longest over shortest answer of a step
PUBLISHED = RANGES.index(5.0)
SLOTS = (64, 128, 256, 512)
TAKES, MEDIAN = 8, 200
EXTREMES = 6.1  # standard deviations between least and greatest of 512 normal numbers, about


def lengths(seed: int, longest: float) -> Any:
    """Number of a group -> tokens of its 8 answers, log-normal; `longest` over the shortest."""
    sigma = np.log(longest) / EXTREMES

    def of(number: int) -> list[int]:
        rng = np.random.default_rng((seed, number))
        return np.round(MEDIAN * np.exp(sigma * rng.normal(size=PLAN.group_size))).astype(int)

    return of


def measure(place: Place) -> dict[str, Any]:
    """Idle shares by the simulation of schedules, after a check of it against the engines."""
    takes = 2 if place.fast else TAKES
    for staleness in (0, 1):
        small = dataclasses.replace(observed.SMALL, staleness=staleness)
        observed.compared(small, takes, place.seed)
    out: dict[str, Any] = {
        'longest over shortest': [],
        'by range': {n: [] for n in WAYS},
        'by slots': {n: [] for n in WAYS},
    }
    for longest in RANGES:
        of = lengths(place.seed, longest)
        steps = np.array([[of(t * PLAN.prompts + i) for i in range(64)] for t in range(takes)])
        found = steps.max((1, 2)) / steps.min((1, 2))
        out['longest over shortest'].append(float(found.mean()))
        for name, (run, plan) in WAYS.items():
            out['by range'][name].append(run(plan, of, takes).slot_idle)
    for slots in SLOTS:
        for name, (run, plan) in WAYS.items():
            one = dataclasses.replace(plan, slots=slots)
            done = run(one, lengths(place.seed, RANGES[PUBLISHED]), takes)
            out['by slots'][name].append(done.slot_idle)
    return out


def judge(seeds: list[Any]) -> Verdict:
    idle = {name: spread(seeds, 'by range', name)[:, PUBLISHED] for name in WAYS}
    lock, continuous, ahead = idle.values()
    first, saved = interval(continuous / lock)
    second, more = interval(ahead / continuous)
    whole = {name: spread(seeds, 'by slots', name)[:, -1].mean() for name in WAYS}
    return Verdict(
        together(decide(-saved[1], -saved[0], -0.5), decide(-more[1], -more[0], -0.5)),
        'idle share, continuous batching over lock-step, longest answer 5 times the shortest',
        first,
        saved,
        f'Of 64 slots for 512 log-normal answers a step, {lock.mean():.1%} are idle in lock-step, '
        f'{continuous.mean():.1%} with continuous batching and {ahead.mean():.1%} where it may go '
        f'on with answers of the next step: {second:.2f} [{more[0]:.2f}, {more[1]:.2f}] of the '
        'share before (half was asked, both times). With a slot for each of the 512 answers '
        f'continuous batching saves nothing: {whole["lock-step"]:.1%} and '
        f'{whole["continuous batching"]:.1%}, against {whole["asynchronous"]:.1%}. Numbers are of '
        'the simulation of schedules; slots, tokens and ages of its continuous and asynchronous '
        'ones were those of the engines for a small model in every seed. Prefills and updates '
        'count as no time.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    x = spread(seeds, 'longest over shortest').mean(0)
    for colour, name in zip(COLOURS, WAYS, strict=False):
        line(left, x, spread(seeds, 'by range', name), name, colour)
        line(right, SLOTS, spread(seeds, 'by slots', name), name, colour)
    left.axvline(5, color='#888888', ls=':')
    left.set(xscale='log', xlabel='longest answer over shortest', ylabel='share of slots idle')
    left.set_xticks((2, 5, 10, 20), ('2', '5', '10', '20'))
    right.set(xscale='log', xlabel='slots for 512 answers, 5 times apart')
    right.set_xticks(SLOTS, SLOTS)
    for axis in (left, right):
        axis.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    tidy(left, right)


CLAIM = Claim(
    text='Where answers differ in length by five times, continuous batching halves the idle slots '
    'of lock-step decoding, and drawing ahead halves them again.',
    source='2506.10910',
    published='the longest answer takes over 5 times the shortest',
    minutes=0.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
