"""Shaping, keep rules, and coefficients that adapt."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import shaping
from policyopt.losses import controllers
from tests.batches import rollout


def mean(value):
    return po.Mean(total=jnp.float32(value), count=jnp.float32(1))


def test_soft_overlong_adds_to_the_reward_and_scales():
    rolled = rollout(0)
    n = rolled.mask.sum(1)
    expected = np.clip((6 - 4 - n) / 4, -1, 0)
    for weight in (1.0, 0.1):
        got = shaping.soft_overlong(6, 4, weight)(rolled).rewards
        np.testing.assert_allclose(got, rolled.rewards + weight * expected, atol=1e-6)
    with pytest.raises(ValueError, match=r'cache must lie in \[1, 6\], got 7'):
        shaping.soft_overlong(6, 7)


def test_overlong_filter_masks_rows_and_keeps_their_rewards():
    rolled = rollout(1)
    got = shaping.overlong_filter()(rolled)
    expected = np.where(rolled.truncated[:, None], 0, rolled.mask)
    np.testing.assert_array_equal(got.mask, expected)
    np.testing.assert_array_equal(got.rewards, rolled.rewards)


def test_kl_in_reward():
    rolled = rollout(2)
    got = shaping.kl_in_reward(0.5)(rolled).rewards
    np.testing.assert_allclose(got, rolled.rewards - 0.5 * 0.1 * rolled.mask.sum(1), atol=1e-5)


def test_chain_applies_from_left_to_right():
    rolled = rollout(3)
    got = shaping.chain(shaping.overlong_filter(), shaping.soft_overlong(3, 2))(rolled)
    # The filter emptied truncated rows first, so no length penalty is left on them.
    np.testing.assert_array_equal(got.rewards[rolled.truncated], rolled.rewards[rolled.truncated])


def test_keep_rules_by_hand():
    rolled = rollout(4)
    for name, value in (('mixed_outcomes', rolled.positive), ('diverse_rewards', rolled.rewards)):
        rewards = np.where(np.arange(12) == 5, np.nan, rolled.rewards).astype(np.float32)
        got = np.asarray(getattr(shaping, name)()(rolled.replace(rewards=rewards)))
        for i in range(12):
            peers = (rolled.group == rolled.group[i]) & (np.arange(12) != 5)
            expected = i != 5 and len(set(value[peers])) > 1
            assert got[i] == expected


def test_doubling_kl():
    controller = controllers.doubling_kl(init=1.0, target=0.03)
    for kl, factor in ((0.019, 0.5), (0.021, 1.0), (0.044, 1.0), (0.046, 2.0)):
        assert controller.update(jnp.float32(1), {'kl_old/k3': mean(kl)}, 0) == factor


def test_proportional_kl_is_clipped():
    controller = controllers.proportional_kl(0.1, target=0.02, rate=0.5)
    for kl, factor in ((0.02, 1.0), (0.022, 1.05), (1.0, 1.1), (0.0, 0.9)):
        got = controller.update(jnp.float32(0.1), {'kl_reference/k3': mean(kl)}, 0)
        assert float(got) == pytest.approx(0.1 * factor, rel=1e-5)
    lost = controller.update(jnp.float32(0.1), {'kl_reference/k3': mean(np.nan)}, 0)
    assert float(lost) == pytest.approx(0.1)


def test_adaptive_clip_moves_each_side_on_its_own():
    kinds = {
        'low': controllers.adaptive_clip(0.1, 'policy/frozen_low', target=0.1, rate=1.0),
        'high': controllers.adaptive_clip(0.2, 'policy/frozen_high', high=0.21, rate=1.0),
    }
    values = controllers.init(kinds)
    metrics = {'policy/frozen_low': mean(0.0), 'policy/frozen_high': mean(0.9)}
    step = jax.jit(lambda v, m, s: controllers.update(kinds, v, m, s))
    values = step(values, metrics, 0)
    assert float(values['low']) == pytest.approx(0.1 * np.exp(-0.1), rel=1e-5)
    assert float(values['high']) == pytest.approx(0.21)
    nothing = po.Mean(total=jnp.float32(0), count=jnp.float32(0))
    after = step(values, dict.fromkeys(metrics, nothing), 0)
    assert after == values


def test_schedules_and_ppo_penalty_in_a_loop():
    kinds = {'x': controllers.scheduled(optax.linear_schedule(1.0, 0.0, 10))}
    values, used = controllers.init(kinds), []
    for step in range(4):  # as a trainer does: use at step k, then update after it
        used.append(float(values['x']))
        values = controllers.update(kinds, values, {}, jnp.int32(step))
    np.testing.assert_allclose(used, [1.0, 0.9, 0.8, 0.7], rtol=1e-6)
    alg = po.algorithms.ppo_penalty(beta=0.5, target=0.01)
    values = controllers.init(alg.controllers)
    for _ in range(3):
        values = controllers.update(alg.controllers, values, {'kl_old/k3': mean(1.0)}, 0)
    assert values['beta'] == 4.0
    for _ in range(300):
        values = controllers.update(alg.controllers, values, {'kl_old/k3': mean(0.0)}, 0)
    for _ in range(3):  # a coefficient at rest comes back
        values = controllers.update(alg.controllers, values, {'kl_old/k3': mean(1.0)}, 0)
    assert values['beta'] == pytest.approx(8e-4)


def test_a_controller_names_the_metric_it_misses():
    kinds = {'beta': controllers.doubling_kl()}
    with pytest.raises(KeyError, match='kl_old/k3.*Did you mean `kl_old/k1`'):
        controllers.update(kinds, controllers.init(kinds), {'kl_old/k1': mean(0)}, 0)
