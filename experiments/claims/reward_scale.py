"""Rewards of several kinds and sizes: the largest advantages, and what is clipped after them."""

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
from experiments.variants import digits
from policyopt import advantages, recipe, rollout, sharding, types
from policyopt.drawing import answers_of

KINDS = ('right or wrong', 'sparse', 'digits', 'unbounded')
# How advantages are normalised: the estimator, and what is done with each minibatch.
FORMS = {
    'standard deviation': (advantages.group_zscore(), types.identity),
    'none': (advantages.group_mean_baseline(), types.identity),
    'minibatch': (advantages.group_mean_baseline(), advantages.normalise_minibatch()),
}
SCALE = 100.0
SPARSE = 6  # right answers of which one is rewarded
PROMPTS, MINIBATCHES, RATE = 32, 4, 1e-4  # of 8 answers each
MOVED = np.log10(1.1)  # what counts as moved: a tenth


def rewards(kind: str, batch: Any, tokenizer: Any, seed: int) -> np.ndarray:
    """Rewards of all answers: [B] float32.

    Sparse ones are for one right answer of six, at random. Unbounded ones are 1 or 0 with normal
    noise of half that, times a log-normal factor for each problem, as where problems are scored in
    units of their own.
    """
    rng = np.random.default_rng((seed, 5))
    said = answers_of(batch, tokenizer)
    width = np.asarray(batch.prompt_length)
    prompts = [
        tokenizer.decode(t[:n]) for t, n in zip(np.asarray(batch.tokens), width, strict=True)
    ]
    sums = [str(sum(map(int, prompt.rstrip('=').split('+')))) for prompt in prompts]
    right = np.array([a == b for a, b in zip(said, sums, strict=True)], np.float32)
    kept, noise = rng.random(len(right)) < 1 / SPARSE, rng.normal(size=len(right))
    unit = np.exp(rng.normal(size=int(batch.group.max()) + 1))[np.asarray(batch.group)]
    return {
        'right or wrong': right,
        'sparse': right * kept,
        'digits': np.array([digits(a, b) for a, b in zip(said, sums, strict=True)]),
        'unbounded': unit * (right + noise / 2),
    }[kind].astype(np.float32)


def measure(place: Place) -> dict[str, Any]:
    """One GRPO step on the same answers, by each kind of reward and each normalisation.

    Where rewards are normalised their scale changes nothing but rounding, so that only the
    advantages are looked at.
    """
    setup, loop, point = policies.begin(
        place,
        algorithm_kw=dict(beta=0.0),
        model=policies.DENSE,
        minibatches=2 if place.fast else MINIBATCHES,
        rollout=dict(prompts=PROMPTS),
        optimizer=dict(learning_rate=RATE, warmup_steps=0),
    )
    params, key = point.state.params, point.state.key
    drawn = loop.collect(point.state, None, loop.source, jax.random.fold_in(key, 1)).rollout
    out: dict[str, Any] = {'rate': {}}
    learners = {
        prepare: recipe.make_learner(
            setup._replace(algorithm=setup.algorithm._replace(prepare=prepare))
        )
        for prepare in {prepare for _, prepare in FORMS.values()}
    }
    for name, (estimate, prepare) in FORMS.items():
        learner = learners[prepare]
        for kind in KINDS:
            given = rewards(kind, drawn, setup.model.tokenizer, place.seed)
            out['rate'][kind] = float((given > 0).mean())
            for scale in (1.0, SCALE):
                batch = dataclasses.replace(drawn, rewards=given * np.float32(scale))
                batch = rollout.to_batch(batch, np.asarray(estimate(batch).advantages))
                parts = rollout.minibatches(batch, setup.config.minibatches)
                largest = max(float(jnp.max(jnp.abs(prepare(p).advantages))) for p in parts)
                found = {'largest': largest}
                if scale == 1 or name == 'none':
                    state = learner.init(jax.tree.map(jnp.copy, params), key)
                    frozen = types.Mean(total=0.0, count=0.0)
                    for i, part in enumerate(parts):
                        state, values, _ = learner.update(
                            state, sharding.feed(part, setup.model.rules)
                        )
                        frozen = frozen + values['policy/frozen'] if i else frozen
                    found['clipped'] = float(frozen.value)
                out[f'{name}: {kind}: {scale:g}'] = found
    return out


def values(seeds: list[Any], form: str, scale: float, what: str) -> np.ndarray:
    """[seeds, kinds]."""
    return np.stack([spread(seeds, f'{form}: {k}: {scale:g}', what) for k in KINDS], axis=1)


def moved(seeds: list[Any], form: str, what: str, floor: float) -> np.ndarray:
    """Decades from the reward to SCALE times it: [seeds, kinds]; numbers below the floor are it."""
    small, large = (np.maximum(values(seeds, form, s, what), floor) for s in (1, SCALE))
    return np.log10(large / small)


def judge(seeds: list[Any]) -> Verdict:
    grown = moved(seeds, 'none', 'largest', 1e-6).mean(1)
    _, growth = interval(grown)
    value, found = interval(np.abs(moved(seeds, 'none', 'clipped', 1e-4)).mean(1))
    steady = max(np.abs(moved(seeds, f, 'largest', 1e-6)).max() for f in FORMS if f != 'none')
    at = {form: values(seeds, form, 1, 'largest').mean(0) for form in FORMS}
    clipped = {form: values(seeds, form, 1, 'clipped').mean(0) for form in FORMS}
    by_form = '; '.join(
        f'{form}: '
        + ', '.join(f'{a:.2g} and {c:.1%}' for a, c in zip(at[form], clipped[form], strict=True))
        for form in FORMS
    )
    return Verdict(
        together(decide(*growth, MOVED), decide(*found, MOVED)),
        f'decades that the clipped share moves by for {SCALE:g} times the reward, no normalisation',
        value,
        found,
        f'With {SCALE:g} times the reward the largest |A| grows by 10^{grown.mean():.2f} without '
        f'normalisation, by 10^{steady:.2f} at most with one. The share of clipped tokens moves by '
        f'10^{value:.3f} (10^{MOVED:.3f}, a tenth, was asked), with Adam after a cut of the '
        f'gradient to norm 1. Largest |A| and clipped share for rewards '
        f'that are {", ".join(KINDS)}: {by_form}. One step of {MINIBATCHES} minibatches on the '
        f'same {8 * PROMPTS} answers, the clipped share in those after the first.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axes = figure.subplots(1, 2)
    rows = [(form, 1) for form in FORMS] + [('none', SCALE)]
    for axis, what in zip(axes, ('largest', 'clipped'), strict=True):
        for i, (colour, (form, scale)) in enumerate(zip(COLOURS, rows, strict=False)):
            found = values(seeds, form, scale, what)
            label = form if scale == 1 else f'{form}, {scale:g} times the reward'
            x = np.arange(len(KINDS)) + (i - 1.5) * 0.18
            low, high = found.mean(0) - found.min(0), found.max(0) - found.mean(0)
            axis.errorbar(x, found.mean(0), (low, high), fmt='o', color=colour, ms=4, label=label)
        axis.set_xticks(range(len(KINDS)), KINDS, fontsize=7, rotation=20)
    axes[0].set(yscale='log', ylabel='largest |A|')
    axes[1].set(ylabel='share of tokens clipped', ylim=(0, None))
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc='outside upper center',
        ncols=4,
        frameon=False,
        fontsize=7,
    )
    tidy(*axes)


CLAIM = Claim(
    text='Without normalisation the largest advantage and the share of clipped tokens move with '
    'the scale of rewards.',
    source='2402.03300, 2506.10910',
    published='-',
    minutes=1,
    measure=measure,
    judge=judge,
    draw=draw,
)
