"""The laws that every algorithm keeps, over all of them, jitted and not."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import policyopt as po
from policyopt import contract
from policyopt.contract import assert_same, value_and_grads
from tests.batches import (
    ALGORITHMS,
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


def numpy_weights(name: str, mask: np.ndarray) -> np.ndarray:
    kinds = {n: kind for kind, names in AGGREGATE.items() for n in names.split()}
    kind = told(kinds, name, 'AGGREGATE of tests/test_contract.py')
    n = mask.sum(1, keepdims=True)
    rows = max((n > 0).sum(), 1)
    if kind == 'token_mean':
        return mask / max(mask.sum(), 1)
    if kind == 'sequence_mean':
        return mask / np.maximum(n, 1) / rows
    assert kind in ('sequence_sum', 'constant_length'), f'{kind} is new: write its weights here'
    return mask / rows / (16 if kind == 'constant_length' else 1)


@functools.cache
def subject(name: str) -> contract.Subject:
    return contract.subject(algorithm(name))


def size(name: str, arrays: dict, grads) -> float:
    return contract.size(numpy_weights(name, arrays['mask']), arrays, grads)


@every_algorithm
@hypothesis.given(seed=seeds)
def test_on_policy_gradient_is_reinforce(name, seed):
    contract.on_policy(subject(name), seed, functools.partial(numpy_weights, name))


@every_algorithm
@hypothesis.given(seed=seeds, poison=st.sampled_from([np.nan, np.inf, -np.inf, 1e38]))
def test_nothing_off_mask_matters(name, seed, poison):
    contract.off_mask(subject(name), seed, [poison])


@every_algorithm
@hypothesis.given(seed=seeds)
def test_microbatches_add_up(name, seed):
    contract.microbatches(subject(name), seed)


@every_algorithm
@hypothesis.given(seed=seeds)
@hypothesis.settings(max_examples=10)
def test_order_groups_and_width_do_not_matter(name, seed):
    contract.arrangement(subject(name), seed)


@every_algorithm
@hypothesis.given(seed=seeds, drift=st.sampled_from([20.0, 40.0, 60.0]))
def test_finite_for_huge_log_ratios(name, seed, drift):
    contract.huge_ratios(subject(name), seed, drift)


@pytest.mark.parametrize('name', ['cispo', 'dapo', 'grpo', 'sapo'])
def test_extreme_ratios_are_counted(name):
    arrays = random_arrays(0)
    away = np.random.default_rng(0).choice([-1, 0, 1], arrays['mask'].shape)
    arrays['logp_old'] = (arrays['logp_new'] + 40 * away).astype(np.float32)
    _, _, metrics = subject(name).run(arrays)
    apart = np.abs(arrays['logp_new'] - arrays['logp_old']) >= 20
    assert int(metrics['policy/extreme'].total) == (apart & (arrays['mask'] == 1)).sum() > 0


@every_algorithm
def test_empty_batch_has_no_loss_and_no_gradient(name):
    contract.empty_batch(subject(name), 3)


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
    loss, grads, _ = subject(name).run(arrays)
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec('data'))
    alg = algorithm(name)
    coefficients = po.losses.controllers.init(alg.controllers)
    put = functools.partial(jax.tree.map, lambda x: jax.device_put(x, rows))
    inputs = put(loss_inputs(arrays, alg).replace(coefficients={}))
    weights = subject(name).weigh(put(token_batch(arrays)))
    inputs = inputs.replace(coefficients=coefficients)
    (loss2, _), grads2 = subject(name).grad(inputs, weights)
    assert not grads2['logp_new'].sharding.is_fully_replicated
    assert_same((loss2, grads2), (loss, grads), size(name, arrays, grads))


GROUP_BASELINE = [n for n in ALGORITHMS if n not in CRITIC]


@functools.cache
def estimator(name: str):
    return jax.jit(algorithm(name).advantages)


@every_algorithm
def test_the_rollout_side_is_jittable_and_finite(name):
    for seed in range(3):
        contract.rollout_side(subject(name), seed)


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


# ---------------------------------------------------------------- the check of a new algorithm


def broken(**parts):
    """REINFORCE with parts replaced."""
    slots = dict(
        ratio=po.losses.token_ratio(),
        surrogate=po.losses.reinforce(),
        aggregate=po.losses.token_mean(),
    )
    return po.Algorithm(
        advantages=po.advantages.group_mean_baseline(), loss=po.losses.policy_loss(**slots | parts)
    )


def by_hand(apply):
    aggregate = po.losses.token_mean()
    loss = po.LossTransform(weigh=lambda batch: aggregate(batch.mask), apply=apply)
    return po.Algorithm(advantages=po.advantages.group_mean_baseline(), loss=loss)


def means_of_parts(inputs, weights):
    return po.LossOutput(jnp.mean(weights * inputs.logp_new), {})


def multiplied_by_the_mask(inputs, weights):
    terms = -weights * inputs.advantages * inputs.logp_new * inputs.mask
    return po.LossOutput(jnp.sum(terms), {})


def exp_without_a_bound(log_ratio, advantages):
    return jnp.exp(2 * log_ratio) / 2 * advantages


def test_laws_that_are_broken_are_named():
    for wrong, law, message in (
        (broken(surrogate=lambda x, a: 2 * x * a), 'on_policy', "gradient is REINFORCE's"),
        (by_hand(multiplied_by_the_mask), 'off_mask', 'matters to nothing'),
        (by_hand(means_of_parts), 'microbatches', 'add up to those of the whole'),
        (broken(aggregate=lambda mask, group: mask * (group[:, None] > 0)), 'arrangement', 'names'),
        (broken(surrogate=exp_without_a_bound), 'huge_ratios', 'up to 60 nats'),
    ):
        with pytest.raises(AssertionError, match=f'{law}, seed 0: .*{message}'):
            contract.check(wrong, laws=[law], seeds=[0])
    unfinished = broken()._replace(
        advantages=lambda r: po.Estimates(r.rewards[:, None] + 0 * r.mask)
    )
    with pytest.raises(AssertionError, match='rollout_side, seed 0'):
        contract.check(unfinished, laws=['rollout_side'], seeds=[0])
    with pytest.raises(ValueError, match="no law 'micro_batches'. Did you mean `microbatches`"):
        contract.check(broken(), laws=['micro_batches'])
    with pytest.raises(TypeError, match='as a factory returns it'):
        contract.check(broken)


def test_gated_and_added_losses_keep_the_on_policy_law():
    gate = lambda inputs, log_ratio: jnp.where(inputs.logp_old < -1, 1.0, 0.5)  # noqa: E731
    for ratio in (po.losses.token_ratio(), po.losses.sequence_ratio()):
        assert contract.check(broken(ratio=ratio, gates=[gate]), laws=['on_policy']) == (
            'on_policy',
        )
