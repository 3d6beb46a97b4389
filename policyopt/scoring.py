"""Log-probs, entropy and values of the tokens that a policy chose, never a [B,T,V] array.

`score` runs the model once, picks out the positions where `mask` is nonzero and computes
log-softmax over them chunk by chunk, with a hand-written VJP that recomputes each chunk. Where the
rollout recorded the kept token ids, only those rows of the head are read: no matmul over the
vocabulary happens, and the log-prob is the one the sampler drew with.

Shapes: B rows, T tokens per row, N tokens in a flat list, D width, V vocabulary, K kept ids.
Log-prob and entropy are in nats, float32 (float64 where hidden states are).

Derivatives: reverse mode, and forward over reverse (`jax.jvp` or `jax.linearize` of `jax.grad`),
which is what Hessian-vector products need. Reverse over reverse raises: the loops run only as many
chunks as hold active tokens.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import masked
from policyopt.types import Array, Scores

HIGHEST = jax.lax.Precision.HIGHEST

# Elements that one chunk of logits [chunk,V], or of gathered head rows [chunk,K,D], may have where
# the caller names no chunk size: 128 and 8 MiB in float32.
FULL_ELEMENTS = 2**25
SUPPORT_ELEMENTS = 2**21


class _Static(NamedTuple):
    """What the chunk loops are compiled for."""

    entropy: bool
    precision: Any


class _Rows(NamedTuple):
    """Tokens to score, cut into n chunks of R: leading axes [n,R], or [R] inside the loop."""

    hidden: Array  # [...,D]
    tokens: Array  # int
    temperature: Array
    active: Array  # bool; the others cost nothing where a whole chunk has none
    support: Array | None = None  # [...,K] int, -1 pads; None: the whole vocabulary


class _Stats(NamedTuple):
    """Per token: results, and what the backward pass needs to rebuild the softmax."""

    logp: Array
    entropy: Array
    top: Array  # the largest scaled logit
    log_sum: Array  # log sum exp(scaled logit - top)


def token_logp_entropy(
    hidden: Array,
    head: Array,
    tokens: Array,
    *,
    temperature: Array | float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
    allowed: Array | None = None,
    active: Array | None = None,
    precision: Any = HIGHEST,
) -> tuple[Array, Array | None]:
    """Log-prob of the taken token and entropy of `softmax(head @ hidden / temperature)`.

        logp = l[token] - logsumexp(l),  entropy = -sum_v p_v log p_v,  l = head @ hidden / T

    Memory: a few [chunk,V] arrays and, in the backward pass, one [V,D] accumulator.

    Args:
      hidden: [N,D] float, the state that predicts each token.
      head: [V,D] float. Its gradient is accumulated in float32 whatever its dtype.
      tokens: [N] int, the tokens taken.
      temperature: scalar or [N], > 0. An array: another value compiles nothing. No gradient.
      chunk: tokens per chunk; None takes about 128 MiB of logits. Changes memory and speed only.
      entropy: False returns None for the entropy and does not compute it.
      allowed: [V] bool, tokens that may be drawn; the others have probability 0.
      active: [N] bool, tokens to score. Elsewhere results and gradients are 0, whatever stands
        there, and chunks after the last active token are not computed.
      precision: of the matmuls.

    Returns:
      (logp [N], entropy [N] or None). NaN for a token outside `allowed` or the vocabulary and
      for a traced temperature <= 0: -inf would pass through a ratio as a silent zero.

    Raises:
      ValueError: a temperature known at trace time is not > 0, or chunk < 1.
    """
    chex.assert_rank([hidden, head, tokens], [2, 2, 1])
    chex.assert_equal_shape_prefix([hidden, tokens], 1)
    chex.assert_equal(hidden.shape[1], head.shape[1])
    vocab = head.shape[0]
    if allowed is not None:
        chex.assert_shape(allowed, (vocab,))
        allowed = jnp.asarray(allowed, bool)
    rows = _flat_rows(
        hidden, tokens, temperature, active, None, _chunk_size(chunk, vocab, FULL_ELEMENTS)
    )
    stats = _full(_Static(entropy, precision), rows, head, allowed)
    return _unflatten(stats, tokens.shape[0], entropy)


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
      chunk: tokens per chunk; None takes about 8 MiB of gathered head rows.

    Returns:
      (logp [N], entropy [N] or None). NaN where the taken token is not in its support, an id is
      beyond the vocabulary, or a traced temperature <= 0; `check_support` names such positions
      on the host. Repeated ids are not detected here.

    Raises:
      ValueError: a temperature known at trace time is not > 0, or chunk < 1.
    """
    chex.assert_rank([hidden, head, tokens, support], [2, 2, 1, 2])
    chex.assert_equal_shape_prefix([hidden, tokens, support], 1)
    chex.assert_equal(hidden.shape[1], head.shape[1])
    size = _chunk_size(chunk, support.shape[1] * head.shape[1], SUPPORT_ELEMENTS)
    rows = _flat_rows(hidden, tokens, temperature, active, support, size)
    stats = _support(_Static(entropy, precision), rows, head)
    return _unflatten(stats, tokens.shape[0], entropy)


def score(
    model: Any,
    params: Any,
    batch: Any,
    *,
    temperature: Array | float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
    allowed: Array | None = None,
    replay_support: bool = True,
    replay_routing: bool = True,
    shards: int = 1,
) -> Scores:
    """Score the chosen tokens of a batch under `params`: one forward of the model, then the head.

    Args:
      model: has `hidden(params, tokens, valid=, routing=)`, `head(params)`, `config` and, with a
        value head, `value(params, hidden)`.
      params: its parameters.
      batch: has tokens [B,T] and mask [B,T]; length [B], support [B,T,K] and routing [B,T,L,k] may
        be None or absent. A Rollout or a TokenBatch.
      replay_support: score on the recorded support where the batch has one; False uses the full
        vocabulary, and then the ratio to the sampler is the kept probability mass.
      replay_routing: pass the recorded experts to the model; routing[t] belongs to the forward
        pass with tokens[t] as input, so it needs no shift.
      temperature, chunk, entropy, allowed, shards: as `score_hidden`.

    Returns:
      Scores, see `score_hidden`.
    """
    tokens, length = batch.tokens, getattr(batch, 'length', None)
    chex.assert_rank(tokens, 2)
    valid = None if length is None else jnp.arange(tokens.shape[1]) < length[:, None]
    routing = getattr(batch, 'routing', None) if replay_routing else None
    hidden = model.hidden(params, tokens, valid=valid, routing=routing).hidden
    return score_hidden(
        model,
        params,
        hidden,
        batch,
        temperature=temperature,
        chunk=chunk,
        entropy=entropy,
        allowed=allowed,
        replay_support=replay_support,
        shards=shards,
    )


def score_hidden(
    model: Any,
    params: Any,
    hidden: Array,
    batch: Any,
    *,
    temperature: Array | float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
    allowed: Array | None = None,
    replay_support: bool = True,
    shards: int = 1,
) -> Scores:
    """The part of `score` after the trunk, for callers that use the trunk's routing or losses too.

    tokens[b,t] is scored from hidden[b,t-1]. Positions with mask 0 and the first token of a row,
    which nothing predicts, give 0 and get no gradient, NaN in their hidden state included. Active
    positions are moved to the front first, so the cost follows their number, not B x T.

    Args:
      model, params, batch, replay_support: as `score`.
      hidden: [B,T,D], output of the model's trunk.
      temperature: scalar or [B], > 0: the sampler's. An array: another value compiles nothing.
      chunk: tokens per chunk of the head; None chooses by size. Changes memory and speed only.
      entropy: False leaves Scores.entropy None.
      allowed: [V] bool, the sampler's static set; not used on a recorded support, which is
        already inside it.
      shards: over how many devices the batch axis is split: positions then move only inside their
        device's rows. B must be a multiple of it. Changes speed only.

    Returns:
      Scores of [B,T]: logp_new, entropy, and values where the model has a value head (value of
      the state before tokens[t], from hidden[t-1]); all 0 where mask is 0. NaN where
      `token_logp_entropy` and `support_logp_entropy` say so.

    Raises:
      ValueError: temperature not > 0 (a greedy rollout has no gradient to train on), chunk < 1,
        or B not a multiple of shards.
    """
    tokens = batch.tokens
    chex.assert_rank([tokens, hidden], [2, 3])
    chex.assert_equal_shape([tokens, batch.mask])
    chex.assert_equal_shape_prefix([tokens, hidden], 2)
    height, width = tokens.shape
    if shards < 1 or height % shards:
        raise ValueError(f'shards={shards}: the {height} rows must be a positive multiple of it.')
    head = model.head(params)
    support = getattr(batch, 'support', None) if replay_support else None
    active = (batch.mask != 0).at[:, 0].set(False)
    heat = _check_temperature(temperature)
    heat = jnp.broadcast_to(heat[:, None] if heat.ndim else heat, tokens.shape)

    per_token = head.shape[0] if support is None else support.shape[2] * head.shape[1]
    budget = FULL_ELEMENTS if support is None else SUPPORT_ELEMENTS
    each = height * width // shards
    size = min(max(_chunk_size(chunk, per_token, budget) // shards, 1), each)
    chunks = -(-each // size)

    # index[g,i]: the i-th active position of group g of rows, `each` (out of range) past the last.
    index = jax.vmap(lambda a: jnp.nonzero(a, size=chunks * size, fill_value=each)[0])(
        active.reshape(shards, each)
    )

    def pick(x, shift=0):
        x = x.reshape(shards, each, *x.shape[2:])
        at = jnp.where(index < each, index - shift, each)
        x = jax.vmap(lambda v, i: v.at[i].get(mode='fill', fill_value=0))(x, at)
        x = x.reshape(shards, chunks, size, *x.shape[2:])
        return x.swapaxes(0, 1).reshape(chunks, shards * size, *x.shape[3:])

    def put(x):
        x = x.reshape(chunks, shards, size).swapaxes(0, 1).reshape(shards, chunks * size)
        out = jnp.zeros((shards, each), x.dtype)
        out = jax.vmap(lambda o, v, i: o.at[i].set(v, mode='drop'))(out, x, index)
        return out.reshape(height, width)

    rows = _Rows(
        hidden=pick(hidden, 1),
        tokens=pick(tokens),
        temperature=pick(heat),
        active=pick(active),
        support=None if support is None else pick(support),
    )
    static = _Static(entropy, getattr(model.config, 'precision', None) or HIGHEST)
    if support is None:
        allowed = None if allowed is None else jnp.asarray(allowed, bool)
        stats = _full(static, rows, head, allowed)
    else:
        stats = _support(static, rows, head)
    values = None
    if getattr(model.config, 'value_head', False):
        before = jnp.roll(model.value(params, hidden), 1, axis=1)
        values = masked.select(active, before)
    return Scores(logp_new=put(stats[0]), entropy=put(stats[1]) if entropy else None, values=values)


# ---------------------------------------------------------------------------- chunk loops


def _row_stats(static: _Static, scaled: Array, slot: Array) -> _Stats:
    """Statistics of softmax(scaled [R,C]) with slot [R] taken; -inf entries have probability 0."""
    top = jax.lax.stop_gradient(jnp.max(scaled, axis=1))
    shifted = scaled - top[:, None]
    weight = jnp.exp(shifted)
    total = jnp.sum(weight, axis=1)
    log_sum = jnp.log(total)
    taken = jnp.take_along_axis(shifted, slot[:, None], axis=1, mode='fill')[:, 0]
    taken = jnp.where(taken == -jnp.inf, jnp.nan, taken)
    entropy = jnp.zeros_like(log_sum)
    if static.entropy:
        moment = jnp.sum(jnp.where(weight > 0, weight * shifted, 0), axis=1)
        entropy = log_sum - moment / total
    return _Stats(taken - log_sum, entropy, top, log_sum)


def _row_cotangent(
    static: _Static, scaled: Array, slot: Array, stats: _Stats, g: tuple[Array, Array]
) -> Array:
    """Cotangent of `scaled`: g_logp (1[taken] - p) - g_entropy p (log p + entropy)."""
    logp = scaled - stats.top[:, None] - stats.log_sum[:, None]
    p = jnp.exp(logp)
    taken = jnp.arange(scaled.shape[1]) == slot[:, None]
    out = g[0][:, None] * (taken - p)
    if static.entropy:
        logp = jnp.where(p > 0, logp, 0)
        out = out - g[1][:, None] * p * (logp + stats.entropy[:, None])
    return jnp.where(scaled > -jnp.inf, out, 0)


def _full_scaled(
    static: _Static, row: _Rows, head: Array, allowed: Array | None
) -> tuple[Array, Array]:
    """Scaled logits [R,V] of one chunk, -inf where not allowed, and the taken column [R]."""
    logits = jax.lax.dot_general(
        row.hidden,
        head,
        (((1,), (1,)), ((), ())),
        precision=static.precision,
        preferred_element_type=_wide(row.hidden),
    )
    scaled = logits / row.temperature[:, None]
    if allowed is not None:
        scaled = jnp.where(allowed, scaled, -jnp.inf)
    return scaled, jnp.where(row.tokens < 0, head.shape[0], row.tokens)


def _support_scaled(static: _Static, row: _Rows, head: Array) -> tuple[Array, Array, Array]:
    """Scaled logits [R,K] of one chunk, -inf at pads; the taken column [R]; head rows [R,K,D]."""
    kept = row.support
    assert kept is not None
    kept_rows = head.at[jnp.maximum(kept, 0)].get(mode='fill', fill_value=jnp.nan)
    logits = jnp.einsum(
        'rd,rkd->rk',
        row.hidden,
        kept_rows,
        precision=static.precision,
        preferred_element_type=_wide(row.hidden),
    )
    scaled = jnp.where(kept >= 0, logits / row.temperature[:, None], -jnp.inf)
    match = (kept == row.tokens[:, None]) & (kept >= 0)
    slot = jnp.where(jnp.any(match, axis=1), jnp.argmax(match, axis=1), kept.shape[1])
    return scaled, slot, kept_rows


def _forward(static: _Static, rows: _Rows, scaled_of: Any) -> _Stats:
    """Run the chunks that hold active tokens; zeros elsewhere. All fields [n,R]."""
    zeros = jnp.zeros(rows.tokens.shape, _wide(rows.hidden))

    def body(i, out):
        row = _take(rows, i)
        stats = _row_stats(static, *scaled_of(row)[:2])
        return jax.tree.map(lambda o, s: o.at[i].set(jnp.where(row.active, s, 0)), out, stats)

    return jax.lax.fori_loop(0, _used(rows), body, _Stats(zeros, zeros, zeros, zeros))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _full(static: _Static, rows: _Rows, head: Array, allowed: Array | None) -> tuple[Array, Array]:
    """(logp, entropy) [n,R] over the whole vocabulary."""
    return _full_fwd(static, rows, head, allowed)[0]


def _full_fwd(static, rows, head, allowed):
    weight = head.astype(rows.hidden.dtype)
    stats = _forward(static, rows, lambda row: _full_scaled(static, row, weight, allowed))
    return (stats.logp, stats.entropy), (rows, head, allowed, stats)


def _full_bwd(static, residuals, g):
    rows, head, allowed, stats = residuals
    weight, wide = head.astype(rows.hidden.dtype), _wide(rows.hidden)

    def body(i, carry):
        d_hidden, d_head = carry
        row = _take(rows, i)
        scaled, slot = _full_scaled(static, row, weight, allowed)
        d = _row_cotangent(static, scaled, slot, _take(stats, i), _take(g, i))
        d = jnp.where(row.active[:, None], d / row.temperature[:, None], 0)
        d = d.astype(row.hidden.dtype)
        dot = functools.partial(
            jax.lax.dot_general, precision=static.precision, preferred_element_type=wide
        )
        d_row = dot(d, weight, (((1,), (0,)), ((), ())))
        d_head = d_head + dot(d, row.hidden, (((0,), (0,)), ((), ())))
        return d_hidden.at[i].set(d_row.astype(d_hidden.dtype)), d_head

    init = jnp.zeros_like(rows.hidden), jnp.zeros(head.shape, wide)
    d_hidden, d_head = jax.lax.fori_loop(0, _used(rows), body, init)
    return (
        _Rows(d_hidden, None, jnp.zeros_like(rows.temperature), None),
        d_head.astype(head.dtype),
        None,
    )


_full.defvjp(_full_fwd, _full_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _support(static: _Static, rows: _Rows, head: Array) -> tuple[Array, Array]:
    """(logp, entropy) [n,R] over the recorded support."""
    return _support_fwd(static, rows, head)[0]


def _support_fwd(static, rows, head):
    stats = _forward(static, rows, lambda row: _support_scaled(static, row, head))
    return (stats.logp, stats.entropy), (rows, head, stats)


def _support_bwd(static, residuals, g):
    rows, head, stats = residuals
    wide = _wide(rows.hidden)

    def body(i, carry):
        d_hidden, d_head = carry
        row = _take(rows, i)
        scaled, slot, kept_rows = _support_scaled(static, row, head)
        d = _row_cotangent(static, scaled, slot, _take(stats, i), _take(g, i))
        d = jnp.where(row.active[:, None], d / row.temperature[:, None], 0)
        d_row = jnp.einsum(
            'rk,rkd->rd', d, kept_rows, precision=static.precision, preferred_element_type=wide
        )
        # Pads go out of range and are dropped; -1 would wrap to the last row.
        at = jnp.where((row.support >= 0) & row.active[:, None], row.support, head.shape[0])
        d_head = d_head.at[at].add(d[:, :, None] * row.hidden[:, None, :], mode='drop')
        return d_hidden.at[i].set(d_row.astype(d_hidden.dtype)), d_head

    init = jnp.zeros_like(rows.hidden), jnp.zeros(head.shape, wide)
    d_hidden, d_head = jax.lax.fori_loop(0, _used(rows), body, init)
    return _Rows(d_hidden, None, jnp.zeros_like(rows.temperature), None, None), d_head.astype(
        head.dtype
    )


_support.defvjp(_support_fwd, _support_bwd)


# ---------------------------------------------------------------------------- small helpers


def _wide(x: Array) -> Any:
    """Dtype of logits and sums: float32, float64 for float64."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _take(tree: Any, i: Array) -> Any:
    """Chunk i of every array, inactive rows' hidden states zeroed."""
    part = jax.tree.map(lambda x: x[i], tree)
    if isinstance(part, _Rows):
        part = part._replace(
            hidden=masked.select(part.active[:, None], part.hidden),
            temperature=jnp.where(part.active, part.temperature, 1),
        )
    return part


def _used(rows: _Rows) -> Array:
    """Number of chunks up to the last one with an active token."""
    some = jnp.any(rows.active, axis=1)
    return jnp.max(jnp.where(some, jnp.arange(1, some.size + 1), 0), initial=0)


def _chunk_size(chunk: int | None, per_token: int, budget: int) -> int:
    """Tokens per chunk: the caller's, or as many as keep per_token x size within budget."""
    if chunk is None:
        return max(1, budget // max(per_token, 1))
    if chunk < 1:
        raise ValueError(f'chunk={chunk}: tokens per chunk must be >= 1, or None to choose.')
    return chunk


def _check_temperature(temperature: Array | float) -> Array:
    """Temperature as a float array without gradient; NaN where a traced value is not > 0."""
    if not isinstance(temperature, jax.core.Tracer):
        bad = ~(np.asarray(temperature) > 0)
        if np.any(bad) or not np.all(np.isfinite(np.asarray(temperature))):
            raise ValueError(
                f'temperature={temperature}: scoring needs a finite temperature > 0. A greedy '
                'rollout (temperature 0) has log-prob 0 everywhere and cannot be trained on.'
            )
    heat = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.result_type(float)))
    return jnp.where(heat > 0, heat, jnp.nan)


def _flat_rows(
    hidden: Array,
    tokens: Array,
    temperature: Array | float,
    active: Array | None,
    support: Array | None,
    size: int,
) -> _Rows:
    """N tokens as chunks [n,size], the last one padded with inactive tokens."""
    n = tokens.shape[0]
    size = max(1, min(size, n))
    pad = -n % size
    active = jnp.ones(n, bool) if active is None else active != 0
    heat = jnp.broadcast_to(_check_temperature(temperature), (n,))
    rows = _Rows(hidden, tokens, heat, active, support)

    def cut(x):
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    return jax.tree.map(cut, rows)


def _unflatten(stats: tuple[Array, Array], n: int, entropy: bool) -> tuple[Array, Array | None]:
    """Undo `_flat_rows` on results."""
    return stats[0].ravel()[:n], stats[1].ravel()[:n] if entropy else None


# ---------------------------------------------------------------------------- host-side checks


def check_support(batch: Any, vocab_size: int | None = None) -> None:
    """Raise ValueError naming row and position where a recorded support cannot be replayed.

    On the host, for a finished batch: jitted scoring can only answer NaN. At every position with a
    nonzero mask the taken token must be among the support ids, the ids must be distinct, and,
    where `vocab_size` is given, below it. A batch without support passes.

    Args:
      batch: has tokens [B,T], mask [B,T] and support [B,T,K] or None.
      vocab_size: V, or None not to check the range.
    """
    if getattr(batch, 'support', None) is None:
        return
    tokens, support = np.asarray(batch.tokens), np.asarray(batch.support)
    active = np.asarray(batch.mask) != 0
    ordered = np.sort(support, axis=-1)
    twice = np.any((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0), axis=-1)
    beyond = np.any(support >= (math.inf if vocab_size is None else vocab_size), axis=-1)
    missing = ~np.any((support == tokens[..., None]) & (support >= 0), axis=-1)
    for bad, what in (
        (missing, 'the sampled token is not in its support'),
        (twice, 'the support names a token twice'),
        (beyond, f'the support names a token beyond the vocabulary ({vocab_size})'),
    ):
        if np.any(bad & active):
            row, t = np.argwhere(bad & active)[0]
            raise ValueError(
                f'row {row}, position {t}: {what}: token {tokens[row, t]}, support '
                f'{support[row, t].tolist()}; {int(np.sum(bad & active))} such positions in all.'
            )


def check_reference(logp_ref: Array, mask: Array) -> None:
    """Raise ValueError naming row and position where the reference gives a taken token no mass.

    On the host. A KL penalty against a reference with log-prob -inf or NaN there has no finite
    value; it means that the reference excludes an id that the policy kept.

    Args:
      logp_ref: [B,T] float, reference log-prob, on the policy's support.
      mask: [B,T], nonzero on tokens the policy chose.
    """
    logp_ref = np.asarray(logp_ref)
    bad = (np.asarray(mask) != 0) & ~np.isfinite(logp_ref)
    if np.any(bad):
        row, t = np.argwhere(bad)[0]
        raise ValueError(
            f'row {row}, position {t}: the reference policy gives the kept token no finite mass '
            f'(logp_ref={logp_ref[row, t]}); {int(bad.sum())} such positions in all. Use a '
            'reference with the same vocabulary and allowed tokens as the policy.'
        )
