"""Updates over eight devices: every parameter, moment and gradient lies as the rules say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import learner, microbatches, models, sharding, updates
from policyopt.learner import LengthBuckets, OptimizerConfig
from tests.learning import Config, Running, fresh, none, random_batch

CONFIG = models.ModelConfig(
    vocab_size=16,
    embed_dim=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    moe=models.MoEConfig(experts=4, top_k=2),
    expert_dim=4,
)
AXES = [('data', 1), ('fsdp', 2), ('expert', 2), ('tensor', 2)]


def build(model, **kwargs):
    return learner.make_learner(
        model,
        po.algorithms.gspo(low=0.2, high=0.3),
        learner.make_optimizer(OptimizerConfig(learning_rate=1e-3)),
        ema=0.9,
        router=learner.RouterLosses(router_z=0.01),
        diagnose=none,
        **kwargs,
    )


@pytest.fixture(scope='module')
def case():
    """Model, parameters, batch, mesh, and wanted shardings."""
    model = models.build(CONFIG)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    batch = random_batch(vocab=16)
    mesh = sharding.make_mesh(AXES)
    wanted = sharding.param_shardings(model.axes(), model.shapes(), mesh, model.rules)
    return model, params, batch, mesh, wanted


@pytest.fixture(scope='module')
def want(case):
    """One update on one device."""
    model, params, batch, *_ = case
    return jax.device_get(outcome(build(model), params, batch))


def outcome(learn, params, batch):
    state, metrics, logp = learn.update(fresh(learn, params), batch)
    del metrics['moe/load_balance']  # depends on the split, as it says
    return state.params, state.ema, moments(state.opt_state), metrics, logp


def moments(opt_state):
    return [optax.tree_utils.tree_get(opt_state, name) for name in ('mu', 'nu')]


def same_layout(found, wanted, shapes):
    jax.tree.map(
        lambda a, b, x: np.testing.assert_(a.is_equivalent_to(b, x.ndim), (a, b, x.shape)),
        found,
        wanted,
        shapes,
    )


def agree(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_compiled_layouts_are_the_rules(case):
    """Of parameters, their average and their moments, before and after an update."""
    model, params, batch, mesh, wanted = case
    learn = build(model, microbatches=2)
    with jax.set_mesh(mesh):
        state = fresh(learn, params)
        same_layout(jax.tree.map(lambda x: x.sharding, state.params), wanted, params)
        compiled = learn.update.lower(state, batch).compile()
        given, made = compiled.input_shardings[0][0], compiled.output_shardings[0]
        for side in (given, made):
            for tree in (side.params, side.ema, *moments(side.opt_state)):
                same_layout(tree, wanted, params)
    split = [s for s in jax.tree.leaves(wanted) if not s.is_fully_replicated]
    assert len(split) >= 8  # embedding, projections, experts


def test_gradients_lie_as_the_parameters_do(case):
    """What `accumulate` sums, for a scan over microbatches and for buckets alike."""
    model, params, batch, mesh, wanted = case
    learn = build(model)
    job = updates.policy_job(learn.init.args[0])

    def gradients(state, batch):
        whole, shared = job.begin(state, batch)
        zeros = microbatches.zeros(job, state)
        return microbatches.accumulate(job, state, shared, zeros, whole)[0].policy

    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients).lower(fresh(learn, params), batch).compile()
    same_layout(compiled.output_shardings, wanted, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    'parts', [dict(microbatches=2), dict(length_buckets=LengthBuckets(36, (6, 9)))]
)
def test_an_update_over_devices_is_that_of_one(parts, case, want):
    """Metrics, too; whole steps are in `test_meshes`."""
    model, params, batch, mesh, _ = case
    learn = build(model, **parts)
    with jax.set_mesh(mesh):
        agree(outcome(learn, params, batch), want)


def test_a_parameter_that_does_not_divide_is_named(case):
    model, params, *_ = case
    with (
        jax.set_mesh(sharding.make_mesh([('fsdp', 1), ('tensor', 8)])),
        pytest.raises(ValueError, match=r"parameter \['moe'\].*does not divide over mesh axes"),
    ):
        fresh(build(model), params)


def test_rows_of_a_bucket_follow_the_devices(case):
    _, _, _, mesh, _ = case
    assert sharding.batch_shards(sharding.DEFAULT_RULES) == 1
    with jax.set_mesh(mesh):
        assert sharding.batch_shards(sharding.DEFAULT_RULES) == 2
    with jax.set_mesh(sharding.make_mesh()):
        assert sharding.batch_shards(sharding.DEFAULT_RULES) == 8
        x = jax.jit(lambda x: microbatches.split(x, 2, sharding.DEFAULT_RULES))(jnp.ones((16, 3)))
        assert tuple(x.sharding.spec) == (None, 'data')


@pytest.mark.parametrize('trunk', [pytest.param('own', marks=pytest.mark.slow), 'shared'])
def test_the_critic_lies_as_its_rules_say(trunk):
    """Update and value pretraining of either kind of critic: numbers of one device, laid out."""
    headed = Running(Config(value_head=True))
    own = headed.init(3) if trunk == 'own' else None
    model = headed if own is None else Running()
    side = learner.Critic(optax.adam(1e-2), None if own is None else headed)
    batch, mesh = random_batch(), sharding.make_mesh(AXES)
    learn = learner.make_learner(
        model, po.algorithms.ppo_clip(), optax.adam(1e-2), critic=side, diagnose=none
    )

    def run():
        state = fresh(learn, model.init(), own)
        state, metrics = learn.value_update(state, batch)
        state, *_ = learn.update(state, batch)
        return state, metrics['value/explained_variance'].value

    want, explained = jax.device_get(run())
    with jax.set_mesh(mesh):
        got, found = run()
    agree((got.params, got.critic), (want.params, want.critic))
    np.testing.assert_allclose(found, explained, rtol=2e-5, atol=2e-5)
    moved = got.params if own is None else got.critic.params
    spec = sharding.param_shardings(headed.axes(), moved, mesh)
    same_layout(jax.tree.map(lambda x: x.sharding, moved), spec, moved)
    moments = optax.tree_utils.tree_get(got.critic.opt_state, 'mu')
    assert moments['value'].sharding.is_equivalent_to(spec['value'], 1)
    assert not spec['value'].is_fully_replicated
