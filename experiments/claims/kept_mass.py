"""Ratios of truncated samples, scored with and without the kept tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies
from experiments.claim import COLOURS, Claim, Place, Verdict, interval, line, spread, tidy
from policyopt import data, recipe, sampling, scoring

TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
ROWS = 512


def measure(place: Place) -> dict[str, Any]:
    """Mean log-ratio a token under unmoved parameters, and of what the nucleus keeps."""
    setup = recipe.prepare(policies.config(place))
    params = policies.warm(setup, place)
    items = next(data.batches(setup.task.train, 16 if place.fast else ROWS, place.seed))
    prompts = [item.ids for item in items]
    score = jax.jit(
        lambda params, batch, replay: (
            scoring.score(setup.model, params, batch, replay_support=replay).logp_new
        ),
        static_argnums=2,
    )
    out: dict[str, Any] = {'plain': [], 'replayed': [], 'mass': [], 'error': []}
    for top_p in TOP_P:
        config = dataclasses.replace(setup.config.sampling, top_p=top_p, support_size=14)
        drawn = sampling.sample(setup.model, params, prompts, jax.random.key(place.seed), config)
        on = drawn.mask != 0

        def mean(x: Any, on: Any = on) -> float:
            return float(jnp.sum(jnp.where(on, x, 0)) / jnp.sum(on))

        plain, replayed = (score(params, drawn, replay) for replay in (False, True))
        mass = drawn.logp_full - drawn.logp_behavior  # log of the kept share
        out['plain'].append(mean(plain - drawn.logp_behavior))
        out['replayed'].append(mean(jnp.abs(replayed - drawn.logp_behavior)))
        out['mass'].append(mean(mass))
        out['error'].append(mean(jnp.abs(plain - drawn.logp_behavior - mass)))
    return out


def judge(seeds: list[Any]) -> Verdict:
    value, found = interval(spread(seeds, 'plain')[:, 0])
    worst = max(spread(seeds, 'error').max(), spread(seeds, 'replayed').max())
    right = worst < 1e-5 and found[1] < 0
    return Verdict(
        'reproduced' if right else 'not reproduced',
        f'mean log-ratio a token at top-p {TOP_P[0]:g} without replay, parameters unmoved',
        value,
        found,
        f'Without replay the ratio of a token is the share that its nucleus keeps: at top-p '
        f'{TOP_P[0]:g} the mean log-ratio is {value:.3f} before any update, at {TOP_P[-1]:g} '
        f'{spread(seeds, "plain")[:, -1].mean():.4f}. With the kept ids replayed it is 0. Both '
        f'hold to {worst:.1e} a token on average.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    line(axis, TOP_P, spread(seeds, 'plain'), 'without replay', COLOURS[1])
    line(axis, TOP_P, spread(seeds, 'replayed'), 'kept ids replayed', COLOURS[0])
    mass = np.mean(spread(seeds, 'mass'), axis=0)
    axis.plot(TOP_P, mass, 'k:', label='log of the kept share')
    axis.set(xlabel='top-p', ylabel='mean log-ratio of a token')
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)


CLAIM = Claim(
    text='Truncated sampling without replay biases the ratio by the kept mass.',
    source='2512.02556',
    published='-',
    minutes=0.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
