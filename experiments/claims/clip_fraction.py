"""Tokens that stop learning, under GSPO's and under GRPO's clip."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import ablation_grid, policies
from experiments.claim import COLOURS, Claim, Place, Verdict, decide, interval, line, spread, tidy
from policyopt import losses, masked, reinforce
from policyopt.types import LossInputs

RANGES = {'token': ablation_grid.TOKEN_CLIP, 'sequence': ablation_grid.SEQUENCE_CLIP}
PUBLISHED = {
    'grpo': dict(eps=RANGES['token'][0]),
    'gspo': dict(zip(('low', 'high'), RANGES['sequence'], strict=True)),
}
RATIOS = {'token': losses.token_ratio(), 'sequence': losses.sequence_ratio()}
EPS = np.geomspace(1e-5, 1, 31)
STEPS, MINIBATCHES, RATE = 4, 4, 1e-4


@jax.jit
def _frozen(parts: Any, logp_new: Any) -> dict[str, Any]:
    """Share of tokens whose gradient the clip stops, at each eps and at the published ranges."""
    out = {}
    for name, ratio in RATIOS.items():
        fields = {n: getattr(parts, n) for n in ('logp_old', 'mask', 'advantages')}
        log_ratio = ratio(LossInputs(logp_new=logp_new, **fields))
        log_ratio = jnp.broadcast_to(log_ratio, parts.mask.shape)

        def share(low: Any, high: Any, log_ratio=log_ratio) -> Any:
            stops = masked.clip_stops(jnp.exp(log_ratio), parts.advantages, low, high)
            return jnp.sum(masked.select(parts.mask, stops * 1.0)) / jnp.sum(parts.mask != 0)

        out[f'{name} curve'] = jax.vmap(share)(EPS, EPS)
        out[f'{name} published'] = share(*RANGES[name])
    return out


def measure(place: Place) -> dict[str, Any]:
    """Frozen shares over the minibatches after the first of a few steps, each by its own loss."""
    out = {}
    for name, kw in PUBLISHED.items():
        setup, loop, point = policies.begin(
            place,
            algorithm=name,
            algorithm_kw=kw,
            minibatches=2 if place.fast else MINIBATCHES,
            optimizer=dict(learning_rate=RATE, warmup_steps=0),
        )
        found = []
        for step in range(1, 1 + (1 if place.fast else STEPS)):
            done = reinforce.rl_step(setup, loop, point, step)
            point = point._replace(state=done.state, step=step)
            for part, logp_new in zip(done.parts[1:], done.logp_new[1:], strict=True):
                found.append(jax.device_get(_frozen(part, logp_new)))
        for key in found[0]:
            out[f'{name}: {key}'] = np.mean([f[key] for f in found], axis=0).tolist()
    return out


def judge(seeds: list[Any]) -> Verdict:
    gspo = spread(seeds, 'gspo: sequence published')
    grpo = spread(seeds, 'grpo: token published')
    floor = 1e-5  # one token of some runs: a share of 0 has no ratio to it
    value, (low, high) = interval(np.log10(np.maximum(gspo, floor) / np.maximum(grpo, floor)))
    return Verdict(
        decide(low, high, 1.0),
        'decades between the shares of frozen tokens, GSPO over GRPO',
        value,
        (low, high),
        f'At the published ranges GSPO freezes {gspo.mean():.1%} of the tokens and GRPO '
        f'{grpo.mean():.2%} (minibatches 2 to 4 of 4, learning rate {RATE:g}). The paper has '
        'a hundred times, which this is not; how many times depends on the drift, the length of '
        'answers (four tokens here) and the range: the curves show both kinds of ratio at one eps.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    for colour, (name, kind) in zip(
        COLOURS, (('grpo', 'token'), ('gspo', 'sequence')), strict=False
    ):
        line(
            axis,
            EPS,
            spread(seeds, f'{name}: {kind} curve'),
            f'{name.upper()}, {kind} ratio',
            colour,
        )
    axis.axvline(RANGES['token'][0], color=COLOURS[0], ls=':', label="GRPO's eps")
    axis.axvline(np.mean(RANGES['sequence']), color=COLOURS[1], ls=':', label="GSPO's eps")
    axis.set(xscale='log', xlabel='eps', ylabel='share of tokens frozen')
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)


CLAIM = Claim(
    text='GSPO clips ten times more tokens than GRPO at least.',
    source='2507.18071',
    published='.15 of the tokens against .0013',
    minutes=1.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
