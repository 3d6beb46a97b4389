"""What SAPO assumes of ratios, for a dense policy and for one with experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies
from experiments.claim import COLOURS, Claim, Place, Verdict, decide, interval, spread, tidy
from policyopt import losses, reinforce

MODELS = {'dense': policies.DENSE, 'mixture': policies.MIXTURE}
MINIBATCHES, RATE, TAU = 8, 1e-4, 1.0
BINS = np.linspace(-0.5, 0.5, 81)


def gate(log_ratio: Any) -> np.ndarray:
    """SAPO's weight of a token, sech^2(tau (w - 1) / 2), w = exp(log_ratio); float64.

    It is the slope of its surrogate in w where the advantage is 1.
    """
    surrogate = losses.soft_gated(TAU, TAU)
    with jax.enable_x64(True):
        at = jnp.asarray(log_ratio, jnp.float64)
        slope = jax.grad(lambda x: jnp.sum(surrogate(x, jnp.ones_like(x))))(at)
        return np.asarray(slope / jnp.exp(at))


def measure(place: Place) -> dict[str, Any]:
    """Log-ratios of the later minibatches of a SAPO step; gates of tokens and of sequences."""
    out: dict[str, Any] = {}
    for name, model in MODELS.items():
        setup, loop, point = policies.begin(
            place,
            algorithm='sapo',
            model=model,
            replay=dict(support=True, routing='rollout' if model['moe'] else None),
            minibatches=2 if place.fast else MINIBATCHES,
            optimizer=dict(learning_rate=RATE, warmup_steps=0),
        )
        done = reinforce.rl_step(setup, loop, point, 1)
        rows, masks = [], []
        for part, logp_new in zip(done.parts[1:], done.logp_new[1:], strict=True):
            masks.append(np.asarray(part.mask) != 0)
            rows.append(np.where(masks[-1], np.asarray(logp_new) - np.asarray(part.logp_old), 0))
        out[name] = summary(np.concatenate(rows).astype(np.float64), np.concatenate(masks))
    return out


def summary(log_ratio: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
    """Histogram of log-ratios [B,T]; their variance in each row; the gap of gates and its bound.

    The gap of a row is the difference of its mean token gate and the gate at its mean log-ratio,
    which is what SAPO takes for a sequence; its bound, where w - 1 is about log w, is tau^2 / 4
    times the row's variance.
    """
    count = np.maximum(mask.sum(1), 1)
    mean = log_ratio.sum(1) / count
    variance = np.where(mask, (log_ratio - mean[:, None]) ** 2, 0).sum(1) / count
    token = np.where(mask, gate(log_ratio), 0).sum(1) / count
    gap, bound = np.abs(token - gate(mean)), TAU**2 / 4 * variance
    used = (mask.sum(1) > 1) & (bound > 1e-8)
    return {
        'histogram': np.histogram(log_ratio[mask], BINS, density=True)[0].tolist(),
        'near': float((np.abs(np.exp(log_ratio[mask]) - 1) < 0.1).mean()),
        'narrow': float((variance[used] < 0.02).mean()),
        'variance': float(variance[used].mean()),
        'gap over bound, median and .95': np.quantile(
            gap[used] / bound[used], [0.5, 0.95]
        ).tolist(),
    }


def judge(seeds: list[Any]) -> Verdict:
    wide, (low, high) = interval(
        np.log(spread(seeds, 'mixture', 'variance') / spread(seeds, 'dense', 'variance'))
    )
    narrow = {name: spread(seeds, name, 'narrow').mean() for name in MODELS}
    gaps = {name: spread(seeds, name, 'gap over bound, median and .95').mean(0) for name in MODELS}
    near = {name: spread(seeds, name, 'near').mean() for name in MODELS}
    word = decide(low, high, 0.0)
    if word == 'reproduced' and min(narrow.values()) < 0.5:
        word = 'not reproduced'
    return Verdict(
        word,
        'log of the within-row variance, mixture over dense',
        wide,
        (low, high),
        f'Within {RATE:g} a step and {MINIBATCHES} minibatches {near["dense"]:.0%} of the tokens '
        f'of the dense policy and {near["mixture"]:.0%} of the mixture have a ratio within .1 of '
        f'1; {narrow["dense"]:.0%} and {narrow["mixture"]:.0%} of the rows have a variance below '
        f'.02. The gap between token gates and the gate of the sequence, over tau^2/4 times the '
        f'variance, is {gaps["dense"][0]:.2f} in the middle and {gaps["dense"][1]:.2f} at the 95th '
        f'percentile of rows for the dense policy, {gaps["mixture"][0]:.2f} and '
        f'{gaps["mixture"][1]:.2f} for the mixture: it holds where ratios are near 1 only. What '
        'counts here is that the mixture is wider and that most rows are narrow.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    middle = (BINS[1:] + BINS[:-1]) / 2
    for colour, name in zip(COLOURS, MODELS, strict=False):
        height = spread(seeds, name, 'histogram').mean(0)
        axis.step(middle, np.maximum(height, 1e-4), where='mid', color=colour, label=name)
    axis.set(yscale='log', xlabel='log-ratio of a token', ylabel='density')
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)


CLAIM = Claim(
    text='Ratios stay near 1 and vary little within an answer, more so without experts.',
    source='2511.20347',
    published='within-row variance mostly below .02',
    minutes=2,
    measure=measure,
    judge=judge,
    draw=draw,
)
