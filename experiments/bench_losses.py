"""Time and peak memory of every algorithm's loss, forward and backward, relative to plain GRPO.

    python -m experiments.bench_losses [--rounds=15] [--shapes=8x512,64x4096]

Algorithms run interleaved, so that each ratio compares neighbours in time; a row gives the median
ratio and its spread. Memory is the compiler's count of temporary bytes. The loss of TRPO is timed,
not its update. On 2 cores: a minute.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

import policyopt as po

ROUNDS = flags.DEFINE_integer('rounds', 15, 'Interleaved rounds per shape.', lower_bound=3)
SHAPES = flags.DEFINE_list('shapes', ['8x512', '64x4096'], 'Rows x tokens.')
ARGUMENTS = {'dr_grpo': {'length': 4096}}


def batch(rows: int, width: int) -> tuple[po.LossInputs, po.TokenBatch]:
    rng = np.random.default_rng(0)
    shape = (rows, width)
    length = rng.integers(width // 4, width + 1, rows)
    mask = jnp.asarray(np.arange(width) < length[:, None], jnp.int32)
    draw = lambda scale=1.0: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    base = -jnp.abs(draw())
    row = jnp.asarray(rng.standard_normal((rows, 1)), jnp.float32)
    names = ('logp_new', 'logp_old', 'logp_behavior', 'logp_ref')
    inputs = po.LossInputs(
        **{name: base + draw(0.1) for name in names},
        mask=mask,
        advantages=jnp.broadcast_to(row, shape),
        values=draw(),
        values_old=draw(),
        returns=draw(),
        entropy=jnp.abs(draw()),
        segment=jnp.asarray(np.arange(width) * 8 // width + np.zeros((rows, 1)), jnp.int32),
    )
    tokens = po.TokenBatch(
        tokens=mask,
        mask=mask,
        advantages=inputs.advantages,
        logp_old=inputs.logp_old,
        group=jnp.arange(rows) // 4,
        positive=jnp.arange(rows) % 2,
    )
    return inputs, tokens


def compiled(alg: po.Algorithm, inputs: po.LossInputs, tokens: po.TokenBatch):
    """The compiled loss and gradients, with its arguments, and its temporary bytes."""
    coefficients = po.losses.controllers.init(alg.controllers)
    fixed = inputs.replace(coefficients=coefficients)
    weights = alg.loss.weigh(tokens)
    graded = (
        ('logp_new', 'values')
        if 'values' in po.losses.required_inputs(alg.loss, coefficients)
        else ('logp_new',)
    )

    def loss(x, fixed, weights):
        out = alg.loss.apply(fixed.replace(**x), weights)
        return out.loss, out.metrics

    args = ({k: getattr(inputs, k) for k in graded}, fixed, weights)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*args).compile()
    return lambda: jax.block_until_ready(run(*args)), run.memory_analysis().temp_size_in_bytes


def measure(rows: int, width: int, rounds: int) -> dict[str, tuple[np.ndarray, int]]:
    inputs, tokens = batch(rows, width)
    runs = {
        name: compiled(po.algorithms.resolve(name, **ARGUMENTS.get(name, {})), inputs, tokens)
        for name in po.algorithms.names()
    }
    times = {name: [] for name in runs}
    for step in range(rounds + 1):
        for name, (run, _) in runs.items():
            start = time.perf_counter()
            run()
            if step:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: (np.array(times[name]), bytes_) for name, (_, bytes_) in runs.items()}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    for shape in SHAPES.value:
        rows, width = (int(n) for n in shape.split('x'))
        found = measure(rows, width, ROUNDS.value)
        base = found['grpo']
        table = Table(title=f'loss forward + backward at [{rows}, {width}], relative to grpo')
        for column in ('algorithm', 'ms', 'ratio', 'middle half', 'temporary MiB'):
            table.add_column(column, justify='left' if column == 'algorithm' else 'right')
        for name, (seconds, temporary) in sorted(found.items(), key=lambda x: np.median(x[1][0])):
            ratios = seconds / base[0]
            low, mid, high = np.quantile(ratios, [0.25, 0.5, 0.75])
            table.add_row(
                name,
                f'{1e3 * np.median(seconds):.2f}',
                f'{mid:.2f}',
                f'{low:.2f}-{high:.2f}',
                f'{temporary / 2**20:.1f}',
            )
        Console(width=100).print(table)


if __name__ == '__main__':
    app.run(main)
