"""Checkpoints as Hugging Face folders: bit for bit, whole or not at all, with their tokenizer."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from policyopt import data, evaluate, export, models, policy, recipe, stopping
from policyopt import loop as loop_lib
from policyopt.checkpoint import Checkpoints
from policyopt.evaluate_plan import parser, plan
from tests.checkpoints import copy
from tests.runs import CONFIG, finished_run  # noqa: F401, a fixture

FAMILIES = ('llama_tied', 'qwen2', 'qwen3', 'qwen3_moe', 'mixtral')
MOST = [
    family
    if family in ('llama_tied', 'qwen3_moe')
    else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
]
TEMPLATE = '{% for m in messages %}{{ m.content }}{% endfor %}'


def same(a, b):
    """Equal trees of arrays: names, types and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize('make', [data.arithmetic_tokenizer, data.ascii_tokenizer])
def test_written_tokenizer_has_the_same_ids(make, tmp_path):
    ours = make()
    ours.save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    assert theirs.get_vocab_size() == ours.vocab_size
    draw = random.Random(0)
    texts = [''.join(draw.choices(ours.characters, k=length)) for length in range(60)]
    for text in [*texts, *ours.characters]:
        ids = ours.encode(text)
        assert theirs.encode(text).ids == ids
        assert theirs.decode([*ids, ours.eos_id, ours.pad_id]) == text
    with pytest.raises(Exception, match='WordLevel'):
        theirs.encode('1é')
    settings = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    ends = [theirs.token_to_id(settings[name]) for name in ('pad_token', 'eos_token')]
    assert ends == [ours.pad_id, ours.eos_id]


def test_tokenizer_that_spells_its_special_names_is_refused(tmp_path):
    with pytest.raises(ValueError, match='name of a special id'):
        data.CharTokenizer('⟨pad⟩').save(tmp_path)


# ------------------------------------------------------------------------------------------- runs


def answers(what, step=None, params='auto', more=()):
    flags = [str(what), f'--params={params}', *more]
    options = parser().parse_args(flags + ([] if step is None else [f'--step={step}']))
    return evaluate.run(plan(options)).answers.texts


def test_a_run_with_a_tokenizer_of_characters(finished_run, tmp_path, capsys):  # noqa: F811
    folder = tmp_path / 'exports' / 'mine'
    assert export.main([str(finished_run), str(folder)]) == 0
    assert 'moving average after RL step 2' in capsys.readouterr().out
    wanted = policy.load(policy.find(finished_run))
    model, params = models.load(folder)
    same(params, wanted.params)
    assert names(folder) == [
        'config.json',
        'generation_config.json',
        'model.safetensors',
        'tokenizer.json',
        'tokenizer_config.json',
    ]
    assert names(tmp_path / 'exports') == ['mine']
    said = json.loads((folder / 'generation_config.json').read_text())
    assert (said['eos_token_id'], said['pad_token_id']) == (1, 0)
    assert model.tokenizer.eos_id == 1 and model.tokenizer.encode('4+5=') == [6, 12, 7, 15]
    # The held-out problems of the run, as a file.
    task = recipe.prepare(CONFIG).task
    lines = [json.dumps(dict(prompt=i.prompt, answer=i.answer)) for i in task.held_out]
    (tmp_path / 'held_out.jsonl').write_text('\n'.join(lines))
    more = [f'--data={tmp_path / "held_out.jsonl"}', '--max_new_tokens=4', '--temperature=0']
    more.append('--slots=16')
    assert answers(folder, more=more) == answers(finished_run, more=['--slots=16'])
    assert export.main([str(finished_run), str(folder), '--step=1']) == 2
    assert 'is there already; nothing is overwritten' in capsys.readouterr().err
    same(models.load(folder)[1], wanted.params)


def test_other_steps_parameters_and_types(finished_run, tmp_path):  # noqa: F811
    done = export.export(finished_run, tmp_path / 'a', step=1, which='params')
    wanted = policy.load(policy.find(finished_run), 1, 'params').params
    same(models.load(tmp_path / 'a')[1], wanted)
    assert done.origin['step'] == 1 and done.origin['params'] == 'params'
    export.export(finished_run, tmp_path / 'b', step=1, which='params', dtype='bfloat16')
    model, params = models.load(tmp_path / 'b')
    same(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), wanted))
    assert model.config.param_dtype == 'bfloat16'
    with pytest.raises(ValueError, match='Did you mean `bfloat16`'):
        export.export(finished_run, tmp_path / 'c', dtype='bfloat')
    with pytest.raises(ValueError, match='step is 9'):
        export.export(finished_run, tmp_path / 'c', step=9)
    assert names(tmp_path) == ['a', 'b']


@pytest.mark.parametrize('where', ['save', 'copy', 'rename'])
def test_nothing_is_left_of_an_export_that_failed(where, finished_run, tmp_path, monkeypatch):  # noqa: F811
    save = models.save

    def full(model, params, folder):
        save(model, params, folder)
        if where == 'save':
            raise OSError(28, 'No space left on device')
        if where == 'rename':  # someone else was quicker
            (tmp_path / 'mine').mkdir()
            (tmp_path / 'mine' / 'theirs.txt').write_text('')

    def copied(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, 'save', full)
    if where == 'copy':
        monkeypatch.setattr(export, '_began', copied)
    with pytest.raises((OSError, KeyboardInterrupt)):
        export.export(finished_run, tmp_path / 'mine')
    assert names(tmp_path) == (['mine'] if where == 'rename' else [])
    assert where != 'rename' or names(tmp_path / 'mine') == ['theirs.txt']


def start(family, folder):
    """A golden model with a tokenizer, a chat template and settings to generate with."""
    copy(family, folder)
    data.ascii_tokenizer().save(folder)
    (folder / 'chat_template.jinja').write_text(TEMPLATE)
    settings = {'eos_token_id': [1, 2], 'temperature': 0.6, 'top_p': 0.9}
    (folder / 'generation_config.json').write_text(json.dumps(settings))
    (folder / 'merges.txt').write_text('#version: 0.2\n')
    return folder


def run_of(folder, workdir, **changes):
    """The folder of a run as its first checkpoint leaves it, without training."""
    config = {k: v for k, v in CONFIG.items() if k not in ('ema', 'warm_start')}
    config |= dict(model=dict(path=str(folder)), **changes)
    workdir.mkdir()
    (workdir / 'config.json').write_text(json.dumps(config, default=str))
    setup = recipe.prepare(config)
    with Checkpoints(workdir, 1, setup.config) as checkpoints:
        loop = loop_lib.make_loop(setup, workdir, checkpoints, stopping.Stop())
        before = evaluate.Accuracy(0, 1)
        point = loop_lib.new_point(setup, loop, recipe.first_params(setup), before, 0)
        loop_lib.save(loop, point)
    return workdir


@pytest.mark.parametrize('family', MOST)
def test_a_run_that_started_from_a_folder(family, tmp_path):
    folder = start(family, tmp_path / 'start')
    algorithm = 'policyopt.algorithms.' + ('ppo_clip' if family == 'llama_tied' else 'gspo')
    off = dict(dynamic_sampling=False) if family == 'llama_tied' else {}
    workdir = run_of(folder, tmp_path / 'run', algorithm=algorithm, algorithm_kw={}, **off)
    export.export(workdir, tmp_path / 'out')
    model, params = models.load(tmp_path / 'out')
    began, wanted = models.load(folder)
    same(params, wanted)  # the critic's value head is left out
    assert model.config == dataclasses.replace(began.config, pad_id=0)
    assert model.tokenizer.chat_template == TEMPLATE
    # Tensors as the reference implementation wrote them: names, types and bits.
    files = [
        safetensors.numpy.load_file(f / 'model.safetensors') for f in (tmp_path / 'out', folder)
    ]
    same(*files)
    kept = ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja', 'merges.txt')
    for name in (*kept, 'generation_config.json'):
        assert (tmp_path / 'out' / name).read_bytes() == (folder / name).read_bytes()
    before, after = (
        json.loads((f / 'config.json').read_text()) for f in (folder, tmp_path / 'out')
    )
    for name in ('architectures', 'model_type', 'hidden_size', 'vocab_size'):
        assert before[name] == after[name]


# ----------------------------------------------------------------------- a reference implementation


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_export_in_the_reference_implementation(family, tmp_path):
    """Logits, greedy text and token ids of the transformers package, where it is installed."""
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    workdir = run_of(start(family, tmp_path / 'start'), tmp_path / 'run')
    done = export.export(workdir, tmp_path / 'out')
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs, info = load(str(tmp_path / 'out'), output_loading_info=True)
    assert not any(info[name] for name in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    theirs = theirs.float().eval()
    # Not AutoTokenizer, whose class for Qwen2 splits text by rules of its own, not the file's.
    reader = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / 'out'))
    prompt = 'What is 12+3?\n'
    ids = reader(prompt, add_special_tokens=False)['input_ids']
    assert ids == done.model.tokenizer.encode(prompt)
    assert reader.chat_template == TEMPLATE
    assert (reader.pad_token_id, reader.eos_token_id) == (0, 1)
    apply = jax.jit(done.model.apply)

    def logits(rows):
        with torch.no_grad():
            expected = theirs(torch.tensor(rows)).logits.numpy()
        padded = np.zeros((2, 24), np.int32)
        padded[: len(rows), : len(rows[0])] = rows
        found = np.asarray(apply(done.params, padded).logits)[: len(rows), : len(rows[0])]
        return found, expected

    found, expected = logits(np.random.default_rng(0).integers(3, 98, (2, 24)).tolist())
    np.testing.assert_allclose(found, expected, atol=5e-6)
    row = list(ids)
    while len(row) < 24:
        found, expected = logits([row])
        assert found[0, -1].argmax() == expected[0, -1].argmax()
        row.append(int(found[0, -1].argmax()))
