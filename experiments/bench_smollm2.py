"""What a language model costs here: loading, decoding, a gradient, a GRPO step, adapters, memory.

    python -m experiments.bench_smollm2 [--model=PATH] [--parts=load,decode,gradient,memory,step]

load: seconds to read the file, tokenizer included.
decode: tokens a second of 16 rows, 64 tokens after 64; what the first token costs is left out.
gradient: forward and backward of cross-entropy on 512 tokens, as a share of the speed of large
    matmuls; useful FLOPs over time.
memory: arguments and temporaries of one update of 32 x 128 tokens in 4 microbatches by the
    compiler's count, of all parameters and of adapters of rank 8. A KL term's reference is beside
    them: as large as the model, or none where adapters are trained.
step: seconds of a GRPO step of 32 x (64 + 64) tokens with a reference KL: answers, reference
    log-probs, one update; and the largest resident set so far.
gap: |log-prob of the sampler - of scoring| on those answers.

Without --model it is SmolLM2-135M-Instruct, as `configs/smollm2.py` finds it. Each figure is of one
run after one that compiles. On 2 cores: some minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.nn import logsumexp
from rich.console import Console
from rich.table import Table

import policyopt as po
from configs import smollm2
from experiments.work import flops
from policyopt import learner, models, scoring
from policyopt.models import adapters
from policyopt.types import TokenBatch

PARTS = ('load', 'decode', 'gradient', 'memory', 'step', 'gap')
MODEL = flags.DEFINE_string('model', '', 'Hugging Face folder or GGUF file.')
CHOSEN = flags.DEFINE_list('parts', list(PARTS), 'What to measure.')
ROWS, PROMPT, ANSWER, PIECES = 32, 64, 64, 4
SIDE, REPEATS = 1024, 16  # of the matmuls whose speed is the measure
ADAPTERS = models.AdapterConfig(rank=8)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the second of two runs, and what it returned."""
    jax.block_until_ready(run())
    began = time.perf_counter()
    out = jax.block_until_ready(run())
    return time.perf_counter() - began, out


def resident() -> float:
    """Largest resident set of this process so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def random_tokens(model: Any, rows: int, width: int) -> Any:
    return jax.random.randint(jax.random.key(0), (rows, width), 100, model.config.vocab_size)


def drawn(model: Any, params: Any, rows: int, count: int) -> Any:
    """`count` tokens after random prompts of 64, however the model would end them."""
    config = po.SamplingConfig(max_new_tokens=count, eos_id=-1)
    length = np.full(rows, PROMPT, np.int32)
    prompts = (np.asarray(random_tokens(model, rows, PROMPT)), length)
    return po.sample(model, params, prompts, jax.random.key(1), config)


def bench_decode(table: Table, model: Any, params: Any) -> None:
    first, _ = timed(lambda: drawn(model, params, 16, 1).tokens)
    whole, _ = timed(lambda: drawn(model, params, 16, 1 + ANSWER).tokens)
    table.add_row('decode, 16 rows', f'{16 * ANSWER / (whole - first):.0f} tokens/s')
    table.add_row('their prompts of 64 tokens', f'{first:.2f} s')


def bench_gradient(table: Table, model: Any, params: Any) -> None:
    tokens = random_tokens(model, 4, 128)

    @jax.jit
    def step(params: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = model.apply(params, tokens).logits
            target = jnp.roll(tokens, -1, axis=1)[:, :, None]
            taken = jnp.take_along_axis(logits, target, axis=-1)[..., 0]
            return -jnp.mean((taken - logsumexp(logits, axis=-1))[:, :-1])

        return jax.value_and_grad(loss)(params)

    side = jax.random.normal(jax.random.key(1), (SIDE, SIDE)) / SIDE**0.5
    products = jax.jit(
        lambda x: jax.lax.fori_loop(0, REPEATS, lambda _, y: jnp.dot(y, x, precision='highest'), x)
    )
    speed = 2.0 * SIDE**3 * REPEATS / timed(lambda: products(side))[0]
    took, _ = timed(lambda: step(params))
    share = flops(model.config, 4, 128) / took / speed
    table.add_row('matmuls', f'{speed / 1e9:.0f} GFLOP/s')
    table.add_row('forward and backward, 512 tokens', f'{took:.2f} s, {share:.0%} of that rate')


def make_learner(model: Any) -> learner.Learner:
    return learner.make_learner(
        model,
        po.algorithms.grpo(),
        learner.make_optimizer(learner.OptimizerConfig(learning_rate=1e-6)),
        microbatches=PIECES,
        diagnose=lambda inputs: {},
    )


def batch_of(rollout: Any, logp_ref: Any) -> TokenBatch:
    """Answers as a minibatch, with advantages of both signs."""
    rows, mask = rollout.tokens.shape[0], rollout.mask
    sign = jnp.where(jnp.arange(rows) % 2, 1.0, -1.0)[:, None]
    return TokenBatch(
        tokens=rollout.tokens,
        mask=mask,
        advantages=sign * mask,
        logp_old=rollout.logp_behavior,
        logp_behavior=rollout.logp_behavior,
        logp_ref=logp_ref,
        length=rollout.length,
        group=jnp.arange(rows) // 8,
    )


def bench_memory(table: Table, model: Any) -> None:
    shape = (ROWS, PROMPT + ANSWER)
    whole, flat = (jax.ShapeDtypeStruct(shape, x) for x in (jnp.float32, jnp.int32))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    batch = TokenBatch(
        **dict.fromkeys(('mask', 'advantages', 'logp_old', 'logp_behavior', 'logp_ref'), whole),
        tokens=flat,
        length=rows,
        group=rows,
    )
    sizes = {}
    for name, config in (('all parameters', None), ('adapters of rank 8', ADAPTERS)):
        made = make_learner(dataclasses.replace(model, adapters=config))
        shapes = model.shapes()
        if config is not None:
            init = functools.partial(adapters.init, config, shapes)
            shapes |= {'adapters': jax.eval_shape(init, jax.random.key(0))}
        state = jax.eval_shape(made.init, shapes, jax.random.key(0))
        found = made.update.lower(state, batch).compile().memory_analysis()  # type: ignore
        parts = (found.argument_size_in_bytes, found.temp_size_in_bytes)
        sizes[name] = sum(parts)
        reference = 0 if config else sum(x.size * 4 for x in jax.tree.leaves(shapes))
        row = ' + '.join(f'{x / 2**30:.2f}' for x in parts)
        table.add_row(
            f'update of {name}', f'{row} GiB; reference beside it {reference / 2**30:.2f} GiB'
        )
    full, small = sizes.values()
    table.add_row('adapters over all parameters', f'{small / full:.2f}')


def bench_step(table: Table, model: Any, params: Any, parts: list[str]) -> None:
    score = jax.jit(lambda params, rollout: scoring.score(model, params, rollout).logp_new)
    made = make_learner(model)
    took, rollout = timed(lambda: drawn(model, params, ROWS, ANSWER))
    scored, logp = timed(lambda: score(params, rollout))
    if 'gap' in parts:
        gap = jnp.abs(logp - rollout.logp_behavior)[np.asarray(rollout.mask) > 0]
        table.add_row('sampler to scorer', f'mean {gap.mean():.1e}, max {gap.max():.1e}')
    if 'step' not in parts:
        return
    reference = jax.tree.map(jnp.copy, params)
    _, logp_ref = timed(lambda: score(reference, rollout))
    state, batch = made.init(params, jax.random.key(0)), batch_of(rollout, logp_ref)
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        state, metrics, _ = made.update(state, batch)
        jax.block_until_ready((state, metrics))
        updated = time.perf_counter() - began
    whole = took + scored + updated
    table.add_row(
        'GRPO step, 32 x (64 + 64)',
        f'{whole:.0f} s: answers {took:.0f}, reference {scored:.0f}, update {updated:.0f}',
    )
    table.add_row('largest resident set', f'{resident():.1f} GiB')


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    chosen = CHOSEN.value
    if wrong := set(chosen) - set(PARTS):
        raise app.UsageError(f'parts={sorted(wrong)}; legal: {", ".join(PARTS)}')
    path = MODEL.value or smollm2.weights()
    began = time.perf_counter()
    model, params = jax.block_until_ready(models.load(path))
    loaded = time.perf_counter() - began
    load = os.getloadavg()[0]
    table = Table(
        'what', 'measured', title=f'{len(os.sched_getaffinity(0))} cores, load {load:.1f}'
    )
    if 'load' in chosen:
        table.add_row('load', f'{loaded:.1f} s')
    if 'decode' in chosen:
        bench_decode(table, model, params)
    if 'gradient' in chosen:
        bench_gradient(table, model, params)
    if 'memory' in chosen:
        bench_memory(table, model)
    if {'step', 'gap'} & set(chosen):
        bench_step(table, model, params, chosen)
    Console(width=100).print(table)


if __name__ == '__main__':
    app.run(main)
