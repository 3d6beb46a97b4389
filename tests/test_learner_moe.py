"""A mixture of experts in the learner: router losses, expert load, replay, recomputed routing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import learner, models, scoring
from policyopt.learner import LengthBuckets, RouterLosses
from tests.learning import Running, close, fresh, none, random_batch

EXPERTS, LAYERS = 4, 2


@pytest.fixture(scope='module')
def model():
    return models.build(
        models.ModelConfig(
            vocab_size=12,
            embed_dim=8,
            num_layers=LAYERS,
            num_heads=2,
            num_kv_heads=1,
            moe=models.MoEConfig(experts=EXPERTS, top_k=2),
            expert_dim=4,
        )
    )


@pytest.fixture(scope='module')
def params(model):
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    # A larger router, so that loads are uneven and every loss is felt.
    params['moe']['mlp']['router'] = params['moe']['mlp']['router'] * 8
    return params


@pytest.fixture(scope='module')
def batch():
    return random_batch()


@pytest.fixture(scope='module')
def trunk(model, params, batch):
    """What the model itself says of the whole batch."""
    valid = np.arange(batch.tokens.shape[1]) < batch.length[:, None]
    return jax.device_get(jax.jit(lambda p: model.hidden(p, batch.tokens, valid=valid))(params))


def build(model, split, **kwargs):
    return learner.make_learner(
        model, po.algorithms.reinforce(), optax.sgd(1.0), diagnose=none, **split, **kwargs
    )


WHOLE, BUCKETS = {}, {'length_buckets': LengthBuckets(18, (6, 9))}


@pytest.fixture(scope='module')
def plain(model, params, batch):
    learn = build(model, WHOLE)
    return learn.update(fresh(learn, params), batch)


def test_expert_load_is_always_reported(plain, trunk, batch):
    """Numbers from the routing itself, counted by loops."""
    load = np.zeros((LAYERS, EXPERTS))
    for b, length in enumerate(batch.length):
        for t in range(length):
            for layer in range(LAYERS):
                for expert in trunk.routing[b, t, layer]:
                    load[layer, expert] += 1
    share = load / load.sum(axis=1, keepdims=True)
    entropy = -np.sum(share * np.log(np.maximum(share, 1e-30)), axis=1).mean()
    _, metrics, _ = plain
    np.testing.assert_allclose(metrics['moe/load_max'].value, share.max(), rtol=1e-6)
    np.testing.assert_allclose(metrics['moe/load_entropy'].value, entropy, rtol=1e-5)
    assert share.max() > 0.3 and float(metrics['moe/replayed'].value) == 0
    np.testing.assert_allclose(
        metrics['moe/router_z'].value, trunk.aux['router_z'].value, rtol=1e-5
    )


def test_router_losses_are_added_with_their_coefficients(plain, model, params, batch, trunk):
    """Loss and gradient are the plain ones plus those of the coefficients times the trunk's."""
    learn = build(model, WHOLE, router=RouterLosses(load_balance=0.3, router_z=0.02))
    state, metrics, _ = learn.update(fresh(learn, params), batch)
    added = 0.3 * trunk.aux['load_balance'].value + 0.02 * trunk.aux['router_z'].value
    np.testing.assert_allclose(
        metrics['loss'].value - plain[1]['loss'].value, added, rtol=1e-4, atol=1e-5
    )
    valid = np.arange(batch.tokens.shape[1]) < batch.length[:, None]

    def losses(params):
        aux = model.hidden(params, batch.tokens, valid=valid).aux
        return 0.3 * aux['load_balance'].value + 0.02 * aux['router_z'].value

    slope = jax.jit(jax.grad(losses))(params)
    close(
        state.params,
        jax.tree.map(lambda p, g: p - g, plain[0].params, slope),
        rtol=1e-4,
        atol=2e-5,
    )
    assert float(jnp.abs(slope['moe']['mlp']['router']).max()) > 1e-3


def test_buckets_keep_loss_gradient_and_load(plain, model, params, batch):
    """The z-loss adds over parts; empty rows of a bucket route nowhere."""
    whole = build(model, WHOLE, router=RouterLosses(router_z=0.02))
    parts = build(model, BUCKETS, router=RouterLosses(router_z=0.02))
    (one, metrics, _), (two, split, _) = (x.update(fresh(x, params), batch) for x in (whole, parts))
    close(one.params, two.params, rtol=1e-5, atol=5e-6)
    assert set(metrics) == set(split)
    for name in metrics:
        if name != 'moe/load_balance':
            np.testing.assert_allclose(metrics[name].value, split[name].value, rtol=1e-4, atol=1e-6)


def test_recomputed_routing_is_that_of_the_old_parameters(model, params, batch, trunk):
    """R2: recorded by the forward pass of logp_old, then replayed by every update."""
    learn = build(model, {'microbatches': 2}, routing='recompute')
    seen = learn.recompute(params, batch)
    np.testing.assert_array_equal(seen.routing, trunk.routing)
    for split in (BUCKETS,):
        other = build(model, split, routing='recompute').recompute(params, batch)
        np.testing.assert_array_equal(other.routing, seen.routing)
        np.testing.assert_allclose(other.logp_old, seen.logp_old, atol=2e-5)
    assert other.logp_behavior is batch.logp_behavior
    # Other parameters: replayed experts, not those that they would choose.
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)
    _, metrics, logp = learn.update(fresh(learn, moved), seen)
    assert float(metrics['moe/replayed'].value) == 1
    assert float(metrics['moe/replay_agreement'].value) < 1
    want, hidden = jax.jit(lambda p, b: scoring.score_and_hidden(model, p, b))(moved, seen)
    np.testing.assert_array_equal(hidden.routing, trunk.routing)
    np.testing.assert_allclose(logp, want.logp_new, atol=2e-5)
    # R3: the sampler's routing stays in the batch and is replayed.
    rolled = dataclasses.replace(batch, routing=trunk.routing)
    kept = build(model, WHOLE).recompute(moved, rolled)
    assert kept.routing is rolled.routing
    np.testing.assert_allclose(kept.logp_old, want.logp_new, atol=2e-5)


def test_options_of_experts_need_experts():
    with pytest.raises(ValueError, match='router=.* for a model without experts'):
        build(Running(), WHOLE, router=RouterLosses(load_balance=0.1))
    with pytest.raises(ValueError, match="routing='recompute' for a model without experts"):
        build(Running(), WHOLE, routing='recompute')
    with pytest.raises(ValueError, match="routing='recomput' is not known.* Did you mean"):
        build(Running(), WHOLE, routing='recomput')
    with pytest.raises(ValueError, match=r'router_z must lie in \[0, inf\], got -1'):
        RouterLosses(router_z=-1.0)
