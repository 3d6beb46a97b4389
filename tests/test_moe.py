"""The mixture-of-experts layer: both backends against a loop over experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def assert_close(got, want, scale=1.0):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bound = 1e-5 * scale * max(1.0, float(jnp.max(jnp.abs(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


def make_case(name, rng, tokens=37):
    """x, parameters and valid of a named situation."""
    params = reference.random_params(rng, CONFIG, WIDTH, INNER)
    x = rng.normal(size=(tokens, WIDTH)).astype(np.float32)
    valid = np.ones(tokens, bool)
    if name == 'two experts take all':
        x[:, 0] = 3
        router = np.array(params['router'])
        router[[1, 4], 0] += 20
        params['router'] = jnp.asarray(router)
    if name == 'padding holds nan':
        valid = rng.random(tokens) < 0.6
        x[~valid] = np.nan
    if name == 'nothing valid':
        valid[:] = False
        x[:] = np.nan
    return jnp.asarray(x), params, jnp.asarray(valid)


CASES = ('plain', 'two experts take all', 'padding holds nan', 'nothing valid')


@pytest.mark.parametrize('case', CASES)
def test_layer_and_its_gradients_match_a_loop_over_experts(case):
    rng = np.random.default_rng(CASES.index(case))
    x, params, valid = make_case(case, rng)
    weights = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
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
        assert not np.any(np.asarray(got)[~np.asarray(valid)])


def test_layer_matches_numpy_in_float64():
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        params = reference.random_params(rng, CONFIG, WIDTH, INNER, np.float64)
        x = jnp.asarray(rng.normal(size=(11, WIDTH)))
        ids = reference.choose_all(x, params, CONFIG, np.ones(11))
        for backend in gm.BACKENDS:
            y = jax.jit(functools.partial(moe_layer, config=CONFIG, backend=backend))(x, params)[0]
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(
                y, reference.numpy_layer(x, params, CONFIG, ids), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize('backend', gm.BACKENDS)
def test_every_part_of_a_deepseek_layer(backend):
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
    x = jnp.asarray(rng.normal(size=(29, WIDTH)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    valid = jnp.arange(29) < 24
    x = jnp.where(valid[:, None], x, jnp.nan)
    ids = reference.choose_all(x, params, config, valid)
    y, gradients = reference_gradients(x, params, weights, config, ids)
    (got, routing, _), got_gradients = layer_and_gradients(
        x, params, weights, valid, None, config, backend
    )
    np.testing.assert_array_equal(routing, ids)
    assert_close(got, y)
    assert_close(got_gradients, gradients)
    assert not np.any(got_gradients[1]['bias'])


@pytest.mark.parametrize('backend', gm.BACKENDS)
def test_group_sizes_around_the_block_size(backend):
    config = MoEConfig(experts=4, top_k=1, renormalise=False)
    sizes = (128, 0, 257, 15)  # blocks of 128 rows: exact, empty, two and one row, part of one
    rng = np.random.default_rng(7)
    ids = rng.permutation(np.repeat(np.arange(4), sizes))[:, None]
    assert gm.block_rows(ids.size, 4) == 128
    params = reference.random_params(rng, config, WIDTH, INNER)
    x = jnp.asarray(rng.normal(size=(len(ids), WIDTH)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    y, gradients = reference_gradients(x, params, weights, config, ids)
    (got, _, aux), got_gradients = layer_and_gradients(
        x, params, weights, None, jnp.asarray(ids), config, backend
    )
    np.testing.assert_array_equal(aux['load'], sizes)
    assert_close(got, y)
    assert_close(got_gradients, gradients)
    assert not np.any(got_gradients[1]['gate'][1])


@pytest.mark.parametrize('backend', gm.BACKENDS)
def test_bfloat16_stays_near_float32(backend):
    rng = np.random.default_rng(9)
    x, params, valid = make_case('padding holds nan', rng)
    weights = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), {**params, 'x': x})
    low['router'] = params['router']
    low_x = low.pop('x')
    rounded = jax.tree.map(lambda a: a.astype(jnp.float32), low)
    ids = reference.choose_all(low_x.astype(jnp.float32), rounded, CONFIG, valid)
    y, gradients = reference_gradients(low_x.astype(jnp.float32), rounded, weights, CONFIG, ids)
    (got, routing, _), got_gradients = layer_and_gradients(
        low_x, low, weights, valid, None, CONFIG, backend
    )
    np.testing.assert_array_equal(routing, ids)
    assert got.dtype == jnp.bfloat16
    assert got_gradients[1]['gate'].dtype == jnp.bfloat16
    assert got_gradients[1]['router'].dtype == jnp.float32
    for a, b in zip(jax.tree.leaves(got_gradients), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=0, atol=0.02 * float(jnp.max(jnp.abs(b)))
        )
    np.testing.assert_allclose(
        np.asarray(got, np.float32), y, rtol=0, atol=0.02 * float(jnp.max(jnp.abs(y)))
    )


def test_blocked_backend_keeps_no_hidden_layer():
    config = MoEConfig(experts=4, top_k=4)
    tokens, inner = 256, 512
    params = reference.random_params(np.random.default_rng(0), config, WIDTH, inner)
    x = jnp.ones((tokens, WIDTH))

    def loss(params, x):
        return jnp.sum(moe_layer(x, params, config, backend='blocked')[0])

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
    hidden = tokens * config.top_k * inner * 4
    assert compiled.memory_analysis().temp_size_in_bytes < hidden


@given(
    ids=st.lists(st.integers(-2, 5), min_size=1, max_size=20),
    slack=st.integers(0, 3),
)
def test_sort_by_expert_lays_out_each_known_entry_once(ids, slack):
    layout = gm.sort_by_expert(jnp.asarray(ids), 4, slack)
    order = [i for e in range(4) for i, x in enumerate(ids) if x == e]
    want = order + [-1] * (len(ids) + slack - len(order))
    np.testing.assert_array_equal(layout.source, want)
    np.testing.assert_array_equal(layout.sizes, [ids.count(e) for e in range(4)])
    rows = [order.index(i) if i in order else -1 for i in range(len(ids))]
    np.testing.assert_array_equal(layout.row, rows)


def test_sort_by_expert_is_the_same_where_keys_do_not_pack():
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 4, 50))
    many = 2**31 // 50
    for a, b in zip(gm.sort_by_expert(ids, 4)[:2], _sorted(ids, many), strict=True):
        np.testing.assert_array_equal(a, b)


def _sorted(ids, experts):
    """Rows and sources through the unpacked path, traced only (its sizes are large)."""
    return jax.jit(lambda i: gm.sort_by_expert(i, experts)[:2])(ids)


@pytest.mark.parametrize(
    ('entries', 'experts', 'rows'), [(1, 64, 8), (64, 8, 8), (136, 8, 32), (8192, 8, 128)]
)
def test_blocks_are_smaller_for_few_tokens(entries, experts, rows):
    assert gm.block_rows(entries, experts) == rows


def test_backends_lower_for_accelerators():
    params = reference.random_params(np.random.default_rng(0), CONFIG, WIDTH, INNER)
    layer = jax.jit(functools.partial(moe_layer, config=CONFIG, backend='ragged'))
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    exported = jax.export.export(layer, platforms=['tpu'])(x, params)
    assert exported.mlir_module().count('chlo.ragged_dot') >= 3


def test_unknown_backend_and_missing_parts_are_named():
    params = reference.random_params(np.random.default_rng(0), CONFIG, WIDTH, INNER)
    x = jnp.ones((4, WIDTH))
    with pytest.raises(ValueError, match="backend='blockd'.*'blocked'"):
        moe_layer(x, params, CONFIG, backend='blockd')
    with pytest.raises(ValueError, match="shared_experts=1, but params\\['shared'\\] is absent"):
        moe_layer(x, params, MoEConfig(experts=6, top_k=2, shared_experts=1))
    with pytest.raises(ValueError, match="selection_bias=False, but params\\['bias'\\] is present"):
        moe_layer(x, {**params, 'bias': jnp.ones(6)}, CONFIG)
    with pytest.raises(AssertionError):
        moe_layer(x, params, MoEConfig(experts=5, top_k=2))
