"""Replaying experts of a mixture, under token ratios and under sequence ratios."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from experiments import arms, curves, learning, policies
from experiments.claim import Claim, Place, Verdict, decide, interval, spread, together
from policyopt import reinforce

METHODS = {'GRPO': arms.grpo, 'GSPO': arms.gspo}
REPLAYS = {'none': dict(replay=dict(routing=None)), 'rollout': dict()}
RECOMPUTE = dict(replay=dict(routing='recompute'), logp_old='recomputed')
ARMS = {
    f'{method}, {replay}': make(**changes)
    for method, make in METHODS.items()
    for replay, changes in REPLAYS.items()
}
NEEDED = 0.02  # of accuracy, for a gain that counts


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of both methods with and without replay; recomputed experts of one step."""
    out = {name: learning.curves(place, arm) for name, arm in ARMS.items()}
    return out | {'recomputed': agreement(place)}


def agreement(place: Place) -> dict[str, float]:
    """One GRPO step with each kind of replay: share of equal experts, largest gap of log-probs.

    Of the first minibatch, whose parameters are the sampler's, and of all.
    """
    done = []
    for changes in (REPLAYS['rollout'], RECOMPUTE):
        setup, loop, point = policies.begin(place, **arms.grpo(**changes).config(place.fast))
        done.append(reinforce.rl_step(setup, loop, point, 1))
    parts = [jax.device_get(d.parts) for d in done]
    logps = [np.stack(jax.device_get(d.logp_new)) for d in done]
    fed, same = 0, 0
    for a, b in zip(*parts, strict=True):
        used = np.arange(a.tokens.shape[1])[None] < a.length[:, None] - 1  # the last is not fed
        rows = [np.sort(part.routing[used], -1) for part in (a, b)]
        known = (rows[0] >= 0) & (rows[1] >= 0)
        fed, same = fed + known.sum(), same + (known & (rows[0] == rows[1])).sum()
    gap = np.abs(logps[0] - logps[1])
    return {'equal': float(same / fed), 'first': float(gap[0].max()), 'all': float(gap.max())}


def gain(seeds: list[Any], method: str) -> np.ndarray:
    """Gain in accuracy by replay, mean over the run: [seeds]."""
    return curves.areas(seeds, f'{method}, rollout') - curves.areas(seeds, f'{method}, none')


def judge(seeds: list[Any]) -> Verdict:
    found = {method: interval(gain(seeds, method)) for method in METHODS}
    low, high = found['GSPO'][1]
    word = together(decide(*found['GRPO'][1], NEEDED), decide(-high, -low, -NEEDED))
    parts = []
    for method, (mean, (low, high)) in found.items():
        names = [f'{method}, {replay}' for replay in REPLAYS]
        level = [curves.areas(seeds, name).mean() for name in names]
        noise = [curves.means(seeds, name, 'variance') for name in names]
        change, ends = interval(np.log(noise[1] / noise[0]))
        fallen = ' and '.join(curves.how_many(seeds, name) for name in names)
        parts.append(
            f'{method} has a held-out accuracy of {level[0]:.1%} without replay and {level[1]:.1%} '
            f'with it, mean over {seeds[0][names[0]]["step"][-1]} steps, a gain of {mean:+.1%} '
            f'[{low:+.1%}, {high:+.1%}]; its token log-ratios have a variance of '
            f'{noise[0].mean():.3f} and {noise[1].mean():.3f}, a change of {np.expm1(change):+.0%} '
            f'[{np.expm1(ends[0]):+.0%}, {np.expm1(ends[1]):+.0%}]; {fallen} collapse'
        )
    equal, gap = (spread(seeds, 'recomputed', name) for name in ('equal', 'first'))
    return Verdict(
        word,
        "gain in mean accuracy by replay of the sampler's experts, GRPO",
        *found['GRPO'],
        f'{". ".join(parts)}. Sampler and trainer run one forward pass here, so that recomputed '
        f"experts are the sampler's ({equal.min():.2%} are equal, log-probs of a first minibatch "
        f'differ by {gap.max():.1g} at most): they have no curves of their own, and what replay '
        f'takes away is the drift of experts over the {learning.MINIBATCHES} minibatches of a '
        f'step. What counts is that GRPO gains {NEEDED:.0%} at least, and GSPO less.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for axis, method in zip(axes, METHODS, strict=True):
        labels = {'none': 'without replay', 'rollout': 'with replay'}
        curves.draw(axis, seeds, {f'{method}, {name}': label for name, label in labels.items()})
        axis.set(title=method)
        axis.title.set_fontsize(9)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set(ylabel='held-out accuracy')


CLAIM = Claim(
    text='On a mixture of experts GRPO needs routing replay, GSPO does not.',
    source='2507.18071',
    published='without replay GRPO does not converge',
    minutes=4,
    measure=measure,
    judge=judge,
    draw=draw,
)
