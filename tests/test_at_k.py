"""pass@k, majority votes and intervals against enumeration and simple loops."""

import fractions
import itertools
import math
import random

import numpy as np
import pytest

from policyopt import at_k


def every_subset(marks, k):
    return list(itertools.combinations(range(len(marks)), k))


@pytest.mark.parametrize('n', [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        marks = [1] * c + [0] * (n - c)
        subsets = every_subset(marks, k)
        expected = sum(any(marks[i] for i in s) for s in subsets) / len(subsets)
        np.testing.assert_allclose(at_k.pass_at_k([c], n, k), [expected], rtol=1e-13)


@pytest.mark.parametrize(('n', 'k'), [(1000, 1), (1000, 10), (1000, 500), (4000, 3999)])
def test_pass_at_k_of_many_answers_is_exact(n, k):
    counts = [0, 1, 2, 17, n // 2, n - 1, n]
    exact = [float(1 - fractions.Fraction(math.comb(n - c, k), math.comb(n, k))) for c in counts]
    np.testing.assert_allclose(at_k.pass_at_k(counts, n, k), exact, rtol=1e-11)


def test_counts_outside_their_range_are_named():
    with pytest.raises(ValueError, match='k is 5; legal is 1 to the 4 answers'):
        at_k.pass_at_k([1], 4, 5)
    with pytest.raises(ValueError, match='k is 0'):
        at_k.majority_at_k([2, 1], [True, False], 0)
    with pytest.raises(ValueError, match='correct has 0 to 5; legal is 0 to 4'):
        at_k.pass_at_k([0, 5], 4, 2)


def vote(classes, right, k):
    """Mean over all subsets of the share that right classes have among those with most votes."""
    total = 0
    subsets = list(itertools.combinations(classes, k))
    for subset in subsets:
        counts = {c: subset.count(c) for c in subset}
        winners = [c for c in counts if counts[c] == max(counts.values())]
        total += fractions.Fraction(sum(right[c] for c in winners), len(winners))
    return float(total / len(subsets))


PARTITIONS = [
    ([1], [1]),
    ([3], [0]),
    ([2, 2], [1, 0]),
    ([1, 1, 1, 1, 1], [1, 0, 0, 0, 0]),
    ([4, 3, 1], [0, 1, 0]),
    ([2, 2, 2, 2], [1, 1, 0, 0]),
    ([3, 1, 2, 1, 1], [0, 1, 0, 1, 0]),
    ([5, 4], [0, 1]),
]


@pytest.mark.parametrize(('sizes', 'right'), PARTITIONS)
def test_majority_is_the_mean_over_all_subsets(sizes, right):
    classes = [c for c, size in enumerate(sizes) for _ in range(size)]
    for k in range(1, len(classes) + 1):
        found = at_k.majority_at_k(sizes, [bool(x) for x in right], k)
        assert found == pytest.approx(vote(classes, right, k), abs=1e-12), k


def test_majority_of_random_partitions():
    draw = random.Random(0)
    for _ in range(30):
        sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        right = [draw.random() < 0.4 for _ in sizes]
        classes = [c for c, size in enumerate(sizes) for _ in range(size)]
        k = draw.randint(1, len(classes))
        found = at_k.majority_at_k(sizes, right, k)
        assert found == pytest.approx(vote(classes, right, k), abs=1e-12)


def test_majority_of_many_answers():
    # Equal halves win as often; all answers elect the largest; all votes add up to 1.
    for n, k in [(2000, 1), (2000, 777), (2000, 2000)]:
        half = at_k.majority_at_k([n // 2, n // 2], [True, False], k)
        assert half == pytest.approx(0.5, abs=1e-9)
    assert at_k.majority_at_k([301, 300, 399], [True, True, False], 1000) == 0
    sizes = [60, 40, 20, 5, 1, 1, 1]
    shares = [at_k.majority_at_k(sizes, [i == j for j in range(7)], 50) for i in range(7)]
    assert sum(shares) == pytest.approx(1, abs=1e-10)
    assert shares == sorted(shares, reverse=True)
    # Two answers with a tie shared are no better than one.
    assert at_k.majority_at_k([3, 5, 2], [True, False, False], 2) == pytest.approx(0.3)


# --------------------------------------------------------------------------------------- intervals


def bootstrap(column, count, seed):
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(column, k=len(column))) / len(column) for _ in range(count))
    return means[round(0.025 * count)], means[round(0.975 * count)]


def test_bootstrap_agrees_with_a_simple_one():
    values = np.random.default_rng(0).beta(1, 2, size=(40, 2))
    found = at_k.intervals(values, seed=1, single=False)
    for column in range(2):
        expected = bootstrap(values[:, column].tolist(), 6000, seed=column)
        np.testing.assert_allclose(found[:, column], expected, atol=0.006)
    np.testing.assert_array_equal(found, at_k.intervals(values, seed=1, single=False))
    assert (found != at_k.intervals(values, seed=2, single=False)).any()


def test_bootstrap_has_the_spread_of_a_mean():
    values = np.random.default_rng(3).random((500, 1))
    means = at_k.resampled(values, 0, count=3000)
    np.testing.assert_allclose(means.mean(), values.mean(), atol=2e-3)
    np.testing.assert_allclose(means.std(), values.std() / np.sqrt(500), rtol=0.05)


def test_where_resampling_says_nothing_wilson_does():
    ones = np.ones((10, 1))
    np.testing.assert_allclose(at_k.intervals(ones, 0, single=False)[:, 0], (0.7225, 1), atol=1e-4)
    marks = np.array([[1.0]] * 8 + [[0.0]] * 2)
    single = at_k.intervals(marks, 0, single=True)[:, 0]
    np.testing.assert_allclose(single, (0.4902, 0.9433), atol=1e-4)
    assert at_k.intervals(np.zeros((0, 2)), 0, single=False).tolist() == [[0, 0], [1, 1]]


# --------------------------------------------------------------------------------------- summaries


def test_summary_of_a_table_by_hand(tmp_path):
    correct = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    votes = [[0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 1, 1]]
    found = at_k.summary(correct, votes, (1, 2, 4), seed=0)
    assert list(found) == ['avg@4', 'pass@1', 'pass@2', 'pass@4', 'maj@2', 'maj@4']
    values = [figure.value for figure in found.values()]
    expected = [1 / 4, 1 / 4, (5 / 6 + 1 / 2) / 3, 2 / 3, 1 / 4, 1 / 3]
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    assert all(f.low <= f.value <= f.high for f in found.values())
    assert at_k.draw(tmp_path / 'curve.png', correct, found, 0, 'three problems')
    assert (tmp_path / 'curve.png').read_bytes()[:4] == b'\x89PNG'
    single = at_k.summary(correct[:, :1], [[0], [0], [0]], (1,), seed=0)
    assert list(single) == ['avg@1'] and single['avg@1'].value == 2 / 3
    assert (single['avg@1'].low, single['avg@1'].high) == at_k.wilson(2, 3)
    assert at_k.curve_ks(8) == list(range(1, 9)) and at_k.curve_ks(256)[-1] == 256
