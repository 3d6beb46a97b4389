"""The decoder against a numpy one; packing, padding, patterns of layers, remat, scalar heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt import models
from policyopt.models import stack
from policyopt.models.layers import rope_table
from tests import decoder_reference

BASE = models.ModelConfig(
    vocab_size=40, embed_dim=16, num_layers=3, num_heads=4, num_kv_heads=2, mlp_dim=24
)
MOE = models.MoEConfig(experts=5, top_k=2, shared_experts=1)
LLAMA3 = models.RopeScaling('llama3', factor=8.0, low=1.0, high=4.0, original_length=32)
CONFIGS = {
    'untied_bias': dataclasses.replace(BASE, tied=False, qkv_bias=True, rope_scaling=LLAMA3),
    'qk_norm_interleaved': dataclasses.replace(
        BASE, num_layers=4, head_dim=6, qk_norm=True, moe=MOE, expert_dim=12, moe_layers=(1, 3)
    ),
}


@functools.cache
def made(name):
    model = models.build(CONFIGS[name])
    params = jax.jit(model.init)(jax.random.key(1))
    # Biases and norms away from their initial zeros and ones.
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(a + 0.1 * rng.normal(size=a.shape), jnp.float32) for a in leaves]
    return model, jax.tree.unflatten(tree, leaves)


def row(length, seed=0):
    return np.random.default_rng(seed).integers(0, 40, length)


@functools.cache
def expected(name, length, seed=0):
    model, params = made(name)
    return decoder_reference.forward(params, row(length, seed), model.config)


def test_forward_against_numpy():
    model, params = made('untied_bias')
    out = jax.jit(model.hidden)(params, jnp.asarray(row(9))[None])
    hidden, _ = expected('untied_bias', 9)
    np.testing.assert_allclose(out.hidden[0], hidden, atol=2e-5)
    assert out.routing is None
    assert out.aux == {}


@pytest.mark.parametrize('name', CONFIGS)
def test_packed_rows_and_padding(name):
    # One row holds sequences of 9, 5 and 4 tokens, another is padded with whatever ids.
    model, params = made(name)
    tokens = np.zeros((2, 20), np.int32)
    tokens[0] = np.concatenate([row(9), row(5, 1), row(4, 2), [7, 7]])
    tokens[1] = np.concatenate([row(5, 1), np.full(15, 3)])
    segments = np.stack([np.repeat([4, 0, 9, 2], [9, 5, 4, 2]), np.repeat([1, 2], [5, 15])])
    valid = np.arange(20) < np.array([[18], [5]])
    out = jax.jit(model.hidden)(
        params, tokens, valid=jnp.asarray(valid), segments=jnp.asarray(segments)
    )
    for where, (length, seed) in {
        (0, 0): (9, 0),
        (0, 9): (5, 1),
        (0, 14): (4, 2),
        (1, 0): (5, 1),
    }.items():
        got = out.hidden[where[0], where[1] : where[1] + length]
        hidden, routing = expected(name, length, seed)
        np.testing.assert_allclose(got, hidden, atol=2e-5)
        if routing is not None:
            used = out.routing[where[0], where[1] : where[1] + length]
            np.testing.assert_array_equal(used, routing)
    if out.routing is not None:
        assert (np.asarray(out.routing)[~valid] == -1).all()
        k = model.config.moe.top_k
        np.testing.assert_array_equal(out.aux['load'].sum(-1), [valid.sum() * k] * 2)
        assert float(out.aux['load_balance'].count) == 2 * valid.sum()


def test_positions_default_to_the_place_in_the_segment():
    model, params = made('untied_bias')
    tokens = jnp.asarray(row(8))[None]
    segments = jnp.asarray([[3, 3, 3, 1, 1, 1, 1, 1]])
    hidden = jax.jit(model.hidden)
    default = hidden(params, tokens, segments=segments).hidden
    stated = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 4]])
    given = hidden(params, tokens, segments=segments, positions=stated).hidden
    np.testing.assert_array_equal(default, given)
    moved = hidden(params, tokens, segments=segments, positions=stated * 3).hidden
    assert np.abs(moved - given).max() > 1e-3


@pytest.mark.parametrize('scaling', [LLAMA3, models.RopeScaling('linear', 4.0), None])
def test_rope_frequencies(scaling):
    config = dataclasses.replace(BASE, head_dim=32, rope_scaling=scaling)
    cos, sin = rope_table(config, jnp.array([[0, 5]]))
    angles = 5 * decoder_reference.frequencies(config)
    np.testing.assert_allclose(cos[0, 1], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[0, 1], np.sin(angles), atol=1e-5)


def test_segments_cover_any_order_of_layers():
    d, m = 'dense', 'moe'
    assert stack.segments((d,) * 48) == (((d,), 48),)
    assert stack.segments((d,) * 3 + (m,) * 58) == (((d,), 3), ((m,), 58))
    assert stack.segments((d, m) * 12) == (((d, m), 12),)
    assert stack.segments((d, m, m, m) * 6) == (((d, m, m, m), 6),)
    rng = np.random.default_rng(0)
    for _ in range(50):
        kinds = tuple(rng.choice([d, m], rng.integers(1, 12)))
        cut = stack.segments(kinds)
        assert sum((list(s.pattern) * s.repeats for s in cut), []) == list(kinds)


@pytest.mark.parametrize('kinds', ['abab', 'aabaab', 'abbb', 'ababc', 'a'])
def test_stacks_run_layers_in_order(kinds):
    # Layer i maps x to 2 x + weight[i]; records are (index, extra).
    weights = {k: jnp.asarray([10.0 * i for i, c in enumerate(kinds) if c == k]) for k in kinds}
    extra = {'b': jnp.asarray([i for i, c in enumerate(kinds) if c == 'b'])}

    def layer(kind, index, carry, weight, more):
        return 2 * carry + weight, {'index': index, 'more': 0 if more is None else more}

    for remat in stack.POLICIES:
        out, records = jax.jit(
            functools.partial(stack.run, layer, kinds=tuple(kinds), remat=remat)
        )(jnp.float32(1), weights, extra=extra)
        wanted = 1.0
        for i in range(len(kinds)):
            wanted = 2 * wanted + 10.0 * i
        assert float(out) == wanted
        for kind, record in records.items():
            at = [i for i, c in enumerate(kinds) if c == kind]
            np.testing.assert_array_equal(record['index'], at)
            np.testing.assert_array_equal(record['more'], at if kind == 'b' else [0] * len(at))


DEPTHS = {
    'dense': lambda n: {},
    'dense first': lambda n: dict(moe_layers=tuple(range(2, n))),
    'alternating': lambda n: dict(moe_layers=tuple(range(1, n, 2))),
}


@pytest.mark.parametrize('name', DEPTHS)
def test_the_program_does_not_grow_with_depth(name):
    def step(layers):
        config = dataclasses.replace(BASE, num_layers=layers, remat='full')
        if name != 'dense':
            config = dataclasses.replace(config, moe=MOE, expert_dim=12, **DEPTHS[name](layers))
        model = models.build(config)

        def loss(params, tokens):
            return jnp.sum(model.apply(params, tokens).logits ** 2)

        return jax.jit(jax.value_and_grad(loss)).lower(
            model.shapes(), jax.ShapeDtypeStruct((2, 8), jnp.int32)
        )

    few, many = step(6), step(12)
    lines = [len(lowered.as_text().splitlines()) for lowered in (few, many)]
    assert lines[0] == lines[1]
    if name == 'dense':  # what the compiler makes of it, too
        counts = [lowered.compile().as_text().count(' = ') for lowered in (few, many)]
        assert counts[0] == counts[1]


@pytest.mark.filterwarnings('ignore:Explicitly requested dtype')
def test_float64_models_need_x64():
    config = dataclasses.replace(BASE, dtype='float64', param_dtype='float64')
    model = models.build(config)
    with jax.enable_x64(True):
        assert model.shapes()['embed'].dtype == jnp.float64
        params = model.shapes()
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    for call in (model.shapes, lambda: jax.eval_shape(model.hidden, params, tokens)):
        with pytest.raises(ValueError, match="dtype='float64' needs jax_enable_x64"):
            call()


@functools.cache
def replayed_gradients(remat):
    config = dataclasses.replace(
        BASE, num_layers=2, moe=models.MoEConfig(5, 2), expert_dim=12, mlp_dim=0, remat=remat
    )
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(1))
    tokens = jnp.asarray(row(12)).reshape(2, 6)
    replay = jax.random.randint(jax.random.key(0), (2, 6, 2, 2), -1, 5).astype(jnp.int8)

    def loss(params):
        out = model.hidden(params, tokens, routing=replay)
        return jnp.sum(out.hidden**2 * jnp.arange(16)), out.routing

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.parametrize('remat', ['full', pytest.param('dots', marks=pytest.mark.slow)])
def test_remat_changes_neither_gradients_nor_replay(remat):
    (a, used), grads = replayed_gradients('none')
    (b, used_again), grads_again = replayed_gradients(remat)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_array_equal(used, used_again)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_again), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1.0, np.abs(x).max()))


def test_remat_saves_memory():
    # 8 layers of activations outweigh what one layer needs: each policy keeps fewer of them.
    def needed(remat):
        config = dataclasses.replace(BASE, num_layers=8, mlp_dim=64, remat=remat)
        model = models.build(config)
        gradient = jax.grad(
            lambda params, tokens: jnp.sum(model.hidden(params, tokens).hidden ** 2)
        )
        tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)
        compiled = jax.jit(gradient).lower(model.shapes(), tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    full, dots, none = needed('full'), needed('dots'), needed('none')
    assert full < 0.7 * dots < 0.7 * 0.7 * none, (full, dots, none)


def test_value_and_reward_heads():
    config = dataclasses.replace(BASE, value_head=True, reward_head=True)
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (2, 5, 16))
    assert (model.value(params, hidden) == 0).all()
    params |= {'value': jnp.arange(16.0), 'reward': jnp.ones(16)}
    values = model.value(params, hidden)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, np.asarray(hidden) @ np.arange(16.0), rtol=1e-4, atol=1e-4)
    rewards = model.reward(params, hidden, jnp.array([5, 2]))
    wanted = [hidden[0, 4].sum(), hidden[1, 1].sum()]
    np.testing.assert_allclose(rewards, wanted, rtol=1e-4)
    np.testing.assert_allclose(model.reward(params, hidden), hidden[:, -1].sum(-1), rtol=1e-4)
    bare = models.build(BASE)
    with pytest.raises(ValueError, match='config.value_head=True'):
        bare.value({}, hidden)


def test_models_are_static_arguments_and_shapes_and_axes_match_init():
    model = models.build(BASE)
    assert model == models.build(BASE, tokenizer=object())
    assert hash(model) == hash(models.build(BASE))
    assert model != models.build(BASE, rules={'batch': 'data'})
    for name in CONFIGS:
        model, params = made(name)
        shapes = model.shapes()
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda s: s.shape, shapes)
        axes = jax.tree.leaves(model.axes(), is_leaf=lambda a: isinstance(a, tuple))
        assert len(axes) == len(jax.tree.leaves(params))
        for names, leaf in zip(axes, jax.tree.leaves(params), strict=True):
            assert len(names) == leaf.ndim
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    assert len({str(path) for path, _ in flat}) == len(flat)


def test_initial_scale_of_activations_and_logits():
    config = dataclasses.replace(BASE, embed_dim=64, mlp_dim=128, num_layers=8, vocab_size=500)
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    kernel = params['dense']['attention']['q']
    np.testing.assert_allclose(np.std(kernel), 64**-0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(params['embed']), 0.02, rtol=0.05)
    assert len({float(a.ravel()[0]) for a in jax.tree.leaves(params) if a.ndim > 2}) == 7
    logits = jax.jit(model.apply)(params, jnp.asarray(row(30))[None]).logits
    assert 0.05 < float(jnp.std(logits)) < 0.5
    assert logits.dtype == jnp.float32


def test_bfloat16_compute_keeps_float32_logits():
    model, params = made('untied_bias')
    half = models.build(dataclasses.replace(model.config, dtype='bfloat16'))
    hidden = jax.jit(half.hidden)(params, jnp.asarray(row(9))[None]).hidden
    assert hidden.dtype == jnp.bfloat16
    logits = half.logits(params, hidden)
    assert logits.dtype == jnp.float32
    exact = expected('untied_bias', 9)[0] @ np.asarray(params['head']).T
    assert 1e-4 < np.abs(logits[0] - exact).max() < 0.3


WRONG = [
    ({'num_kv_heads': 3}, 'num_heads=4 is not a multiple of num_kv_heads=3'),
    ({'head_dim': 5}, 'head_dim=5 must be even'),
    ({'remat': 'fulll'}, r"remat='fulll'.*Did you mean `full`"),
    ({'dtype': 'float8'}, "dtype='float8'"),
    ({'mlp_dim': 0}, 'mlp_dim=0'),
    ({'num_layers': 0}, 'num_layers=0'),
    ({'expert_dim': 8}, 'expert_dim=8 needs `moe`'),
    ({'moe': MOE}, 'expert_dim=0'),
    ({'moe': MOE, 'expert_dim': 8, 'moe_layers': (2, 1)}, r'moe_layers=\(2, 1\)'),
    ({'moe': MOE, 'expert_dim': 8, 'moe_layers': (3,)}, r'moe_layers=\(3,\)'),
    (
        {'moe': models.MoEConfig(4, 2), 'expert_dim': 8, 'shared_gate': True},
        'shared_gate=True needs moe.shared_experts',
    ),
    ({'moe': MOE, 'expert_dim': 8, 'moe_backend': 'block'}, "moe_backend='block'"),
]


@pytest.mark.parametrize(('change', 'message'), WRONG)
def test_wrong_configs_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_routing_for_a_dense_model_is_refused():
    model, params = made('untied_bias')
    with pytest.raises(ValueError, match='no mixture-of-experts layer'):
        model.hidden(params, jnp.zeros((1, 2), int), routing=jnp.zeros((1, 2, 1, 1), int))
