"""A soft gate without replay, beside GSPO without and GRPO with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import arms, curves, learning
from experiments.claim import Claim, Place, Verdict, decide, interval

ARMS = {
    'SAPO': arms.sapo(replay=dict(routing=None)),
    'GSPO': arms.gspo(replay=dict(routing=None)),
    'GRPO with replay': arms.grpo(),
}
NEEDED = 0.02  # of accuracy, for a gain that counts


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of the three."""
    return {name: learning.curves(place, arm) for name, arm in ARMS.items()}


def judge(seeds: list[Any]) -> Verdict:
    own, *others = ARMS
    best = max(others, key=lambda name: curves.areas(seeds, name).mean())
    value, ends = interval(curves.areas(seeds, own) - curves.areas(seeds, best))
    word = decide(*ends, NEEDED)
    if word == 'reproduced' and any(
        curves.rate(seeds, own) > curves.rate(seeds, n) for n in others
    ):
        word = 'not reproduced'
    parts = []
    for name in ARMS:
        peak = np.array([max(numbers[name]['accuracy']) for numbers in seeds])
        parts.append(
            f'{name} {curves.areas(seeds, name).mean():.1%} with peaks of {peak.mean():.1%}, '
            f'{curves.last(seeds, name).mean():.1%} at the end and {curves.how_many(seeds, name)} '
            'collapsed'
        )
    return Verdict(
        word,
        f'gain in mean accuracy, SAPO over {best}, the better of the other two',
        value,
        ends,
        f'Held-out accuracy, mean over {seeds[0][own]["step"][-1]} steps of '
        f'{learning.MINIBATCHES} minibatches: {"; ".join(parts)}. SAPO and GSPO route live, GRPO '
        f"replays the sampler's experts. What counts is a gain of {NEEDED:.0%} over both and no "
        'more collapses.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    curves.draw(axis, seeds, {name: name for name in ARMS})
    axis.set(ylabel='held-out accuracy')
    axis.legend(frameon=False, fontsize=8)


CLAIM = Claim(
    text='SAPO learns more than GSPO and than GRPO with routing replay, and collapses no oftener.',
    source='2511.20347',
    published='longer stable training, higher peak',
    minutes=2.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
