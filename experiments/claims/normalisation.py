"""What advantages are divided by: the deviation of a group, of a minibatch, or nothing."""

from __future__ import annotations

import itertools
from typing import Any

from experiments import arms, curves, learning
from experiments.claim import Claim, Place, Verdict, interval

ARMS = {
    'group': arms.grpo(),
    'minibatch': learning.Arm('experiments.variants.normalised', dict(by='minibatch')),
    'none': learning.Arm('experiments.variants.normalised', dict(by='none')),
}
ALIKE = 0.05  # of accuracy: means that differ by less are called alike


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of the three."""
    return {name: learning.curves(place, arm) for name, arm in ARMS.items()}


def judge(seeds: list[Any]) -> Verdict:
    found = {
        f'{a} over {b}': interval(curves.areas(seeds, a) - curves.areas(seeds, b))
        for a, b in itertools.combinations(ARMS, 2)
    }
    apart = [low > ALIKE or high < -ALIKE for _, (low, high) in found.values()]
    within = [low >= -ALIKE and high <= ALIKE for _, (low, high) in found.values()]
    widest = max(found, key=lambda pair: abs(found[pair][0]))
    said = ', '.join(
        f'{pair} {mean:+.1%} [{low:+.1%}, {high:+.1%}]'
        for pair, (mean, (low, high)) in found.items()
    )
    means = ', '.join(f'{name} {curves.areas(seeds, name).mean():.1%}' for name in ARMS)
    ends = ', '.join(f'{name} {curves.last(seeds, name).mean():.1%}' for name in ARMS)
    return Verdict(
        'not reproduced' if any(apart) else 'reproduced' if all(within) else 'inconclusive',
        f'gain in mean accuracy, {widest}, the widest apart',
        *found[widest],
        f'Held-out accuracy of GRPO, mean over {seeds[0]["group"]["step"][-1]} steps: {means}; at '
        f'the end: {ends}. Gains: {said}. Alike is what differs by less than {ALIKE:.0%}, with its '
        'interval. Gradients are clipped to a norm of 1 and Adam divides by their size, so that a '
        'constant factor on all advantages would change next to nothing here.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    labels = {name: 'not divided' if name == 'none' else f'by the {name}' for name in ARMS}
    curves.draw(axis, seeds, labels)
    axis.set(ylabel='held-out accuracy')
    axis.legend(frameon=False, fontsize=8)


CLAIM = Claim(
    text='Advantages divided by the deviation of a group, a minibatch or nothing learn alike.',
    source='2506.10910',
    published='no effect on performance',
    minutes=2.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
