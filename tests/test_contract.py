"""The laws that every algorithm keeps, over all of them, jitted and not."""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import policyopt as po
from policyopt.types import add_metrics
from tests.batches import (
    ALGORITHMS,
    INPUT_FIELDS,
    algorithm,
    loss_inputs,
    random_arrays,
    rollout,
    token_batch,
    told,
)

every_algorithm = pytest.mark.parametrize('name', ALGORITHMS)
seeds = st.integers(0, 2**31 - 1)
AGGREGATE = {  # how each algorithm weighs its tokens
    'token_mean': 'cispo dapo magistral ppo_clip ppo_penalty reinforce reinforce_pp trpo '
    'vapo vc_ppo',
    'sequence_mean': 'deepseek_v32 gmpo grpo gspo gspo_step gspo_token gspo_turn sapo',
    'sequence_sum': 'minirl rloo',
    'constant_length': 'dr_grpo',
}
CRITIC = ('ppo_clip', 'ppo_penalty', 'vapo', 'vc_ppo')  # advantages from values
ROW_RATIO = ('gmpo', 'gspo')  # whose ratio, and so whose gradient, is one for all tokens of a row
SEGMENT_RATIO = ('gspo_step', 'gspo_turn')  # or of a segment
GRADED = ('logp_new', 'values')


def numpy_weights(name: str, mask: np.ndarray) -> np.ndarray:
    kinds = {n: kind for kind, names in AGGREGATE.items() for n in names.split()}
    kind = told(kinds, name, 'AGGREGATE of tests/test_contract.py')
    n = mask.sum(1, keepdims=True)
    rows = max((n > 0).sum(), 1)
    if kind == 'token_mean':
        return mask / max(mask.sum(), 1)
    if kind == 'sequence_mean':
        return mask / np.maximum(n, 1) / rows
    return mask / rows / (16 if kind == 'constant_length' else 1)


def value_and_grads(alg, inputs, weights):
    def run(graded):
        out = alg.loss.apply(inputs.replace(**graded), weights)
        return out.loss, out.metrics

    return jax.value_and_grad(run, has_aux=True)({k: getattr(inputs, k) for k in GRADED})


@functools.cache
def compiled(name: str):
    """Jitted (inputs, weights) -> ((loss, metrics), gradients), and weigh, for one algorithm."""
    alg = algorithm(name)
    return jax.jit(functools.partial(value_and_grads, alg)), jax.jit(alg.loss.weigh)


def run(name: str, arrays: dict):
    grad, weigh = compiled(name)
    weights = weigh(token_batch(arrays))
    (loss, metrics), grads = grad(loss_inputs(arrays, algorithm(name)), weights)
    return np.asarray(loss), jax.tree.map(np.asarray, grads), metrics


def assert_same(a, b, scale=1.0, tolerance=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


def size(name: str, arrays: dict, grads) -> float:
    """What float32 rounding is relative to: sum |weight x term|, terms that cancel included."""
    terms = numpy_weights(name, arrays['mask']) * np.abs(arrays['advantages'])
    return max([terms.sum()] + [np.abs(x).sum() for x in jax.tree.leaves(grads)])


@every_algorithm
@hypothesis.given(seed=seeds)
def test_on_policy_gradient_is_reinforce(name, seed):
    arrays = random_arrays(seed)
    for field in ('logp_old', 'logp_behavior', 'logp_ref'):
        arrays[field] = arrays['logp_new']
    arrays['positive'] = np.zeros_like(arrays['positive'])  # the NLL term is not the policy term
    _, grads, _ = run(name, arrays)
    expected = -numpy_weights(name, arrays['mask']) * arrays['advantages']
    np.testing.assert_allclose(grads['logp_new'], expected, rtol=1e-4, atol=1e-6)


@every_algorithm
@hypothesis.given(seed=seeds, poison=st.sampled_from([np.nan, np.inf, -np.inf, 1e38]))
def test_nothing_off_mask_matters(name, seed, poison):
    arrays = random_arrays(seed)
    loss, grads, metrics = run(name, arrays)
    off = arrays['mask'] == 0
    poisoned = dict(arrays)
    for field in INPUT_FIELDS:
        if arrays[field].dtype == np.float32:
            poisoned[field] = np.where(off, np.float32(poison), arrays[field])
    loss2, grads2, metrics2 = run(name, poisoned)
    chex.assert_trees_all_equal((loss, grads, metrics), (loss2, grads2, metrics2))
    assert all(not g[off].any() for g in grads.values())


@every_algorithm
@hypothesis.given(seed=seeds)
def test_microbatches_add_up(name, seed):
    arrays = random_arrays(seed)
    loss, grads, metrics = run(name, arrays)
    grad, weigh = compiled(name)
    weights = weigh(token_batch(arrays))
    order = np.random.default_rng(seed).permutation(len(arrays['mask']))
    total, parts, sums = 0.0, jax.tree.map(np.zeros_like, grads), None
    for rows in np.split(order, 4):
        part = loss_inputs({k: v[rows] for k, v in arrays.items()}, algorithm(name))
        (piece, counted), slopes = grad(part, jax.tree.map(lambda w, r=rows: w[r], weights))
        total += float(piece)
        sums = counted if sums is None else add_metrics(sums, counted)
        for field in GRADED:
            parts[field][rows] = slopes[field]
    scale = size(name, arrays, grads)
    np.testing.assert_allclose(total, loss, atol=1e-6 * scale, rtol=1e-6)
    assert_same(parts, grads, scale)
    assert_same(
        {k: m.count for k, m in metrics.items()}, {k: m.count for k, m in sums.items()}, 1, 0
    )
    for key, metric in metrics.items():
        np.testing.assert_allclose(sums[key].total, metric.total, rtol=1e-5, atol=1e-4, err_msg=key)


@every_algorithm
@hypothesis.given(seed=seeds)
@hypothesis.settings(max_examples=10)
def test_order_groups_and_width_do_not_matter(name, seed):
    arrays = random_arrays(seed)
    loss, grads, _ = run(name, arrays)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(arrays['mask']))
    loss2, grads2, _ = run(name, {k: v[order] for k, v in arrays.items()})
    assert_same(
        (loss2, grads2), (loss, {k: g[order] for k, g in grads.items()}), size(name, arrays, grads)
    )

    ids = np.unique(arrays['group'])
    names = dict(zip(ids, rng.permutation(len(ids)) * 1000 - 7, strict=True))
    renamed = np.array([names[g] for g in arrays['group']], np.int32)
    loss3, grads3, _ = run(name, {**arrays, 'group': renamed})
    assert_same((loss3, grads3), (loss, grads), size(name, arrays, grads))

    def widen(x):
        return np.pad(x, ((0, 0), (0, 3)), mode='edge') if x.ndim == 2 else x

    wide = {k: widen(v) for k, v in arrays.items()}
    wide['mask'][:, -3:] = 0
    loss4, grads4, _ = run(name, wide)
    assert_same(
        (loss4, {k: g[:, :-3] for k, g in grads4.items()}), (loss, grads), size(name, arrays, grads)
    )


@every_algorithm
@hypothesis.given(seed=seeds, drift=st.sampled_from([20.0, 40.0, 60.0]))
def test_finite_for_huge_log_ratios(name, seed, drift):
    arrays = random_arrays(seed)
    rng = np.random.default_rng(seed)
    for field in ('logp_old', 'logp_behavior', 'logp_ref'):
        away = rng.choice([-1, 0, 1], arrays['mask'].shape)
        arrays[field] = (arrays['logp_new'] + drift * away).astype(np.float32)
    loss, grads, metrics = run(name, arrays)
    assert np.isfinite(loss)
    chex.assert_tree_all_finite((grads, metrics))
    if name in ('grpo', 'dapo', 'sapo', 'cispo'):
        apart = np.abs(arrays['logp_new'] - arrays['logp_old']) >= 20
        assert int(metrics['policy/extreme'].total) == (apart & (arrays['mask'] == 1)).sum()


@every_algorithm
def test_empty_batch_has_no_loss_and_no_gradient(name):
    arrays = random_arrays(3)
    arrays['mask'] = np.zeros_like(arrays['mask'])
    loss, grads, metrics = run(name, arrays)
    assert loss == 0 and all(not g.any() for g in grads.values())
    chex.assert_tree_all_finite(metrics)
    assert all(m.value == 0 for m in metrics.values())


@every_algorithm
def test_with_and_without_jit_and_one_trace(name):
    alg = algorithm(name)
    traces = []

    def counted(inputs, weights):
        traces.append(1)
        return value_and_grads(alg, inputs, weights)

    jitted = jax.jit(counted)
    for seed in (1, 2):
        arrays = random_arrays(seed, rows=4, width=5)
        inputs, weights = loss_inputs(arrays, alg), alg.loss.weigh(token_batch(arrays))
        (loss, _), grads = jitted(inputs, weights)
    assert len(traces) == 1
    (loss2, _), grads2 = value_and_grads(alg, jax.tree.map(jnp.asarray, inputs), weights)
    assert_same((loss2, grads2), (loss, grads), size(name, arrays, grads))


@every_algorithm
def test_eight_devices_equal_one(name):
    arrays = random_arrays(11, rows=16)
    loss, grads, _ = run(name, arrays)
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec('data'))
    alg = algorithm(name)
    coefficients = po.losses.controllers.init(alg.controllers)
    put = functools.partial(jax.tree.map, lambda x: jax.device_put(x, rows))
    inputs = put(loss_inputs(arrays, alg).replace(coefficients={}))
    weights = compiled(name)[1](put(token_batch(arrays)))
    inputs = inputs.replace(coefficients=coefficients)
    (loss2, _), grads2 = compiled(name)[0](inputs, weights)
    assert not grads2['logp_new'].sharding.is_fully_replicated
    assert_same((loss2, grads2), (loss, grads), size(name, arrays, grads))


GROUP_BASELINE = [n for n in ALGORITHMS if n not in CRITIC]


@functools.cache
def estimator(name: str):
    return jax.jit(algorithm(name).advantages)


@every_algorithm
def test_the_rollout_side_is_jittable_and_finite(name):
    alg = algorithm(name)

    @jax.jit
    def judge(rolled):
        shaped = alg.shape(rolled)
        return alg.keep(shaped), alg.advantages(shaped), shaped.mask

    for seed in range(3):
        rolled = rollout(seed)
        keep, estimates, mask = judge(rolled)
        assert keep.shape == (12,) and keep.dtype == bool
        chex.assert_tree_all_finite(estimates)
        assert not np.asarray(estimates.advantages)[np.asarray(mask) == 0].any()


@pytest.mark.parametrize('name', GROUP_BASELINE)
@hypothesis.given(seed=seeds, shift=st.floats(-20, 20))
@hypothesis.settings(max_examples=10)
def test_a_reward_shift_changes_no_advantage(name, seed, shift):
    estimate, rolled = estimator(name), rollout(seed)
    shifted = rolled.replace(rewards=rolled.rewards + np.float32(shift))
    before, after = estimate(rolled).advantages, estimate(shifted).advantages
    np.testing.assert_allclose(after, before, atol=2e-4)


def test_every_algorithm_has_a_known_aggregate():
    assert sorted(' '.join(AGGREGATE.values()).split()) == sorted(ALGORITHMS)


@every_algorithm
@pytest.mark.parametrize('correction', ['truncated', 'masked'])
def test_importance_corrections_go_with_any(name, correction):
    gate = {
        'truncated': po.losses.truncated_importance(1.5),
        'masked': po.losses.masked_importance(0.8, 1.5),
    }[correction]
    arrays = random_arrays(5)
    arrays['positive'] = np.zeros_like(arrays['positive'])
    arrays['logp_new'] = arrays['logp_ref'] = arrays['logp_old']
    if name in ('deepseek_v32', 'minirl'):  # their own gates look at the sampler too
        arrays['advantages'] = np.abs(arrays['advantages'])
    alg = algorithm(name, gates=[gate])
    inputs, weights = loss_inputs(arrays, alg), alg.loss.weigh(token_batch(arrays))
    _, grads = value_and_grads(alg, jax.tree.map(jnp.asarray, inputs), weights)
    rho = np.exp(arrays['logp_old'] - arrays['logp_behavior'])
    weight = (
        np.minimum(rho, 1.5) if correction == 'truncated' else rho * (rho >= 0.8) * (rho <= 1.5)
    )
    if name == 'minirl':
        weight = weight * rho
    term = numpy_weights(name, arrays['mask']) * weight * arrays['advantages']
    if name in ROW_RATIO:  # its tokens share the gated sum
        n = np.maximum(arrays['mask'].sum(1, keepdims=True), 1)
        term = arrays['mask'] * term.sum(1, keepdims=True) / n
    if name in SEGMENT_RATIO:
        same = arrays['segment'][:, :, None] == arrays['segment'][:, None, :]
        same = same * arrays['mask'][:, None, :]
        term = arrays['mask'] * (same * term[:, None, :]).sum(-1) / np.maximum(same.sum(-1), 1)
    np.testing.assert_allclose(grads['logp_new'], -term, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@every_algorithm
def test_the_laws_over_many_batches(name):
    """The laws above with fresh random batches: 100 of each, in one process."""
    for law, extra in (
        (test_on_policy_gradient_is_reinforce, {}),
        (test_nothing_off_mask_matters, {'poison': np.float32(np.nan)}),
        (test_microbatches_add_up, {}),
        (test_order_groups_and_width_do_not_matter, {}),
        (test_finite_for_huge_log_ratios, {'drift': 60.0}),
    ):
        for seed in range(1000, 1100):
            law.hypothesis.inner_test(name=name, seed=seed, **extra)
