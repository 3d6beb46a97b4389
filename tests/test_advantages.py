"""Estimators against plain numpy loops, over uneven groups, arbitrary ids and missing rewards."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import policyopt as po
from policyopt import advantages, masked
from tests.batches import random_mask, rollout

seeds = st.integers(0, 2**31 - 1)


def scattered(seed):
    """A rollout with uneven groups of odd ids, some rewards missing, some groups equal."""
    rng = np.random.default_rng(seed)
    rolled = rollout(seed)
    ids = rng.choice([-(2**31), -3, 0, 11, 2**31 - 1], 12).astype(np.int32)
    rewards = np.where(rng.random(12) < 0.2, np.nan, rolled.rewards).astype(np.float32)
    rewards = np.where(ids == 11, np.float32(0.9), rewards)
    return rolled.replace(group=ids, rewards=rewards)


def by_hand(rolled, kind):
    rewards, out = rolled.rewards.astype(np.float64), np.zeros(12)
    for g in set(rolled.group):
        rows = np.flatnonzero((rolled.group == g) & np.isfinite(rewards))
        r = rewards[rows]
        if len(rows) < 2 or r.max() == r.min():
            continue
        if kind == 'group_zscore':
            out[rows] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        elif kind == 'group_mean_baseline':
            out[rows] = r - r.mean()
        elif kind == 'rloo':
            out[rows] = [x - np.delete(r, i).mean() for i, x in enumerate(r)]
    return np.where(rolled.mask != 0, out[:, None], 0)


@pytest.mark.parametrize('kind', ['group_zscore', 'group_mean_baseline', 'rloo'])
@hypothesis.given(seed=seeds)
def test_group_estimators(kind, seed):
    rolled = scattered(seed)
    estimate = jax.jit(getattr(advantages, kind)())
    np.testing.assert_allclose(estimate(rolled).advantages, by_hand(rolled, kind), atol=2e-5)


def test_ddof_is_exposed():
    rolled = scattered(3)
    one = np.asarray(advantages.group_zscore(ddof=1)(rolled).advantages)
    zero = np.asarray(advantages.group_zscore(ddof=0)(rolled).advantages)
    for g in set(rolled.group):
        n = (np.isfinite(rolled.rewards) & (rolled.group == g)).sum()
        rows = rolled.group == g
        np.testing.assert_allclose(zero[rows], one[rows] * np.sqrt(n / max(n - 1, 1)), rtol=1e-4)
    with pytest.raises(ValueError, match='ddof must be 0'):
        advantages.group_zscore(ddof=2)


@hypothesis.given(seed=seeds)
def test_permuting_rows_permutes_advantages(seed):
    rolled = scattered(seed)
    order = np.random.default_rng(seed).permutation(12)
    moved = jax.tree.map(lambda x: x[order], rolled)
    for estimator in (advantages.group_zscore(), advantages.turn_rewards()):
        before = np.asarray(estimator(rolled).advantages)
        np.testing.assert_allclose(estimator(moved).advantages, before[order], atol=1e-5)


def gae_by_hand(reward, values, mask, gamma, lam):
    out, advantage, after = np.zeros(len(mask)), 0.0, 0.0
    last = True
    for t in reversed(np.flatnonzero(mask)):
        delta = (reward if last else 0) + gamma * after - values[t]
        advantage = delta + gamma * lam * advantage
        out[t], after, last = advantage, values[t], False
    return out


@hypothesis.given(
    seed=seeds, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.5, 1.0])
)
@hypothesis.settings(max_examples=8)
def test_gae_and_decoupled_returns(seed, gamma, lam):
    rolled = rollout(seed)
    got = advantages.gae(gamma, lam, critic_lam=0.7)(rolled)
    for i in range(12):
        row = (rolled.rewards[i], rolled.values[i], rolled.mask[i])
        np.testing.assert_allclose(got.advantages[i], gae_by_hand(*row, gamma, lam), atol=1e-5)
        target = gae_by_hand(*row, gamma, 0.7) + rolled.values[i] * rolled.mask[i]
        np.testing.assert_allclose(got.returns[i], target, atol=1e-5)


def test_length_adaptive_gae_with_the_policys_lambda_for_the_critic():
    rolled = rollout(3)
    got = advantages.length_adaptive_gae(0.5, critic_lam=None)(rolled)
    for i in range(12):
        lam = np.clip(1 - 1 / (0.5 * max(rolled.mask[i].sum(), 1)), 0, 1)
        want = gae_by_hand(rolled.rewards[i], rolled.values[i], rolled.mask[i], 1.0, lam)
        np.testing.assert_allclose(got.advantages[i], want, atol=1e-5)
        target = want + rolled.values[i] * rolled.mask[i]
        np.testing.assert_allclose(got.returns[i], target, atol=1e-5)


def test_gae_ignores_what_stands_off_the_mask():
    rolled = rollout(1)
    bad = rolled.replace(values=np.where(rolled.mask, rolled.values, np.nan))
    for a, b in zip(advantages.gae()(bad), advantages.gae()(rolled), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_row_without_a_reward_teaches_nobody():
    rolled = rollout(2)
    rewards = rolled.rewards.copy()
    rewards[4] = np.nan
    got = advantages.gae()(rolled.replace(rewards=rewards))
    assert not got.advantages[4].any()
    np.testing.assert_array_equal(got.returns[4], rolled.values[4] * rolled.mask[4])


@pytest.mark.parametrize('mean', [False, True])
@pytest.mark.parametrize('discount', [1.0, 0.5])
def test_process_rewards(mean, discount):
    for seed in range(3):
        rolled = rollout(seed)
        got = np.asarray(advantages.process_rewards(mean, discount)(rolled).advantages)
        for g in set(rolled.group):
            rows = np.flatnonzero(rolled.group == g)
            ends = [np.flatnonzero(np.isfinite(rolled.segment_rewards[i])) for i in rows]
            pooled = np.concatenate(
                [rolled.segment_rewards[i][e] for i, e in zip(rows, ends, strict=True)]
            )
            scale = pooled.std(ddof=1) + 1e-6 if len(pooled) > 1 else np.inf
            for i, e in zip(rows, ends, strict=True):
                scores = (rolled.segment_rewards[i][e] - pooled.mean()) / scale
                for t in range(7):
                    coming = scores[e >= t]
                    weight = discount ** np.arange(len(coming))
                    expected = (coming * weight).sum() / (max(weight.sum(), 1e-9) if mean else 1)
                    if not rolled.mask[i, t] or len(coming) == 0:
                        expected = 0
                    assert got[i, t] == pytest.approx(expected, abs=1e-4)


def test_turn_rewards_add_the_turns_own_score():
    rolled = rollout(4)
    outcome = np.asarray(advantages.group_zscore()(rolled).advantages)
    got = np.asarray(advantages.turn_rewards(coefficient=0.5)(rolled).advantages)
    for g in set(rolled.group):
        rows = rolled.group == g
        pooled = rolled.segment_rewards[rows]
        pooled = pooled[np.isfinite(pooled)]
        for i in np.flatnonzero(rows):
            for k in set(rolled.segment[i]):
                tokens = (rolled.segment[i] == k) & (rolled.mask[i] == 1)
                if tokens.any():
                    end = np.flatnonzero(tokens)[-1]
                    score = (rolled.segment_rewards[i, end] - pooled.mean()) / (
                        pooled.std(ddof=1) + 1e-6
                    )
                    np.testing.assert_allclose(
                        got[i, tokens], outcome[i, tokens] + 0.5 * score, atol=1e-4
                    )


def test_rewards_in_padding_are_no_steps():
    rolled = rollout(0)
    noisy = np.where(rolled.mask == 0, 9.0, rolled.segment_rewards).astype(np.float32)
    for estimator in (advantages.process_rewards(), advantages.turn_rewards()):
        a = estimator(rolled).advantages
        np.testing.assert_array_equal(
            a, estimator(rolled.replace(segment_rewards=noisy)).advantages
        )


def test_minibatch_normalisation_belongs_to_the_minibatch():
    rolled = rollout(6)
    rolled = rolled.replace(mask=np.maximum(rolled.mask, np.arange(7) == 3).astype(np.int32))
    whole = advantages.minibatch_normalised()(rolled).advantages
    base = np.asarray(advantages.group_mean_baseline()(rolled).advantages)
    batch = po.TokenBatch(
        tokens=rolled.tokens,
        mask=rolled.mask,
        rewards=rolled.rewards,
        advantages=base,
        logp_old=rolled.logp_behavior,
    )
    prepare = po.algorithms.magistral().prepare
    np.testing.assert_array_equal(prepare(batch).advantages, whole)
    half = jax.tree.map(lambda x: x[:6], batch)
    rows = base[:6].sum(1) / rolled.mask[:6].sum(1)
    expected = (rows - rows.mean()) / (rows.std(ddof=1) + 1e-6)
    got = np.asarray(prepare(half).advantages)
    np.testing.assert_allclose(got, expected[:, None] * rolled.mask[:6], atol=1e-5)


def test_equal_rows_of_different_length_stay_equal_in_the_minibatch():
    mask = np.arange(9) < np.arange(1, 9)[:, None]
    batch = po.TokenBatch(
        tokens=mask, logp_old=mask, mask=mask, advantages=np.full((8, 9), 0.9, np.float32)
    )
    assert not advantages.normalise_minibatch()(batch).advantages.any()


def test_wide_ids_and_narrow_values():
    rolled = rollout(7)
    rewards = np.float32([1, 0, 5, 1] * 3)
    ids = np.array([0, 0, 2**32, 2**32] * 3, np.int64)  # equal where 32 bits are all there is
    got = advantages.group_mean_baseline()(rolled.replace(rewards=rewards, group=ids)).advantages
    expected = np.float32([0.5, -0.5, 2, -2] * 3)[:, None] * rolled.mask
    np.testing.assert_allclose(got, expected)
    low = rolled.replace(values=jax.numpy.asarray(rolled.values, jax.numpy.bfloat16))
    got = advantages.gae()(low)
    assert got.advantages.dtype == got.returns.dtype == np.float32


@pytest.mark.parametrize('estimator', [advantages.turn_rewards(), advantages.process_rewards()])
def test_a_row_without_a_reward_leaves_the_segments_statistics(estimator):
    rolled = rollout(5)
    rewards = np.where(np.arange(12) == 3, np.nan, rolled.rewards).astype(np.float32)
    rolled = rolled.replace(rewards=rewards)
    changed = rolled.segment_rewards.copy()
    changed[3] *= 100
    before = np.asarray(estimator(rolled).advantages)
    after = np.asarray(estimator(rolled.replace(segment_rewards=changed)).advantages)
    np.testing.assert_array_equal(after, before)
    assert not before[3].any()


def test_masked_reductions_against_numpy():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 9)).astype(np.float32)
    mask = random_mask(rng, 6, 9)
    segment = rng.integers(-4, 4, (6, 9)).astype(np.int32)
    np.testing.assert_allclose(masked.row_sum(x, mask), (x * mask).sum(1), atol=1e-5)
    n = np.maximum(mask.sum(1), 1)
    np.testing.assert_allclose(masked.row_mean(x, mask), (x * mask).sum(1) / n, atol=1e-6)
    same = (segment[:, :, None] == segment[:, None, :]) * mask[:, None, :]
    sums = (same * x[:, None, :]).sum(-1)
    np.testing.assert_allclose(masked.segment_sum(x, mask, segment), sums, atol=1e-5)
    means = sums / np.maximum(same.sum(-1), 1)
    np.testing.assert_allclose(masked.segment_mean(x, mask, segment), means, atol=1e-5)
