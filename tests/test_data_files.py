"""Problems on disk: JSONL files with their bad rows, the cache, what interrupts it, TensorFlow."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from policyopt import data, rewards
from policyopt.data import builders, gym, jsonl, rows
from policyopt.rewards.scorers import exact_match

ROOT = pathlib.Path(__file__).parents[1]
TWO_DIGITS = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def write(path, *lines):
    """A file of the lines: dicts as JSON, texts and bytes as they are."""
    made = [json.dumps(x) if isinstance(x, dict) else x for x in lines]
    path.write_bytes(b'\n'.join(x.encode() if isinstance(x, str) else x for x in made) + b'\n')
    return path


def sums(count=40):
    return [dict(prompt=f'{i}+1=', answer=str(i + 1)) for i in range(count)]


def from_file(path, tokenizer=None, **changes):
    values = dict(file=str(path), held_out=0, data_dir=str(path.parent / 'data')) | changes
    return data.make_task(data.TaskConfig(**values), tokenizer or data.arithmetic_tokenizer())


def folders(root):
    return sorted(p.name for p in pathlib.Path(root).iterdir())


# ------------------------------------------------------------------------------------- JSONL files


def test_rows_of_a_file_are_its_problems(tmp_path):
    extra = dict(prompt='7*8=', answer=56, level=3, tags=['a'])
    blank = ['', '   ', '\r']
    path = write(tmp_path / 'sums.jsonl', *sums(), *blank, extra, sums()[3])
    expected = {f'{i}+1=' for i in range(40)} | {'7*8='}
    on_side = {p for p in expected if rows.in_held_out(p, 0.3)}
    task = from_file(path, held_out=len(on_side), held_out_share=0.3)
    assert {i.prompt for i in task.train} == expected - on_side
    assert {i.prompt for i in task.held_out} == on_side
    first = from_file(path, held_out=1, held_out_share=0.3).held_out
    assert [i.prompt for i in first] == [task.held_out[0].prompt]
    everything = {i.prompt: i for i in (*task.train, *task.held_out)}
    item = everything['7*8=']
    assert item.answer == '56' and item.task == 'sums'
    assert item.ids == tuple(data.arithmetic_tokenizer().encode('7*8='))
    assert item.entry['metadata'] == dict(level=3, tags=['a']) and item.entry['task'] == 'sums'
    assert (task.longest_answer, task.prompt_width, task.skipped) == (3, 8, 0)
    assert task.score(' 56.0\n', item.entry) == 1 and task.score('57', item.entry) == 0


BAD = [
    (dict(answer='1'), 'no field `prompt`'),
    (dict(promt='1+1=', answer='2'), 'no field `prompt`. Did you mean `promt`?'),
    (dict(prompt='1+1='), 'no field `answer`'),
    (dict(prompt=3, answer='1'), '`prompt` is 3; legal is a text'),
    (dict(prompt='1+1=', answer=None), '`answer` is null; legal is a text or number'),
    (dict(prompt='1+1=', answer=True), '`answer` is true; legal is a text or number'),
    (dict(prompt=' \n', answer='1'), '`prompt` is empty'),
    (dict(prompt='1+1=', answer=''), '`answer` is empty'),
    (dict(prompt='11111+11111=', answer='22222'), '12 tokens; task.prompt_width is 8'),
    (dict(prompt='4/2=', answer='2'), "character '/' at 1 of '4/2='"),
    (dict(prompt='2+2=', answer='four'), "character 'f' at 0 of 'four'"),
    (dict(prompt='3+1=', answer='5'), 'the prompt of line 4 with another answer'),
    (b'{"prompt": "1+\xff1=", "answer": "2"}', 'invalid UTF-8, byte 15 of the line'),
    (b'{"prompt": "\\ud800", "answer": "2"}', 'half a surrogate pair'),
    ('{"prompt": "1+1="', 'invalid JSON, '),
    ('[1, 2]', 'a JSON list, not an object'),
    ('{"prompt": "1+1=", "answer": NaN}', 'NaN is no JSON number'),
    ('[' * 100_000, 'invalid JSON, '),
]


@pytest.mark.parametrize(('bad', 'reason'), BAD, ids=[r[:24] for _, r in BAD])
def test_bad_row_is_named_by_file_and_line(bad, reason, tmp_path):
    path = write(tmp_path / 'sums.jsonl', *sums(10), '', bad, *sums(20)[10:])
    with pytest.raises(ValueError) as error:
        from_file(path)
    assert f'{path}:12: ' in str(error.value) and reason in str(error.value)


def test_bad_rows_are_skipped_counted_and_shown_each_time(tmp_path):
    lines = [bad for bad, _ in BAD]
    path = write(tmp_path / 'sums.jsonl', *sums(), *lines)
    for _ in range(2):  # made, then found
        with pytest.warns(UserWarning, match='bad rows') as caught:
            task = from_file(path, on_bad_row='skip')
        assert {i.prompt for i in (*task.train, *task.held_out)} <= {r['prompt'] for r in sums()}
        assert task.skipped == len(BAD)
        (warning,) = caught
        text = str(warning.message)
        assert f'sums: {len(BAD)} bad rows of' in text and f'and {len(BAD) - 5} more' in text
        for number in range(41, 46):
            assert f'{path}:{number}: ' in text
        assert warning.filename == __file__


def test_file_without_a_good_row_is_an_error(tmp_path):
    path = write(tmp_path / 'bad.jsonl', *(bad for bad, _ in BAD if isinstance(bad, bytes)))
    for mode in ('skip', 'error'):
        with pytest.raises(ValueError, match=r'bad rows: .*bad.jsonl:1: invalid UTF-8'):
            from_file(path, on_bad_row=mode)
    long = write(tmp_path / 'long.jsonl', dict(prompt='11111+11111=', answer='22222'))
    with pytest.raises(ValueError, match=r'long.jsonl:1: .* has 12 tokens'):
        from_file(long, on_bad_row='skip')
    with pytest.raises(ValueError, match='empty.jsonl holds no row'):
        from_file(write(tmp_path / 'empty.jsonl', '', ''))
    with pytest.raises(ValueError, match='none.jsonl cannot be read: No such file'):
        from_file(tmp_path / 'none.jsonl')
    with pytest.raises(ValueError, match='cannot be read: Is a directory'):
        from_file(tmp_path)
    assert not (tmp_path / 'data').exists() or all(
        not name.startswith(('bad', 'empty', 'incomplete')) for name in folders(tmp_path / 'data')
    )


def test_byte_order_mark_and_line_ends_of_other_systems(tmp_path):
    path = tmp_path / 'dos.jsonl'
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1+1=", "answer": 2}\r\n\r\n')
    assert [i.answer for i in from_file(path).train] == ['2']


@pytest.mark.parametrize(
    ('answer', 'right', 'score'),
    [
        ('7', '7', 1),
        (' 7\n', '7 ', 1),
        ('7.0', '7', 1),
        ('.50', '5e-1', 1),
        ('+7', '7', 1),
        ('-0', '0', 1),
        ('70', '7', 0),
        ('-7', '7', 0),
        ('', '7', 0),
        ('Paris', 'Paris', 1),
        ('paris', 'Paris', 0),
        ('1,000', '1000', 0),
        ('1_000', '1000', 0),
        ('nan', 'NaN', 0),
        ('٧', '7', 0),
        ('0.1', '0.1000000000000000055511151231257827', 0),
        ('1e999999999', '1e999999998', 0),
    ],
)
def test_answers_of_a_file_match_exactly_or_as_numbers(answer, right, score):
    assert exact_match(answer, dict(answer=right)) == score
    assert rewards.graded(exact_match)(answer, (), dict(answer=right)).value == score


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(name='gcd'), "task.name is 'gcd' beside task.file"),
        (dict(size=7), 'task.size is 7 beside task.file'),
        (dict(kw=dict(a=1)), 'task.kw is .* beside task.file'),
        (dict(on_bad_row='skp'), 'Did you mean `skip`'),
        (dict(weight=0.0), 'task.weight is 0.0'),
        (dict(held_out_share=1.5), 'task.held_out_share must lie in'),
        (dict(held_out=100), 'task.held_out is 100, .* add rows or change task.held_out_share'),
    ],
)
def test_settings_of_a_file_task_fail_by_name(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        from_file(write(tmp_path / 'sums.jsonl', *sums()), **changes)


def test_example_of_the_docs(tmp_path, monkeypatch):
    page = (ROOT / 'docs' / 'data.md').read_text()
    lines = [line.strip() for line in page.splitlines() if line.startswith('    {')]
    write(tmp_path / 'mine.jsonl', *lines)
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(page.split('```python')[1].split('```')[0], scope)
    assert [item.task for item in scope['batch']].count('sums') == 6
    assert scope['marks'] == [1] * 8 and scope['task'].skipped == 0


# ------------------------------------------------------------------------------- reasoning-gym


def test_question_in_full_and_its_scorer(tmp_path):
    config = data.TaskConfig(
        name='gcd', size=30, held_out=2, prompt_width=200, form='full', data_dir=str(tmp_path)
    )
    task = data.make_task(config, data.ascii_tokenizer())
    items = [*task.train, *task.held_out]
    assert all('Greatest Common Divisor' in item.prompt for item in items)
    for item in items:
        numbers = item.prompt.split(': ')[1].split('.')[0].split(',')
        assert int(item.answer) == np.gcd.reduce([int(n) for n in numbers])
        assert item.prompt == data.ascii_tokenizer().decode(item.ids)
        assert task.score(item.answer, item.entry) == 1 and task.score('0', item.entry) < 1


def test_problem_that_does_not_fit_is_named_or_skipped(tmp_path):
    kw = dict(kw=TWO_DIGITS, size=200, held_out=0, prompt_width=4, data_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r'problem \d+: .* has [56] tokens'):
        data.make_task(data.TaskConfig(**kw), data.arithmetic_tokenizer())
    with pytest.warns(UserWarning, match='chain_sum: .* bad rows'):
        task = data.make_task(data.TaskConfig(on_bad_row='skip', **kw), data.arithmetic_tokenizer())
    assert max(len(item.ids) for item in task.train) == 4
    three = kw | dict(kw=TWO_DIGITS | dict(max_terms=3, min_terms=3))
    with pytest.raises(ValueError, match='chain_sum, bad rows: problem 0: no expression of two'):
        data.make_task(data.TaskConfig(**three), data.arithmetic_tokenizer())
    refused = kw | dict(kw=TWO_DIGITS | dict(max_terms=1))
    with pytest.raises(ValueError, match='task.kw is .* chain_sum refuses it'):
        data.make_task(data.TaskConfig(**refused), data.arithmetic_tokenizer())


def test_stored_entries_come_back_equal():
    value = dict(a=(1, [2.5, None, (True,)]), b={3, 1}, c={1: 'x', (2, 3): {'(tuple)': 4}}, d='é')
    assert rows.loads(rows.dumps(value)) == value
    assert rows.loads(rows.dumps(value).encode()) == value
    with pytest.raises(TypeError, match='complex cannot be stored'):
        rows.dumps([1j])
    # A scorer that compares tuples still gives full marks to its own answer.
    dataset = gym.create('arc_1d', {}, size=2, seed=0)
    for index in range(2):
        assert rows.loads(rows.dumps(dataset[index])) == dataset[index]


# ------------------------------------------------------------------------------------------- cache


def counted(monkeypatch):
    """Counts how often problems are generated."""
    calls = []
    original = gym.rows

    def generate(*args):
        calls.append(args[1:])
        return original(*args)

    monkeypatch.setattr(gym, 'rows', generate)
    return calls


def test_second_run_loads_and_every_setting_of_the_data_makes_another(tmp_path, monkeypatch):
    calls = counted(monkeypatch)

    def make(width=6, held_out=4, **changes):
        values = dict(kw=TWO_DIGITS, size=100, data_dir=str(tmp_path)) | changes
        config = data.TaskConfig(prompt_width=width, held_out=held_out, **values)
        task = data.make_task(config, data.arithmetic_tokenizer())
        return [(i.prompt, i.ids, i.answer, i.entry) for i in (*task.train, *task.held_out)]

    first = make()
    assert len(calls) == 1 and make() == first and len(calls) == 1
    make(width=8), make(held_out=2)  # of the reading alone
    assert len(calls) == 1 and len(folders(tmp_path)) == 1
    (name,) = folders(tmp_path)
    assert name.startswith('chain_sum-')
    changes = [dict(size=99), dict(seed=1), dict(kw=TWO_DIGITS | dict(max_digits=1))]
    changes += [dict(held_out_share=0.2), dict(on_bad_row='skip')]
    for number, change in enumerate(changes, 2):
        assert make(**change) != first or change == dict(on_bad_row='skip')
        assert len(calls) == len(folders(tmp_path)) == number
    monkeypatch.setattr(builders, 'gym_version', lambda: 'another')
    make()
    assert len(folders(tmp_path)) == len(changes) + 2


def test_file_is_known_by_its_contents(tmp_path, monkeypatch):
    reads = []
    original = jsonl.read
    monkeypatch.setattr(jsonl, 'read', lambda *a: (reads.append(a), original(*a))[1])
    path = write(tmp_path / 'sums.jsonl', *sums())
    before = from_file(path)
    path.touch()
    assert [i.prompt for i in from_file(path).train] == [i.prompt for i in before.train]
    assert len(reads) == 1
    write(path, *sums(), dict(prompt='9*9=', answer='81'))
    after = from_file(path)
    assert {i.prompt for i in after.train} - {i.prompt for i in before.train} == {'9*9='}
    assert len(folders(tmp_path / 'data')) == len(reads) == 2
    with pytest.raises(ValueError, match='changed while it was read'):
        list(original(path, '0' * 64))


def test_default_folder_is_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('POLICYOPT_DATA_DIR', str(tmp_path / 'given'))
    assert builders.default_data_dir() == tmp_path / 'given'
    monkeypatch.delenv('POLICYOPT_DATA_DIR')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    assert builders.default_data_dir() == tmp_path / 'cache' / 'policyopt' / 'data'
    path = write(tmp_path / 'sums.jsonl', *sums())
    from_file(path, data_dir='')
    assert len(folders(tmp_path / 'cache' / 'policyopt' / 'data')) == 1
    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert builders.default_data_dir() == tmp_path / '.cache' / 'policyopt' / 'data'
    with pytest.raises(ValueError, match='task.data_dir .* cannot be written'):
        from_file(path, data_dir=str(path / 'below'))


def test_damaged_data_say_which_folder_to_delete(tmp_path):
    path = write(tmp_path / 'sums.jsonl', *sums())
    from_file(path)
    (folder,) = (tmp_path / 'data').iterdir()
    for record in folder.rglob('*.array_record*'):
        record.write_bytes(b'x' * 100)
    with pytest.raises(ValueError, match=f'{folder}.* cannot be read .* delete it'):
        from_file(path)
    for info in folder.rglob('dataset_info.json'):
        info.unlink()
    with pytest.raises(ValueError, match=f'{folder} holds no whole dataset; delete it'):
        from_file(path)


def test_exception_midway_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / 'sums.jsonl', *sums())
    examples = builders.Problems._generate_examples

    def stop(self, records):
        for index, record in examples(self, records):
            if index == 3:
                raise KeyboardInterrupt
            yield index, record

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(builders.Problems, '_generate_examples', stop)
        from_file(path)
    assert folders(tmp_path / 'data') == []
    assert len(from_file(path).train) > 30


def test_data_made_meanwhile_by_another_are_taken(tmp_path, monkeypatch):
    """The other process ends first: its data stay, and this one's own are dropped."""
    path = write(tmp_path / 'sums.jsonl', *sums())
    examples = builders.Problems._generate_examples
    made = []

    def overtaken(self, records):
        if not made:
            made.append(True)
            from_file(path)
        yield from examples(self, records)

    monkeypatch.setattr(builders.Problems, '_generate_examples', overtaken)
    assert len(from_file(path).train) > 30
    assert len(folders(tmp_path / 'data')) == 1


SCRIPT = """
import os, pathlib, random, signal, sys, time
from policyopt import data
from policyopt.data import builders

mode, file, folder = sys.argv[1:]
examples = builders.Problems._generate_examples

def wait(self, records):
    random.seed(0)  # of all processes alike
    for index, record in examples(self, records):
        if index == 2 and mode == 'killed':
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2:  # both are midway
            pathlib.Path(folder, mode).touch()
            end = time.monotonic() + 60
            while not all(pathlib.Path(folder, name).exists() for name in ('one', 'two')):
                assert time.monotonic() < end
                time.sleep(0.01)
        yield index, record

builders.Problems._generate_examples = wait
random.seed(0)
config = data.TaskConfig(file=file, held_out=0, data_dir=folder + '/data')
task = data.make_task(config, data.arithmetic_tokenizer())
assert 'tensorflow' not in sys.modules
print(*(item.prompt for item in (*task.train, *task.held_out)))
"""


def start(*args):
    """The script in a process where tensorflow can be found but must not be imported."""
    traps = args[-1] / 'traps'
    for name in ('tensorflow', 'importlib_resources'):
        (traps / name).mkdir(parents=True, exist_ok=True)
        (traps / name / '__init__.py').write_text(f'raise RuntimeError("{name} was imported")')
    environment = os.environ | {'PYTHONPATH': f'{traps}:{ROOT}'}
    command = [sys.executable, '-c', SCRIPT, *map(str, args)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_prepare_at_once_or_are_killed(tmp_path):
    """A killed one leaves nothing that counts; then two, midway at the same time, both succeed."""
    path = write(tmp_path / 'sums.jsonl', *sums())
    killed = start('killed', path, tmp_path)
    printed = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, printed
    assert all(name.startswith('incomplete-') for name in folders(tmp_path / 'data'))
    both = [start(name, path, tmp_path) for name in ('one', 'two')]
    printed = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    expected = ' '.join(item.prompt for item in from_file(path).train)
    assert [out.splitlines()[-1] for out, _ in printed] == [expected] * 2 and len(
        expected.split()
    ) > 30
    whole = [n for n in folders(tmp_path / 'data') if not n.startswith('incomplete-')]
    assert len(whole) == 1 and len(folders(tmp_path / 'data')) == 2  # and what was killed
