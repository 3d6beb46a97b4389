"""Each named algorithm against its own row: loss off-policy in numpy, estimator, and arguments."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import policyopt as po
from policyopt import advantages, losses, shaping
from tests.batches import (
    ALGORITHMS,
    REQUIRED,
    algorithm,
    loss_inputs,
    random_arrays,
    rollout,
    token_batch,
    told,
)
from tests.test_contract import CRITIC, numpy_weights

# What sets some algorithms apart from the rest.
NEVER_FROZEN = ('reinforce', 'rloo', 'trpo', 'ppo_penalty', 'sapo', 'cispo', 'minirl')
DETACHED = ('cispo', 'minirl')  # weights without a gradient: the slope is not that of the value
# The gradient is not the ungated policy term's alone, but of penalties, gates or other losses, too.
MORE_TERMS = ('grpo', 'ppo_penalty', 'deepseek_v32', 'vapo', 'minirl')


def clip(u, a, low, high):
    return np.minimum(u * a, np.clip(u, 1 - low, 1 + high) * a)


def k3(log_qp):
    return np.exp(log_qp) - log_qp - 1


def mean_rows(x, mask):
    return (x * mask).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)


def reference(name: str, d: dict) -> float:
    """The published objective, negated, in float64."""
    mask, a = d['mask'].astype(float), d['advantages'].astype(float)
    new, old, sampler, ref = (
        np.where(mask, d[f'logp_{k}'], 0).astype(float) for k in ('new', 'old', 'behavior', 'ref')
    )
    l = new - old
    w, s = np.exp(l), np.exp(mean_rows(l, mask))
    weights = numpy_weights(name, mask)
    same = (d['segment'][:, :, None] == d['segment'][:, None, :]) * mask[:, None, :]
    turn = np.exp((same * l[:, None, :]).sum(-1) / np.maximum(same.sum(-1), 1))
    cut = np.where(a > 0, np.minimum(l, 0.4), np.where(a < 0, np.maximum(l, -0.4), l))
    drift = mean_rows(sampler - new, mask)
    tau = np.where(a > 0, 1.0, 1.05)
    stopped = ((a > 0) & (w > 1.27)) | ((a < 0) & (w < 0.8))
    terms = {
        'reinforce': l * a,
        'rloo': l * a,
        'reinforce_pp': clip(w, a, 0.2, 0.2),
        'trpo': w * a,
        'ppo_clip': clip(w, a, 0.2, 0.2),
        'ppo_penalty': w * a - 1.0 * (w - 1 - l),
        'grpo': clip(w, a, 0.2, 0.2) - 0.04 * k3(ref - new),
        'dr_grpo': clip(w, a, 0.2, 0.2),
        'dapo': clip(w, a, 0.2, 0.28),
        'magistral': clip(w, a, 0.2, 0.28),
        'gspo': clip(s, a, 3e-4, 4e-4),
        'gspo_token': clip(s, a, 3e-4, 4e-4),
        'gspo_turn': clip(turn, a, 3e-4, 4e-4),
        'gspo_step': clip(turn, a, 3e-4, 4e-4),
        'sapo': 4 / tau / (1 + np.exp(-tau * (w - 1))) * a,
        'vc_ppo': clip(w, a, 0.2, 0.2),
        'vapo': clip(w, a, 0.2, 0.28),
        'deepseek_v32': clip(w, a, 0.2, 0.2) * ~((a < 0) & (drift > 0.5))
        - 1e-3 * w * k3(ref - new),
        'cispo': np.minimum(w, 5) * a * l,
        'minirl': ~stopped * np.exp(new - sampler) * a * l,
        'gmpo': np.exp(mean_rows(cut, mask)) * a,
    }
    term = told(terms, name, '`reference` of tests/test_algorithms.py, as its formula in numpy')
    loss = -(weights * np.where(mask, term, 0)).sum()
    if name in CRITIC:
        error = (d['values'].astype(float) - d['returns']) ** 2
        loss += 0.5 * (weights * np.where(mask, error, 0)).sum()
    if name == 'vapo':
        good = mask * d['positive'][:, None]
        loss -= 0.1 * (good * new).sum() / max(good.sum(), 1)
    return loss


def evaluate(alg, arrays):
    inputs, weights = loss_inputs(arrays, alg), alg.loss.weigh(token_batch(arrays))

    def run(x):
        out = alg.loss.apply(dataclasses.replace(inputs, logp_new=x), weights)
        return out.loss, out.metrics

    (loss, metrics), grad = jax.jit(jax.value_and_grad(run, has_aux=True))(inputs.logp_new)
    return float(loss), np.asarray(grad), metrics


def batches(seed, drift):
    arrays = random_arrays(seed, rows=12, drift=drift)
    # One row that only the sampler's drift drops, so that every gate has something to do.
    arrays['logp_behavior'][3] += 1.0
    arrays['advantages'][3] = -0.7
    return arrays


@pytest.mark.parametrize('name', ALGORITHMS)
@pytest.mark.parametrize('drift', [0.02, 0.4])
def test_loss_off_policy_against_numpy(name, drift):
    arrays = batches(3, drift)
    loss, grad, metrics = evaluate(algorithm(name), arrays)
    assert loss == pytest.approx(reference(name, arrays), rel=1e-4, abs=2e-6)
    for i, t in [tuple(np.argwhere(arrays['mask'])[k]) for k in (0, 7, 11)]:
        sides = []
        for step in (1e-3, -1e-3):
            moved = dict(arrays, logp_new=arrays['logp_new'].astype(np.float64).copy())
            moved['logp_new'][i, t] += step
            sides.append(reference(name, moved))
        slope = (sides[0] - sides[1]) / 2e-3
        if name not in DETACHED:
            assert grad[i, t] == pytest.approx(slope, rel=5e-3, abs=2e-4)
    values = {k: float(m.value) for k, m in metrics.items()}
    active = (arrays['mask'] == 1) & (arrays['advantages'] != 0)
    if name not in MORE_TERMS:
        assert values['policy/frozen'] == pytest.approx((grad[active] == 0).mean(), abs=1e-6)
    if drift == 0.4:
        assert (values['policy/frozen'] == 0) == (name in NEVER_FROZEN), 'NEVER_FROZEN is wrong'
    assert values['policy/ratio'] > 0 and values['policy/objective'] != 0


ESTIMATORS = {
    'reinforce': advantages.batch_mean_baseline(),
    'rloo': advantages.rloo(),
    'reinforce_pp': advantages.global_zscore(),
    'trpo': advantages.group_mean_baseline(),
    'ppo_clip': advantages.gae(1.0, 0.95),
    'ppo_penalty': advantages.gae(1.0, 0.95),
    'vc_ppo': advantages.gae(1.0, 0.95, 1.0),
    'vapo': advantages.length_adaptive_gae(0.05, 1.0),
    'gspo_turn': advantages.turn_rewards(1.0),
    'gspo_step': advantages.process_rewards(False, 1.0),
}
ESTIMATORS |= {
    n: advantages.group_mean_baseline() for n in ('dr_grpo', 'magistral', 'deepseek_v32', 'minirl')
}
ESTIMATORS |= {
    n: advantages.group_zscore()
    for n in ('grpo', 'dapo', 'gspo', 'gspo_token', 'sapo', 'cispo', 'gmpo')
}


@pytest.mark.parametrize('name', ALGORITHMS)
def test_the_rollout_side_is_the_papers(name):
    alg, rolled = algorithm(name), rollout(2)
    expected = told(ESTIMATORS, name, 'ESTIMATORS of tests/test_algorithms.py')(rolled)
    for got, want in zip(alg.advantages(rolled), expected, strict=True):
        np.testing.assert_array_equal(got, want) if want is not None else None
    shaped = {
        'dapo': shaping.soft_overlong(20480, 4096),
        'reinforce_pp': shaping.kl_in_reward(1e-3),
    }.get(name, lambda x: x)(rolled)
    np.testing.assert_array_equal(alg.shape(rolled).rewards, shaped.rewards)
    rule = {'dapo': shaping.mixed_outcomes(), 'magistral': shaping.diverse_rewards()}.get(name)
    keep = np.ones(12, bool) if rule is None else rule(rolled)
    np.testing.assert_array_equal(alg.keep(rolled), keep)
    assert (alg.update.step is not None) == (name == 'trpo')
    assert set(alg.controllers) == ({'beta'} if name == 'ppo_penalty' else set())


def fingerprint(alg):
    """Everything an argument can change, as one vector."""
    arrays, rolled = batches(5, 0.3), rollout(3)
    arrays['positive'] = np.ones_like(arrays['positive'])
    loss, grad, _ = evaluate(alg, arrays)
    shaped = alg.shape(rolled)
    estimates = alg.advantages(rolled)
    steps = []
    for controller in alg.controllers.values():
        kl = po.Mean(total=np.float32(0.02), count=np.float32(1))
        steps += [controller.init, float(controller.update(1.0, {'kl_old/k3': kl}, 0))]
    parts = [loss, grad, shaped.rewards, shaped.mask, *estimates, steps]
    return np.concatenate([np.ravel(x) for x in parts if x is not None]).astype(float)


CHANGED = {
    'gates': [losses.truncated_importance(0.9)],
    'advantages': advantages.global_zscore(),
    'length': 8,
    'max_length': 5,
    'cache': 2,
    'filter_overlong': True,
    'mean': True,
    'discount': 0.5,
    'target': 0.1,
    'value_clip': 0.01,
    'gamma': 0.9,
    'cap': 0.9,
    'alpha': 10.0,
    'per_token': False,
    ('vapo', 'lam'): 0.5,
}
TOGETHER = {
    (name, a): {'max_length': 6, 'cache': 4}
    for name in ('dapo', 'magistral')
    for a in ('cache', 'max_length')
}
TOGETHER['vapo', 'lam'] = {'alpha': None, 'lam': 0.95}


@pytest.mark.parametrize(
    ('name', 'argument'),
    [
        (name, argument)
        for name in ALGORITHMS
        for argument in inspect.signature(getattr(po.algorithms, name)).parameters
    ],
)
def test_every_argument_has_an_effect(name, argument):
    if (name, argument) == ('trpo', 'delta'):
        return test_trpo_delta_bounds_the_step()
    parameter = inspect.signature(getattr(po.algorithms, name)).parameters[argument]
    # No answer here reaches DAPO's default length.
    given = REQUIRED.get(name, {}) | TOGETHER.get((name, argument), {})
    value = CHANGED.get(argument, None if parameter.default is None else 0)
    value = CHANGED.get((name, argument), value)
    if value == 0 and value is not False:
        value = 0.5 * parameter.default if parameter.default else 0.01
    make = getattr(po.algorithms, name)
    before, after = fingerprint(make(**given)), fingerprint(make(**(given | {argument: value})))
    assert before.shape != after.shape or not np.allclose(before, after, rtol=1e-6, atol=1e-9)
    return None


def test_vapo_without_each_of_its_parts():
    """The loss that is left by hand, and the estimators that take the place of its own."""
    arrays = batches(4, 0.3)
    bare = po.algorithms.vapo(high=0.2, alpha=None, lam=0.95, critic_lam=None, nll=0, per_token=0)
    loss, _, metrics = evaluate(bare, arrays)
    mask, a = arrays['mask'].astype(float), arrays['advantages'].astype(float)
    w = np.exp(np.where(mask, arrays['logp_new'].astype(float) - arrays['logp_old'], 0))
    rows = mask.any(axis=1)
    want = -mean_rows(clip(w, a, 0.2, 0.2), mask)[rows].mean()
    error = (arrays['values'].astype(float) - arrays['returns']) ** 2
    want += 0.5 * (error * mask).sum() / mask.sum()
    assert loss == pytest.approx(want, rel=1e-5)
    assert not [name for name in metrics if name.startswith('nll')]
    bare.loss.weigh(token_batch(arrays | {'positive': None}))  # not asked for

    rolled = rollout(2)
    wanted = {
        (0.05, 1.0): None,
        (None, 1.0): advantages.gae(1.0, 0.95, 1.0),
        (None, None): advantages.gae(1.0, 0.95),
    }
    for (alpha, critic), estimator in wanted.items():
        lam = None if alpha else 0.95
        got = po.algorithms.vapo(alpha=alpha, lam=lam, critic_lam=critic).advantages(rolled)
        estimator = estimator or ESTIMATORS['vapo']
        for x, y in zip(got, estimator(rolled), strict=True):
            np.testing.assert_array_equal(x, y)
    # Coupled and length-adaptive: the critic's target is A + V with the policy's lambda.
    got = po.algorithms.vapo(alpha=0.5, critic_lam=None).advantages(rolled)
    np.testing.assert_allclose(got.returns, got.advantages + rolled.values * rolled.mask, rtol=1e-6)
    for wrong in (dict(lam=0.9), dict(alpha=None)):
        with pytest.raises(ValueError, match='legal is one of them, alpha for a lambda by'):
            po.algorithms.vapo(**wrong)
    with pytest.raises(ValueError, match='nll must lie in'):
        po.algorithms.vapo(nll=-0.1)


def test_trpo_delta_bounds_the_step():
    target = np.float32([3.0, -1.0])
    moved = {}
    for delta in (0.01, 0.04):
        step = po.algorithms.trpo(delta).update.step
        loss = lambda x: -x @ target  # noqa: E731
        kl = lambda x: 0.5 * x @ x  # noqa: E731
        params, metrics = step(np.zeros(2, np.float32), loss, kl, kl)
        assert metrics['trust_region/kl'].value <= delta
        moved[delta] = np.linalg.norm(params)
    assert moved[0.04] > 1.5 * moved[0.01]


@pytest.mark.parametrize('estimator', ['k1', 'k2', 'k3'])
def test_kl_estimators_through_the_loss(estimator):
    arrays = batches(1, 0.3)
    alg = po.algorithms.gspo()._replace(
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=losses.reinforce(),
            penalties=[losses.kl_to_reference(0.5, estimator)],
            aggregate=losses.token_mean(),
        )
    )
    arrays['advantages'] = np.zeros_like(arrays['advantages'])
    loss, grad, metrics = evaluate(alg, arrays)
    mask = arrays['mask']
    d = arrays['logp_ref'].astype(float) - arrays['logp_new']
    value = {'k1': -d, 'k2': d**2 / 2, 'k3': np.exp(d) - 1 - d}[estimator]
    slope = {'k1': np.ones_like(d), 'k2': -d, 'k3': 1 - np.exp(d)}[estimator]
    assert loss == pytest.approx(0.5 * value[mask == 1].mean(), rel=1e-5)
    np.testing.assert_allclose(grad, 0.5 * mask * slope / mask.sum(), rtol=1e-4, atol=1e-7)
    assert float(metrics['policy/penalty'].value) == pytest.approx(loss, rel=1e-5)


def test_the_entropy_penalty_is_a_bonus():
    arrays = batches(1, 0.3)
    before = evaluate(po.algorithms.ppo_clip(), arrays)[0]
    after = evaluate(po.algorithms.ppo_clip(entropy_coefficient=0.1), arrays)[0]
    mean = arrays['entropy'][arrays['mask'] == 1].mean()
    assert after - before == pytest.approx(-0.1 * mean, rel=1e-4)


def test_dual_clip_uses_both_bounds():
    surrogate = losses.dual_clipped(0.1, 0.3, cap=2.0)
    for ratio, advantage, expected in (
        (1.25, 1.0, 1.25), (1.4, 1.0, 1.3), (0.8, -1.0, -0.9), (1.9, -1.0, -1.9), (3.0, -1.0, -2.0)
    ):  # fmt: skip
        got = surrogate(np.log(np.float32(ratio)), np.float32(advantage))
        assert float(got) == pytest.approx(expected, rel=1e-5)


def test_metrics_of_losses_against_numpy():
    arrays = batches(2, 0.3)
    alg = po.algorithms.vapo()
    clipped = losses.add(
        alg.loss, losses.value_loss(aggregate=losses.token_mean(), clip=0.1, name='clipped_value')
    )
    values = {k: float(m.value) for k, m in evaluate(alg._replace(loss=clipped), arrays)[2].items()}
    mask = arrays['mask'] == 1
    l = (arrays['logp_new'].astype(float) - arrays['logp_old'])[mask]
    a = arrays['advantages'].astype(float)[mask]
    assert values['policy/ratio'] == pytest.approx(np.exp(l).mean(), rel=1e-5)
    objective = clip(np.exp(l), a, 0.2, 0.28).mean()
    assert values['policy/objective'] == pytest.approx(objective, rel=1e-4)
    v, r, o = (arrays[k].astype(float)[mask] for k in ('values', 'returns', 'values_old'))
    assert values['value/error'] == pytest.approx(((v - r) ** 2).mean(), rel=1e-5)
    kept = o + np.clip(v - o, -0.1, 0.1)
    share = ((kept - r) ** 2 > (v - r) ** 2).mean()
    assert values['clipped_value/clipped'] == pytest.approx(share, abs=1e-6)
    good = mask & (arrays['positive'] == 1)[:, None]
    assert values['nll/logp'] == pytest.approx(arrays['logp_new'][good].mean(), rel=1e-5)
