"""From logits to a drawn token: masks that compose, and inverse-CDF draws with an exact record.

Two kinds of pure functions, all in float32:

- logits [B,V] -> logits [B,V] over the whole vocabulary: `allow`, `ban`, `force`, `scale`. What may
  not be drawn becomes -inf.
- Kept -> Kept over the K most probable tokens, which `most_probable` takes out: `keep_top_k`,
  `keep_top_p`, `keep_min_p`.

`draw` applies them in one fixed order: allowed and banned tokens, forced token, temperature, the K
most probable, top-k, top-p, min-p. Top-p measures mass within what top-k left, itself inside the
K most probable; min-p compares with the most probable token, so that its place does not matter.
Masks over the vocabulary commute with the temperature.

Ties: among equal logits the lower id is the more probable one, in every mask. A nucleus is the
shortest prefix of that order whose mass reaches `p`, so of tied tokens at its edge only the lower
ids stay. min-p keeps tokens that are exactly at its threshold. Both compare in float32, so a token
within about 1e-7 of an edge may fall on either side; the recorded support says on which.

Nothing here sorts a vocabulary, and one uniform number a row decides the draw.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from policyopt.types import Array, struct

BLOCK = 128  # tokens whose mass is summed before one block is opened
GROUP = 32  # tokens whose largest logit is compared before one group is opened

NOT_FINITE, NONE_ALLOWED = 1, 2  # faults of a row's logits


@struct
class Params:
    """What a row is drawn with; arrays, so that other values compile nothing.

    Attributes:
      temperature: [B] float32, divides the logits; 0 takes the most probable token.
      top_k: [B] int32, keeps so many most probable tokens; 0 keeps all.
      top_p: [B] float32, keeps the shortest prefix with this mass; 1 keeps all.
      min_p: [B] float32, keeps tokens of at least this share of the largest probability; 0: all.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


class Kept(NamedTuple):
    """Tokens that may still be drawn, the most probable first.

    Attributes:
      ids: [B,K] int32, -1 where there is none; those dropped are a suffix.
      logits: [B,K] float32, -inf where there is none.
    """

    ids: Array
    logits: Array


class Draw(NamedTuple):
    """One drawn token per row.

    Attributes:
      token: [B] int32.
      logp: [B] float32, log-prob under the distribution drawn from.
      logp_full: [B] float32, log-prob at the same temperature (1 where it is 0) without truncation
        and without the masks of single rows; exp(logp_full - logp) is the kept mass.
      support: [B,K] int32 kept ids, the most probable first, -1 pads; None where not truncated.
      fault: [B] int32, 0, or NOT_FINITE or NONE_ALLOWED, and then the other fields of the row mean
        nothing.
    """

    token: Array
    logp: Array
    logp_full: Array
    support: Array | None
    fault: Array


def allow(logits: Array, allowed: Array) -> Array:
    """Only these tokens: logits [B,V], allowed [V] or [B,V] bool."""
    return jnp.where(allowed, logits, -jnp.inf)


def ban(logits: Array, ids: Array) -> Array:
    """All but these tokens: logits [B,V], ids [n] or [B,n] int; ids outside [0, V) ban nothing."""
    ids = jnp.broadcast_to(ids, (logits.shape[0], jnp.shape(ids)[-1]))
    ids = jnp.where(ids < 0, logits.shape[1], ids)  # -1 would wrap to the last token
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode='drop')


def force(logits: Array, token: Array, when: Array) -> Array:
    """Exactly `token` (scalar or [B]) in the rows where `when` [B], whatever was banned before."""
    token = jnp.broadcast_to(token, when.shape)
    only = jnp.where(jnp.arange(logits.shape[1]) == token[:, None], 0.0, -jnp.inf)
    return jnp.where(when[:, None], only, logits)


def scale(logits: Array, temperature: Array) -> Array:
    """logits [B,V] / temperature [B]; rows at temperature 0, which are greedy, stay as they are.

    -0 becomes 0: `jax.lax.top_k` would put it behind, and here they tie.
    """
    scaled = logits / jnp.where(temperature == 0, 1, temperature)[:, None]
    return jnp.where(scaled == 0, 0, scaled)


def most_probable(logits: Array, size: int) -> Kept:
    """The `size` largest of scaled logits: [B,V] -> Kept; -inf is never kept, fewer leave pads."""
    top, ids = _top_k(logits, min(size, logits.shape[1]))
    pad = ((0, 0), (0, size - top.shape[1]))
    kept = Kept(
        jnp.pad(ids.astype(jnp.int32), pad, constant_values=-1),
        jnp.pad(top, pad, constant_values=-jnp.inf),
    )
    return _keep(kept, kept.logits != -jnp.inf)


def keep_top_k(kept: Kept, k: Array) -> Kept:
    """The k [B] most probable; k <= 0 keeps all."""
    return _keep(kept, (jnp.arange(kept.ids.shape[1]) < k[:, None]) | (k <= 0)[:, None])


def keep_top_p(kept: Kept, p: Array) -> Kept:
    """The shortest prefix whose share of the kept mass reaches p [B]; p >= 1 keeps all."""
    share = jnp.exp(kept.logits - kept.logits[:, :1])
    share = share / jnp.sum(share, axis=1, keepdims=True)
    # Parallel prefix sums are not monotone to the last bit, and what is dropped is a suffix.
    before = jax.lax.cummax(jnp.cumsum(share, axis=1), axis=1)[:, :-1]
    before = jnp.pad(before, ((0, 0), (1, 0)))
    return _keep(kept, (before < p[:, None]) | (p >= 1)[:, None])


def keep_min_p(kept: Kept, p: Array) -> Kept:
    """Tokens with at least p [B] times the largest probability; p <= 0 keeps all."""
    least = kept.logits[:, :1] + jnp.log(jnp.maximum(p, 0))[:, None]
    return _keep(kept, kept.logits >= least)


def truncate(kept: Kept, params: Params) -> Kept:
    """What top-k, then top-p, then min-p leave; at temperature 0 the most probable token alone."""
    kept = keep_top_k(kept, jnp.where(params.temperature == 0, 1, params.top_k))
    return keep_min_p(keep_top_p(kept, params.top_p), params.min_p)


def draw(
    logits: Array,
    uniform: Array,
    params: Params,
    *,
    size: int | None = None,
    allowed: Array | None = None,
    masks: tuple[Array, ...] = (),
    forced: tuple[Array, Array] | None = None,
) -> Draw:
    """Draw one token per row by inverse CDF.

    Args:
      logits: [B,V], of any float type.
      uniform: [B] float32 in (0, 1), one per row, see `uniforms`. It has 2^23 values, so a token
        less probable than about 1e-7 is drawn more coarsely than its probability says.
      params: see Params. Without `size` only the temperature is read.
      size: static; the K most probable tokens are kept and recorded. None draws from all.
      allowed: [V] bool, the tokens of the run; part of the full distribution.
      masks: [B,V] bool each, tokens that single rows may draw. They need `size`: scoring knows of
        them through the recorded support alone.
      forced: (token, when [B] bool), see `force`. Needs `size` likewise.

    Returns:
      See Draw. The token has a positive probability and is inside the support.

    Raises:
      ValueError: masks or forced without size.
    """
    chex.assert_rank([logits, uniform], [2, 1])
    chex.assert_equal_shape_prefix([logits, uniform, *jax.tree.leaves(params)], 1)
    if size is None and (masks or forced is not None):
        raise ValueError('masks of single rows and forced tokens need a recorded support: set size')
    logits = logits.astype(jnp.float32)
    if allowed is not None:
        logits = allow(logits, allowed)
    full = scale(logits, params.temperature)
    if size is None:
        top = jnp.max(full, axis=1)
        blocks, total = _mass(full, top)
        greedy = params.temperature == 0
        token = jnp.where(
            greedy, _first_best(full, top, greedy), _from_blocks(full, top, blocks, uniform)
        )
        logp_full = _at(full, token) - top - jnp.log(total)
        return Draw(token, jnp.where(greedy, 0, logp_full), logp_full, None, _fault(top, total))
    masked = full
    for mask in masks:
        masked = allow(masked, mask)
    if forced is not None:
        masked = force(masked, *forced)
    best = most_probable(masked, size)
    kept = truncate(best, params)
    # Where no row has masks of its own, the first of the best is the largest: a pass less.
    top = best.logits[:, 0] if masked is full else jnp.max(full, axis=1)
    _, total = _mass(full, top)
    shifted = kept.logits - kept.logits[:, :1]
    weight = jnp.exp(shifted)
    slot = inverse_cdf(weight, uniform)
    token = jnp.maximum(_at(kept.ids, slot), 0)
    logp = _at(shifted, slot) - jnp.log(jnp.sum(weight, axis=1))
    logp_full = _at(full, token) - top - jnp.log(total)
    fault = _fault(top, total)
    none = (fault == 0) & (kept.logits[:, 0] == -jnp.inf)
    return Draw(token, logp, logp_full, kept.ids, jnp.where(none, NONE_ALLOWED, fault))


def uniforms(keys: Array) -> Array:
    """One number in (0, 1) for each key: (k + 1/2) / 2^23 with k uniform over 0 .. 2^23 - 1.

    Never 0, to which the first token answers however improbable it is, and never 1.
    """
    return jax.vmap(jax.random.uniform)(keys) + jnp.float32(2**-24)


def inverse_cdf(weight: Array, uniform: Array) -> Array:
    """Index whose interval of the cumulative weights holds `uniform`: [B,n], [B] -> [B] int32.

    `uniform` lies in [0, 1) and the weights need not sum to 1. An index of weight 0 is never
    returned, whatever the rounding of the sums, unless all weights are 0.
    """
    chex.assert_rank([weight, uniform], [2, 1])
    cumulative = jnp.cumsum(weight, axis=1)
    return _first_above(weight, cumulative, uniform * cumulative[:, -1])


def _first_above(weight: Array, cumulative: Array, target: Array) -> Array:
    """First index of positive weight with cumulative > target, else the last of positive weight.

    Parallel prefix sums are not monotone to the last bit, so positivity is checked, not inferred.
    """
    at = jnp.arange(weight.shape[1])
    positive = weight > 0
    first = jnp.min(
        jnp.where(positive & (cumulative > target[:, None]), at, weight.shape[1]), axis=1
    )
    last = jnp.max(jnp.where(positive, at, 0), axis=1)
    return jnp.minimum(first, last).astype(jnp.int32)


def _mass(logits: Array, top: Array) -> tuple[Array, Array]:
    """Sums of exp(logit - top), `top` [B] the largest, over blocks [B,n] and over all [B]."""
    rows, width = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -width % BLOCK)), constant_values=-jnp.inf)
    blocks = jnp.sum(jnp.exp(padded - top[:, None]).reshape(rows, -1, BLOCK), axis=2)
    return blocks, jnp.sum(blocks, axis=1)


def _from_blocks(logits: Array, top: Array, blocks: Array, uniform: Array) -> Array:
    """Inverse CDF in two levels: a block by the blocks' sums, then a token inside it; [B] int32."""
    cumulative = jnp.cumsum(blocks, axis=1)
    target = uniform * cumulative[:, -1]
    block = _first_above(blocks, cumulative, target)
    before = _at(cumulative, block) - _at(blocks, block)
    ids = block[:, None] * BLOCK + jnp.arange(BLOCK)
    inside = jnp.take_along_axis(logits, ids, axis=1, mode='fill', fill_value=-jnp.inf)
    weight = jnp.exp(inside - top[:, None])
    slot = _first_above(weight, jnp.cumsum(weight, axis=1), target - before)
    return _at(ids, slot)


def _top_k(logits: Array, k: int) -> tuple[Array, Array]:
    """`jax.lax.top_k`, over the k groups of tokens with the largest maxima where V is large.

    These hold all k: whatever is in another group has k maxima before it. Groups stay in the order
    of their ids, so that ties fall as in one step.
    """
    rows, width = logits.shape
    if width < 4 * GROUP * k:
        return jax.lax.top_k(logits, k)
    pad = ((0, 0), (0, -width % GROUP))
    groups = jnp.pad(logits, pad, constant_values=-jnp.inf).reshape(rows, -1, GROUP)
    best = jnp.sort(jax.lax.top_k(jnp.max(groups, axis=2), k)[1], axis=1)
    found = jnp.take_along_axis(groups, best[:, :, None], axis=1, mode='clip').reshape(rows, -1)
    top, at = jax.lax.top_k(found, k)
    return top, jnp.take_along_axis(best, at // GROUP, axis=1) * GROUP + at % GROUP


def _first_best(logits: Array, top: Array, wanted: Array) -> Array:
    """Lowest id with the largest logit; a pass over the logits only where some row wants it."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jax.lax.cond(
        jnp.any(wanted),
        lambda: jnp.min(jnp.where(logits == top[:, None], ids, ids[-1]), axis=1),
        lambda: jnp.zeros(logits.shape[0], jnp.int32),
    )


def _fault(top: Array, total: Array) -> Array:
    """What is wrong with the largest logit and the sum of weights."""
    none = top == -jnp.inf
    return jnp.where(none, NONE_ALLOWED, jnp.where(jnp.isfinite(total), 0, NOT_FINITE))


def _at(x: Array, index: Array) -> Array:
    """x[b, index[b]]."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _keep(kept: Kept, keep: Array) -> Kept:
    return Kept(jnp.where(keep, kept.ids, -1), jnp.where(keep, kept.logits, -jnp.inf))
