"""Shares of clipped tokens against eps, and where a controller of eps brings them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies
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
from policyopt import advantages, data, losses, masked, reinforce
from policyopt import loop as loop_lib
from policyopt.losses import controllers
from policyopt.types import Algorithm

STARTS = {'narrow': 0.01, 'wide': 0.3}
BAND = (0.05, 0.15)
PROMPTS, MINIBATCHES, RATE = 16, 4, 1e-4
STEPS, LAST = 12, 4  # RL steps, and those at the end that count


def clipped() -> Algorithm:
    """GRPO without a KL term, with a controller for each side of its clip."""
    sides = ('low', 'high')
    return Algorithm(
        advantages=advantages.group_zscore(),
        controllers={n: controllers.adaptive_clip(0.2, f'policy/frozen_{n}') for n in sides},
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=losses.adaptive(losses.clipped, low='low', high='high'),
            aggregate=losses.sequence_mean(),
        ),
    )


def measure(place: Place) -> dict[str, Any]:
    """Share clipped in the last minibatch of each RL step, and eps, for each start and kind."""
    setup, loop, point = policies.begin(
        place,
        algorithm='experiments.claims.clip_band.clipped',
        model=policies.DENSE,
        rollout=dict(prompts=PROMPTS),
        minibatches=2 if place.fast else MINIBATCHES,
        optimizer=dict(learning_rate=RATE, warmup_steps=0),
    )
    c, out = setup.config, {}
    params = jax.tree.map(jnp.copy, point.state.params)  # updates give away what they had
    for start, eps in STARTS.items():
        for kind in ('adaptive', 'fixed'):
            held = {side: jnp.float32(eps) for side in ('low', 'high')}
            point = loop_lib.new_point(setup, loop, jax.tree.map(jnp.copy, params), None, 1)
            point = point._replace(state=dataclasses.replace(point.state, controllers=held))
            source = data.batches(setup.task.train, c.rollout.prompts, c.seed + 1)
            found: dict[str, Any] = {'share': [], 'eps': []}
            for step in range(1, 1 + (2 if place.fast else STEPS)):
                edge = [float(point.state.controllers[side]) for side in ('low', 'high')]
                done = reinforce.rl_step(setup, loop._replace(source=source), point, step)
                state = done.state
                if kind == 'fixed':
                    held = {side: jnp.float32(eps) for side in held}
                    state = dataclasses.replace(state, controllers=held)
                point = point._replace(state=state, step=step)
                found['share'].append(share_of(done, np.array(edge)))
                found['eps'].append(edge)
            out[f'{start}: {kind}'] = found
    return out


def share_of(done: reinforce.Step, edge: np.ndarray) -> float:
    """Share of the tokens with an advantage that the clip stops, in a step's last minibatch."""
    part = done.parts[-1]
    on = (np.asarray(part.mask) != 0) & (np.asarray(part.advantages) != 0)
    ratio = np.exp(np.asarray(done.logp_new[-1] - part.logp_old, np.float64))[on]
    stopped = masked.clip_stops(ratio, np.asarray(part.advantages)[on], edge[0], edge[1])
    return float(stopped.mean()) if on.any() else 0.0


def judge(seeds: list[Any]) -> Verdict:
    kinds = [f'{start}: {kind}' for start in STARTS for kind in ('adaptive', 'fixed')]
    last = {kind: spread(seeds, kind, 'share')[:, -LAST:].mean(1) for kind in kinds}
    middle = (BAND[1] - BAND[0]) / 2
    words, found = [], {}
    for start in STARTS:
        off = np.abs(last[f'{start}: adaptive'] - np.mean(BAND))
        found[start] = interval(off)
        words.append(decide(-found[start][1][1], -found[start][1][0], -middle))
    edges = {start: spread(seeds, f'{start}: adaptive', 'eps')[:, -1].mean() for start in STARTS}
    worst = max(STARTS, key=lambda start: found[start][0])
    by_kind = ', '.join(f'{kind.replace(": ", " and ")} {last[kind].mean():.1%}' for kind in kinds)
    return Verdict(
        together(*words),
        f'distance of the clipped share from 10 %, from the {worst} start, adaptive clip',
        *found[worst],
        f'Shares of the tokens that the clip stops in the last of {MINIBATCHES} minibatches, over '
        f'the last {LAST} of {STEPS} RL steps: {by_kind} ({BAND[0]:.0%} to {BAND[1]:.0%} was '
        f'asked of the adaptive ones). The controllers, at their default rate, took eps from '
        f'{STARTS["narrow"]:g} to {edges["narrow"]:.3f} and from {STARTS["wide"]:g} to '
        f'{edges["wide"]:.3f}: eps moves by half the distance of the share from its target, in '
        'log, each step. Whether the band is a good one to learn in is not measured here.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    share, edge = figure.subplots(1, 2)
    steps = np.arange(1, 1 + len(seeds[0]['narrow: fixed']['share']))
    for i, start in enumerate(STARTS):
        for style, kind in (('-', 'adaptive'), (':', 'fixed')):
            found = spread(seeds, f'{start}: {kind}', 'share')
            if kind == 'adaptive':
                line(share, steps, found, f'{start}, {kind}', COLOURS[i])
                sides = spread(seeds, f'{start}: {kind}', 'eps')
                line(edge, steps, sides[..., 0], f'{start} start, below 1', COLOURS[i])
                edge.plot(steps, sides[..., 1].mean(0), '--', color=COLOURS[i], label='above 1')
            else:
                share.plot(steps, found.mean(0), style, color=COLOURS[i], label=f'{start}, {kind}')
    share.axhspan(*BAND, color='#888888', alpha=0.2, lw=0)
    share.set(xlabel='RL step', ylabel='share of tokens clipped, last minibatch')
    edge.set(yscale='log', xlabel='RL step', ylabel='eps')
    for axis in (share, edge):
        axis.legend(frameon=False, fontsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
    tidy(share, edge)


CLAIM = Claim(
    text='An adaptive clip holds the share of clipped tokens at 5 to 15 %, from a narrow and from '
    'a wide start.',
    source='band of practice, unpublished',
    published='5 to 15 %',
    minutes=1.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
