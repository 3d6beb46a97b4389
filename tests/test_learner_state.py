"""Skipped steps, moving average, float32 masters under bfloat16, recomputed log-probs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import learner, models
from tests.learning import Config, Running, close, fresh, none, on_policy, random_batch

MODEL = Running()


@pytest.mark.parametrize('where', ['advantages', 'logp_old'])
def test_an_update_that_is_not_finite_is_skipped(where):
    """Parameters, optimizer state, average and controllers stay, bit for bit; then it goes on."""
    learn = learner.make_learner(
        MODEL,
        po.algorithms.grpo(beta=0.0),
        optax.adam(0.1),
        ema=0.5,
        microbatches=2,
        diagnose=none,
    )
    batch = random_batch()
    state, metrics, _ = learn.update(fresh(learn, MODEL.init()), batch)
    assert float(metrics['skipped'].value) == 0
    before = jax.device_get(dataclasses.replace(state, key=None))
    bad = dataclasses.replace(batch, **{where: getattr(batch, where).copy()})
    row, token = np.argwhere(batch.mask)[-1]
    getattr(bad, where)[row, token] = np.nan
    state, metrics, logp = learn.update(state, bad)
    assert float(metrics['skipped'].value) == 1 and float(metrics['update_norm'].value) == 0
    assert np.all(np.isfinite(logp))
    for name in ('params', 'opt_state', 'ema'):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(before, name))
    assert int(state.step) == 2
    state, metrics, _ = learn.update(state, batch)
    assert float(metrics['skipped'].value) == 0
    assert np.any(state.params['head'] != before.params['head'])
    np.testing.assert_allclose(
        state.ema['head'],
        (np.asarray(state.params['head']) + before.ema['head']) / 2,
        rtol=1e-6,
        atol=1e-6,
    )


def test_controllers_stay_after_a_skipped_update():
    model = Running(Config(value_head=True))
    learn = learner.make_learner(model, po.algorithms.ppo_penalty(beta=1.0), optax.sgd(0.1))
    batch = random_batch()
    batch.advantages[batch.mask > 0] = np.nan
    state, metrics, _ = learn.update(fresh(learn, model.init()), batch)
    assert float(learn.adapt(state, metrics).controllers['beta']) == 1
    done = metrics | {'skipped': dataclasses.replace(metrics['skipped'], total=jnp.zeros(()))}
    assert float(learn.adapt(state, done).controllers['beta']) != 1


def test_moving_average_is_the_sum_of_its_weights():
    learn = learner.make_learner(
        MODEL, po.algorithms.reinforce(), optax.sgd(0.5), ema=0.9, diagnose=none
    )
    state = fresh(learn, MODEL.init())
    want = np.asarray(state.params['head'])
    np.testing.assert_array_equal(state.ema['head'], want)
    for seed in range(3):
        state, _, _ = learn.update(state, random_batch(seed))
        want = 0.9 * want + 0.1 * np.asarray(state.params['head'])
        np.testing.assert_allclose(state.ema['head'], want, rtol=1e-5, atol=1e-6)
    for ema in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f'ema={ema}; legal is above 0 and below 1'):
            learner.make_learner(MODEL, po.algorithms.reinforce(), optax.sgd(0.5), ema=ema)


def test_small_updates_of_a_bfloat16_model_add_up():
    """A hundred steps of 1e-4 are 1 %: float32 keeps them, bfloat16 would keep none."""
    config = models.ModelConfig(
        vocab_size=12,
        embed_dim=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=8,
        dtype='bfloat16',
        param_dtype='bfloat16',
    )
    model = models.build(config)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    grow = optax.GradientTransformation(
        lambda p: (), lambda g, s, p: (jax.tree.map(lambda x: 1e-4 * x, p), s)
    )
    learn = learner.make_learner(model, po.algorithms.reinforce(), grow, diagnose=none)
    batch, state = random_batch(), fresh(learn, params)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype('float32')}
    first = jax.device_get(state.params)
    for _ in range(100):
        state, metrics, logp = learn.update(state, batch)
    close(state.params, jax.tree.map(lambda x: x * 1.0001**100, first), rtol=3e-5)
    lost = np.asarray(params['embed'])
    for _ in range(100):
        lost = lost + (np.float32(1e-4) * lost).astype(lost.dtype)
    np.testing.assert_array_equal(lost, params['embed'])
    # The forward pass is that of the narrow parameters.
    wide = learn.recompute(first, batch).logp_old
    np.testing.assert_array_equal(wide, learn.recompute(params, batch).logp_old)
    assert logp.dtype == jnp.float32 and np.isfinite(float(metrics['grad_norm'].value))


def test_recomputed_log_probs_are_decoupled_from_the_samplers():
    """Equal to the sampler's for its own parameters; off by an injected mismatch else."""
    params = MODEL.init()
    batch = on_policy(MODEL, params, random_batch())
    learn = learner.make_learner(
        MODEL,
        po.algorithms.grpo(beta=0.0, gates=[po.losses.truncated_importance(1.2)]),
        optax.sgd(0.1),
        microbatches=4,
    )
    same = learn.recompute(params, batch)
    np.testing.assert_allclose(same.logp_old, batch.logp_behavior, atol=2e-5)
    gap = np.where(batch.mask > 0, np.random.default_rng(1).normal(size=batch.mask.shape), 0)
    off = dataclasses.replace(
        batch,
        logp_old=batch.logp_old - gap.astype(np.float32),
        logp_behavior=batch.logp_behavior - gap.astype(np.float32),
    )
    new = learn.recompute(params, off)
    np.testing.assert_array_equal(new.logp_behavior, off.logp_behavior)
    np.testing.assert_allclose(new.logp_old - new.logp_behavior, gap, atol=2e-5)
    _, metrics, _ = learn.update(fresh(learn, params), new)
    # The ratio starts at 1, while the gate weighs by old over sampler, cut at 1.2.
    mask = batch.mask > 0
    np.testing.assert_allclose(metrics['policy/ratio'].value, 1, atol=2e-5)
    objective = np.minimum(np.exp(gap), 1.2) * batch.advantages
    np.testing.assert_allclose(metrics['policy/objective'].value, objective[mask].mean(), atol=2e-5)
    kl = (np.exp(gap) - 1 - gap)[mask].mean()
    np.testing.assert_allclose(metrics['kl_behavior/k3'].value, kl, rtol=1e-4)
    assert abs(float(metrics['kl_old/k3'].value)) < 1e-8
