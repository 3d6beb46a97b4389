"""Tasks of several turns: the calculator, the guessing game, play to imitate, recorded answers."""

import math

import numpy as np
import pytest

from policyopt import data, environments
from policyopt.environments.calculator import Calculator, ways
from policyopt.environments.guessing import Guessing, information
from policyopt.sampling import Finish, Reply, Turn
from policyopt.sampling.environments import Fault

ASCII = data.ascii_tokenizer()


def ids(text):
    return ASCII.encode(text)


def say(env, text):
    """A reply as text, done, reward."""
    tokens, done, reward = env.step(ids(text))
    return ASCII.decode(tokens), done, reward


def test_calculator():
    env = Calculator(ASCII, '12*34+56=', ['12*34', '408+56'], calls=5)
    assert env.reset() == ids('12*34+56=')
    assert say(env, '<12*34>') == ('408', False, 1)
    assert say(env, '<12*34>') == ('408', False, 0)  # again
    assert say(env, '<56-408>') == ('-352', False, 0)  # no step of the way
    assert say(env, '<408+56+1>') == ('?', False, 0)  # two numbers alone
    assert say(env, '<408+56>') == ('464', False, 1)
    assert say(env, '<1+1>') == ('', True, 0)  # the sixth call
    done = Calculator(ASCII, '1+1=', ['1+1']).step([*ids('464'), ASCII.eos_id])
    assert done.done and math.isnan(done.reward)  # judged, not rewarded here
    assert ways('12*34+56=') == ['12*34', '408+56']
    assert ways('56+12*34=') == ['12*34', '56+408'] and ways('2*3-6=') == ['2*3', '6-6']


def test_guessing():
    env = Guessing(ASCII, '010-030?', 17, 6)
    assert say(env, '020') == ('<010-019?', False, 1)
    text, done, reward = say(env, '011')
    n, parts = 10, (1, 1, 8)
    bits = -sum(p / n * math.log2(p / n) for p in parts)
    best = -sum(p / n * math.log2(p / n) for p in (4, 1, 5))
    assert (text, done) == ('>012-019?', False) and reward == pytest.approx(bits / best)
    for wrong in ('011', '+5', 'x' * 9):
        assert say(env, wrong) == ('?012-019?', False, 0)
    assert say(env, '018')[1]  # the last guess
    won = Guessing(ASCII, '05-05?', 5, 3).step([*ids('05'), ASCII.eos_id])
    assert won == Reply(done=True, reward=1.0)


@pytest.mark.parametrize('n', [2, 7, 20, 31])
def test_the_middle_tells_most(n):
    found = [information(1, n, guess) for guess in range(1, n + 1)]
    assert max(found) == found[(n - 1) // 2] == 1 and min(found) == found[0] >= 0


def play(scenario, example, player):
    """Rows of (turn, observation) texts."""
    env = scenario.environment(ASCII, example)
    seen, told = '', []
    while True:
        turn = player(seen)
        reply = env.step([*ids(turn), ASCII.eos_id] if turn[-1] != '>' else ids(turn))
        told.append((turn, ASCII.decode(reply.tokens), reply.reward))
        if reply.done:
            return told
        seen = ASCII.decode(reply.tokens)


def examples(scenario, size=60):
    return [
        {'question': p.prompt, 'answer': p.answer, **p.hidden} for p in scenario.problems(size, 0)
    ]


def test_experts_solve_what_they_can():
    scenario = environments.calculator()
    for example in examples(scenario):
        told = play(scenario, example, scenario.expert(example))
        assert told[-1][0] == example['answer'] == str(eval(example['question'][:-1]))
        assert [t[2] for t in told[:-1]] == [1, 1] and int(example['answer']) >= 0
    scenario = environments.guessing()
    right = 0
    for example in examples(scenario):
        told = play(scenario, example, scenario.expert(example))
        right += told[-1][0] == example['answer']
        assert (
            20 <= eval('-({}-{})'.format(*map(int, example['question'][:-1].split('-')))) + 1 <= 31
        )

        def halve(seen, example=example):
            low, high = (int(x) for x in (seen or example['question'])[-8:-1].split('-'))
            return f'{(low + high) // 2:03d}'

        told = play(scenario, example, halve)
        assert told[-1][0] == example['answer'] and {t[2] for t in told} == {1}
    assert 20 <= right <= 50


TASK = dict(environment='guessing', kw=dict(digits=2, smallest=3, largest=6), size=300)


def test_a_task_with_an_environment(tmp_path):
    config = data.TaskConfig(**TASK, held_out=8, data_dir=str(tmp_path))
    task = data.make_task(config, ASCII)
    assert task.played and task.stops == () and config.title == 'guessing'
    assert not {i.prompt for i in task.train} & {i.prompt for i in task.held_out}
    item = task.train[0]
    assert item.play.environment(item.entry).reset() == list(item.ids)
    assert task.score(item.answer, item.entry) == 1
    batch = data.supervised(task.train[:5], ASCII, 48)
    for row, item in enumerate(task.train[:5]):
        n = batch.length[row]
        tokens, mask = batch.tokens[row, :n], batch.mask[row, :n]
        assert (
            tokens[: len(item.ids)].tolist() == list(item.ids) and not mask[: len(item.ids)].any()
        )
        # Guesses are the expert's; what is between them the environment's.
        text = ASCII.decode(tokens[mask == 0])
        assert text.startswith(item.prompt) and set(text) <= set('0123456789-?<>')
        starts = np.flatnonzero(np.diff(mask) == 1) + 1
        assert all(tokens[s : s + 3].tolist()[-1] == ASCII.eos_id for s in starts)
        assert mask.sum() == 3 * len(starts) and mask[-1] == 1
    kw = dict(max_terms=2, max_digits=1)
    sums = data.TaskConfig(kw=kw, size=300, held_out=8, data_dir=str(tmp_path))
    mixed = data.make_task(dict(guess=config, sums=sums), ASCII)
    assert mixed.played and [i.play is None for i in (mixed.train[0], mixed.train[-1])] == [0, 1]


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(environment='guesing'), "environment is 'guesing': .* Did you mean `guessing`"),
        (dict(environment='tests.nothing.x'), "No module named 'tests.nothing'"),
        (
            dict(environment='policyopt.data.compact'),
            'which made .*legal is a Scenario|no argument',
        ),
        (dict(kw=dict(digit=2)), 'no argument `digit`. Did you mean `digits`'),
        (dict(kw=dict(smallest=9, largest=3)), 'largest must lie in'),
        (dict(name='chain_sum2'), 'task.name is .* beside task.environment'),
        (dict(file='x.jsonl'), 'task.file is .* beside task.environment'),
    ],
)
def test_errors_of_a_task(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        data.TaskConfig(**{**TASK, **changes})


class Counting:
    """Answers its n-th turn with n; remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def reset(self):
        return [1]

    def step(self, tokens):
        self.shown.append(list(tokens))
        return Reply([len(self.shown)], reward=0.5)


def turn(tokens, observation, finish=Finish.RUNNING, error=None, reward=math.nan):
    return Turn(tuple(tokens), tuple(observation), reward, finish, error, 0.1, True)


def test_recorded_answers_are_given_again():
    rows = [turn([7], [8, 9], reward=0.25), turn([5], [6]), turn([4], [], Finish.ENV_LATE, 'late')]
    known = environments.said([*rows, Turn((1, 2), finish=Finish.LENGTH)])
    assert len(known) == 3
    env = Counting()
    again = environments.Recorded(env, known)
    assert again.reset() == [1]
    assert again.step([7]) == Reply((8, 9), False, 0.25)
    assert again.step([5])[:2] == ((6,), False)
    with pytest.raises(Fault, match='late') as fault:
        again.step([4])
    assert fault.value.finish == Finish.ENV_LATE and env.shown == []
    # Other turns than those of the record: the environment is told what it missed, and goes on.
    again = environments.Recorded(env, known)
    again.step([7])
    assert again.step([3]) == Reply([2], False, 0.5) and env.shown == [[7], [3]]
    assert again.step([4]) == Reply([3], False, 0.5)
    done = environments.Recorded(env, environments.said([turn([7], [], Finish.DONE)]))
    assert done.step([7]).done
