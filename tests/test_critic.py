"""Critic: explained variance, the stop rule, own and shared trunks, value pretraining."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import critic, learner, masked
from policyopt import metrics as metrics_lib
from tests import learning
from tests.learning import Config, Running, close, fresh, none, random_batch

PLAIN, HEADED = Running(), Running(Config(value_head=True))


def test_explained_variance_adds_to_that_of_all_tokens():
    rng = np.random.default_rng(0)
    returns = (100 + rng.normal(size=(6, 5))).astype(np.float32)
    values = (returns + 0.5 * rng.normal(size=(6, 5)) + 3).astype(np.float32)
    mask = rng.random((6, 5)) < 0.6
    mask[:2] = False
    values[~mask] = np.nan
    parts = [
        critic.ExplainedVariance.of(*(x[i : i + 2] for x in (values, returns, mask)))
        for i in (0, 2, 4)
    ]
    r, e = returns[mask].astype(np.float64), (returns - values)[mask].astype(np.float64)
    want = 1 - np.var(e) / np.var(r)
    np.testing.assert_allclose((parts[0] + parts[1] + parts[2]).value, want, rtol=1e-4)
    np.testing.assert_allclose((parts[2] + parts[0] + parts[1]).value, want, rtol=1e-4)
    assert float((parts[1] + parts[2]).count) == mask.sum()
    flat = critic.ExplainedVariance.of(jnp.ones((2, 2)), jnp.full((2, 2), 7.0), jnp.ones((2, 2)))
    assert float(flat.value) == 0 and float(parts[0].value) == 0


def numpy_bins(mask, bins):
    """Bin of each token by loops, -1 off the mask."""
    out = np.full(mask.shape, -1)
    for b in range(len(mask)):
        tokens = np.flatnonzero(mask[b])
        for i, t in enumerate(tokens):
            out[b, t] = int(i * bins / len(tokens))
    return out


def test_explained_variance_by_position():
    """Gaps, an empty row and rows shorter than the bins; parts add to the whole."""
    rng = np.random.default_rng(1)
    mask = rng.random((9, 30)) < 0.7
    mask[1], mask[2, 3:], mask[4, 20:] = False, False, False
    returns = np.broadcast_to(rng.normal(size=(9, 1)), mask.shape).astype(np.float32)
    values = (returns * np.linspace(0, 1, 30) + 0.3 * rng.normal(size=mask.shape)).astype('f')
    values[~mask] = np.nan
    place = numpy_bins(mask, 5)
    np.testing.assert_array_equal(masked.position_bins(mask, 5), place)
    parts = [
        critic.ExplainedVariance.by_position(*(x[i : i + 3] for x in (values, returns, mask)), 5)
        for i in (0, 3, 6)
    ]
    whole = parts[0] + parts[1] + parts[2]
    for i in range(5):
        r = returns[place == i].astype(np.float64)
        want = 1 - np.var(r - values[place == i]) / np.var(r)
        np.testing.assert_allclose(whole.value[i], want, rtol=1e-4)
        assert whole.count[i] == (place == i).sum()
    assert metrics_lib.numbers({'x': parts[0]})['x/4'] == parts[0].value[4]


def test_value_pretraining_stops_when_both_have_settled_or_at_the_limit():
    stop = critic.ValueStop(max_steps=20, window=2, looks=3, tolerance=0.01)
    flat, rising = [0.5] * 4, [0.1, 0.2, 0.3, 0.4]
    assert not stop(flat, flat)  # fewer than window + looks steps
    assert stop(flat + [0.5], flat + [0.5])
    assert not stop([*rising, 0.5], [0.5] * 5) and not stop([0.5] * 5, [*rising, 0.5])
    # The loss settles relative to itself: halving from 1e-6 is a change.
    assert not stop([1e-6 / 2**i for i in range(9)], [0.5] * 9)
    # Averaged over two steps, an alternation is flat.
    assert stop([1, 2] * 4, [0.3, 0.5] * 4)
    assert not critic.ValueStop(window=1, looks=3, tolerance=0.01)([1, 2] * 4, [0.3, 0.5] * 4)
    assert stop(list(range(1, 21)), list(range(20)))
    assert not stop.settled(list(range(1, 21)), list(range(20))) and stop.settled(
        [0.5] * 5, flat + [0.5]
    )
    later = critic.ValueStop(max_steps=20, window=2, looks=3, tolerance=0.01, min_steps=7)
    assert not later([0.5] * 6, [0.5] * 6) and later([0.5] * 7, [0.5] * 7)
    for wrong in (
        {'window': 0},
        {'tolerance': 0.0},
        {'max_steps': 0},
        {'looks': 0},
        {'min_steps': 51},
    ):
        with pytest.raises(ValueError, match=f'{next(iter(wrong))}'):
            critic.ValueStop(**wrong)


def numpy_values(params, batch):
    """V of the state before each token, by loops; 0 off the mask."""
    out = np.zeros(batch.mask.shape)
    for b in range(len(out)):
        total = np.zeros(learning.DIM)
        for t in range(out.shape[1]):
            if t and batch.mask[b, t]:
                out[b, t] = np.tanh(total / t) @ params['value']
            if t < batch.length[b]:
                total = total + params['embed'][batch.tokens[b, t]]
    return out


def make(trunk: str, algorithm=None, **kwargs):
    """A learner with a critic, its policy's and its critic's parameters."""
    own = trunk == 'own'
    side = learner.Critic(optax.sgd(0.5), HEADED if own else None)
    bound = learner.make_learner(
        PLAIN if own else HEADED,
        algorithm or po.algorithms.ppo_clip(value_clip=0.1),
        optax.sgd(0.25),
        critic=side,
        diagnose=none,
        **kwargs,
    )
    params = (PLAIN if own else HEADED).init()
    return bound, params, HEADED.init(3) if own else None


@pytest.mark.parametrize('trunk', ['own', 'shared'])
def test_value_pretraining_moves_the_critic_alone_to_monte_carlo_returns(trunk):
    batch = random_batch()
    batch.rewards[3] = np.nan  # teaches nobody
    learn, params, own = make(trunk)
    state = fresh(learn, params, own)
    before = own or params
    np.testing.assert_allclose(
        learn.values(state, batch), numpy_values(before, batch), rtol=1e-5, atol=1e-6
    )
    state, metrics = learn.value_update(state, batch)

    mask = (batch.mask > 0) & np.isfinite(batch.rewards)[:, None]
    returns = np.broadcast_to(batch.rewards[:, None], mask.shape)
    values = numpy_values(before, batch)
    error = (values - returns)[mask]
    np.testing.assert_allclose(metrics['value/loss'].value, 0.5 * np.mean(error**2), rtol=1e-5)
    explained = 1 - np.var(error) / np.var(returns[mask])
    np.testing.assert_allclose(metrics['value/explained_variance'].value, explained, rtol=1e-4)
    at, first = metrics['value/explained_at'], numpy_bins(mask, critic.POSITIONS) == 0
    want = 1 - np.var((values - returns)[first]) / np.var(returns[first])
    np.testing.assert_allclose(at.value[0], want, rtol=1e-4)
    assert at.count.shape == (10,) and at.count.sum() == mask.sum()
    # Slope of the head: mean of (V - R) times the state's value features, by differences.
    after = jax.device_get(state.critic.params if own else state.params)
    slope = np.zeros(learning.DIM)
    for i in range(learning.DIM):
        nudged = before | {'value': before['value'] + 1e-3 * (np.arange(learning.DIM) == i)}
        slope[i] = np.mean(error * (numpy_values(nudged, batch) - values)[mask]) / 1e-3
    np.testing.assert_allclose(after['value'], before['value'] - 0.5 * slope, rtol=1e-4, atol=1e-5)
    close(
        {n: state.params[n] for n in ('embed', 'head')}, {n: params[n] for n in ('embed', 'head')}
    )
    assert int(state.step) == 0
    if own:
        assert np.any(after['embed'] != before['embed'])
        np.testing.assert_array_equal(after['head'], before['head'])
    for _ in range(60):
        state, metrics = learn.value_update(state, batch)
    assert float(metrics['value/explained_variance'].value) > explained + 0.1
    assert float(metrics['value/loss'].value) < 0.5 * np.mean(error**2)


def test_a_critic_of_natural_gradient_runs_is_fitted_to_the_estimators_returns():
    """The head's first step by hand; the policy stays; others have no such fit."""
    batch = random_batch()
    learn, params, _ = make('shared', po.algorithms.trpo(advantages=po.advantages.gae()))
    state, metrics = learn.value_fit(fresh(learn, params, None), batch)
    mask, values = batch.mask > 0, numpy_values(params, batch)
    error = (values - batch.returns)[mask]
    np.testing.assert_allclose(metrics['value/loss'].value, 0.5 * np.mean(error**2), rtol=1e-5)
    slope = np.zeros(learning.DIM)
    for i in range(learning.DIM):
        nudged = params | {'value': params['value'] + 1e-3 * (np.arange(learning.DIM) == i)}
        slope[i] = np.mean(error * (numpy_values(nudged, batch) - values)[mask]) / 1e-3
    after = jax.device_get(state.params)
    np.testing.assert_allclose(after['value'], params['value'] - 0.5 * slope, rtol=1e-4, atol=1e-5)
    close({n: after[n] for n in ('embed', 'head')}, {n: params[n] for n in ('embed', 'head')})
    assert make('shared')[0].value_fit is None


def test_a_critic_with_its_own_trunk_is_trained_beside_the_policy():
    """Clipped value loss by the critic's optimizer, the surrogate by the policy's."""
    batch = random_batch()
    learn, params, own = make('own', microbatches=2)
    state, metrics, _ = learn.update(fresh(learn, params, own), batch)
    alone = learner.make_learner(
        PLAIN,
        po.Algorithm(
            advantages=po.advantages.group_zscore(),
            loss=po.losses.policy_loss(
                ratio=po.losses.token_ratio(),
                surrogate=po.losses.clipped(0.2),
                aggregate=po.losses.token_mean(),
            ),
        ),
        optax.sgd(0.25),
        diagnose=none,
    )
    close(state.params, alone.update(fresh(alone, params), batch)[0].params, rtol=1e-5, atol=1e-6)

    mask = batch.mask > 0

    def loss(own):
        values = critic.batch_values(HEADED, own, batch)
        kept = batch.values_old + jnp.clip(values - batch.values_old, -0.1, 0.1)
        error = jnp.maximum((values - batch.returns) ** 2, (kept - batch.returns) ** 2)
        return jnp.sum(jnp.where(mask, error, 0)) / 2 / mask.sum()

    want = jax.tree.map(lambda p, g: p - 0.5 * g, own, jax.grad(loss)(own))
    close(state.critic.params, want, rtol=1e-5, atol=1e-6)
    assert float(metrics['value/clipped'].value) > 0
    values = numpy_values(own, batch)[mask]
    explained = 1 - np.var(batch.returns[mask] - values) / np.var(batch.returns[mask])
    np.testing.assert_allclose(metrics['value/explained_variance'].value, explained, rtol=1e-4)
    assert float(metrics['value/update_norm'].value) > 0


def test_critics_that_do_not_fit_are_errors():
    def build(model, critic, **kwargs):
        return learner.make_learner(
            model, po.algorithms.ppo_clip(), optax.sgd(1.0), critic=critic, **kwargs
        )

    sgd = optax.sgd(1.0)
    with pytest.raises(ValueError, match='without a value head; set value_head=True'):
        build(PLAIN, learner.Critic(sgd))
    with pytest.raises(ValueError, match='own trunk, and the policy a value head'):
        build(HEADED, learner.Critic(sgd, HEADED))
    with pytest.raises(ValueError, match='critic.model has no value head'):
        build(PLAIN, learner.Critic(sgd, PLAIN))
    other = dataclasses.replace(HEADED, config=Config(value_head=True, vocab_size=5))
    with pytest.raises(ValueError, match='critic.model has vocab_size=5, the policy 12'):
        build(PLAIN, learner.Critic(sgd, other))
    with pytest.raises(ValueError, match='critic parameters are missing'):
        fresh(build(PLAIN, learner.Critic(sgd, HEADED)), PLAIN.init())
    with pytest.raises(ValueError, match='critic parameters are given'):
        fresh(build(HEADED, None), HEADED.init(), HEADED.init())
    assert build(HEADED, None).value_update is None and build(PLAIN, None).values is None
