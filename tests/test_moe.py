"""The mixture-of-experts layer: both backends against a loop over experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt.models import grouped_matmul as gm
from policyopt.models.moe import MoEConfig, moe_layer
from tests import moe_reference as reference

WIDTH, INNER = 8, 12
CONFIG = MoEConfig(experts=6, top_k=2)


@functools.partial(jax.jit, static_argnames=('config', 'backend'))
def layer_and_gradients(x, params, weights, valid, routing, config, backend):
    """(y, routing, aux) and gradients of sum(weights * y) in x and all parameters."""

    def loss(x, params):
        out = moe_layer(x, params, config, valid=valid, routing=routing, backend=backend)
        return jnp.sum(weights * out[0]), out

    gradients, out = jax.grad(loss, (0, 1), has_aux=True)(x, params)
    return out, gradients


def reference_gradients(x, params, weights, config, ids):
    """(y, gradients) of the loop over experts."""

    def loss(x, params):
        y = reference.expert_loop(x, params, config, ids)
        return jnp.sum(weights * y), y

    gradients, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, params)
    return y, gradients


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bound = 1e-5 * max(1.0, np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def make_case(name, rng, tokens=37):
    """x, parameters and valid of a named situation."""
    params = reference.random_params(rng, CONFIG, WIDTH, INNER)
    x = rng.normal(size=(tokens, WIDTH)).astype(np.float32)
    valid = np.ones(tokens, bool)
    if name == 'two experts take all':
        x[:, 0] = 3
        params['router'][[1, 4], 0] += 20
    if name == 'padding holds nan':
        valid = rng.random(tokens) < 0.6
        x[~valid] = np.nan
    if name == 'nothing valid':
        valid[:] = False
        x[:] = np.nan
    return x, params, valid


CASES = ('plain', 'two experts take all', 'padding holds nan', 'nothing valid')


@pytest.mark.parametrize('case', CASES)
def test_layer_and_its_gradients_match_a_loop_over_experts(case):
    rng = np.random.default_rng(CASES.index(case))
    x, params, valid = make_case(case, rng)
    weights = rng.normal(size=x.shape).astype(np.float32)
    ids = reference.choose_all(x, params, CONFIG, valid)
    if case == 'two experts take all':
        assert set(np.unique(ids)) == {1, 4}
    y, gradients = reference_gradients(x, params, weights, CONFIG, ids)
    for backend in gm.BACKENDS:
        (got, routing, aux), got_gradients = layer_and_gradients(
            x, params, weights, valid, None, CONFIG, backend
        )
        np.testing.assert_array_equal(routing, ids)
        assert routing.dtype == jnp.int8
        assert_close(got, y)
        assert_close(got_gradients, gradients)
        load = [np.sum(ids == e) for e in range(CONFIG.experts)]
        np.testing.assert_array_equal(aux['load'], load)
        assert not np.any(np.asarray(got)[~valid])


def test_layer_matches_numpy_in_float64():
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        params = reference.random_params(rng, CONFIG, WIDTH, INNER, np.float64)
        x = rng.normal(size=(11, WIDTH))
        ids = reference.choose_all(x, params, CONFIG, np.ones(11))
        for backend in gm.BACKENDS:
            y = jax.jit(functools.partial(moe_layer, config=CONFIG, backend=backend))(x, params)[0]
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(
                y, reference.numpy_layer(x, params, CONFIG, ids), rtol=1e-12, atol=1e-12
            )


def test_every_part_of_a_deepseek_layer():
    config = MoEConfig(
        experts=12,
        top_k=3,
        scoring='sigmoid',
        selection_bias=True,
        groups=4,
        top_groups=2,
        route_scale=2.5,
        shared_experts=2,
    )
    rng = np.random.default_rng(5)
    params = reference.random_params(rng, config, WIDTH, INNER)
    x = rng.normal(size=(29, WIDTH)).astype(np.float32)
    weights = rng.normal(size=x.shape).astype(np.float32)
    valid = np.arange(29) < 24
    x[~valid] = np.nan
    ids = reference.choose_all(x, params, config, valid)
    y, gradients = reference_gradients(x, params, weights, config, ids)
    for backend in gm.BACKENDS:
        (got, routing, _), got_gradients = layer_and_gradients(
            x, params, weights, valid, None, config, backend
        )
        np.testing.assert_array_equal(routing, ids)
        assert_close(got, y)
        assert_close(got_gradients, gradients)
        assert not np.any(got_gradients[1]['bias'])


def test_group_sizes_around_the_block_size():
    config = MoEConfig(experts=4, top_k=1, renormalise=False)
    sizes = (128, 0, 641, 15)  # in rows: a block of 128, none, a wide one and two, part of one
    rng = np.random.default_rng(7)
    ids = rng.permutation(np.repeat(np.arange(4), sizes))[:, None]
    assert gm.block_rows(ids.size, 4) == gm.MAX_BLOCK == 128 and gm.WIDE == 4
    params = reference.random_params(rng, config, WIDTH, INNER)
    x = rng.normal(size=(len(ids), WIDTH)).astype(np.float32)
    weights = rng.normal(size=x.shape).astype(np.float32)
    y, gradients = reference_gradients(x, params, weights, config, ids)
    for backend in gm.BACKENDS:
        (got, _, aux), got_gradients = layer_and_gradients(
            x, params, weights, None, jnp.asarray(ids), config, backend
        )
        np.testing.assert_array_equal(aux['load'], sizes)
        assert_close(got, y)
        assert_close(got_gradients, gradients)
        assert not np.any(got_gradients[1]['gate'][1])


@pytest.mark.slow
def test_wide_blocks_have_the_derivatives_of_ragged_dot():
    config = MoEConfig(experts=2, top_k=1, renormalise=False)
    rng = np.random.default_rng(8)
    params = reference.random_params(rng, config, WIDTH, INNER)
    x = rng.normal(size=(1200, WIDTH)).astype(np.float32)  # a wide block and more for each expert
    ids = jnp.asarray(rng.permutation(np.repeat([0, 1], (530, 670)))[:, None])
    low = {
        name: {
            'a': rng.normal(size=(2, size[0], 3)).astype(np.float32),
            'b': rng.normal(size=(2, 3, size[1])).astype(np.float32),
        }
        for name, size in dict(gate=(WIDTH, INNER), down=(INNER, WIDTH)).items()
    }
    for given in (params, {**params, 'adapters': low}):

        def derivatives(backend, given=given):
            def loss(x, given):
                return jnp.sum(moe_layer(x, given, config, routing=ids, backend=backend)[0] ** 2)

            grad = jax.grad(loss, argnums=(0, 1))
            return jax.jit(lambda x, p: jax.jvp(grad, (x, p), (x, p)))(x, given)

        for a, b in zip(*map(jax.tree.leaves, map(derivatives, gm.BACKENDS)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.max(np.abs(b)) + 1e-6)


def test_a_weight_of_one_expert_never_reaches_another():
    rng = np.random.default_rng(3)
    gate, up = rng.normal(size=(2, 2, WIDTH, INNER)).astype(np.float32)
    down = rng.normal(size=(2, INNER, WIDTH)).astype(np.float32)
    x = rng.normal(size=(6, WIDTH)).astype(np.float32)
    ids = np.array([0, 0, 0, 1, 1, 1])[:, None]
    weights = np.where(ids == 1, np.nan, 1.0).astype(np.float32)

    def loss(gate, up, down):
        y = gm.grouped_swiglu(x, gate, up, down, ids, weights, backend='blocked')
        return jnp.sum(jnp.where(ids == 0, y, 0))

    for grad in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(gate, up, down):
        assert np.isfinite(grad[0]).all() and np.any(grad[0])


def test_bfloat16_stays_near_float32():
    rng = np.random.default_rng(9)
    x, params, valid = make_case('padding holds nan', rng)
    weights = rng.normal(size=x.shape).astype(np.float32)
    low = {name: p.astype(jnp.bfloat16) for name, p in params.items()}
    low['router'], low_x = params['router'], x.astype(jnp.bfloat16)
    high, high_x = jax.tree.map(lambda a: a.astype(np.float32), (low, low_x))
    ids = reference.choose_all(high_x, high, CONFIG, valid)
    want = reference_gradients(high_x, high, weights, CONFIG, ids)
    for backend in gm.BACKENDS:
        (y, routing, _), gradients = layer_and_gradients(
            low_x, low, weights, valid, None, CONFIG, backend
        )
        np.testing.assert_array_equal(routing, ids)
        assert y.dtype == gradients[1]['gate'].dtype == jnp.bfloat16
        assert gradients[1]['router'].dtype == jnp.float32
        for a, b in zip(jax.tree.leaves((y, gradients)), jax.tree.leaves(want), strict=True):
            bound = 0.02 * np.max(np.abs(b))
            np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=0, atol=bound)


def test_blocked_backend_keeps_two_hidden_layers():
    config = MoEConfig(experts=4, top_k=4)
    tokens, inner = 1024, 512
    params = reference.random_params(np.random.default_rng(0), config, WIDTH, inner)
    x = np.ones((tokens, WIDTH), np.float32)

    def loss(params, x):
        return jnp.sum(moe_layer(x, params, config, backend='blocked')[0])

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
    hidden = tokens * config.top_k * inner * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * hidden


@pytest.mark.parametrize('limit', [gm.PACKED_LIMIT, 0])
def test_sort_by_expert_lays_out_each_known_entry_once(monkeypatch, limit):
    monkeypatch.setattr(gm, 'PACKED_LIMIT', limit)
    sort = jax.jit(lambda ids: gm.sort_by_expert(ids, 4, slack=3))
    rng = np.random.default_rng(0)
    for low, high in [(-2, 6)] * 6 + [(0, 4), (2, 3), (-1, 0), (4, 5)]:
        ids = list(rng.integers(low, high, 20))
        layout = sort(np.asarray(ids))
        order = [i for e in range(4) for i, x in enumerate(ids) if x == e]
        np.testing.assert_array_equal(layout.source, order + [-1] * (23 - len(order)))
        np.testing.assert_array_equal(layout.sizes, [ids.count(e) for e in range(4)])
        rows = [order.index(i) if i in order else -1 for i in range(20)]
        np.testing.assert_array_equal(layout.row, rows)


@pytest.mark.parametrize(
    ('entries', 'experts', 'rows'), [(1, 64, 8), (64, 8, 8), (136, 8, 32), (8192, 8, 128)]
)
def test_blocks_are_smaller_for_few_tokens(entries, experts, rows):
    assert gm.block_rows(entries, experts) == rows


@pytest.mark.parametrize('platform', ['tpu', 'cuda'])
@pytest.mark.parametrize(('backend', 'marker'), [('ragged', 'ragged_dot'), ('blocked', 'while')])
def test_backends_lower_for_accelerators_with_their_gradients(backend, marker, platform):
    params = reference.random_params(np.random.default_rng(0), CONFIG, WIDTH, INNER)
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)

    def loss(x, params):
        return jnp.sum(moe_layer(x, params, CONFIG, backend=backend)[0] ** 2)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    exported = jax.export.export(step, platforms=[platform])(x, params)
    assert exported.mlir_module().count(marker) >= (9 if backend == 'ragged' else 2)


def test_unknown_backend_and_missing_parts_are_named():
    params = reference.random_params(np.random.default_rng(0), CONFIG, WIDTH, INNER)
    x = np.ones((4, WIDTH), np.float32)
    with pytest.raises(ValueError, match="backend='blockd'.*`blocked`"):
        moe_layer(x, params, CONFIG, backend='blockd')
    with pytest.raises(ValueError, match="shared_experts=1, but params\\['shared'\\] is absent"):
        moe_layer(x, params, MoEConfig(experts=6, top_k=2, shared_experts=1))
    with pytest.raises(ValueError, match="selection_bias=False, but params\\['bias'\\] is present"):
        moe_layer(x, {**params, 'bias': np.ones(6)}, CONFIG)
    with pytest.raises(AssertionError):
        moe_layer(x, params, MoEConfig(experts=5, top_k=2))
