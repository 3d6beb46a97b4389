"""Claims of the literature: what docs say is what the numbers there give; parts against numpy."""

import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest

from experiments import arms, curves, learning, policies, run, sources, variants
from experiments import claim as claim_lib
from experiments.claims import (
    clip_band,
    dynamic_sampling,
    expert_drift,
    idle_share,
    kl_gradient,
    length_direction,
    replay_variance,
    reward_scale,
    soft_gate,
)
from policyopt import algorithms
from policyopt.types import Rollout, TokenBatch, keep_all

ROOT = pathlib.Path(__file__).parent.parent
CHECKED = sorted(path.stem for path in (ROOT / 'docs' / 'claims').glob('*.json'))


@pytest.mark.parametrize('name', CHECKED)
def test_verdicts_follow_from_the_numbers_beside_them(name):
    held = json.loads((ROOT / 'docs' / 'claims' / f'{name}.json').read_text())
    found = run.load(name).judge(held['seeds'])
    assert json.loads(json.dumps(found._asdict())) == held['verdict']
    assert (ROOT / 'docs' / 'claims' / f'{name}.png').is_file()


def test_the_page_is_written_from_the_claims(monkeypatch):
    monkeypatch.chdir(ROOT)
    run.verdict_of.cache_clear()
    assert run.page() == (ROOT / 'docs' / 'claims.md').read_text()


def test_an_unknown_claim_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match='Did you mean `clip_fraction`'):
        run.load('clip_fractoin')


def test_a_seed_is_measured_once_and_again_when_what_measures_it_has_changed(tmp_path, monkeypatch):
    place = claim_lib.Place(3, tmp_path)
    first = run.numbers_of('kl_gradient', place)
    with monkeypatch.context() as other:
        other.setattr(run, 'load', None)
        assert run.numbers_of('kl_gradient', place) == first
    monkeypatch.setattr(run, 'source_of', lambda name: 'other')
    assert run.held('kl_gradient', place) is None


def test_digests_are_of_what_measures(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, 'PACKAGES', ('parts_of_digests',))
    folder = tmp_path / 'parts_of_digests'
    folder.mkdir()
    (folder / '__init__.py').write_text('')

    def digest(first, second):
        (folder / 'first.py').write_text(first)
        (folder / 'second.py').write_text(second)
        return sources.digest('parts_of_digests.first', without=('judge', 'CLAIM'))

    text = 'from parts_of_digests import second\ndef measure(): return second.x\n'
    was = digest(text, 'x = 1\n')
    assert (
        digest(f'"""Words."""\n{text}# More.\ndef judge(): ...\nCLAIM = 1\n', 'x = 1  #\n') == was
    )
    assert digest(text, 'x = 2\n') != was
    assert digest(f'{text}y = 1\n', 'x = 1\n') != was


def test_fewer_seeds_replace_no_verdict_on_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, 'DOCS', tmp_path / 'docs')
    arguments = ['kl_gradient', f'--folder={tmp_path / "runs"}']
    for seeds, judged in ((3, 3), (2, 3)):  # those in the folder count, too
        run.main([*arguments, f'--seeds={seeds}'])
        held = json.loads((tmp_path / 'docs' / 'claims' / 'kl_gradient.json').read_text())
        assert len(held['seeds']) == judged
    run.main(['kl_gradient', '--seeds=2', f'--folder={tmp_path / "others"}'])
    assert run.recorded('kl_gradient') == 3 and '--seeds=3 or more' in capsys.readouterr().out
    run.verdict_of.cache_clear()


def test_a_collapse_is_a_stay_below_half_of_the_peak():
    steps = [0, 5, 10, 15, 20]
    assert np.isnan(curves.collapse(steps, [0.2, 0.05, 0.3, 0.4, 0.2]))  # it comes back
    assert curves.collapse(steps, [0.2, 0.4, 0.3, 0.1, 0.0]) == 15
    assert curves.collapse(steps, [0.2, 0.05, 0.3, 0.01, 0.1]) == 15
    assert curves.area({'accuracy': [0.9, 0.1, 0.3]}) == pytest.approx(0.2)


def test_factories_of_arms_refuse_names_with_the_nearest():
    resolve = algorithms.resolve
    for path, kw, nearest in (
        ('ablation_grid.named', dict(cell='T_uncliped'), 'T_unclipped'),
        ('variants.normalised', dict(by='minibach'), 'minibatch'),
    ):
        with pytest.raises(ValueError, match=f'Did you mean `{nearest}`'):
            resolve(f'experiments.{path}', **kw)
    kw = dict(gates=[dict(gate='off_policy_sequence', delta=0.5)])
    assert resolve('experiments.variants.unclipped', **kw).keep is keep_all


def test_what_changes_an_arm_changes_its_key():
    keys = [
        learning.key_of(arm, steps, 5, fast)
        for arm in (arms.grpo(), arms.gspo(), arms.grpo(minibatches=4), arms.sapo())
        for steps in (10, 20)
        for fast in (False, True)
    ]
    # The number of minibatches is a test's own.
    assert len(set(keys)) == len(keys)
    config = arms.grpo(optimizer=dict(learning_rate=1e-3)).config(fast=False)
    assert config['optimizer'] == dict(learning_rate=1e-3, warmup_steps=learning.WARMUP)


def test_intervals_and_words():
    mean, (low, high) = claim_lib.interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and 1.0 <= low < 2.0 and 3.0 < high <= 4.0
    assert claim_lib.decide(1, 2, 1) == 'reproduced'
    assert claim_lib.decide(0, 0.9, 1) == 'not reproduced'
    assert claim_lib.decide(0, 1, 1) == 'inconclusive'
    assert claim_lib.together('reproduced', 'reproduced') == 'reproduced'
    assert claim_lib.together('reproduced', 'inconclusive') == 'inconclusive'
    assert claim_lib.together('not reproduced', 'inconclusive') == 'not reproduced'


def test_share_of_experts_changed():
    before = np.array([[[[0, 1]], [[2, 3]], [[-1, -1]]]])  # B 1, T 3, L 1, k 2; the last is not fed
    after = np.array([[[[1, 0]], [[2, 5]], [[4, 4]]]])
    np.testing.assert_allclose(expert_drift.changed(before, after), [1 / 4])


def test_coefficients_of_the_published_example():
    p = np.array([1e-4])
    np.testing.assert_allclose(kl_gradient.coefficient(p, estimator='k3'), -4999, rtol=1e-4)
    weighted = kl_gradient.coefficient(p, estimator='k3', unbiased=True)
    np.testing.assert_allclose(weighted, 1e-4 / 0.3 * np.log(1e-4 / 0.5), rtol=1e-4)


def test_gates_of_tokens_and_rows():
    log_ratio = np.array([[0.3, -0.1, 0.0], [0.2, 0.0, 0.0]])
    mask = np.array([[1, 1, 1], [1, 0, 0]], bool)
    found = soft_gate.summary(np.where(mask, log_ratio, 0), mask)
    np.testing.assert_allclose(found['variance'], np.var([0.3, -0.1, 0.0]))
    w = np.exp(log_ratio[0])
    gap = np.mean(1 / np.cosh((w - 1) / 2) ** 2) - 1 / np.cosh(np.expm1(0.2 / 3) / 2) ** 2
    over = abs(gap) / (np.var(log_ratio[0]) / 4)
    np.testing.assert_allclose(found['gap over bound, median and .95'], [over, over])
    assert found['near'] == pytest.approx(2 / 4)


def test_lengths_are_as_far_apart_as_asked():
    of = idle_share.lengths(3, 5.0)
    steps = np.array([[of(64 * step + i) for i in range(64)] for step in range(8)])
    apart = steps.max((1, 2)) / steps.min((1, 2))
    assert 4 < np.exp(np.log(apart).mean()) < 6
    assert abs(np.median(steps) / idle_share.MEDIAN - 1) < 0.02


def test_digits_in_their_place():
    assert reward_scale.digits('132', '132') == 1
    assert reward_scale.digits('32', '132') == pytest.approx(2 / 3)
    assert reward_scale.digits('1132', '132') == pytest.approx(3 / 4)
    assert reward_scale.digits('', '7') == 0
    reward = variants.share_of_digits(wrong=-1.0)
    part, whole = (reward(f'{said} ', (), {'answer': '132'}) for said in ('32', '132'))
    assert part.value == pytest.approx(1 / 3) and not part.right
    assert whole.value == 1 and whole.right


def test_variances_of_ratios_over_tokens_and_answers():
    first = np.array([[0.1, 0.3, 9.0], [0.2, 9.0, 9.0]]), np.array([[1, 1, 0], [1, 0, 0]], bool)
    second = np.array([[-0.4, 9.0, 9.0]]), np.array([[1, 0, 0]], bool)
    empty = np.full((1, 3), 9.0), np.zeros((1, 3), bool)
    found = replay_variance.variances([first, second, empty])
    assert found['token'] == pytest.approx(np.var([0.1, 0.3, 0.2, -0.4]))
    assert found['sequence'] == pytest.approx(np.var([0.2, 0.2, -0.4]))


def test_what_is_left_out_of_a_record():
    support = np.array([[[-1, -1], [4, 2], [1, -1]]])
    batch = TokenBatch(
        tokens=np.array([[0, 4, 1]]),
        mask=np.array([[0, 1, 1]]),
        advantages=np.zeros((1, 3)),
        logp_old=np.zeros((1, 3)),
        support=support,
        routing=np.array([[[[0, 3]], [[1, 2]], [[-1, -1]]]], np.int8),
    )
    wide = [[[-1] * 5, [4, 2, -1, -1, -1], [1, -1, -1, -1, -1]]]
    kept = policies.unrecorded(batch, 5, routing=True)
    np.testing.assert_array_equal(kept.support, wide)
    assert (kept.routing == -1).all() and kept.routing.dtype == np.int8
    whole = policies.unrecorded(batch, 5, support=True)
    np.testing.assert_array_equal(whole.support, [[[-1] * 5, range(5), range(5)]])
    np.testing.assert_array_equal(whole.routing, batch.routing)


def test_share_of_tokens_that_a_clip_stops():
    part = types.SimpleNamespace(
        mask=np.ones((1, 5)),
        advantages=np.array([[1.0, 1.0, -1.0, -1.0, 0.0]]),
        logp_old=np.zeros((1, 5)),
    )
    logp_new = np.log([[1.3, 0.5, 0.5, 1.3, 2.0]])  # stopped: the first and the third
    done = types.SimpleNamespace(parts=[part], logp_new=[logp_new])
    assert clip_band.share_of(done, np.array([0.2, 0.2])) == 0.5
    assert clip_band.share_of(done, np.array([0.6, 0.2])) == 0.25


def test_groups_with_a_gradient_and_noise_of_rewards():
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    part = types.SimpleNamespace(
        group=np.array([0, 0, 1, 1]), advantages=mask * [[1.0], [-1.0], [0.0], [0.0]], mask=mask
    )
    assert dynamic_sampling.mixed([part]) == 0.5
    rollout = Rollout(
        tokens=mask,
        mask=mask,
        rewards=np.array([1.0, 1.0, -1.0, -1.0], np.float32),
        positive=np.array([1, 1, 0, 0]),
        group=np.zeros(4, int),
    )
    # With the penalty: 1, .5, -1.5, -2.
    found = dynamic_sampling.noise(rollout)
    assert found['hard'] == 0
    assert found['soft'] == pytest.approx(0.0625 / np.var([1.0, 0.5, -1.5, -2.0]))


def test_a_direction_of_length():
    at = np.array(length_direction.grid(5))
    length = 20 + 2 * at @ [0.6, 0.8] + 0.5 * at[:, 0] * at[:, 1]
    explained, change = length_direction.linear(np.c_[length, length])
    np.testing.assert_allclose(change, 2 * 2 / 20)
    left = 0.25 * np.mean((at[:, 0] * at[:, 1]) ** 2)
    np.testing.assert_allclose(explained, 1 - left / np.var(length))
    assert length_direction.linear(np.full((25, 2), 7.0)) == (0, 0)
    path = np.outer([0.0, 1.0, 3.0], [3.0, 4.0, 0.0, 0.0]) / 5
    axes, share = length_direction.components(path)
    np.testing.assert_allclose(np.abs(axes[0]), [0.6, 0.8, 0, 0], atol=1e-12)
    np.testing.assert_allclose(share, [1, 0], atol=1e-12)


@pytest.mark.slow
def test_a_claim_from_the_policy_to_the_verdict(tmp_path):
    places = [claim_lib.Place(seed, tmp_path, fast=True) for seed in (0, 1)]
    seeds = run.measured('kept_mass', places, 1)
    verdict = run.conclude('kept_mass', seeds, tmp_path)
    assert verdict.word == 'reproduced' and verdict.value < -0.1
    for numbers in seeds:
        np.testing.assert_allclose(numbers['plain'], numbers['mass'], atol=1e-5)
        assert max(numbers['replayed']) < 1e-5
    assert (tmp_path / 'kept_mass.png').is_file()


@pytest.mark.slow
def test_curves_of_an_arm_whose_sampler_differs(tmp_path):
    place = claim_lib.Place(0, tmp_path, fast=True)
    arm = dataclasses.replace(arms.grpo(), sampler=dict(router=1.0, bits=3, stale=1))
    found = learning.curves(place, arm)
    assert found['step'] == [0, 1, 2] and len(found['accuracy']) == 3
    assert all(len(found[name]) == 2 for name in [*learning.KEPT, 'variance', 'first_variance'])
    assert min(found['first_variance']) > 1e-4  # with parameters alike it is rounding
    assert learning.curves(place, arm) == found
    same = learning.curves(place, arms.grpo())
    assert max(same['first_variance']) < 1e-9 < max(same['variance'])


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
    """A folder in which claims share the policies that they start from."""
    return tmp_path_factory.mktemp('claims')


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        'idle_share',
        'reward_scale',
        'sampler_mismatch',
        'replay_variance',
        'clip_band',
        'dynamic_sampling',
        'length_direction',
    ],
)
def test_a_claim_is_measured_judged_and_drawn(name, shared):
    numbers = run.numbers_of(name, claim_lib.Place(0, shared, fast=True))
    verdict = run.conclude(name, [numbers, numbers], shared / 'fast')
    assert verdict.word in ('reproduced', 'not reproduced', 'inconclusive')
    assert np.isfinite([verdict.value, *verdict.interval]).all()
    assert (shared / 'fast' / f'{name}.png').is_file()


def test_additions_that_gain_nothing_something_or_who_knows():
    claim = run.load('additions')
    names = ['clip-higher', 'entropy bonus', 'KL in the loss', 'partial rewards']

    def curve(gain):
        steps, accuracy = list(range(0, 90, 10)), [0.2] + [0.3 + gain] * 8
        return dict(step=steps, accuracy=accuracy, entropy=[0.5] * 8)

    for mean, noise, word in (
        (0.0, 0.001, 'reproduced'),
        (0.05, 0.001, 'not reproduced'),
        (0.0, 0.1, 'inconclusive'),
    ):
        seeds = [{n: curve(0.0) for n in names} for _ in range(5)]
        for seed, wave in zip(seeds, (-1.4, -0.7, 0, 0.7, 1.4), strict=True):
            seed[names[1]] = curve(mean + noise * wave)
        verdict = claim.judge(seeds)
        assert verdict.word == word
        assert verdict.value == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize('name, arms_of', [('tau', None), ('minibatches', (1, 2, 8, 16))])
def test_claims_of_one_gain_judge_and_draw_made_up_curves(name, arms_of):
    from matplotlib.figure import Figure

    claim = run.load(name)
    names = [str(n) for n in arms_of or ('0.5', '1.05', '4')]
    rng = np.random.default_rng(0)

    def curve(gain):
        rise = 0.2 + gain * np.linspace(0, 1, 9) + 0.001 * rng.standard_normal(9)
        return dict(step=list(range(0, 90, 10)), accuracy=rise.tolist(), variance=[0.1] * 8)

    for better in (names[-1], names[1]):
        seeds = [{n: curve(0.3 if n == better else 0.0) for n in names} for _ in range(5)]
        verdict = claim.judge(seeds)
        wanted = {'tau': names[-1], 'minibatches': names[1]}[name]
        assert verdict.word == ('reproduced' if better == wanted else 'not reproduced')
        # The mean of a rise to .3 over eight points after the first.
        assert verdict.value == pytest.approx(0.16875 if better == wanted else 0.0, abs=0.005)
        assert verdict.interval[0] <= verdict.value <= verdict.interval[1]
    claim.draw(Figure(), seeds)
