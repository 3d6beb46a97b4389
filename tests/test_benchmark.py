"""Problems to be answered: files with fields of other names, prepared folders, datasets."""

import json

import numpy as np
import pytest
import tensorflow_datasets as tfds

from policyopt import data
from policyopt.data import benchmark, rows
from policyopt.rewards import build

ARITHMETIC = data.arithmetic_tokenizer()


def write(path, *lines):
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return path


def sums(count=40):
    return [dict(prompt=f'{i}+1=', answer=str(i + 1)) for i in range(count)]


def read(source, **fields):
    return benchmark.read(benchmark.BenchmarkConfig(str(source), **fields))


def test_file_with_fields_of_other_names(tmp_path):
    lines = [dict(question=x['prompt'], solution=x['answer'], level=3) for x in sums()]
    path = write(tmp_path / 'sums.jsonl', *lines, lines[4])
    found = read(path, prompt_field='question', answer_field='solution')
    assert [row.prompt for row in found.rows] == [x['prompt'] for x in sums()]
    items = benchmark.items(found, ARITHMETIC, 10, 'error')
    assert items[7].entry == dict(prompt='7+1=', answer='8', metadata=dict(level=3), task='sums')
    assert (items[7].ids, items[7].answer) == (tuple(ARITHMETIC.encode('7+1=')), '8')
    score = build(found.scorer)
    assert score('8.0', items[7].entry) == 1 and score('9', items[7].entry) == 0
    wrong = read(path, prompt_field='questions', answer_field='solution')
    message = r'sums.jsonl:1: no field `questions`. Did you mean `question`\?'
    with pytest.raises(ValueError, match=message):
        benchmark.items(wrong, ARITHMETIC, 10, 'error')


def test_splits_are_those_of_training(tmp_path):
    path = write(tmp_path / 'sums.jsonl', *sums(200))
    splits = ('all', 'train', 'held_out')
    sides = {split: {r.prompt for r in read(path, split=split).rows} for split in splits}
    task = data.make_task(
        data.TaskConfig(file=str(path), held_out=1, data_dir=str(tmp_path / 'data')), ARITHMETIC
    )
    assert sides['train'] == {item.prompt for item in task.train}
    assert sides['held_out'] | sides['train'] == sides['all'] and len(sides['all']) == 200
    assert sides['held_out'] == {
        x['prompt'] for x in sums(200) if rows.in_held_out(x['prompt'], 0.1)
    }


def test_rows_that_do_not_fit_the_model(tmp_path):
    path = write(tmp_path / 'sums.jsonl', *sums(3), dict(prompt='a+b=', answer='c'))
    path.write_text(path.read_text() + '{"prompt": 3, "answer": "3"}\n')
    found = read(path)
    with pytest.raises(ValueError, match=r"sums.jsonl:4: character 'a'.*sums.jsonl:5: `prompt` is"):
        benchmark.items(found, ARITHMETIC, 10, 'error')
    with pytest.warns(UserWarning, match='sums: 2 bad rows of 5 skipped'):
        assert len(benchmark.items(found, ARITHMETIC, 10, 'skip')) == 3
    with pytest.raises(ValueError, match="'0[+]1=' has 4 tokens; there is room for 3"):
        benchmark.items(found, ARITHMETIC, 3, 'skip')


def test_reasoning_gym_dataset():
    kw = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    found = read('chain_sum', kw=kw, size=30, form='compact')
    items = benchmark.items(found, ARITHMETIC, 10, 'error')
    assert 10 < len(items) <= 30 and len({item.prompt for item in items}) == len(items)
    assert all(build(found.scorer)(item.answer, item.entry) == 1 for item in items)


@pytest.mark.parametrize(
    ('source', 'fields', 'message'),
    [
        ('chain_summ', {}, r'data.name has no `chain_summ`. Did you mean `chain_sum`'),
        ('chain_sum', dict(kw=dict(min_term=1)), 'Did you mean `min_terms`'),
        ('chain_sum', dict(prompt_field='q'), "prompt_field is 'q', which has no effect"),
        ('chain_sum', dict(split='test'), "split='test' is not known"),
        ('sum.jsonl', {}, r'sum.jsonl is no file, no folder and no dataset. Did you mean `sums.js'),
        ('sums.jsonl', dict(size=9), 'size is 9, which has no effect: sums.jsonl is a file'),
        ('sums.jsonl', dict(form='ful'), 'Did you mean `full`'),
        ('.', {}, 'holds 0 prepared datasets'),
    ],
)
def test_what_is_wrong_is_named(source, fields, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'sums.jsonl', *sums(2))
    with pytest.raises(ValueError, match=message):
        read(source, **fields)


def test_folders_that_training_prepared(tmp_path):
    path = write(tmp_path / 'sums.jsonl', *sums())
    config = data.TaskConfig(file=str(path), held_out=0, data_dir=str(tmp_path / 'a'))
    data.make_task(config, ARITHMETIC)
    found = read(next((tmp_path / 'a').iterdir()))
    assert [row.prompt for row in found.rows] == [x['prompt'] for x in sums()]
    assert build(found.scorer)('1.0', found.rows[0].entry) == 1
    config = data.TaskConfig(
        name='gcd', size=60, held_out=1, form='full', prompt_width=200, data_dir=str(tmp_path / 'b')
    )
    task = data.make_task(config, data.ascii_tokenizer())
    folder = next((tmp_path / 'b').iterdir())
    found = read(folder, split='train')
    assert [row.prompt for row in found.rows] == [item.prompt for item in task.train]
    assert all(build(found.scorer)(row.entry['answer'], row.entry) == 1 for row in found.rows)
    assert build(found.scorer)('0', found.rows[0].entry) < 1
    with pytest.raises(ValueError, match='Did you mean `held_out`'):
        read(folder, split='heldout')


class Quiz(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Questions of someone else."""

    VERSION = tfds.core.Version('1.0.0')
    url_infos = {}

    def _info(self):
        text = tfds.features.Text()
        features = dict(question=text, answer=tfds.features.Scalar(np.int64), note=text)
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {'test': self._generate_examples()}

    def _generate_examples(self):
        for i in range(5):
            yield i, dict(question=f'{i}+{i}=', answer=2 * i, note='x')


def test_folder_of_another_builder(tmp_path):
    Quiz(data_dir=tmp_path / 'quiz', file_format='array_record').download_and_prepare()
    found = read(tmp_path / 'quiz', split='test', prompt_field='question')
    assert sorted(row.prompt for row in found.rows) == [f'{i}+{i}=' for i in range(5)]
    answers = {row.prompt: row.entry['answer'] for row in found.rows}
    assert answers['3+3='] == '6' and found.rows[0].entry['metadata'] == dict(note='x')
    with pytest.raises(ValueError, match='has no `questio`. Did you mean `question`'):
        read(tmp_path / 'quiz', prompt_field='questio')
