"""Noise of ratios against the length of answers, between two fixed policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import policies
from experiments.claim import COLOURS, Claim, Place, Verdict, interval, line, spread, tidy
from policyopt import data, recipe, reinforce, sampling, scoring

LENGTHS = (4, 8, 16, 32, 64, 128)
ROWS, RATE = 256, 1e-4


def measure(place: Place) -> dict[str, Any]:
    """Variance over answers of log s (mean log-ratio) and of their sum, by length.

    Answers are drawn from the warm-started policy without an end of sequence; the other policy is
    one GRPO update away.
    """
    optimizer = dict(learning_rate=RATE, warmup_steps=0)
    setup, loop, point = policies.begin(place, minibatches=1, optimizer=optimizer)
    before = jax.tree.map(jnp.copy, point.state.params)
    after = reinforce.rl_step(setup, loop, point, 1).state.params
    longest = LENGTHS[1] if place.fast else LENGTHS[-1]
    config = dataclasses.replace(setup.config.sampling, max_new_tokens=longest, eos_id=-1)
    drawn = _draw(setup, before, place, config)
    score = jax.jit(lambda params: scoring.score(setup.model, params, drawn).logp_new)
    gap = np.asarray(score(after) - drawn.logp_behavior, np.float64)
    mask, start = np.asarray(drawn.mask) != 0, np.asarray(drawn.prompt_length)
    rows = np.stack([g[s : s + longest] for g, s in zip(gap, start, strict=True)])
    assert mask.sum() == rows.size, 'answers of equal length'
    lengths = [n for n in LENGTHS if n <= longest]
    token = rows.var()
    return {
        'lengths': lengths,
        'log s': [float(rows[:, :n].mean(1).var(ddof=1)) for n in lengths],
        'log product': [float(rows[:, :n].sum(1).var(ddof=1)) for n in lengths],
        'independent': [float(token / n) for n in lengths],
    }


def _draw(setup: recipe.Setup, params: Any, place: Place, config: Any) -> Any:
    items = next(data.batches(setup.task.train, 8 if place.fast else ROWS, place.seed))
    prompts = [item.ids for item in items]
    return sampling.sample(setup.model, params, prompts, jax.random.key(place.seed), config)


def slopes(seeds: list[Any], name: str) -> np.ndarray:
    """Slope of log variance over log length for each seed."""
    x = np.log(seeds[0]['lengths'])
    return np.array([np.polyfit(x, np.log(numbers[name]), 1)[0] for numbers in seeds])


def judge(seeds: list[Any]) -> Verdict:
    value, found = interval(slopes(seeds, 'log s'))
    product, its = interval(slopes(seeds, 'log product'))
    if found[1] < 0 and found[0] > -2 and its[0] > 0:
        word = 'reproduced'
    else:
        word = 'not reproduced' if found[0] > 0 or its[1] < 0 else 'inconclusive'
    last = spread(seeds, 'log s')[:, -1] / spread(seeds, 'independent')[:, -1]
    return Verdict(
        word,
        'slope of log Var(log s) over log length (-1 for independent tokens)',
        value,
        found,
        f"The variance of GSPO's log-ratio, a mean over tokens, falls as length to the power "
        f'{value:.2f}, that of the product of all token ratios grows as length to the power '
        f'{product:.2f} [{its[0]:.2f}, {its[1]:.2f}], which is the same slope and 2. At '
        f'{seeds[0]["lengths"][-1]} tokens Var(log s) is {last.mean():.1f} times that of '
        'independent tokens, which measures how far the log-ratios of an answer go together.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axis = figure.subplots()
    lengths = seeds[0]['lengths']
    for colour, name in zip(COLOURS, ('log s', 'log product'), strict=False):
        line(axis, lengths, spread(seeds, name), f'Var({name})', colour)
    independent = spread(seeds, 'independent').mean(0)
    axis.plot(lengths, independent, 'k:', label='Var(log s), independent tokens')
    axis.set(xscale='log', yscale='log', xlabel='tokens of an answer', ylabel='variance')
    axis.set_xticks(lengths, lengths)
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    tidy(axis)


CLAIM = Claim(
    text="The noise of GSPO's ratio falls with the length of answers, that of a product grows.",
    source='2507.18071',
    published='-',
    minutes=1,
    measure=measure,
    judge=judge,
    draw=draw,
)
