"""Claims of the literature: what docs say is what the numbers there give; parts against numpy."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from experiments import arms, curves, learning, run, sources
from experiments import claim as claim_lib
from experiments.claims import expert_drift, kl_gradient, soft_gate

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
    assert max(same['first_variance']) < 1e-9 < min(same['variance'])
