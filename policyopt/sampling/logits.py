"""From logits to a drawn token: temperature and inverse-CDF draws, in float32."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from policyopt.types import Array


def log_probs(logits: Array, temperature: Array | float) -> Array:
    """log softmax(logits / temperature) in float32: [..., V] -> [..., V]; temperature > 0."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)


def inverse_cdf(logp: Array, uniform: Array) -> Array:
    """Token whose interval of the cumulative distribution holds `uniform`: [B,V], [B] -> [B] int32.

    The distribution is scaled by its own float32 sum, and `uniform` lies in [0, 1), so the token
    drawn always has a positive probability.
    """
    chex.assert_rank([logp, uniform], [2, 1])
    chex.assert_equal_shape_prefix([logp, uniform], 1)
    cumulative = jnp.cumsum(jnp.exp(logp), axis=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    token = jnp.sum(cumulative <= target, axis=-1, dtype=jnp.int32)
    return jnp.minimum(token, logp.shape[-1] - 1)


def draw(logits: Array, uniform: Array, temperature: Array) -> tuple[Array, Array]:
    """Draw one token per row at `temperature`, with its log-prob under that very distribution.

    Temperature 0 takes the most probable token (the lowest id among equals), with log-prob 0.

    Args:
      logits: [B,V].
      uniform: [B] float32 in [0, 1), one per row.
      temperature: scalar or [B]; an array, so that changing it compiles nothing.

    Returns:
      token [B] int32 and logp [B] float32.
    """
    chex.assert_rank([logits, uniform], [2, 1])
    chex.assert_equal_shape_prefix([logits, uniform], 1)
    temperature = jnp.broadcast_to(temperature, uniform.shape)
    greedy = temperature == 0
    logp = log_probs(logits, jnp.where(greedy, 1, temperature)[:, None])
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    token = jnp.where(greedy, best, inverse_cdf(logp, uniform))
    taken = jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]
    return token, jnp.where(greedy, 0, taken)
