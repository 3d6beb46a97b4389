"""Noise of ratios of a mixture of experts, with routing live, recomputed and replayed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies
from experiments.claim import COLOURS, Claim, Place, Verdict, decide, interval, line, spread, tidy
from policyopt import rollout, scoring, sharding

MODES = ('none', 'recompute', 'rollout')
SAMPLERS = ('same', 'mismatched')
SPLITS = (1, 2, 4, 8)
PROMPTS, RATE = 32, 1e-4
NEEDED = np.log(1.1)  # what counts as noisier: a tenth


def measure(place: Place) -> dict[str, Any]:
    """Variances of log-ratios over the minibatches after the first of a GRPO step, or in the one.

    Token ratios, which GRPO clips, and their means over answers, the log of GSPO's ratio, under
    GRPO's updates. The same answers for all modes and numbers of minibatches, from the trainer's
    own forward pass or from a mismatched sampler.
    """
    setup, loop, point = policies.begin(
        place,
        algorithm_kw=dict(beta=0.0),
        rollout=dict(prompts=PROMPTS),
        replay=dict(support=True, routing='recompute'),
        logp_old='recomputed',
        optimizer=dict(learning_rate=RATE, warmup_steps=0),
    )
    params, key = point.state.params, point.state.key
    loops = {'same': loop, 'mismatched': policies.mismatched(setup, loop, place.seed)}
    score = jax.jit(lambda params, batch: scoring.score(setup.model, params, batch).logp_new)
    out: dict[str, Any] = {}
    for sampler in SAMPLERS:
        one = loops[sampler]
        drawn = one.collect(point.state, None, one.source, jax.random.fold_in(key, 1)).batch
        live = policies.unrecorded(drawn, setup.model.config.vocab_size, routing=True)
        batches = {
            'none': live,
            'recompute': jax.device_get(loop.learner.recompute(params, live)),
            'rollout': drawn,
        }
        for mode in MODES:
            batch = batches[mode]
            found = [variances([(score(params, batch) - batch.logp_old, batch.mask != 0)])]
            for count in SPLITS[1:2] if place.fast else SPLITS[1:]:
                state = loop.learner.init(jax.tree.map(jnp.copy, params), key)
                gaps = []
                for part in rollout.minibatches(batch, count):
                    state, _, logp_new = loop.learner.update(
                        state, sharding.feed(part, setup.model.rules)
                    )
                    gaps.append((logp_new - part.logp_old, part.mask != 0))
                found.append(variances(gaps[1:]))
            out[f'{sampler}: {mode}'] = {n: [f[n] for f in found] for n in found[0]}
    return out


def variances(gaps: list[tuple[Any, Any]]) -> dict[str, float]:
    """Of log-ratios over tokens, and of their means over answers; pairs of log-ratio and mask."""
    log_ratio, mask = (
        np.concatenate([np.asarray(x) for x in xs]) for xs in zip(*gaps, strict=True)
    )
    log_ratio = log_ratio.astype(np.float64)
    kept = mask.any(1)
    rows = np.where(mask, log_ratio, 0).sum(1)[kept] / mask.sum(1)[kept]
    return {'token': float(log_ratio[mask].var()), 'sequence': float(rows.var())}


def judge(seeds: list[Any]) -> Verdict:
    def over(sampler: str, mode: str, level: str, split: int) -> tuple[float, tuple[float, float]]:
        a, b = (spread(seeds, f'{sampler}: {m}', level)[:, split] for m in (mode, 'rollout'))
        return interval(np.log(a / b))

    def percent(found: tuple[float, tuple[float, float]]) -> str:
        mean, low, high = (np.expm1(x) for x in (found[0], *found[1]))
        return f'{mean:+.1%} [{low:+.1%}, {high:+.1%}]'

    value, found = over('same', 'none', 'token', -1)
    many = f'{SPLITS[-1]} minibatches'
    least = spread(seeds, 'same: rollout', 'token')[:, -1].mean()
    return Verdict(
        decide(*found, NEEDED),
        f'log of Var(log w) at {many}, live routing over replayed',
        value,
        found,
        f"GRPO's Var(log w) over the minibatches after the first of {many} is {least:.3g} with the "
        f"sampler's experts replayed. Live routing changes it by "
        f'{percent(over("same", "none", "token", -1))} (a tenth more was asked), at 2 minibatches '
        f"by {percent(over('same', 'none', 'token', 1))}; the variance of GSPO's log-ratio by "
        f'{percent(over("same", "none", "sequence", -1))}. Where the sampler computes in bfloat16 '
        'with noise on its routers, live routing changes Var(log w) by '
        f'{percent(over("mismatched", "none", "token", -1))} at {many} and by '
        f'{percent(over("mismatched", "none", "token", 0))} before any update; recomputed routing '
        f'and log-probs by {percent(over("mismatched", "recompute", "token", -1))} at {many}. '
        f'Learning rate {RATE:g}, answers of four tokens, 8 experts in 4 layers.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    splits = SPLITS[: len(seeds[0]['same: none']['token'])]
    for axis, sampler in zip(axes, SAMPLERS, strict=True):
        for colour, mode in zip(COLOURS, MODES, strict=False):
            for level in ('token', 'sequence'):
                found = np.maximum(spread(seeds, f'{sampler}: {mode}', level), 1e-12)
                if level == 'token':
                    line(axis, splits, found, mode, colour)
                else:
                    axis.plot(splits, found.mean(0), '--', color=colour)
        # Where log-ratios are rounding, as before any update, lines leave by the bottom.
        axis.set(xscale='log', yscale='log', xlabel='minibatches', ylim=(3e-4, 0.2))
        axis.set_title(f'{sampler} sampler', fontsize=9)
        axis.set_xticks(splits, splits)
        axis.minorticks_off()
    axes[0].set_ylabel('variance of log-ratios\n(dashed: of their means over answers)', fontsize=8)
    axes[0].legend(frameon=False, fontsize=8, title='routing replay', title_fontsize=8, loc=2)
    tidy(*axes)


CLAIM = Claim(
    text="Routing replay lowers the variance of GRPO's token ratios on a mixture of experts.",
    source='2507.18071, 2512.01374',
    published='-',
    minutes=1.5,
    measure=measure,
    judge=judge,
    draw=draw,
)
