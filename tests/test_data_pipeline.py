"""Order of batches: mixtures with exact shares, resuming, hosts; and tasks that are mixed."""

import collections
import dataclasses
import fractions
import json
from collections.abc import Mapping

import hypothesis
import hypothesis.strategies as st
import pytest

from policyopt import data, rewards, settings
from policyopt.data import pipeline

TWO_DIGITS = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)


def mixture(sizes=(30, 7, 50), weights=(5, 2, 3)):
    """Parts whose items are (part, index)."""
    parts = [[(part, i) for i in range(size)] for part, size in enumerate(sizes)]
    return data.Mixture(tuple(parts), tuple(float(w) for w in weights))


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_mixture_is_its_parts_in_a_row():
    items = mixture((2, 1, 3), (1, 1, 1))
    expected = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert len(items) == 6 and list(items) == expected
    assert [items[i - 6] for i in range(6)] == expected and items[1:4] == expected[1:4]
    for index in (6, -7):
        with pytest.raises(IndexError):
            items[index]
    with pytest.raises(ValueError, match='none may be empty'):
        mixture((2, 0), (1, 1))
    with pytest.raises(ValueError, match='finite ones above 0'):
        mixture((2, 2), (1, 0))
    with pytest.raises(ValueError, match='3 parts with 2 weights'):
        mixture((2, 2, 2), (1, 1))


def test_shares_are_exact_over_a_period_and_close_before():
    batches = data.batches(mixture(), 10, seed=1)
    for _ in range(8):
        counts = collections.Counter(part for part, _ in next(batches))
        assert counts == {0: 5, 1: 2, 2: 3}
    # 0.7 and 0.3 are meant as written: of 10 rows, 7 and 3.
    rows = sum(take(data.batches(mixture((50, 50), (0.7, 0.3)), 1, seed=0), 100), [])
    for count in range(1, 101):
        found = sum(part == 0 for part, _ in rows[:count])
        assert abs(found - 0.7 * count) < 1
    assert sum(part for part, _ in rows) == 30


@hypothesis.given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_interleaving_visits_each_row_of_each_part_in_order(weights):
    total = sum(weights)
    shares = [fractions.Fraction(w, total) for w in weights]
    order = pipeline.Interleave(shares, 3 * total)
    found = [order[k] for k in range(len(order))]
    for part, weight in enumerate(weights):
        assert [i for p, i in found if p == part] == list(range(3 * weight))
    for k in range(len(found)):
        for part, share in enumerate(shares):
            assert abs(sum(p == part for p, _ in found[:k]) - k * share) < len(weights)


def test_each_part_of_a_mixture_has_its_own_epochs_in_new_orders():
    rows = sum(take(data.batches(mixture(), 10, seed=3), 42), [])
    for part, size in enumerate((30, 7, 50)):
        mine = [i for p, i in rows if p == part]
        epochs = [mine[k : k + size] for k in range(0, len(mine) - size + 1, size)]
        assert len(epochs) >= 2
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    again = sum(take(data.batches(mixture(), 10, seed=3), 4), [])
    other = sum(take(data.batches(mixture(), 10, seed=4), 4), [])
    assert rows[:40] == again != other
    assert [p for p, _ in again] == [p for p, _ in other]
    # Parts of equal length are not in the same order.
    twins = sum(take(data.batches(mixture((20, 20), (1, 1)), 4, seed=0), 10), [])
    assert [i for p, i in twins if p == 0] != [i for p, i in twins if p == 1]


@pytest.mark.parametrize('items', [range(20), mixture((30, 12), (3, 2))], ids=['one', 'mixed'])
def test_resume_from_saved_state_is_the_same_to_the_end(items):
    """Saved as JSON at the start, within an epoch and across epochs; the rest never differs."""
    whole = take(data.batches(items, 8, seed=7), 6)
    for done in (0, 1, 3, 4):
        batches = data.batches(items, 8, seed=7)
        take(batches, done)
        saved = json.loads(json.dumps(batches.get_state()))
        resumed = data.batches(items, 8, seed=7)
        resumed.set_state(saved)
        assert take(resumed, 6 - done) == whole[done:]
        batches.set_state(saved)  # back again
        assert take(batches, 1) == whole[done : done + 1]


class Reads(list):
    """A list that remembers what was read."""

    def __init__(self, items):
        super().__init__(items)
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize('shards', [1, 2, 5])
def test_hosts_read_their_own_rows_and_together_the_whole_batch(shards):
    whole = take(data.batches(mixture(), 10, seed=2), 6)
    hosts = [data.batches(mixture(), 10, 2, shard=h, shards=shards) for h in range(shards)]
    for expected in whole[:3]:
        assert sum((next(host) for host in hosts), []) == expected
    states = [host.get_state() for host in hosts]
    assert all(state == states[0] for state in states)
    alone = data.batches(mixture(), 10, 2)  # resumed on another number of hosts
    alone.set_state(states[0])
    assert take(alone, 3) == whole[3:]
    items = Reads(range(100))
    host = data.batches(items, 10, 2, shard=shards - 1, shards=shards)
    take(host, 4)
    assert len(items.seen) == 40 // shards


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(size=10, shards=3), 'batch of 10 does not divide into 3 shards'),
        (dict(size=0), 'batch of 0'),
        (dict(size=10, shard=2, shards=2), 'shard is 2 of 2'),
        (dict(size=10, shard=-1), 'shard is -1 of 1'),
        (dict(size=40), 'batch of 40 needs 8 items of a part that has 7'),
        (dict(size=90), 'batch of 90 needs as many items; there are 87'),
    ],
)
def test_batches_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        data.batches(mixture(), seed=0, **changes)


def test_mixed_tasks_are_judged_each_by_its_own_scorer(tmp_path):
    path = tmp_path / 'words.jsonl'
    lines = [json.dumps(dict(prompt=f'{i}*0=', answer='0')) for i in range(60)]
    path.write_text('\n'.join(lines))
    configs = dict(
        sums=data.TaskConfig(kw=TWO_DIGITS, size=300, held_out=5, prompt_width=6, weight=3.0),
        zeros=data.TaskConfig(file=str(path), held_out=2, prompt_width=9),
    )
    task = data.make_task(configs, data.arithmetic_tokenizer())
    assert (task.prompt_width, task.longest_answer) == (9, 4)
    assert [item.task for item in task.held_out] == ['sums'] * 5 + ['zeros'] * 2
    (batch,) = take(data.batches(task.train, 40, seed=0), 1)
    assert collections.Counter(item.task for item in batch) == dict(sums=30, zeros=10)
    for scorer in (task.score, rewards.build(task.scorer)):
        reward = rewards.graded(scorer)
        assert [reward(i.answer, (), i.entry).value for i in batch] == [1] * 40
    # That of chain_sum gives part marks to a text which contains the answer; that of a file, none.
    for item in batch:
        part_marks = task.score(f'{item.answer}=7', item.entry)
        assert 0 < part_marks < 1 if item.task == 'sums' else part_marks == 0
    one = data.make_task(configs['sums'], data.arithmetic_tokenizer())
    assert [i.prompt for i in one.train] == [i.prompt for i in task.train.parts[0]]
    with pytest.raises(ValueError, match='held_out_share differs'):
        configs['zeros'] = data.TaskConfig(file=str(path), held_out=2, held_out_share=0.2)
        data.make_task(configs, data.arithmetic_tokenizer())
    with pytest.raises(ValueError, match=r'tasks.bad.kw has no `min_term`. Did you mean'):
        bad = dict(bad=data.TaskConfig(kw=dict(min_term=2)))
        data.make_task(bad, data.arithmetic_tokenizer())
    with pytest.raises(ValueError, match='tasks is empty'):
        data.make_task({}, data.arithmetic_tokenizer())


@dataclasses.dataclass(frozen=True)
class Run:
    tasks: Mapping[str, data.TaskConfig]


def test_named_tasks_are_read_from_settings():
    found = settings.read(Run, dict(tasks=dict(a=dict(size=5), b=dict(weight=2))))
    assert found.tasks == dict(a=data.TaskConfig(size=5), b=data.TaskConfig(weight=2.0))
    with pytest.raises(ValueError, match='config.tasks.b has no `wait`. Did you mean `weight`'):
        settings.read(Run, dict(tasks=dict(a={}, b=dict(wait=2))))
