"""Adapters: the base bit for bit, gradients by the chain rule, the cache, a mesh, merging."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from policyopt import base as base_lib
from policyopt import (
    checkpoint,
    export,
    learner,
    models,
    policy,
    recipe,
    reference,
    sharding,
    stopping,
    train,
)
from policyopt import loop as loop_lib
from policyopt import state as state_lib
from policyopt.models import adapters
from tests.learning import close, fresh, none, on_policy, random_batch
from tests.test_quickstart import get_config, run

CONFIG = models.ModelConfig(
    vocab_size=12,
    embed_dim=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=12,
    moe=models.MoEConfig(experts=4, top_k=2, shared_experts=1),
    moe_layers=(1, 2),
    expert_dim=8,
)
ALL = models.AdapterConfig(rank=3, alpha=6.0, targets=('attention', 'mlp', 'experts', 'shared'))
TOKENS = np.random.default_rng(0).integers(0, 12, (4, 10)).astype(np.int32)
LENGTH = np.array([10, 7, 4, 9])
VALID = np.arange(10) < LENGTH[:, None]


@functools.cache
def base():
    model = models.build(CONFIG)
    return model, jax.jit(model.init)(jax.random.key(0))


@functools.cache
def adapted(backend='auto'):
    """A model whose adapters have moved, so that neither factor is zero."""
    model, params = base()
    model = dataclasses.replace(model, config=dataclasses.replace(CONFIG, moe_backend=backend))
    model, params = models.attach(model, params, ALL, jax.random.key(1))
    rng = np.random.default_rng(2)
    moved = jax.tree.map(
        lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), params['adapters']
    )
    return model, {**params, 'adapters': moved}


def loss(model, params):
    out = model.apply(params, TOKENS, valid=VALID)
    logp = jax.nn.log_softmax(out.logits[:, :-1])
    taken = jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(VALID[:, 1:], taken, 0))


@functools.cache
def forward(model):
    return jax.jit(lambda params: model.apply(params, TOKENS, valid=VALID).logits)


def test_shapes_and_start():
    model, params = base()
    model, params = models.attach(model, params, ALL, jax.random.key(1))
    own = params['adapters']
    assert own['dense']['attention']['o']['a'].shape == (1, 4, 2, 3)
    assert own['dense']['attention']['k']['b'].shape == (1, 3, 2, 2)
    assert own['moe']['mlp']['down']['a'].shape == (2, 4, 8, 3)
    assert own['moe']['mlp']['shared']['up']['b'].shape == (2, 3, 8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(own):
        assert leaf.dtype == jnp.float32
        assert bool(jnp.any(leaf != 0)) == (path[-1].key == 'a')
    wide = {'dense': {'attention': {'q': np.zeros((1, 4096, 2, 8))}}}
    drawn = adapters.init(models.AdapterConfig(targets=('q',)), wide, jax.random.key(0))
    np.testing.assert_allclose(drawn['dense']['attention']['q']['a'].std(), 1 / 64, rtol=0.02)
    assert jax.tree.structure(model.axes(), is_leaf=lambda x: isinstance(x, tuple)) == (
        jax.tree.structure(params)
    )


def test_off_at_rank_0_and_at_the_start_it_is_the_base_bit_for_bit():
    model, params = base()
    wanted = np.asarray(forward(model)(params))
    none, empty = models.attach(model, params, dataclasses.replace(ALL, rank=0), jax.random.key(1))
    np.testing.assert_array_equal(forward(none)(empty), wanted)
    moved_model, moved = adapted()
    start = models.attach(model, params, ALL, jax.random.key(1))[1]
    np.testing.assert_array_equal(forward(moved_model)(start), wanted)
    np.testing.assert_array_equal(forward(moved_model)(adapters.off(moved)), wanted)
    assert np.abs(np.asarray(forward(moved_model)(moved)) - wanted).max() > 0.05


@pytest.mark.parametrize('backend', ['blocked', pytest.param('ragged', marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_merged_model(backend):
    """dA = s dW B^T and dB = s A^T dW, with dW of the merged model, in numpy."""
    model, params = adapted(backend)
    merged_model, merged = models.merge(model, params)
    value, grads = jax.jit(
        jax.value_and_grad(lambda own: loss(model, {**params, 'adapters': own}))
    )(params['adapters'])
    wanted, dw = jax.jit(jax.value_and_grad(functools.partial(loss, merged_model)))(merged)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    scale, count = 6.0 / 3, 0
    for kind in ('dense', 'moe'):
        for path, a in jax.tree_util.tree_leaves_with_path(params['adapters'][kind]):
            keys = [p.key for p in path]
            if keys[-1] != 'a':
                continue
            keys, own, found = keys[:-1], params['adapters'][kind], grads[kind]
            kernel = dw[kind]
            for key in keys:
                own, found, kernel = own[key], found[key], kernel[key]
            lead = 2 if kind == 'moe' and keys[0] == 'mlp' and 'shared' not in keys else 1
            front = a.shape[:lead]
            a64 = np.asarray(a, np.float64).reshape(*front, -1, 3)
            b64 = np.asarray(own['b'], np.float64).reshape(*front, 3, -1)
            w64 = np.asarray(kernel, np.float64).reshape(*front, a64.shape[-2], b64.shape[-1])
            for got, want in (
                (found['a'], scale * np.einsum('...io,...ro->...ir', w64, b64)),
                (found['b'], scale * np.einsum('...ir,...io->...ro', a64, w64)),
            ):
                np.testing.assert_allclose(
                    np.reshape(got, want.shape), want, atol=1e-5 * max(1, np.abs(want).max())
                )
                assert np.abs(want).max() > 1e-3
                count += 1
    assert count == 2 * (2 * 4 + 3 + 3 + 3)


def test_the_cache_and_the_merged_model_agree():
    model, params = adapted()
    full = np.asarray(forward(model)(params))
    merged_model, merged = models.merge(model, params)
    assert merged_model.adapters is None and 'adapters' not in merged
    np.testing.assert_allclose(full, forward(merged_model)(merged), atol=1e-5)
    extend = jax.jit(model.extend)
    cache, seen = model.init_cache(4, 12), []
    for start, stop in ((0, 5), (5, 10)):
        hidden, cache = extend(params, cache, TOKENS[:, start:stop], np.full(4, stop - start))
        seen.append(model.logits(params, hidden.hidden))
    np.testing.assert_allclose(np.concatenate(seen, 1)[0], full[0], atol=1e-5)


@pytest.mark.slow
def test_on_a_mesh_values_and_gradients_are_the_same():
    model, params = adapted()

    def run(own, params):
        return jax.value_and_grad(lambda own: loss(model, {**params, 'adapters': own}))(own)

    wanted = jax.jit(run)(params['adapters'], params)
    mesh = sharding.make_mesh((('data', 2), ('fsdp', 1), ('expert', 2), ('tensor', 2)))
    laid = sharding.param_shardings(model.axes(), params, mesh, model.rules)
    own = laid['adapters']['moe']['mlp']['down']
    assert own['a'].spec == jax.P(None, 'expert', 'tensor')
    placed = jax.device_put(params, laid)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(placed['adapters'], placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), found, wanted)


def test_errors_name_the_field():
    for changes, text in (
        (dict(targets=('experts.gates',)), r'experts\.gates.*Did you mean `experts.gate`'),
        (dict(targets=()), 'targets'),
        (dict(targets=('q', 'attention')), 'twice'),
        (dict(rank=-1), 'rank'),
        (dict(alpha=0.0), 'alpha'),
    ):
        with pytest.raises(ValueError, match=text):
            dataclasses.replace(ALL, **changes)
    dense = models.build(dataclasses.replace(CONFIG, moe=None, moe_layers=None, expert_dim=0))
    with pytest.raises(ValueError, match=r"'experts.gate', which the model lacks.*Known: down"):
        adapters.init(models.AdapterConfig(targets=('experts',)), dense.shapes(), jax.random.key(0))
    model, params = adapted()
    with pytest.raises(ValueError, match='already'):
        models.attach(model, params, ALL, jax.random.key(0))
    with pytest.raises(ValueError, match='model has none'):
        base()[0].hidden(params, TOKENS)


def test_saving_needs_merging(tmp_path):
    model, params = adapted()
    with pytest.raises(ValueError, match='merge'):
        models.save(model, params, tmp_path / 'folder')


# ============================================================================ training


def batch_of(model, params):
    batch = random_batch(vocab=12)
    return on_policy(model, params, batch)


@pytest.mark.parametrize('algorithm', ['grpo', pytest.param('trpo', marks=pytest.mark.slow)])
def test_an_update_moves_adapters_alone(algorithm):
    model, params = adapted()
    learn = learner.make_learner(
        model,
        getattr(po.algorithms, algorithm)(),
        learner.make_optimizer(learner.OptimizerConfig(learning_rate=0.1)),
        ema=0.5,
        diagnose=none,
    )
    state = fresh(learn, params)
    start = jax.device_get(params)
    sizes = [x.size for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(sizes) == 2 * sum(x.size for x in jax.tree.leaves(start['adapters']))
    assert set(state.ema) == {'adapters'}
    assert set(state_lib.kept(state).params) == {'adapters'}
    state, metrics, _ = learn.update(state, batch_of(model, params))
    assert metrics['skipped'].value == 0 and metrics['update_norm'].value > 0.01
    jax.tree.map(np.testing.assert_array_equal, *map(adapters.off, (state.params, start)))
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(
            *(jax.tree.leaves(p['adapters']) for p in (state.params, start)), strict=True
        )
    ]
    assert np.mean(moved) > 0.9
    used = state_lib.averaged(state)
    wanted = jax.tree.map(lambda a, b: (a + b) / 2, state.params['adapters'], start['adapters'])
    close(used['adapters'], wanted, rtol=1e-5, atol=1e-6)
    assert used['embed'] is state.params['embed']


def test_a_critic_of_its_own_is_refused():
    model, _ = adapted()
    own = models.build(dataclasses.replace(CONFIG, value_head=True))
    optimizer = learner.make_optimizer(learner.OptimizerConfig())
    with pytest.raises(ValueError, match='adapters'):
        learner.make_learner(
            model, po.algorithms.ppo_clip(), optimizer, critic=learner.Critic(optimizer, own)
        )


def test_the_reference_is_the_base_without_a_copy():
    _, params = adapted()
    still = reference.make_reference(params, fresh=True)
    assert still.params is None
    assert set(still.of(params)) == set(params) - {'adapters'}
    assert still.of(params)['embed'] is params['embed']
    synced = reference.make_reference(params, every=2)
    assert set(synced.params) == {'adapters'}
    later = {**params, 'adapters': jax.tree.map(lambda x: x + 1, params['adapters'])}
    for step, wanted in ((1, params), (2, later)):
        found = synced.update(step, later).of(later)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


RUN = get_config(
    'tiny',
    model=dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32),
    algorithm='policyopt.algorithms.grpo',
    algorithm_kw={},
    dynamic_sampling=False,
    router={},
    replay={},
    warm_start=None,
    adapters=dict(rank=2, alpha=4.0, targets=('attention', 'mlp')),
    minibatches=1,
    steps=1,
    ema=None,
    evaluation=dict(every=9, batch=16, temperature=0.0, samples=0),
    checkpoint=dict(every=1, keep=9),
)


def test_a_run_keeps_adapters_names_its_base_and_goes_on(tmp_path):
    workdir = tmp_path / 'run'
    run(RUN, workdir)
    (workdir / 'metrics.jsonl').write_text(
        ''.join(
            line + '\n'
            for line in (workdir / 'metrics.jsonl').read_text().splitlines()
            if '"result"' not in line
        )
    )
    job = train.start({**RUN, 'steps': 2}, workdir)
    with job.lock, job.checkpoints:
        assert job.resumed
        loop = loop_lib.make_loop(job.setup, workdir, job.checkpoints, stopping.Stop())
        point = loop_lib.resume(job.setup, loop)
        assert point.step == 1 and point.reference.params is None
        assert set(point.base) == {'path', 'digest'} and point.base['digest']
        base_lib.check_base(workdir, {'base': point.base}, point.base)
        with pytest.raises(checkpoint.CheckpointError, match='another|belong'):
            base_lib.check_base(workdir, {'base': {'path': None, 'digest': 1}}, point.base)
        saved = {p.name for p in (workdir / 'checkpoints' / '1' / 'state').iterdir()}
        assert saved
    found = policy.load(policy.find(workdir))
    assert set(found.params) == {'adapters', 'dense', 'embed', 'norm'}
    done = export.export(workdir, tmp_path / 'folder')
    again, params = models.load(tmp_path / 'folder')
    tokens = TOKENS % 12
    np.testing.assert_allclose(
        again.apply(params, tokens).logits,
        found.model.apply(found.params, tokens).logits,
        atol=1e-5,
    )
    assert done.model.adapters is None


def test_what_would_have_no_effect_is_refused():
    for changes, text in (
        (dict(adapters=dict(rank=0)), 'rank is 0: nothing'),
        (dict(adapters=dict(targets=('experts',))), 'lacks'),
        (dict(adapters=dict(ranks=1)), 'Did you mean `rank`'),
        (dict(chat={}), r'chat has no effect without config\.model\.path'),
    ):
        with pytest.raises(ValueError, match=text):
            recipe.prepare({**RUN, **changes})
