"""Reward shaping (Rollout -> Rollout) and keep rules (Rollout -> [B] bool), before advantages.

Lengths are in tokens that the policy chose, never in characters or padded width. Rows without a
reward (NaN) stay without one under shaping, and are never kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from policyopt import checks, masked
from policyopt.types import Array, Rollout, require

Shape = Callable[[Rollout], Rollout]
Keep = Callable[[Rollout], Array]


def overlong_penalty(length: Array, max_length: float, cache: float) -> Array:
    """0 up to max_length - cache, linear to -1 at max_length, -1 beyond (DAPO 2503.14476)."""
    return jnp.clip((max_length - cache - length) / cache, -1, 0)


@checks.factory('shape')
def soft_overlong(max_length: int, cache: int, weight: float = 1.0) -> Shape:
    """rewards + weight * overlong_penalty(tokens the policy chose).

    Args:
      max_length: tokens; answers of this length get the whole penalty.
      cache: tokens before max_length over which it grows; in [1, max_length].
      weight: DAPO 1, Magistral (2506.10910) a tenth of it.
    """
    checks.number('max_length', max_length, 1)
    checks.number('cache', cache, 1, max_length)
    checks.number('weight', weight, 0)

    def shape(rollout: Rollout) -> Rollout:
        rewards = jnp.asarray(require(rollout, 'rewards', 'soft_overlong'))
        penalty = overlong_penalty(masked.count(rollout.mask), max_length, cache)
        dtype = jnp.promote_types(rewards.dtype, jnp.float32)
        return dataclasses.replace(rollout, rewards=(rewards + weight * penalty).astype(dtype))

    return shape


@checks.factory('shape')
def overlong_filter() -> Shape:
    """Mask out rows that hit the length limit: no loss from them (DAPO 2503.14476, optional).

    Their rewards stay in the group's statistics.
    """

    def shape(rollout: Rollout) -> Rollout:
        truncated = jnp.asarray(require(rollout, 'truncated', 'overlong_filter')) != 0
        mask = masked.select(~truncated[:, None], jnp.asarray(rollout.mask))
        return dataclasses.replace(rollout, mask=mask)

    return shape


@checks.factory('shape')
def kl_in_reward(beta: float = 1e-3) -> Shape:
    """rewards - beta * sum_t (logp_behavior - logp_ref): k1 inside the reward (2501.03262).

    One number a row; the paper's token-level form also spares a token the KL spent before it. A
    reference that gives a taken token no mass makes the reward infinite, that is, missing.

    Args:
      beta: nats to reward.
    """
    checks.number('beta', beta, 0)

    def shape(rollout: Rollout) -> Rollout:
        rewards = jnp.asarray(require(rollout, 'rewards', 'kl_in_reward'))
        behavior = require(rollout, 'logp_behavior', 'kl_in_reward')
        kl = masked.row_sum(behavior - require(rollout, 'logp_ref', 'kl_in_reward'), rollout.mask)
        return dataclasses.replace(rollout, rewards=rewards - beta * kl)

    return shape


@checks.factory('shape')
def chain(*shapes: Shape) -> Shape:
    """Apply shapes from left to right."""

    def shape(rollout: Rollout) -> Rollout:
        for step in shapes:
            rollout = step(rollout)
        return rollout

    return shape


@checks.factory('keep')
def mixed_outcomes() -> Keep:
    """Rows of prompts with 0 < correct < rows (dynamic sampling, DAPO 2503.14476)."""

    def keep(rollout: Rollout) -> Array:
        present = jnp.isfinite(require(rollout, 'rewards', 'mixed_outcomes'))
        positive = jnp.asarray(require(rollout, 'positive', 'mixed_outcomes')) > 0
        group = require(rollout, 'group', 'mixed_outcomes')
        return present & ~masked.group_all_equal(positive.astype(jnp.float32), present, group)

    return keep


@checks.factory('keep')
def diverse_rewards() -> Keep:
    """Rows of prompts whose rewards are not all equal (Magistral 2506.10910)."""

    def keep(rollout: Rollout) -> Array:
        rewards = jnp.asarray(require(rollout, 'rewards', 'diverse_rewards'))
        present = jnp.isfinite(rewards)
        group = require(rollout, 'group', 'diverse_rewards')
        return present & ~masked.group_all_equal(masked.select(present, rewards), present, group)

    return keep


def __getattr__(name: str) -> Any:
    checks.unknown_name('shaping', name, globals(), ('shape', 'keep'))
