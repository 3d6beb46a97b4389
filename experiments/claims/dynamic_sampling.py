"""Parts of DAPO, each by its own measure: groups with a gradient, entropy, noise of rewards."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from experiments import policies
from experiments.claim import (
    COLOURS,
    Claim,
    Place,
    Verdict,
    decide,
    interval,
    spread,
    tidy,
    together,
)
from policyopt import loop as loop_lib
from policyopt import reinforce, scoring, shaping
from policyopt.types import identity, keep_all

PROMPTS, MINIBATCHES, RATE = 32, 4, 1e-4
STEPS = 4  # of 4 updates each
HIGHS = {'clip-higher': 0.28, 'symmetric': 0.2}
PENALTY = dict(max_length=4, cache=2)  # tokens, end included: answers of 3 lose .5, of 4 lose 1


def measure(place: Place) -> dict[str, Any]:
    """DAPO with and without dynamic sampling; 16 updates with both clips; rewards of one batch."""
    out: dict[str, Any] = {}
    for name, high in HIGHS.items():
        setup, loop, point = policies.begin(
            place,
            algorithm='dapo',
            algorithm_kw=dict(high=high, **PENALTY),
            model=policies.DENSE,
            rollout=dict(prompts=PROMPTS),
            minibatches=2 if place.fast else MINIBATCHES,
            optimizer=dict(learning_rate=RATE, warmup_steps=0),
        )
        plain = setup._replace(algorithm=setup.algorithm._replace(keep=keep_all, shape=identity))
        key = jax.random.fold_in(point.state.key, 0)
        start = loop_lib.make_loop(plain, place.folder, None, loop.stop)
        fixed = start.collect(point.state, None, start.source, key)
        score = jax.jit(functools.partial(scoring.score, setup.model))
        before = entropy_of(score(point.state.params, fixed.batch), fixed.batch)
        found: dict[str, Any] = {'kept': [], 'drawn': []}
        for step in range(1, 1 + (1 if place.fast else STEPS)):
            done = reinforce.rl_step(setup, loop, point, step)
            point = point._replace(state=done.state, step=step)
            found['kept'].append(mixed(done.parts))
            found['drawn'].append(done.values['rollout/rows'])
        found['entropy'] = entropy_of(score(point.state.params, fixed.batch), fixed.batch) - before
        found['start'] = before
        out[name] = found
    out['plain'] = {'kept': mixed([fixed.batch]), 'noise': noise(fixed.rollout)}
    return out


def entropy_of(scores: Any, batch: Any) -> float:
    """Mean over the tokens of the mask."""
    return float(np.asarray(scores.entropy)[np.asarray(batch.mask) != 0].mean())


def mixed(parts: list[Any]) -> float:
    """Share of the groups, of a batch in parts, whose answers have an advantage."""
    group, mask, advantages = (
        np.concatenate([np.asarray(getattr(part, name)) for part in parts])
        for name in ('group', 'mask', 'advantages')
    )
    used = mask.any(1)  # rows that fill up a batch have no mask
    on = np.any((mask != 0) & (advantages != 0), axis=1)
    return float(np.mean([on[group == one].any() for one in np.unique(group[used])]))


def noise(rollout: Any) -> dict[str, float]:
    """Share of the variance of rewards within groups that is between equally right answers."""
    shaped = shaping.soft_overlong(**PENALTY)(rollout)
    right, group = np.asarray(rollout.positive) != 0, np.asarray(rollout.group)
    out = {}
    for name, rewards in (('hard', rollout.rewards), ('soft', shaped.rewards)):
        rewards = np.asarray(rewards, np.float64)
        whole = sum(rewards[group == g].var() for g in np.unique(group))
        within = sum(
            np.mean((group == g) & (right == side))
            / np.mean(group == g)
            * rewards[(group == g) & (right == side)].var()
            for g in np.unique(group)
            for side in (False, True)
            if ((group == g) & (right == side)).any()
        )
        out[name] = float(within / whole) if whole else 0.0
    return out


def judge(seeds: list[Any]) -> Verdict:
    value, found = interval(
        spread(seeds, 'clip-higher', 'entropy') - spread(seeds, 'symmetric', 'entropy')
    )
    kept = spread(seeds, 'clip-higher', 'kept').mean(1)
    more, gain = interval(kept - spread(seeds, 'plain', 'kept'))
    drawn = spread(seeds, 'clip-higher', 'drawn').mean() / (PROMPTS * 8)
    ends = {name: spread(seeds, name, 'entropy').mean() for name in HIGHS}
    hard, soft = (spread(seeds, 'plain', 'noise', kind).mean() for kind in ('hard', 'soft'))
    word = 'reproduced' if found[0] > 0 else 'not reproduced' if found[1] < 0 else 'inconclusive'
    return Verdict(
        together(decide(*gain, 0.1), word),
        f'entropy change over {STEPS * MINIBATCHES} updates, clip-higher less symmetric, nats',
        value,
        found,
        f'With dynamic sampling {kept.mean():.1%} of the groups have a gradient, '
        f'{100 * more:.0f} [{100 * gain[0]:.0f}, {100 * gain[1]:.0f}] points more than without (10 '
        f'were asked), for {drawn:.1f} times the answers. On fixed answers the entropy of '
        f'{spread(seeds, "symmetric", "start").mean():.3f} nats a token changes by '
        f'{ends["clip-higher"]:+.4f} with clip-higher and by {ends["symmetric"]:+.4f} with .2 on '
        f'both sides, in {STEPS * MINIBATCHES} updates at a rate of {RATE:g}. The soft length '
        f'penalty puts {soft:.1%} of the variance of rewards within groups between answers that '
        f'are equally right, where there was {hard:.1%}: right answers fit the limit here, so '
        'that none is cut off, which is the noise that the penalty is to lower; that part of DAPO '
        'is not tested.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    kept, entropy, variance = figure.subplots(1, 3)
    panels = (
        (
            kept,
            'groups with a gradient',
            {
                'all kept': spread(seeds, 'plain', 'kept'),
                'dynamic\nsampling': spread(seeds, 'clip-higher', 'kept').mean(1),
            },
        ),
        (
            entropy,
            'change of entropy, nats',
            {n.replace('-', '-\n'): spread(seeds, n, 'entropy') for n in HIGHS},
        ),
        (
            variance,
            'share of variance within groups\nbetween equally right answers',
            {
                'outcome\nalone': spread(seeds, 'plain', 'noise', 'hard'),
                'with soft\npenalty': spread(seeds, 'plain', 'noise', 'soft'),
            },
        ),
    )
    for axis, label, columns in panels:
        for i, (colour, found) in enumerate(zip(COLOURS, columns.values(), strict=False)):
            axis.plot(np.full(len(found), i), found, 'o', color=colour, ms=4, alpha=0.5)
            axis.plot(i, found.mean(), '_', color=colour, ms=24, mew=2)
        axis.set(xlim=(-0.6, 1.6))
        axis.set_xticks((0, 1), columns, fontsize=8)
        axis.set_ylabel(label, fontsize=8)
        axis.tick_params(axis='y', labelsize=7)
    kept.set_ylim(0, 1.05)
    variance.set_ylim(0, None)
    tidy(kept, entropy, variance)


CLAIM = Claim(
    text='Dynamic sampling leaves no group without a gradient, and clip-higher keeps more entropy.',
    source='2503.14476',
    published='ladder of 30, 36, 38, 41, 42, 50',
    minutes=1,
    measure=measure,
    judge=judge,
    draw=draw,
)
