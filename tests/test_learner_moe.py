"""A mixture of experts in the learner: router losses, expert load, replay, recomputed routing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import learner, models, updates
from policyopt import metrics as metrics_lib
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
    numbers = metrics_lib.numbers(metrics)
    for layer in range(LAYERS):
        peak = load[layer].max() / load[layer].mean()
        np.testing.assert_allclose(numbers[f'moe/load_over_mean/{layer}'], peak, rtol=1e-6)
        assert numbers[f'moe/unused/{layer}'] == np.mean(load[layer] == 0)


def test_load_of_experts_by_hand():
    found = metrics_lib.numbers(updates.load_metrics(jnp.array([[6.0, 2, 0, 0], [1, 1, 1, 1]])))
    assert [found[f'moe/load_over_mean/{i}'] for i in range(2)] == [3, 1]
    assert [found[f'moe/unused/{i}'] for i in range(2)] == [0.5, 0]


def test_norms_of_each_group_of_layers(plain, params):
    """Against what SGD moved: its step is the gradient, at a learning rate of 1."""
    state, metrics, _ = plain
    step = jax.tree.map(lambda new, old: np.asarray(new, float) - old, state.params, params)
    block, mlp = step['moe'], step['moe']['mlp']
    groups = {
        'embedding': [step['embed']],
        'attention': [x for name, x in block['attention'].items() if 'norm' not in name],
        'experts': [mlp['gate'], mlp['up'], mlp['down']],
        'router': [mlp['router']],
        'norms': [step['norm'], block['norm1'], block['norm2']]
        + [x for name, x in block['attention'].items() if 'norm' in name],
        'head': [step['head']] if 'head' in step else [],
    }
    want = {n: sum(np.sum(x**2) for x in xs) ** 0.5 for n, xs in groups.items() if xs}
    assert sum(map(len, groups.values())) == len(jax.tree.leaves(step))
    for kind in ('grad_norm', 'update_norm'):
        found = {n.partition('/')[2]: float(m.value) for n, m in metrics.items() if kind + '/' in n}
        assert found == pytest.approx(want, rel=1e-3)
        total = sum(x**2 for x in found.values()) ** 0.5
        assert total == pytest.approx(float(metrics[kind].value), rel=1e-5)


def test_share_of_tokens_with_a_support():
    support = np.array([[[-1, -1], [3, -1], [3, 4]], [[-1, -1], [-1, -1], [0, 1]]])
    found = updates.supported(support, np.array([[0, 1, 1], [0, 1, 1]]))
    assert float(found.value) == 0.75


@pytest.fixture(scope='module')
def slopes(model, params, batch):
    """Gradients of the trunk's own load balance and z-loss over the whole batch."""
    valid = np.arange(batch.tokens.shape[1]) < batch.length[:, None]

    def value(params, name):
        return model.hidden(params, batch.tokens, valid=valid).aux[name].value

    grads = [jax.jit(jax.grad(value), static_argnums=1)(params, n) for n in NAMES]
    return dict(zip(NAMES, jax.device_get(grads), strict=True))


NAMES = ('load_balance', 'router_z')


@pytest.mark.parametrize(
    ('split', 'coefficients'),
    [
        ({}, {'load_balance': 0.3, 'router_z': 0.02}),
        pytest.param(BUCKETS, {'router_z': 0.02}, marks=pytest.mark.slow),
    ],
)
def test_router_losses_are_added_with_their_coefficients(
    plain, model, params, batch, trunk, slopes, split, coefficients
):
    """Loss and gradient are the plain ones plus the trunk's; the z-loss adds over buckets, too."""
    learn = build(model, split, router=RouterLosses(**coefficients))
    state, metrics, logp = learn.update(fresh(learn, params), batch)
    added = sum(c * trunk.aux[name].value for name, c in coefficients.items())
    before, others, _ = plain
    np.testing.assert_allclose(metrics['loss'].value - others['loss'].value, added, rtol=1e-4)
    slope = jax.tree.map(
        lambda *g: sum(c * x for c, x in zip(coefficients.values(), g, strict=True)),
        *[slopes[name] for name in coefficients],
    )
    want = jax.tree.map(lambda p, g: p - g, before.params, slope)
    close(state.params, want, rtol=1e-4, atol=2e-5)
    assert np.abs(slope['moe']['mlp']['router']).max() > 1e-3
    # Empty rows of a bucket route nowhere.
    assert set(metrics) == set(others)
    for name in ('moe/load_max', 'moe/load_entropy', 'moe/router_z', 'policy/ratio'):
        np.testing.assert_allclose(metrics[name].value, others[name].value, rtol=1e-5)
    np.testing.assert_allclose(logp, plain[2], atol=1e-5)


def test_recomputed_routing_is_that_of_the_old_parameters(model, params, batch, trunk):
    """R2: recorded by the forward pass of logp_old, then replayed by every update."""
    learn = build(model, {'length_buckets': LengthBuckets(36, (9,))}, routing='recompute')
    # The sampler's, which were other experts, are not what the trainer replays.
    others = np.where(trunk.routing < 0, -1, (trunk.routing + 1) % EXPERTS).astype(np.int8)
    seen = learn.recompute(params, dataclasses.replace(batch, routing=others))
    np.testing.assert_array_equal(seen.routing, trunk.routing)
    assert seen.logp_behavior is batch.logp_behavior
    # Other parameters: replayed experts, not those that they would choose.
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)
    _, metrics, logp = learn.update(fresh(learn, moved), seen)
    assert float(metrics['moe/replayed'].value) == 1
    assert float(metrics['moe/replay_agreement'].value) < 1
    # R3: the sampler's routing stays in the batch and is replayed.
    rolled = dataclasses.replace(batch, routing=trunk.routing)
    kept = build(model, {'microbatches': 2}).recompute(moved, rolled)
    assert kept.routing is rolled.routing
    np.testing.assert_allclose(kept.logp_old, logp, atol=2e-5)


def test_options_of_experts_need_experts():
    with pytest.raises(ValueError, match='router=.* for a model without experts'):
        build(Running(), WHOLE, router=RouterLosses(load_balance=0.1))
    with pytest.raises(ValueError, match="routing='recompute' for a model without experts"):
        build(Running(), WHOLE, routing='recompute')
    with pytest.raises(ValueError, match="routing='recomput' is not known.* Did you mean"):
        build(Running(), WHOLE, routing='recomput')
    with pytest.raises(ValueError, match=r'router_z must lie in \[0, inf\], got -1'):
        RouterLosses(router_z=-1.0)
