"""Golden checkpoints of each family: logits, routing, greedy text, loss, gradients, round trips."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from policyopt import models
from policyopt.models import moe
from policyopt.models import tensors as tensors_lib
from tests.checkpoints import GOLDEN, copy

FAMILIES = ('llama_tied', 'qwen2', 'qwen3', 'qwen3_moe', 'mixtral')
MOE = ('qwen3_moe', 'mixtral')
# Where a compile is long, families whose features the others cover too wait for the slow suite.
COSTLY = [
    pytest.param(family, marks=pytest.mark.slow) if family in ('qwen2', 'mixtral') else family
    for family in FAMILIES
]


@functools.cache
def golden(family):
    model, params = models.load(GOLDEN / family)
    expected = dict(np.load(GOLDEN / family / 'expected.npz'))
    tokens = jnp.asarray(expected['tokens'], jnp.int32)
    valid = expected['attention_mask'].astype(bool)
    return model, params, expected, tokens, valid


@functools.cache
def compiled(family):
    """One compile each: apply on [2,24] and extend by up to 8 tokens, so that tests share them."""
    model = golden(family)[0]
    return jax.jit(model.apply), jax.jit(model.extend)


@functools.cache
def forward(family):
    _, params, _, tokens, valid = golden(family)
    return compiled(family)[0](params, tokens, valid=jnp.asarray(valid))


@pytest.mark.parametrize('family', FAMILIES)
def test_logits(family):
    _, _, expected, _, valid = golden(family)
    difference = np.abs(np.asarray(forward(family).logits) - expected['logits'])[valid]
    assert not valid.all()  # a right-padded row is among them
    assert difference.max() < 5e-6, difference.max()


@pytest.mark.parametrize('family', MOE)
def test_router_logits_and_choices(family, monkeypatch):
    model, params, expected, tokens, valid = golden(family)
    wanted = expected['router_logits'].reshape(-1, *tokens.shape, model.config.moe.experts)
    seen, original = [], moe.route

    def watched(x, router, *rest):
        jax.debug.callback(lambda x, w: seen.append(x @ w.T), x, router, ordered=True)
        return original(x, router, *rest)

    monkeypatch.setattr(moe, 'route', watched)
    routing = np.asarray(model.hidden(params, tokens, valid=jnp.asarray(valid)).routing)
    jax.effects_barrier()
    logits = np.reshape(seen, wanted.shape)
    np.testing.assert_allclose(logits[:, valid], wanted[:, valid], atol=5e-6)
    assert routing.dtype == np.int8
    assert (routing[~valid] == -1).all()
    for i in range(wanted.shape[0]):
        best = np.argsort(-wanted[i][valid], axis=-1)[:, : model.config.moe.top_k]
        assert (np.sort(routing[valid][:, i]) == np.sort(best)).all()


@pytest.mark.parametrize('family', COSTLY)
def test_cross_entropy_and_gradient_norm(family):
    model, params, expected, tokens, _ = golden(family)

    def loss(params):
        logp = jax.nn.log_softmax(model.apply(params, tokens[:1]).logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:1, 1:, None], axis=-1))

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(value, expected['cross_entropy'], rtol=1e-5)
    np.testing.assert_allclose(norm, expected['grad_norm'], rtol=1e-4)


@pytest.mark.parametrize('family', COSTLY)
def test_greedy_with_and_without_cache(family):
    model, params, expected, _, _ = golden(family)
    apply, extend = compiled(family)
    head = np.asarray(model.head(params))
    wanted = expected['greedy'][0]
    cached = plain = list(wanted[:8])
    cache, fed = model.init_cache(2, 32), cached
    for _ in range(8, len(wanted)):
        chunk = np.zeros((2, 8), np.int32)
        chunk[0, : len(fed)] = fed
        out, cache = extend(params, cache, chunk, jnp.array([len(fed), 0]))
        fed = [int(np.argmax(head @ out.hidden[0, len(fed) - 1]))]
        cached = cached + fed
        row = np.zeros((2, 24), np.int32)
        row[:, : len(plain)] = plain
        logits = apply(params, row, valid=np.arange(24) < np.array([[len(plain)], [3]])).logits
        plain = [*plain, int(np.argmax(logits[0, len(plain) - 1]))]
    assert cached == plain == list(wanted)
    assert int(cache.length[1]) == 0


def log_probs(logits, tokens):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    logp = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(logp, np.asarray(tokens)[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize('family', FAMILIES)
def test_cached_log_probs_agree_with_uncached(family):
    # Rows at different lengths: prefill of 7 and 3 tokens, single tokens, chunks of uneven counts.
    model, params, expected, tokens, _ = golden(family)
    apply, extend = compiled(family)
    width = tokens.shape[1]
    tokens = tokens.at[1].set(jnp.roll(tokens[0], 5))  # both rows full
    full = apply(params, tokens, valid=jnp.ones(tokens.shape, bool)).logits
    cache = model.init_cache(2, 32)
    hidden = np.zeros((2, width, model.config.embed_dim), np.float32)
    done = np.zeros(2, int)
    for counts in ([7, 3], [1, 1], [1, 0], [5, 7], [1, 1], [7, 7], [2, 5]):
        chunk = np.zeros((2, 8), np.int32)
        for row, count in enumerate(counts):
            chunk[row, :count] = tokens[row, done[row] : done[row] + count]
        out, cache = extend(params, cache, chunk, jnp.asarray(counts))
        for row, count in enumerate(counts):
            hidden[row, done[row] : done[row] + count] = out.hidden[row, :count]
        done += counts
    assert (done == width).all()
    assert (np.asarray(cache.length) == width).all()
    cached = log_probs(hidden[:, :-1] @ np.asarray(model.head(params)).T, tokens[:, 1:])
    difference = np.abs(cached - log_probs(full[:, :-1], tokens[:, 1:]))
    scale = max(1.0, np.abs(expected['logits']).max())
    print(f'{family}: median {np.median(difference):.1e}, max {difference.max():.1e}')
    assert np.median(difference) <= 2e-6 * scale, np.median(difference)
    assert difference.max() <= 2e-5 * scale, difference.max()


@pytest.mark.parametrize('family', FAMILIES)
def test_round_trip_is_bit_for_bit(family, tmp_path):
    model, params, *_ = golden(family)
    models.save(model, params, tmp_path)
    original = safetensors.numpy.load_file(GOLDEN / family / 'model.safetensors')
    written = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
    assert set(written) == set(original)
    for name, tensor in original.items():
        assert tensor.dtype == written[name].dtype
        assert (tensor == written[name]).all()
    again, same = models.load(tmp_path)
    assert again == model
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, same))
    theirs = json.loads((GOLDEN / family / 'config.json').read_text())
    ours = json.loads((tmp_path / 'config.json').read_text())
    assert all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys() - {'head_dim'})


def test_sharded_index_is_written_and_read(tmp_path):
    model, params, *_ = golden('qwen3_moe')
    models.save(model, params, tmp_path)
    models.save(model, params, tmp_path, shard_bytes=100_000)
    index = json.loads((tmp_path / tensors_lib.INDEX).read_text())
    files = sorted(set(index['weight_map'].values()))
    assert len(files) > 4
    assert files[0] == f'model-00001-of-{len(files):05d}.safetensors'
    held = {}
    for file in files:
        shard = safetensors.numpy.load_file(tmp_path / file)
        assert all(index['weight_map'][name] == file for name in shard)
        held |= shard
    assert index['metadata']['total_size'] == sum(tensor.nbytes for tensor in held.values())
    _, same = models.load(tmp_path)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, same))
    # Fewer shards, and one file again: no weights of before may stay beside the new ones.
    (tmp_path / 'model-00001-of-00099.safetensors.partial').write_bytes(b'')
    (tmp_path / 'adapter_model.safetensors').write_bytes(b'of someone else')
    models.save(model, params, tmp_path, shard_bytes=200_000)
    kept = json.loads((tmp_path / tensors_lib.INDEX).read_text())['weight_map'].values()
    assert len(set(kept)) < len(files)
    other = {'config.json', 'generation_config.json', 'adapter_model.safetensors'}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, tensors_lib.INDEX, *other}
    models.save(model, params, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'model.safetensors', *other}


def test_params_that_are_not_the_models_are_named_before_anything_is_written(tmp_path):
    model, params, *_ = golden('qwen3')
    for change, message in (
        ({'norm': params['norm'][:-1]}, r"'norm' has shape \(47,\); the model says \(48,\)"),
        ({'norm': params['norm'].astype('bfloat16')}, "'norm' has dtype bfloat16; .* float32"),
        ({'value': params['norm']}, "differ in 'value'"),
    ):
        with pytest.raises(ValueError, match=message):
            models.save(model, params | change, tmp_path / 'new')
    assert not (tmp_path / 'new').exists()


def test_interrupted_saving_leaves_nothing_to_load(tmp_path, monkeypatch):
    model, params, *_ = golden('qwen3')
    models.save(model, params, tmp_path)
    monkeypatch.setattr('policyopt.models.loading.to_file', None)
    with pytest.raises(TypeError):
        models.save(model, params, tmp_path)
    with pytest.raises(FileNotFoundError, match=r'no config\.json'):
        models.load(tmp_path)


def test_mixed_dtypes_keep_every_bit(tmp_path):
    name = 'model.layers.1.self_attn.q_proj.weight'

    def halve(held):
        for other in held:
            if other != name:
                held[other] = held[other].astype(jnp.bfloat16)

    folder = copy('llama_tied', tmp_path / 'model', change_tensors=halve)
    model, params = models.load(folder)
    assert model.config.param_dtype == model.config.dtype == 'float32'
    original = golden('llama_tied')[1]['dense']['attention']['q'][1]
    np.testing.assert_array_equal(params['dense']['attention']['q'][1], original)
    rounded = golden('llama_tied')[1]['embed'].astype('bfloat16')
    np.testing.assert_array_equal(params['embed'], rounded.astype('float32'))
    assert models.load(folder, param_dtype='bfloat16')[1]['embed'].dtype == jnp.bfloat16

    def mix(held):
        held[name] = held[name].astype(np.float16)

    _, params = models.load(copy('llama_tied', tmp_path / 'f16', change_tensors=mix))
    assert params['embed'].dtype == jnp.float32
    with pytest.raises(ValueError, match="param_dtype='float64' needs jax_enable_x64"):
        models.load(folder, param_dtype='float64')


def test_tensors_read_in_pieces_are_the_same(monkeypatch):
    whole, calls, original = golden('qwen3')[1], [], tensors_lib._reader

    def counted(*args):
        rows = original(*args)
        return lambda start, stop: calls.append(stop - start) or rows(start, stop)

    monkeypatch.setattr(tensors_lib, '_reader', counted)
    monkeypatch.setattr(tensors_lib, 'CHUNK', 7 * 48 * 4)  # 7 rows, and no multiple of them fits
    _, pieces = models.load(GOLDEN / 'qwen3')
    assert calls.count(7) > 20
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole, pieces))


def test_bfloat16_checkpoint_keeps_its_bits(tmp_path):
    model, params = models.load(GOLDEN / 'qwen3', param_dtype='bfloat16')
    models.save(model, params, tmp_path)
    again, same = models.load(tmp_path)
    assert again.config.param_dtype == again.config.dtype == 'bfloat16'
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        assert b.dtype == jnp.bfloat16
        assert (a.view(jnp.uint16) == b.view(jnp.uint16)).all()


def test_overrides_of_how_to_compute_reach_the_model():
    wanted = dict(remat='full', precision='high', attention='xla', max_length=7, eos_ids=(3, 4))
    model, params = models.load(GOLDEN / 'llama_tied', **wanted)
    assert {name: getattr(model.config, name) for name in wanted} == wanted
    original = golden('llama_tied')[1]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, original))


def test_repeated_tied_head_and_old_constants_are_accepted(tmp_path):
    def change(held):
        held['lm_head.weight'] = held['model.embed_tokens.weight'].copy()
        held['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(6, np.float32)

    folder = copy('llama_tied', tmp_path / 'model', change_tensors=change)
    model, params = models.load(folder)
    assert model.config.tied
    assert 'head' not in params


def test_a_head_that_the_checkpoint_lacks_starts_at_zero_and_is_saved(tmp_path):
    model, params = models.load(GOLDEN / 'qwen3', value_head=True, reward_head=True)
    assert (params['value'] == 0).all()
    params |= {'value': jnp.arange(48.0), 'reward': jnp.arange(48.0) + 1}
    models.save(model, params, tmp_path)
    again, same = models.load(tmp_path)
    assert again == model
    np.testing.assert_array_equal(same['value'], np.arange(48.0))
    np.testing.assert_array_equal(same['reward'], np.arange(48.0) + 1)
    with pytest.raises(ValueError, match='value_head=False: the checkpoint has one'):
        models.load(tmp_path, value_head=False)


def test_models_that_no_family_expresses_round_trip(tmp_path):
    router = models.MoEConfig(4, 2, scoring='sigmoid', selection_bias=True, shared_experts=2)
    config = models.ModelConfig(
        vocab_size=31,
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=24,
        moe=router,
        expert_dim=8,
        moe_layers=(1,),
        shared_gate=True,
        tied=False,
        rope_scaling=models.RopeScaling('llama3', 4.0, 1.0, 4.0, 64),
        eos_ids=(1, 2),
    )
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    models.save(model, params, tmp_path)
    again, same = models.load(tmp_path)
    assert dataclasses.replace(again.config, family='') == config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, same))
