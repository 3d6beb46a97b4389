"""Log-softmax of taken tokens, over the vocabulary or a recorded support, of flat lists of tokens.

Tokens are cut into n chunks of R and go through the loops of `scoring_loops`, which keep logits of
one chunk at a time.

Shapes: N tokens in a flat list, D width, V vocabulary, K kept ids. Log-prob and entropy are in
nats, float32 (float64 where hidden states are).
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from policyopt import sharding
from policyopt.scoring_loops import Rows, Static, score_rows
from policyopt.types import Array

HIGHEST = jax.lax.Precision.HIGHEST

# Elements that one chunk of logits [R,V], or of gathered head rows [R,K,D], may have where the
# caller names no chunk size: 128 and 8 MiB in float32.
FULL_ELEMENTS = 2**25
SUPPORT_ELEMENTS = 2**21
# So much more on a TPU: each chunk reads the head and writes its gradient, and with few tokens that
# would take longer than the products.
TPU_FACTOR = 4
# On CPU logits have so many ids of the vocabulary, fewer where their rows of the head would have
# more than so many elements, and so many elements themselves: few MiB at a time, which a cache can
# hold, and of the last chunk little is padding.
CPU_BLOCK, CPU_HEAD, CPU_ELEMENTS = 2048, 2**21, 2**20
LANES = 128  # blocks are multiples of it


def token_logp_entropy(
    hidden: Array,
    head: Array,
    tokens: Array,
    *,
    temperature: Array | float = 1.0,
    chunk: int | None = None,
    block: int | None = None,
    entropy: bool = True,
    allowed: Array | None = None,
    active: Array | None = None,
    precision: Any = HIGHEST,
) -> tuple[Array, Array | None]:
    """Log-prob of the taken token and entropy of `softmax(head @ hidden / temperature)`.

        logp = l[token] - logsumexp(l),  entropy = -sum_v p_v log p_v,  l = head @ hidden / T

    Memory: a few [chunk,block] arrays and, in the backward pass, one [V,D] accumulator.

    Args:
      hidden: [N,D] float, the state that predicts each token.
      head: [V,D] float. Its gradient is accumulated in float32 whatever its dtype.
      tokens: [N] int, the tokens taken.
      temperature: scalar or [N], > 0. An array: another value compiles nothing. No gradient.
      chunk: tokens per chunk; None chooses by platform (`full_size`): up to 128 MiB of logits,
        512 on TPU, 4 on CPU. Changes memory and speed only.
      block: ids of the vocabulary at a time, likewise; None chooses by platform (`block_size`):
        up to 2048 on CPU, all elsewhere.
      entropy: False returns None for the entropy and does not compute it.
      allowed: [V] bool, tokens that may be drawn; the others have probability 0.
      active: [N] bool, tokens to score. Elsewhere results and gradients are 0, whatever stands
        there, and chunks after the last active token are not computed.
      precision: of the matmuls.

    Returns:
      (logp [N], entropy [N] or None). NaN for a token outside `allowed` or the vocabulary and
      for a traced temperature <= 0: -inf would pass through a ratio as a silent zero.

    Raises:
      ValueError: a temperature known at trace time is not > 0, chunk < 1 or block < 1.
    """
    chex.assert_rank([hidden, head, tokens], [2, 2, 1])
    chex.assert_equal_shape_prefix([hidden, tokens], 1)
    if block is not None and block < 1:
        raise ValueError(f'block={block}: ids at a time must be >= 1, or None to choose.')
    vocab = head.shape[0]
    block = block_size(*head.shape) if block is None else block
    static = Static(entropy, precision, block)
    size = full_size(vocab, block) if chunk is None else chunk_size(chunk, 1, 1)
    rows = _flat_rows(hidden, tokens, temperature, active, None, size)
    return _unflatten(score_rows(static, rows, head, allowed), tokens.shape[0], entropy)


def support_logp_entropy(
    hidden: Array,
    head: Array,
    tokens: Array,
    support: Array,
    *,
    temperature: Array | float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
    active: Array | None = None,
    precision: Any = HIGHEST,
) -> tuple[Array, Array | None]:
    """Log-prob of the taken token and entropy of a softmax over the kept token ids only.

        logp = l[token] - logsumexp_{v in support} l[v],  l[v] = head[v] @ hidden / T

    Temperature first, then the softmax over the support. Only the K named rows of `head` are
    read, and only they get gradient; nothing of size N x V exists.

    Args:
      hidden, head, tokens, temperature, entropy, active, precision: as `token_logp_entropy`.
      support: [N,K] int, distinct kept ids, -1 pads anywhere.
      chunk: tokens per chunk; None takes about 8 MiB of gathered head rows, 32 on TPU.

    Returns:
      (logp [N], entropy [N] or None). NaN where the taken token is not in its support, an id is
      beyond the vocabulary, or a traced temperature <= 0; `check_support` names such positions
      on the host. Repeated ids are not detected here.

    Raises:
      ValueError: a temperature known at trace time is not > 0, or chunk < 1.
    """
    chex.assert_rank([hidden, head, tokens, support], [2, 2, 1, 2])
    chex.assert_equal_shape_prefix([hidden, tokens, support], 1)
    kept = support.shape[1], head.shape[1]
    size = support_size(*kept) if chunk is None else chunk_size(chunk, 1, 1)
    rows = _flat_rows(hidden, tokens, temperature, active, support, size)
    return _unflatten(score_rows(Static(entropy, precision), rows, head), tokens.shape[0], entropy)


def check_temperature(temperature: Array | float, hidden: Array) -> Array:
    """Temperature without gradient, float32 or hidden's dtype if wider; NaN where it is not > 0.

    Raises ValueError where the value is known, that is, not traced.
    """
    if not isinstance(temperature, Tracer):
        bad = ~(np.asarray(temperature) > 0)
        if np.any(bad) or not np.all(np.isfinite(np.asarray(temperature))):
            raise ValueError(
                f'temperature={temperature}: scoring needs a finite temperature > 0. A greedy '
                'rollout (temperature 0) has log-prob 0 everywhere and cannot be trained on.'
            )
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    heat = jax.lax.stop_gradient(jnp.asarray(temperature, wide))
    return jnp.where(heat > 0, heat, jnp.nan)


def chunk_size(chunk: int | None, per_token: int, budget: int) -> int:
    """Tokens per chunk: the caller's, or as many as keep per_token x size within budget."""
    if chunk is None:
        size = max(1, budget // max(per_token, 1))
        return size if size < 64 else size // 64 * 64  # whole tiles of the matmul
    if chunk < 1:
        raise ValueError(f'chunk={chunk}: tokens per chunk must be >= 1, or None to choose.')
    return chunk


def block_size(vocab: int, width: int) -> int | None:
    """Ids of the vocabulary at a time, by the platform of what is being traced; None for all."""
    most = min(CPU_BLOCK, max(CPU_HEAD // width // LANES, 1) * LANES)
    if sharding.platform() != 'cpu' or vocab <= most:
        return None
    equal = -(-vocab // -(-vocab // most))  # the last block goes over few ids twice
    return -(-equal // LANES) * LANES


def full_size(vocab: int, block: int | None) -> int:
    """Tokens of a chunk of logits [R,V], or [R,block], likewise."""
    columns, budget = vocab if block is None else max(block, CPU_BLOCK), FULL_ELEMENTS
    if sharding.platform() == 'tpu':
        budget *= TPU_FACTOR
    elif sharding.platform() == 'cpu' and columns <= CPU_BLOCK:
        budget = CPU_ELEMENTS
    return chunk_size(None, columns, budget)


def support_size(kept: int, width: int) -> int:
    """Tokens of a chunk of gathered head rows [R,K,D], likewise."""
    budget = SUPPORT_ELEMENTS * (TPU_FACTOR if sharding.platform() == 'tpu' else 1)
    return chunk_size(None, kept * width, budget)


def _flat_rows(
    hidden: Array,
    tokens: Array,
    temperature: Array | float,
    active: Array | None,
    support: Array | None,
    size: int,
) -> Rows:
    """N tokens as chunks [n,size], the last one padded with inactive tokens."""
    n = tokens.shape[0]
    size = max(1, min(size, n))
    pad = -n % size
    active = jnp.ones(n, bool) if active is None else active != 0
    heat = jnp.broadcast_to(check_temperature(temperature, hidden), (n,))
    rows = Rows(hidden, tokens, heat, active, support)

    def cut(x):
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape((n + pad) // size, size, *x.shape[1:])

    return jax.tree.map(cut, rows)


def _unflatten(stats: tuple[Array, Array], n: int, entropy: bool) -> tuple[Array, Array | None]:
    """Undo `_flat_rows` on results."""
    return stats[0].ravel()[:n], stats[1].ravel()[:n] if entropy else None
