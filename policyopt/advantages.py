"""Advantage estimators: factories of Rollout -> Estimates(advantages [B,T], returns [B,T] | None).

They read `mask`, `rewards` [B], `group` [B] and, with a critic, `values` [B,T]. Group ids may have
any value and order, groups any size. A row whose reward is NaN (or infinite) is missing: it leaves
every statistic and gets advantage 0. Where all rewards of a group are equal, or it has one row, the
advantage is exactly 0 (before `normalise_minibatch`, which subtracts the mean of its minibatch).
Off-mask advantages are 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from policyopt import checks, credit, masked
from policyopt.types import Array, Estimates, TokenBatch, require

Estimator = Callable[[Any], Estimates]
EPSILON = 1e-6


def _rewards(rollout: Any, part: str) -> tuple[Array, Array]:
    """Rewards with 0 for the missing, and which are present; [B]."""
    rewards = _wide(require(rollout, 'rewards', part))
    chex.assert_shape(rewards, rollout.mask.shape[:1])
    present = jnp.isfinite(rewards)
    return masked.select(present, rewards), present


def _group(rollout: Any, part: str) -> Array:
    group = require(rollout, 'group', part)
    chex.assert_shape(group, rollout.mask.shape[:1])
    return group


def _wide(x: Any) -> Array:
    """x as a floating array, float32 at least."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _spread(rows: Array, present: Array, mask: Array) -> Estimates:
    rows = masked.select(present, rows)
    return Estimates(masked.select(mask, jnp.broadcast_to(rows[:, None], mask.shape)))


def _centred(x: Array, present: Array, group: Array) -> Array:
    """x minus the mean of its group, exactly 0 where the group is all equal; [B]."""
    centred = x - masked.group_mean(x, present, group)
    return jnp.where(masked.group_all_equal(x, present, group), 0, centred)


def _zscore(x: Array, present: Array, group: Array, ddof: int) -> Array:
    return _centred(x, present, group) / (masked.group_std(x, present, group, ddof) + EPSILON)


def _check_ddof(ddof: int) -> None:
    if ddof not in (0, 1):
        raise ValueError(f'ddof must be 0 (population) or 1 (sample), got {ddof!r}')


@checks.factory('advantages')
def group_zscore(ddof: int = 1) -> Estimator:
    """(r - mean) / (std + 1e-6) over the rows of one prompt (GRPO 2402.03300).

    Args:
      ddof: 1 for the sample standard deviation, 0 for the population's.
    """
    _check_ddof(ddof)

    def estimate(rollout: Any) -> Estimates:
        rewards, present = _rewards(rollout, 'group_zscore')
        group = _group(rollout, 'group_zscore')
        return _spread(_zscore(rewards, present, group, ddof), present, rollout.mask)

    return estimate


@checks.factory('advantages')
def group_mean_baseline() -> Estimator:
    """r - mean over the rows of one prompt, the row itself included (Dr.GRPO 2503.20783)."""

    def estimate(rollout: Any) -> Estimates:
        rewards, present = _rewards(rollout, 'group_mean_baseline')
        group = _group(rollout, 'group_mean_baseline')
        return _spread(_centred(rewards, present, group), present, rollout.mask)

    return estimate


@checks.factory('advantages')
def rloo() -> Estimator:
    """r_i - mean_{j != i} r_j over the rows of one prompt: n/(n-1) (r - mean) (2402.14740)."""

    def estimate(rollout: Any) -> Estimates:
        rewards, present = _rewards(rollout, 'rloo')
        group = _group(rollout, 'rloo')
        n = masked.group_sum(jnp.ones_like(rewards), present, group)
        scale = masked.safe_divide(n, n - 1)
        return _spread(_centred(rewards, present, group) * scale, present, rollout.mask)

    return estimate


@checks.factory('advantages')
def batch_mean_baseline() -> Estimator:
    """r - mean over all rows (REINFORCE with a constant baseline, Williams 1992)."""

    def estimate(rollout: Any) -> Estimates:
        rewards, present = _rewards(rollout, 'batch_mean_baseline')
        everyone = jnp.zeros(rewards.shape, jnp.int32)
        return _spread(_centred(rewards, present, everyone), present, rollout.mask)

    return estimate


@checks.factory('advantages')
def global_zscore(ddof: int = 1) -> Estimator:
    """(r - mean) / (std + 1e-6) over all rows of the batch (REINFORCE++ 2501.03262).

    Args:
      ddof: as in `group_zscore`.
    """
    _check_ddof(ddof)

    def estimate(rollout: Any) -> Estimates:
        rewards, present = _rewards(rollout, 'global_zscore')
        everyone = jnp.zeros(rewards.shape, jnp.int32)
        return _spread(_zscore(rewards, present, everyone, ddof), present, rollout.mask)

    return estimate


@checks.factory('advantages')
def minibatch_normalised(ddof: int = 1) -> Estimator:
    """r - mean of the group, then z-scored over all rows given (Magistral 2506.10910).

    The paper's z-score belongs to the optimizer minibatch: for several minibatches per rollout use
    `group_mean_baseline` with `normalise_minibatch` as the algorithm's `prepare`.

    Args:
      ddof: as in `group_zscore`.
    """
    _check_ddof(ddof)
    baseline = group_mean_baseline()

    def estimate(rollout: Any) -> Estimates:
        advantages = baseline(rollout).advantages
        return Estimates(_normalised(advantages, rollout.mask, rollout.rewards, ddof))

    return estimate


@checks.factory('prepare')
def normalise_minibatch(ddof: int = 1) -> Callable[[TokenBatch], TokenBatch]:
    """`prepare` step: advantages z-scored over the rows of the minibatch (Magistral 2506.10910).

    The statistics are over rows, each counted once with the mean of its tokens' advantages; rows
    with no token or no reward count in none and get 0, as do all rows where they are all equal.

    Args:
      ddof: as in `group_zscore`.
    """
    _check_ddof(ddof)

    def prepare(batch: TokenBatch) -> TokenBatch:
        advantages = _normalised(batch.advantages, batch.mask, batch.rewards, ddof)
        return dataclasses.replace(batch, advantages=advantages)

    return prepare


def _normalised(advantages: Array, mask: Array, rewards: Array | None, ddof: int) -> Array:
    keep = mask != 0
    top = jnp.max(jnp.where(keep, advantages, -jnp.inf), axis=-1)
    flat = top == jnp.min(jnp.where(keep, advantages, jnp.inf), axis=-1)
    # The mean of equal floats need not equal them, and would make equal rows differ.
    rows = jnp.where(flat, top, masked.row_mean(advantages, mask))
    present = jnp.any(keep, axis=-1)
    if rewards is not None:
        present &= jnp.isfinite(rewards)
    rows = masked.select(present, rows)
    everyone = jnp.zeros(rows.shape, jnp.int32)
    mean = masked.group_mean(rows, present, everyone)[:, None]
    std = masked.group_std(rows, present, everyone, ddof)[:, None]
    scaled = (advantages - mean) / (std + EPSILON)
    return masked.select(keep & present[:, None] & (std > 0), scaled)


def generalised_advantages(
    token_rewards: Array, values: Array, mask: Array, gamma: float, lam: float | Array
) -> Array:
    """GAE (1506.02438) over the policy's tokens alone; all arrays [B,T] -> [B,T].

    A_t = d_t + gamma lam A_{t+}, d_t = r_t + gamma V_{t+} - V_t, where t+ is the row's next masked
    token: tokens off the mask (tool output) neither decay nor hold value. After the last, V = 0.

    Args:
      token_rewards: reward received with the token.
      values: value of the state before the token.
      mask: nonzero on policy tokens.
      gamma: discount per policy token.
      lam: scalar, or [B] for one a row.
    """
    chex.assert_equal_shape([token_rewards, values, mask])
    keep = mask != 0
    rewards, values = masked.select(keep, token_rewards), masked.select(keep, values)
    lam = jnp.broadcast_to(jnp.asarray(lam, values.dtype), values.shape[:1])

    def back(carry: tuple[Array, Array], token: tuple[Array, Array, Array]) -> tuple[Any, Array]:
        advantage, next_value = carry
        reward, value, on = token
        delta = reward + gamma * next_value - value
        advantage = jnp.where(on, delta + gamma * lam * advantage, advantage)
        return (advantage, jnp.where(on, value, next_value)), jnp.where(on, advantage, 0)

    start = (jnp.zeros_like(values[:, 0]), jnp.zeros_like(values[:, 0]))
    _, advantages = jax.lax.scan(back, start, (rewards.T, values.T, keep.T), reverse=True)
    return advantages.T


def _critic_estimates(
    rollout: Any, part: str, gamma: float, lam: float | Array, critic_lam: float | Array, **weights
) -> Estimates:
    _, present = _rewards(rollout, part)
    values = masked.select(rollout.mask, _wide(require(rollout, 'values', part)))
    chex.assert_shape(values, rollout.mask.shape)
    token_rewards = credit.token_rewards(rollout, part, **weights).astype(values.dtype)
    actor = generalised_advantages(token_rewards, values, rollout.mask, gamma, lam)
    critic = generalised_advantages(token_rewards, values, rollout.mask, gamma, critic_lam)
    # A row without a reward teaches nobody: advantage 0, and a target equal to its value.
    return Estimates(
        masked.select(present[:, None], actor), masked.select(present[:, None], critic) + values
    )


@checks.factory('advantages')
def gae(
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float | None = None,
    outcome_weight: float = 1.0,
    segment_weight: float = 0.0,
    reference_beta: float = 0.0,
) -> Estimator:
    """Generalised advantage estimation; the reward lands on the row's last policy token.

    Decoupled GAE (VC-PPO 2503.01491): `critic_lam` differs from `lam`. returns = A(critic_lam) + V.
    Rewards of steps or turns, and the KL to the reference (RLHF 2203.02155), land on the tokens
    that earn them: see `credit.token_rewards`.

    Args:
      gamma: discount per policy token.
      lam: the actor's lambda.
      critic_lam: the critic's, 1 for Monte-Carlo targets; the same as lam where None.
      outcome_weight: of the row's reward; 0 where that is the sum of its segments' rewards.
      segment_weight: of `segment_rewards`, each at its own token; 0 does without.
      reference_beta: nats to reward; 0 does without a reference policy.
    """
    checks.number('gamma', gamma, 0, 1)
    checks.number('lam', lam, 0, 1)
    critic = lam if critic_lam is None else checks.number('critic_lam', critic_lam, 0, 1)
    given = (outcome_weight, segment_weight, reference_beta)
    weights = dict(zip(('outcome', 'segments', 'beta'), given, strict=True))
    check_weights(*given)
    return lambda rollout: _critic_estimates(rollout, 'gae', gamma, lam, critic, **weights)


def check_weights(outcome_weight: float, segment_weight: float, reference_beta: float) -> None:
    """Raise for weights of `gae` that are out of range, and where none earns anything."""
    checks.number('outcome_weight', outcome_weight, 0)
    checks.number('segment_weight', segment_weight, 0)
    checks.number('reference_beta', reference_beta, 0)
    if outcome_weight == segment_weight == 0:
        raise ValueError('outcome_weight and segment_weight are 0; legal is one of them above 0')


@checks.factory('advantages')
def length_adaptive_gae(
    alpha: float = 0.05, critic_lam: float | None = 1.0, gamma: float = 1.0
) -> Estimator:
    """GAE with lambda = 1 - 1/(alpha n) for a row of n policy tokens (VAPO 2504.05118).

    The lambda is clipped to [0, 1]: at alpha .05 it is 0 up to 20 tokens, .8 at 100.

    Args:
      alpha: above 0.
      critic_lam: the critic's lambda, 1 for Monte-Carlo targets; the policy's where None.
      gamma: discount per policy token.
    """
    checks.number('alpha', alpha, 1e-9)
    if critic_lam is not None:
        checks.number('critic_lam', critic_lam, 0, 1)
    checks.number('gamma', gamma, 0, 1)

    def estimate(rollout: Any) -> Estimates:
        n = jnp.maximum(masked.count(rollout.mask), 1)
        lam = jnp.clip(1 - 1 / (alpha * n), 0, 1)
        critic = lam if critic_lam is None else critic_lam
        return _critic_estimates(rollout, 'length_adaptive_gae', gamma, lam, critic)

    return estimate


@checks.factory('advantages')
def process_rewards(mean: bool = False, discount: float = 1.0, ddof: int = 1) -> Estimator:
    """A_t = sum over steps j ending at or after t of discount^(j - step of t) r~_j (2402.03300).

    r~ is `segment_rewards` (given at each step's last policy token, NaN elsewhere) z-scored over
    all step rewards of the group.

    Args:
      mean: divide by the discounted number of those steps instead of summing.
      discount: per step, 1 for the paper's sum.
      ddof: as in `group_zscore`.
    """
    checks.number('discount', discount, 0, 1)
    _check_ddof(ddof)

    def estimate(rollout: Any) -> Estimates:
        scores, ends = credit.segment_zscores(rollout, 'process_rewards', ddof)
        total = credit.to_go(scores, ends, discount)
        if mean:
            count = credit.to_go(jnp.ones_like(scores), ends, discount)
            total = masked.safe_divide(total, count)
        return Estimates(masked.select(rollout.mask, total))

    return estimate


@checks.factory('advantages')
def turn_rewards(
    coefficient: float = 1.0, ddof: int = 1, discount: float = 0.0, by_turn: bool = False
) -> Estimator:
    """A = A_outcome + coefficient * A_turn, one value per turn.

    A_outcome is the group z-score of `rewards`; A_turn that of the turn's entry in
    `segment_rewards` among all turn rewards of the group, 0 for a turn without one. No paper has
    just this: weight, discount and what is compared are choices.

    Args:
      coefficient: weight of the turn's own advantage.
      ddof: as in `group_zscore`.
      discount: above 0, a turn is credited with the rewards of the turns after it, too, each
        discounted so often as there are turns in between.
      by_turn: compare a turn with those of the same number in the group's other rows alone. First
        turns of an episode may earn less than last ones, whatever they do.
    """
    checks.number('coefficient', coefficient, 0)
    checks.number('discount', discount, 0, 1)
    _check_ddof(ddof)
    outcome = group_zscore(ddof)

    def estimate(rollout: Any) -> Estimates:
        scores, ends = credit.segment_zscores(rollout, 'turn_rewards', ddof, discount, by_turn)
        segment = jnp.asarray(require(rollout, 'segment', 'turn_rewards'))
        turn = masked.segment_sum(scores, ends, segment)
        total = outcome(rollout).advantages + coefficient * turn
        return Estimates(masked.select(rollout.mask, total))

    return estimate


def read(value: Any, where: str) -> Any:
    """The estimator that a config asks for: a name of this module, or a section.

    Args:
      value: 'turn_rewards', or {'advantages': 'turn_rewards', ARGUMENTS}; an estimator passes.
      where: name of the argument, for errors.

    Raises ValueError or TypeError, with the nearest spelling.
    """
    if callable(value):
        return value
    section = {'advantages': value} if isinstance(value, str) else value
    known = [name for name, v in globals().items() if getattr(v, 'slot', '') == 'advantages']
    if not isinstance(section, Mapping) or not isinstance(section.get('advantages'), str):
        raise ValueError(
            f"{where} is {value!r}; legal is a name, or {{'advantages': NAME, ARGUMENTS}}."
            f'{checks.nearest("", known)}'
        )
    name = section['advantages']
    if name not in known:
        raise ValueError(
            f'{where} is {name!r}, which is no estimator.{checks.nearest(name, known)}'
        )
    return globals()[name](**{k: v for k, v in section.items() if k != 'advantages'})


def __getattr__(name: str) -> Any:
    checks.unknown_name('advantages', name, globals(), ('advantages', 'prepare'))
