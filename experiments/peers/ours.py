"""Our side: what policyopt does of each work."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policyopt as po
from experiments.peers.serve import CAP, EOS, EPS, GSPO, HIGH, Run, reward, serve
from policyopt import algorithms, learner, models, scoring, updates
from policyopt.losses import diagnostics
from policyopt.models.moe import moe_layer
from policyopt.sampling import Engine, EngineConfig, PerRow, SamplingConfig, sample


def losses(answer: int) -> dict[str, po.Algorithm]:
    """Algorithms compared, for answers of `answer` tokens at most."""
    return {
        'grpo': algorithms.grpo(eps=EPS, beta=0.0),
        'dapo': algorithms.dapo(low=EPS, high=HIGH),
        'dr_grpo': algorithms.dr_grpo(length=answer, eps=EPS),
        'gspo': algorithms.gspo(low=GSPO, high=GSPO),
        'gspo_token': algorithms.gspo_token(low=GSPO, high=GSPO),
        'sapo': algorithms.sapo(),
        'cispo': algorithms.cispo(cap=CAP),
    }


def places(found: Any) -> tuple[np.ndarray, np.ndarray]:
    """Where answers' tokens stand in rows without left padding: row and column indices [B,C]."""
    starts = found['prompt_mask'].sum(1)
    columns = starts[:, None] + np.arange(found['answer'].shape[1])
    return np.arange(len(starts))[:, None], columns


def batch_of(found: Any) -> po.TokenBatch:
    """Rows of prompt and answer without padding between: [B,T]."""
    rows, prompt = found['prompt'].shape
    total = prompt + found['answer'].shape[1]
    tokens = np.zeros((rows, total), np.int32)
    lengths = found['prompt_mask'].sum(1)
    for row, length in enumerate(lengths):
        tokens[row, :length] = found['prompt'][row, prompt - length :]
    where = places(found)
    full = lambda x, dtype: _put(np.zeros((rows, total), dtype), where, x)  # noqa: E731
    tokens[where] = found['answer']
    old = found.get('logp_old', np.zeros(found['answer'].shape, np.float32))
    batch = po.TokenBatch(
        tokens=tokens,
        mask=full(found['answer_mask'], np.int32),
        length=(lengths + found['answer_mask'].sum(1)).astype(np.int32),
        group=np.arange(rows, dtype=np.int32) // 4,
        logp_old=full(old, np.float32),
        advantages=full(found['advantages'][:, None] * found['answer_mask'], np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


def _put(array: np.ndarray, where: Any, values: np.ndarray) -> np.ndarray:
    array[where] = values
    return array


def answers_of(found: Any, rows: np.ndarray) -> np.ndarray:
    """[B,T] of our rows to [B,C] of answers."""
    return rows[places(found)]


def objective(model: Any, algorithm: po.Algorithm) -> Any:
    """(params, batch) -> loss, and what a trainer logs beside it."""

    def loss(params: Any, batch: po.TokenBatch) -> Any:
        weights = algorithm.loss.weigh(batch)
        inputs = updates.loss_inputs(batch, scoring.score(model, params, batch), {})
        out = algorithm.loss.apply(inputs, weights)
        return out.loss, out.metrics | diagnostics.diagnose(inputs)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def compare(folder: Path, answer: int) -> Run:
    """Losses and gradients; gradients go to a folder each, as if they were weights."""
    model, params = models.load(folder)
    batch = batch_of(np.load(folder / 'rows.npz'))

    def run() -> dict[str, Any]:
        out = {}
        for name, algorithm in losses(answer).items():
            (value, _), grads = objective(model, algorithm)(params, batch)
            models.save(model, grads, folder / name)
            out[name] = float(value)
        (folder / 'losses.json').write_text(json.dumps(out))
        return out

    return run


def update(folder: Path) -> Run:
    """Forward and backward of GRPO's loss."""
    model, params = models.load(folder)
    batch = batch_of(np.load(folder / 'rows.npz'))
    step = objective(model, algorithms.grpo(eps=EPS, beta=0.0))

    def run() -> dict[str, float]:
        (value, metrics), grads = step(params, batch)
        jax.block_until_ready((grads, metrics))
        return {'loss': float(value)}

    return run


def generate(folder: Path, rows: int, tokens: int, top_p: float) -> Run:
    """Rows of new tokens after equally long prompts, none of which ends early."""
    model, params = models.load(folder)
    prompts = np.load(folder / 'rows.npz')['prompt'][:rows]
    config = SamplingConfig(max_new_tokens=tokens, top_p=top_p, eos_id=-1)
    keys = jax.random.split(jax.random.key(0), rows)

    def run() -> dict[str, int]:
        drawn = sample(model, params, prompts, keys, config)
        return {'tokens': int(np.sum(np.asarray(drawn.mask)))}

    return run


def long_tail(folder: Path, slots: int) -> Run:
    """All rows, each to a limit of its own, through the slots of the engine."""
    model, params = models.load(folder)
    held = np.load(folder / 'rows.npz')
    prompts, limits = held['prompt'], held['limits']
    longest, width = int(limits.max()), prompts.shape[1]
    sizes = EngineConfig(
        slots=slots,
        size=width + longest,
        refill=max(1, slots // 8),
        min_slots=1,
        prefill_rows=8,
        prefill_width=width,
        bucket=64,
    )
    keys = jax.random.split(jax.random.key(0), len(prompts))

    def run() -> dict[str, int]:
        engine = Engine(model, SamplingConfig(max_new_tokens=longest, eos_id=-1), sizes)
        engine.submit(prompts.tolist(), keys, per_row=PerRow(max_new_tokens=limits))
        while engine.busy:
            engine.step(params)
        return {'tokens': int(limits.sum())}

    return run


def score(folder: Path, support: bool) -> Run:
    """Forward and backward of log-probs from hidden states; on the full vocabulary or a support."""
    held = np.load(folder / 'score.npz')
    embed, hidden, ids = (jnp.asarray(held[name]) for name in ('embed', 'hidden', 'ids'))
    vocab, width = embed.shape
    config = models.ModelConfig(vocab, width, 1, 1, 1, mlp_dim=1, head_dim=2, tied=True)
    model, kept = models.build(config), held['support'] if support else None
    batch = types.SimpleNamespace(tokens=ids, mask=jnp.ones_like(ids), support=kept)

    def loss(embed: Any, hidden: Any) -> Any:
        scores = scoring.score_hidden(model, {'embed': embed}, hidden, batch, entropy=False)
        return jnp.sum(scores.logp_new)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def run() -> dict[str, float]:
        value, grads = step(embed, hidden)
        jax.block_until_ready(grads)
        return {'kept' if support else 'sum': float(value)}

    return run


def mixture(folder: Path, top_k: int) -> Run:
    """Forward and backward of one mixture layer."""
    held = {name: jnp.asarray(value) for name, value in np.load(folder / 'moe.npz').items()}
    x, held['router'] = held.pop('x'), held['router'].T
    config = models.MoEConfig(held['gate'].shape[0], top_k)
    step = jax.jit(jax.grad(lambda x, p: jnp.sum(moe_layer(x, p, config)[0] ** 2), argnums=(0, 1)))

    def run() -> dict[str, float]:
        grads = jax.block_until_ready(step(x, held))
        return {'norm': float(jnp.linalg.norm(grads[0]))}

    return run


def minibatch(advantages: Any, rollout: po.Rollout) -> po.TokenBatch:
    """All rows of a rollout with rewards."""
    return po.TokenBatch(
        tokens=rollout.tokens,
        mask=rollout.mask,
        length=rollout.length,
        group=rollout.group,
        logp_old=rollout.logp_behavior,
        advantages=advantages(rollout).advantages,
    )


def rl_step(folder: Path, group: int, tokens: int) -> Run:
    """Answers, rewards, advantages, one update of GRPO with Adam."""
    texts = json.loads((folder / 'texts.json').read_text())
    asked = np.repeat(texts['prompts'], group).tolist()
    model, params = models.load(folder)
    algorithm = algorithms.grpo(eps=EPS, beta=0.0)
    trainer = learner.make_learner(model, algorithm, optax.adamw(1e-6))
    state, advantages = [trainer.init(params, jax.random.key(1))], jax.jit(algorithm.advantages)
    config = SamplingConfig(max_new_tokens=tokens)
    width, steps = len(asked[0]), itertools.count()

    def run() -> dict[str, float]:
        key = jax.random.fold_in(jax.random.key(2), next(steps))
        prompts = [[texts['chars'].index(char) for char in text] for text in asked]
        drawn = sample(model, state[0].params, prompts, key, config)
        ids, mask = np.asarray(drawn.tokens)[:, width:], np.asarray(drawn.mask)[:, width:]
        answers = [
            ''.join(texts['chars'][i] for i in row[kept != 0] if i > EOS)
            for row, kept in zip(ids, mask, strict=True)
        ]
        rewards = np.array([reward(a, b) for a, b in zip(asked, answers, strict=True)], np.float32)
        groups = np.repeat(np.arange(len(asked) // group, dtype=np.int32), group)
        batch = minibatch(advantages, dataclasses.replace(drawn, rewards=rewards, group=groups))
        state[0], metrics, _ = trainer.update(state[0], batch)
        return {'reward': float(rewards.mean()), 'objective': float(metrics['loss'].value)}

    return run


def language_step(folder: Path, rows: int, tokens: int) -> Run:
    """Answers of a language model to random prompts, and one update of GRPO with Adam."""
    model, params = models.load(folder)
    prompts = np.load(folder / 'rows.npz')['prompt'][:rows]
    algorithm = algorithms.grpo(eps=EPS, beta=0.0)
    trainer = learner.make_learner(model, algorithm, optax.adamw(1e-6), microbatches=4)
    state, advantages = [trainer.init(params, jax.random.key(1))], jax.jit(algorithm.advantages)
    groups = np.repeat(np.arange(rows // 4, dtype=np.int32), 4)
    rewards = np.random.default_rng(0).standard_normal(rows).astype(np.float32)
    config = SamplingConfig(max_new_tokens=tokens, eos_id=-1)

    def run() -> dict[str, float]:
        drawn = sample(model, state[0].params, prompts, jax.random.key(2), config)
        batch = minibatch(advantages, dataclasses.replace(drawn, rewards=rewards, group=groups))
        state[0], metrics, _ = trainer.update(state[0], batch)
        return {'objective': float(metrics['loss'].value)}

    return run


WORKS = dict(
    language_step=language_step,
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
