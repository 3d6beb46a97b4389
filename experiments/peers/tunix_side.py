"""Tunix's side, in an environment of its own (Python 3.12, its own jax)."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import threading
import traceback
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from serve import EOS, EPS, GSPO, PAD, Run, reward, serve
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import algo_core, common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

# Tunix's own arguments for the objectives of `ours.losses`.
ARGUMENTS: dict[str, dict[str, Any]] = {
    'grpo': dict(loss_algo='grpo', epsilon=EPS),
    'gspo_token': dict(loss_algo='gspo-token', epsilon=GSPO),
}


def load(folder: Path, mesh: Any = None) -> Any:
    given = json.loads((folder / 'config.json').read_text())
    config = qwen3.ModelConfig(
        num_layers=given['num_hidden_layers'],
        vocab_size=given['vocab_size'],
        embed_dim=given['hidden_size'],
        hidden_dim=given['intermediate_size'],
        num_heads=given['num_attention_heads'],
        head_dim=given['head_dim'],
        num_kv_heads=given['num_key_value_heads'],
        rope_theta=int(given['rope_parameters']['rope_theta']),
        norm_eps=given['rms_norm_eps'],
        use_tied_embedding=given['tie_word_embeddings'],
    )
    return qwen3_params.create_model_from_safe_tensors(str(folder), config, mesh, dtype=jnp.float32)


def example_of(folder: Path) -> common.TrainExample:
    held = np.load(folder / 'rows.npz')
    return common.TrainExample(
        prompt_ids=jnp.asarray(held['prompt']),
        prompt_mask=jnp.asarray(held['prompt_mask']),
        completion_ids=jnp.asarray(held['answer']),
        completion_mask=jnp.asarray(held['answer_mask']),
        advantages=jnp.asarray(held['advantages']),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(held['logp_old']),
    )


def step_of(model: Any, arguments: dict[str, Any]) -> Any:
    """(state, example) -> loss and gradients, jitted."""
    config = arguments_of(arguments)
    graph, _ = nnx.split(model)

    def loss(state: Any, example: Any) -> Any:
        value, _ = algo_core.grpo_loss_fn(nnx.merge(graph, state), example, config, PAD, EOS)
        return value

    return jax.jit(jax.value_and_grad(loss))


def arguments_of(arguments: dict[str, Any]) -> Any:
    config = GRPOConfig(num_generations=4, beta=0.0, **arguments)
    # The learner hands the sampler's temperature on in this way.
    return types.SimpleNamespace(**{**_fields(config), 'temperature': 1.0})


def _fields(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def compare(folder: Path, answer: int) -> Run:
    del answer

    def run() -> dict[str, Any]:
        out = {}
        model, example = load(folder), example_of(folder)
        for name, arguments in ARGUMENTS.items():
            value, grads = step_of(model, arguments)(nnx.state(model), example)
            ours = jax.tree.leaves(nnx.state(load(folder / name)))
            grads = jax.tree.leaves(grads)
            worst = max(float(jnp.max(jnp.abs(g - o))) for g, o in zip(grads, ours, strict=True))
            largest = max(float(jnp.max(jnp.abs(g))) for g in grads)
            out[name] = {'loss': float(value), 'gap': worst / largest}
        return out

    return run


def update(folder: Path) -> Run:
    model, example = load(folder), example_of(folder)
    step, state = step_of(model, ARGUMENTS['grpo']), nnx.state(model)

    def run() -> dict[str, float]:
        value, grads = step(state, example)
        jax.block_until_ready(grads)
        return {'loss': float(value)}

    return run


class Ids:
    """A tokenizer for which a prompt is the name of a row of ids."""

    def __init__(self, rows: np.ndarray):
        self.rows = rows

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.rows[int(text)].tolist()

    def decode(self, ids: Any, **_: Any) -> str:
        return ''

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def sampler_of(folder: Path, prompts: np.ndarray, tokens: int) -> Any:
    model = load(folder)
    config = model.config
    cache = sampler_lib.CacheConfig(
        cache_size=prompts.shape[1] + tokens,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    return sampler_lib.Sampler(model, Ids(prompts), cache)


NEVER = 2**30  # an end that no row draws: every row runs to its limit


def generate(folder: Path, rows: int, tokens: int, top_p: float) -> Run:
    prompts = np.load(folder / 'rows.npz')['prompt'][:rows]
    sampler = sampler_of(folder, prompts, tokens)
    names = [str(row) for row in range(rows)]

    def run() -> dict[str, int]:
        out = sampler(
            names,
            max_generation_steps=tokens,
            max_prompt_length=prompts.shape[1],
            temperature=1.0,
            top_p=top_p,
            eos_tokens=[NEVER],
            seed=0,
        )
        jax.block_until_ready(out.tokens)
        return {'tokens': rows * tokens}

    return run


def long_tail(folder: Path, slots: int) -> Run:
    held = np.load(folder / 'rows.npz')
    prompts, limits = held['prompt'], held['limits']
    sampler = sampler_of(folder, prompts, int(limits.max()))

    def run() -> dict[str, int]:
        for at in range(0, len(prompts), slots):
            part = [str(row) for row in range(at, min(at + slots, len(prompts)))]
            out = sampler(
                part,
                max_generation_steps=int(limits[at : at + slots].max()),
                max_prompt_length=prompts.shape[1],
                temperature=1.0,
                top_p=1.0,
                eos_tokens=[NEVER],
                seed=0,
            )
            jax.block_until_ready(out.tokens)
        return {'tokens': int(limits.sum())}

    return run


def score(folder: Path, support: bool) -> Run:
    """Tunix scores from logits; it has no scoring on a recorded support."""
    held = np.load(folder / 'score.npz')
    embed, hidden, ids = (jnp.asarray(held[name]) for name in ('embed', 'hidden', 'ids'))

    def loss(embed: Any, hidden: Any) -> Any:
        return jnp.sum(common.selective_log_softmax(jnp.dot(hidden[:, :-1], embed.T), ids[:, 1:]))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def run() -> dict[str, float]:
        value, grads = step(embed, hidden)
        jax.block_until_ready(grads)
        return {'sum': float(value)}

    return run


def mixture(folder: Path, top_k: int) -> Run:
    held = {name: jnp.asarray(x) for name, x in np.load(folder / 'moe.npz').items()}
    experts, width, inner = held['gate'].shape
    config = qwen3.ModelConfig(
        num_layers=1,
        vocab_size=8,
        embed_dim=width,
        hidden_dim=inner,
        num_heads=1,
        head_dim=2,
        num_kv_heads=1,
        rope_theta=10000,
        norm_eps=1e-6,
        num_experts=experts,
        num_experts_per_tok=top_k,
    )
    layer = qwen3.MoELayer(config, rngs=nnx.Rngs(0))
    layer.gate_proj.value, layer.up_proj.value = held['gate'], held['up']
    layer.down_proj.value, layer.router.kernel.value = held['down'], held['router']
    graph, state = nnx.split(layer)
    step = jax.jit(jax.grad(lambda x, s: jnp.sum(nnx.merge(graph, s)(x) ** 2), argnums=(0, 1)))
    x = held['x'][None]

    def run() -> dict[str, float]:
        grads = jax.block_until_ready(step(x, state))
        return {'norm': float(jnp.linalg.norm(grads[0]))}

    return run


class Characters:
    """A tokenizer of single characters."""

    def __init__(self, chars: list[str]):
        self.chars = chars

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.chars.index(char) for char in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return ''.join(self.chars[int(i)] for i in ids if int(i) > EOS)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def learner_of(folder: Path, group: int, tokens: int, texts: dict[str, Any]) -> Any:
    """Tunix's GRPO learner on one device, with sampler and trainer on the same weights."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
    width = len(texts['prompts'][0])
    cluster = rl_cluster.RLCluster(
        actor=load(folder, mesh),
        tokenizer=Characters(texts['chars']),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6), max_steps=10**6, eval_every_n_steps=10**6
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=tokens,
                max_prompt_length=width,
                kv_cache_size=width + tokens,
                temperature=1.0,
            ),
        ),
    )

    def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [reward(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]

    config = GRPOConfig(num_generations=group, beta=0.0, epsilon=EPS)
    return GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=rewards), mesh


def rl_step(folder: Path, group: int, tokens: int) -> Run:
    """One step of tunix's learner, which asks for a batch of prompts at the start of each."""
    texts = json.loads((folder / 'texts.json').read_text())
    learner, mesh = learner_of(folder, group, tokens, texts)
    go: queue.Queue[bool] = queue.Queue()
    asked: queue.Queue[bool] = queue.Queue()

    def batches() -> Any:
        while True:
            asked.put(True)
            go.get()
            yield {'prompts': np.array(texts['prompts'])}

    def train() -> None:
        try:
            with mesh:
                learner.train(batches())
        finally:  # it never ends of itself, and whoever waits for a step would wait for ever
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=train, daemon=True).start()
    asked.get()

    def run() -> dict[str, float]:
        go.put(True)
        asked.get()
        # The learner asks before its update has been computed.
        jax.block_until_ready(nnx.state(learner.rl_cluster.actor_trainer.model))
        return {}

    return run


WORKS = dict(
    rl_step=rl_step,
    compare=compare,
    update=update,
    generate=generate,
    long_tail=long_tail,
    score=score,
    mixture=mixture,
)

if __name__ == '__main__':
    serve(WORKS)
