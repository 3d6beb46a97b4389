"""Signs that a run goes wrong: each by made-up numbers on both sides of its bound; the command."""

import json
import pathlib

import numpy as np
import pytest

from policyopt import batches, calibrate, metrics, runs, signs
from policyopt.workdir import RECORDS, SETTINGS

STEPS = 40  # start and end are 5 steps each
ROUTING = dict(replay=dict(routing='rollout'))


def make(config=(), **series):
    """A run whose metrics at RL steps 1, 2, ... are the given numbers, or one number at each."""
    length = max((len(x) for x in series.values() if np.ndim(x)), default=STEPS)
    values = {n: np.broadcast_to(np.asarray(x, float), length) for n, x in series.items()}
    records = [
        {'stage': 'rl', 'step': i + 1, **{n: float(x[i]) for n, x in values.items()}}
        for i in range(length)
    ]
    return runs.Run('run', pathlib.Path('run'), dict(config), records, [], [])


def ramp(first, last):
    """From `first` over the first 5 steps to `last` over the last 5."""
    return np.concatenate(
        [np.full(5, first), np.linspace(first, last, STEPS - 10), np.full(5, last)]
    )


def test_ends_are_a_tenth_or_five_steps():
    assert [signs.window(n) for n in (1, 4, 5, 10, 49, 60, 300)] == [1, 4, 5, 5, 5, 6, 30]
    series = runs.Series(np.arange(60.0), np.arange(60.0))
    assert (signs.start(series), signs.end(series)) == (2.5, 56.5)
    few = runs.Series(np.arange(9.0), np.arange(9.0))
    assert signs.start(few) is None and signs.end(few) == 6.0


@pytest.mark.parametrize(
    ('series', 'verdict', 'value', 'text'),
    [
        (dict(length=ramp(100, 190), truncated=0.01, reward=0.5), signs.FINE, 1.9, '1.90 times'),
        (dict(length=ramp(100, 210), truncated=0.01, reward=0.5), signs.WARNING, 2.1, 'not up'),
        (dict(length=ramp(100, 210), reward=ramp(0.2, 0.6)), signs.FINE, 2.1, 'from 0.2 to 0.6'),
        (dict(length=ramp(100, 110), truncated=ramp(0, 0.06)), signs.WARNING, 1.1, '6.0% of ans'),
        (dict(length=[9.0] * 4, truncated=0.04), signs.FINE, 0.04, 'growth needs 10 steps'),
        (dict(length=[9.0] * 4, truncated=0.2), signs.WARNING, 0.2, '20.0% of answers cut off'),
        (dict(entropy=1.0), signs.UNKNOWN, None, '`length` not recorded'),
    ],
)
def test_length_explosion(series, verdict, value, text):
    found = signs.length(make(**series))
    assert found.verdict == verdict and text in found.text
    assert found.value == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ('entropy', 'verdict', 'value'),
    [(ramp(2.0, 0.42), signs.FINE, 0.21), (ramp(2.0, 0.38), signs.WARNING, 0.19)],
)
def test_entropy_collapse(entropy, verdict, value):
    found = signs.entropy(make(entropy=entropy))
    assert (found.verdict, found.value) == (verdict, pytest.approx(value))
    assert found.marks[0][0] == pytest.approx(0.4)
    assert signs.entropy(make(entropy=[1.0] * 9)).verdict == signs.UNKNOWN
    assert 'not recorded' in signs.entropy(make(length=1.0)).text


@pytest.mark.parametrize(
    ('config', 'frozen', 'verdict', 'value'),
    [
        (dict(minibatches=4), 0.03, signs.WARNING, 0.04),  # of 3 updates in 4
        (dict(minibatches=4), 0.0376, signs.FINE, 0.0501),
        (dict(minibatches=2, epochs=2), 0.112, signs.FINE, 0.149),
        (dict(minibatches=2, epochs=2), 0.114, signs.WARNING, 0.152),
        (dict(minibatches=4, asynchronous=dict(staleness=1)), 0.03, signs.WARNING, 0.03),
        ({}, 0.14, signs.FINE, 0.14),
        (dict(minibatches=1), 0.1, signs.UNKNOWN, None),
        (dict(minibatches=4), 0.0, signs.UNKNOWN, None),
    ],
)
def test_clip_share(config, frozen, verdict, value):
    found = signs.clip_share(make(config, **{'policy/frozen': frozen}))
    assert found.verdict == verdict
    assert found.value == (None if value is None else pytest.approx(value, rel=0.01))
    if config == dict(minibatches=4) and value:  # drawn where the recorded share would be
        assert [bound for bound, _ in found.marks] == pytest.approx([0.0375, 0.1125])


def test_effective_sample_size():
    names = ('ess_old/token', 'ess_behavior/token', 'ess_old/sequence')
    found = signs.effective_sample(make(**dict(zip(names, (0.9, 0.6, 0.1), strict=True))))
    assert (found.verdict, found.value) == (signs.FINE, pytest.approx(0.6))
    assert '10.0% of answers' in found.text
    found = signs.effective_sample(make(**dict(zip(names, (0.45, 0.6, 0.1), strict=True))))
    assert (found.verdict, found.value) == (signs.WARNING, pytest.approx(0.45))


def test_effective_sample_size_of_a_batch():
    """Where a run did not record it: ratios 1 and 3 in the second minibatch, (1 + 3)^2 / 2 / 10."""
    batch = dict(
        logp_new=np.log([[1.0, 3.0], [9.0, 1.0]]),
        logp_old=np.zeros((2, 2)),
        mask=np.array([[1, 1], [1, 0]]),
        advantages=np.ones((2, 2)),
        minibatch=np.array([2, 1]),
    )
    found = signs.effective_sample(make(length=1.0), batches.check_batch(batch))
    assert (found.verdict, found.value) == (signs.FINE, pytest.approx(0.8))
    assert 'saved batch' in found.text
    assert signs.effective_sample(make(length=1.0)).verdict == signs.UNKNOWN


def test_expert_drift():
    names = ('moe/replay_agreement', 'moe/replayed')
    for agreement, verdict in ((0.91, signs.FINE), (0.89, signs.WARNING)):
        found = signs.expert_drift(make(**dict(zip(names, (agreement, 0.9), strict=True))))
        assert (found.verdict, found.value) == (verdict, pytest.approx(1 - agreement))
    # Nothing replayed: the mean of nothing, 0, is no agreement.
    nothing = signs.expert_drift(make(**dict(zip(names, (0.0, 0.0), strict=True))))
    assert (nothing.verdict, nothing.value) == (signs.UNKNOWN, None)
    assert 'dense' in signs.expert_drift(make(length=1.0)).text


@pytest.mark.parametrize(
    ('config', 'series', 'verdict', 'value'),
    [
        ({}, {'replay/support': 1.0, 'length': 4.0}, signs.FINE, 1.0),
        ({}, {'replay/support': 0.9, 'length': 4.0}, signs.WARNING, 0.9),
        ({}, {'moe/replayed': 0.75, 'length': 4.0}, signs.FINE, 1.0),
        ({}, {'moe/replayed': 0.65, 'length': 4.0}, signs.WARNING, 0.9),
        (ROUTING, {'moe/replayed': 0.0, 'length': 4.0}, signs.WARNING, 0.25),
        ({}, {'moe/replayed': 0.0, 'length': 4.0}, signs.UNKNOWN, None),
        (dict(sampling=dict(max_new_tokens=4, top_p=0.9)), {'length': 4.0}, signs.WARNING, 0.0),
        (dict(sampling=dict(max_new_tokens=4)), {'length': 4.0}, signs.UNKNOWN, None),
    ],
)  # fmt: skip
def test_replay_share(config, series, verdict, value):
    found = signs.replay_share(make(config, **series))
    assert found.verdict == verdict
    assert found.value == (None if value is None else pytest.approx(value))


def test_every_sign_has_its_row_in_the_docs():
    names = [sign.name for sign in signs.SIGNS]
    assert len(set(names)) == 6
    page = (pathlib.Path(__file__).parents[1] / 'docs' / 'calibrating.md').read_text()
    for sign, found in signs.judge(make()):
        row = f'| {sign.bound} | {sign.source} | {sign.advice} |'
        assert f'| {sign.title} | `{sign.name}.png` |' in page and row in page
        assert found.verdict == signs.UNKNOWN and found.value is None


def ailing(folder):
    """A folder of a run with all six warnings."""
    folder.mkdir(parents=True)
    config = dict(
        minibatches=4,
        algorithm_kw=dict(low=0.1, high=0.17),
        rollout=dict(group_size=2),
        sampling=dict(max_new_tokens=8, top_p=0.9),
    )
    (folder / SETTINGS).write_text(json.dumps(config))
    run = make(
        length=ramp(2, 8),
        truncated=ramp(0, 0.5),
        reward=0.5,
        entropy=ramp(1, 0.01),
        **{
            'policy/frozen': 0.6,
            'ess_old/token': 0.3,
            'moe/replay_agreement': 0.5,
            'moe/replayed': 0.4,
        },
    )
    for record in run.records:
        values = {k: v for k, v in record.items() if k not in ('stage', 'step')}
        metrics.append(folder / RECORDS, 'rl', record['step'], values)
    return folder


def test_the_command_names_signs_with_bounds_advice_and_figures(tmp_path, capsys):
    folder = ailing(tmp_path / 'run')
    rng = np.random.default_rng(0)
    batches.save_batch(
        folder / 'batches' / 'batch_000040.npz',
        logp_new=0.1 * rng.normal(size=(40, 3)),
        logp_old=np.zeros((40, 3)),
        mask=np.ones((40, 3)),
        advantages=np.where(np.arange(40) % 2, 1.0, -1.0),
        minibatch=np.full(40, 2),
        group=np.arange(40) // 4,
        positive=np.arange(40) % 2,
    )
    assert calibrate.main([str(folder)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    found = [line.split(': ')[1] for line in lines if line.startswith('warning: ')]
    assert [x for x in found if x in {s.title for s in signs.SIGNS}] == [
        s.title for s in signs.SIGNS
    ]
    assert 'clip share: 80.0% of tokens with an advantage, in updates 2 to 4 of a step' in out
    for sign in signs.SIGNS:
        assert (
            f'  warns: {sign.bound} ({sign.source})' in lines and f'  try: {sign.advice}' in lines
        )
        path = folder / 'calibration' / f'{sign.name}.png'
        assert (f'  figure: {path}' in lines) == path.is_file()
    drawn = sorted(p.stem for p in (folder / 'calibration').iterdir())
    assert drawn == sorted(['clip_range', *(s.name for s in signs.SIGNS)])
    assert any(line.replace('│', ' ').split()[:2] == ['0.17', '*'] for line in lines)
    assert "the run's 2 leaves 0.5" in out  # of prompts solved half the time


def test_a_run_without_a_batch_and_another_folder_for_figures(tmp_path, capsys):
    folder = tmp_path / 'run'
    folder.mkdir()
    for step, value in enumerate(ramp(1, 0.01), 1):
        metrics.append(folder / RECORDS, 'rl', step, {'entropy': value})
    assert calibrate.main([str(folder), f'--figures={tmp_path / "out"}']) == 0
    out = capsys.readouterr().out
    assert 'no batch saved yet' in out and 'warning: entropy collapse' in out
    assert 'not judged: clip share: `policy/frozen` not recorded' in out
    assert not (folder / 'calibration').exists()
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['entropy.png']


def test_a_gain_within_the_noise_of_rewards_is_none():
    """Rewards of .2 and .8 in turn: the ends differ by .12, two standard errors of that are .42."""
    noise = np.tile([0.2, 0.8], STEPS // 2)
    for gain, verdict in ((0.2, signs.WARNING), (0.4, signs.FINE)):
        rewards = noise + ramp(0.0, gain)
        found = signs.length(make(length=ramp(100, 210), reward=rewards))
        assert found.verdict == verdict, found.text
    assert signs.margin(runs.Series(np.arange(STEPS), noise)) == pytest.approx(0.4157, abs=1e-3)
    assert 'reward not recorded' in signs.length(make(length=ramp(100, 210))).text


def test_marked_ranges_are_arguments_of_the_algorithm_given_or_not():
    def own(name, **kw):
        algorithm = f'policyopt.algorithms.{name}'
        return calibrate.own_range(make(dict(algorithm=algorithm, algorithm_kw=kw)))

    assert own('gspo') == [3e-4, 4e-4] and own('gspo', low=0.1) == [4e-4, 0.1]
    assert own('grpo', beta=0.0) == [0.2] and own('grpo', eps=0.3) == [0.3]
    assert own('gmpo') == own('sapo') == calibrate.own_range(None) == []  # nats; no clip
    elsewhere = dict(algorithm='nowhere.mine', algorithm_kw=dict(eps=0.1))
    assert calibrate.own_range(make(elsewhere)) == [0.1]
