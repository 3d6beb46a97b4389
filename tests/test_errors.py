"""What is wrong is named at construction or at the first trace, with the nearest legal spelling."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from policyopt import losses
from policyopt.types import MissingInput
from tests.batches import ALGORITHMS, algorithm, loss_inputs, random_arrays, token_batch


@pytest.mark.parametrize(
    ('path', 'hint'),
    [
        ('policyopt.algorithms.gsop', 'Did you mean `gspo`'),
        ('policyopt.algorithms.deepseekv32', 'Did you mean `deepseek_v32`'),
        ('policyopt.algoritms.gspo', 'algoritms'),
        ('policyopt.algorithms.zzzz', 'Known: cispo, dapo'),
        ('policyopt.algorithms.checks', 'unknown algorithm'),
    ],
)
def test_unknown_algorithm(path, hint):
    with pytest.raises(ValueError, match=hint):
        po.algorithms.resolve(path)


def test_unknown_attribute():
    with pytest.raises(AttributeError, match='Did you mean `magistral`'):
        po.algorithms.majistral  # noqa: B018


def test_resolve_finds_other_modules():
    alg = po.algorithms.resolve('experiments.ablation_grid.cell', weight=losses.token_ratio())
    assert isinstance(alg, po.Algorithm)
    with pytest.raises(ValueError, match='dict, not an Algorithm'):
        po.algorithms.resolve('experiments.ablation_grid.cells')


@pytest.mark.parametrize('name', ALGORITHMS)
def test_misspelt_argument_of_every_algorithm(name):
    with pytest.raises(TypeError, match='has no argument `gate`. Did you mean `gates`'):
        getattr(po.algorithms, name)(gate=[])


PARTS = [n for n in losses.__all__ if hasattr(getattr(losses, n), 'slot')]


@pytest.mark.parametrize('name', PARTS)
def test_misspelt_argument_of_every_part(name):
    with pytest.raises(TypeError, match=rf'{name}\(\) has no argument `hihg`'):
        getattr(losses, name)(hihg=1)


def test_there_are_parts_in_every_slot():
    slots = {getattr(losses, n).slot for n in PARTS}
    assert slots == {'ratio', 'surrogate', 'gate', 'penalty', 'aggregate'} and len(PARTS) == 27


def test_missing_required_argument():
    with pytest.raises(TypeError, match="dr_grpo.*missing a required argument: 'length'"):
        po.algorithms.dr_grpo()


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: losses.clipped(1.5), r'low must lie in \[0, 1\], got 1.5'),
        (lambda: losses.clipped(0.2, -1), r'high must lie in \[0, inf\], got -1'),
        (lambda: losses.constant_length(0), 'length must lie in'),
        (lambda: losses.masked_importance(2.0, 1.0), r'high must lie in \[2, inf\]'),
        (lambda: losses.truncated_importance(2.0, 'tokn'), 'Did you mean `token`'),
        (lambda: losses.kl_to_reference(0.1, 'k5'), 'Did you mean `k'),
        (lambda: losses.kl_to_reference(0.1, 'k1', unbiased=True), 'no effect'),
        (lambda: po.advantages.gae(lam=2.0), r'lam must lie in \[0, 1\]'),
        (lambda: po.algorithms.gspo(low=-1e-4), 'low must lie in'),
    ],
)
def test_numbers_and_words_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_not_a_number():
    with pytest.raises(TypeError, match="low must be a number, got '.2'"):
        losses.clipped('.2')


SLOTS = dict(ratio=losses.token_ratio(), surrogate=losses.clipped(), aggregate=losses.token_mean())


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(ratio=losses.clipped()), r"ratio=clipped\(\): part of slot 'surrogate'"),
        (
            dict(surrogate=losses.token_mean()),
            r"surrogate=token_mean\(\): part of slot 'aggregate'",
        ),
        (dict(gates=[losses.entropy(0.1)]), r"gate=entropy\(0.1\): part of slot 'penalty'"),
        (
            dict(penalties=[losses.trust_mask(0.2, 0.2, losses.token_ratio())]),
            "part of slot 'gate'",
        ),
        (dict(aggregate=losses.sequence_mean), r'call it, as in `sequence_mean\(...\)`'),
        (dict(ratio=3), 'ratio=3: not a function'),
    ],
)
def test_a_part_in_the_wrong_slot(change, message):
    with pytest.raises(TypeError, match=message):
        losses.policy_loss(**(SLOTS | change))


def apply(alg, **changes):
    arrays = random_arrays(0)
    inputs = dataclasses.replace(loss_inputs(arrays, alg), **changes)
    return alg.loss.apply(inputs, alg.loss.weigh(token_batch(arrays)))


@pytest.mark.parametrize(
    ('name', 'field'),
    [
        ('grpo', 'logp_ref'),
        ('deepseek_v32', 'logp_ref'),
        ('deepseek_v32', 'logp_behavior'),
        ('minirl', 'logp_behavior'),
        ('gspo_turn', 'segment'),
        ('ppo_clip', 'values'),
        ('vapo', 'returns'),
    ],
)
def test_a_missing_input_is_named(name, field):
    with pytest.raises(MissingInput, match=f'needs `{field}`.*Present: logp_new, logp_old'):
        apply(algorithm(name), **{field: None})


@pytest.mark.parametrize('field', ['logp_new', 'logp_old', 'advantages', 'logp_ref', 'mask'])
def test_a_wrong_shape_is_named(field):
    with pytest.raises(ValueError, match=rf'(?s){field}.*(8, 6|8, 7)'):
        apply(po.algorithms.grpo(), **{field: np.zeros((8, 6), np.float32)})
    with pytest.raises(ValueError, match=r'logp_new must be \[B,T\]'):
        apply(po.algorithms.grpo(), logp_new=np.zeros((8,), np.float32))


@pytest.mark.parametrize('dtype', [jnp.int32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('field', ['logp_new', 'logp_old', 'advantages', 'logp_ref'])
def test_integers_and_low_precision_are_named(field, dtype):
    with pytest.raises(TypeError, match=f'{field} is {jnp.dtype(dtype).name}; legal: float32'):
        apply(po.algorithms.grpo(), **{field: jnp.zeros((8, 7), dtype)})


def test_weights_of_another_shape():
    alg = po.algorithms.gspo()
    with pytest.raises(ValueError, match=r'weights have shape \(8, 1\)'):
        alg.loss.apply(loss_inputs(random_arrays(0), alg), np.ones((8, 1), np.float32))


def test_what_weigh_needs_is_named():
    batch = token_batch(random_arrays(0))
    with pytest.raises(MissingInput, match='positive_nll needs `positive`'):
        po.algorithms.vapo().loss.weigh(dataclasses.replace(batch, positive=None))
    prompts = losses.policy_loss(**(SLOTS | dict(aggregate=losses.prompt_mean())))
    with pytest.raises(ValueError, match='prompt_mean needs `group`'):
        prompts.weigh(dataclasses.replace(batch, group=None))


def test_adaptive_names_are_checked():
    with pytest.raises(TypeError, match='no argument `lo`. Did you mean `low`'):
        losses.adaptive(losses.clipped, lo='x')
    fixed = functools.partial(losses.kl_to_reference, unbiased=True)
    part = losses.adaptive(fixed, beta='kl')
    alg = po.algorithms.gspo()
    loss = losses.policy_loss(**(SLOTS | dict(penalties=[part])))
    with pytest.raises(KeyError, match='no controller named `kl`. Did you mean `kl2`'):
        apply(alg._replace(loss=loss), coefficients={'kl2': jnp.float32(1)})


def test_what_a_rollout_lacks_is_named():
    rolled = po.Rollout(tokens=np.zeros((2, 3), np.int32), mask=np.ones((2, 3), np.int32))
    for name in ALGORITHMS:
        with pytest.raises(MissingInput, match='needs `(rewards|segment_rewards)`'):
            algorithm(name).advantages(rolled)
    rolled = rolled.replace(rewards=np.ones(2, np.float32))
    with pytest.raises(MissingInput, match='mixed_outcomes needs `positive`'):
        po.algorithms.dapo().keep(rolled)


def test_parts_print_as_the_call_that_made_them():
    assert losses.clipped(0.2, high=0.28).__name__ == 'clipped(0.2, high=0.28)'
    assert 'group_zscore()' in repr(po.algorithms.gspo().advantages)
