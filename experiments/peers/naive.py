"""What a reader of the papers would write in plain jax: the floor that a library has to beat."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.peers.serve import Run, serve

PARTS = 4  # of the head


def score(folder: Path, support: bool) -> Run:
    """Log-softmax of all logits, or of the support's after all logits."""
    held = np.load(folder / 'score.npz')
    embed, hidden, ids = (jnp.asarray(held[name]) for name in ('embed', 'hidden', 'ids'))
    kept = jnp.asarray(held['support'])

    def loss(embed: Any, hidden: Any) -> Any:
        logits = jnp.dot(hidden[:, :-1], embed.T, precision='highest')
        if support:  # a token is the first of its support
            logits = jnp.take_along_axis(logits, kept[:, 1:], axis=2)
            return jnp.sum(jax.nn.log_softmax(logits)[..., 0])
        taken = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=2)
        return jnp.sum(taken)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def run() -> dict[str, float]:
        value, grads = step(embed, hidden)
        jax.block_until_ready(grads)
        return {'kept' if support else 'sum': float(value)}

    return run


def mixture(folder: Path, top_k: int) -> Run:
    """Tokens sorted by expert, and three `ragged_dot`."""
    held = {name: jnp.asarray(x) for name, x in np.load(folder / 'moe.npz').items()}
    x = held.pop('x')
    experts = held['gate'].shape[0]

    def layer(x: Any, p: Any) -> Any:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p['router']), top_k)
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        rows = x[order // top_k]
        gate, up = (jax.lax.ragged_dot(rows, p[name], sizes) for name in ('gate', 'up'))
        down = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p['down'], sizes)
        down = down * weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(x).at[order // top_k].add(down)

    step = jax.jit(jax.grad(lambda x, p: jnp.sum(layer(x, p) ** 2), argnums=(0, 1)))

    def run() -> dict[str, float]:
        grads = jax.block_until_ready(step(x, held))
        return {'norm': float(jnp.linalg.norm(grads[0]))}

    return run


def dense(folder: Path) -> Run:
    """One feed-forward layer of as many parameters as a token meets in the mixture."""
    held = np.load(folder / 'dense.npz')
    p = {name: jnp.asarray(held[name]) for name in ('gate', 'up', 'down')}
    x = jnp.asarray(held['x'])

    def layer(x: Any, p: Any) -> Any:
        return (jax.nn.silu(x @ p['gate']) * (x @ p['up'])) @ p['down']

    step = jax.jit(jax.grad(lambda x, p: jnp.sum(layer(x, p) ** 2), argnums=(0, 1)))

    def run() -> dict[str, float]:
        grads = jax.block_until_ready(step(x, p))
        return {'norm': float(jnp.linalg.norm(grads[0]))}

    return run


def products(folder: Path) -> Run:
    """Matrix products of an update, forward and backward, of random numbers."""
    c = json.loads((folder / 'config.json').read_text())
    held = np.load(folder / 'rows.npz')
    rows, answer = held['answer'].shape
    tokens, scored = rows * (held['prompt'].shape[1] + answer), rows * answer
    width, inner, head = c['hidden_size'], c['intermediate_size'], c['head_dim']
    heads, groups = c['num_attention_heads'] * head, c['num_key_value_heads'] * head
    out = heads, groups, groups, inner, inner
    layer = [*((width, n) for n in out), (heads, width), (inner, width)]
    shapes = [(tokens, *shape) for shape in layer * c['num_hidden_layers']]
    # The head in parts, so that no array of all logits is written.
    shapes += [(len(part), width, c['vocab_size']) for part in np.split(np.arange(scored), PARTS)]
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    operands = [(draw(n, a), draw(a, b), draw(n, b)) for n, a, b in shapes]
    product = functools.partial(jnp.matmul, precision='highest')
    step = jax.jit(lambda x, w, g: (product(x, w), product(g, w.T), product(x.T, g)))
    operations = sum(6 * n * a * b for n, a, b in shapes)

    def run() -> dict[str, float]:
        for arrays in operands:
            jax.block_until_ready(step(*arrays))
        return {'operations': operations}

    return run


WORKS = dict(score=score, mixture=mixture, dense=dense, products=products)

if __name__ == '__main__':
    serve(WORKS)
