"""The mixture-of-experts layer again, as plainly as it can be said, for its tests to hold to."""

import jax
import jax.numpy as jnp
import numpy as np

from policyopt.models.moe import MoEConfig


def random_params(rng, config: MoEConfig, width: int, inner: int, dtype=np.float32) -> dict:
    """Parameters of every part that the config has."""

    def normal(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(dtype)

    experts = config.experts
    params = {
        'router': 2 * normal(experts, width),
        'gate': normal(experts, width, inner),
        'up': normal(experts, width, inner),
        'down': normal(experts, inner, width),
    }
    if config.selection_bias:
        params['bias'] = normal(experts)
    if config.shared_experts:
        hidden = config.shared_experts * inner
        params['shared'] = {
            'gate': normal(width, hidden),
            'up': normal(width, hidden),
            'down': normal(hidden, width),
            'shared_gate': normal(width),
        }
    return params


def choose(logits: np.ndarray, config: MoEConfig, bias: np.ndarray | None) -> list[int]:
    """Experts of one token, best first, from its float64 logits [E]."""
    if config.scoring == 'softmax':
        scores = np.exp(logits - logits.max())
        scores = scores / scores.sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    if bias is not None:
        scores = scores + bias
    size = config.experts // config.groups
    strength = []
    for g in range(config.groups):
        best = sorted(scores[g * size : (g + 1) * size], reverse=True)
        strength.append(sum(best[:2]) if config.scoring == 'sigmoid' else best[0])
    groups = sorted(range(config.groups), key=lambda g: -strength[g])[: config.top_groups]
    legal = [e for e in range(config.experts) if e // size in groups]
    return sorted(legal, key=lambda e: -scores[e])[: config.top_k]


def choose_all(x, params, config: MoEConfig, valid) -> np.ndarray:
    """Experts [N,k] of every token, -1 for those that are not valid."""
    router = np.asarray(params['router'], np.float64)
    bias = np.asarray(params['bias'], np.float64) if config.selection_bias else None
    ids = np.full((len(x), config.top_k), -1)
    for n, row in enumerate(np.asarray(x, np.float64)):
        if valid[n]:
            ids[n] = choose(router @ row, config, bias)
    return ids


def expert_loop(x, params, config: MoEConfig, ids: np.ndarray):
    """Output [N,D] for experts ids [N,k] (known numbers), one expert at a time, differentiable."""
    valid = ids[:, 0] >= 0
    x = jnp.where(valid[:, None], x, 0)
    logits = jnp.dot(x, params['router'].T, precision='highest')
    squash = jax.nn.softmax if config.scoring == 'softmax' else jax.nn.sigmoid
    weights = jnp.take_along_axis(squash(logits), jnp.asarray(np.maximum(ids, 0)), axis=1)
    if config.renormalise:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    weights = config.route_scale * weights
    y = jnp.zeros(x.shape)
    for e in range(config.experts):
        rows, column = np.nonzero(ids == e)
        h = x[rows]
        h = jax.nn.silu(h @ params['gate'][e]) * (h @ params['up'][e])
        y = y.at[rows].add(weights[rows, column, None] * (h @ params['down'][e]))
    if config.shared_experts:
        shared = params['shared']
        h = jax.nn.silu(x @ shared['gate']) * (x @ shared['up'])
        y = y + jax.nn.sigmoid(x @ shared['shared_gate'])[:, None] * (h @ shared['down'])
    return jnp.where(valid[:, None], y, 0)


def numpy_layer(x, params, config: MoEConfig, ids: np.ndarray) -> np.ndarray:
    """The same in float64 numpy, one token and one entry at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    y = np.zeros(x.shape)
    for n, row in enumerate(np.asarray(x, np.float64)):
        logits = p['router'] @ row
        if config.scoring == 'softmax':
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
        for e in ids[n]:
            weight = config.route_scale * scores[e]
            if config.renormalise:
                weight = weight / scores[ids[n]].sum()
            gate = p['gate'][e].T @ row
            y[n] += weight * p['down'][e].T @ (gate / (1 + np.exp(-gate)) * (p['up'][e].T @ row))
    return y
