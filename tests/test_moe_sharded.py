"""Expert parallelism on eight devices against the layer on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt.models.expert_parallel import moe_layer_sharded
from policyopt.models.moe import MoEConfig, moe_layer
from policyopt.sharding import make_mesh, make_rules
from tests import moe_reference as reference

CONFIG = MoEConfig(experts=8, top_k=2, shared_experts=1)
TOKENS, WIDTH, INNER = 32, 8, 12


@pytest.fixture(scope='module')
def case():
    rng = np.random.default_rng(0)
    params = reference.random_params(rng, CONFIG, WIDTH, INNER)
    valid = rng.random(TOKENS) < 0.7
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    x[~valid] = np.nan
    weights = rng.normal(size=x.shape).astype(np.float32)
    recorded = np.where(rng.random((TOKENS, 1)) < 0.5, rng.integers(0, 8, (TOKENS, 2)), -1)
    return x, params, valid, recorded.astype(np.int8), weights


def run(layer, case):
    """Outputs and gradients of a loss that reads the output and both balance losses."""
    x, params, valid, recorded, weights = case

    def loss(x, params):
        y, used, aux = layer(x, params, CONFIG, valid=valid, routing=recorded)
        total = jnp.sum(y * weights) + aux['load_balance'].value + aux['router_z'].value
        return total, (y, used, aux)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, params)


@pytest.fixture(scope='module')
def unsharded(case):
    return run(functools.partial(moe_layer, backend='blocked'), case)


LAYOUTS = {
    'tokens replicated over experts': (
        [('data', 2), ('expert', 4)],
        {'batch': 'data', 'experts': 'expert'},
    ),
    'tokens split over experts too': (
        [('data', 2), ('expert', 4)],
        {'batch': ('data', 'expert'), 'experts': 'expert'},
    ),
    'width split as well': (
        [('data', 2), ('expert', 2), ('tensor', 2)],
        {'batch': 'data', 'experts': 'expert', 'mlp': 'tensor'},
    ),
}


@pytest.mark.parametrize(
    ('layout', 'backend'),
    [*[(name, 'blocked') for name in LAYOUTS], ('tokens split over experts too', 'ragged')],
)
def test_sharded_layer_is_the_layer(case, unsharded, layout, backend):
    axes, rules = LAYOUTS[layout]
    layer = functools.partial(
        moe_layer_sharded, backend=backend, mesh=make_mesh(axes), rules=make_rules(rules)
    )
    for a, b in zip(jax.tree.leaves(run(layer, case)), jax.tree.leaves(unsharded), strict=True):
        bound = 1e-5 * max(1.0, float(np.max(np.abs(np.asarray(b, np.float32)))))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def test_ambient_mesh_inside_scan_and_remat(case):
    x, params, valid, _, weights = case
    x = np.nan_to_num(x)
    stack = jax.tree.map(lambda a: np.stack([a, a]), params)

    def loss(stack, x, layer):
        @jax.checkpoint
        def body(x, params):
            y, used, aux = layer(x, params, CONFIG, valid=valid)
            return x + y, (used, aux['load'])

        y, record = jax.lax.scan(body, x, stack)
        return jnp.sum(y * weights), record

    grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    want = grad(stack, x, moe_layer)
    with jax.set_mesh(make_mesh([('data', 2), ('expert', 4)])):
        got = grad(stack, x, moe_layer_sharded)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bound = 1e-5 * max(1.0, float(np.max(np.abs(np.asarray(b, np.float32)))))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def test_without_a_mesh_it_is_the_plain_layer(case):
    x, params, valid, recorded, _ = case
    layers = [
        jax.make_jaxpr(lambda x, p, f=f: f(x, p, CONFIG, valid=valid, routing=recorded)[0])
        for f in (moe_layer, moe_layer_sharded)
    ]
    assert 'shard_map' not in str(layers[1](x, params))
    assert str(layers[0](x, params)) == str(layers[1](x, params))


def test_indivisible_experts_are_named_and_odd_tokens_are_not_split(case):
    _, params, _, _, _ = case
    mesh = make_mesh([('data', 2), ('expert', 4)])
    x = np.ones((5, WIDTH), np.float32)
    few = MoEConfig(experts=6, top_k=2)
    small = reference.random_params(np.random.default_rng(0), few, WIDTH, INNER)
    with pytest.raises(ValueError, match=r"experts=6 does not divide over .*'expert'.*4 devices"):
        moe_layer_sharded(x, small, few, mesh=mesh)
    got, want = (
        jax.jit(functools.partial(layer, config=CONFIG))(x, params)[0]
        for layer in (functools.partial(moe_layer_sharded, mesh=mesh), moe_layer)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_sum_of_outputs_is_all_that_replicated_tokens_send(case):
    x, params, _, _, _ = case
    mesh = make_mesh([('expert', 8)])
    spec = jax.sharding.NamedSharding
    split = spec(mesh, jax.P('expert'))
    whole = spec(mesh, jax.P())
    shardings = jax.tree.map(lambda a: split if a.ndim == 3 else whole, params)
    layer = jax.jit(
        lambda x, p: moe_layer_sharded(x, p, CONFIG, mesh=mesh)[0],
        in_shardings=(whole, shardings),
        out_shardings=whole,
    )
    text = layer.lower(x, params).compile().as_text()
    assert text.count(' all-reduce(') + text.count(' all-reduce-start(') == 1
    for other in ('all-gather(', 'all-to-all(', 'collective-permute('):
        assert other not in text
