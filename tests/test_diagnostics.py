"""Diagnostics against float64 numpy, over splits, devices, and what stands off the mask."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt.losses import diagnostics as d
from policyopt.types import LossInputs, Mean, MissingInput, add_metrics

FIELDS = ('logp_new', 'logp_old', 'logp_behavior', 'logp_ref', 'entropy', 'advantages')
diagnose = jax.jit(d.diagnose)


def _inputs(seed=0, rows=12, width=16, dtype=np.float32, scale=0.5):
    """Random rows: the second empty, the third of one token, gaps in the rest."""
    rng = np.random.default_rng(seed)
    base = rng.normal(-2, 1, size=(rows, width))
    drift = {'logp_new': 0, 'logp_old': 1, 'logp_behavior': 1.3, 'logp_ref': 2}
    arrays = {
        name: (base + times * scale * rng.normal(size=base.shape)).astype(dtype)
        for name, times in drift.items()
    }
    arrays['entropy'] = rng.uniform(0, 3, size=base.shape).astype(dtype)
    arrays['advantages'] = rng.normal(size=base.shape).astype(dtype)
    mask = rng.random(base.shape) < 0.7
    mask[1], mask[2] = False, np.arange(width) == 3
    return LossInputs(mask=mask.astype(np.float32), **arrays)


def _numpy(inputs):
    """Every scalar metric in float64, by loops over rows and tokens."""
    x = {name: np.asarray(getattr(inputs, name), np.float64) for name in FIELDS}
    keep = np.asarray(inputs.mask) != 0
    rows = [np.flatnonzero(k) for k in keep]
    filled = [(i, r) for i, r in enumerate(rows) if len(r)]

    def tokens(array):
        return np.concatenate([array[i, r] for i, r in filled])

    def per_row(array, reduce):
        return np.array([reduce(array[i, r]) for i, r in filled])

    def share(weights):
        return weights.sum() ** 2 / (len(weights) * (weights**2).sum())

    l = x['logp_new'] - x['logp_old']
    lb = x['logp_new'] - x['logp_behavior']
    variances = [np.var(np.exp(l[i, r]), ddof=1) for i, r in filled if len(r) > 1]
    want = {
        'ratio/mean': tokens(np.exp(l)).mean(),
        'ratio/extreme': (np.abs(tokens(l)) > 20).mean(),
        'ratio/nonfinite': 0.0,
        'ratio/row_variance': np.mean(variances),
        'ess_old/token': share(np.exp(tokens(l))),
        'ess_old/sequence': share(np.exp(per_row(l, np.sum))),
        'ess_behavior/token': share(np.exp(tokens(lb))),
        'ess_behavior/sequence': share(np.exp(per_row(lb, np.sum))),
        'drift/mean': -per_row(lb, np.mean).mean(),
        'entropy': tokens(x['entropy']).mean(),
    }
    pairs = {
        'kl_old': (x['logp_old'], x['logp_new']),
        'kl_behavior': (x['logp_behavior'], x['logp_new']),
        'kl_reference': (x['logp_new'], x['logp_ref']),
    }
    for name, (p, q) in pairs.items():
        r = tokens(q - p)
        want |= {
            f'{name}/k1': np.mean(-r),
            f'{name}/k2': np.mean(r**2 / 2),
            f'{name}/k3': np.mean(np.exp(r) - 1 - r),
        }
    samples = {
        'ratio/token_log': tokens(l),
        'ratio/sequence_log': per_row(l, np.mean),
        'drift/rows': -per_row(lb, np.mean),
    }
    return want, samples


@pytest.mark.parametrize(('dtype', 'rtol'), [(np.float64, 1e-12), (np.float32, 2e-6)])
def test_every_metric_is_numpy_s_in_float64(dtype, rtol):
    inputs = _inputs(dtype=dtype)
    with jax.enable_x64(dtype == np.float64):
        metrics = diagnose(inputs)
        scalars = {k: float(m.value) for k, m in metrics.items() if not isinstance(m, d.Histogram)}
    want, samples = _numpy(inputs)
    assert set(metrics) == set(want) | set(samples)
    for name, value in want.items():
        np.testing.assert_allclose(scalars[name], value, rtol=rtol, atol=rtol / 10, err_msg=name)
    for name, values in samples.items():
        want_counts = np.zeros(len(d.CENTRES), int)
        for value in values.astype(np.float32):
            # Above 0 a bin holds its lower edge, below 0 its upper one.
            side = 'right' if value > 0 else 'left'
            want_counts[np.searchsorted(d.EDGES, value, side)] += 1
        np.testing.assert_array_equal(metrics[name].counts, want_counts, err_msg=name)


@pytest.mark.parametrize('cuts', [(6,), (1, 2, 3), (2, 11)])
def test_sums_over_microbatches_are_the_whole(cuts):
    inputs = _inputs(3)
    whole = diagnose(inputs)
    edges = [0, *cuts, 12]
    parts = [
        diagnose(jax.tree.map(lambda x, a=a, b=b: x[a:b], inputs))
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    for order in (parts, parts[::-1]):
        _assert_same(functools.reduce(add_metrics, order), whole)


def _assert_same(got, want, rtol=1e-6):
    assert set(got) == set(want)
    for name in want:
        assert type(got[name]) is type(want[name])
        if isinstance(want[name], d.Histogram):
            np.testing.assert_array_equal(got[name].counts, want[name].counts, err_msg=name)
            continue
        assert got[name].count == want[name].count
        np.testing.assert_allclose(
            got[name].value, want[name].value, rtol=rtol, atol=rtol, err_msg=name
        )


def test_zeros_are_the_neutral_element():
    metrics = diagnose(_inputs(4))
    zeros = jax.tree.map(jnp.zeros_like, metrics)
    chex.assert_trees_all_equal(add_metrics(metrics, zeros), metrics)
    chex.assert_trees_all_equal(add_metrics(zeros, metrics), metrics)
    chex.assert_trees_all_equal(add_metrics(zeros, zeros), zeros)


@pytest.mark.parametrize('junk', [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_off_the_mask_matters(junk):
    inputs = _inputs(5)
    off = inputs.mask == 0
    spoiled = {name: np.where(off, junk, getattr(inputs, name)) for name in FIELDS}
    spoiled = {name: value.astype(np.float32) for name, value in spoiled.items()}
    chex.assert_trees_all_equal(diagnose(dataclasses.replace(inputs, **spoiled)), diagnose(inputs))


def test_mask_of_any_dtype():
    inputs = _inputs(5)
    for mask in (inputs.mask != 0, inputs.mask.astype(np.int32), inputs.mask * 0.25):
        chex.assert_trees_all_equal(
            diagnose(dataclasses.replace(inputs, mask=mask)), diagnose(inputs)
        )


def test_empty_batch_is_finite_and_zero():
    inputs = dataclasses.replace(_inputs(), mask=np.zeros((12, 16), bool))
    metrics = diagnose(inputs)
    chex.assert_tree_all_finite(metrics)
    for name, metric in metrics.items():
        assert metric.count == 0, name
        if isinstance(metric, d.Histogram):
            assert metric.quantile(0.5) == metric.maximum == metric.minimum == 0
        else:
            assert metric.value == 0, name


def test_a_token_that_is_not_finite_is_counted():
    inputs = _inputs()
    logp = inputs.logp_new.copy()
    i, t = np.argwhere(inputs.mask)[0]
    logp[i, t] = np.nan
    metrics = diagnose(dataclasses.replace(inputs, logp_new=logp))
    assert metrics['ratio/nonfinite'].total == 1
    assert np.isnan(metrics['ratio/mean'].value)
    assert metrics['ratio/token_log'].count == inputs.mask.sum()


@pytest.mark.parametrize('size', [60.0, -60.0])
def test_huge_log_ratios_stay_finite_and_are_counted(size):
    inputs = _inputs(scale=1e-3)
    logp = inputs.logp_new.copy()
    logp[0] += size
    metrics = diagnose(dataclasses.replace(inputs, logp_new=logp))
    chex.assert_tree_all_finite(metrics)
    assert metrics['ratio/extreme'].total == (inputs.mask[0] != 0).sum()
    edge = metrics['ratio/token_log'].maximum if size > 0 else metrics['ratio/token_log'].minimum
    np.testing.assert_allclose(edge, size, rtol=d.RESOLUTION)


def test_names_follow_the_inputs_that_are_present():
    base = dataclasses.replace(_inputs(), logp_behavior=None, logp_ref=None, entropy=None)
    names = set(jax.eval_shape(d.diagnose, base))
    assert not {n for n in names if n.startswith(('kl_reference', 'kl_beh', 'drift', 'entropy'))}
    assert {'kl_old/k3', 'ess_old/token', 'ratio/token_log'} <= names
    for part in (d.kl_to_behavior, d.kl_to_reference, d.drift, d.entropy):
        with pytest.raises(MissingInput, match=part.__name__):
            part(base)


def test_wrong_shapes_raise():
    inputs = _inputs()
    with pytest.raises(AssertionError):
        d.diagnose(dataclasses.replace(inputs, logp_ref=inputs.logp_ref[:, :-1]))
    with pytest.raises(AssertionError):
        d.diagnose(dataclasses.replace(inputs, logp_new=inputs.logp_new[0]))


def test_with_and_without_jit_agree():
    inputs = _inputs(7, rows=4, width=6)
    _assert_same(d.diagnose(inputs), diagnose(inputs))


def test_no_gradient_and_one_trace():
    traced = chex.assert_max_traces(d.diagnose, n=1)

    @jax.jit
    def slope(inputs):
        def loss(logp):
            metrics = traced(dataclasses.replace(inputs, logp_new=logp))
            return sum(m.value for m in metrics.values() if isinstance(m, Mean))

        return jax.grad(loss)(inputs.logp_new)

    for seed in range(3):
        np.testing.assert_array_equal(slope(_inputs(seed)), 0)


def test_low_precision_is_raised_to_float32():
    inputs = _inputs()
    low = {name: getattr(inputs, name).astype(jnp.bfloat16) for name in FIELDS}
    high = {name: value.astype(np.float32) for name, value in low.items()}
    _assert_same(
        diagnose(dataclasses.replace(inputs, **low)), diagnose(dataclasses.replace(inputs, **high))
    )


def test_a_batch_sharded_over_eight_devices_equals_one():
    assert jax.device_count() >= 8
    inputs = jax.tree.map(jnp.asarray, _inputs(8, rows=16))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('data',))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    sharded = diagnose(jax.tree.map(lambda x: jax.device_put(x, spread), inputs))
    assert all(x.is_fully_replicated for x in jax.tree.leaves(sharded))
    _assert_same(sharded, diagnose(inputs))


def test_histogram_covers_and_resolves_what_it_states():
    edges = d.EDGES[len(d.EDGES) // 2 :]
    np.testing.assert_array_equal(d.EDGES, -d.EDGES[::-1])
    assert 9e-7 < edges[0] < 1e-6 and edges[-1] > 100
    assert (np.diff(edges) / edges[:-1] <= 2 * d.RESOLUTION + 1e-12).all()
    values = np.concatenate([np.geomspace(1e-6, 127, 4001), -np.geomspace(1e-6, 127, 4001)])
    centres = d.CENTRES[np.searchsorted(d.EDGES, values)]
    assert (np.abs(centres - values) <= d.RESOLUTION * np.abs(values)).all()


def test_histogram_bins_by_hand():
    x = jnp.asarray([0.0, -0.0, 9e-7, -9e-7, 1.0, 1.06, -1.0, 128.0, -200.0, np.inf, np.nan])
    found = jax.jit(d.Histogram.of)(x, jnp.ones(x.shape))
    zero = (len(d.CENTRES) - 1) // 2
    assert found.counts[zero] == 4
    one = zero + 1 + 20 * 16  # 20 octaves above 2^-20
    assert d.CENTRES[one] == 1 + 1 / 32
    assert (found.counts[one], found.counts[zero - (one - zero)]) == (2, 1)
    assert (found.counts[-1], found.counts[0]) == (3, 1)
    assert (found.count, found.maximum, found.minimum) == (11, 128, -128)


@pytest.mark.parametrize('n', [1, 2, 7, 1000])
def test_quantiles_are_numpy_s_within_the_resolution(n):
    rng = np.random.default_rng(n)
    q = np.array([0, 0.01, 0.1, 0.25, 0.5, 0.9, 0.99, 1])
    quantile = jax.jit(lambda x: d.Histogram.of(x, jnp.ones(x.shape)).quantile(q))
    for scale in (1e-5, 1e-2, 3.0):
        x = (rng.normal(size=n) * scale).astype(np.float32)
        got, want = quantile(x), np.quantile(x, q)
        ordered = np.sort(np.abs([np.quantile(x, q, method=m) for m in ('lower', 'higher')]), 0)
        assert (np.abs(got - want) <= d.RESOLUTION * ordered[-1] * 1.0001 + 2.0**-20).all()
        single = d.Histogram.of(jnp.asarray(x), jnp.ones(n))
        np.testing.assert_allclose(single.maximum, x.max(), rtol=d.RESOLUTION, atol=2.0**-20)
        np.testing.assert_allclose(single.minimum, x.min(), rtol=d.RESOLUTION, atol=2.0**-20)


def test_effective_sample_size_by_hand_and_in_log_space():
    ess = jax.jit(d.EffectiveSampleSize.of)
    on = jnp.ones(4)
    np.testing.assert_allclose(ess(jnp.zeros(4), on).value, 1, rtol=1e-6)
    # weights 1, 3: (1 + 3)^2 / (2 (1 + 9)) = .8
    two = jnp.asarray([1.0, 1, 0, 0])
    np.testing.assert_allclose(ess(jnp.log(jnp.asarray([1.0, 3, 5, 7])), two).value, 0.8, rtol=1e-6)
    # exp(500) overflows; shifting all log weights changes nothing.
    weights = jnp.asarray([0.0, 1, 2, 3])
    np.testing.assert_allclose(ess(weights + 500, on).value, ess(weights, on).value, rtol=2e-4)
    np.testing.assert_allclose(ess(jnp.asarray([900.0, 0, 0, 0]), on).value, 1 / 4, rtol=2e-4)


def test_exp_excess_is_accurate_about_zero_and_bounded():
    x = np.concatenate([np.geomspace(1e-6, 50, 200), -np.geomspace(1e-6, 50, 200)])
    x = x.astype(np.float32)
    exact = x.astype(np.float64)
    # The defining difference itself loses digits below 1e-3; there the series is the truth.
    series = exact**2 / 2 * (1 + exact / 3 * (1 + exact / 4 * (1 + exact / 5)))
    want = np.where(np.abs(exact) < 1e-2, series, np.expm1(exact) - exact)
    np.testing.assert_allclose(jax.jit(d.exp_excess)(x), want, rtol=2e-5)
    assert np.isfinite(d.exp_excess(jnp.asarray([100.0, -1e4]))).all()


@pytest.mark.parametrize('vocabulary', [2, 5])
def test_kl_estimates_have_the_stated_expectations(vocabulary):
    """Enumerated: each token once, weighted by the probability of the policy that drew it."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=(3, vocabulary)).astype(np.float32)
    p, q, b = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    exact = np.sum(p * np.log(p / q))

    def expectation(drawn_from, log_weight):
        total = dict.fromkeys(('k1', 'k2', 'k3'), 0.0)
        for v in range(vocabulary):
            one = lambda x, v=v: jnp.full((1, 1), np.log(x[v]))  # noqa: E731
            weight = one(p) - one(b) if log_weight else None
            found = d.kl_estimates(one(p), one(q), jnp.ones((1, 1)), weight)
            total = {k: total[k] + drawn_from[v] * float(found[k].value) for k in total}
        return total

    for got in (expectation(p, False), expectation(b, True)):
        np.testing.assert_allclose([got['k1'], got['k3']], exact, rtol=1e-4)
        assert got['k2'] != pytest.approx(exact, rel=1e-3)
    assert expectation(b, False)['k1'] != pytest.approx(exact, rel=1e-2)
