"""New tokens per second of the lock-step sampler and the slot engine, and what top-p costs.

    python -m experiments.bench_sampling [--slots=8,64] [--vocab=8192,32768] [--rounds=3]

A dense model of 4 layers, width 256, random weights, without end of sequence: every row runs to a
limit of its own. `fixed`: all limits are `mean`. `long tail`: limits are quantiles of an
exponential with this mean, the longest 5 times the mean. Lock-step draws the rows in batches of as
many as the engine has slots, in the same order. All runs of one vocabulary, number of slots and mix
are interleaved and the median of `rounds` counts. The engine fills an eighth of the slots at once
and shrinks at the end of the queue. `useful` is the share of decode slots that drew a token, `cost`
what this top-p adds to the engine's time without truncation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from policyopt import models
from policyopt.sampling import Engine, EngineConfig, PerRow, SamplingConfig, sample

SLOTS = flags.DEFINE_list('slots', ['8', '64'], 'Rows that decode together.')
VOCAB = flags.DEFINE_list('vocab', ['8192', '32768'], 'Vocabulary sizes.')
MIXES = flags.DEFINE_list('mixes', ['fixed', 'long tail'], 'Mixes of lengths.')
TOP_P = flags.DEFINE_list('top_p', ['1', '.95'], '1 is no truncation.')
MEAN = flags.DEFINE_integer('mean', 32, 'Mean number of new tokens per row.', lower_bound=2)
BATCHES = flags.DEFINE_integer('batches', 8, 'Rows to draw, over slots.', lower_bound=1)
ROUNDS = flags.DEFINE_integer('rounds', 3, 'Rounds; the median counts.', lower_bound=1)
PROMPT = 16


class Case(NamedTuple):
    """What is timed together."""

    vocab: int
    slots: int
    mix: str


class Found(NamedTuple):
    """New tokens per second, and the share of useful slots."""

    speed: float
    useful: float


def limits_of(case: Case, mean: int, rows: int) -> np.ndarray:
    """New tokens of each row [rows]; the longest of the long tail is 5 * mean."""
    if case.mix == 'fixed':
        return np.full(rows, mean)
    quantiles = -np.log1p(-(np.arange(rows) + 0.5) / rows)
    limits = np.maximum(1, np.round(mean * quantiles)).astype(int)
    limits[-1] = 5 * mean
    return np.random.default_rng(0).permutation(limits)


def runs_of(case: Case, limits: np.ndarray, top_p: float) -> dict[str, Callable[[], float]]:
    """Name -> function that draws every row and returns the share of useful slots."""
    rows = len(limits)
    model = models.build(
        models.ModelConfig(
            vocab_size=case.vocab,
            embed_dim=256,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            mlp_dim=1024,
        )
    )
    params = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, case.vocab, (rows, PROMPT)).tolist()
    longest = int(limits.max())
    config = SamplingConfig(max_new_tokens=longest, top_p=top_p)
    sizes = EngineConfig(
        slots=case.slots,
        size=PROMPT + longest,
        refill=max(1, case.slots // 8),
        min_slots=1,
        prefill_rows=8,
        prefill_width=PROMPT,
        bucket=64,
    )
    keys = jax.random.split(jax.random.key(2), rows)

    def lock_step() -> float:
        steps = 0
        for at in range(0, rows, case.slots):
            part = slice(at, at + case.slots)
            per_row = PerRow(max_new_tokens=limits[part])
            jax.block_until_ready(
                sample(model, params, prompts[part], keys[part], config, per_row=per_row).tokens
            )
            steps += int(limits[part].max())
        return float(limits.sum()) / (steps * case.slots)

    def engine() -> float:
        slots = Engine(model, config, sizes)
        slots.submit(prompts, keys, per_row=PerRow(max_new_tokens=limits))
        while slots.busy:
            slots.step(params)
        return slots.stats.useful

    return {'lock-step': lock_step, 'engine': engine}


def measure(
    case: Case, tops: list[float], mean: int, batches: int, rounds: int
) -> dict[tuple[float, str], Found]:
    """(top-p, sampler) -> Found."""
    limits = limits_of(case, mean, batches * case.slots)
    runs = {(p, name): run for p in tops for name, run in runs_of(case, limits, p).items()}
    took: dict = {name: [] for name in runs}
    useful = {}
    for step in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            useful[name] = run()
            if step:  # the first round compiles
                took[name].append(time.perf_counter() - start)
    return {name: Found(limits.sum() / np.median(took[name]), useful[name]) for name in runs}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    table = Table(title='new tokens per second')
    columns = 'vocabulary slots lengths top-p lock-step useful engine useful ratio cost'.split()
    for column in columns:
        table.add_column(column, justify='right')
    tops = [float(p) for p in TOP_P.value]
    for vocab, slots, mix in itertools.product(VOCAB.value, SLOTS.value, MIXES.value):
        case = Case(int(vocab), int(slots), mix)
        found = measure(case, tops, MEAN.value, BATCHES.value, ROUNDS.value)
        for p in tops:
            slow, fast = found[p, 'lock-step'], found[p, 'engine']
            cells = [f'{slow.speed:.0f}', f'{slow.useful:.2f}']
            cells += [f'{fast.speed:.0f}', f'{fast.useful:.2f}', f'{fast.speed / slow.speed:.2f}']
            cells += [f'{found[tops[0], "engine"].speed / fast.speed - 1:+.0%}']
            table.add_row(*map(str, case), f'{p:g}', *cells)
            print(*case, f'{p:g}', *cells, flush=True)
    Console(width=100).print(table)


if __name__ == '__main__':
    app.run(main)
