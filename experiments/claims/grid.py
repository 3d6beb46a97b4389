"""One weight and one clip for an answer, against one for each token: the 2x2 grid."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import ablation_grid, arms, curves, learning
from experiments.claim import Claim, Place, Verdict, decide, interval

PUBLISHED = ablation_grid.SEQUENCE_CLIP
NEEDED = 0.02  # of accuracy, for an effect that counts


def _cell(name: str) -> learning.Arm:
    clips = dict(token_clip=arms.TOKEN_CLIP, sequence_clip=arms.SEQUENCE_CLIP)
    clips = {key: list(value) for key, value in clips.items()}
    return learning.Arm('experiments.ablation_grid.named', dict(cell=name, **clips))


CELLS = {  # the first and the last have the gradients of TT and SS
    'TT': arms.grpo(),
    'TS': _cell('TS'),
    'ST': _cell('ST'),
    'SS': arms.gspo(),
}
ARMS = CELLS | {
    'SS published': arms.gspo(*PUBLISHED),
    'T unclipped': _cell('T_unclipped'),
    'S unclipped': _cell('S_unclipped'),
}
LABELS = {
    'TT': 'token weight, token clip (GRPO)',
    'TS': 'token weight, sequence clip',
    'ST': 'sequence weight, token clip',
    'SS': 'sequence weight, sequence clip (GSPO)',
}


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of the cells and of controls."""
    return {name: learning.curves(place, arm) for name, arm in ARMS.items()}


def effects(seeds: list[Any]) -> dict[str, np.ndarray]:
    """Gain in accuracy, mean over the run, by sequences in place of tokens: [seeds] each."""
    a = {name: curves.areas(seeds, name) for name in CELLS}
    return {
        'weight': (a['SS'] + a['ST'] - a['TT'] - a['TS']) / 2,
        'clip': (a['SS'] + a['TS'] - a['TT'] - a['ST']) / 2,
    }


def judge(seeds: list[Any]) -> Verdict:
    found = {name: interval(values) for name, values in effects(seeds).items()}
    words = [decide(*ends, NEEDED) for _, ends in found.values()]
    word = 'reproduced'
    for other in ('inconclusive', 'not reproduced'):
        word = other if other in words else word
    least = min(found, key=lambda name: found[name][0])
    said = ', '.join(
        f'of the {name} {mean:+.1%} [{low:+.1%}, {high:+.1%}]'
        for name, (mean, (low, high)) in found.items()
    )
    cells = ', '.join(
        f'{name} {curves.areas(seeds, name).mean():.1%} '
        f'({curves.means(seeds, name, "stopped").mean():.0%})'
        for name in ARMS
    )
    fallen = [f'{name} {curves.how_many(seeds, name)}' for name in ARMS if curves.rate(seeds, name)]
    return Verdict(
        word,
        f'gain in mean accuracy by the {least} of sequences, the smaller of the two',
        *found[least],
        f'Gain in held-out accuracy, mean over {seeds[0]["TT"]["step"][-1]} steps of '
        f'{learning.MINIBATCHES} minibatches, by a sequence in place of a token: {said}; '
        f'{NEEDED:.0%} were asked of both. Mean accuracy by cell, weight first, with the share of '
        f'tokens that the clip stops in parentheses: {cells}. Clip ranges are '
        f'{arms.TOKEN_CLIP[0]:g} for tokens and {arms.SEQUENCE_CLIP[0]:g} for sequences, which was '
        f'chosen to stop as many; published is {PUBLISHED[0]:g} and {PUBLISHED[1]:g}, for long '
        'answers. Collapsed (below half of its '
        f'peak at the end): {", ".join(fallen) or "none"}.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    curves.draw(left, seeds, LABELS)
    left.set(ylabel='held-out accuracy', title='clips that stop as many tokens')
    others = {
        'SS published': 'GSPO, published eps',
        'S unclipped': 'sequence weight, no clip',
        'T unclipped': 'token weight, no clip',
    }
    curves.draw(right, seeds, others, first=4)
    right.set(title='controls')
    for axis in (left, right):
        axis.title.set_fontsize(9)
        axis.legend(frameon=False, fontsize=7, loc='upper left')


CLAIM = Claim(
    text='A weight and a clip of the whole answer each learn better than those of tokens.',
    source='unpublished',
    published='-',
    minutes=6,
    measure=measure,
    judge=judge,
    draw=draw,
)
