"""Recording and replaying the routing of a whole model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from policyopt import models
from policyopt.models import router

CONFIG = models.ModelConfig(
    vocab_size=40,
    embed_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    moe=models.MoEConfig(experts=6, top_k=2),
    expert_dim=12,
)


@functools.cache
def made():
    model = models.build(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    return model, params, jax.jit(model.hidden)


TOKENS = jax.random.randint(jax.random.key(1), (4, 16), 0, 40)
VALID = jnp.arange(16) < jnp.array([[16], [9], [16], [1]])


def test_replaying_its_own_record_is_bit_identical():
    _, params, hidden = made()
    native = hidden(params, TOKENS, valid=VALID)
    assert native.routing.shape == (4, 16, 2, 2)
    assert native.routing.dtype == jnp.int8
    assert (np.asarray(native.routing)[~np.asarray(VALID)] == -1).all()
    replayed = hidden(params, TOKENS, valid=VALID, routing=native.routing)
    np.testing.assert_array_equal(native.hidden, replayed.hidden)
    np.testing.assert_array_equal(native.routing, replayed.routing)
    assert float(replayed.aux['replay_agreement'].value) == 1.0
    empty = hidden(params, TOKENS, valid=VALID, routing=jnp.full_like(native.routing, -1))
    np.testing.assert_array_equal(native.hidden, empty.hidden)


def test_routing_that_is_not_integer_is_refused():
    model, params, _ = made()
    with pytest.raises(AssertionError, match='type'):
        model.hidden(params, TOKENS, routing=jnp.zeros((4, 16, 2, 2)))
    with pytest.raises(AssertionError, match='type'):
        router.replay_experts(jnp.zeros((3, 2), int), jnp.zeros((3, 2)), 6)


def equations(jaxpr):
    """Every equation, inner functions and loop bodies included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax_core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_router_of_a_bfloat16_model_computes_in_float32():
    model = models.build(dataclasses.replace(CONFIG, dtype='bfloat16'))
    jaxpr = jax.make_jaxpr(model.hidden)(model.shapes(), TOKENS)
    found = [
        equation
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == 'dot_general'
        and equation.outvars[0].aval.shape == (TOKENS.size, CONFIG.moe.experts)
    ]
    assert len(found) == 1  # the layers are one loop
    assert {v.aval.dtype for v in (*found[0].invars, *found[0].outvars)} == {jnp.dtype('float32')}


def test_after_an_update_replay_keeps_the_sets_that_native_routing_changes():
    _, params, hidden = made()
    record = hidden(params, TOKENS, valid=VALID).routing
    rng = np.random.default_rng(2)
    moved = jax.tree.map(lambda a: a + np.float32(0.01 * rng.normal(size=a.shape)), params)
    native = hidden(moved, TOKENS, valid=VALID).routing
    replayed = hidden(moved, TOKENS, valid=VALID, routing=record)
    np.testing.assert_array_equal(replayed.routing, record)
    live = np.asarray(VALID)
    changed = (np.sort(native, axis=-1) != np.sort(record, axis=-1)).any(-1)[live].mean()
    print(f'share of routing decisions that an update changed: {changed:.3f}')
    assert changed > 0.02
    agreement = float(replayed.aux['replay_agreement'].value)
    assert agreement < 1.0


def test_record_of_cached_steps_equals_the_full_forward():
    model, params, hidden = made()
    full = hidden(params, TOKENS, valid=jnp.ones_like(VALID)).routing
    extend = jax.jit(model.extend)
    cache, parts = model.init_cache(4, 16), []
    for start in range(0, 16, 4):
        out, cache = extend(params, cache, TOKENS[:, start : start + 4], jnp.full(4, 4))
        parts.append(out.routing)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), full)
    # Replayed through the cache, a foreign record is what is used.
    foreign = (full[:, :4] + 1) % 6
    out, _ = extend(
        params, model.init_cache(4, 16), TOKENS[:, :4], jnp.array([4, 2, 0, 4]), routing=foreign
    )
    np.testing.assert_array_equal(out.routing[0], foreign[0])
    np.testing.assert_array_equal(out.routing[1, 2:], -1)
    np.testing.assert_array_equal(out.routing[2], -1)


def test_router_gradient_under_replay_equals_finite_differences():
    rng = np.random.default_rng(3)
    record = rng.integers(-1, 6, (4, 16, 2, 2)).astype(np.int8)
    with jax.enable_x64(True):
        config = dataclasses.replace(CONFIG, dtype='float64', param_dtype='float64')
        model = models.build(config)
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), made()[1])

        @jax.jit
        @jax.value_and_grad
        def loss(weights):
            mlp = {**params['moe']['mlp'], 'router': weights}
            changed = {**params, 'moe': {**params['moe'], 'mlp': mlp}}
            out = model.hidden(changed, TOKENS, routing=record)
            return jnp.sum(out.hidden * jnp.arange(16.0))

        router = params['moe']['mlp']['router']
        direction, step = rng.normal(size=router.shape), 1e-5
        gradient = np.asarray(loss(router)[1])
        above, below = (float(loss(router + s * step * direction)[0]) for s in (1, -1))
    assert (np.abs(gradient).max(axis=(1, 2)) > 1e-3).all()
    np.testing.assert_allclose(
        np.sum(gradient * direction), (above - below) / (2 * step), rtol=1e-6
    )
