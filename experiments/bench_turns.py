"""How busy slots are while environments think, with and without parking, and what parking costs.

    python -m experiments.bench_turns [--slots=8] [--rows=64] [--mean=.05]

A dense model of 4 layers, width 128, random weights. A turn ends with one of a sixteenth of the
vocabulary; a row has 3 turns at most. Environments sleep for times of a long tail: nine of ten a
fifth of the mean, the tenth 8.2 times the mean. `use` is the share of decode slots that drew a
token, `waiting` that of slots held by a row that waited, `seconds` all rows together, compilation
apart. Then, for rows of several lengths: seconds to copy the cache of 8 rows out of their slots and
back, and to run their tokens anew.
"""

from __future__ import annotations

import time

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from policyopt import models
from policyopt.sampling import Engine, EngineConfig, Reply, SamplingConfig
from policyopt.sampling import slots as slots_lib

SLOTS = flags.DEFINE_integer('slots', 8, 'Rows that decode together.', lower_bound=1)
ROWS = flags.DEFINE_integer('rows', 64, 'Rows to draw.', lower_bound=1)
MEAN = flags.DEFINE_float('mean', 0.05, 'Mean seconds of an environment.', lower_bound=0.0)
ROUNDS = flags.DEFINE_integer('rounds', 3, 'Rounds; the median counts.', lower_bound=1)
LENGTHS = flags.DEFINE_list('lengths', ['64', '256', '1024'], 'Of rows that are moved.')
VOCAB, MOVED = 256, 8


class Sleeper:
    """Answers after a while, three times."""

    def __init__(self, number: int, mean: float):
        self._rng, self._left, self._mean = np.random.default_rng(number), 3, mean

    def reset(self):
        return [1, 2, 3]

    def step(self, tokens):
        slow = self._rng.random() < 0.1
        time.sleep(self._mean * (8.2 if slow else 0.2))
        self._left -= 1
        return Reply([5, 6, 7], done=self._left == 0)


def model_of():
    config = models.ModelConfig(
        vocab_size=VOCAB, embed_dim=128, num_layers=4, num_heads=4, num_kv_heads=2, mlp_dim=512
    )
    model = models.build(config)
    return model, jax.jit(model.init)(jax.random.key(0))


def draw(model, params, parked: int | None):
    """Seconds, and what the engine counted."""
    sizes = EngineConfig(
        slots=SLOTS.value, size=128, steps=8, workers=ROWS.value, parked=parked, chunk=4
    )
    config = SamplingConfig(max_new_tokens=96, eos_id=-1, stop_ids=tuple(range(VOCAB // 16)))
    engine = Engine(model, config, sizes)
    worlds = [Sleeper(i, MEAN.value) for i in range(ROWS.value)]
    began = time.monotonic()
    engine.submit([world.reset() for world in worlds], jax.random.key(1), environments=worlds)
    while engine.busy:
        engine.step(params)
    return time.monotonic() - began, engine.stats


def seconds(call) -> float:
    """Median seconds of a call that was compiled before."""
    took = []
    for _ in range(ROUNDS.value + 1):
        began = time.monotonic()
        jax.block_until_ready(call())
        took.append(time.monotonic() - began)
    return float(np.median(took[1:]))


def moved(model, params, length: int) -> tuple[float, float]:
    """Seconds to copy rows of a length out and back, and to run them anew."""
    into, cache = (slots_lib.empty(model, MOVED, length) for _ in range(2))
    at = np.arange(MOVED, dtype=np.int32)

    def copy():
        nonlocal into, cache
        into = slots_lib.move(into, cache, at, at, bucket=length)
        cache = slots_lib.move(cache, into, at, at, bucket=length)
        return cache

    tokens, count = np.ones((MOVED, length), np.int32), np.full(MOVED, length, np.int32)
    anew = seconds(lambda: slots_lib.prefill(model, params, tokens, count, None))
    return seconds(copy), anew


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    model, params = model_of()
    table = Table(title=f'{ROWS.value} rows in {SLOTS.value} slots')
    for column in 'parked use waiting moves seconds tokens/s'.split():
        table.add_column(column, justify='right')
    for parked in (0, SLOTS.value, ROWS.value):
        found = [draw(model, params, parked) for _ in range(ROUNDS.value + 1)][1:]
        took, stats = sorted(found, key=lambda x: x[0])[len(found) // 2]
        share = stats.waiting_slots / max(stats.decode_slots, 1)
        cells = [f'{stats.useful:.2f}', f'{share:.2f}', str(stats.parked), f'{took:.2f}']
        table.add_row(str(parked), *cells, f'{stats.decode_tokens / took:.0f}')
    Console(width=100).print(table)
    table = Table(title=f'{MOVED} rows out of their slots and back')
    for column in ('tokens of a row', 'copied, ms', 'run anew, ms'):
        table.add_column(column, justify='right')
    for length in map(int, LENGTHS.value):
        copied, anew = moved(model, params, length)
        table.add_row(str(length), f'{1000 * copied:.2f}', f'{1000 * anew:.1f}')
    Console(width=100).print(table)


if __name__ == '__main__':
    app.run(main)
