"""Weights and rows that all sides read: a Hugging Face folder and an npz beside it."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs import smollm2
from experiments.peers import ours
from experiments.peers.serve import BOS, EOS, PAD
from policyopt import models, scoring


def dense(vocab: int, layers: int = 4, width: int = 256, inner: int = 768) -> models.ModelConfig:
    """A Qwen3 of 8 heads and 4 key heads of 32."""
    return models.ModelConfig(
        vocab_size=vocab,
        embed_dim=width,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        mlp_dim=inner,
        qk_norm=True,
        rope_theta=1e6,
        bos_id=BOS,
        pad_id=PAD,
        eos_ids=(EOS,),
        family='qwen3',
    )


def rows_of(
    vocab: int, rows: int, prompt: int, answer: int, *, ragged: bool, group: int = 4
) -> dict[str, np.ndarray]:
    """Random prompts, padded on the left, and answers, padded on the right, as peers take them.

    Where they are not ragged, nothing is padded. Advantages are z-scores of random rewards in
    groups of rows.
    """
    rng = np.random.default_rng(0)
    lengths = [
        rng.integers(1, full + 1, rows) if ragged else np.full(rows, full)
        for full in (prompt, answer)
    ]
    draw = lambda width: rng.integers(EOS + 1, vocab, (rows, width))  # noqa: E731
    prompt_mask = np.arange(prompt)[::-1] < lengths[0][:, None]
    answer_mask = np.arange(answer) < lengths[1][:, None]
    rewards = rng.standard_normal((rows // group, group))
    scores = rewards - rewards.mean(1, keepdims=True)
    scores = scores / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    return {
        'prompt': np.where(prompt_mask, draw(prompt), PAD).astype(np.int32),
        'prompt_mask': prompt_mask.astype(np.int32),
        'answer': np.where(answer_mask, draw(answer), PAD).astype(np.int32),
        'answer_mask': answer_mask.astype(np.int32),
        'advantages': scores.reshape(-1).astype(np.float32),
    }


def write(
    folder: Path, config: models.ModelConfig, found: dict[str, np.ndarray], drift: float
) -> None:
    """Random weights of the config, and the rows with log-probs of a policy at a distance.

    logp_old are the model's own log-probs, each moved by a normal error of `drift`.
    """
    model = models.build(config)
    params: Any = jax.jit(model.init)(jax.random.key(0))
    models.save(model, params, folder)
    batch = ours.batch_of(found)
    logp = np.asarray(jax.jit(lambda p: scoring.score(model, p, batch).logp_new)(params))
    noise = drift * np.random.default_rng(1).standard_normal(found['answer'].shape)
    old = ours.answers_of(found, logp) + noise
    found['logp_old'] = np.where(found['answer_mask'], old, 0).astype(np.float32)
    np.savez(folder / 'rows.npz', **found)


def write_mixture(
    folder: Path, experts: int, inner: int, width: int = 256, tokens: int = 4096
) -> None:
    """Tokens and weights of one mixture layer; the router is [D,E]."""
    rng = np.random.default_rng(0)
    into, out = (experts, width, inner), (experts, inner, width)
    shapes = {'gate': into, 'up': into, 'down': out, 'router': (width, experts)}
    held = {n: rng.standard_normal(s, np.float32) * s[-2] ** -0.5 for n, s in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / 'moe.npz', x=rng.standard_normal((tokens, width), np.float32), **held)


def write_scoring(folder: Path, width: int, vocab: int, tokens: int, kept: int = 20) -> None:
    """Hidden states, a head, and the tokens to score, each the first of its support."""
    rng = np.random.default_rng(0)
    support = rng.integers(0, vocab, (1, tokens, kept)).astype(np.int32)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / 'score.npz',
        embed=0.02 * rng.standard_normal((vocab, width), np.float32),
        hidden=rng.standard_normal((1, tokens, width), np.float32),
        ids=support[:, :, 0],
        support=support,
    )


def log_normal(rows: int, mean: int) -> np.ndarray:
    """Lengths [rows]: log-normal quantiles, shuffled, of which the longest is 5 times `mean`."""
    quantiles = statistics.NormalDist().inv_cdf
    z = np.array([quantiles((row + 0.5) / rows) for row in range(rows)])

    def at(sigma: float) -> np.ndarray:
        found = np.exp(sigma * z)
        return found * (mean / found.mean())

    spread = np.geomspace(0.05, 3, 400)
    best = min(spread, key=lambda sigma: abs(at(sigma).max() - 5 * mean))
    return np.random.default_rng(0).permutation(np.maximum(1, np.round(at(best)))).astype(np.int32)


CHARS = '<pad>', '<s>', '</s>', *'0123456789+='


def write_sums(folder: Path, config: models.ModelConfig, prompts: int) -> None:
    """Sums of two numbers of two digits as text and ids, characters by id, and random weights."""
    rng = np.random.default_rng(0)
    texts = [f'{a}+{b}=' for a, b in rng.integers(10, 100, (prompts, 2))]
    rows = np.array([[CHARS.index(char) for char in text] for text in texts], np.int32)
    model = models.build(config)
    models.save(model, jax.jit(model.init)(jax.random.key(0)), folder)
    np.savez(folder / 'rows.npz', prompt=rows)
    (folder / 'texts.json').write_text(json.dumps({'chars': CHARS, 'prompts': texts}))


def write_language(folder: Path, rows: int, width: int, toy: bool) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder, and random prompts."""
    if toy:
        config = dataclasses.replace(dense(160, 2, 64, 96), qk_norm=False, family='llama')
        model = models.build(config)
        params = jax.jit(model.init)(jax.random.key(0))
    else:
        model, params = models.load(smollm2.weights())
    models.save(model, params, folder)
    rng = np.random.default_rng(0)
    prompt = rng.integers(100, model.config.vocab_size, (rows, width)).astype(np.int32)
    np.savez(folder / 'rows.npz', prompt=prompt)
