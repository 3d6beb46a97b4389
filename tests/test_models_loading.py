"""What checkpoints say beside their tensors: ids that end a text, scalar reward heads."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models

from policyopt import models
from policyopt.sampling import SamplingConfig
from policyopt.sampling.config import eos_ids
from tests.checkpoints import GOLDEN, copy


def folder(path, family='qwen3', config=None, generation=None, tokenizer=None, tensors=None):
    """A golden checkpoint with changes; `tokenizer` is its tokenizer_config.json."""
    copy(family, path, lambda data: data.update(config or {}), tensors)
    if generation is not None:
        (path / 'generation_config.json').write_text(json.dumps(generation))
    if tokenizer is not None:
        vocab = {'a': 0, 'b': 1, '<end>': 2, '<turn>': 3}
        Tokenizer(tokenizer_models.WordLevel(vocab, unk_token='a')).save(
            str(path / 'tokenizer.json')
        )
        (path / 'tokenizer_config.json').write_text(json.dumps(tokenizer))
    return path


ENDS = [
    # config.json, generation_config.json, tokenizer_config.json -> eos_ids, the tokenizer's
    ({'eos_token_id': 2}, None, None, (2,), None),
    ({'eos_token_id': [4, 2]}, None, None, (4, 2), None),
    ({'eos_token_id': 2}, {'eos_token_id': [5, 2]}, None, (5, 2), None),
    ({'eos_token_id': 2}, {'temperature': 0.6}, None, (2,), None),
    ({'eos_token_id': 2}, {'eos_token_id': [5, 2]}, {'eos_token': '<turn>'}, (5, 2, 3), 3),
    ({'eos_token_id': None}, None, {'eos_token': {'content': '<end>'}}, (2,), 2),
    ({'eos_token_id': [5, 2]}, None, {}, (5, 2), 5),
    ({'eos_token_id': None}, {}, {}, (), None),
]


@pytest.mark.parametrize(('config', 'generation', 'tokenizer', 'ids', 'own'), ENDS)
def test_every_id_that_ends_a_text_is_known(config, generation, tokenizer, ids, own, tmp_path):
    path = folder(tmp_path / 'a', 'qwen3', config, generation, tokenizer)
    model, params = models.load(path)
    assert model.config.eos_ids == ids
    assert (model.tokenizer is None) == (tokenizer is None)
    assert getattr(model.tokenizer, 'eos_id', None) == own
    # The sampler stops at all of them; the one to write is first.
    stops = eos_ids(model, SamplingConfig(max_new_tokens=1))
    assert set(stops) == set(ids) and (own is None or stops[0] == own)
    models.save(model, params, tmp_path / 'b')
    again, _ = models.load(tmp_path / 'b')
    assert again.config.eos_ids == ids
    assert getattr(again.tokenizer, 'eos_id', None) == own
    assert models.load(path, eos_ids=(1,))[0].config.eos_ids == (1,)


def test_saving_replaces_the_generation_settings_of_an_earlier_model(tmp_path):
    path = folder(tmp_path / 'a', generation={'eos_token_id': [5, 6], 'temperature': 0.6})
    model, params = models.load(GOLDEN / 'qwen3', eos_ids=(7,))
    models.save(model, params, path)
    assert models.load(path)[0].config.eos_ids == (7,)
    assert 'temperature' not in json.loads((path / 'generation_config.json').read_text())


REWARD = np.random.default_rng(0).normal(size=(1, 48)).astype(np.float32)


def to_classifier(held):
    held.pop('lm_head.weight', None)
    held['score.weight'] = REWARD


@pytest.mark.parametrize(
    ('family', 'name'),
    [
        ('llama_tied', 'LlamaForSequenceClassification'),
        ('qwen2', 'Qwen2ForSequenceClassification'),
        ('qwen3_moe', 'Qwen3MoeForSequenceClassification'),
    ],
)
def test_sequence_classifiers_are_reward_models(family, name, tmp_path):
    config = {
        'architectures': [name],
        'id2label': {'0': 'LABEL_0'},
        'label2id': {'LABEL_0': 0},
        'tie_word_embeddings': False,
    }
    path = folder(tmp_path / 'a', family, config, tensors=to_classifier)
    model, params = models.load(path)
    assert model.config.reward_head and model.config.tied and 'head' not in params
    tokens, length = jnp.asarray([[5, 6, 7, 8], [9, 3, 0, 0]]), jnp.array([4, 2])
    hidden = model.hidden(params, tokens, valid=jnp.arange(4) < length[:, None]).hidden
    wanted = [hidden[0, 3] @ REWARD[0], hidden[1, 1] @ REWARD[0]]
    np.testing.assert_allclose(model.reward(params, hidden, length), wanted, rtol=1e-5)
    # The trunk is the language model's own.
    language, trunk = models.load(GOLDEN / family)
    np.testing.assert_array_equal(hidden[0], language.hidden(trunk, tokens).hidden[0])
    models.save(model, params, tmp_path / 'b')
    data = json.loads((tmp_path / 'b' / 'config.json').read_text())
    assert data['architectures'] == [name] and data['id2label'] == {'0': 'LABEL_0'}
    first, second = (
        safetensors.numpy.load_file(at / 'model.safetensors') for at in (path, tmp_path / 'b')
    )
    assert first.keys() == second.keys()
    assert all((first[key] == second[key]).all() for key in first)
    again, same = models.load(tmp_path / 'b')
    assert again == model
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, same))


def test_a_language_model_with_a_reward_head_keeps_its_output_matrix(tmp_path):
    model, params = models.load(GOLDEN / 'qwen3', reward_head=True)
    untied = models.build(dataclasses.replace(model.config, tied=False), model.tokenizer)
    params |= {'head': 2 * params['embed']}
    models.save(untied, params, tmp_path)
    data = json.loads((tmp_path / 'config.json').read_text())
    assert data['architectures'] == ['Qwen3ForCausalLM']
    again, same = models.load(tmp_path)
    assert again.config == untied.config
    np.testing.assert_array_equal(same['head'], params['head'])


def test_more_than_one_label_is_refused(tmp_path):
    config = {
        'architectures': ['Qwen3ForSequenceClassification'],
        'id2label': {'0': 'a', '1': 'b', '2': 'c'},
    }
    with pytest.raises(ValueError, match='num_labels=3 is not supported; legal: 1'):
        models.load(folder(tmp_path / 'a', 'qwen3', config, tensors=to_classifier))
