"""Rewards of steps, turns and tokens, against plain numpy loops."""

import dataclasses

import numpy as np
import pytest

import policyopt as po
from policyopt import advantages, algorithms, credit
from policyopt.rollout import required_fields
from policyopt.types import MissingInput
from tests.batches import rollout

NAN = np.nan


def episodes():
    """Two groups of three rows: a prompt of 1, turns of policy tokens, observations between."""
    #                  turn 0  obs    turn 1    obs turn 2
    mask = np.array([[0, 1, 1, 0, 0, 1, 0, 1]] * 6, np.int32)
    segment = np.array([[0, 1, 1, 2, 2, 3, 4, 9]] * 6, np.int32)
    rewards = np.full((6, 8), NAN, np.float32)
    rewards[:, 2] = [1, 0, 0, 2, 2, 2]
    rewards[:, 5] = [10, 12, NAN, 3, 5, 9]
    rewards[:4, 7] = [0, 1, 5, 1]
    mask[5, 7], segment[5, 7] = 0, 0
    return po.Rollout(
        tokens=mask,
        mask=mask,
        segment=segment,
        segment_rewards=rewards,
        rewards=np.nansum(rewards, axis=1),
        group=np.array([7, 7, 7, 2, 2, 2], np.int32),
    )


def turns_by_hand(rolled, discount, by_turn):
    """A_turn [B,T] by loops."""
    found = {}  # (row, segment) -> (turn number, value)
    for i in range(6):
        ends = [
            t for t in range(8) if rolled.mask[i, t] and np.isfinite(rolled.segment_rewards[i, t])
        ]
        numbers = list(dict.fromkeys(rolled.segment[i, rolled.mask[i] == 1]))
        for k, t in enumerate(ends):
            value = sum(discount**n * rolled.segment_rewards[i, u] for n, u in enumerate(ends[k:]))
            found[i, rolled.segment[i, t]] = numbers.index(rolled.segment[i, t]), value
    out = np.zeros((6, 8))
    for (i, k), (number, value) in found.items():
        others = [
            v
            for (j, _), (n, v) in found.items()
            if rolled.group[j] == rolled.group[i] and (n == number or not by_turn)
        ]
        if len(others) > 1 and max(others) > min(others):
            score = (value - np.mean(others)) / (np.std(others, ddof=1) + 1e-6)
            out[i, (rolled.segment[i] == k) & (rolled.mask[i] == 1)] = score
    return out


@pytest.mark.parametrize('by_turn', [False, True])
@pytest.mark.parametrize('discount', [0.0, 0.5, 1.0])
def test_turns_are_credited_with_what_follows_and_compared_by_number(discount, by_turn):
    rolled = episodes()
    estimate = advantages.turn_rewards(2.0, discount=discount, by_turn=by_turn)
    outcome = np.asarray(advantages.group_zscore()(rolled).advantages)
    expected = outcome + 2 * turns_by_hand(rolled, discount, by_turn)
    np.testing.assert_allclose(estimate(rolled).advantages, expected, atol=1e-5)


def test_segments_are_numbered_where_they_hold_policy_tokens():
    got = credit.segment_numbers(episodes().mask, episodes().segment)
    assert got[0].tolist() == [-1, 0, 0, -1, -1, 1, -1, 2]
    assert got[5].tolist() == [-1, 0, 0, -1, -1, 1, -1, -1]


def test_token_rewards_by_hand():
    rolled = dataclasses.replace(
        rollout(0),
        rewards=np.arange(12, dtype=np.float32),
        segment_rewards=rollout(0).segment_rewards,
    )
    rolled.rewards[5] = NAN
    got = credit.token_rewards(rolled, 'here', outcome=0.5, segments=2.0, beta=0.25)
    for i in range(12):
        on = np.flatnonzero(rolled.mask[i])
        for t in range(7):
            expected = 0.0
            if t in on:
                expected += 2 * np.nan_to_num(rolled.segment_rewards[i, t])
                expected -= 0.25 * (rolled.logp_behavior[i, t] - rolled.logp_ref[i, t])
                if t == on[-1] and i != 5:
                    expected += 0.5 * i
            assert got[i, t] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize('lam', [0.0, 0.9])
def test_gae_over_rewards_of_tokens(lam):
    rolled = rollout(3)
    got = advantages.gae(0.9, lam, segment_weight=1.0, outcome_weight=0.0, reference_beta=0.5)(
        rolled
    )
    for i in range(12):
        after, advantage = 0.0, 0.0
        for t in reversed(np.flatnonzero(rolled.mask[i])):
            reward = np.nan_to_num(rolled.segment_rewards[i, t]) - 0.5 * 0.1
            advantage = reward + 0.9 * after - rolled.values[i, t] + 0.9 * lam * advantage
            after = rolled.values[i, t]
            assert got.advantages[i, t] == pytest.approx(advantage, abs=1e-5)
            assert got.returns[i, t] == pytest.approx(advantage + after, abs=1e-5)


def test_what_weights_ask_for_is_found_and_missed():
    plain, full = po.algorithms.ppo_clip(), po.algorithms.ppo_penalty(reference_beta=0.1)
    assert 'logp_ref' not in required_fields(plain)
    assert 'logp_ref' in required_fields(full)
    assert 'segment_rewards' in required_fields(po.algorithms.ppo_clip(segment_weight=1.0))
    bare = dataclasses.replace(rollout(0), segment_rewards=None)
    with pytest.raises(MissingInput, match='gae needs `segment_rewards`'):
        advantages.gae(segment_weight=1.0)(bare)
    with pytest.raises(ValueError, match='outcome_weight and segment_weight are 0'):
        advantages.gae(outcome_weight=0.0)


def test_an_estimator_by_name():
    made = algorithms.resolve(
        'gspo_token', advantages={'advantages': 'turn_rewards', 'coefficient': 2.0, 'by_turn': True}
    )
    expected = advantages.turn_rewards(2.0, by_turn=True)(episodes()).advantages
    np.testing.assert_array_equal(made.advantages(episodes()).advantages, expected)
    assert algorithms.resolve('trpo', advantages='gae').advantages.__name__ == 'gae()'
    with pytest.raises(ValueError, match='Did you mean `turn_rewards`'):
        algorithms.resolve('trpo', advantages='turn_reward')
    with pytest.raises(TypeError, match='Did you mean `coefficient`'):
        algorithms.resolve('trpo', advantages={'advantages': 'turn_rewards', 'coeficient': 1})
    with pytest.raises(ValueError, match='legal is a name'):
        algorithms.resolve('trpo', advantages=3)


def test_step_rewards_get_to_their_tokens():
    ends, start = [[1, 3], [0], [2, 4, 5]], [2, 1, 0]
    got = credit.spread(ends, [[0.5, 1.0], [], [1, 2, NAN]], start, 7)
    expected = np.full((3, 7), NAN, np.float32)
    expected[0, 3], expected[0, 5], expected[2, 2], expected[2, 4] = 0.5, 1.0, 1, 2
    np.testing.assert_array_equal(got, expected)
    ids = credit.numbered(ends, start, 7)
    assert ids.tolist() == [[0, 0, 0, 0, 1, 1, 1], [0] * 7, [0, 0, 0, 1, 1, 2, 2]]
    with pytest.raises(ValueError, match='row 0 has 1 rewards for its 2 steps'):
        credit.spread(ends, [[1.0], [], []], start, 7)


def test_process_supervision_as_published():
    """DeepSeekMath 4.1.3: two outputs of a group, three steps and two; sums of what is to come."""
    rewards = np.full((2, 6), NAN, np.float32)
    rewards[0, [1, 3, 5]], rewards[1, [2, 4]] = [1, 0, 1], [0, 0]
    mask = np.ones((2, 6), np.int32)
    mask[1, 5] = 0
    rolled = po.Rollout(
        tokens=mask, mask=mask, group=np.zeros(2, np.int32), segment_rewards=rewards
    )
    a, b = (np.array([1, 0]) - 0.4) / np.std([1, 0, 1, 0, 0], ddof=1)  # right, wrong
    expected = [[2 * a + b] * 2 + [a + b] * 2 + [a] * 2, [2 * b] * 3 + [b] * 2 + [0]]
    got = advantages.process_rewards()(rolled).advantages
    np.testing.assert_allclose(got, expected, atol=1e-5)
