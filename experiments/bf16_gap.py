"""How far scoring is from the sampler, by architecture and type of activations.

    python -m experiments.bf16_gap [--rows=16] [--tokens=48]

Each architecture has random parameters (4 layers, width 128, vocabulary 4096, logits with a
standard deviation of about 3), in float32, and answers random prompts. The log-probs of its answers
are then computed again by scoring, which reads whole rows where the sampler read one token after
the other. A flip is a token whose experts at a layer aren't those of the sampler; replayed, there
are none by construction, and what is left is rounding. On 2 cores: some minutes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import policyopt as po
from policyopt import models, scoring

ROWS = flags.DEFINE_integer('rows', 16, 'Answers.', lower_bound=1)
TOKENS = flags.DEFINE_integer('tokens', 48, 'Tokens of each.', lower_bound=1)
PROMPT, LOGITS = 16, 3.0
BASE = models.ModelConfig(
    vocab_size=4096, embed_dim=128, num_layers=4, num_heads=8, num_kv_heads=4, mlp_dim=384
)
FEW, MANY = models.MoEConfig(experts=8, top_k=2), models.MoEConfig(experts=32, top_k=4)
ARCHITECTURES = {
    'Llama': {},
    'Qwen2': dict(qkv_bias=True),
    'Qwen3': dict(qk_norm=True),
    'Mixtral': dict(moe=FEW, mlp_dim=0, expert_dim=384),
    'Qwen3-MoE': dict(qk_norm=True, moe=MANY, mlp_dim=0, expert_dim=96),
}


def parameters(model: Any) -> Any:
    """Random, with kernels, biases and a head large enough for logits that say something."""
    params = jax.jit(model.init)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))

    def louder(path: Any, x: Any) -> Any:
        if path[-1].key.endswith('bias'):
            return 0.1 * jax.random.normal(next(keys), x.shape)
        return x

    params = jax.tree_util.tree_map_with_path(louder, params)
    tokens = jax.random.randint(jax.random.key(2), (4, 32), 0, model.config.vocab_size)
    spread = jnp.std(jax.jit(model.apply)(params, tokens).logits)
    return params | {'norm': params['norm'] * (LOGITS / spread)}


def differences(model: Any, params: Any, rollout: Any, replay: bool) -> tuple[np.ndarray, float]:
    """|sampler - scorer| of every token drawn, and the share of (token, layer) with other experts.

    NaN without experts.
    """

    @jax.jit
    def run(params: Any, rollout: Any) -> Any:
        scores, hidden = scoring.score_and_hidden(
            model, params, rollout, replay_routing=replay, entropy=False
        )
        return scores.logp_new, hidden.routing

    logp, routing = jax.device_get(run(params, rollout))
    mask = np.asarray(rollout.mask) > 0
    gap = np.abs(logp - np.asarray(rollout.logp_behavior))[mask]
    if routing is None:
        return gap, float('nan')
    recorded = np.sort(np.asarray(rollout.routing), axis=-1)
    known = (recorded >= 0).all(-1)
    return gap, float((np.sort(routing, axis=-1) != recorded).any(-1)[known].mean())


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    print(f'{jax.default_backend()}, {ROWS.value} answers of {TOKENS.value} tokens, float32 params')
    print('| architecture | activations | replay | mean | max | flips |')
    print('| --- | --- | --- | --- | --- | --- |')
    config = po.SamplingConfig(max_new_tokens=TOKENS.value, eos_id=-1)
    for name, fields in ARCHITECTURES.items():
        single = models.build(dataclasses.replace(BASE, **fields))
        params = parameters(single)
        shape = (ROWS.value, PROMPT)
        prompts = np.asarray(jax.random.randint(jax.random.key(3), shape, 0, BASE.vocab_size))
        for dtype in ('float32', 'bfloat16'):
            model = models.build(dataclasses.replace(single.config, dtype=dtype))
            length = np.full(ROWS.value, PROMPT, np.int32)
            rollout = po.sample(model, params, (prompts, length), jax.random.key(4), config)
            for replay in (True, False) if rollout.routing is not None else (None,):
                gap, flips = differences(model, params, rollout, replay is True)
                said = {True: 'yes', False: 'no', None: '-'}[replay]
                shown = '-' if replay is None else f'{flips:.2%}'
                print(
                    f'| {name} | {dtype} | {said} | {gap.mean():.1e} | {gap.max():.1e} | {shown} |',
                    flush=True,
                )


if __name__ == '__main__':
    app.run(main)
