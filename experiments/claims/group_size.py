"""Groups whose answers are all right or all wrong, against their size."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from experiments import policies
from experiments.claim import COLOURS, Claim, Place, Verdict, decide, interval, line, spread, tidy
from policyopt import answers, at_k, data, recipe

SIZES = (2, 4, 8, 16, 32)
PROBLEMS = 192


def _right(setup: recipe.Setup, params: Any, place: Place) -> np.ndarray:
    """Whether answers are right: [problems, two halves of the largest size] bool."""
    items = next(data.batches(setup.task.train, 8 if place.fast else PROBLEMS, place.seed))
    drawn = answers.draw(
        setup.model,
        params,
        items,
        setup.judge,
        jax.random.key(place.seed),
        setup.config.sampling,
        samples=2 * SIZES[-1],
        prompt_width=setup.task.prompt_width,
        batch=256,
    )
    return np.asarray(drawn.correct)


def measure(place: Place) -> dict[str, Any]:
    """Degenerate groups of one half of the answers, predicted by the solve rates of the other."""
    setup = recipe.prepare(policies.config(place))
    right = _right(setup, policies.warm(setup, place), place)
    half = SIZES[-1]
    known, drawn = right[:, :half].sum(1), right[:, half:]
    out: dict[str, Any] = {'solve rate': float(right.mean()), 'rates': (known / half).tolist()}
    out |= {'measured': [], 'by problem': [], 'by the mean': []}
    for size in SIZES:
        groups = drawn.reshape(len(right), -1, size)
        out['measured'].append(float((groups.all(-1) | ~groups.any(-1)).mean()))
        mean = right.mean()
        # p^G + (1-p)^G without bias from counts: what no draw of G answers would have mixed.
        mixed = [at_k.pass_at_k(counts, half, size) for counts in (known, half - known)]
        out['by problem'].append(float((2 - mixed[0] - mixed[1]).mean()))
        out['by the mean'].append(float(mean**size + (1 - mean) ** size))
    return out


def judge(seeds: list[Any]) -> Verdict:
    measured, own = spread(seeds, 'measured'), spread(seeds, 'by problem')
    mean = spread(seeds, 'by the mean')
    value, found = interval(np.abs(measured - own).max(1))
    gap, gaps = interval((measured - mean)[:, 2])
    return Verdict(
        decide(-found[1], -found[0], -0.05),
        'largest error of p^G + (1-p)^G, averaged over problems, for G of 2 to 32',
        value,
        found,
        'Averaged over the solve rates of single problems (from 32 other answers each) the formula '
        f'gives the share of degenerate groups to {100 * value:.1f} points (5 were asked). With '
        f'the mean solve rate of all problems it does not: at G = {SIZES[2]} {100 * gap:.0f} '
        f'[{100 * gaps[0]:.0f}, {100 * gaps[1]:.0f}] points more are degenerate than it '
        'says, since solve rates differ: many problems are hopeless.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis, rates = figure.subplots(1, 2)
    line(axis, SIZES, spread(seeds, 'measured'), 'measured', COLOURS[0])
    line(axis, SIZES, spread(seeds, 'by problem'), 'by the rate of each problem', COLOURS[2])
    line(axis, SIZES, spread(seeds, 'by the mean'), 'by the mean rate', COLOURS[1])
    axis.set(xscale='log', xlabel='answers of a group', ylabel='share of groups without a gradient')
    axis.set_xticks(SIZES, SIZES)
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    rates.hist(spread(seeds, 'rates').ravel(), bins=17, color=COLOURS[0])
    rates.set(xlabel='solve rate', ylabel='problems')
    tidy(axis, rates)


CLAIM = Claim(
    text='Groups without a gradient are p^G + (1-p)^G of all.',
    source='2503.14476',
    published='-',
    minutes=1,
    measure=measure,
    judge=judge,
    draw=draw,
)
