"""More minibatches a rollout, at equal tokens and updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import arms, curves, learning
from experiments.claim import COLOURS, Claim, Place, Verdict, decide, interval, spread, tidy

COUNTS = (1, 2, 8, 16)
PROMPTS = 8  # of a minibatch
NEEDED = 0.02  # of accuracy, for a loss that counts


def _arm(count: int) -> learning.Arm:
    if count == learning.MINIBATCHES:  # shared with other claims
        return arms.grpo()
    return arms.grpo(minibatches=count, rollout=dict(prompts=PROMPTS * count))


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of GRPO over the number of minibatches, all of the same size.

    Twice the minibatches are twice the answers of a step and half the steps: tokens and updates are
    equal, and what differs is how old the answers are that an update learns from.
    """
    out = {}
    for count in COUNTS:
        steps, every = (n * learning.MINIBATCHES // count for n in (learning.STEPS, learning.EVERY))
        if count > learning.MINIBATCHES:  # a measurement after as many updates, where it divides
            every = learning.EVERY
        out[str(count)] = learning.curves(place, _arm(count), steps, every)
    return out


def judge(seeds: list[Any]) -> Verdict:
    few, many = '2', str(learning.MINIBATCHES)
    value, ends = interval(curves.areas(seeds, few) - curves.areas(seeds, many))
    late, (low, high) = interval(curves.last(seeds, few, 2) - curves.last(seeds, many, 2))
    parts = ', '.join(
        f'{name} {curves.areas(seeds, name).mean():.1%} (at the end '
        f'{curves.last(seeds, name, 2).mean():.1%}, variance of log-ratios '
        f'{curves.means(seeds, name, "variance").mean():.3f}, {curves.how_many(seeds, name)} '
        'collapsed)'
        for name in seeds[0]
    )
    return Verdict(
        decide(*ends, NEEDED),
        f'loss of mean accuracy by {many} minibatches of a rollout, against {few}',
        value,
        ends,
        f'Held-out accuracy of GRPO, mean over {learning.STEPS * learning.MINIBATCHES} updates of '
        f'{PROMPTS} problems with 8 answers each, by minibatches of a rollout: {parts}. Tokens and '
        f'updates are equal; answers are drawn more rarely the more minibatches there are, and 16 '
        f'are measured half as often. At the end the loss by {many} against {few} is {late:+.1%} '
        f'[{low:+.1%}, {high:+.1%}]: what more minibatches gain, they gain early, where few of '
        f'them fall below the start. What counts is a loss of {NEEDED:.0%}.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    for colour, count in zip(COLOURS, seeds[0], strict=False):
        updates = np.array(seeds[0][count]['step']) * int(count)
        accuracy = spread(seeds, count, 'accuracy')
        axis.fill_between(updates, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.15, lw=0)
        axis.plot(updates, accuracy.mean(0), color=colour, lw=2, label=f'{count} minibatches')
    axis.set(xlabel='update', ylabel='held-out accuracy', ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)


CLAIM = Claim(
    text='More than two minibatches of a rollout hurt.',
    source='2506.10910',
    published='worse beyond 2',
    minutes=4,
    measure=measure,
    judge=judge,
    draw=draw,
)
