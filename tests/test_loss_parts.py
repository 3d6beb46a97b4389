"""Identities between loss parts, and exact expectations by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from experiments import ablation_grid, variants
from policyopt import losses, masked
from policyopt.losses import penalties
from tests.batches import loss_inputs, random_arrays, token_batch

RATIOS = np.linspace(-2.5, 2.5, 41)
SURROGATES = {
    'reinforce': losses.reinforce(),
    'unclipped': losses.unclipped(),
    'clipped': losses.clipped(0.2, 0.28),
    'dual_clipped': losses.dual_clipped(0.2, 0.28, cap=3.0),
    'soft_gated': losses.soft_gated(1.0, 1.05),
    'truncated_weight': losses.truncated_weight(5.0),
    'masked_weight': losses.masked_weight(0.2, 0.28),
}


def slope(surrogate, log_ratio, advantage):
    return float(jax.grad(lambda l: surrogate(l, jnp.float32(advantage)))(jnp.float32(log_ratio)))


def loss_and_grad(alg, arrays):
    inputs, weights = loss_inputs(arrays, alg), alg.loss.weigh(token_batch(arrays))
    run = lambda x: alg.loss.apply(inputs.replace(logp_new=x), weights)  # noqa: E731
    (loss, metrics), grad = jax.value_and_grad(
        lambda x: (run(x).loss, run(x).metrics), has_aux=True
    )(jnp.asarray(arrays['logp_new']))
    return loss, grad, metrics


def composed(ratio, surrogate=None):
    return po.Algorithm(
        advantages=po.advantages.group_zscore(),
        loss=losses.policy_loss(
            ratio=ratio,
            surrogate=surrogate or losses.clipped(0.05),
            aggregate=losses.sequence_mean(),
        ),
    )


@pytest.mark.parametrize('name', SURROGATES)
def test_the_slope_at_ratio_one_is_the_advantage(name):
    for advantage in (-2.0, -0.5, 0.0, 0.5, 2.0):
        assert slope(SURROGATES[name], 0.0, advantage) == pytest.approx(advantage, rel=1e-6)


@pytest.mark.parametrize('name', SURROGATES)
def test_surrogates_are_elementwise_and_finite(name):
    l, a = np.meshgrid(np.linspace(-60, 60, 25), [-1.0, 0.0, 1.0])
    values = SURROGATES[name](jnp.float32(l), jnp.float32(a))
    one = [
        [float(SURROGATES[name](jnp.float32(x), jnp.float32(y))) for x, y in zip(*r, strict=True)]
        for r in zip(l, a, strict=True)
    ]
    np.testing.assert_allclose(values, one, rtol=1e-6)
    grads = jax.grad(lambda x: jnp.sum(SURROGATES[name](x, jnp.float32(a))))(jnp.float32(l))
    assert np.isfinite(values).all() and np.isfinite(grads).all()


@pytest.mark.parametrize('advantage', [1.0, -1.0])
def test_sapo_slope_is_sech_squared(advantage):
    tau = 1.0 if advantage > 0 else 1.05
    u = np.exp(RATIOS)
    expected = advantage / np.cosh(tau / 2 * (u - 1)) ** 2 * u  # d/dl = u d/du
    for dtype, tolerance in (('float64', 1e-10), ('float32', 1e-5)):
        with jax.enable_x64(dtype == 'float64'):
            l, a = jnp.asarray(RATIOS, dtype), jnp.asarray(advantage, dtype)
            got = jax.grad(lambda x, a=a: jnp.sum(losses.soft_gated(1.0, 1.05)(x, a)))(l)
        np.testing.assert_allclose(got, expected, atol=tolerance)


@pytest.mark.parametrize(
    ('tau', 'ratio', 'value', 'gradient'),
    [(1.0, 1.0, 2.0, 1.0), (1.0, 2.0, 2.9242, 0.7864), (1.05, 0.5, 1.4159, 0.9341)],
)
def test_sapo_worked_values(tau, ratio, value, gradient):
    gate = losses.soft_gated(tau, tau)
    assert float(gate(jnp.log(ratio), jnp.float32(1))) == pytest.approx(value, abs=1e-4)
    got = jax.grad(lambda r: gate(jnp.log(r), jnp.float32(1)))(ratio)
    assert float(got) == pytest.approx(gradient, abs=1e-4)


def test_masked_weight_has_the_gradient_of_clipped():
    for l in RATIOS:
        for advantage in (1.0, -1.0):
            a = slope(losses.masked_weight(0.2, 0.28), l, advantage)
            b = slope(losses.clipped(0.2, 0.28), l, advantage)
            assert a == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize('seed', range(4))
def test_gspo_equals_gspo_token_for_row_constant_advantages(seed):
    arrays = random_arrays(seed, rows=24, drift=0.05)
    one, two = po.algorithms.gspo(5e-3, 6e-3), po.algorithms.gspo_token(5e-3, 6e-3)
    loss, grad, metrics = loss_and_grad(one, arrays)
    loss2, grad2, metrics2 = loss_and_grad(two, arrays)
    np.testing.assert_allclose(loss2, loss, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad2, grad, rtol=1e-5, atol=1e-7)
    assert 0 < metrics['policy/frozen'].total <= metrics['policy/frozen'].count
    assert metrics['policy/frozen'].total == metrics2['policy/frozen'].total


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('per_token', [False, True])
def test_segments_interpolate_between_sequence_and_token(seed, per_token):
    arrays = random_arrays(seed, drift=0.05)
    segment = losses.segment_ratio(per_token)
    arrays['segment'] = np.full_like(arrays['segment'], 3)
    whole = loss_and_grad(composed(losses.sequence_ratio()), arrays)
    np.testing.assert_allclose(loss_and_grad(composed(segment), arrays)[1], whole[1], atol=1e-7)
    width = arrays['mask'].shape[1]
    arrays['segment'] = np.broadcast_to(np.arange(width)[::-1] * 5, arrays['mask'].shape)
    single = loss_and_grad(composed(losses.token_ratio()), arrays)
    np.testing.assert_allclose(loss_and_grad(composed(segment), arrays)[1], single[1], atol=1e-7)


def test_segment_ids_need_no_order():
    arrays = random_arrays(5)
    before = loss_and_grad(composed(losses.segment_ratio()), arrays)
    arrays['segment'] = np.array([40, -7, 5], np.int32)[arrays['segment']]
    after = loss_and_grad(composed(losses.segment_ratio()), arrays)
    np.testing.assert_allclose(after[1], before[1], atol=1e-7)


def test_ratio_members_against_numpy():
    arrays = random_arrays(2)
    l = np.where(arrays['mask'], arrays['logp_new'] - arrays['logp_old'], 0).astype(np.float64)
    n = np.maximum(arrays['mask'].sum(1), 1)
    token_ratio = np.where(arrays['mask'], np.exp(l), 0)
    rows = {
        'sequence_ratio': l.sum(1) / n,
        'sequence_token_ratio': l.sum(1) / n,
        'unnormalised_sequence_ratio': l.sum(1),
        'arithmetic_mean_ratio': np.log(np.maximum(token_ratio.sum(1), 1e-300) / n),
    }
    inputs = loss_inputs(arrays, composed(losses.token_ratio()))
    np.testing.assert_allclose(losses.token_ratio()(inputs), l, atol=1e-6)
    for name, row in rows.items():
        expected = np.where(arrays['mask'], row[:, None], 0)
        np.testing.assert_allclose(getattr(losses, name)()(inputs), expected, atol=2e-6)


def test_unnormalised_ratio_is_bounded_and_counted():
    alg = composed(losses.unnormalised_sequence_ratio(), losses.unclipped())
    arrays = random_arrays(1, rows=4)
    arrays['mask'] = np.ones_like(arrays['mask'])
    arrays['logp_old'] = arrays['logp_new'] - np.float32([[10], [0.1], [-10], [0]])
    loss, grad, metrics = loss_and_grad(alg, arrays)
    assert metrics['policy/extreme'].value == 0.5
    assert np.isfinite(loss) and np.isfinite(grad).all()
    assert not grad[0].any() and not grad[2].any()


def simplex(rng, size):
    p = rng.dirichlet(np.ones(size))
    return np.log(np.maximum(p, 1e-3) / np.maximum(p, 1e-3).sum())


@pytest.mark.parametrize('size', [2, 3, 5, 7])
@pytest.mark.parametrize('on_policy', [True, False])
def test_weighted_k3_is_the_exact_reverse_kl_in_value_and_gradient(size, on_policy):
    rng = np.random.default_rng(size)
    with jax.enable_x64(True):
        for _ in range(10):
            logits, ref, old = (jnp.asarray(simplex(rng, size)) for _ in range(3))
            old = logits if on_policy else old

            def expected_penalty(x, ref=ref, old=old):
                terms = penalties.weighted_k3(ref, jax.nn.log_softmax(x), old)
                return jnp.sum(jnp.exp(old) * terms)  # enumeration of the tokens drawn from old

            def exact(x, ref=ref):
                logp = jax.nn.log_softmax(x)
                return jnp.sum(jnp.exp(logp) * (logp - ref))

            np.testing.assert_allclose(expected_penalty(logits), exact(logits), rtol=1e-9)
            np.testing.assert_allclose(
                jax.grad(expected_penalty)(logits), jax.grad(exact)(logits), atol=1e-10
            )


@pytest.mark.parametrize('size', [2, 4, 7])
def test_expected_values_and_gradients_of_the_kl_estimators(size):
    rng = np.random.default_rng(size)
    with jax.enable_x64(True):
        logits, ref = jnp.asarray(simplex(rng, size)), jnp.asarray(simplex(rng, size))
        old = jnp.exp(jax.nn.log_softmax(logits))

        def expectation(estimate):
            return lambda x: jnp.sum(old * estimate(ref - jax.nn.log_softmax(x)))

        def reverse(x):
            logp = jax.nn.log_softmax(x)
            return jnp.sum(jnp.exp(logp) * (logp - ref))

        def forward(x):
            return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(x)))

        for estimate in (penalties.k1, penalties.k3):
            np.testing.assert_allclose(expectation(estimate)(logits), reverse(logits), rtol=1e-9)
        close = dict(atol=1e-9)
        np.testing.assert_allclose(jax.grad(expectation(penalties.k1))(logits), 0, **close)
        np.testing.assert_allclose(
            jax.grad(expectation(penalties.k2))(logits), jax.grad(reverse)(logits), **close
        )
        np.testing.assert_allclose(
            jax.grad(expectation(penalties.k3))(logits), jax.grad(forward)(logits), **close
        )


def test_k3_keeps_its_digits_near_zero():
    x = np.float32(1e-3)
    assert float(penalties.k3(x)) == pytest.approx(np.expm1(1e-3) - 1e-3, rel=1e-5)
    w = penalties.weighted_k3(jnp.float32(-1.0), jnp.float32(-1.0) - x, jnp.float32(-1.0))
    assert float(w) == pytest.approx(np.exp(-1e-3) * (np.expm1(1e-3) - 1e-3), rel=1e-3)


def test_sapo_keeps_its_slope_far_out():
    u = 18.0
    got = jax.grad(lambda r: losses.soft_gated(1.0, 1.0)(jnp.log(r), jnp.float32(1)))(u)
    assert float(got) == pytest.approx(1 / np.cosh((u - 1) / 2) ** 2, rel=1e-3)


@pytest.mark.parametrize('far', [20.0, 28.0, 29.0, 45.0, 59.0])
def test_weighted_k3_far_from_the_reference(far):
    # The gradient is w log(p/q), finite however improbable the reference finds the token.
    q, p, o = jnp.float32(0), jnp.float32(far), jnp.float32(0)
    got = jax.grad(lambda x: penalties.weighted_k3(q, x, o))(p)
    assert float(got) == pytest.approx(np.exp(far) * far, rel=1e-4)
    got = jax.grad(lambda x: penalties.weighted_k3(p, x, o))(q)
    assert float(got) == pytest.approx(-far, rel=1e-4)


def test_bounded_exp_is_exp_and_then_its_tangent():
    x = jnp.float32([-80.0, 0.0, 1.0, 59.0, 61.0, 400.0])
    expected = np.float64([0, 1, np.e, np.exp(59.0), np.exp(60.0) * 2, np.exp(60.0) * 341])
    np.testing.assert_allclose(masked.bounded_exp(x), expected, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(1 + masked.bounded_expm1(x), expected, rtol=1e-5, atol=1e-7)
    slopes = jax.vmap(jax.grad(masked.bounded_exp))(x)
    assert (slopes[1:] > 0).all() and np.isfinite(slopes).all()


def test_frozen_counts_sides_by_the_sign_of_the_advantage():
    ratios = np.float32([[1.5, 0.5, 1.5, 0.5, 1.0, 1.5]])
    advantages = np.float32([[1, 1, -1, -1, 1, 0]])
    arrays = random_arrays(0, rows=1, width=6)
    arrays |= dict(
        mask=np.ones((1, 6), np.int32),
        logp_old=np.zeros((1, 6), np.float32),
        logp_new=np.log(ratios),
        advantages=advantages,
    )
    metrics = loss_and_grad(composed(losses.token_ratio()), arrays)[2]
    counts = {k: int(metrics[f'policy/{k}'].total) for k in ('frozen', 'frozen_high', 'frozen_low')}
    assert counts == {'frozen': 2, 'frozen_high': 1, 'frozen_low': 1}
    assert int(metrics['policy/frozen'].count) == 5
    assert float(metrics['policy/frozen_high'].value) == pytest.approx(1 / 3)
    assert float(metrics['policy/frozen_low'].value) == pytest.approx(1 / 2)


def test_gates_touch_neither_penalties_nor_denominators():
    arrays = random_arrays(9)
    nothing = lambda inputs, log_ratio: jnp.zeros_like(log_ratio)  # noqa: E731
    make = lambda gates, penalty: losses.policy_loss(  # noqa: E731
        ratio=losses.token_ratio(),
        surrogate=losses.clipped(),
        aggregate=losses.sequence_mean(),
        gates=gates,
        penalties=penalty,
    )
    kl = [losses.kl_to_reference(0.1)]
    alg = composed(losses.token_ratio())
    gated, _, metrics = loss_and_grad(alg._replace(loss=make([nothing], kl)), arrays)
    zero = dict(arrays, advantages=np.zeros_like(arrays['advantages']))
    alone = loss_and_grad(alg._replace(loss=make([], kl)), zero)[0]
    np.testing.assert_allclose(gated, alone, rtol=1e-6)
    assert metrics['policy/gated'].value == 1
    with_gate, without = make([nothing], kl), make([], kl)
    np.testing.assert_array_equal(
        with_gate.weigh(token_batch(arrays)), without.weigh(token_batch(arrays))
    )


def test_gates_carry_no_gradient():
    arrays = random_arrays(4)
    alg = composed(losses.token_ratio())
    weight = losses.policy_loss(
        ratio=losses.token_ratio(),
        surrogate=losses.reinforce(),
        gates=[losses.detached_weight(losses.token_ratio())],
        aggregate=losses.sequence_mean(),
    )
    grad = loss_and_grad(alg._replace(loss=weight), arrays)[1]
    clipped = losses.policy_loss(
        ratio=losses.token_ratio(),
        surrogate=losses.truncated_weight(float('inf')),
        aggregate=losses.sequence_mean(),
    )
    expected = loss_and_grad(alg._replace(loss=clipped), arrays)[1]
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


def test_correction_levels_against_numpy():
    arrays = random_arrays(6)
    inputs = loss_inputs(arrays, composed(losses.token_ratio()))
    mask = arrays['mask'] == 1
    d = np.where(mask, arrays['logp_old'] - arrays['logp_behavior'], 0).astype(np.float64)
    n = np.maximum(mask.sum(1, keepdims=True), 1)
    levels = {
        'token': d,
        'sequence': d.sum(1, keepdims=True) / n,
        'product': d.sum(1, keepdims=True),
    }
    for level, log_rho in levels.items():
        rho = np.broadcast_to(np.exp(log_rho), mask.shape)
        got = losses.truncated_importance(1.1, level)(inputs, jnp.zeros(mask.shape))
        np.testing.assert_allclose(
            np.where(mask, got, 0), np.where(mask, np.minimum(rho, 1.1), 0), rtol=1e-5
        )
        got = losses.masked_importance(0.8, 1.1, level)(inputs, jnp.zeros(mask.shape))
        kept = np.where((rho >= 0.8) & (rho <= 1.1), rho, 0)
        np.testing.assert_allclose(np.where(mask, got, 0), np.where(mask, kept, 0), rtol=1e-5)


def test_adaptive_parts_read_their_coefficients():
    arrays = random_arrays(8)
    alg = composed(losses.token_ratio())
    fixed = loss_and_grad(composed(losses.token_ratio(), losses.clipped(0.1, 0.3)), arrays)
    moving = alg._replace(
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=losses.adaptive(losses.clipped, low='down', high='up'),
            aggregate=losses.sequence_mean(),
        ),
        controllers={
            'down': losses.controllers.adaptive_clip(0.1, 'policy/frozen_low'),
            'up': losses.controllers.adaptive_clip(0.3, 'policy/frozen_high'),
        },
    )
    got = loss_and_grad(moving, arrays)
    np.testing.assert_allclose(got[1], fixed[1], rtol=1e-6)
    half = losses.policy_loss(
        ratio=losses.token_ratio(),
        surrogate=losses.adaptive(losses.clipped, low=0.1, high='up'),
        aggregate=losses.sequence_mean(),
    )
    got = loss_and_grad(moving._replace(loss=half), arrays)
    np.testing.assert_allclose(got[1], fixed[1], rtol=1e-6)


def test_add_and_scale():
    arrays = random_arrays(7)
    one, two = po.algorithms.dapo(), po.algorithms.gspo()
    named = losses.policy_loss(
        ratio=losses.sequence_ratio(),
        surrogate=losses.clipped(3e-4, 4e-4),
        aggregate=losses.sequence_mean(),
        name='second',
    )
    both = one._replace(loss=losses.add(one.loss, losses.scale(0.5, named)))
    loss, grad, metrics = loss_and_grad(both, arrays)
    a, b = loss_and_grad(one, arrays), loss_and_grad(two, arrays)
    np.testing.assert_allclose(loss, a[0] + 0.5 * b[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, a[1] + 0.5 * b[1], rtol=1e-5, atol=1e-7)
    assert {'policy/frozen', 'second/frozen'} <= set(metrics)
    with pytest.raises(ValueError, match="'policy/extreme'.*name"):
        loss_and_grad(one._replace(loss=losses.add(one.loss, two.loss)), arrays)


def test_aggregates_against_numpy():
    arrays = random_arrays(3)
    mask, group = arrays['mask'], arrays['group']
    n = mask.sum(1)
    rows = (n > 0).sum()
    prompts = {g for g, k in zip(group, n, strict=True) if k}
    tokens = np.array([n[group == g].sum() for g in group])
    expected = {
        losses.token_mean(): mask / mask.sum(),
        losses.sequence_mean(): mask / np.maximum(n, 1)[:, None] / rows,
        losses.prompt_mean(): mask / np.maximum(tokens, 1)[:, None] / len(prompts),
        losses.constant_length(50): mask / (rows * 50),
        losses.sequence_sum(): mask / rows,
    }
    for aggregate, weights in expected.items():
        np.testing.assert_allclose(aggregate(mask, group), weights, rtol=1e-6)


def test_required_inputs_of_every_kind():
    kinds = {
        'grpo': {'logp_ref'},
        'gspo': set(),
        'deepseek_v32': {'logp_behavior', 'logp_ref'},
        'ppo_clip': {'values', 'returns'},
        'ppo_penalty': {'values', 'returns'},
        'gspo_turn': {'segment'},
        'minirl': {'logp_behavior'},
    }
    for name, fields in kinds.items():
        alg = getattr(po.algorithms, name)()
        values = losses.controllers.init(alg.controllers)
        assert losses.required_inputs(alg.loss, values) == fields, name
    assert losses.required_inputs(po.algorithms.grpo(beta=0.0).loss) == set()

    def careless(inputs, log_ratio):  # reads a field without asking for it
        return jnp.exp(inputs.logp_behavior - inputs.logp_old)

    loss = po.algorithms.gspo(gates=[careless]).loss
    assert losses.required_inputs(loss) == {'logp_behavior'}
    with pytest.raises(ZeroDivisionError):
        losses.required_inputs(po.algorithms.gspo(gates=[lambda *_: 1 / 0]).loss)
    bonus = po.algorithms.ppo_clip(value_clip=0.2, entropy_coefficient=0.01)
    fields = {'entropy', 'values', 'values_old', 'returns'}
    assert losses.required_inputs(bonus.loss) == fields


@pytest.mark.parametrize('seed', range(3))
def test_the_diagonal_of_the_grid_has_the_gradients_of_grpo_and_gspo(seed):
    arrays = random_arrays(seed, rows=16)
    cells = ablation_grid.cells()
    for cell, alg in (
        ('TT', po.algorithms.grpo(beta=0.0)),
        ('TT', variants.normalised('none')),
        ('SS', po.algorithms.gspo()),
        ('T_unclipped', variants.unclipped()),
    ):
        expected = loss_and_grad(alg, arrays)[1]
        np.testing.assert_allclose(loss_and_grad(cells[cell], arrays)[1], expected, atol=1e-7)
    product = np.exp(
        np.clip(
            np.where(arrays['mask'], arrays['logp_new'] - arrays['logp_old'], 0).sum(1), -20, 20
        )
    )[:, None]
    a, mask = arrays['advantages'], arrays['mask']
    keep = ~(((a > 0) & (product > 1.2)) | ((a < 0) & (product < 0.8)))
    n, rows = np.maximum(mask.sum(1, keepdims=True), 1), (mask.sum(1) > 0).sum()
    expected = -mask * keep * product * a / rows
    got = loss_and_grad(cells['US_sum'], arrays)[1]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-7)
    got = loss_and_grad(cells['US'], arrays)[1]
    np.testing.assert_allclose(got, expected / n, rtol=1e-4, atol=1e-7)


def test_clip_higher_is_grpo_with_another_clip_and_a_bonus():
    arrays = random_arrays(0, rows=16)
    for beta in (0.0, 0.04):
        got = loss_and_grad(variants.clip_higher(high=0.2, beta=beta), arrays)[:2]
        expected = loss_and_grad(po.algorithms.grpo(eps=0.2, beta=beta), arrays)[:2]
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    plain = loss_and_grad(variants.clip_higher(), arrays)[0]
    bonus = loss_and_grad(variants.clip_higher(bonus=0.01), arrays)[0]
    mask = arrays['mask'] != 0
    n = mask.sum(1)
    rows = np.where(mask, arrays['entropy'], 0).sum(1)[n > 0] / n[n > 0]
    np.testing.assert_allclose(bonus - plain, -0.01 * rows.mean(), rtol=1e-4)
