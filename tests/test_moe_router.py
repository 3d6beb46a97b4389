"""Selection, gate weights, replay of recorded routing, balance statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt.models import router as router_lib
from policyopt.models.moe import MoEConfig, moe_layer
from policyopt.models.router import RouterStats, balance
from tests import moe_reference as reference

route = jax.jit(router_lib.route, static_argnames='config')

CONFIGS = {
    'mixtral': MoEConfig(experts=8, top_k=2),
    'qwen3': MoEConfig(experts=8, top_k=3, renormalise=False),
    'sigmoid': MoEConfig(experts=8, top_k=3, scoring='sigmoid', selection_bias=True),
    'deepseek_v3': MoEConfig(
        experts=12,
        top_k=4,
        scoring='sigmoid',
        selection_bias=True,
        groups=4,
        top_groups=2,
        route_scale=2.5,
    ),
    'deepseek_v2': MoEConfig(
        experts=12, top_k=3, renormalise=False, groups=4, top_groups=2, route_scale=16.0
    ),
}


def logits_case(logits):
    """x and router whose logits are exactly these [N,E]."""
    logits = np.asarray(logits, np.float32)
    return logits, np.eye(logits.shape[1], dtype=np.float32)


@pytest.mark.parametrize('name', CONFIGS)
def test_selection_and_weights_match_numpy(name):
    config = CONFIGS[name]
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(50, config.experts)) * 2
    bias = rng.normal(size=config.experts) if config.selection_bias else None
    x, router = logits_case(logits)
    given = None if bias is None else bias.astype(np.float32)
    routes = route(x, router, given, config)
    experts, gates = np.asarray(routes.experts), np.asarray(routes.weights)
    for n in range(50):
        chosen = reference.choose(logits[n], config, bias)
        np.testing.assert_array_equal(experts[n], chosen)
        if config.scoring == 'softmax':
            scores = np.exp(logits[n]) / np.exp(logits[n]).sum()
        else:
            scores = 1 / (1 + np.exp(-logits[n]))
        weights = scores[chosen]
        if config.renormalise:
            weights = weights / weights.sum()
        np.testing.assert_allclose(gates[n], config.route_scale * weights, rtol=2e-6)


def test_group_limit_uses_two_best_scores_for_sigmoid_and_the_best_for_softmax():
    logits = [[3.0, -9.0, 2.0, 2.0]]  # best expert in group 0, best pair in group 1
    x, router = logits_case(logits)
    pair = MoEConfig(experts=4, top_k=1, scoring='sigmoid', groups=2, top_groups=1)
    best = MoEConfig(experts=4, top_k=1, groups=2, top_groups=1)
    assert route(x, router, None, pair).experts[0, 0] == 2
    assert route(x, router, None, best).experts[0, 0] == 0


def test_replayed_gate_comes_from_the_softmax_before_selection():
    x, router = logits_case([[2.0, 1.0, 0.0]])
    config = MoEConfig(experts=3, top_k=1, renormalise=False)

    def gate(router):
        return route(x, router, None, config, routing=jnp.array([[1]])).weights[0, 0]

    value, gradient = jax.jit(jax.value_and_grad(gate))(router)
    p = np.exp([2.0, 1.0, 0.0]) / np.exp([2.0, 1.0, 0.0]).sum()
    assert abs(float(value) - 0.2447) < 5e-5
    want = p[1] * (np.eye(3)[1] - p)[:, None] * np.array([2.0, 1.0, 0.0])
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-7)
    assert np.all(np.abs(np.asarray(gradient)[:, 0]) > 0.01)


def test_replay_fills_what_is_not_recorded():
    x, router = logits_case([[5.0, 4.0, 3.0, 2.0, 1.0]] * 6)
    config = MoEConfig(experts=5, top_k=3)
    recorded = [[-1, -1, -1], [4, -1, 3], [1, -1, -1], [-1, 0, 99], [3, 3, -1], [2, 1, 0]]
    want = [[0, 1, 2], [4, 0, 3], [1, 0, 2], [1, 0, 2], [3, 3, 0], [2, 1, 0]]
    routes = route(x, router, None, config, routing=np.asarray(recorded, np.int8))
    np.testing.assert_array_equal(routes.experts, want)
    # Of the nine entries recorded, the live router (0, 1, 2) names 1, 0 and 2, 1, 0.
    assert (int(routes.stats.replayed), int(routes.stats.agreeing)) == (9, 5)
    logits = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
    for ids, weights in zip(want, np.asarray(routes.weights), strict=True):
        p = np.exp(logits[ids])
        np.testing.assert_allclose(weights, p / p.sum(), rtol=1e-5)


def test_gates_of_improbable_replayed_experts_are_finite():
    x, router = logits_case([[0.0, -400.0, -401.0]])
    for scoring in ('softmax', 'sigmoid'):
        config = MoEConfig(experts=3, top_k=2, scoring=scoring)

        def gates(router, config=config):
            return route(x, router, None, config, routing=jnp.array([[1, 2]])).weights

        weights, gradient = gates(router), jax.jit(jax.jacobian(gates))(router)
        np.testing.assert_allclose(weights[0], [0.7310586, 0.2689414], rtol=1e-5)
        assert np.all(np.isfinite(gradient)) and np.any(gradient)


def test_router_gradient_under_replay_is_that_of_finite_differences():
    config = MoEConfig(experts=4, top_k=2)
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        params = reference.random_params(rng, config, 5, 3, np.float64)
        x, weights = rng.normal(size=(2, 6, 5))
        recorded = np.array([[0, 3], [2, 1], [3, 0], [1, 0], [-1, 2], [-1, -1]])

        @jax.jit
        def loss(router):
            y, used, aux = moe_layer(x, {**params, 'router': router}, config, routing=recorded)
            return jnp.sum(y * weights) + aux['router_z'].value, used

        gradient, used = jax.jit(jax.grad(loss, has_aux=True))(params['router'])
        gradient, used = np.asarray(gradient), np.asarray(used)
        np.testing.assert_array_equal(used[:4], recorded[:4])
        for e in range(4):
            for d in range(5):
                step = np.zeros_like(params['router'])
                step[e, d] = 1e-6
                up, down = loss(params['router'] + step)[0], loss(params['router'] - step)[0]
                difference = (float(up) - float(down)) / 2e-6
                np.testing.assert_allclose(gradient[e, d], difference, rtol=1e-6, atol=1e-8)
    assert np.all(np.abs(gradient) > 1e-6)


def replay_case():
    """Config, parameters, x and valid [64] of which 50 are."""
    config = MoEConfig(experts=6, top_k=2)
    rng = np.random.default_rng(4)
    params = reference.random_params(rng, config, 16, 24)
    return config, params, rng.normal(size=(64, 16)).astype(np.float32), np.arange(64) < 50


@pytest.mark.parametrize('backend', ['blocked', 'ragged'])
def test_replay_of_its_own_record_is_bit_identical_and_a_moved_router_keeps_it(backend):
    config, params, x, valid = replay_case()

    @jax.jit
    def layer(params, routing):
        return moe_layer(x, params, config, valid=valid, routing=routing, backend=backend)

    y, record, _ = layer(params, None)
    again, same, aux = layer(params, record)
    np.testing.assert_array_equal(y, again)
    np.testing.assert_array_equal(record, same)
    assert float(aux['replay_agreement'].value) == 1 and float(aux['replay_agreement'].count) == 100

    step = np.random.default_rng(5).normal(size=(6, 16))
    moved = {**params, 'router': params['router'] + (0.2 * step).astype(np.float32)}
    y, kept, aux = layer(moved, record)
    native = layer(moved, None)[1]
    np.testing.assert_array_equal(kept, record)
    pairs = zip(np.asarray(record)[:50].tolist(), np.asarray(native)[:50].tolist(), strict=True)
    shared = [len(set(old) & set(new)) for old, new in pairs]
    assert 0.3 < float(aux['replay_agreement'].value) < 1
    assert float(aux['replay_agreement'].total) == sum(shared)
    want = jax.jit(lambda x, p: reference.expert_loop(x, p, config, np.asarray(record)))(x, moved)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_gradient_under_replay_is_the_same_with_remat():
    config, params, x, valid = replay_case()
    record = np.random.default_rng(6).integers(-1, 6, (64, 2))

    def layer(params):
        return moe_layer(x, params, config, valid=valid, routing=record, backend='blocked')[0]

    plain, remat = (
        jax.jit(jax.grad(lambda p, f=f: jnp.sum(f(p) ** 2)))(params)
        for f in (layer, jax.checkpoint(layer))
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_padding_lands_nowhere_and_counts_nowhere():
    config = MoEConfig(experts=4, top_k=2)
    rng = np.random.default_rng(6)
    x = rng.normal(size=(30, 4)).astype(np.float32)
    padded = np.concatenate([x, np.full((10, 4), np.nan, np.float32)])
    router = rng.normal(size=(4, 4)).astype(np.float32)
    valid = np.arange(40) < 30
    alone = route(x, router, None, config)
    for recorded in (None, np.full((40, 2), -1), np.tile(np.int8([0, 1]), (40, 1))):
        routes = route(padded, router, None, config, valid=valid, routing=recorded)
        assert np.all(np.asarray(routes.experts)[30:] == -1)
        assert not np.any(np.asarray(routes.weights)[30:])
        assert int(routes.stats.load.sum()) == 60
        np.testing.assert_array_equal(routes.stats.live_load, alone.stats.live_load)
        np.testing.assert_allclose(routes.stats.probability, alone.stats.probability, rtol=1e-6)
        np.testing.assert_allclose(routes.stats.z, alone.stats.z, rtol=1e-6)
        assert int(routes.stats.tokens) == 30


def test_router_is_float32_whatever_the_dtype_of_its_input():
    # Logits of some 100 that differ by .02: in bfloat16, whose steps are .5 there, they are equal.
    config = MoEConfig(experts=8, top_k=2, renormalise=False)
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.normal(size=(64, 16)), jnp.bfloat16)
    router = rng.normal(size=(8, 16)) * 1e-3
    router[:, 0], x = 100, x.at[:, 0].set(1)
    router = router.astype(np.float32)
    routes = route(x, router, None, config)
    logits = np.asarray(x, np.float64) @ router.T.astype(np.float64)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    order = np.argsort(-logits, axis=1)[:, :2]
    clear = np.diff(np.sort(logits, axis=1)[:, -3:], axis=1).min(1) > 1e-4  # above float32's steps
    assert clear.sum() > 40
    np.testing.assert_array_equal(np.asarray(routes.experts)[clear], order[clear])
    wanted = np.take_along_axis(p, order, axis=1)
    assert routes.weights.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(routes.weights)[clear], wanted[clear], rtol=1e-4)
    low = jnp.argsort(-(x @ router.T.astype(jnp.bfloat16)), axis=1)[:, :2]
    assert (np.asarray(low) != order)[clear].mean() > 0.5


def test_balance_is_switch_loss_and_statistics_add():
    config = MoEConfig(experts=5, top_k=2)
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(20, 5))
    x, router = logits_case(logits)
    stats = route(x, router, None, config).stats
    aux = balance(stats, config)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1)[:, :2]
    share = np.array([np.mean(chosen == e) for e in range(5)])
    np.testing.assert_allclose(aux['load_balance'].value, 5 * share @ p.mean(0), rtol=1e-6)
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    np.testing.assert_allclose(aux['router_z'].value, z, rtol=1e-6)
    np.testing.assert_array_equal(aux['load'], [np.sum(chosen == e) for e in range(5)])
    halves = [route(part, router, None, config).stats for part in (x[:7], x[7:])]
    joined = RouterStats(*[a + b for a, b in zip(*halves, strict=True)])
    for a, b in zip(joined, stats, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_balance_follows_the_live_router_and_load_the_replay():
    config = MoEConfig(experts=3, top_k=1)
    x, router = logits_case([[2.0, 1.0, 0.0]] * 4)

    def value(router):
        stats = route(x, router, None, config, routing=np.full((4, 1), 2)).stats
        return balance(stats, config)['load_balance'].value, stats

    (got, stats), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(router)
    np.testing.assert_array_equal(stats.load, [0, 0, 4])
    np.testing.assert_array_equal(stats.live_load, [4, 0, 0])
    np.testing.assert_allclose(got, 3 * 0.66524096, rtol=1e-6)
    assert np.any(gradient)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'top_k': 9}, 'top_k=9 must be from 1 to experts=8'),
        ({'scoring': 'sigmod'}, "scoring='sigmod'.*Did you mean `sigmoid`"),
        ({'groups': 3}, 'groups=3 must divide experts=8'),
        ({'groups': 4, 'top_groups': 5}, 'top_groups=5 must be from 1 to 4'),
        ({'groups': 4, 'top_groups': 1, 'top_k': 3}, 'top_k=3 exceeds the 2 experts'),
        ({'precision': 'hi'}, "precision='hi' is not known"),
        ({'shared_experts': -1}, 'shared_experts=-1'),
        ({'experts': 40000}, 'experts=40000'),
    ],
)
def test_config_names_what_is_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{'experts': 8, 'top_k': 2, **fields})


def test_config_is_hashable_and_many_experts_record_in_int16():
    assert len({MoEConfig(8, 2), MoEConfig(8, 2), MoEConfig(8, 4)}) == 2
    assert router_lib.routing_dtype(128) == jnp.int8
    assert router_lib.routing_dtype(129) == jnp.int16
