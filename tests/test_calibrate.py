"""Calibration tools: quantiles, rates and group sizes by hand; batch files; the command."""

import os

import numpy as np
import pytest

from policyopt import batches, calibrate, calibration


def _batch(excess, advantages, lengths=None, width=4, **fields):
    """Rows whose ratio minus 1 is `excess`, spread unevenly over the row's tokens."""
    rows = len(excess)
    lengths = np.full(rows, width) if lengths is None else np.asarray(lengths)
    mask = np.arange(width) < lengths[:, None]
    wiggle = np.where(mask, np.linspace(-0.3, 0.3, width), 0)
    wiggle -= np.where(mask, wiggle.sum(-1, keepdims=True) / np.maximum(lengths, 1)[:, None], 0)
    new = np.where(mask, np.log1p(np.asarray(excess, float))[:, None] + wiggle, np.nan)
    old = np.where(mask, 0.0, np.inf)
    return dict(logp_new=new, logp_old=old, mask=mask, advantages=np.asarray(advantages, float)) | {
        name: np.asarray(value) for name, value in fields.items()
    }


HIGH, LOW = [0.031, 0.01, 0.05, 0.02, 0.04], [0.3, 0.1, 0.2]


def _by_hand():
    """Five rows with A > 0, three with A < 0, and rows that must not count."""
    excess = [*HIGH, *(-e for e in LOW), 9.0, 0.0, 0.0, 7.0]
    advantages = [1, 2, 0.5, 1, 1, -1, -1, -2, 0, 1, -1, 1]
    lengths = [4, 1, 2, 4, 3, 1, 4, 2, 4, 4, 4, 0]
    minibatch = [2, 2, 3, 4, 2, 3, 3, 2, 2, 1, 1, 2]
    return _batch(excess, advantages, lengths, minibatch=minibatch)


def test_quantiles_by_hand_at_sequence_level():
    found = calibration.epsilon(_by_hand(), quantile=0.1)
    # .9 quantile of 5 values is at place 3.6, of 3 values at 1.8
    np.testing.assert_allclose(found.high.eps, 0.04 + 0.6 * 0.01)
    np.testing.assert_allclose(found.low.eps, 0.2 + 0.8 * 0.1)
    assert (found.high.responses, found.low.responses, found.rows) == (5, 3, 9)
    found = calibration.epsilon(_by_hand(), quantile=0.5)
    np.testing.assert_allclose((found.low.eps, found.high.eps), (0.2, 0.031))


def test_rates_by_hand_at_sequence_level():
    found = calibration.epsilon(_by_hand())
    # above .025 on the high side: rows of .031, .05, .04, with 4, 2 and 3 of 14 tokens
    np.testing.assert_allclose(found.high.rate(0.025), 3 / 5)
    np.testing.assert_allclose(found.high.rate(0.025, 'token'), 9 / 14)
    # above .15 on the low side: .3 and .2, with 1 and 2 of 7 tokens
    np.testing.assert_allclose(found.low.rate([0.15, 0.5, 1e-6], 'response'), [2 / 3, 0, 1])
    np.testing.assert_allclose(found.low.rate([0.15, 0.5, 1e-6], 'token'), [3 / 7, 0, 1])
    # At the suggestion, the share q is clipped (here as near as 5 values allow).
    np.testing.assert_allclose(found.high.rate(found.high.eps), 1 / 5)


def test_a_ratio_on_the_bound_is_not_clipped():
    excess, ones = np.array([-0.5, 0.25, 0.5]), np.ones(3)
    side = calibration.Side(0.25, 0.25, (0.25, 0.5), 3, excess, ones, ones)
    np.testing.assert_allclose(side.rate([0.2, 0.25, 0.5, 0.6]), [2 / 3, 1 / 3, 0, 0])


def test_quantiles_and_rates_by_hand_at_token_level():
    ratio = np.array([[1.1, 1.3, 0.9], [1.2, 5.0, 5.0], [0.5, 0.8, 1.5]])
    mask = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 1]])
    advantages = np.array([[1, 1, 1], [1, 1, 1], [-1, -1, -1.0]])
    batch = dict(logp_new=np.log(ratio), logp_old=np.zeros((3, 3)), mask=mask)
    batch |= dict(advantages=advantages, minibatch=np.array([2, 2, 2]))
    found = calibration.epsilon(batch, 'token', quantile=0.25)
    # w - 1 where A > 0: -.1 .1 .2 .3, at place .75 * 3 = 2.25; 1 - w where A < 0: -.5 .2 .5 at 1.5
    np.testing.assert_allclose(found.high.eps, 0.2 + 0.25 * 0.1)
    np.testing.assert_allclose(found.low.eps, 0.2 + 0.5 * 0.3)
    # Above .15: of the first row 1 in 3, of the second 1 in 1.
    np.testing.assert_allclose(found.high.rate(0.15), (1 / 3 + 1) / 2)
    np.testing.assert_allclose(found.high.rate(0.15, 'token'), 2 / 4)
    np.testing.assert_allclose(found.low.rate(0.15, 'token'), 2 / 3)


def test_signs_of_single_tokens_decide_at_token_level():
    batch = _batch([0.1], [[1.0, -1.0, 0.0, 2.0]], minibatch=[2])
    token = calibration.epsilon(batch, 'token')
    assert (token.high.excess.size, token.low.excess.size) == (2, 1)
    sequence = calibration.epsilon(batch)
    assert (sequence.high.responses, sequence.low.responses) == (1, 0)
    assert any('advantages vary within 1 rows' in w for w in sequence.warnings)
    assert not any('vary' in w for w in token.warnings)


def test_bootstrap_interval_is_that_of_explicit_resamples():
    rng = np.random.default_rng(0)
    rows, width = 30, 5
    log_ratio = rng.normal(0, 0.1, (rows, width))
    batch = dict(logp_new=log_ratio, logp_old=np.zeros_like(log_ratio))
    batch |= dict(mask=np.ones((rows, width)), advantages=np.ones(rows))
    for level, values in (
        ('sequence', np.expm1(log_ratio.mean(-1))[:, None]),
        ('token', np.expm1(log_ratio)),
    ):
        found = calibration.epsilon(batch, level, quantile=0.2, resamples=200, seed=4)
        draws = np.random.default_rng([4, 2])
        want = [
            np.quantile(values[draws.integers(rows, size=rows)].ravel(), 0.8) for _ in range(200)
        ]
        np.testing.assert_allclose(found.high.interval, np.quantile(want, [0.025, 0.975]))
        assert found.high.interval[0] < found.high.eps < found.high.interval[1]
        other = calibration.epsilon(batch, level, quantile=0.2, resamples=200, seed=5)
        assert other.high.eps == found.high.eps
        assert other.high.interval != found.high.interval


def test_the_suggestion_clips_the_share_asked_for():
    rng = np.random.default_rng(1)
    batch = _batch(rng.normal(0, 0.01, 4000), rng.choice([-1, 1], 4000), minibatch=[2] * 4000)
    found = calibration.epsilon(batch, quantile=0.1, resamples=50)
    for side in found.sides:
        np.testing.assert_allclose(side.rate(side.eps), 0.1, atol=1e-3)
        np.testing.assert_allclose(side.eps, 0.01 * 1.2816, rtol=0.05)  # normal .9 quantile
    assert found.warnings == ()


def test_negative_quantile_is_floored_and_warned_of():
    batch = _batch([-0.02] * 60 + [0.03] * 60, [1] * 60 + [-1] * 60, minibatch=[2] * 120)
    found = calibration.epsilon(batch)
    assert (found.high.eps, found.low.eps) == (1e-6, 1e-6)
    np.testing.assert_allclose(found.high.quantile, -0.02)
    assert found.high.interval == (1e-6, 1e-6)
    (low, high) = found.warnings
    assert 'eps_low' in low and 'raised' in low and 'the wrong way' in low
    assert 'eps_high' in high and 'lowered' in high and 'the wrong way' in high


def test_few_rows_and_empty_sides_are_warned_of():
    found = calibration.epsilon(_batch([0.1] * 49, [1] * 49, minibatch=[2] * 49))
    assert np.isnan(found.low.eps) and np.isnan(found.low.rate(0.1))
    assert 'no response with A < 0' in found.warnings[0]
    assert '49 responses with A > 0, below 50' in found.warnings[1]
    found = calibration.epsilon(_batch([0.1] * 50, [1] * 50, minibatch=[2] * 50))
    assert len(found.warnings) == 1


def test_batch_that_did_not_move_is_warned_of():
    batch = _batch([0.0] * 120, [1, -1] * 60, minibatch=[2] * 120)
    batch['logp_new'] = np.where(batch['mask'], 1e-6, np.nan)
    found = calibration.epsilon(batch)
    assert len(found.warnings) == 1 and 'nothing moved' in found.warnings[0]
    assert found.low.eps == 1e-6


def test_first_minibatches():
    batch = _batch([0.1] * 60, [1] * 60)
    assert any('no `minibatch` index' in w for w in calibration.epsilon(batch).warnings)
    with pytest.raises(batches.BatchError, match='every row is of minibatch 1'):
        calibration.epsilon(batch | dict(minibatch=np.ones(60, int)))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(level='sequense'), 'Did you mean `sequence`'),
        (dict(quantile=0.0), 'quantile=0.0'),
        (dict(quantile=1.0), 'quantile=1.0'),
        (dict(confidence=2.0), 'confidence=2.0'),
        (dict(resamples=0), 'resamples=0'),
    ],
)
def test_illegal_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        calibration.epsilon(_by_hand(), **options)


def test_group_size_by_hand():
    assert calibration.group_size([0.5], 0.1).size == 5  # 2^(1-G): .125, .0625
    assert calibration.group_size([0.5], 0.125).size == 4
    assert calibration.group_size([0.1, 0.9], 0.1).size == 22  # .9^21 = .109, .9^22 = .098
    found = calibration.group_size([0.5, 0.25], 0.2)
    # G = 5: (2 / 32 + .75^5 + .25^5) / 2 = .1504; G = 4: (.125 + .3203) / 2 = .2227
    assert found.size == 5
    np.testing.assert_allclose(found.curve[3:5], [0.22265625, 0.150390625])
    assert found.curve[0] == 1


def test_no_group_size_is_enough():
    found = calibration.group_size([0.5, 0.0, 1.0, 0.5], 0.1)
    assert (found.size, found.floor, found.curve.size) == (None, 0.5, 1024)
    np.testing.assert_allclose(found.curve[-1], 0.5)
    assert calibration.group_size([0.01], 0.1, bound=100).size is None
    assert calibration.group_size([0.01], 0.1, bound=300).size == 230


@pytest.mark.parametrize('rates', [[], [1.5], [np.nan], [[0.5]]])
def test_illegal_rates(rates):
    with pytest.raises(ValueError, match='rates must be'):
        calibration.group_size(rates)
    with pytest.raises(ValueError, match='degenerate=1.0'):
        calibration.group_size([0.5], 1.0)
    with pytest.raises(ValueError, match='bound=0'):
        calibration.group_size([0.5], bound=0)


def test_solve_rates_by_hand():
    batch = _batch([0.1] * 5, [1] * 5, group=[7, -2, 7, 7, -2])
    positive = np.array([True, False, False, True, False])
    np.testing.assert_allclose(batches.solve_rates(batch | dict(positive=positive)), [0, 2 / 3])
    rewards = np.array([1.1, 0.1, np.nan, 1.1, 0.1])
    np.testing.assert_allclose(batches.solve_rates(batch | dict(rewards=rewards)), [0, 1])
    with pytest.raises(batches.BatchError, match='rewards of two values'):
        batches.solve_rates(batch | dict(rewards=np.arange(5.0)))
    with pytest.raises(batches.BatchError, match='`positive`'):
        batches.solve_rates(batch)
    with pytest.raises(batches.BatchError, match='`group`'):
        batches.solve_rates(_by_hand())


# ---------------------------------------------------------------- batch files


def test_save_and_load_give_back_every_field(tmp_path):
    batch = _by_hand() | dict(
        rewards=np.arange(12.0),
        group=np.arange(12) // 4,
        positive=np.arange(12) % 2 == 0,
        logp_behavior=np.zeros((12, 4), np.float32),
    )
    path = batches.save_batch(tmp_path / 'deep' / 'batch_1.npz', **batch)
    found = batches.load_batch(path)
    assert set(found) == set(batches.FIELDS)
    for name, value in batch.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype
    assert calibration.epsilon(found).high.eps == calibration.epsilon(batch).high.eps


def test_absent_fields_stay_absent(tmp_path):
    path = batches.save_batch(tmp_path / 'b.npz', **_batch([0.1], [1.0]), rewards=None)
    assert set(batches.load_batch(path)) == {'logp_new', 'logp_old', 'mask', 'advantages'}


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = batches.save_batch(tmp_path / 'b.npz', **_batch([0.1], [1.0]))

    def broken(file, **arrays):
        file.write(b'half')
        raise OSError('disk full')

    monkeypatch.setattr(np, 'savez_compressed', broken)
    with pytest.raises(OSError, match='disk full'):
        batches.save_batch(path, **_batch([0.2], [1.0]))
    assert os.listdir(tmp_path) == ['b.npz']
    np.testing.assert_allclose(calibration.epsilon(batches.load_batch(path)).high.eps, 0.1)


def _without(name):
    return {k: v for k, v in _by_hand().items() if k != name}


@pytest.mark.parametrize(
    ('batch', 'message'),
    [
        (_without('mask'), 'x.npz: field `mask` is missing. Present: logp_new'),
        (_by_hand() | dict(minibatchs=np.ones(12)), 'unknown field `minibatchs`.*`minibatch`'),
        (_by_hand() | dict(logp_old=np.zeros((12, 3))), r'`logp_old` has shape \(12, 3\)'),
        (_by_hand() | dict(logp_new=np.zeros(12)), r'`logp_new` must be \[B,T\]'),
        (_by_hand() | dict(advantages=np.zeros(5)), r'`advantages`.*\(12, 4\) or \(12,\)'),
        (_by_hand() | dict(group=np.zeros((12, 4), int)), r'`group`.*legal is \(12,\)'),
        (_by_hand() | dict(logp_new=np.zeros((12, 4), int)), '`logp_new` is int64, legal'),
        (_by_hand() | dict(positive=np.array(['a'] * 12)), '`positive` is <U1, legal'),
        (_by_hand() | dict(minibatch=np.arange(12)), '`minibatch` counts from 1, found 0'),
        (_by_hand() | dict(logp_behavior=np.full((12, 4), -np.inf)), 'at row 0, token 0'),
    ],
)
def test_bad_batches_are_named(batch, message, tmp_path):
    with pytest.raises(batches.BatchError, match=message):
        batches.save_batch(tmp_path / 'x.npz', **batch)
    assert not os.listdir(tmp_path)
    np.savez(tmp_path / 'x.npz', **batch)
    with pytest.raises(batches.BatchError, match=message):
        batches.load_batch(tmp_path / 'x.npz')


def test_files_that_are_no_batches(tmp_path):
    with pytest.raises(batches.BatchError, match='no such file'):
        batches.load_batch(tmp_path / 'none.npz')
    (tmp_path / 'text.npz').write_text('hello')
    with pytest.raises(batches.BatchError, match='text.npz: not a readable .npz'):
        batches.load_batch(tmp_path / 'text.npz')
    np.save(tmp_path / 'array.npy', np.zeros(3))
    os.rename(tmp_path / 'array.npy', tmp_path / 'array.npz')
    with pytest.raises(batches.BatchError, match='array.npz: not a readable .npz'):
        batches.load_batch(tmp_path / 'array.npz')
    whole = batches.save_batch(tmp_path / 'b.npz', **_by_hand()).read_bytes()
    (tmp_path / 'cut.npz').write_bytes(whole[: len(whole) // 2])
    (tmp_path / 'worn.npz').write_bytes(whole.replace(whole[60:90], bytes(30), 1))
    for name in ('cut.npz', 'worn.npz'):
        with pytest.raises(batches.BatchError, match=f'{name}: not a readable .npz'):
            batches.load_batch(tmp_path / name)
    with pytest.raises(batches.BatchError, match='ends in .npz'):
        batches.save_batch(tmp_path / 'b.np', **_by_hand())


def test_newest_batch_of_a_folder(tmp_path):
    with pytest.raises(batches.BatchError, match='no batch_'):
        batches.find_batch(tmp_path)
    times = {'batch_9.npz': 10, 'batches/batch_10.npz': 30, 'batch_11.npz': 20, 'other.npz': 99}
    for name, time in times.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (time, time))
    assert batches.find_batch(tmp_path) == tmp_path / 'batches' / 'batch_10.npz'
    os.utime(tmp_path / 'batches' / 'batch_10.npz', (5, 5))
    assert batches.find_batch(str(tmp_path)) == tmp_path / 'batch_11.npz'
    assert batches.find_batch(tmp_path / 'other.npz') == tmp_path / 'other.npz'


# ---------------------------------------------------------------- command


def test_command_prints_suggestion_rates_group_size_and_warnings(tmp_path, capsys):
    batch = _by_hand() | dict(group=np.arange(12) // 6, positive=np.arange(12) % 2 == 0)
    path = batches.save_batch(tmp_path / 'batch_1.npz', **batch)
    assert calibrate.main([str(path), '--quantile', '.5', '--degenerate', '.2']) == 0
    out = capsys.readouterr().out
    assert '9 rows used' in out and 'clips 50% of each side' in out
    lines = [line.replace('│', ' ').split() for line in out.splitlines()]
    assert ['sequence', 'eps_low', '3', '0.2'] in [line[:4] for line in lines]
    assert ['sequence', 'eps_high', '5', '0.031'] in [line[:4] for line in lines]
    # eps .03: of the high side .031, .05, .04, with 9 of 14 tokens; of the low side all
    assert ['0.03', '100.0%', '60.0%', '100.0%', '64.3%'] in lines
    assert '4 is the smallest with at most 0.2' in out  # two prompts at .5: 2^(1-4) = .125
    assert 'warning: sequence: eps_low: 3 responses with A < 0, below 10: noisy' in out


def test_command_takes_a_folder_and_says_when_nothing_is_measured(tmp_path, capsys):
    batches.save_batch(tmp_path / 'batches' / 'batch_1.npz', **_batch([0.1], [1], minibatch=[2]))
    assert calibrate.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert 'batch_1.npz' in out and 'Group size: not measured' in out
    assert 'no response with A < 0' in out and 'nan' not in out


def test_command_says_when_no_group_size_is_enough(tmp_path, capsys):
    fields = dict(group=[0, 0, 1, 1], positive=[1, 0, 0, 0], minibatch=[2] * 4)
    path = batches.save_batch(tmp_path / 'b.npz', **_batch([0.1] * 4, [1] * 4, **fields))
    assert calibrate.main([str(path)]) == 0
    assert 'none up to 1024' in capsys.readouterr().out


def test_command_draws_a_figure(tmp_path, capsys):
    path = batches.save_batch(tmp_path / 'b.npz', **_by_hand())
    figure = tmp_path / 'deep' / 'folder' / 'clip_range.png'
    assert calibrate.main([str(path), '--figures', str(figure.parent)]) == 0
    assert figure.read_bytes().startswith(b'\x89PNG') and figure.stat().st_size > 10_000
    assert f'figure: {figure}' in capsys.readouterr().out
    assert os.listdir(figure.parent) == ['clip_range.png']
    assert calibrate.main([str(path), '--figures', str(path)]) == 2
    assert 'error: ' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['none.npz'], 'none.npz: no such file'),
        (['.'], 'no batch_*.npz in this folder'),
        (['b.npz', '--quantile', '2'], 'quantile=2.0, legal is above 0 and below 1'),
        (['b.npz', '--degenerate', '0'], 'degenerate=0.0'),
        (['b.npz', '--seed', '-1'], 'error: '),
    ],
)
def test_command_exits_with_2_and_a_message(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batches.save_batch('b.npz', **_by_hand())
    assert calibrate.main(argv) == 2
    assert message in capsys.readouterr().err


def test_command_rejects_misspelt_options_and_explains_itself(capsys):
    for argv, code in ((['b.npz', '--quantil_e', '1'], 2), ([], 2), (['--help'], 0)):
        with pytest.raises(SystemExit) as stop:
            calibrate.main(argv)
        assert stop.value.code == code
    out = capsys.readouterr().out
    for option in ('--quantile', '--seed', '--figures', '--degenerate', 'newest batch_*.npz'):
        assert option in out
