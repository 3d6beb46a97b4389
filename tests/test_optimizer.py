"""Schedules, clipping, decay by name, masters, skipped steps, moving averages, references."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from policyopt import optimizer as optimizer_lib
from policyopt.optimizer import OptimizerConfig, make_optimizer, make_schedule
from policyopt.reference import make_reference


@pytest.mark.parametrize('law', ['constant', 'linear', 'cosine'])
def test_schedule_is_the_formula(law):
    decay = {} if law == 'constant' else {'decay_steps': 8, 'final_fraction': 0.25}
    schedule = make_schedule(
        OptimizerConfig(learning_rate=0.2, warmup_steps=4, schedule=law, **decay)
    )
    for step in range(16):
        if step < 4:
            want = 0.2 * step / 4
        else:
            share = min((step - 4) / 8, 1)
            left = {'constant': 1, 'linear': 1 - share, 'cosine': (1 + np.cos(np.pi * share)) / 2}
            want = 0.2 * (0.25 + 0.75 * left[law])
        np.testing.assert_allclose(schedule(step), want, rtol=1e-6, atol=1e-8)


def test_a_schedule_without_warm_up_starts_at_the_rate():
    schedule = make_schedule(OptimizerConfig(learning_rate=0.2, schedule='linear', decay_steps=2))
    np.testing.assert_allclose([schedule(i) for i in range(4)], [0.2, 0.1, 0, 0], atol=1e-8)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'schedule': 'cosin'}, "schedule='cosin' is not known.* Did you mean `cosine`"),
        ({'decay_steps': 5}, "decay_steps=5 has no effect with schedule='constant'; legal is 0"),
        ({'final_fraction': 0.5}, 'final_fraction=0.5 has no effect'),
        ({'schedule': 'cosine'}, "decay_steps=0 with schedule='cosine'; legal is 1 or more"),
        ({'learning_rate': 0.0}, r'learning_rate must lie in .*got 0.0'),
        ({'warmup_steps': -1}, r'warmup_steps must lie in \[0, inf\], got -1'),
        ({'clip_norm': 0.0}, 'clip_norm must lie in'),
        ({'b1': 1.0}, 'b1 must lie in'),
        ({'eps': 0.0}, 'eps must lie in'),
        ({'schedule': 'linear', 'decay_steps': 2, 'final_fraction': 1.5}, 'final_fraction must'),
        ({'weight_decay': -0.1}, 'weight_decay must lie in'),
    ],
)
def test_illegal_settings_name_field_value_and_what_is_legal(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


def test_optimizer_clips_warms_up_and_decays_matrices_only():
    params = {
        'embed': jnp.ones((2, 2)),
        'dense': {'norm1': jnp.ones((3, 2)), 'q_bias': jnp.ones(2)},
    }
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates['embed'], -0.05)
    assert not np.any(updates['dense']['norm1']) and not np.any(updates['dense']['q_bias'])

    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=10, clip_norm=0.5))
    state, sizes = optimizer.init(params), []  # the gradient's norm is sqrt(12)
    for _ in range(3):
        updates, state = optimizer.update(params, state, params)
        sizes.append(float(jnp.max(jnp.abs(updates['embed']))))
    np.testing.assert_allclose(sizes, [0, 0.01, 0.02], rtol=1e-4, atol=1e-8)
    moments = optax.tree_utils.tree_get(state, 'mu')  # (1 - .9^3) of the clipped gradient
    np.testing.assert_allclose(moments['embed'], 0.271 * 0.5 / 12**0.5, rtol=1e-5)


def test_no_clipping_and_eps():
    """The first Adam step is -rate g / (|g| + eps), whatever the norm of g."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, clip_norm=None, eps=3.0))
    grads = {'w': jnp.array([6.0, -1.0])}
    updates, state = optimizer.update(grads, optimizer.init(grads), grads)
    np.testing.assert_allclose(updates['w'], [-0.1 * 6 / 9, 0.1 * 1 / 4], rtol=1e-6)
    moments = optax.tree_utils.tree_get(state, 'mu')
    np.testing.assert_allclose(moments['w'], [0.6, -0.1], rtol=1e-6)


def test_masters_are_float32_and_hold_what_bfloat16_loses():
    narrow = {'w': jnp.ones(3, jnp.bfloat16), 'ids': jnp.arange(2)}
    wide = optimizer_lib.masters(narrow)
    assert wide['w'].dtype == jnp.float32 and wide['ids'].dtype == jnp.int32
    assert float((narrow['w'] + 1e-4 * narrow['w'])[0]) == 1  # a bfloat16 step of 1e-4 is none


@pytest.mark.parametrize('ok', [True, False])
def test_a_step_that_is_not_ok_changes_nothing(ok):
    params, optimizer = {'w': jnp.array([1.0, 2.0])}, optax.sgd(0.5, momentum=0.9)
    state = optimizer.init(params)
    grads = {'w': jnp.array([2.0, 4.0 if ok else jnp.nan])}
    new, after, moved = optimizer_lib.apply(optimizer, grads, state, params, jnp.array(ok))
    np.testing.assert_allclose(new['w'], [0, 0] if ok else [1, 2])
    trace = optax.tree_utils.tree_get(after, 'trace')
    np.testing.assert_allclose(trace['w'], [2, 4] if ok else [0, 0])
    np.testing.assert_allclose(moved['w'], [-1, -2] if ok else [0, 0])
    ema = optimizer_lib.average(0.75, {'w': jnp.full(2, 8.0)}, params, jnp.array(ok))
    np.testing.assert_allclose(ema['w'], [6.25, 6.5] if ok else [8, 8])


def test_reference_is_fixed_synced_or_absent():
    first, later = {'w': jnp.zeros(2)}, {'w': jnp.ones(2)}
    fixed, synced = make_reference(first), make_reference(first, every=3)
    assert fixed.params['w'] is not first['w']  # updates give their parameters away
    first['w'].delete()
    seen = []
    for step in range(1, 8):
        fixed = fixed.update(step, later)
        synced = synced.update(step, {'w': jnp.full(2, step)})
        assert not np.any(fixed.params['w'])
        seen.append(float(synced.params['w'][0]))
    assert seen == [0, 0, 3, 3, 3, 6, 6]
    narrow = make_reference({'w': jnp.ones(2, jnp.bfloat16)}, every=1)
    assert narrow.update(1, {'w': jnp.full(2, 1.001)}).params['w'].dtype == jnp.bfloat16
    assert make_reference(later, needed=False) is None
    with pytest.raises(ValueError, match='every=0; legal is 1 or more'):
        make_reference(later, every=0)
    with pytest.raises(ValueError, match='every=5 has no effect'):
        make_reference(later, every=5, needed=False)
