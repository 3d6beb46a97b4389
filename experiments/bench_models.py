"""What the models cost: speed against plain matmuls, MoE layers, compile time, memory of scoring.

    python -m experiments.bench_models [--rounds=7] [--parts=model,moe,compile,scoring]

model: forward and backward of a dense decoder (4 layers, width 256, vocabulary 8192, 8 rows of 256
    tokens, float32) as a share of the speed of large matmuls; useful FLOPs over time.
moe: forward and backward of a mixture layer over that of a dense layer of equal active parameters,
    on 2048 tokens.
compile: seconds to trace, lower and compile the same step at 4 and at 48 layers.
scoring: peak temporary bytes of forward and backward, from the compiler's count, of `score_hidden`
    and of a plain log-softmax, at 8 rows of 512 tokens, vocabulary 151,936, width 256.

What is compared runs interleaved, and a row gives medians over the rounds, of wall and of processor
seconds and of the ratios of each. On a busy machine the ratio of processor time is the steadier
one; it does not see how well the work spreads over cores. On 2 idle cores: 2 minutes.
"""

from __future__ import annotations

import dataclasses
import os
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.nn import logsumexp
from rich.console import Console
from rich.table import Table

from experiments.work import flops
from policyopt import models, scoring
from policyopt.models import layers
from policyopt.models.moe import moe_layer

PARTS = ('model', 'moe', 'compile', 'scoring')
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Interleaved rounds.', lower_bound=3)
CHOSEN = flags.DEFINE_list('parts', list(PARTS), 'What to measure.')
REMAT = flags.DEFINE_list('remat', ['none'], 'Remat policies of the model part.')

ROWS, LENGTH = 8, 256
CONFIG = models.ModelConfig(
    vocab_size=8192, embed_dim=256, num_layers=4, num_heads=8, num_kv_heads=4, mlp_dim=1024
)
SIDE, REPEATS = 1024, 16  # of the matmuls whose speed is the measure
MIXTURES = {'8 experts, top 2': (8, 2, 512), '64 experts, top 8': (64, 8, 128)}


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Name -> [rounds, 2] wall and processor seconds; every round runs each once."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for step in range(rounds + 2):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            if step > 1:  # the first rounds compile and warm up
                took = time.perf_counter() - wall, time.process_time() - cpu
                found[name].append(took)
    return {name: np.array(times) for name, times in found.items()}


def step_of(config: models.ModelConfig) -> tuple[models.Model, Callable[..., Any]]:
    """A model, and (params, tokens) -> cross-entropy of the next token and its gradient."""
    model = models.build(config)

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens).logits
        target = jnp.roll(tokens, -1, axis=1)[:, :, None]
        logp = jnp.take_along_axis(logits, target, axis=-1)[..., 0] - logsumexp(logits, axis=-1)
        return -jnp.mean(logp[:, :-1])

    return model, jax.value_and_grad(loss)


def bench_model(table: Table, rounds: int) -> None:
    tokens = jax.random.randint(jax.random.key(0), (ROWS, LENGTH), 0, CONFIG.vocab_size)
    side = jax.random.normal(jax.random.key(1), (SIDE, SIDE)) / SIDE**0.5
    products = jax.jit(
        lambda x: jax.lax.fori_loop(0, REPEATS, lambda _, y: jnp.dot(y, x, precision='highest'), x)
    )
    runs: dict[str, Callable[[], Any]] = {'matmul': lambda: products(side)}
    for remat in REMAT.value:
        model, step = step_of(dataclasses.replace(CONFIG, remat=remat))
        params, run = jax.jit(model.init)(jax.random.key(2)), jax.jit(step)
        runs[f'model, remat {remat}'] = lambda run=run, params=params: run(params, tokens)
    found = measure(runs, rounds)
    times = found.pop('matmul')
    speed = 2.0 * SIDE**3 * REPEATS / times
    add(table, 'matmul: GFLOP/s', speed / 1e9, times)
    for name, times in found.items():
        share = flops(CONFIG, ROWS, LENGTH) / times / speed
        add(table, f'{name}: share of the matmul rate', share, times)


def bench_moe(table: Table, rounds: int) -> None:
    width, inner = CONFIG.embed_dim, CONFIG.mlp_dim
    x = jax.random.normal(jax.random.key(0), (1, ROWS * LENGTH, width))

    def graded(layer: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda x, p: jnp.sum(layer(x, p) ** 2), argnums=(0, 1)))

    def weights(*shapes: tuple[int, ...]) -> dict[str, Any]:
        names, keys = ('gate', 'up', 'down', 'router'), jax.random.split(jax.random.key(1), 4)
        return {
            name: jax.random.normal(key, shape) * shape[-2] ** -0.5
            for name, key, shape in zip(names, keys, shapes, strict=False)
        }

    def swiglu(x: Any, p: Any) -> Any:
        gate, up = (layers.dense(x, p[name], CONFIG) for name in ('gate', 'up'))
        return layers.dense(jax.nn.silu(gate) * up, p['down'], CONFIG)

    plain, dense = graded(swiglu), weights((width, inner), (width, inner), (inner, width))
    runs: dict[str, Callable[[], Any]] = {'dense': lambda: plain(x, dense)}
    for name, (experts, top_k, each) in MIXTURES.items():
        config, into = models.MoEConfig(experts, top_k), (experts, width, each)
        params = weights(into, into, (experts, each, width), (experts, width))
        run = graded(lambda x, p, config=config: moe_layer(x[0], p, config)[0])
        runs[name] = lambda run=run, params=params: run(x, params)
    found = measure(runs, rounds)
    for name, times in found.items():
        add(table, f'layer, {name}: time over dense', times / found['dense'], times)


def bench_compile(table: Table) -> None:
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    for depth in (4, 48):
        model, step = step_of(dataclasses.replace(CONFIG, num_layers=depth))
        wall, cpu = time.perf_counter(), time.process_time()
        jax.jit(step).lower(model.shapes(), tokens).compile()
        took = np.array([[time.perf_counter() - wall, time.process_time() - cpu]])
        add(table, f'first compile at {depth} layers', None, took)


def bench_scoring(console: Console) -> None:
    vocab, width = 151_936, CONFIG.embed_dim
    config = dataclasses.replace(CONFIG, vocab_size=vocab, tied=True)
    model = models.build(config)
    ids = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    params = {'embed': jax.ShapeDtypeStruct((vocab, width), jnp.float32)}
    hidden = jax.ShapeDtypeStruct((8, 512, width), jnp.float32)

    def ours(params: Any, hidden: Any, tokens: Any, mask: Any) -> Any:
        batch = types.SimpleNamespace(tokens=tokens, mask=mask)
        scores = scoring.score_hidden(model, params, hidden, batch)
        return jnp.sum(scores.logp_new) + jnp.sum(scores.entropy)  # type: ignore[arg-type]

    def theirs(params: Any, hidden: Any, tokens: Any, mask: Any) -> Any:
        logp = jax.nn.log_softmax(model.logits(params, hidden))
        taken = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
        return jnp.sum(mask * (taken - jnp.sum(jnp.exp(logp) * logp, axis=-1)))

    def temporary(f: Callable[..., Any]) -> float:
        graded = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
        compiled = graded.lower(params, hidden, ids, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20  # pyright: ignore

    small, large = temporary(ours), temporary(theirs)
    console.print(
        f'scoring: {small:.0f} MiB of temporaries, {large:.0f} naive, {small / large:.2f} of it'
    )


def add(table: Table, name: str, ratios: np.ndarray | None, times: np.ndarray) -> None:
    """A row of medians; ratios and times are [rounds, 2], wall and processor."""
    cells = ['', ''] if ratios is None else [f'{x:.2f}' for x in np.median(ratios, axis=0)]
    cells += [f'{x:.3f}' for x in np.median(times, axis=0)]
    table.add_row(name, *cells, f'{os.getloadavg()[0]:.1f}')


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    wrong = set(CHOSEN.value) - set(PARTS)
    if wrong:
        raise app.UsageError(f'parts={sorted(wrong)}; legal: {", ".join(PARTS)}')
    table = Table(title=f'models on {jax.default_backend()}, {os.cpu_count()} processors')
    for column in ('what', 'by wall', 'by cpu', 'wall s', 'cpu s', 'load'):
        table.add_column(column, justify='left' if column == 'what' else 'right')
    if 'model' in CHOSEN.value:
        bench_model(table, ROUNDS.value)
    if 'moe' in CHOSEN.value:
        bench_moe(table, ROUNDS.value)
    if 'compile' in CHOSEN.value:
        bench_compile(table)
    console = Console(width=100)
    console.print(table)
    if 'scoring' in CHOSEN.value:
        bench_scoring(console)


if __name__ == '__main__':
    app.run(main)
