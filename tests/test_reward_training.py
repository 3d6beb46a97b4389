"""Reward models trained on preferences: alone, by the command, and in runs that go on."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from policyopt import (
    metrics,
    preferences,
    recipe,
    reward_model,
    reward_training,
    train,
    train_reward,
)
from policyopt.data import Item
from policyopt.preferences import PreferencesConfig
from policyopt.rewards.scored import read_calibration
from tests import pages
from tests.runs import finished_run  # noqa: F401, a fixture
from tests.test_quickstart import ROOT
from tests.test_resume import killed_after, same_end
from tests.test_reward_model import AUDITED, MODEL, PREFERENCES, TOKENIZER, config

CONFIG = PreferencesConfig(
    reward_training.optimizer_lib.OptimizerConfig(learning_rate=2e-2), batch=16, epochs=8
)


def compared(flip=0.0):
    """Answers of which a larger last digit is better: 40 problems, 4 answers each."""
    rng = np.random.default_rng(0)
    items = [Item(str(i), tuple(TOKENIZER.encode(str(i))), '', {}) for i in range(40)]
    digits = np.array([rng.permutation(10)[:4] for _ in items])
    ids = [[[*TOKENIZER.encode(str(d)), TOKENIZER.eos_id] for d in row] for row in digits]
    answers = _Answers(ids, digits.astype(np.float32))
    return reward_training.compare(
        items, answers, PreferencesConfig(CONFIG.optimizer, flip=flip), 0
    )


class _Answers:
    def __init__(self, ids, rewards):
        self.ids, self.rewards = ids, rewards


def test_pairs_keep_problems_apart():
    found = compared(flip=0.25)
    sides = [{p.problem for p in side} for side in (found.train, found.held_out)]
    assert not sides[0] & sides[1] and (len(sides[0]), len(sides[1])) == (30, 10)
    turned = [found.values[p[:2]] < found.values[p[0], p[2]] for p in found.train]
    assert sum(turned) == round(0.25 * len(turned)) and len(turned) == 120
    assert all(found.values[p[:2]] > found.values[p[0], p[2]] for p in found.held_out)
    key = found.held_out[0][:2]
    assert found.rows[key][-1] == TOKENIZER.eos_id and found.side[key]


def test_training_learns_what_is_preferred(tmp_path):
    """From scores that say nothing (log 2) to most held-out pairs; written and read again."""
    found, seen = compared(), []
    params = jax.jit(MODEL.init)(jax.random.key(0))
    before = jax.tree.map(np.asarray, params)
    trained = reward_training.train(
        MODEL, params, found, CONFIG, 0, lambda step, values: seen.append((step, values))
    )
    jax.tree.map(np.testing.assert_array_equal, params, before)
    steps = [values for _, values in seen if 'loss' in values]
    assert len(steps) == 8 * 8 and steps[0]['loss'] == pytest.approx(np.log(2), abs=0.02)
    assert np.mean([v['loss'] for v in steps[-8:]]) < 0.4
    assert not any(v['skipped'] for v in steps)
    last = trained.epochs[-1]
    assert len(trained.epochs) == 8 and last.accuracy > 0.8 and last.low > 0.6
    assert seen[-1][1]['held_out/accuracy'] == last.accuracy
    reward_training.save(trained, tmp_path)
    again = reward_model.load(tmp_path)
    rows = [found.rows[key] for key in found.rows if found.side[key]]
    got = reward_model.scores(again.model, again.params, rows, 16)
    known = read_calibration(tmp_path)
    assert (known.mean, known.std) == pytest.approx((got.mean(), got.std()), abs=1e-5)
    true = [found.values[key] for key in found.rows if found.side[key]]
    assert known.slope == pytest.approx(np.polyfit(got, true, 1)[0], rel=1e-3)
    assert json.loads((tmp_path / 'preferences.json').read_text())[-1]['pairs'] == last.pairs
    scores = reward_training.score_all(again.model, again.params, found, 32)
    assert preferences.agreement(found.held_out, scores, 0) == last


def test_answers_without_a_difference_are_no_preferences():
    items = [Item(str(i), (2,), '', {}) for i in range(4)]
    same = _Answers([[[3], [4]]] * 4, np.ones((4, 2), np.float32))
    with pytest.raises(ValueError, match='always right, or always wrong'):
        reward_training.compare(items, same, CONFIG, 0)


@pytest.mark.slow
def test_the_command_trains_and_calibrates(finished_run, tmp_path, capsys):  # noqa: F811
    def command(*more):
        sizes = ['--problems=40', '--answers=4', '--slots=16', '--temperature=1.5']
        return train_reward.main([str(finished_run), *sizes, *more])

    out = tmp_path / 'reward'
    assert command(f'--out={out}', '--batch=8', '--learning_rate=1e-3') == 0
    said = capsys.readouterr().out
    assert 'the better answer scores higher in' in said and 'held out' in said
    records = metrics.read(out / 'metrics.jsonl')
    assert (
        records[-1]['held_out/accuracy']
        == json.loads((out / 'preferences.json').read_text())[-1]['accuracy']
    )
    first = read_calibration(out)
    (out / 'calibration.json').unlink()
    assert command(f'--calibrate={out}') == 0
    second = read_calibration(out)
    assert second.rows == 160 > first.rows and second.slope is not None
    for more, message in (
        ([f'--calibrate={out}', '--epochs=2'], '--epochs has no effect with --calibrate'),
        ([f'--out={tmp_path / "x"}', '--template={prompt}'], '--template has no effect'),
        ([f'--out={out}'], 'is there already; name a new folder'),
        ([f'--calibrate={finished_run}'], 'is no reward model: no config.json of a model'),
    ):
        assert command(*more) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_four_models_goes_on_with_the_same_bytes(tmp_path, capsys):
    """Actor, critic, reward and reference; rewards of steps, which GAE reads at their tokens."""
    base = config()
    stepped = {**AUDITED['reward'], 'per': 'step', 'total': 'mean'}
    c = config(
        algorithm='policyopt.algorithms.ppo_clip',
        algorithm_kw=dict(segment_weight=0.5, reference_beta=0.1),
        reward_kw=dict(reward=stepped, truth='graded'),
        preferences=PREFERENCES,
        rollout={**base['rollout'], 'steps': dict(marker='1')},
        critic=dict(own=True, optimizer=dict(learning_rate=1e-3)),
        checkpoint=dict(every=1, keep=9),
        steps=3,
    )
    workdir = tmp_path / 'whole'
    train.run(train.start(c, workdir), workdir)
    assert 'reward model: right on' in capsys.readouterr().out
    records = metrics.read(workdir / 'metrics.jsonl')
    assert not pages.undocumented_of(workdir)
    stages = list(dict.fromkeys(r['stage'] for r in records))
    assert stages == ['warm_start', 'evaluation', 'preferences', 'rl', 'result']
    for step in (r for r in records if r['stage'] == 'rl'):
        assert step['rewards/gap'] == pytest.approx(step['rewards/proxy'] - step['rewards/truth'])
        assert step['reward'] == pytest.approx(step['rewards/proxy'], abs=1e-6)
        assert step['accuracy'] == pytest.approx(step['rewards/truth'])
        assert 1 <= step['rewards/steps'] <= 4 and step['kl_reference/k3'] >= 0
    folder = killed_after(workdir, tmp_path / 'from_1', 1)
    job = train.start(c, folder)
    assert job.resumed
    train.run(job, folder)
    same_end(folder, workdir, 3)


def rlhf(argument):
    spec = importlib.util.spec_from_file_location('rlhf', ROOT / 'configs' / 'rlhf.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(argument).to_dict()


@pytest.mark.parametrize('algorithm', ['ppo_clip', 'ppo_penalty', 'trpo'])
def test_the_config_has_four_models(algorithm):
    setup = recipe.prepare(rlhf(f'algorithm={algorithm},beta=0.3,tiny=true'))
    assert setup.critic_model is not None and 'logp_ref' in setup.needed and setup.judge.own
    assert setup.truth is not None and setup.measure is setup.truth
    natural = setup.algorithm.update.step is not None
    assert natural == (algorithm == 'trpo') == (setup.config.critic.fits is not None)
    assert ('beta' in setup.algorithm.controllers) == (algorithm == 'ppo_penalty')
    with pytest.raises(ValueError, match="algorithm is 'grpo'; legal are ppo_clip"):
        rlhf('algorithm=grpo')


def test_a_critic_is_trained_by_someone():
    trpo, clip = rlhf('algorithm=trpo,tiny=true'), rlhf('tiny=true')
    del trpo['critic']['fits']
    with pytest.raises(ValueError, match='leave the critic alone: nothing would train it'):
        recipe.prepare(trpo)
    clip['critic']['fits'] = 3
    with pytest.raises(ValueError, match='critic.fits has no effect'):
        recipe.prepare(clip)


@pytest.mark.slow
def test_trpo_learns_from_a_reward_model_with_a_critic_that_is_fitted(tmp_path):
    c = rlhf('algorithm=trpo,tiny=true')
    c['steps'] = 3
    train.run(train.start(c, tmp_path / 'run'), tmp_path / 'run')
    steps = [r for r in metrics.read(tmp_path / 'run' / 'metrics.jsonl') if r['stage'] == 'rl']
    assert all(0 < r['trust_region/kl'] <= 0.0101 for r in steps)
    assert all(np.isfinite(r['rewards/gap']) and not r['skipped'] for r in steps)
    assert all(r['value/loss'] > 0 and r['value/update_norm'] > 0 for r in steps)
