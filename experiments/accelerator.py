"""Does an accelerator compute what the CPU does, and how fast is it.

    python -m experiments.accelerator                        # on the GPU or TPU that jax finds
    python -m experiments.accelerator --platform=cpu --fast  # the same code, small, on the CPU

Needs jax for the accelerator: pip install 'policyopt[cuda]' for NVIDIA GPUs, jax[tpu] for TPUs.
Without one it says so and ends well. Checks (`experiments/accelerator_checks.py`): log-probs of the
sampler against those of the scorer, there and on the CPU, so that the first importance ratio is 1;
a train step against the CPU's; each form of attention and of the mixture layer against a reference.
A check that fails makes the exit code 1. Times: large matmuls, and of a dense model in bfloat16 a
train step, scoring, and decoding by the slot engine; medians of a few runs, compiling left out.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import policyopt as po
from experiments.accelerator_checks import CHECKS, on
from experiments.work import flops
from policyopt import checks, models, optimizer, sharding
from policyopt import learner as learner_lib
from policyopt.sampling import Engine, EngineConfig, SamplingConfig

PLATFORM = flags.DEFINE_string(
    'platform', None, 'cpu, gpu, cuda, rocm or tpu; without one, what jax takes by itself.'
)
FAST = flags.DEFINE_bool('fast', False, 'Small sizes of what is timed.')
ALL = [*CHECKS, 'times']
PARTS = flags.DEFINE_list('parts', ALL, f'Of {", ".join(ALL)}.')
NONE = (
    'no accelerator: jax finds the CPU alone. Nothing was checked. With a GPU: pip install '
    "'policyopt[cuda]'; with a TPU: pip install 'jax[tpu]'. --platform=cpu --fast runs the same "
    'checks here.'
)


class Sizes(NamedTuple):
    """Of what is timed: side of matmuls, the model, rows and tokens, rows that decode together."""

    side: int
    model: models.ModelConfig
    rows: int
    length: int
    slots: int
    drawn: int


LARGE = models.ModelConfig(
    vocab_size=32768, embed_dim=1024, num_layers=16, num_heads=16, num_kv_heads=8, mlp_dim=3072,
    dtype='bfloat16', precision='default',
)  # fmt: skip
TINY = dataclasses.replace(
    LARGE, vocab_size=256, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=1, mlp_dim=64
)
FULL, SMALL = Sizes(8192, LARGE, 16, 1024, 64, 128), Sizes(128, TINY, 2, 32, 2, 8)


class Timed(NamedTuple):
    """What was timed: seconds of a run, and what of it a second makes."""

    what: str
    seconds: float
    rate: float
    unit: str


def seconds(function: Callable[[], Any], runs: int) -> float:
    """Median time of a run, after one that compiles."""
    took = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        jax.block_until_ready(function())
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def matmuls(sizes: Sizes, runs: int) -> Iterator[Timed]:
    repeats = 8
    for dtype, precision in ((jnp.float32, 'highest'), (jnp.bfloat16, 'default')):
        x = jax.random.normal(jax.random.key(0), (sizes.side, sizes.side)) / sizes.side**0.5
        x = x.astype(dtype)

        def products(x: Any, precision: str = precision) -> Any:
            body = lambda _, y: jnp.dot(y, x, precision=precision)  # noqa: E731
            return jax.lax.fori_loop(0, repeats, body, x)

        run = jax.jit(products)
        took = seconds(lambda run=run, x=x: run(x), runs)
        rate = 2.0 * sizes.side**3 * repeats / took / 1e12
        name = f'{repeats} products of {sizes.side} x {sizes.side}, {np.dtype(dtype).name}'
        yield Timed(name, took, rate, 'TFLOP/s')


def model_steps(sizes: Sizes, runs: int, fastest: float) -> Iterator[Timed]:
    """A train step, scoring and decoding; `fastest` is the rate of large matmuls, in TFLOP/s."""
    model = models.build(sizes.model)
    params = jax.jit(model.init)(jax.random.key(0))
    shape = sizes.rows, sizes.length
    tokens = jax.random.randint(jax.random.key(1), shape, 0, sizes.model.vocab_size)
    mask = jnp.broadcast_to(jnp.arange(sizes.length) >= sizes.length // 8, shape)
    batch = po.TokenBatch(
        tokens=tokens,
        mask=mask.astype(jnp.float32),
        advantages=jnp.where(mask, jax.random.normal(jax.random.key(2), (sizes.rows, 1)), 0),
        logp_old=jnp.where(mask, -5.0, 0.0),
        logp_behavior=jnp.where(mask, -5.0, 0.0),
        length=jnp.full(sizes.rows, sizes.length, jnp.int32),
        group=jnp.arange(sizes.rows, dtype=jnp.int32) // 2,
    )
    count = sizes.rows * sizes.length
    score = jax.jit(lambda params, batch: po.score(model, params, batch).logp_new)
    took = seconds(lambda: score(params, batch), runs)
    yield Timed(f'scoring {sizes.rows} rows of {sizes.length}', took, count / took, 'tokens/s')
    took = seconds(decoder(model, params, sizes), runs)
    drawn = sizes.slots * sizes.drawn
    name = f'decoding {sizes.slots} rows by {sizes.drawn} tokens'
    yield Timed(name, took, drawn / took, 'tokens/s')
    # Last: the update takes the parameters over.
    adam = optimizer.make_optimizer(optimizer.OptimizerConfig(learning_rate=1e-6))
    learn = learner_lib.make_learner(model, po.algorithms.gspo(), adam)
    state = [learn.init(params, jax.random.key(3))]

    def update() -> Any:
        state[0], _, logp = learn.update(state[0], batch)
        return logp

    took = seconds(update, runs)
    rate = flops(sizes.model, *shape) / took / 1e12
    name = f'a train step on {sizes.rows} rows of {sizes.length}'
    yield Timed(name, took, count / took, 'tokens/s')
    yield Timed('of it, products that it needs', took, rate, 'TFLOP/s')
    yield Timed('as a share of the large ones', took, 100 * rate / fastest, '%')


def decoder(model: Any, params: Any, sizes: Sizes) -> Callable[[], None]:
    """A function that draws `drawn` tokens for every slot of an engine."""
    config = SamplingConfig(max_new_tokens=sizes.drawn, eos_id=-1)
    prompt = max(sizes.length // 8, 1)
    engine = EngineConfig(
        slots=sizes.slots, size=prompt + sizes.drawn, prefill_width=prompt, prefill_rows=sizes.slots
    )
    rng = np.random.default_rng(5)
    prompts = rng.integers(0, model.config.vocab_size, (sizes.slots, prompt)).tolist()
    keys = jax.random.split(jax.random.key(4), sizes.slots)

    def run() -> None:
        slots = Engine(model, config, engine)
        slots.submit(prompts, keys)
        while slots.busy:
            slots.step(params)

    return run


def times(sizes: Sizes, runs: int) -> Iterator[Timed]:
    """Every time, as it is measured."""
    fastest = 0.0
    for found in matmuls(sizes, runs):
        fastest = max(fastest, found.rate)
        yield found
    yield from model_steps(sizes, runs, fastest)


def device_of(platform: str | None) -> Any:
    """The first device of a platform; None where jax would take the CPU by itself.

    Raises RuntimeError for a platform that is not there.
    """
    if platform is None and jax.default_backend() == 'cpu':
        return None
    return jax.devices(platform)[0]


def main(argv: list[str]) -> int | None:
    """Entry point."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}')
    try:
        for name in PARTS.value:
            checks.one_of('--parts', name, ALL)
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    sharding.ask_libtpu()
    try:
        device = device_of(PLATFORM.value)
        host = jax.devices('cpu')[0]
    except RuntimeError as error:
        hidden = ' (JAX_PLATFORMS must leave the CPU, whose values are compared with: cuda,cpu)'
        raise SystemExit(f'{error}{hidden}') from error
    if device is None:
        print(NONE)
        return None
    print(f'{device.device_kind} ({device.platform}), jax {jax.__version__}')
    failed = checked(device, host)
    if 'times' in PARTS.value:
        print('\n| timed | a run | rate |\n| --- | --- | --- |')
        with on(device):
            for found in times(SMALL if FAST.value else FULL, 2 if FAST.value else 5):
                took = f'{1e3 * found.seconds:.2f} ms'
                print(f'| {found.what} | {took} | {found.rate:,.3g} {found.unit} |', flush=True)
    return 1 if failed else None


def checked(device: Any, host: Any) -> list[str]:
    """Print every comparison as it is made; what failed."""
    failed, chosen = [], [name for name in CHECKS if name in PARTS.value]
    if chosen:
        print('\n| compared | largest difference | allowed | |\n| --- | --- | --- | --- |')
    for name in chosen:
        for found in CHECKS[name](device, host):
            said = 'ok' if found.good else 'WRONG'
            print(f'| {found.what} | {found.value:.1e} | {found.limit:.0e} | {said} |', flush=True)
            failed += [] if found.good else [found.what]
    if failed:
        print(f'\n{len(failed)} comparisons are off: ' + '; '.join(failed))
    return failed


if __name__ == '__main__':
    app.run(main)
