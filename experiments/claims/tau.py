"""How fast SAPO's gate closes on tokens of wrong answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import arms, curves, learning
from experiments.claim import Claim, Place, Verdict, decide, interval, spread

TAUS = (0.5, 1.05, 4.0)  # the middle one is published; the others span eight times
ARMS = {f'{tau:g}': arms.sapo(tau, replay=dict(routing=None)) for tau in TAUS}
NEEDED = 0.02  # of accuracy, for a gain that counts


def measure(place: Place) -> dict[str, Any]:
    """Learning curves over tau of negative advantages; that of positive ones is 1."""
    return {name: learning.curves(place, arm) for name, arm in ARMS.items()}


def unsteady(seeds: list[Any], arm: str) -> np.ndarray:
    """Mean distance of accuracy below its peak until then: [seeds]."""
    accuracy = spread(seeds, arm, 'accuracy')
    return (np.maximum.accumulate(accuracy, axis=1) - accuracy).mean(1)


def judge(seeds: list[Any]) -> Verdict:
    low, *_, high = ARMS
    value, ends = interval(curves.areas(seeds, high) - curves.areas(seeds, low))
    parts = ', '.join(
        f'{name} {curves.areas(seeds, name).mean():.1%} ({unsteady(seeds, name).mean():.1%} below '
        f'its peak, {curves.how_many(seeds, name)} collapsed)'
        for name in ARMS
    )
    return Verdict(
        decide(*ends, NEEDED),
        f'gain in mean accuracy, tau {high} over {low} for tokens of negative advantage',
        value,
        ends,
        f'Held-out accuracy of SAPO by tau of negative advantages, that of positive ones being 1, '
        f'mean over {seeds[0][low]["step"][-1]} steps: {parts}. What counts is a gain of '
        f'{NEEDED:.0%}; 1.05 against 1, as published, is too small a step to be told apart here.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    curves.draw(axis, seeds, {name: f'tau {name}' for name in ARMS})
    axis.set(ylabel='held-out accuracy')
    axis.legend(frameon=False, fontsize=8)


CLAIM = Claim(
    text='SAPO learns more with a larger tau for tokens of negative advantage.',
    source='2511.20347',
    published='steadier at 1.05 than at 1 and .95',
    minutes=2.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
