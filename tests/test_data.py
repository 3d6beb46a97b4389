"""Tokenizer, tasks and their pipelines, rewards, and configuration read into dataclasses."""

import collections
import dataclasses

import pytest

from policyopt import data, rewards, settings

TWO_DIGITS = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def small_task(**changes):
    values = dict(kw=TWO_DIGITS, size=600, held_out=32, prompt_width=6) | changes
    return data.make_task(data.TaskConfig(**values), data.arithmetic_tokenizer())


def test_tokenizer_is_one_id_per_character():
    tokenizer = data.arithmetic_tokenizer()
    assert tokenizer.vocab_size == 16
    ids = tokenizer.encode('97-8=')
    assert ids == [11, 9, 13, 10, 15]
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == '97-8='
    assert {tokenizer.pad_id, tokenizer.eos_id}.isdisjoint(tokenizer.encode('0123456789+-*='))
    with pytest.raises(ValueError, match=r"'/' at 1 of '4/2'"):
        tokenizer.encode('4/2')
    with pytest.raises(ValueError, match='repeat'):
        data.CharTokenizer('aba')


@pytest.mark.parametrize(
    ('question', 'prompt'),
    [
        ('State the final answer to the following arithmetic problem: 967 + 921 =', '967+921='),
        ('Calculate 5 * 9.', '5*9='),
        ('Calculate -3 - -14.', '-3--14='),
        ('7-8', '7-8='),
        ('What is 12 + 3?', '12+3='),
    ],
)
def test_compact_form(question, prompt):
    assert data.compact(question) == prompt


@pytest.mark.parametrize(
    'question', ['4 + 5 + 6 =', 'Calculate 8 / 4.', '3 / 5 + 6 =', 'Hello', '5 +']
)
def test_compact_form_refuses_what_is_not_two_operands(question):
    with pytest.raises(ValueError, match='two operands'):
        data.compact(question)


def test_task_is_right_distinct_and_split_by_content():
    task = small_task()
    prompts = [item.prompt for item in (*task.train, *task.held_out)]
    assert len(set(prompts)) == len(prompts)
    assert len(task.held_out) == 32 and len(task.train) > 300
    for item in (*task.train, *task.held_out):
        left, right = item.prompt.rstrip('=').replace('-', '+-').split('+')
        assert int(item.answer) == int(left) + int(right)
        assert len(item.ids) <= 6
    # Another seed draws other problems, and still none that the other split of this one holds.
    other = small_task(seed=1234567)
    assert {i.prompt for i in task.train}.isdisjoint(i.prompt for i in other.held_out)
    assert {i.prompt for i in task.train} != {i.prompt for i in other.train}
    again = small_task()
    assert [i.prompt for i in again.train] == [i.prompt for i in task.train]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(name='chain_summ'), 'Did you mean `chain_sum`'),
        (dict(kw=dict(min_term=2)), 'Did you mean `min_terms`'),
        (dict(kw=dict(seed=3)), 'task.kw has no `seed`'),
        (dict(prompt_width=4), 'task.prompt_width is 4'),
        (dict(held_out=500), 'task.held_out is 500'),
    ],
)
def test_task_errors_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        small_task(**changes)


def test_batches_cover_each_epoch_once_in_a_new_order():
    items = list(range(10))
    batches = data.batches(items, 5, seed=3)
    epochs = [sum((next(batches) for _ in range(2)), []) for _ in range(3)]
    assert all(sorted(epoch) == items for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = data.batches(items, 5, seed=3)
    assert next(again) + next(again) == epochs[0]
    other = data.batches(items, 5, seed=4)
    assert next(other) + next(other) != epochs[0]
    with pytest.raises(ValueError, match='batch of 11'):
        data.batches(items, 11, seed=0)


def test_resume_continues_the_same_order():
    """Items 0..7, batch 2, saved after two batches: next are the 5th and 6th of that order."""
    whole = data.batches(range(8), 2, seed=5)
    order = sum((next(whole) for _ in range(4)), [])
    batches = data.batches(range(8), 2, seed=5)
    next(batches), next(batches)
    state = batches.get_state()
    resumed = data.batches(range(8), 2, seed=5)
    resumed.set_state(state)
    assert next(resumed) == order[4:6]


def test_supervised_rows():
    tokenizer = data.arithmetic_tokenizer()
    items = [
        data.Item(prompt='3-4=', ids=(5, 13, 6, 15), answer='-1', entry={}),
        data.Item(prompt='10+10=', ids=(3, 2, 12, 3, 2, 15), answer='20', entry={}),
    ]
    batch = data.supervised(items, tokenizer, width=10)
    assert batch.tokens.tolist() == [
        [5, 13, 6, 15, 13, 3, 1, 0, 0, 0],
        [3, 2, 12, 3, 2, 15, 4, 2, 1, 0],
    ]
    assert batch.mask.tolist() == [[0] * 4 + [1] * 3 + [0] * 3, [0] * 6 + [1] * 3 + [0]]
    assert batch.length.tolist() == [7, 9] and batch.prompt_length.tolist() == [4, 6]
    assert batch.positive.all()
    with pytest.raises(ValueError, match='9 tokens of 8'):
        data.supervised(items, tokenizer, width=8)


def test_reward_is_full_marks_or_nothing():
    task = small_task()
    item = next(i for i in task.train if i.answer.startswith('-'))
    for scorer in (task.score, rewards.build(task.scorer)):
        reward = rewards.graded(scorer)
        answers = [item.answer, item.answer + '7', item.answer[1:], '', '+-=']
        assert [reward(a, (), item.entry).value for a in answers] == [1, 0, 0, 0, 0]
        # The scorer itself gives part marks to a text that contains the answer.
        assert 0 < scorer(f'{item.answer}=7', item.entry) < 1


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    name: str = 'a'


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: Inner | None = None
    count: int = 1
    window: tuple[float, float] = (0.0, 1.0)
    ids: tuple[int, ...] = ()
    extra: collections.abc.Mapping = dataclasses.field(default_factory=dict)


def test_settings_are_read_with_their_types():
    found = settings.read(Outer, dict(inner=dict(rate=1), maybe=dict(name='b'), ids=[1, 2]))
    assert found == Outer(inner=Inner(rate=1.0), maybe=Inner(name='b'), ids=(1, 2))
    assert isinstance(found.inner.rate, float)
    assert settings.read(Outer, dict(inner={}, maybe=None, window=[0, 0.5])).window == (0.0, 0.5)


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        (dict(inner=dict(rat=1.0)), 'config.inner has no `rat`. Did you mean `rate`'),
        (dict(inner={}, maybe=dict(nam='b')), 'config.maybe has no `nam`. Did you mean `name`'),
        (dict(inner={}, coun=3), 'config has no `coun`. Did you mean `count`'),
        (dict(inner={}, count=1.5), r'config.count is 1.5; legal is int'),
        (dict(inner={}, count=True), r'config.count is True; legal is int'),
        (dict(inner=dict(rate='fast')), r"config.inner.rate is 'fast'; legal is float"),
        (dict(inner={}, window=(0.1,)), r'config.window is \(0.1,\)'),
        (dict(inner=3), 'config.inner is 3; legal is a section'),
        (dict(), 'config.inner is missing'),
    ],
)
def test_settings_errors_name_field_value_and_nearest(values, message):
    with pytest.raises(ValueError, match=message):
        settings.read(Outer, values)


def test_config_argument():
    parse = settings.parse_argument
    assert parse('name=gspo,tiny', name='grpo', tiny=False) == dict(name='gspo', tiny=True)
    assert parse(None, name='grpo', count=2) == dict(name='grpo', count=2)
    assert parse('count=3', count=2) == dict(count=3)
    with pytest.raises(ValueError, match='Did you mean `tiny`'):
        parse('tinny=true', tiny=False)
    with pytest.raises(ValueError, match='count is .x.; legal is int'):
        parse('count=x', count=2)
    with pytest.raises(ValueError, match='name has no value'):
        parse('name', name='grpo')
