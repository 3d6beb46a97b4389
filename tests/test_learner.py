"""One update: exact sums over microbatches, fixed old log-probs, one trace, both update rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import learner as learner_lib
from policyopt import models, scoring, trust_region
from policyopt.losses import diagnostics
from tests.learning import Config, Running, close, fresh, none, on_policy, random_batch

ROWS, WIDTH = 8, 9


@pytest.fixture(scope='module')
def model():
    config = models.ModelConfig(
        vocab_size=12, embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=1, mlp_dim=8
    )
    return models.build(config)


@pytest.fixture(scope='module')
def params(model):
    return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


@pytest.fixture(scope='module')
def batch(model, params):
    """Rows of uneven length (one of them empty), log-probs of the very policy."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 4, ROWS)
    length = np.minimum(prompt + rng.integers(1, 7, ROWS), WIDTH)
    at = np.arange(WIDTH)
    mask = (at >= prompt[:, None]) & (at < length[:, None])
    mask[5] = False
    made = po.TokenBatch(
        tokens=jnp.asarray(rng.integers(0, 12, (ROWS, WIDTH)), jnp.int32),
        mask=jnp.asarray(mask, jnp.float32),
        advantages=jnp.asarray(rng.normal(size=(ROWS, WIDTH)) * mask, jnp.float32),
        logp_old=jnp.zeros((ROWS, WIDTH)),
        length=jnp.asarray(length, jnp.int32),
        group=jnp.asarray(np.arange(ROWS) // 4, jnp.int32),
        positive=jnp.asarray(rng.integers(0, 2, ROWS), bool),
    )
    old = jax.jit(lambda p, b: scoring.score(model, p, b).logp_new)(params, made)
    return dataclasses.replace(made, logp_old=old, logp_behavior=old)


def test_update_follows_the_gradient_of_the_written_out_objective(model, params, batch):
    """With plain SGD the step is minus the gradient of GRPO's J, computed from full logits."""
    low_old = dataclasses.replace(batch, logp_old=batch.logp_old - 0.1 * batch.mask)
    learner = learner_lib.make_learner(
        model, po.algorithms.grpo(beta=0.0), optax.sgd(1.0), temperature=0.7, diagnose=none
    )
    state, metrics, _ = learner.update(fresh(learner, params), low_old)

    def objective(params):
        valid = jnp.arange(WIDTH) < batch.length[:, None]
        logits = model.apply(params, batch.tokens, valid=valid).logits[:, :-1] / 0.7
        logp = jax.nn.log_softmax(logits)
        logp = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], axis=-1)[..., 0]
        mask, advantages = batch.mask[:, 1:], batch.advantages[:, 1:]
        ratio = jnp.exp(logp - low_old.logp_old[:, 1:])
        term = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        rows = jnp.sum(jnp.where(mask > 0, term, 0), axis=1) / jnp.maximum(mask.sum(axis=1), 1)
        return jnp.sum(rows) / 7  # one of the eight rows has no token

    value, slope = jax.jit(jax.value_and_grad(objective))(params)
    np.testing.assert_allclose(metrics['loss'].value, -value, rtol=1e-5)
    close(state.params, jax.tree.map(jnp.add, params, slope), atol=2e-6)
    assert int(state.step) == 1


def test_microbatches_change_nothing():
    """Loss, parameters and metrics are the same whatever the split."""
    model, batch, results = Running(Config(value_head=True)), random_batch(), []
    for parts in (1, 4):
        learner = learner_lib.make_learner(
            model, po.algorithms.vapo(), optax.sgd(1.0), microbatches=parts
        )
        results.append(learner.update(fresh(learner, model.init()), batch))
    (one, whole, logp_one), (four, split, logp_four) = results
    close(one.params, four.params, atol=1e-6)
    np.testing.assert_allclose(logp_one, logp_four, atol=1e-6)
    assert set(whole) == set(split)
    for name, metric in whole.items():
        if not isinstance(metric, diagnostics.Histogram):
            np.testing.assert_allclose(metric.value, split[name].value, rtol=1e-4, atol=1e-6)
            if not isinstance(metric, diagnostics.EffectiveSampleSize):
                np.testing.assert_array_equal(metric.count, split[name].count)


def test_a_program_does_not_grow_with_the_number_of_microbatches():
    model, batch = Running(), random_batch(rows=16)
    sizes = []
    for parts in (2, 16):
        learner = learner_lib.make_learner(
            model, po.algorithms.reinforce(), optax.sgd(1.0), microbatches=parts
        )
        text = learner.update.lower(fresh(learner, model.init()), batch).as_text()
        sizes.append(len(text.splitlines()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_split_that_does_not_divide_is_an_error(model, params, batch):
    learner = learner_lib.make_learner(
        model, po.algorithms.reinforce(), optax.sgd(1.0), microbatches=3
    )
    with pytest.raises(ValueError, match='3 microbatches do not divide a minibatch of 8 rows'):
        learner.update(fresh(learner, params), batch)


def test_temperature_zero_is_an_error(model):
    with pytest.raises(ValueError, match='temperature is 0'):
        learner_lib.make_learner(model, po.algorithms.grpo(), optax.sgd(1.0), temperature=0.0)


def test_iterations_train_with_fixed_old_log_probs_in_one_trace(model, params, batch):
    """Two passes over a rollout train twice; the ratio leaves 1 because the old one stays."""
    config = learner_lib.OptimizerConfig(learning_rate=3e-3)
    learner = learner_lib.make_learner(
        model, po.algorithms.grpo(beta=0.0), learner_lib.make_optimizer(config)
    )
    state = fresh(learner, params)
    score = jax.jit(lambda p, b: scoring.score(model, p, b))
    seen = []
    for _ in range(4):
        before = jax.device_get(state.params)
        state, metrics, logp = learner.update(state, batch)
        want = score(before, batch).logp_new
        np.testing.assert_allclose(logp, want, atol=2e-6)
        assert any(
            np.any(a != b)
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True)
        )
        seen.append(float(metrics['kl_old/k3'].value))
    assert abs(seen[0]) < 1e-9 and 1e-9 < seen[1] < seen[2] < seen[3]
    assert learner.update._cache_size() == 1
    other = dataclasses.replace(batch, mask=batch.mask.at[0].set(0), tokens=batch.tokens[::-1])
    learner.update(state, other)
    assert learner.update._cache_size() == 1


def test_controllers_move_with_the_metrics():
    """PPO-penalty: on-policy the KL is 0, below target / 1.5, so beta halves, once per rollout."""
    model = Running(Config(value_head=True))
    params = model.init()
    batch = on_policy(model, params, random_batch())
    learner = learner_lib.make_learner(model, po.algorithms.ppo_penalty(beta=1.0), optax.sgd(0.1))
    key = jax.random.key(1)
    state = learner.init(jax.tree.map(jnp.array, params), key)
    assert float(state.controllers['beta']) == 1
    given = jax.tree.leaves(state.params)
    state, metrics, _ = learner.update(state, batch)
    assert all(leaf.is_deleted() for leaf in given)
    jax.random.split(key)  # the caller's own
    assert float(metrics['controller/beta'].value) == 1
    assert float(state.controllers['beta']) == 1
    state = learner.adapt(state, metrics)
    assert float(state.controllers['beta']) == 0.5
    far = dataclasses.replace(metrics['kl_old/k3'], total=metrics['kl_old/k3'].count)
    state = learner.adapt(state, metrics | {'kl_old/k3': far})
    assert float(state.controllers['beta']) == 1


@pytest.fixture(scope='module')
def natural():
    """Before and after one TRPO update with delta .001 in two microbatches."""
    model = Running()
    params = model.init()
    batch = on_policy(model, params, random_batch())
    learner = learner_lib.make_learner(
        model,
        po.algorithms.trpo(delta=1e-3),
        optax.adam(1.0),
        ema=0.5,
        microbatches=2,
        diagnose=none,
    )
    return model, params, batch, learner.update, *learner.update(fresh(learner, params), batch)[:2]


def test_natural_gradient_through_the_same_update(natural):
    """KL bounded, surrogate better, parameters moved, optimizer untouched."""
    _, params, batch, update, state, metrics = natural
    assert float(metrics['trust_region/accepted'].value) == 1
    assert 0 < float(metrics['trust_region/kl'].value) <= 1e-3
    assert float(metrics['trust_region/improvement'].value) > 0
    assert float(metrics['update_norm'].value) > 1e-3
    close(state.opt_state, optax.adam(1.0).init(params))
    close(state.ema, jax.tree.map(lambda a, b: (a + b) / 2, params, state.params), rtol=1e-6)
    assert float(metrics['skipped'].value) == 0 and int(state.step) == 1
    bad = dataclasses.replace(batch, advantages=np.full_like(batch.advantages, np.nan))
    before = jax.device_get(state.params)
    state, metrics, _ = update(jax.tree.map(jnp.array, state), bad)
    assert float(metrics['skipped'].value) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


@pytest.mark.slow
def test_natural_gradient_is_the_rule_on_the_whole_minibatch(natural):
    model, params, batch, _, state, _ = natural
    batch = jax.tree.map(jnp.asarray, batch)
    mask, tokens = batch.mask > 0, float(batch.mask.sum())

    def logp(params):
        return scoring.score(model, params, batch, entropy=False).logp_new

    def surrogate(params):
        ratio = jnp.exp(logp(params) - batch.logp_old)
        return -jnp.sum(jnp.where(mask, ratio * batch.advantages, 0)) / tokens

    def kl(params, old):
        gap = jnp.where(mask, logp(params) - old, 0)
        return jnp.sum(jnp.exp(gap) - 1 - gap) / tokens

    want, _ = jax.jit(
        lambda p: trust_region.natural_gradient(1e-3).step(
            p,
            surrogate,
            lambda q: kl(q, batch.logp_old),
            lambda q: kl(q, jax.lax.stop_gradient(logp(q))),
        )
    )(params)
    size = float(optax.tree.norm(jax.tree.map(jnp.subtract, want, params)))
    gap = float(optax.tree.norm(jax.tree.map(jnp.subtract, state.params, want)))
    assert size > 1e-3 and gap < 0.02 * size
