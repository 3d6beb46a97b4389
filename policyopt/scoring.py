"""Log-probs, entropy and values of the tokens that a policy chose.

`score` runs the model once, picks out the positions where `mask` is nonzero and computes
log-softmax over them chunk by chunk (`scoring_loops`). An array of logits has 2^25 elements at most
on each device, 128 MiB in float32 (2^27 on TPU; on CPU 2^20, by blocks of the vocabulary, unless
devices share it), or chunk x V where `chunk` is given: a batch whose B x T x V is below that is one
chunk, a larger one never has a [B,T,V] array.

Where the rollout recorded the kept token ids, only those rows of the head are read: no matmul over
the vocabulary happens, and the log-prob is the one the sampler drew with. `check_support`,
`check_routing` and `check_reference` run on the host and name the position that jitted scoring can
only answer with NaN, or with live routing.

Shapes: B rows, T tokens per row, D width, V vocabulary, K kept ids, L layers, k experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import masked, sharding
from policyopt.scoring_kernels import (
    block_size,
    check_temperature,
    chunk_size,
    full_size,
    support_logp_entropy,
    support_size,
    token_logp_entropy,
)
from policyopt.scoring_loops import Rows, Static, score_rows
from policyopt.types import Array, Scores

__all__ = [
    'check_reference',
    'check_routing',
    'check_support',
    'score',
    'score_and_hidden',
    'score_hidden',
    'support_faults',
    'support_logp_entropy',
    'token_logp_entropy',
    'token_values',
]


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
) -> Scores:
    """Score the chosen tokens of a batch under `params`: one forward of the trunk, then the head.

    Args:
      model: a `policyopt.models` model.
      params: its parameters.
      batch: a Rollout, a TokenBatch or anything with tokens [B,T] int and mask [B,T]; length [B],
        support [B,T,K] and routing [B,T,L,k] may be None or absent. Without length every position
        is attended to.
      replay_support: score on the recorded support where the batch has one. False uses the full
        vocabulary, and then the ratio to the sampler is the kept probability mass.
      replay_routing: give the model the recorded experts where the batch has them. routing[t] is
        the forward pass with tokens[t] as input, so it is passed on unshifted.
      temperature, chunk, entropy, allowed: as `score_hidden`.

    Returns and raises as `score_hidden`.
    """
    scores, _ = score_and_hidden(
        model,
        params,
        batch,
        temperature=temperature,
        chunk=chunk,
        entropy=entropy,
        allowed=allowed,
        replay_support=replay_support,
        replay_routing=replay_routing,
    )
    return scores


def score_and_hidden(
    model: Any, params: Any, batch: Any, *, replay_routing: bool = True, **options: Any
) -> tuple[Scores, Any]:
    """`score`, with the `models.Hidden` of the same forward pass.

    For what a mixture of experts has beside log-probs: `hidden.aux` holds the load-balance loss and
    the router z-loss, differentiable, and `hidden.routing` [B,T,L,k] the experts used. Recorded
    here under the old parameters, with `replay_routing=False`, and put into the batch, that routing
    is replayed by later calls: the trainer's own routing, where a rollout's comes from the sampler.

    Args:
      model, params, batch, replay_routing: as `score`.
      **options: as `score_hidden`.

    Raises as `score_hidden`.
    """
    tokens, length = batch.tokens, getattr(batch, 'length', None)
    chex.assert_rank(tokens, 2)
    valid = None if length is None else jnp.arange(tokens.shape[1]) < length[:, None]
    routing = getattr(batch, 'routing', None) if replay_routing else None
    hidden = model.hidden(params, tokens, valid=valid, routing=routing)
    return score_hidden(model, params, hidden.hidden, batch, **options), hidden


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
) -> Scores:
    """The part of `score` after the trunk, for callers that have hidden states already.

    tokens[b,t] is scored from hidden[b,t-1]. Positions with mask 0, and the first token of a row,
    which nothing predicts, give 0 and no gradient, whatever their hidden state is. Active positions
    move to the front of each device's rows first, so the cost follows their number, not B x T.

    Args:
      model, params, batch, replay_support: as `score`.
      hidden: [B,T,D], states after the trunk's final norm.
      temperature: scalar or [B], > 0: the sampler's. An array: another value compiles nothing. No
        gradient.
      chunk: tokens per chunk of the head; None chooses by size. Changes memory and speed only.
      entropy: False leaves Scores.entropy None and does not compute it.
      allowed: [V] bool, the sampler's static set of tokens. Not needed on a recorded support, which
        is inside it already, and not applied there.

    Returns:
      Scores of [B,T] arrays: logp_new, entropy, and values where `model.config.value_head` (value
      of the state before tokens[t], from hidden[t-1]); all 0 where mask is 0. Values that cannot be
      right are NaN, never -inf: see `token_logp_entropy` and `support_logp_entropy`.

    Raises:
      ValueError: a temperature known at trace time is not > 0 (the log-probs of a greedy rollout
        are all 0: there is nothing to train on), or chunk < 1.
    """
    tokens = batch.tokens
    chex.assert_rank([tokens, hidden], [2, 3])
    chex.assert_equal_shape([tokens, batch.mask])
    chex.assert_equal_shape_prefix([tokens, hidden], 2)
    rules = getattr(model, 'rules', sharding.DEFAULT_RULES)
    head = sharding.constrain(model.head(params), ('vocab', None), rules)
    support = getattr(batch, 'support', None) if replay_support else None
    active = (batch.mask != 0).at[:, 0].set(False)
    heat = check_temperature(temperature, hidden)
    heat = jnp.broadcast_to(heat[:, None] if heat.ndim else heat, tokens.shape)

    kept = None if support is None else support.shape[2]
    pick, put = _compaction(active, tokens_at_once(chunk, head.shape, kept, rules), rules)
    rows = Rows(
        hidden=pick(hidden, 1),
        tokens=pick(tokens),
        temperature=pick(heat),
        active=pick(active),
        support=None if support is None else pick(support),
    )
    static = Static(entropy, model.config.lax_precision, ids_at_once(head.shape, rules))
    logp, spread = _score_shards(static, rows, head, allowed if support is None else None, rules)
    values = token_values(model, params, hidden, active) if model.config.value_head else None
    return Scores(logp_new=put(logp), entropy=put(spread) if entropy else None, values=values)


def tokens_at_once(
    chunk: int | None, head: tuple[int, ...], kept: int | None, rules: sharding.Rules
) -> int:
    """Tokens of one chunk of the head [V,D] over the whole mesh: `chunk`, or chosen by size.

    What is chosen by size keeps the logits of each device's share, over the vocabulary or the K
    `kept` ids, within what `scoring_kernels` allows on its platform.
    """
    if chunk is not None:
        return chunk_size(chunk, 1, 1)
    if kept is None:
        size = full_size(head[0], ids_at_once(head, rules))
    else:
        size = support_size(kept, head[1])
    return size * sharding.batch_shards(rules)


def ids_at_once(head: tuple[int, ...], rules: sharding.Rules) -> int | None:
    """Ids of the vocabulary in one turn over the head [V,D]; None for all.

    A head that is split over devices has no blocks: they would have to be gathered.
    """
    whole = sharding.mesh_spec(('vocab', None), head, rules) is None
    return block_size(*head) if whole else None


def _score_shards(
    static: Static, rows: Rows, head: Array, allowed: Array | None, rules: sharding.Rules
) -> tuple[Array, Array]:
    """`score_rows`, on each device's own tokens.

    Left to the compiler, the head's gradient would be summed over devices in every chunk, where
    once behind the loop is enough.
    """
    spec = sharding.mesh_spec((None, 'batch'), rows.tokens.shape, rules)
    if spec is None:
        return score_rows(static, rows, head, allowed)
    split = (spec[1],) if isinstance(spec[1], str) else tuple(spec[1])
    whole: Any = jax.sharding.PartitionSpec()
    by_token: Any = jax.sharding.PartitionSpec(None, split)
    local = jax.shard_map(
        functools.partial(score_rows, static),
        in_specs=(by_token, whole, whole),
        out_specs=by_token,
        axis_names=set(split),
        check_vma=False,
    )
    return local(rows, head, allowed)


def token_values(model: Any, params: Any, hidden: Array, mask: Array) -> Array:
    """Value of the state before each token is drawn: [B,T], from hidden[t-1]; 0 off the mask.

    What stands in states that predict no token of the mask, NaN included, reaches no gradient.
    """
    chex.assert_equal_shape_prefix([hidden, mask], 2)
    active = (jnp.asarray(mask) != 0).at[:, 0].set(False)
    # Unused states leave before the matmul: NaN x 0 would reach the value head's gradient.
    states = masked.select(jnp.roll(active, -1, axis=1)[:, :, None], hidden)
    return masked.select(active, jnp.roll(model.value(params, states), 1, axis=1))


def _compaction(
    active: Array, size: int, rules: sharding.Rules
) -> tuple[Callable[..., Array], Callable[[Array], Array]]:
    """Functions that bring active positions [B,T] to the front, and results back.

    pick(x [B,T,...], shift=0) -> [n,R,...]: x at `shift` places before each active position,
    n chunks of R = about `size`; 0 past the last one. put([n,R]) -> [B,T], 0 where not active.
    Positions never leave the rows of their device, so that on a mesh no state is moved, and every
    chunk holds the same number of positions of each device.
    """
    height, width = active.shape
    shards = sharding.batch_shards(rules)
    shards = 1 if height % shards else shards
    each = height * width // shards
    size = min(max(size // shards, 1), each)
    chunks = -(-each // size)
    # index[g,i]: i-th active position of device g, `each` (out of range) past the last.
    index = jax.vmap(lambda a: jnp.nonzero(a, size=chunks * size, fill_value=each)[0])(
        active.reshape(shards, each)
    )

    def pick(x: Array, shift: int = 0) -> Array:
        x = x.reshape(shards, each, *x.shape[2:])
        at = jnp.where(index < each, index - shift, each)
        x = jax.vmap(lambda v, i: v.at[i].get(mode='fill', fill_value=0))(x, at)
        x = x.reshape(shards, chunks, size, *x.shape[2:]).swapaxes(0, 1)
        x = x.reshape(chunks, shards * size, *x.shape[3:])
        return sharding.constrain(x, (None, 'batch') + (None,) * (x.ndim - 2), rules)

    def put(x: Array) -> Array:
        x = x.reshape(chunks, shards, size).swapaxes(0, 1).reshape(shards, chunks * size)
        zeros = jnp.zeros((shards, each), x.dtype)
        out = jax.vmap(lambda o, v, i: o.at[i].set(v, mode='drop'))(zeros, x, index)
        return out.reshape(height, width)

    return pick, put


def check_support(batch: Any, vocab_size: int | None = None) -> None:
    """Raise ValueError naming row and position where a recorded support cannot be replayed.

    On the host, for a finished batch: jitted scoring can only answer NaN. At every position with a
    nonzero mask the taken token must be among the support ids, and the ids must be distinct and,
    where `vocab_size` is given, below it. A batch without support passes.

    Args:
      batch: has tokens [B,T], mask [B,T] and support [B,T,K] or None.
      vocab_size: V, or None not to check the range.

    What it can't check: that the ids are those the sampler kept.
    """
    for bad, what in support_faults(batch, vocab_size):
        if np.any(bad):
            row, t = np.argwhere(bad)[0]
            token, ids = (np.asarray(x)[row, t].tolist() for x in (batch.tokens, batch.support))
            raise ValueError(
                f'row {row}, position {t}: {what}. Token {token}, support {ids}. {np.sum(bad)} '
                'such positions in all.'
            )


def support_faults(batch: Any, vocab_size: int | None = None) -> list[tuple[np.ndarray, str]]:
    """What `check_support` looks for: [B,T] bool where it is so, and what it is.

    Args:
      batch, vocab_size: as `check_support`; [] for a batch without support.
    """
    if getattr(batch, 'support', None) is None:
        return []
    tokens, support = np.asarray(batch.tokens), np.asarray(batch.support)
    active = np.asarray(batch.mask) != 0
    ordered = np.sort(support, axis=-1)
    missing = ~np.any((support == tokens[..., None]) & (support >= 0), axis=-1)
    twice = np.any((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0), axis=-1)
    beyond = np.any(support >= (math.inf if vocab_size is None else vocab_size), axis=-1)
    return [
        (missing & active, 'the taken token is not in its support'),
        (twice & active, 'the support names a token twice'),
        (beyond & active, f'the support names a token outside the vocabulary of {vocab_size}'),
    ]


def check_routing(batch: Any, config: Any) -> None:
    """Raise ValueError naming row and position where a recorded routing cannot be replayed.

    On the host, for a finished batch: in jitted scoring an id that is no expert counts as not
    recorded, and the live router's choice takes its place. Every id must be an expert, or -1 where
    none was recorded. A batch without routing passes.

    Args:
      batch: has tokens [B,T] and routing [B,T,L,k] or None.
      config: the model's `ModelConfig`: L mixture layers, k = `moe.top_k` of `moe.experts`.

    Raises ValueError too for a dense model, another shape, or a type that is not integer. What it
    can't check: that the ids are those the sampler's model used.
    """
    if getattr(batch, 'routing', None) is None:
        return
    if config.moe is None:
        raise ValueError('routing is recorded, but the model has no mixture-of-experts layer')
    routing, experts = np.asarray(batch.routing), config.moe.experts
    if not np.issubdtype(routing.dtype, np.integer):
        raise ValueError(f'routing has dtype {routing.dtype}; legal: an integer type')
    layers, top_k = config.kinds.count('moe'), config.moe.top_k
    wanted = (*np.shape(batch.tokens), layers, top_k)
    if routing.shape != wanted:
        raise ValueError(
            f'routing has shape {routing.shape}; the batch and the model say {wanted}: rows, '
            f'positions, {layers} mixture layers, top_k={top_k}'
        )
    bad = np.argwhere((routing < -1) | (routing >= experts))
    if len(bad):
        row, t, layer, _ = bad[0]
        raise ValueError(
            f'row {row}, position {t}: mixture layer {layer} has routing '
            f'{routing[row, t, layer].tolist()}; legal: 0 to {experts - 1}, or -1 for none. '
            f'{len(np.unique(bad[:, :2], axis=0))} such positions in all.'
        )


def check_reference(logp_ref: Any, mask: Any) -> None:
    """Raise ValueError naming row and position where the reference gives a taken token no mass.

    On the host. A KL term against a reference whose log-prob is -inf or NaN there has no finite
    value: the reference excludes an id that the policy kept.

    Args:
      logp_ref: [B,T] float, the reference's log-prob on the policy's support.
      mask: [B,T], nonzero on tokens the policy chose.
    """
    logp_ref = np.asarray(logp_ref)
    bad = (np.asarray(mask) != 0) & ~np.isfinite(logp_ref)
    if np.any(bad):
        row, t = np.argwhere(bad)[0]
        raise ValueError(
            f'row {row}, position {t}: the reference policy gives the taken token no finite mass '
            f'(logp_ref={logp_ref[row, t]}). {np.sum(bad)} such positions in all. The reference '
            'needs the same vocabulary and allowed tokens as the policy.'
        )
