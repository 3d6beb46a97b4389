"""Long answers by VAPO and VC-PPO: the task, the parts that can be left out, the experiment."""

import json
from string import ascii_lowercase as LETTERS

import numpy as np
import pytest

from configs import long_answers
from experiments import value_based
from policyopt import data, environments, recipe
from policyopt.rewards import Verdict
from policyopt.rewards.spec import build
from tests.test_critic import numpy_bins

ASCII = data.ascii_tokenizer()


def test_walks_are_long_and_judged_by_their_end(tmp_path):
    scenario = environments.walk()
    score = build(scenario.scorer)
    ends = set()
    for problem in scenario.problems(60, 0):
        number, begun = problem.prompt.split(':')
        text = begun + problem.answer
        assert len(problem.prompt) == 14 and len(problem.answer) == 105
        assert text[::5] == LETTERS[:23]
        assert text.count('+') - text.count('-') == int(number) and len(text) == 23 * 5

        def judge(answer, hidden=problem.hidden):
            return score(answer, hidden)

        higher, lower = (problem.answer.replace(*x, 1) for x in (('-', '+'), ('+', '-')))
        assert judge(problem.answer) == judge(higher) == 1 and judge(lower) == 0
        for wrong in ('', higher[:-1], higher + '+', higher[5:], higher.replace('d', 'e')):
            assert judge(wrong) == 0
        ends.add(int(number))
    assert min(ends) >= -30 and max(ends) <= 30 and len(ends) > 15
    config = data.TaskConfig(
        environment='walk',
        kw=dict(blocks=3, begun=1, reach=4),
        size=80,
        held_out=4,
        prompt_width=9,
        data_dir=str(tmp_path),
    )
    task = data.make_task(config, ASCII)
    item = task.train[0]
    assert not task.played and item.play is None and task.longest_answer == 11
    assert task.score(item.answer, item.entry) == 1
    batch = data.supervised([item], ASCII, 20)
    n = len(item.ids)
    assert ASCII.decode(batch.tokens[0, n : n + 10]) == item.answer and batch.mask.sum() == 11
    with pytest.raises(ValueError, match='stops is .* but a scenario without environment has one'):
        environments.Scenario(scenario.problems, stops='>')


CHANGES = {  # of VAPO's config, without a part: field -> value
    'pretraining': {'critic.pretrain': None},
    'decoupled_gae': {'algorithm_kw.critic_lam': None},
    'adaptive_lambda': {'algorithm_kw.alpha': None, 'algorithm_kw.lam': 0.95},
    'clip_higher': {'algorithm_kw.high': 0.2},
    'token_loss': {'algorithm_kw.per_token': False},
    'nll': {'algorithm_kw.nll': 0.0},
    'group_sampling': {'rollout.prompts': 128, 'rollout.group_size': 1},
}


def field(config, path):
    for name in path.split('.'):
        config = config.get(name)
    return config


def test_each_part_is_a_switch_that_changes_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv('POLICYOPT_DATA_DIR', str(tmp_path))
    assert set(CHANGES) == set(long_answers.PARTS['vapo'])
    whole = long_answers.get_config().to_dict()
    for part, changes in CHANGES.items():
        config = long_answers.get_config(f'without={part}').to_dict()
        for path, value in changes.items():
            assert field(config, path) == value != field(whole, path)
            section, name = path.split('.')
            config[section][name] = whole[section].get(name)
        assert config == whole
    every = long_answers.get_config('without=' + '+'.join(CHANGES)).to_dict()
    for changes in CHANGES.values():
        assert all(field(every, path) == value for path, value in changes.items())
    both = 'pretraining+decoupled_gae'
    for argument in ('without=' + '+'.join(CHANGES), f'algorithm=vc_ppo,without={both}'):
        setup = recipe.prepare(long_answers.get_config(f'tiny=true,{argument}').to_dict())
        assert setup.config.critic.pretrain is None and setup.config.rollout.group_size == 1
        assert setup.config.algorithm_kw['critic_lam'] is None


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('without=nl', 'the `without` of the config has no `nl`. Did you mean `nll`'),
        ('algorithm=vc_ppo,without=nll', 'without=nll has no effect: vc_ppo has no such part'),
        ('without=nll+pretraining+nll', 'without names nll twice'),
        ('algorithm=vapoo', 'has no `vapoo`. Did you mean `vapo`'),
    ],
)
def test_switches_that_say_nothing_are_refused(argument, message):
    with pytest.raises(ValueError, match=message):
        long_answers.get_config(argument)


def test_contradictions_in_the_config_itself_are_refused():
    def change(**kwargs):
        config = long_answers.get_config('tiny=true').to_dict()
        config['algorithm_kw'].update(kwargs)
        return config

    with pytest.raises(ValueError, match='alpha=0.05 and lam=0.95: legal is one of them'):
        recipe.prepare(change(lam=0.95))
    config = change()
    config.update(algorithm='policyopt.algorithms.grpo', algorithm_kw={})
    with pytest.raises(ValueError, match='config.critic has no effect'):
        recipe.prepare(config)


def test_profile_against_loops():
    rng = np.random.default_rng(0)
    mask = (np.arange(14) >= 2) & (np.arange(14) < rng.integers(6, 15, (20, 1)))
    rewards = rng.integers(0, 2, 20).astype(np.float32)
    values = (rng.random(mask.shape) * rewards[:, None]).astype(np.float32)
    advantages = rng.normal(size=mask.shape).astype(np.float32)
    found = value_based.profile(values, advantages, rewards, mask, bins=4)
    place = numpy_bins(mask, 4)
    for side, sign in (('right', 1), ('wrong', 0)):
        for i in range(4):
            rows = [advantages[b][place[b] == i].mean() for b in range(20) if rewards[b] == sign]
            at = found['advantage'][side]
            assert at['mean'][i] == pytest.approx(np.mean(rows), rel=1e-5)
            assert at['half'][i] == pytest.approx(
                1.96 * np.std(rows, ddof=1) / len(rows) ** 0.5, rel=1e-5
            )
    returns = np.broadcast_to(rewards[:, None], mask.shape)
    want = 1 - np.var((returns - values)[place == 2]) / np.var(returns[place == 2])
    assert found['explained'][2] == pytest.approx(want, rel=1e-4)
    assert found['right'] == rewards.sum() and found['answers'] == 20


def even():
    """A reward that some answers of any policy earn: an even number of characters."""

    def reward(text, tokens, example):
        return Verdict(float(len(text) % 2 == 0), 'even' if len(text) % 2 == 0 else 'odd')

    return reward


def test_lines_name_their_parts():
    assert value_based.argument_of('vapo-nll-pretraining') == (
        'algorithm=vapo,without=nll+pretraining'
    )
    assert value_based.words('vapo-token_loss') == 'VAPO, no token loss'


@pytest.mark.slow
def test_a_toy_of_the_experiment(tmp_path, monkeypatch):
    """Pretraining to its rule, the critic before and after on the same answers; found again."""
    monkeypatch.setenv('POLICYOPT_DATA_DIR', str(tmp_path / 'data'))
    full = long_answers.get_config

    def toy(argument):
        config = full(f'{argument},tiny=true')
        config.warm_start = dict(
            batch=8, max_steps=1, accuracy=(1e-9, 1.0), optimizer=dict(learning_rate=1e-3)
        )
        config.reward, config.reward_kw = 'tests.test_value_based.even', {}
        config.judge = dict(workers=0)
        return config

    monkeypatch.setattr(value_based.config_lib, 'get_config', toy)
    folders = [
        value_based.run(line, 0, tmp_path, steps=5, rounds=2)
        for line in ('vapo', 'vapo-pretraining')
    ]
    found = json.loads((folders[0] / value_based.PROFILE).read_text())
    assert found['before']['answers'] == 16 and 0 < found['before']['right'] < 16
    assert found['before']['value'] != found['after']['value']
    assert not (folders[1] / value_based.PROFILE).exists()
    runs = [value_based.runs.read(folder) for folder in folders]
    steps = runs[0].series('value/settled', 'value_pretraining').values
    assert steps[-1] == 1 or len(steps) == 4
    table = value_based.numbers([runs[0]])
    assert table['pretraining_steps'] == [len(steps)] and 'pretraining_steps' not in (
        value_based.numbers([runs[1]])
    )
    before = (folders[0] / 'metrics.jsonl').read_bytes()
    value_based.run('vapo', 0, tmp_path, steps=5, rounds=2)
    assert (folders[0] / 'metrics.jsonl').read_bytes() == before
    value_based.draw(
        tmp_path / 'figure.png',
        value_based.profile_of(folders[:1]),
        {'vapo': runs[:1], 'vapo-pretraining': runs[1:]},
    )
    assert (tmp_path / 'figure.png').stat().st_size > 10_000
