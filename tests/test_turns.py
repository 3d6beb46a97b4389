"""Rows of several turns on their way through a run: rewards, records, failures, resume."""

import importlib.util
import math
import pathlib
import time
import types

import jax
import numpy as np
import pytest

import policyopt as po
from policyopt import data, metrics, recipe, rewards, turns
from policyopt.answers import draw
from policyopt.rewards import Local, Verdict
from policyopt.rollout import RolloutConfig, make_collector
from policyopt.sampling import EngineConfig, Finish, Reply, SamplingConfig, Turn
from tests import pages
from tests.bigram import Bigram, Config, chain
from tests.test_resume import check_resume
from tests.test_sampling_environments import Scripted

ROOT = pathlib.Path(__file__).parents[1]
TOKENIZER = data.arithmetic_tokenizer()
V = TOKENIZER.vocab_size
MODEL = Bigram(Config(V, (1,)), TOKENIZER)  # token i is followed by i + 1, up to the end, 1
ENGINE = EngineConfig(slots=2, size=24, steps=4, time_limit=0.3)
STOP = SamplingConfig(max_new_tokens=20, stop_ids=(6,))


class Plays:
    """Environments of rows, in order; `made` counts them."""

    def __init__(self, *scripts):
        self.scripts, self.made, self.asked = scripts, 0, 0

    def environment(self, example):
        self.made += 1
        make = self.scripts[(self.made - 1) % len(self.scripts)]
        play, env = self, Scripted([3], *make())
        step = env.step

        def counted(tokens):
            play.asked += 1
            return step(tokens)

        env.step = counted
        return env


def good():
    return Reply([9], reward=0.25), Reply(done=True, reward=0.5)


def fails():
    def fail():
        raise KeyError('gone')

    return Reply([9], reward=0.75), fail


def hangs():
    return (lambda: time.sleep(30),)


def floods():
    return (Reply([9] * 25),)


def items(plays, count=1):
    return [data.Item('1', (3,), '', {'i': i}, play=plays) for i in range(count)]


def collector(judge, algorithm=None, group_size=4, **config):
    algorithm = algorithm or po.algorithms.gspo_turn()
    return make_collector(
        MODEL,
        algorithm,
        judge,
        RolloutConfig(prompts=1, group_size=group_size, engine=ENGINE, **config),
        STOP,
        prompt_width=2,
    )


def collect(plays, judge, page=None, **kw):
    state = types.SimpleNamespace(params=chain(V))
    source = iter([items(plays)] * 9)
    return collector(judge, **kw)(state, None, source, jax.random.key(0), page=page)


class Judge(Local):
    """Marks answers by number; keeps what it was given."""

    def __init__(self, marks=(1.0, 0.0)):
        self.seen = []

        def reward(text, tokens, example):
            self.seen.append((text, tokens))
            return Verdict(marks[(len(self.seen) - 1) % len(marks)], 'marked')

        super().__init__(reward)


LAST = [10, 11, 12, 13, 14, 15, 0, 1]


def test_rewards_of_rows_and_turns(capsys):
    """The last turn is judged; turns have the environment's rewards; faults cost their own row."""
    judge = Judge()
    found = collect(Plays(good, good, fails, hangs), judge)
    batch, rollout = found.batch, found.rollout
    assert [tokens for _, tokens in judge.seen] == [LAST, LAST]
    assert judge.seen[0][0] == TOKENIZER.decode(LAST)
    assert np.asarray(batch.finish).tolist() == [
        Finish.DONE, Finish.DONE, Finish.ENV_FAILED, Finish.ENV_LATE,
    ]  # fmt: skip
    assert batch.rewards[:2].tolist() in ([1, 0], [0, 1]) and np.isnan(batch.rewards[2:]).all()
    want = [3, 4, 5, 6, 9, *LAST]
    assert batch.tokens[0, :13].tolist() == want and batch.length.tolist() == [13, 13, 13, 4]
    assert batch.mask[0, :13].tolist() == [0, 1, 1, 1, 0] + [1] * 8
    assert batch.segment[0, :13].tolist() == [0, 1, 1, 1, 2] + [3] * 8
    assert not batch.mask[2:].any()  # without a reward, nothing is learnt
    at = np.flatnonzero(~np.isnan(rollout.segment_rewards[0]))
    assert at.tolist() == [3, 12] and rollout.segment_rewards[0, at].tolist() == [0.25, 0.5]
    # Outcomes +-.707 (two rows); turns .25 .5 .25 .5 of those two.
    mean, std = 0.375, np.std([0.25, 0.5] * 2, ddof=1)
    outcome = (batch.rewards[0] - 0.5) / np.std([0, 1], ddof=1)
    np.testing.assert_allclose(batch.advantages[0, 3], outcome + (0.25 - mean) / std, rtol=1e-4)
    np.testing.assert_allclose(batch.advantages[0, 12], outcome + (0.5 - mean) / std, rtol=1e-4)
    assert batch.advantages[0, 4] == 0
    m = found.metrics
    assert m['turns/mean'] == 7 / 4 and m['turns/max'] == 2 and m['turns/done'] == 0.5
    assert (m['turns/failed'], m['turns/late'], m['turns/overflow']) == (0.25, 0.25, 0)
    assert m['turns/late/1'] == 1 and m['turns/failed/1'] == 0 and m['turns/failed/2'] == 1
    assert m['turns/rows/1'] == 4 and m['turns/rows/2'] == 3 and m['turns/observed/1'] == 1
    assert m['turns/reward/1'] == pytest.approx((0.25 * 2 + 0.75) / 3)
    assert m['rollout/not_judged'] == m['rollout/not_sampled'] == 0
    assert found.timings['turn_seconds_longest'] >= 0.3 and found.timings['turn_seconds/1'] > 0.07
    assert 0 < found.timings['slot_use'] <= 1
    said = capsys.readouterr().err
    assert "1 of 4 rows failed (environment raised KeyError: 'gone'); metric turns/failed" in said
    assert 'environment took longer than 0.3 s' in said


def test_outcome_alone_and_one_turn():
    """GRPO on the same rows has one advantage for all turns; a row that has one turn is one."""
    found = collect(Plays(good), Judge(), algorithm=po.algorithms.grpo(beta=0.0), group_size=2)
    for row in range(2):
        values = np.unique(found.batch.advantages[row][np.asarray(found.batch.mask[row]) > 0])
        assert len(values) == 1 and abs(values[0]) == pytest.approx(math.sqrt(0.5), rel=1e-4)
    with pytest.raises(ValueError, match='none of 2 answers got a reward'):
        collect(Plays(floods), Judge(), group_size=2)


def test_a_step_done_again_hears_the_same(tmp_path):
    """Environments that were late, and are quick the second time, are as late as they were."""
    ledger = rewards.Ledger(tmp_path)
    first = collect(Plays(good, hangs), Judge(), page=ledger.page('rl', 1, 1), group_size=2)
    again = Plays(good)
    second = collect(again, Judge((5.0,)), page=ledger.page('rl', 1, 1), group_size=2)
    assert again.asked == 0 and first.metrics == second.metrics
    for name in ('tokens', 'mask', 'rewards', 'finish', 'segment', 'advantages'):
        np.testing.assert_array_equal(
            getattr(first.batch, name), getattr(second.batch, name), err_msg=name
        )
    fresh = collect(again, Judge(), page=ledger.page('rl', 2, 2), group_size=2)
    assert again.asked == 4 and fresh.batch.finish.tolist() == [Finish.DONE] * 2


def test_answers_with_turns(tmp_path):
    """Evaluation plays, too: the last turn is the answer; a failed environment has no marks."""
    plays = Plays(good, fails)
    problems = items(plays, 2)
    judge = Judge((1.0,))
    kw = dict(prompt_width=2, on_error='record', page=rewards.Ledger(tmp_path).page('e', 0, 0))
    arguments = (MODEL, chain(V), problems, judge, jax.random.key(0), STOP)
    found = draw(*arguments, engine=ENGINE, **kw)
    assert found.texts == [[TOKENIZER.decode(LAST)]] * 2 and found.tokens.tolist() == [[11]] * 2
    assert found.marks[0] == 1 and np.isnan(found.marks[1])
    assert found.finish.tolist() == [[Finish.DONE], [Finish.ENV_FAILED]]
    shown = turns.spelled(found.turns[1][0], TOKENIZER)
    assert shown[0] == {'turn': '234', 'observation': '7', 'reward': 0.75}
    assert shown[1]['finish'] == 'env_failed' and 'KeyError' in shown[1]['error']
    with pytest.raises(ValueError, match='items have an environment; legal is engine'):
        draw(*arguments, batch=2, **kw)


def test_describe_is_silent_without_turns():
    assert turns.describe([[], []]) == {} and turns.timings([[]], []) == {}
    cut = [Turn((1, 2), finish=Finish.LENGTH)]
    found = turns.describe([cut])
    assert found['turns/mean'] == 1 and 'turns/observed' not in found
    assert turns.spelled(cut, TOKENIZER) == [{'turn': '0', 'finish': 'length'}]


# ============================================================================ the config


def get_config(argument, **changes):
    path = ROOT / 'configs' / 'turns.py'
    spec = importlib.util.spec_from_file_location('turns_config', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(argument).to_dict()
    for name, value in changes.items():
        node = config
        *sections, last = name.split('__')
        for section in sections:
            node = node[section]
        node[last] = value
    return config


@pytest.mark.parametrize('task', ['calculator', 'guessing'])
def test_the_config_says_what_its_docstring_does(task):
    setup = recipe.prepare(get_config(f'task={task},tiny=true'))
    assert setup.width == setup.config.rollout.engine.size and setup.task.played
    assert setup.needed >= {'segment', 'segment_rewards'}
    outcome = recipe.prepare(get_config(f'task={task},tiny=true,algorithm=grpo'))
    assert not outcome.needed
    # Demonstrations of the whole task fit its rows, and its limits of tokens.
    whole = get_config(f'task={task}')
    config = data.TaskConfig(**{**whole['task'], 'size': 500, 'held_out': 8})
    found = data.make_task(config, data.ascii_tokenizer())
    batch = data.supervised(found.train, setup.model.tokenizer, whole['rollout']['engine']['size'])
    assert batch.mask.sum(axis=1).max() <= whole['sampling']['max_new_tokens']


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(rollout__engine=None), 'config.rollout.engine.size is missing'),
        (dict(rollout__engine__size=None), 'config.rollout.engine.size is missing'),
        (dict(rollout__engine__size=5), 'legal is above the longest prompt, 6 tokens'),
        (dict(sampling__stop_ids=()), 'stop_ids is .*without ids that end turns'),
        (dict(task__environment='calculater'), 'Did you mean `calculator`'),
        (dict(task__kw=dict(call=3)), 'no argument `call`. Did you mean `calls`'),
    ],
)
def test_errors_of_the_config(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        recipe.prepare(get_config('task=calculator,tiny=true', **changes))


def test_errors_of_the_argument():
    for text, message in (('task=guess', '`guessing`'), ('algorithm=gspo_tok', '`gspo_token`')):
        with pytest.raises(ValueError, match=f'Did you mean {message}'):
            get_config(text)


WARM = dict(
    batch=64, max_steps=600, every=20, accuracy=(0.1, 1.0), optimizer=dict(learning_rate=1e-2)
)


@pytest.mark.slow
def test_a_run_with_turns_goes_on_with_the_same_bytes(tmp_path, capsys):
    """Environments that are slow, late or fail by chance, and rows that are parked meanwhile."""
    config = get_config('task=guessing,tiny=true', warm_start=WARM, steps=3)
    config['task']['environment'] = 'tests.turn_environments.moody'
    config['rollout']['engine'].update(time_limit=2.0, grace=0.001)
    check_resume(config, tmp_path, [1], capsys)
    records = metrics.read(tmp_path / 'whole' / 'metrics.jsonl')
    assert not pages.undocumented_of(tmp_path / 'whole')
    steps = [r for r in records if r['stage'] == 'rl']
    assert sum(r['turns/late'] + r['turns/failed'] + r['turns/overflow'] for r in steps) > 0
    assert all(r['turns/mean'] > 1 for r in steps)
    samples = metrics.read(tmp_path / 'whole' / 'samples.jsonl')
    assert any('observation' in turn for s in samples for turn in s['turns'])
