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
        ('policyopt.algorithms.checks', 'module, not a factory. Known: cispo'),
        ('experiments.ablation_grid.cels', 'not there. Did you mean `cells`'),
        ('mime.gspo', "No module named 'mime'. Is its folder on PYTHONPATH"),
    ],
)
def test_unknown_algorithm(path, hint):
    with pytest.raises(ValueError, match=hint):
        po.algorithms.resolve(path)


def test_the_fixed_entry_points_exist():
    for name in po.__all__:
        assert getattr(po, name) is not None
    assert callable(po.models.load) and callable(po.sample) and callable(po.score)
    with pytest.raises(AttributeError, match='policyopt has no `modles`'):
        po.modles  # noqa: B018


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
    assert slots == {'ratio', 'surrogate', 'gate', 'penalty', 'aggregate', 'loss'}
    assert len(PARTS) == 31


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


def test_numpy_and_jax_scalars_are_numbers():
    for make in (np.float32, np.float64, jnp.float32):
        assert losses.clipped(make(0.25)).slot == 'surrogate'
        with pytest.raises(ValueError, match='low must lie in'):
            losses.clipped(make(-3))
    assert losses.constant_length(np.int64(16)).slot == 'aggregate'
    with pytest.raises(TypeError, match='low must be a number, got True'):
        losses.clipped(True)


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
        (dict(gates=losses.off_policy_sequence(0.3)), r'gates are a list: \[off_policy'),
        (dict(surogate=losses.clipped()), 'no argument `surogate`. Did you mean `surrogate`'),
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


def test_segments_are_integers():
    with pytest.raises(TypeError, match='segment is float32; legal: integers'):
        apply(po.algorithms.gspo_turn(), segment=np.zeros((8, 7), np.float32))


@pytest.mark.parametrize(
    'change',
    [
        dict(gates=[lambda inputs, log_ratio: jnp.ones(8)]),
        dict(penalties=[lambda inputs, log_ratio: jnp.ones((7, 8))]),
        dict(ratio=lambda inputs: jnp.ones((1, 7))),
        dict(surrogate=lambda log_ratio, advantages: jnp.sum(log_ratio)),
    ],
)
def test_a_part_that_returns_another_shape_is_named(change):
    alg = po.algorithms.gspo()._replace(loss=losses.policy_loss(**(SLOTS | change)))
    with pytest.raises(ValueError, match=r'<lambda> returned shape \(.*wanted \(8, 7\)'):
        apply(alg)


GSPO = po.algorithms.gspo()


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(advantages=po.advantages.group_zscore), r'advantages=group_zscore: call it'),
        (dict(keep=po.shaping.mixed_outcomes), r'keep=mixed_outcomes: call it'),
        (dict(shape=po.shaping.mixed_outcomes()), r"shape=mixed_outcomes\(\): part of slot 'keep'"),
        (dict(loss=losses.policy_loss), 'loss=policy_loss: call it'),
        (dict(loss=losses.clipped()), 'loss must be a LossTransform'),
        (dict(controllers={'x': 0.1}), "controllers\\['x'\\] must be a Controller, got 0.1"),
        (dict(update=lambda x: x), 'update must be a UpdateRule'),
    ],
)
def test_an_algorithm_checks_its_fields(change, message):
    with pytest.raises(TypeError, match=message):
        po.Algorithm(**(GSPO._asdict() | change))


def test_replacing_a_field_checks_it_too():
    with pytest.raises(TypeError, match='loss must be a LossTransform, got 3'):
        GSPO._replace(loss=3)
    with pytest.raises(TypeError, match='does not support item assignment'):
        GSPO.controllers['x'] = 1


def test_token_weights_do_not_adapt():
    part = losses.adaptive(losses.constant_length, length='x')
    with pytest.raises(TypeError, match='aggregate is adaptive'):
        losses.policy_loss(**(SLOTS | dict(aggregate=part)))


def test_what_is_no_loss_is_named():
    for make in (lambda x: losses.scale(0.1, x), lambda x: losses.add(GSPO.loss, x)):
        with pytest.raises(TypeError, match='loss=positive_nll: call it'):
            make(losses.positive_nll)
        with pytest.raises(TypeError, match='a LossTransform belongs here, got 3'):
            make(3)


def test_unknown_names_of_every_module():
    for module, name, near in (
        (losses, 'soft_gate', 'soft_gated'),
        (po.advantages, 'group_z_score', 'group_zscore'),
        (po.shaping, 'mixed_outcome', 'mixed_outcomes'),
    ):
        with pytest.raises(AttributeError, match=f'Did you mean `{near}`'):
            getattr(module, name)


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
    with pytest.raises(ValueError, match='no controller named `kl`.*Did you mean `kl2`'):
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
