"""A saved minibatch taken apart: shares and terms against numpy, marks, files, the command."""

import dataclasses
import json
import re
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from policyopt import batches, inspect, inspection, losses, reinforce, stopping, train, unusual
from policyopt.sampling import Finish
from tests.batches import algorithm, loss_inputs, random_arrays, token_batch
from tests.test_quickstart import get_config

# ============================================================================ terms


@pytest.mark.parametrize('name', ['grpo', 'deepseek_v32', 'vapo', 'ppo_penalty'])
def test_terms_sum_to_the_loss(name):
    """Penalties, gates, several losses, adaptive parts."""
    alg, arrays = algorithm(name), random_arrays(3)
    weights = alg.loss.weigh(token_batch(arrays))
    inputs = loss_inputs(arrays, alg)
    terms = alg.loss.explain(inputs, weights)
    total = sum(float(jnp.sum(x.loss)) for x in terms.values())
    assert total == pytest.approx(float(alg.loss.apply(inputs, weights).loss), rel=1e-6)
    parts = {
        'grpo': ({'policy'}, [], ['kl_to_reference']),
        'deepseek_v32': ({'policy'}, ['off_policy_sequence'], ['kl_to_reference']),
        'vapo': ({'policy', 'value', 'nll'}, [], []),
        'ppo_penalty': ({'policy', 'value'}, [], ['kl_to_old']),
    }[name]
    policy = terms['policy']
    assert (set(terms), list(policy.gates), list(policy.penalties)) == parts
    assert terms.keys() == {'policy'} or terms['value'].log_ratio is None


def test_terms_say_what_each_part_gave():
    """Two gates of one kind, a scaled loss, and a loss by hand that says nothing."""
    alg, arrays = algorithm('grpo'), random_arrays(4)
    inputs, batch = loss_inputs(arrays, alg), token_batch(arrays)
    loss = losses.policy_loss(
        ratio=losses.token_ratio(),
        surrogate=losses.clipped(0.2, 0.2),
        aggregate=losses.token_mean(),
        gates=[losses.truncated_importance(1.1), losses.truncated_importance(0.9)],
        penalties=[losses.kl_to_old(0.5)],
    )
    weights = loss.weigh(batch)
    terms = loss.explain(inputs, weights)['policy']
    mask = arrays['mask'] != 0
    rho = np.exp(np.where(mask, arrays['logp_old'] - arrays['logp_behavior'], 0))
    log_ratio = np.where(mask, arrays['logp_new'] - arrays['logp_old'], 0)
    w, a = np.exp(log_ratio), np.where(mask, arrays['advantages'], 0)
    close = lambda x, y: np.testing.assert_allclose(np.asarray(x)[mask], y[mask], rtol=1e-5)  # noqa: E731
    close(terms.gates['truncated_importance'], np.minimum(rho, 1.1))
    close(terms.gates['truncated_importance 2'], np.minimum(rho, 0.9))
    close(terms.objective, np.minimum(w * a, np.clip(w, 0.8, 1.2) * a))
    close(terms.frozen, ((a > 0) & (w > 1.2)) | ((a < 0) & (w < 0.8)) | (a == 0))
    np.testing.assert_allclose(
        np.asarray(terms.penalties['kl_to_old'])[mask],
        0.5 * (w - 1 - log_ratio)[mask],
        rtol=1e-3,
        atol=1e-7,
    )
    twice = losses.scale(2.0, loss).explain(inputs, weights)['policy']
    np.testing.assert_array_equal(twice.loss, 2 * terms.loss)
    by_hand = po.LossTransform(weigh=loss.weigh, apply=loss.apply)
    assert losses.add(by_hand, loss).explain is None and losses.scale(2.0, by_hand).explain is None


# ============================================================================ shares and marks


def hand_made():
    """Two groups of two rows, and GRPO's loss of them."""
    nan = np.nan
    return po.TokenBatch(
        tokens=np.array([[1, 2, 3, 4], [1, 5, 0, 0], [1, 2, 5, 0], [1, 3, 3, 0]], np.int32),
        mask=np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]], np.float32),
        advantages=np.array([[0.7], [-0.7], [0], [0]], np.float32) * np.ones((4, 4), np.float32),
        logp_old=np.array(
            [[0, -1, -2, -1], [0, -1, 0, 0], [0, -1, -1, 0], [0, -2, -2, 0]], np.float32
        ),
        logp_behavior=np.array(
            [[0, -1, -2, -1], [0, -1, 0, 0], [0, -1, -1.5, 0], [0, -2, -2, 0]], np.float32
        ),
        logp_ref=np.array(
            [[0, -1, -3, -1], [0, -2, 0, 0], [0, -1, -1, 0], [0, -2, -2, 0]], np.float32
        ),
        rewards=np.array([1, 0, 1, 1], np.float32),
        group=np.array([8, 8, 9, 9]),
        finish=np.array([Finish.LENGTH, Finish.EOS, Finish.EOS, Finish.ERROR]),
        version=np.where(np.arange(4) > 0, 2, -1) * np.ones((4, 1), np.int32),
        support=np.array([[[1, 2], [2, 1], [3, 1], [1, 2]]] * 4, np.int32),
    ), np.array([[nan, -0.5, -2.5, -1], [nan, -1, nan, nan], [nan, -1, -1, 0], [nan, -2, -2, nan]])


def shares_by_loops(batch, logp_new, beta, low, high):
    """|d loss / d logp_new| of GRPO over its sum, token by token in float64."""
    slopes = np.zeros(batch.mask.shape)
    for i, t in np.argwhere(batch.mask):
        weight = 1 / batch.mask[i].sum() / len(batch.mask)
        a = float(batch.advantages[i, t])
        w = np.exp(logp_new[i, t] - batch.logp_old[i, t])
        stopped = (a > 0 and w > 1 + high) or (a < 0 and w < 1 - low)
        kl = 1 - np.exp(batch.logp_ref[i, t] - logp_new[i, t])
        slopes[i, t] = weight * (beta * kl - (0 if stopped else a * w))
    return np.abs(slopes) / np.abs(slopes).sum()


def look(batch, logp_new, alg, controllers=()):
    scores = po.Scores(logp_new=logp_new.astype(np.float32))
    return inspection.decompose(alg, batch, scores, dict(controllers))


def examined(batch, logp_new, origin=(3, 1, 1), **config):
    """What `examine` makes of a batch, with a run that has no model."""
    alg = po.algorithms.grpo(beta=0.3, eps=0.2)
    sizes = types.SimpleNamespace(vocab_size=6, dtype='float32')
    setup = types.SimpleNamespace(
        algorithm=alg,
        model=types.SimpleNamespace(config=sizes),
        config=types.SimpleNamespace(
            replay=types.SimpleNamespace(support=True),
            sampling=types.SimpleNamespace(truncated=True),
        ),
    )
    place = batches.Origin(*origin, None, {}, {})
    logp = inspection.LogProbs('recorded', None, None, '')
    found = look(batch, logp_new, alg)
    return inspection.examine('', '', place, setup, batch, logp, found)


def test_shares_are_those_of_the_slopes():
    batch, logp_new = hand_made()
    made = examined(batch, logp_new)
    want = shares_by_loops(batch, logp_new, 0.3, 0.2, 0.2)
    np.testing.assert_allclose(made.share, want, rtol=1e-5, atol=1e-9)
    assert made.share.sum() == pytest.approx(1) and not made.nonfinite
    # Token 1 of row 0 is clipped: what is left is its KL term.
    assert made.share[0, 1] > 0 and made.ratio[0, 1] == pytest.approx(np.exp(0.5))
    assert not any(mark[~made.mask].any() for mark in made.marks.values())


def test_equal_gates_of_two_losses_are_two_columns():
    batch, logp_new = hand_made()
    made = examined(batch, logp_new)
    made.setup.model.tokenizer = types.SimpleNamespace(decode=str)
    (name,) = made.terms
    one = made.terms[name]._replace(gates={'mine': np.full((4, 4), 0.25)})
    two = one._replace(gates={'mine': np.full((4, 4), 0.5)}, penalties={})
    found = inspect.token_record(dataclasses.replace(made, terms={name: one}), 0, 1)
    assert found['gate mine'] == 0.25 and 'penalty kl_to_reference' in found
    made = dataclasses.replace(made, terms={name: one, 'other': two})
    found = inspect.token_record(made, 0, 1)
    assert (found[f'{name} gate mine'], found['other gate mine']) == (0.25, 0.5)


def test_what_is_unusual_is_marked():
    batch, logp_new = hand_made()
    made = examined(batch, logp_new)

    def where(marks, name):
        return np.argwhere(marks[name]).tolist()

    assert where(made.marks, 'frozen') == [[0, 1]]
    # Support [2, 1], [3, 1], [1, 2] at positions 1, 2, 3: tokens 4, 5, 5 and 3 are not in theirs.
    assert where(made.marks, 'support') == [[0, 3], [1, 1], [2, 2], [3, 1]]
    # Parameters of version 2 drew the rows and are those of the update.
    assert where(made.marks, 'mismatch') == [[0, 1], [0, 2], [2, 2]]
    assert where(made.marks, 'extreme') == where(made.marks, 'gate closed') == []
    assert where(made.row_marks, 'flat group') == [[2], [3]]
    assert where(made.row_marks, 'truncated') == [[0]]
    assert where(made.row_marks, 'not sampled') == [[3]]
    assert where(made.row_marks, 'empty') == where(made.row_marks, 'no reward') == []
    assert set(made.marks) == set(unusual.TOKEN_MARKS)
    assert set(made.row_marks) == set(unusual.ROW_MARKS)
    for origin in ((3, 1, 2), (3, 2, 1), (4, 1, 1)):  # the parameters have moved, or others drew
        assert not examined(batch, logp_new, origin).marks['mismatch'].any()


def test_numbers_that_are_not_finite_are_found_where_they_began():
    batch, logp_new = hand_made()
    logp_ref = batch.logp_ref.copy()
    logp_ref[1, 1] = np.nan
    rewards = np.array([1, 0, np.nan, 1], np.float32)
    mask = batch.mask.copy()
    mask[2] = 0
    changes = dict(logp_ref=logp_ref, rewards=rewards, mask=mask)
    made = examined(dataclasses.replace(batch, **changes), logp_new)
    found = {each.field: (each.count, each.row, each.token) for each in made.nonfinite}
    assert list(found) == ['logp_ref', 'penalty kl_to_reference', 'policy loss', 'gradient']
    assert set(found.values()) == {(1, 1, 1)}
    assert np.isnan(made.share[1, 1]) and np.nansum(made.share) == pytest.approx(1)
    assert np.argwhere(made.marks['not finite']).tolist() == [[1, 1]]
    assert made.row_marks['no reward'].tolist() == [False, False, True, False]
    assert made.row_marks['empty'].tolist() == [False, False, True, False]
    logp_new[0, 3] = 25
    made = examined(dataclasses.replace(batch, mask=mask), logp_new)
    assert np.argwhere(made.marks['extreme']).tolist() == [[0, 3]]


def test_a_heavy_token_is_marked():
    rows, logp_new = 8, np.full((8, 4), -1.0)
    batch = po.TokenBatch(
        tokens=np.zeros((rows, 4), np.int32),
        mask=np.ones((rows, 4), np.float32),
        advantages=np.full((rows, 4), 0.01, np.float32),
        logp_old=logp_new.astype(np.float32),
        group=np.zeros(rows, np.int32),
    )
    batch.advantages[2, 1] = 0.31
    found = look(batch, logp_new, po.algorithms.grpo(beta=0.0))
    share = np.abs(found.slope) / np.abs(found.slope).sum()
    assert share[2, 1] == pytest.approx(0.5)
    marks = unusual.token_marks(
        batch, found.scores, found.terms, 0 * share, share, vocab_size=6, version=0, gap=np.inf
    )
    assert np.argwhere(marks['heavy']).tolist() == [[2, 1]]  # 16 times the uniform share


# ============================================================================ a run


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run whose step 2 is saved, and whose updates are not finite from step 3 on."""
    patch = pytest.MonkeyPatch()
    split, calls = reinforce.rollout_lib.minibatches, []

    def poisoned(batch, parts):
        calls.append(batch)
        found = split(batch, parts)
        if len(calls) < 3:
            return found
        at = np.arange(len(found[0].mask))[:, None] == 5
        nan = [np.where(at, np.float32(np.nan), part.advantages) for part in found]
        return [dataclasses.replace(x, advantages=y) for x, y in zip(found, nan, strict=True)]

    patch.setattr(reinforce.rollout_lib, 'minibatches', poisoned)
    config = get_config(
        'tiny,algorithm=ppo_penalty',
        warm_start=None,
        dynamic_sampling=False,
        model=dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32),
        router={},
        ema=None,
        steps=9,
        minibatches=2,
        max_skipped=2,
        checkpoint=dict(every=50, keep=2),
        evaluation__every=50,
    )
    workdir = tmp_path_factory.mktemp('runs') / 'run'
    with patch.context(), pytest.raises(stopping.Unstable, match='policyopt.inspect shows'):
        train.run(train.start(config, workdir, train.Watch(save_batches=(2, 3))), workdir)
    patch.undo()
    return workdir


def as_json(capsys, *arguments):
    assert inspect.main([*map(str, arguments), '--json']) == 0
    return json.loads(capsys.readouterr().out)


def test_a_minibatch_is_reloaded_with_the_checkpoint_before_it(run, capsys):
    """Computed anew, log-probs are those that the update saw; the loss is that of the record."""
    assert sorted(p.name for p in (run / 'batches').iterdir()) == [
        'offending_000003.npz',
        'update_000002_1.npz',
        'update_000002_2.npz',
        'update_000003_1.npz',
        'update_000003_2.npz',
    ]
    found = as_json(capsys, run / 'batches' / 'update_000002_1.npz')
    assert found['log_probs']['source'] == 'recomputed' and found['log_probs']['checkpoint'] == 1
    assert found['log_probs']['gap'] <= 2e-5
    assert (found['step'], found['epoch'], found['minibatch']) == (2, 1, 1)
    second = as_json(capsys, run / 'batches' / 'update_000002_2.npz')
    assert second['log_probs']['source'] == 'recorded' and second['log_probs']['gap'] is None
    assert '(that of step 1 has others)' in second['log_probs']['text']
    assert second['notes'] == ['values: of the checkpoint of step 1, not recorded']
    records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    step = next(r for r in records if r['stage'] == 'rl' and r['step'] == 2)
    assert found['controllers']['beta'] == pytest.approx(step['controller/beta'])
    policy = [
        np.sum([t['policy loss'] for row in each['detail'] for t in row['detail']])
        for each in (found, second)
    ]
    penalty = [
        np.sum(
            [t['policy weight'] * t['penalty kl_to_old'] for r in f['detail'] for t in r['detail']]
        )
        for f in (found, second)
    ]
    assert penalty[0] == pytest.approx(0, abs=1e-6) and np.isfinite(policy).all()
    shares = [t['share'] for row in found['detail'] for t in row['detail']]
    assert np.sum(shares) == pytest.approx(1) and len(shares) == found['tokens']
    assert not any('mismatch' in t['marks'] for row in found['detail'] for t in row['detail'])


def test_the_offending_minibatch_is_marked(run, capsys):
    """Skipped updates left the parameters, so that the checkpoint before them is the right one."""
    path = run / 'batches' / 'offending_000003.npz'
    found = as_json(capsys, path)
    assert found['log_probs']['source'] == 'recomputed' and found['log_probs']['checkpoint'] == 2
    first = found['nonfinite'][0]
    assert first['field'] == 'advantages' and first['row'] == 5
    assert found['detail'][0]['row'] == 5
    assert any(mark.startswith('not finite') for mark in found['detail'][0]['marks'])
    assert found['detail'][0]['detail'][0]['advantage'] is None
    assert inspect.main([str(path), '--rows=1']) == 0
    text = capsys.readouterr().out
    assert 'Not finite, in the order of computation' in text and 'row 5:' in text
    assert max(map(len, text.splitlines())) < inspect.WIDE
    assert inspect.main([str(path), '--row=0', '--row=2', '--tokens=1']) == 0
    text = capsys.readouterr().out
    assert 'row 0:' in text and 'row 2:' in text and 'row 5:' not in text and '1 of ' in text


def test_files_that_can_not_be_looked_at(run, tmp_path, capsys):
    good = run / 'batches' / 'update_000002_1.npz'
    alone = tmp_path / 'batches' / good.name
    alone.parent.mkdir()
    shutil.copy(good, alone)
    cut = run / 'batches' / 'cut.npz'
    cut.write_bytes(good.read_bytes()[:-100])
    calibration = {n: np.zeros((1, 1), np.float32) for n in ('logp_new', 'logp_old', 'advantages')}
    other = batches.save_batch(tmp_path / 'b.npz', mask=np.ones((1, 1)), **calibration)
    elsewhere = tmp_path / 'run'
    elsewhere.mkdir()
    config = json.loads((run / 'config.json').read_text()) | {'seed': 4}
    (elsewhere / 'config.json').write_text(json.dumps(config))
    for arguments, message in (
        ([run / 'batches' / 'none.npz'], 'no such file'),
        ([cut], 'not a readable .npz file'),
        ([other], 'a batch for policyopt.calibrate, with no record of where it comes from'),
        ([alone], 'there is no config.json in'),
        ([alone, f'--workdir={elsewhere}'], 'is of another run than .*: its config.seed: 0 -> 4;'),
        ([good, '--row=99'], 'row is 99; legal is 0 to 15'),
    ):
        assert inspect.main(list(map(str, arguments))) == 2
        error = capsys.readouterr().err
        assert error.count('\n') == 1

        assert re.search(message, error), error
    with pytest.raises(SystemExit):
        inspect.main([str(good), '--row=0', '--rows=3'])
    assert '--rows has no effect on the rows that --row names' in capsys.readouterr().err
    cut.unlink()
    assert inspect.main([str(alone), f'--workdir={run}', '--rows=0']) == 0  # elsewhere, but its run
    (elsewhere / 'config.json').write_text('{"seed":')
    assert inspect.main([str(alone), f'--workdir={elsewhere}']) == 2
    assert 'not a readable config' in capsys.readouterr().err


def test_without_checkpoints_what_was_recorded_is_shown(run, tmp_path, capsys):
    bare = tmp_path / 'run'
    (bare / 'batches').mkdir(parents=True)
    for name in ('config.json', 'batches/update_000002_1.npz'):
        shutil.copy(run / name, bare / name)
    found = as_json(capsys, bare / 'batches' / 'update_000002_1.npz')
    assert found['log_probs']['source'] == 'recorded'
    assert '(there is none to be used)' in found['log_probs']['text']
    assert found['notes'] == ['not recorded, and NaN here: values']
    shares = [t['share'] for row in found['detail'] for t in row['detail']]
    assert np.sum(shares) == pytest.approx(1)


def test_a_damaged_checkpoint_is_not_believed(run, tmp_path, capsys):
    """A note says so; standard output stays one JSON object; the folder is left as it is."""
    copy = tmp_path / 'run'
    shutil.copytree(run, copy)
    shutil.rmtree(copy / 'checkpoints' / '1' / 'state')
    found = as_json(capsys, copy / 'batches' / 'update_000002_1.npz')
    assert found['log_probs']['source'] == 'recorded'
    assert found['log_probs']['checkpoint'] is None
    assert found['notes'][0].startswith('the checkpoint of step 1 is not usable: ')
    assert (copy / 'checkpoints' / '1').is_dir() and not (copy / 'damaged').exists()


def test_a_resumed_run_keeps_the_checkpoints_of_saved_minibatches(tmp_path, monkeypatch):
    """Without the flag, too: the files are there."""
    kept = []

    class Recorder:
        def __init__(self, workdir, keep, config, also, origins):
            kept.extend(also)

        def check(self):
            pass

    monkeypatch.setattr(train, 'Checkpoints', Recorder)
    workdir = tmp_path / 'run'
    (workdir / 'checkpoints' / '9').mkdir(parents=True)
    (workdir / 'batches').mkdir()
    for name in ('update_000004_1', 'update_000004_2', 'update_1000001_1', 'batch_000007'):
        (workdir / 'batches' / f'{name}.npz').write_bytes(b'')
    config = get_config('tiny', steps=20, checkpoint=dict(every=5))
    (workdir / 'config.json').write_text('{}')
    job = train.start(config, workdir, train.Watch(save_batches=(12,)))
    job.lock.close()
    assert job.resumed and sorted(kept) == [3, 11, 1000000]


def test_steps_to_save_are_checked(tmp_path):
    assert train.steps_of(['1', '40']) == (1, 40)
    with pytest.raises(ValueError, match='--save_batches is 1,x; legal are RL steps, as 1,40'):
        train.steps_of(['1', 'x'])
    with pytest.raises(ValueError, match='--save_batches has 9; legal are RL steps, 1 to 2'):
        train.start(get_config('tiny', steps=2), tmp_path / 'run', train.Watch(save_batches=(9,)))
