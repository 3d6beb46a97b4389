"""Losses, gradients and advantages against float64 values of an independent implementation."""

import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from experiments import ablation_grid
from policyopt import advantages, losses

DATA = pathlib.Path(__file__).parent / 'data' / 'golden'
LOSSES = json.loads((DATA / 'losses.json').read_text())
ADVANTAGES = json.loads((DATA / 'advantages.json').read_text())
FIELDS = (
    'logp_new logp_old logp_behavior logp_ref mask advantages segment values values_old returns'
).split()


def golden_loss(name: str, length: int) -> po.LossTransform:
    """The policy objective that the golden name stands for, with the constants used there."""
    token_mean, sequence_mean = losses.token_mean(), losses.sequence_mean()
    grid = ablation_grid.cells()
    ppo = dict(ratio=losses.token_ratio(), aggregate=token_mean)
    return {
        'reinforce': lambda: po.algorithms.reinforce().loss,
        'ppo_clip': lambda: losses.policy_loss(surrogate=losses.clipped(0.2), **ppo),
        'ppo_penalty': lambda: losses.policy_loss(
            surrogate=losses.unclipped(), penalties=[losses.kl_to_old(0.5)], **ppo
        ),
        'grpo': lambda: po.algorithms.grpo().loss,
        'grpo_no_kl': lambda: po.algorithms.grpo(beta=0.0).loss,
        'dr_grpo': lambda: po.algorithms.dr_grpo(length=length).loss,
        'dapo': lambda: po.algorithms.dapo().loss,
        'gspo': lambda: po.algorithms.gspo().loss,
        'gspo_token': lambda: po.algorithms.gspo_token().loss,
        'gspo_segment': lambda: losses.policy_loss(
            ratio=losses.segment_ratio(per_token=True),
            surrogate=losses.clipped(3e-4, 4e-4),
            aggregate=sequence_mean,
        ),
        'magistral': lambda: po.algorithms.magistral().loss,
        'sapo': lambda: po.algorithms.sapo().loss,
        'deepseek_v32': lambda: po.algorithms.deepseek_v32().loss,
        'cispo': lambda: po.algorithms.cispo().loss,
        'gmpo': lambda: po.algorithms.gmpo().loss,
        'minirl': lambda: po.algorithms.minirl().loss,
        'grid_ts': lambda: grid['TS'].loss,
        'grid_st': lambda: grid['ST'].loss,
        'positive_nll': lambda: losses.positive_nll(aggregate=token_mean),
    }[name]()


def evaluate(loss, case, dtype, token_advantages=False, wrt='logp_new'):
    arrays = {k: jnp.asarray(case[k], dtype) for k in FIELDS if k not in ('mask', 'segment')}
    if token_advantages:
        arrays['advantages'] = jnp.asarray(case['token_advantages'], dtype)
    inputs = po.LossInputs(
        mask=jnp.asarray(case['mask']), segment=jnp.asarray(case['segment']), **arrays
    )
    batch = SimpleNamespace(
        mask=inputs.mask, group=jnp.asarray(case['group']), positive=jnp.asarray(case['positive'])
    )
    weights = loss.weigh(batch)

    def run(x):
        out = loss.apply(inputs.replace(**{wrt: x}), weights)
        return out.loss, out.metrics

    (value, metrics), grad = jax.value_and_grad(run, has_aux=True)(getattr(inputs, wrt))
    return value, np.asarray(grad), metrics


NAMES = sorted({name for case in LOSSES for name in case['expected']})


def test_the_golden_file_is_whole():
    assert len(LOSSES) == 3 and len(NAMES) == 22 and len(ADVANTAGES) == 3


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('name', NAMES)
def test_loss_and_gradient(name, seed):
    case, expected = LOSSES[seed], LOSSES[seed]['expected'][name]
    base, _, suffix = name.partition('__')
    loss = golden_loss(base, case['T'])
    grad = np.asarray(expected['grad'])
    with jax.enable_x64(True):
        value, got, metrics = evaluate(loss, case, jnp.float64, bool(suffix))
        np.testing.assert_allclose(value, expected['loss'], rtol=1e-10, atol=1e-15)
        np.testing.assert_allclose(got, grad, rtol=1e-10, atol=1e-14)
        if base != 'positive_nll':
            stopped = metrics['policy/stopped']
            assert int(stopped.count) == expected['active_tokens']
            assert int(stopped.total) == expected['frozen_tokens']
    value, got, _ = evaluate(loss, case, jnp.float32, bool(suffix))
    scale = np.abs(grad).sum()
    assert abs(float(value) - expected['loss']) <= 1e-5 * scale
    np.testing.assert_allclose(got, grad, atol=1e-5 * scale)


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('clip', ['None', '0.2'])
def test_value_loss(clip, seed):
    case, expected = LOSSES[seed], LOSSES[seed]['expected_value_loss'][clip]
    loss = losses.value_loss(
        aggregate=losses.token_mean(), clip=None if clip == 'None' else float(clip)
    )
    with jax.enable_x64(True):
        value, grad, _ = evaluate(loss, case, jnp.float64, wrt='values')
        np.testing.assert_allclose(value, expected['loss'], rtol=1e-10)
        np.testing.assert_allclose(grad, expected['grad'], rtol=1e-10, atol=1e-14)
    value, grad, _ = evaluate(loss, case, jnp.float32, wrt='values')
    np.testing.assert_allclose(value, expected['loss'], rtol=1e-5)
    np.testing.assert_allclose(grad, expected['grad'], atol=1e-5)


ESTIMATORS = {
    'group_zscore': lambda: advantages.group_zscore(),
    'group_mean_baseline': lambda: advantages.group_mean_baseline(),
    'rloo': lambda: advantages.rloo(),
    'minibatch_normalised': lambda: advantages.minibatch_normalised(),
    'global_zscore': lambda: advantages.global_zscore(),
    'gae_gamma1_lambda095': lambda: advantages.gae(1.0, 0.95),
    'gae_gamma099_lambda09': lambda: advantages.gae(0.99, 0.9),
    'returns_lambda1': lambda: advantages.gae(1.0, 0.95, critic_lam=1.0),
    'returns_lambda095': lambda: advantages.gae(1.0, 0.95),
    'length_adaptive_alpha05': lambda: advantages.length_adaptive_gae(0.05),
    'length_adaptive_alpha1': lambda: advantages.length_adaptive_gae(1.0),
}


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('name', sorted(ADVANTAGES[0]['expected']))
def test_advantages(name, seed):
    case = ADVANTAGES[seed]
    expected = np.asarray(case['expected'][name])
    for dtype, tolerance in ((jnp.float64, 1e-10), (jnp.float32, 1e-5)):
        with jax.enable_x64(dtype == jnp.float64):
            rollout = SimpleNamespace(
                mask=jnp.asarray(case['mask']),
                group=jnp.asarray(case['group']),
                rewards=jnp.asarray(case['rewards'], dtype),
                values=jnp.asarray(case['values'], dtype),
            )
            got = ESTIMATORS[name]()(rollout)
            got = got.returns if name.startswith('returns') else got.advantages
            got = np.where(np.asarray(case['mask']), got, 0)
            scale = 1 if dtype == jnp.float64 else np.abs(expected).max()
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * scale)


def test_the_golden_rewards_have_equal_and_single_groups():
    # Seven equal rewards of .9 and groups of one are where float noise would show.
    for case in ADVANTAGES:
        rewards, group = np.asarray(case['rewards']), np.asarray(case['group'])
        expected = np.asarray(case['expected']['group_zscore'])
        equal = [g for g in set(group) if len(set(rewards[group == g])) == 1]
        assert len(equal) >= 2
        assert not expected[np.isin(group, equal)].any()
