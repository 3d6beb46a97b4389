"""One weight and one clip for an answer, against one for each token: the 2x2 grid."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import ablation_grid, arms, curves, learning
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

PUBLISHED = ablation_grid.SEQUENCE_CLIP
NEEDED = 0.02  # of accuracy, for an effect that counts


def cell(name: str) -> learning.Arm:
    """An arm of the grid."""
    clips = dict(token_clip=arms.TOKEN_CLIP, sequence_clip=arms.SEQUENCE_CLIP)
    clips = {key: list(value) for key, value in clips.items()}
    return learning.Arm('experiments.ablation_grid.named', dict(cell=name, **clips))


CELLS = {  # the first and the last have the gradients of TT and SS
    'TT': arms.grpo(),
    'TS': cell('TS'),
    'ST': cell('ST'),
    'SS': arms.gspo(),
}
ARMS = CELLS | {
    'SS published': arms.gspo(*PUBLISHED),
    'T unclipped': cell('T_unclipped'),
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
    word = together(*(decide(*ends, NEEDED) for _, ends in found.values()))
    clip, (worse, better) = interval(curves.areas(seeds, 'TT') - curves.areas(seeds, 'T unclipped'))
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
        f'tokens that the clip stops in parentheses: {cells}. A clip of tokens gains {clip:+.1%} '
        f'[{worse:+.1%}, {better:+.1%}] over none. Clip ranges are {arms.TOKEN_CLIP[0]:g} for '
        f'tokens and {arms.SEQUENCE_CLIP[0]:g} for sequences, chosen on another seed to stop as '
        f'many, which on these it does not quite; published is {PUBLISHED[0]:g} and '
        f'{PUBLISHED[1]:g}, for long answers, and answers have '
        'four tokens at most here. Collapsed (below half of its peak at the end): '
        f'{", ".join(fallen) or "none"}.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    figure.set_size_inches(8.4, 5.4)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    names = {'TT': 'GRPO', 'SS': 'GSPO'}
    beside = {
        'TT': ('T unclipped', 'without a clip'),
        'SS': ('SS published', "GSPO's published eps"),
    }
    step = seeds[0]['TT']['step']
    for axis, (own, colour) in zip(axes.flat, zip(CELLS, COLOURS, strict=False), strict=True):
        for other in CELLS:
            if other != own:
                mean = spread(seeds, other, 'accuracy').mean(0)
                axis.plot(step, mean, color='0.7', lw=1, label='means of the other cells')
        if own in beside:
            arm, label = beside[own]
            mean = spread(seeds, arm, 'accuracy').mean(0)
            axis.plot(step, mean, color='black', lw=1.5, ls='--', label=f'mean {label}')
        label = ', '.join(filter(None, [own, names.get(own)]))
        line(axis, step, spread(seeds, own, 'accuracy'), f'{label}: mean and range', colour)
        handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        axis.legend(
            handles.values(), handles, frameon=False, fontsize=8, loc='upper left', reverse=True
        )
        tidy(axis)
    top = max(spread(seeds, own, 'accuracy').max() for own in CELLS)
    axes[0, 0].set(ylim=(0, 1.3 * top))  # room for the legends
    for column, title in enumerate(('clip of a token', 'clip of an answer')):
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xlabel('RL step')
    for row, title in enumerate(('weight of a token', 'weight of an answer')):
        axes[row, 0].set_ylabel(f'{title}\nheld-out accuracy')


CLAIM = Claim(
    text='A weight and a clip of the whole answer each learn better than those of tokens.',
    source='unpublished',
    published='-',
    minutes=5,
    measure=measure,
    judge=judge,
    draw=draw,
)
