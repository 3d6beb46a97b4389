"""First ratios and gradients where the sampler is not the trainer, with and without masks."""

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
    spread,
    tidy,
    together,
)
from policyopt import recipe, rollout, scoring, sharding, updates
from policyopt.optimizer import norm

# What is on: kept ids (the sampling mask), experts (keep routing), the off-policy mask.
ARMS = {
    'none': (False, False, False),
    'kept ids': (True, False, False),
    'experts': (False, True, False),
    'off-policy mask': (False, False, True),
    'all three': (True, True, True),
}
PROMPTS, MINIBATCHES, RATE, TOP_P = 32, 8, 1e-4, 0.9
QUANTILE = 0.999
EXERCISED = 0.01  # least share of answers that the off-policy mask has to stop to be judged
UNLIKELY = 1e3  # nats
LOWER = np.log(0.95)  # what counts as lower: a twentieth


def measure(place: Place) -> dict[str, Any]:
    """Gradient norms of single answers in the minibatches of a step; log-ratios before the first.

    Answers are drawn once, by a sampler in bfloat16 with noise on its routers, and learnt from by
    GRPO with each of the masks; another draw without mismatch shows that ratios are 1.
    """
    setup, loop, point = policies.begin(
        place,
        algorithm_kw=dict(beta=0.0, gates=['off_policy_sequence']),
        sampling=dict(top_p=TOP_P, support_size=8),
        minibatches=2 if place.fast else MINIBATCHES,
        rollout=dict(prompts=PROMPTS),
        optimizer=dict(learning_rate=RATE, warmup_steps=0),
    )
    params, key = point.state.params, point.state.key
    score = jax.jit(lambda params, batch: scoring.score(setup.model, params, batch).logp_new)
    init, run = make_run(setup)
    drawn = {
        name: one.collect(
            point.state, None, loop.source, jax.random.fold_in(key, 1), version=0
        ).batch
        for name, one in (
            ('same', loop),
            ('mismatched', policies.mismatched(setup, loop, place.seed)),
        )
    }
    out: dict[str, Any] = {}
    for name, (support, routing, gated) in ARMS.items():
        whole = {
            sampler: policies.unrecorded(
                batch, setup.model.config.vocab_size, support=not support, routing=not routing
            )
            for sampler, batch in drawn.items()
        }
        gaps = {
            sampler: (np.asarray(score(params, batch)) - batch.logp_old)[batch.mask != 0]
            for sampler, batch in whole.items()
        }
        batch, norms = whole['mismatched'], []
        if not gated:  # no answer has drifted from a sampler that gave all of them next to nothing
            batch = dataclasses.replace(batch, logp_behavior=batch.logp_behavior - UNLIKELY)
        state = init(jax.tree.map(jnp.copy, params), key)
        for part in rollout.minibatches(batch, setup.config.minibatches):
            state, found = run(state, sharding.feed(part, setup.model.rules))
            norms.append(np.asarray(found))
        norms = np.concatenate(norms)
        out[name] = {
            'same': float(np.abs(gaps['same']).max()),
            'log-ratio': float(gaps['mismatched'].std()),
            'bias': float(gaps['mismatched'].mean()),
            'largest': float(np.quantile(norms, QUANTILE)),
            'mean': float(norms.mean()),
            'zero': float((norms == 0).mean()),
        }
    return out


def make_run(setup: recipe.Setup) -> tuple[Any, Any]:
    """init, and (state, minibatch) -> state after an update and norms [B] of its rows before."""
    algorithm = setup.algorithm
    learner = recipe.make_learner(setup)

    @jax.jit
    def norms(params: Any, part: Any) -> Any:
        def one(row: Any) -> Any:
            row = jax.tree.map(lambda x: x[None], row)

            def loss(params: Any) -> Any:
                inputs = updates.loss_inputs(row, scoring.score(setup.model, params, row))
                return algorithm.loss.apply(inputs, algorithm.loss.weigh(row)).loss

            return norm(jax.grad(loss)(params))

        return jax.lax.map(one, part)

    def run(state: Any, part: Any) -> tuple[Any, Any]:
        found = norms(state.params, part)
        return learner.update(state, part)[0], found

    return learner.init, run


def judge(seeds: list[Any]) -> Verdict:
    base = spread(seeds, 'none', 'largest')
    change = {n: interval(np.log(spread(seeds, n, 'largest') / base)) for n in ARMS if n != 'none'}
    exact = spread(seeds, 'all three', 'same').max()
    masked = spread(seeds, 'off-policy mask', 'zero') - spread(seeds, 'none', 'zero')
    words = [decide(-change[n][1][1], -change[n][1][0], -LOWER) for n in change]
    if masked.mean() < EXERCISED:  # it had next to nothing to do, which says nothing of it
        words[list(change).index('off-policy mask')] = 'inconclusive'
    if exact > 1e-5:
        words.append('not reproduced')
    ratio = {name: spread(seeds, name, 'log-ratio').mean() for name in ARMS}
    by_arm = '; '.join(
        f'{n} {np.expm1(change[n][0]):+.0%} [{np.expm1(change[n][1][0]):+.0%}, '
        f'{np.expm1(change[n][1][1]):+.0%}]'
        for n in change
    )
    value, found = change['all three']
    return Verdict(
        together(*words),
        f'log of the {QUANTILE:.1%} quantile of gradient norms, all three masks over none',
        value,
        found,
        'Without a mismatch the first log-ratio is 0 with kept ids and experts replayed, to '
        f'{exact:.0e} at most. With a sampler in bfloat16 and noise on its routers the standard '
        f'deviation of first log-ratios is {ratio["none"]:.3f} without replay, '
        f'{ratio["kept ids"]:.3f} with kept ids, {ratio["experts"]:.3f} with experts and '
        f'{ratio["all three"]:.4f} with both, at top-p {TOP_P:g}. The {QUANTILE:.1%} quantile of '
        f'the gradient norms of {8 * PROMPTS} single answers, nearly their largest, over '
        f'{MINIBATCHES} updates: {by_arm} (each was asked to lower it by a twentieth). The '
        f'off-policy mask took the gradient of {masked.mean():.1%} more of the answers: of it this '
        'says nothing.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    names = list(ARMS)[::-1]
    for axis, what, label in zip(
        axes,
        ('log-ratio', 'largest'),
        ('spread of first log-ratios', f'{QUANTILE:.1%} quantile of gradient norms'),
        strict=True,
    ):
        for i, name in enumerate(names):
            found = spread(seeds, name, what)
            colour = COLOURS[list(ARMS).index(name)]
            axis.plot(found, np.full(len(found), i), 'o', color=colour, ms=4, alpha=0.5)
            axis.plot(found.mean(), i, '|', color=colour, ms=16, mew=2)
        axis.set_yticks(range(len(names)), names)
        axis.set(xlabel=label, ylim=(-0.5, len(names) - 0.5))
        axis.set_xlim(0, 1.08 * max(spread(seeds, name, what).max() for name in names))
    tidy(*axes)


CLAIM = Claim(
    text='Where the sampler is not the trainer, the off-policy mask, the sampling mask and kept '
    'routing each lower the largest gradients.',
    source='2512.02556',
    published='-',
    minutes=1.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
