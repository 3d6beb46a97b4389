"""What an entropy bonus, a KL to the reference and partial rewards add to clip-higher."""

from __future__ import annotations

from typing import Any

from experiments import curves, learning
from experiments.claim import Claim, Place, Verdict, interval

ALONE = 'clip-higher'
HIGHER = 'experiments.variants.clip_higher'
ARMS = {
    ALONE: learning.Arm(HIGHER),
    'entropy bonus': learning.Arm(HIGHER, dict(bonus=0.01)),
    'KL in the loss': learning.Arm(HIGHER, dict(beta=0.04)),
    'partial rewards': learning.Arm(
        HIGHER, changes=dict(reward='experiments.variants.share_of_digits')
    ),
}
NEEDED = 0.02  # of accuracy, for a gain that counts


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of GRPO with clip-higher, alone and with each addition."""
    return {name: learning.curves(place, arm) for name, arm in ARMS.items()}


def judge(seeds: list[Any]) -> Verdict:
    alone = curves.areas(seeds, ALONE)
    gains = {name: interval(curves.areas(seeds, name) - alone) for name in ARMS if name != ALONE}
    some = any(low > NEEDED for _, (low, _) in gains.values())
    none = all(high < NEEDED for _, (_, high) in gains.values())
    best = max(gains, key=lambda name: gains[name][0])
    said = ', '.join(f'{name} {g:+.1%} [{a:+.1%}, {b:+.1%}]' for name, (g, (a, b)) in gains.items())
    each = ', '.join(
        f'{name} {curves.areas(seeds, name).mean():.1%} (at the end '
        f'{curves.last(seeds, name).mean():.1%}, entropy '
        f'{curves.means(seeds, name, "entropy").mean():.2f} nats, '
        f'{curves.how_many(seeds, name)} collapsed)'
        for name in ARMS
    )
    return Verdict(
        'not reproduced' if some else 'reproduced' if none else 'inconclusive',
        f'gain in mean accuracy over clip-higher alone, {best}, the largest',
        *gains[best],
        f'Gain in held-out accuracy over clip-higher alone, mean over '
        f'{seeds[0][ALONE]["step"][-1]} steps: {said}; a gain of {NEEDED:.0%} counts, and the '
        f'claim is that there is none. Accuracy: {each}. Clip .2 and .28; a bonus of .01 for each '
        'nat; k3 to the policy at the start times .04, as GRPO has it; a partial reward is the '
        'share of digits in their place. Which gain is the largest was seen afterwards, and what '
        'other coefficients would do is not known.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    curves.draw(axis, seeds, {name: name for name in ARMS})
    axis.set(ylabel='held-out accuracy')
    axis.legend(frameon=False, fontsize=8)


CLAIM = Claim(
    text='An entropy bonus, a KL in the loss and partial rewards each gain nothing over '
    'clip-higher alone.',
    source='2506.10910',
    published='no gain',
    minutes=4,
    measure=measure,
    judge=judge,
    draw=draw,
)
