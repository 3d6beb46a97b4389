"""Claims of the literature: what docs say is what the numbers there give; parts against numpy."""

import json
import pathlib

import numpy as np
import pytest

from experiments import claim as claim_lib
from experiments import run
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


def test_a_seed_is_measured_once(tmp_path, monkeypatch):
    place = claim_lib.Place(3, tmp_path)
    first = run.numbers_of('kl_gradient', place)
    monkeypatch.setattr(run, 'load', None)
    assert run.numbers_of('kl_gradient', place) == first


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
