"""Experts of the same tokens before and after one update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies
from experiments.claim import COLOURS, Claim, Place, Verdict, decide, interval, line, spread, tidy
from policyopt import reinforce

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
DEPTHS = (2, 4, 8)


def changed(before: Any, after: Any) -> Any:
    """1 - overlap / k over tokens that have experts: routing [B,T,L,k] twice -> [L]."""
    shared = jnp.sum(before[..., :, None] == after[..., None, :], axis=(-1, -2))
    fed = before[..., 0] >= 0
    return 1 - jnp.sum(jnp.where(fed, shared, 0), (0, 1)) / (
        jnp.sum(fed, (0, 1)) * before.shape[-1]
    )


def measure(place: Place) -> dict[str, Any]:
    """Share of experts that one GRPO update on 512 answers changes, over rates and depths.

    Adam's first step is proportional to the rate, so one update shows all of them.
    """
    out: dict[str, Any] = {}
    for depth in (1,) if place.fast else DEPTHS:
        setup, loop, point = policies.begin(
            place,
            minibatches=1,
            model=dict(num_layers=depth),
            optimizer=dict(learning_rate=RATES[-1], warmup_steps=0),
        )
        before = jax.tree.map(jnp.copy, point.state.params)
        done = reinforce.rl_step(setup, loop, point, 1)
        after, batch = done.state.params, done.parts[0]

        @jax.jit
        def look(share: Any, model=setup.model, before=before, after=after, batch=batch) -> Any:
            params = jax.tree.map(lambda a, b: a + share * (b - a), before, after)
            return jnp.mean(changed(*(_routing(model, p, batch) for p in (before, params))))

        out[str(depth)] = [float(look(rate / RATES[-1])) for rate in RATES]
    return out


def _routing(model: Any, params: Any, batch: Any) -> Any:
    valid = jnp.arange(batch.tokens.shape[1]) < batch.length[:, None]
    return model.hidden(params, batch.tokens, valid=valid).routing


def judge(seeds: list[Any]) -> Verdict:
    depths = list(seeds[0])
    deep, flat = spread(seeds, depths[-1]), spread(seeds, depths[0])
    mean, _ = interval(deep[:, 1])
    grows = np.diff(deep, axis=1).min(1) > 0
    value, (low, high) = interval(deep[:, -1] - deep[:, 0])
    more, more_interval = interval((deep - flat).mean(1))
    word = decide(low, high, 0.0)
    if word == 'reproduced' and not more_interval[0] > 0:
        word = 'inconclusive' if more_interval[1] > 0 else 'not reproduced'
    return Verdict(
        word,
        f'share of experts changed at {depths[-1]} layers, largest over smallest learning rate',
        value,
        (low, high),
        f'One update changes {mean:.1%} of the experts of {depths[-1]} layers at a learning rate '
        f'of {RATES[1]:g} and {deep[:, -1].mean():.1%} at {RATES[-1]:g}; it grows with every step '
        f'of the rate in {grows.sum()} of {len(seeds)} seeds. {depths[-1]} layers against '
        f'{depths[0]}: {more:+.2%} [{more_interval[0]:+.2%}, {more_interval[1]:+.2%}] over all '
        "rates. Adam's first step moves every weight by the rate, whatever the gradient: the "
        'published figure is of 48 layers and not comparable in size.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    for colour, depth in zip(COLOURS, seeds[0], strict=False):
        line(axis, RATES, spread(seeds, depth), f'{depth} layers', colour)
    axis.set(xscale='log', yscale='log', xlabel='learning rate', ylabel='share of experts changed')
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)


CLAIM = Claim(
    text='One update changes some of the experts of a token, more with depth and rate.',
    source='2507.18071',
    published='about 10 % of the activated experts, 48 layers',
    minutes=4,
    measure=measure,
    judge=judge,
    draw=draw,
)
