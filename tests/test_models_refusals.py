"""Checkpoints that cannot be loaded: the error names the field or the tensor, before any work."""

import json
import shutil

import pytest

from policyopt import models
from policyopt.models import hf
from tests.checkpoints import GOLDEN, copy

WRONG_CONFIGS = [
    ('llama_tied', {'model_type': 'lama'}, r"model_type='lama' .*Did you mean `llama`"),
    ('llama_tied', {'hidden_act': 'gelu'}, "hidden_act='gelu' .*silu"),
    ('llama_tied', {'attention_bias': True}, 'attention_bias=True'),
    ('llama_tied', {'mlp_bias': True}, 'mlp_bias=True'),
    ('llama_tied', {'rope_parameters': {'rope_type': 'yarn'}}, "rope_type='yarn'"),
    (
        'llama_tied',
        {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
        'rope_parameters=.* and rope_scaling=.*linear.* disagree',
    ),
    ('llama_tied', {'rope_theta': 1e6}, r'bases disagree: .*rope_parameters\.rope_theta'),
    (
        'llama_tied',
        {'rope_parameters': {'full_attention': {'rope_theta': 1e4}}},
        r"rope_parameters\['full_attention'\]=.*by type of layer",
    ),
    (
        'llama_tied',
        {'rope_parameters': {'rope_type': 'linear', 'facter': 2.0}},
        "rope_parameters.*'facter' is not known. Did you mean `factor`",
    ),
    ('llama_tied', {'rope_parameters': {'rope_type': 'linear'}}, 'factor=None must be a number'),
    (
        'llama_tied',
        {'rope_parameters': {'rope_type': 'llama3', 'factor': 8.0, 'high_freq_factor': 4.0}},
        'low_freq_factor=None must be a number',
    ),
    ('llama_tied', {'rope_parameters': {'rope_theta': '1e4'}}, "rope_theta='1e4' must be"),
    ('llama_tied', {'hidden_size': None}, 'hidden_size=None'),
    ('qwen2', {'use_sliding_window': True}, 'use_sliding_window=True'),
    ('qwen3', {'layer_types': ['sliding_attention'] * 3}, 'layer_types .*sliding_attention'),
    ('mixtral', {'sliding_window': 16}, 'sliding_window=16'),
    ('qwen3_moe', {'mlp_only_layers': [0, 1, 2]}, 'mlp_only_layers'),
]


@pytest.mark.parametrize(('family', 'change', 'message'), WRONG_CONFIGS)
def test_configs_that_cannot_be_read_name_the_field(family, change, message, tmp_path):
    folder = copy(family, tmp_path / 'model', lambda config: config.update(change))
    with pytest.raises(ValueError, match=message):
        models.load(folder)


def test_rotary_settings_in_either_spelling_are_the_same(tmp_path):
    data = json.loads((GOLDEN / 'llama_tied' / 'config.json').read_text())
    llama3 = {
        'factor': 8,
        'low_freq_factor': 1,
        'high_freq_factor': 4,
        'original_max_position_embeddings': 64,
    }
    new = {'rope_parameters': {'rope_theta': 50000, 'rope_type': 'llama3', **llama3}}
    old = {'rope_theta': 50000, 'rope_scaling': {'type': 'llama3', **llama3}}
    del data['rope_parameters']
    read = [hf.read_config(data | spelling) for spelling in (new, old, new | old)]
    assert read[0] == read[1] == read[2]
    assert read[0].rope_scaling == models.RopeScaling('llama3', 8.0, 1.0, 4.0, 64)
    assert isinstance(read[0].rope_theta, float)
    assert hf.read_config(data).rope_theta == 10000.0


def test_wrong_tensors_are_named_before_memory_is_allocated(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError('a tensor was read')

    monkeypatch.setattr('policyopt.models.loading._place', never)
    name = 'model.layers.1.mlp.up_proj.weight'
    cases = [
        (lambda held: held.pop(name), f'lacks {name}'),
        (lambda held: held.update(extra=held[name]), 'no use for extra'),
        (
            lambda held: held.update({name: held[name][:-1].copy()}),
            r'up_proj.weight.* shape \(95, 48\).* says \(96, 48\)',
        ),
        (
            lambda held: held.update({'lm_head.weight': held['model.embed_tokens.weight'] + 1}),
            'tie_word_embeddings is true, but lm_head.weight differs',
        ),
    ]
    for number, (change, message) in enumerate(cases):
        folder = copy('llama_tied', tmp_path / str(number), change_tensors=change)
        with pytest.raises(ValueError, match=message):
            models.load(folder)
    with pytest.raises(ValueError, match="no override 'remt'. Did you mean `remat`"):
        models.load(GOLDEN / 'llama_tied', remt='full')
    with pytest.raises(FileNotFoundError, match=r'config\.json'):
        models.load(tmp_path)


def spoiled(change, message):
    def at(folder):
        path = folder / 'model.safetensors'
        path.write_bytes(change(path.read_bytes()))

    return at, message


def renamed(data, old, new):
    assert old in data and len(old) == len(new)
    return data.replace(old, new, 1)


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        spoiled(lambda data: b'', 'model.safetensors has 0 bytes'),
        spoiled(lambda data: data[:5], 'model.safetensors has 5 bytes'),
        spoiled(lambda data: data[:100], 'model.safetensors has 100 bytes, fewer than its header'),
        spoiled(
            lambda data: data[:-1], r"tensor '.*' in .*model.safetensors ends at byte \d+, but"
        ),
        spoiled(lambda data: b'version https://git-lfs.github.com/spec/v1\n', 'Git LFS pointer'),
        spoiled(lambda data: renamed(data, b'{"', b'["'), 'model.safetensors: the header is not'),
        spoiled(lambda data: renamed(data, b'"dtype"', b'"dtipe"'), r"tensor '.*KeyError\('dtype"),
        spoiled(lambda data: renamed(data, b'"F32"', b'"I32"'), "tensor '.*has dtype I32"),
        spoiled(lambda data: renamed(data, b'160,48', b'161,48'), r'bytes at \d+ for .*161, 48'),
    ],
)
def test_broken_files_are_named_before_memory_is_allocated(spoil, message, tmp_path, monkeypatch):
    monkeypatch.setattr('policyopt.models.loading._place', None)
    shutil.copytree(GOLDEN / 'llama_tied', tmp_path / 'model')
    spoil(tmp_path / 'model')
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / 'model')


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ({'num_layers': 2}, "no override 'num_layers': the checkpoint fixes it.* Known: attention"),
        ({'vocab_size': 50}, "no override 'vocab_size': the checkpoint fixes it"),
        ({'qk_norm': True}, "no override 'qk_norm': the checkpoint fixes it"),
        ({'tied': False}, "no override 'tied'"),
        ({'rope_theta': 1e6}, "no override 'rope_theta'"),
        ({'dtypes': 'bfloat16'}, "no override 'dtypes'. Did you mean `dtype`"),
        ({'remat': 'fool'}, "remat='fool'.*Did you mean `full`"),
    ],
)
def test_overrides_that_would_change_tensors_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        models.load(GOLDEN / 'llama_tied', **override)
