"""Attention backends against loops over rows, heads and queries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from policyopt import sharding
from policyopt.models import attention as attention_lib
from policyopt.models.attention import attention, cached_attention

ROWS, HEADS, GROUPS, WIDTH = 2, 4, 2, 8


def loops(q, k, v, valid=None, segments=None, offset=None):
    """Softmax attention, one query at a time, in float64."""
    rows, length, heads, width = q.shape
    size, groups = k.shape[1:3]
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(rows, length, heads):
        at = t + (0 if offset is None else offset[b])
        seen = [
            s
            for s in range(min(at + 1, size))
            if (valid is None or valid[b, s])
            and (segments is None or segments[b, s] == segments[b, t])
        ]
        if seen:
            g = h // (heads // groups)
            weights = np.exp(k[b, seen, g] @ q[b, t, h] / np.sqrt(width))
            out[b, t, h] = weights / weights.sum() @ v[b, seen, g]
    return out


def inputs(length, size=None, seed=0, width=WIDTH):
    rng = np.random.default_rng(seed)
    size = length if size is None else size
    q = rng.normal(size=(ROWS, length, HEADS, width))
    k, v = rng.normal(size=(2, ROWS, size, GROUPS, width))
    return q, k, v


def single(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


LENGTH = 130
VALID = np.arange(LENGTH) < np.array([[LENGTH], [77]])
SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 4, (ROWS, LENGTH)), axis=1)
CASES = {
    'causal': {},
    'padded': {'valid': VALID},
    'packed': {'segments': SEGMENTS},
    'both': {'valid': VALID, 'segments': SEGMENTS},
}


@functools.cache
def expected(case):
    return loops(*inputs(LENGTH), **CASES[case])


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('backend', ['blocked', 'xla', 'splash'])
def test_backends_agree_with_loops(backend, case):
    given = {name: jnp.asarray(a) for name, a in CASES[case].items()}
    out = attention(*single(*inputs(LENGTH)), backend=backend, **given)
    rows = CASES[case].get('valid', np.ones((ROWS, LENGTH), bool))
    np.testing.assert_allclose(np.asarray(out)[rows], expected(case)[rows], atol=2e-6)
    assert np.isfinite(out).all()


@functools.cache
def gradients(backend, case):
    target = single(expected(case))[0] + 1

    def loss(q, k, v):
        out = attention(q, k, v, backend=backend, **CASES[case])
        return jnp.sum(jnp.where(VALID[:, :, None, None], out * target, 0))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*single(*inputs(LENGTH)))


@pytest.mark.parametrize('case', ['padded', 'both'])
@pytest.mark.parametrize('backend', ['blocked', 'splash'])
def test_gradients_agree(backend, case):
    for a, b in zip(gradients(backend, case), gradients('xla', case), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize('backend', ['cudnn', 'xla'])
def test_padding_reaches_the_library_as_lengths(backend, monkeypatch):
    q, k, v = single(*inputs(LENGTH))
    asked, library = {}, jax.nn.dot_product_attention

    def watched(*args, implementation, **kwargs):
        asked.update(kwargs, implementation=implementation)
        return library(*args, implementation='xla', **kwargs)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', watched)
    out = attention(q, k, v, valid=jnp.asarray(VALID), backend=backend)
    assert asked['implementation'] == backend and asked['is_causal'] and asked['mask'] is None
    for name in ('query_seq_lengths', 'key_value_seq_lengths'):
        np.testing.assert_array_equal(asked[name], [LENGTH, 77])
        assert asked[name].dtype == jnp.int32
    np.testing.assert_allclose(np.asarray(out)[VALID], expected('padded')[VALID], atol=2e-6)
    # Packed rows have no lengths, and an empty row is finite.
    attention(q, k, v, valid=jnp.asarray(VALID), segments=SEGMENTS, backend=backend)
    assert asked['query_seq_lengths'] is None and asked['mask'].shape == (ROWS, 1, LENGTH, LENGTH)
    empty = attention(q, k, v, valid=jnp.zeros((ROWS, LENGTH), bool), backend=backend)
    assert np.isfinite(empty).all()


def precisions(jaxpr):
    """Precision of every matmul, kernels and inner functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            yield equation.params['precision']
        for inner in jax_core.jaxprs_in_params(equation.params):
            yield from precisions(inner)


@pytest.mark.parametrize('backend', ['blocked', 'splash', 'xla'])
@pytest.mark.parametrize('name', ['HIGHEST', 'DEFAULT'])
def test_precision_holds_in_the_backward_pass(backend, name):
    q, k, v = single(*inputs(16))
    wanted = jax.lax.Precision[name]

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, backend=backend, precision=wanted) ** 2)

    found = list(precisions(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v).jaxpr))
    assert len(found) >= 6  # two products, and two more for the gradient of each
    assert all(p in (wanted, (wanted, wanted)) for p in found), found


def test_long_sequences_are_looped_over(monkeypatch):
    # Small thresholds put every path of a long sequence into a short one.
    monkeypatch.setattr(attention_lib, 'ROWS', 8)
    monkeypatch.setattr(attention_lib, 'BLOCKS', 2)
    monkeypatch.setattr(attention_lib, 'LOOPED', 24)
    q, k, v = single(*inputs(LENGTH))

    def blocked(q, k, v):
        return attention(q, k, v, valid=VALID, segments=SEGMENTS, backend='blocked')

    def loss(q, k, v):
        return jnp.sum(jnp.where(VALID[:, :, None, None], blocked(q, k, v), 0) ** 2)

    out = jax.jit(blocked)(q, k, v)
    np.testing.assert_allclose(np.asarray(out)[VALID], expected('both')[VALID], atol=2e-6)
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    monkeypatch.undo()
    for a, b in zip(grads, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_layers_keep_no_scores_for_the_backward_pass():
    rows, length, heads, width, layers = 2, 256, 4, 8, 6
    weights = jnp.ones((layers, width))
    x = jax.ShapeDtypeStruct((rows, length, heads, width), jnp.float32)

    def loss(x):
        def layer(x, w):
            return x + attention(x * w, x, x, backend='blocked'), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(x).compile()
    kept = layers * rows * heads * length * length * 3 // 4 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < kept


def test_no_score_matrix_of_a_long_sequence():
    length = 4096
    shape = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, backend='blocked'))

    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
    whole = 2 * length * length * 4
    assert memory.memory_analysis().temp_size_in_bytes < whole / 4


@pytest.mark.parametrize('backend', ['auto', 'xla'])
def test_offsets_place_queries_behind_a_cache(backend):
    q, k, v = inputs(3, size=20)
    offset = np.array([0, 11])
    by_head = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = cached_attention(*single(q, *by_head), jnp.asarray(offset), backend=backend)
    np.testing.assert_allclose(out, loops(q, k, v, offset=offset), atol=2e-6)


def test_splash_runs_on_each_devices_rows_and_heads():
    mesh = sharding.make_mesh([('data', 2), ('tensor', 2)], jax.devices()[:4])
    q, k, v = single(*inputs(LENGTH))

    def splash(q, k, v):
        return attention(q, k, v, valid=VALID, segments=SEGMENTS, backend='splash')

    with jax.set_mesh(mesh):
        out = jax.jit(splash)(q, k, v)
    assert not out.sharding.is_fully_replicated
    np.testing.assert_allclose(np.asarray(out)[VALID], expected('both')[VALID], atol=2e-6)


@pytest.mark.parametrize(
    ('backend', 'platform', 'marker'),
    [
        ('blocked', 'tpu', 'dot_general'),
        ('blocked', 'cuda', 'dot_general'),
        ('xla', 'cuda', 'dot_general'),
        ('splash', 'tpu', 'tpu_custom_call'),
    ],
)
def test_backends_lower_for_accelerators_with_their_gradients(
    backend, platform, marker, monkeypatch
):
    if platform == 'tpu':
        monkeypatch.setattr(jax, 'default_backend', lambda: platform)
    shape = jax.ShapeDtypeStruct((ROWS, 256, HEADS, 128), jnp.bfloat16)
    valid = jax.ShapeDtypeStruct((ROWS, 256), bool)

    def loss(q, k, v, valid):
        return jnp.sum(attention(q, k, v, valid=valid, backend=backend).astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    exported = jax.export.export(step, platforms=[platform])(shape, shape, shape, valid)
    assert exported.mlir_module().count(marker) >= 2


def test_defaults_follow_platform_and_dtype(monkeypatch):
    wanted = {
        ('cpu', 'float32'): 'blocked',
        ('tpu', 'bfloat16'): 'splash',
        ('gpu', 'float32'): 'blocked',
        ('gpu', 'bfloat16'): 'cudnn',
    }
    for (platform, dtype), name in wanted.items():
        monkeypatch.setattr(jax, 'default_backend', lambda platform=platform: platform)
        assert attention_lib.default_backend(dtype) == name


@pytest.mark.parametrize('backend', ['blocked', 'splash', 'xla'])
def test_half_precision_softmax_is_float32(backend):
    # Scores of some 30: bfloat16 keeps them to .06, and weights from such are off by 6 %.
    q, k, v = inputs(64, seed=3, width=16)
    half = [a.astype(jnp.bfloat16) for a in single(10 * q, k, v)]
    exact = [np.asarray(a, np.float64) for a in half]
    wanted = loops(*exact)
    out = attention(*half, backend=backend)
    assert out.dtype == jnp.bfloat16
    bound = 2**-7 * np.abs(v).max()  # two roundings to bfloat16, of the weights and of the result
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=bound)
    scores = np.einsum('bthd,bsgd->btshg', exact[0], exact[1]) / 4
    assert np.abs(scores).max() > 30
    # The bound tells: the same softmax in bfloat16 is outside.
    low = jnp.einsum('bthd,bshd->bhts', half[0], jnp.repeat(half[1], HEADS // GROUPS, axis=2))
    low = low / 4
    low = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), low, -jnp.inf)
    low = jnp.einsum(
        'bhts,bshd->bthd', jax.nn.softmax(low), jnp.repeat(half[2], HEADS // GROUPS, axis=2)
    )
    assert np.abs(np.asarray(low, np.float64) - wanted).max() > 2 * bound


def test_wrong_arguments_are_named():
    q, k, v = single(*inputs(4))
    with pytest.raises(ValueError, match=r"attention='blokced' .*Did you mean `blocked`"):
        attention(q, k, v, backend='blokced')
    with pytest.raises(ValueError, match=r"attention='xlaa' .*Did you mean `xla`"):
        cached_attention(q, k, v, jnp.zeros(2, int), backend='xlaa')
