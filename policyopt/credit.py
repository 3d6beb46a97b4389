"""Where rewards land in a row: on steps, turns and tokens, and what follows each of them.

A segment is a step of an answer, or a turn of an episode; `segment` [B,T] has any ids, unique in
the row, and observations have their own. Its reward stands at its last policy token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import masked
from policyopt.types import Array, require

EPSILON = 1e-6


def _previous(keep: Array, segment: Array) -> Array:
    """Segment of the policy token before each token; its own where there is none."""
    steps = jnp.broadcast_to(jnp.arange(keep.shape[1]), keep.shape)
    last = jax.lax.cummax(jnp.where(keep, steps, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(last[:, :1], -1), last[:, :-1]], axis=1)
    found = jnp.take_along_axis(segment, jnp.maximum(before, 0), axis=1)
    return jnp.where(before < 0, segment, found)


def segment_numbers(mask: Array, segment: Array) -> Array:
    """Which of its row's segments a policy token is in: [B,T] int32, from 0; -1 off the mask.

    Counted are the segments that hold policy tokens, so observations take no number.
    """
    chex.assert_equal_shape([mask, segment])
    keep = jnp.asarray(mask) != 0
    segment = jnp.asarray(segment)
    changes = keep & (segment != _previous(keep, segment))
    return jnp.where(keep, jnp.cumsum(changes, axis=-1, dtype=jnp.int32), -1)


def to_go(x: Array, ends: Array, discount: float | Array = 1.0) -> Array:
    """For each token t, sum over ends j >= t of discount^(ends in [t, j)) x_j; [B,T] -> [B,T].

    Args:
      x: rewards; read at the ends alone.
      ends: True where a segment ends.
      discount: per segment.
    """
    chex.assert_equal_shape([x, ends])

    def back(carry: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        value, end = token
        carry = jnp.where(end, value + discount * carry, carry)
        return carry, carry

    x = masked.select(ends, x)
    return jax.lax.scan(back, jnp.zeros_like(x[:, 0]), (x.T, ends.T), reverse=True)[1].T


def segment_zscores(
    rollout: Any, part: str, ddof: int = 1, discount: float = 0.0, by_number: bool = False
) -> tuple[Array, Array]:
    """Segment rewards z-scored over those of the row's group, and where they stand; both [B,T].

    Exactly 0 where those compared are all equal, or fewer than `ddof` + 1. A row whose `rewards` is
    missing (NaN) leaves the statistics.

    Args:
      rollout: with mask, group, segment_rewards; rewards may be None.
      part: what reads them, for errors.
      ddof: 1 for the sample standard deviation, 0 for the population's.
      discount: above 0, what is z-scored is a segment's reward and those after it in its row, each
        discounted so often as there are segments in between.
      by_number: compare the k-th segments of a group's rows with each other alone; needs `segment`.

    Raises MissingInput.
    """
    rewards = jnp.asarray(require(rollout, 'segment_rewards', part))
    rewards = rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))
    chex.assert_equal_shape([rewards, rollout.mask])
    group = require(rollout, 'group', part)
    chex.assert_shape(group, rollout.mask.shape[:1])
    ends = (jnp.asarray(rollout.mask) != 0) & jnp.isfinite(rewards)
    if getattr(rollout, 'rewards', None) is not None:
        ends &= jnp.isfinite(jnp.asarray(rollout.rewards))[:, None]
    rewards = masked.select(ends, rewards)
    if discount:
        rewards = masked.select(ends, to_go(rewards, ends, discount))
    if by_number:
        segment = jnp.asarray(require(rollout, 'segment', part))
        scores = _zscores_by_number(rewards, ends, group, rollout.mask, segment, ddof)
    else:
        mean = masked.group_mean(rewards, ends, group)[:, None]
        std = masked.group_std(rewards, ends, group, ddof)[:, None]
        scores = jnp.where(std > 0, (rewards - mean) / (std + EPSILON), 0)
    return masked.select(ends, scores), ends


def _zscores_by_number(
    x: Array, ends: Array, group: Any, mask: Array, segment: Array, ddof: int
) -> Array:
    """x z-scored among the entries of one group and segment number; [B,T]."""
    width = x.shape[1]
    index = masked.group_index(group)[:, None] * width
    cell = jnp.where(ends, index + segment_numbers(mask, segment), -1).reshape(-1)
    flat, keep = x.reshape(-1), ends.reshape(-1)
    mean = masked.group_mean(flat, keep, cell)
    std = masked.group_std(flat, keep, cell, ddof)
    return jnp.where(std > 0, (flat - mean) / (std + EPSILON), 0).reshape(x.shape)


def token_rewards(
    rollout: Any, part: str, outcome: float = 1.0, segments: float = 0.0, beta: float = 0.0
) -> Array:
    """What each policy token earns, for estimators with a critic; [B,T], 0 off the mask.

    r_t = outcome * R [t is the row's last policy token] + segments * r_segment(t)
          - beta (logp_behavior - logp_ref)_t

    with the KL to the reference in the reward token by token (RLHF 2203.02155; k1, so that its sum
    over a row is an unbiased estimate). A weight of 0 leaves its input unread.

    Args:
      rollout: with mask, rewards, and what the weights ask for: segment_rewards, logp_ref with
        logp_behavior.
      part: what reads them, for errors.
      outcome: weight of `rewards`; a missing one (NaN) counts as 0 here.
      segments: weight of `segment_rewards`; NaN there is none.
      beta: nats to reward.

    Raises MissingInput.
    """
    mask = jnp.asarray(rollout.mask)
    rewards = jnp.asarray(require(rollout, 'rewards', part))
    chex.assert_shape(rewards, mask.shape[:1])
    rewards = rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))
    rewards = jnp.where(jnp.isfinite(rewards), rewards, 0)
    total = jnp.where(last_token(mask), outcome * rewards[:, None], 0)
    if segments:
        found = jnp.asarray(require(rollout, 'segment_rewards', part))
        chex.assert_equal_shape([found, mask])
        total += segments * jnp.where((mask != 0) & jnp.isfinite(found), found, 0)
    if beta:
        behavior = jnp.asarray(require(rollout, 'logp_behavior', part))
        kl = masked.select(mask, behavior - jnp.asarray(require(rollout, 'logp_ref', part)))
        chex.assert_equal_shape([kl, mask])
        total -= beta * kl
    return total


def last_token(mask: Array) -> Array:
    """True at the last policy token of each row; [B,T]."""
    keep = mask != 0
    after = jnp.cumsum(keep[:, ::-1], axis=-1)[:, ::-1]
    return keep & (after == 1)


def spread(
    ends: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    start: Sequence[int],
    width: int,
) -> np.ndarray:
    """Rewards of steps at the tokens that end them: [B,width] float32, NaN elsewhere; on the host.

    Args:
      ends: of each row, number of each step's last token in the answer, from 0.
      values: of each row, one for each of its steps, or none at all.
      start: of each row, tokens before its answer.
      width: tokens of a row.

    Raises ValueError where a row has another number of values than of steps.
    """
    out = np.full((len(ends), width), np.nan, np.float32)
    for row, (places, found, first) in enumerate(zip(ends, values, start, strict=True)):
        if len(found) not in (0, len(places)):
            raise ValueError(f'row {row} has {len(found)} rewards for its {len(places)} steps')
        if len(found):
            out[row, np.asarray(places) + first] = found
    return out


def numbered(ends: Sequence[Sequence[int]], start: Sequence[int], width: int) -> np.ndarray:
    """Segment ids [B,width] int32 of answers in steps: 0 before the first end, and so on.

    Args: as of `spread`.
    """
    out = np.zeros((len(ends), width), np.int32)
    for row, (places, first) in enumerate(zip(ends, start, strict=True)):
        for end in list(places)[:-1]:
            out[row, first + end + 1 :] += 1
    return out
