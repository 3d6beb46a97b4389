"""Faults that users met in other libraries: small inputs and the right values, one test each."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from policyopt import losses, shaping
from policyopt.losses import penalties


def token_loss_transform(aggregate):
    """A loss whose token loss is -A: the policy term of REINFORCE at log-ratio 1."""
    return losses.policy_loss(
        ratio=losses.token_ratio(), surrogate=losses.reinforce(), aggregate=aggregate
    )


def inputs_of(token_loss, mask=None):
    token_loss = jnp.asarray(token_loss, jnp.float32)
    mask = jnp.ones_like(token_loss) if mask is None else jnp.asarray(mask)
    ones = jnp.ones_like(token_loss)
    return po.LossInputs(
        logp_new=jnp.zeros_like(ones), logp_old=-ones, mask=mask, advantages=-token_loss
    )


def one_token(ratio, advantage, **fields):
    """[1,1] inputs with the given ratio and advantage."""
    as_array = lambda x: jnp.asarray([[x]], jnp.float32)  # noqa: E731
    return po.LossInputs(
        logp_new=as_array(np.log(ratio)),
        logp_old=as_array(0.0),
        mask=as_array(1.0),
        advantages=as_array(advantage),
        **{k: as_array(v) for k, v in fields.items()},
    )


def run(loss, inputs, group=None):
    weights = loss.weigh(SimpleNamespace(mask=inputs.mask, group=group))

    def of(x):
        out = loss.apply(inputs.replace(logp_new=x), weights)
        return out.loss, out.metrics

    (value, metrics), grad = jax.value_and_grad(of, has_aux=True)(inputs.logp_new)
    return float(value), np.asarray(grad), metrics


def rewards_rollout(rewards, group=None, mask=None, **fields):
    rewards = np.asarray([np.nan if r is None else r for r in rewards], np.float32)
    mask = np.ones((len(rewards), 2), np.int32) if mask is None else np.asarray(mask)
    group = np.zeros(len(rewards), np.int32) if group is None else np.asarray(group)
    return po.Rollout(tokens=np.zeros_like(mask), mask=mask, rewards=rewards, group=group, **fields)


def test_accumulation_over_rollout_slices_and_microbatches():
    # 4 slices of 2 microbatches of 8 tokens, each with loss 1: the token mean is 1, not .5 or .25.
    loss = token_loss_transform(losses.token_mean())
    whole = inputs_of(np.ones((8, 8)))
    weights = loss.weigh(whole)
    total = 0.0
    for rows in np.split(np.arange(8), 8):
        part = jax.tree.map(lambda x, rows=rows: x[rows], whole)
        total += float(loss.apply(part, weights[rows]).loss)
    assert total == pytest.approx(1.0)


def test_accumulation_of_uneven_microbatches():
    loss = token_loss_transform(losses.token_mean())
    whole = inputs_of([[1, 1, 1, 1], [5, 0, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]])
    weights = loss.weigh(whole)
    total = sum(
        float(loss.apply(jax.tree.map(lambda x, i=i: x[i : i + 1], whole), weights[i : i + 1]).loss)
        for i in range(2)
    )
    assert total == pytest.approx(1.8)


def test_nan_under_the_mask():
    loss = token_loss_transform(losses.sequence_mean())
    value, grad, _ = run(loss, inputs_of([[1, np.nan, 3]], [[1, 0, 1]]))
    assert value == pytest.approx(2.0)
    np.testing.assert_allclose(grad, [[0.5, 0, 1.5]])


def test_granularity_of_sequence_ratio_and_aggregate():
    mask = np.zeros((2, 6))
    mask[0, :2] = mask[1] = 1
    inputs = inputs_of(np.zeros((2, 6)), mask)
    inputs = inputs.replace(logp_old=inputs.logp_new, advantages=jnp.float32([[1] * 6, [-1] * 6]))
    assert run(po.algorithms.gspo().loss, inputs)[0] == pytest.approx(0, abs=1e-7)


def test_clip_scale_of_the_gspo_preset():
    value, grad, metrics = run(po.algorithms.gspo().loss, one_token(1.001, 1.0))
    assert grad == 0 and float(metrics['policy/frozen'].value) == 1
    assert value == pytest.approx(-1.0004)


@pytest.mark.parametrize(
    ('estimate', 'expected'),
    [('weighted', -0.5493), ('k2', -0.5493), ('k3', -0.4), ('k1', 0.0)],
)
def test_k3_gradient(estimate, expected):
    ref = jnp.log(jnp.float32([0.9, 0.1]))

    def penalty(logit):
        logp = jax.nn.log_softmax(jnp.stack([logit, 0.0]))
        old = jax.lax.stop_gradient(logp)
        if estimate == 'weighted':
            terms = penalties.weighted_k3(ref, logp, old)
        else:
            terms = getattr(penalties, estimate)(ref - logp)
        return jnp.sum(jnp.exp(old) * terms)

    assert float(jax.grad(penalty)(0.0)) == pytest.approx(expected, abs=1e-4)


def test_clamped_kl():
    kl = losses.kl_to_reference(1.0, unbiased=True)
    inputs = one_token(1.0, 0.0, logp_ref=3.0)
    grad = jax.grad(lambda x: kl(inputs.replace(logp_new=x), x).sum())(inputs.logp_new)
    assert float(grad[0, 0]) == pytest.approx(-3.0, rel=1e-5)


def test_the_corrected_kl_gradient_is_bounded_where_k3_is_not():
    # p = 1e-4, q = .5, old = .3: -4999 against -.0028.
    p, q, old = (jnp.float32(np.log(x)) for x in (1e-4, 0.5, 0.3))
    assert float(jax.grad(lambda x: penalties.k3(q - x))(p)) == pytest.approx(-4999, rel=1e-4)
    corrected = jax.grad(lambda x: penalties.weighted_k3(q, x, old))(p)
    assert float(corrected) == pytest.approx(-0.0028, abs=5e-5)


def test_off_policy_mask_per_token_and_per_row():
    gate = losses.off_policy_sequence(0.5)
    row = jnp.ones((1, 3), jnp.float32)
    inputs = po.LossInputs(
        logp_new=-2 * row,
        logp_old=-row,
        logp_behavior=-row,
        mask=row,
        advantages=jnp.float32([[-0.5, 0.25, -0.25]]),
    )
    np.testing.assert_array_equal(gate(inputs, row), [[0, 1, 0]])
    np.testing.assert_array_equal(gate(inputs.replace(advantages=-row), row), [[0, 0, 0]])
    np.testing.assert_array_equal(gate(inputs.replace(advantages=0 * row), row), [[1, 1, 1]])


def test_off_policy_mask_looks_at_the_sampler():
    inputs = one_token(1.0, -1.0, logp_behavior=2.0)
    assert losses.off_policy_sequence(0.5)(inputs, inputs.logp_new) == 0


def test_clip_metric_respects_the_sign_of_the_advantage():
    inputs = po.LossInputs(
        logp_new=jnp.log(jnp.float32([[1.5, 0.5]])),
        logp_old=jnp.zeros((1, 2)),
        mask=jnp.ones((1, 2)),
        advantages=jnp.float32([[-1, 1]]),
    )
    assert float(run(po.algorithms.dapo().loss, inputs)[2]['policy/frozen'].value) == 0


def test_gae_over_gaps():
    rollout = rewards_rollout([1.0], mask=[[1, 0, 1, 0]], values=np.zeros((1, 4), np.float32))
    got = po.advantages.gae(gamma=1.0, lam=0.5)(rollout)
    np.testing.assert_allclose(got.advantages, [[0.5, 0, 1, 0]])


def test_whitening_of_one_valid_token():
    rollout = rewards_rollout([3.0], mask=[[1, 0]])
    for estimator in ('group_zscore', 'global_zscore', 'minibatch_normalised'):
        got = getattr(po.advantages, estimator)()(rollout).advantages
        np.testing.assert_array_equal(got, [[0, 0]])


@pytest.mark.parametrize(
    'name', ['group_zscore', 'group_mean_baseline', 'rloo', 'minibatch_normalised']
)
def test_singleton_group(name):
    got = getattr(po.advantages, name)()(rewards_rollout([5.0])).advantages
    np.testing.assert_array_equal(got, [[0, 0]])


@pytest.mark.parametrize(
    'name',
    ['group_zscore', 'group_mean_baseline', 'rloo', 'global_zscore', 'minibatch_normalised'],
)
def test_equal_rewards(name):
    got = getattr(po.advantages, name)()(rewards_rollout([0.9] * 7)).advantages
    np.testing.assert_array_equal(got, np.zeros((7, 2)))


@pytest.mark.parametrize('name', ['group_zscore', 'group_mean_baseline', 'rloo'])
def test_missing_reward(name):
    got = getattr(po.advantages, name)()(rewards_rollout([1.0, None, 0.0])).advantages[:, 0]
    np.testing.assert_allclose(got / got[0] / 2, [0.5, 0, -0.5], atol=1e-6)


@pytest.mark.parametrize('rule', ['mixed_outcomes', 'diverse_rewards'])
def test_dynamic_sampling_keeps_no_equal_group(rule):
    rollout = rewards_rollout([1, 1, 0, 0, 1, 0], [4, 4, 9, 9, 2, 2])
    rollout = rollout.replace(positive=rollout.rewards > 0)
    keep = getattr(shaping, rule)()(rollout)
    np.testing.assert_array_equal(keep, [0, 0, 0, 0, 1, 1])
    none = rollout.replace(rewards=np.full(6, np.nan, np.float32))
    assert not getattr(shaping, rule)()(none).any()


def test_overlong_in_tokens():
    width = 25
    lengths = np.array([16, 18, 20, 21])
    # A prompt of two tokens and padding: only tokens the policy chose count.
    mask = (np.arange(width) >= 2) & (np.arange(width) < 2 + lengths[:, None])
    rollout = rewards_rollout([0.0] * 4, mask=mask.astype(np.int32))
    got = shaping.soft_overlong(20, 4)(rollout).rewards
    np.testing.assert_allclose(got, [0, -0.5, -1, -1])


def test_integer_rewards_keep_fractions():
    rollout = rewards_rollout([1, 0]).replace(rewards=np.array([1, 0], np.int32))
    got = po.advantages.group_mean_baseline()(rollout).advantages[:, 0]
    np.testing.assert_allclose(got, [0.5, -0.5])
    rollout = rewards_rollout([0.7], values=np.zeros((1, 2), np.float32))
    np.testing.assert_allclose(po.advantages.gae(lam=1.0)(rollout).advantages, [[0.7, 0.7]])
    shaped = shaping.soft_overlong(4, 4)(rollout.replace(rewards=np.array([1], np.int32)))
    np.testing.assert_allclose(shaped.rewards, [0.5])


@pytest.mark.parametrize(('advantage', 'slopes'), [(1.0, [1, 1, 0]), (-1.0, [0, -1, -1])])
def test_quadrants_of_the_clip(advantage, slopes):
    surrogate = losses.clipped(0.2)
    for ratio, expected in zip((0.5, 1.0, 2.0), slopes, strict=True):
        grad = jax.grad(lambda r: surrogate(jnp.log(r), jnp.float32(advantage)))(ratio)
        assert float(grad) == pytest.approx(expected)


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    loss = losses.policy_loss(
        ratio=losses.token_ratio(),
        surrogate=losses.dual_clipped(0.2, cap=3.0),
        aggregate=losses.token_mean(),
    )
    value, grad, _ = run(loss, one_token(5.0, -1.0))
    assert value == pytest.approx(3.0) and grad == 0


def test_huge_log_ratio_is_finite_and_counted():
    for sign in (1, -1):
        inputs = one_token(1.0, 1.0)
        inputs = inputs.replace(logp_new=inputs.logp_new + 60 * sign)
        for alg in (po.algorithms.dapo(), po.algorithms.cispo(), po.algorithms.sapo()):
            value, grad, metrics = run(alg.loss, inputs)
            assert np.isfinite(value) and np.isfinite(grad).all()
            assert float(metrics['policy/extreme'].value) == 1


def test_a_clipped_token_has_no_gradient_and_cispo_keeps_it():
    assert run(po.algorithms.dapo().loss, one_token(2.0, 1.0))[1] == 0
    assert run(po.algorithms.cispo().loss, one_token(2.0, 1.0))[1] == pytest.approx(-2.0)


def test_a_negative_advantage_above_the_clip_keeps_its_gradient():
    value, grad, _ = run(po.algorithms.dapo().loss, one_token(1.08, -1.0))
    assert value == pytest.approx(1.08) and grad == pytest.approx(1.08)


def test_gspo_token_with_opposed_tokens():
    # s = 1.1, A = [1, -1]: gradient .55 (g1 - g2), where averaging A first would give 0.
    inputs = po.LossInputs(
        logp_new=jnp.full((1, 2), np.log(1.1), jnp.float32),
        logp_old=jnp.zeros((1, 2)),
        mask=jnp.ones((1, 2)),
        advantages=jnp.float32([[1, -1]]),
    )
    grad = run(po.algorithms.gspo_token(0.2, 0.2).loss, inputs)[1]
    np.testing.assert_allclose(grad, [[-0.55, 0.55]], rtol=1e-5)
    np.testing.assert_allclose(run(po.algorithms.gspo(0.2, 0.2).loss, inputs)[1], 0, atol=1e-7)


def test_two_answers_of_different_length():
    mask = np.zeros((2, 100))
    mask[0], mask[1, :10] = 1, 1
    inputs = inputs_of(np.zeros((2, 100)), mask)
    inputs = inputs.replace(
        logp_old=inputs.logp_new, advantages=jnp.float32([[1] * 100, [-1] * 100])
    )
    assert run(po.algorithms.grpo(beta=0.0).loss, inputs)[0] == pytest.approx(0, abs=1e-6)
    assert run(po.algorithms.dapo().loss, inputs)[0] == pytest.approx(-90 / 110, rel=1e-5)


def test_length_adaptive_lambda_and_worked_group():
    for n, lam in ((10, 0), (20, 0), (40, 0.5), (100, 0.8), (1000, 0.98)):
        # With V = 0 the last two advantages are lambda and 1.
        values = np.zeros((1, n), np.float32)
        rollout = rewards_rollout([1.0], mask=np.ones((1, n), np.int32), values=values)
        got = po.advantages.length_adaptive_gae(0.05)(rollout).advantages
        np.testing.assert_allclose(got[0, -2:], [lam, 1], atol=1e-6)
    got = po.advantages.group_zscore()(rewards_rollout([1, 0, 0, 0])).advantages[:, 0]
    np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5], atol=1e-5)
    single = po.advantages.length_adaptive_gae(0.05)(
        rewards_rollout([1.0], mask=[[0, 1]], values=np.zeros((1, 2), np.float32))
    )
    np.testing.assert_allclose(single.advantages, [[0, 1]])
