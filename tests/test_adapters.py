"""Adapters: the base bit for bit, gradients by the chain rule, the cache, a mesh, merging."""

import contextlib
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from policyopt import (
    checkpoint,
    evaluate,
    export,
    learner,
    metrics,
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
from tests import gguf_files
from tests.learning import close, fresh, none, on_policy, random_batch
from tests.test_chat import FOLDER, config_of
from tests.test_quickstart import run

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
slow = pytest.mark.slow
# Fewer layers compile sooner.
MIXED = dataclasses.replace(CONFIG, num_layers=1, moe_layers=(0,))
PARTS = dataclasses.replace(ALL, targets=('attention', 'experts', 'shared'))
SHAPES = pytest.mark.parametrize(
    ('config', 'targets'), [(MIXED, PARTS), pytest.param(CONFIG, ALL, marks=slow)]
)


@functools.cache
def base(config=CONFIG):
    model, rng = models.build(config), np.random.default_rng(3)
    draw = lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return model, jax.tree.map(draw, model.shapes())


@functools.cache
def started(config=CONFIG, targets=ALL):
    model, params = base(config)
    return models.attach(model, params, targets, jax.random.key(1))


@functools.cache
def adapted(config=CONFIG, targets=ALL):
    """A model whose adapters have moved, so that neither factor is zero."""
    model, params = started(config, targets)
    rng = np.random.default_rng(2)
    moved = jax.tree.map(
        lambda x: x + jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), params['adapters']
    )
    return model, {**params, 'adapters': moved}


def with_backend(model, name):
    return dataclasses.replace(model, config=dataclasses.replace(model.config, moe_backend=name))


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
    own = jax.eval_shape(lambda key: adapters.init(ALL, params, key), jax.random.key(0))
    assert own['dense']['attention']['o']['a'].shape == (1, 4, 2, 3)
    assert own['dense']['attention']['k']['b'].shape == (1, 3, 2, 2)
    assert own['moe']['mlp']['down']['a'].shape == (2, 4, 8, 3)
    assert own['moe']['mlp']['shared']['up']['b'].shape == (2, 3, 8)
    model = dataclasses.replace(model, adapters=ALL)
    assert jax.tree.structure(model.axes(), is_leaf=lambda x: isinstance(x, tuple)) == (
        jax.tree.structure({**params, 'adapters': own})
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(started(MIXED, PARTS)[1]['adapters']):
        assert leaf.dtype == jnp.float32
        assert bool(jnp.any(leaf != 0)) == (path[-1].key == 'a')
    wide = {'dense': {'attention': {'q': np.zeros((1, 4096, 2, 8))}}}
    drawn = adapters.init(models.AdapterConfig(targets=('q',)), wide, jax.random.key(0))
    np.testing.assert_allclose(drawn['dense']['attention']['q']['a'].std(), 1 / 64, rtol=0.02)


@SHAPES
def test_off_at_rank_0_and_at_the_start_it_is_the_base_bit_for_bit(config, targets):
    model, params = base(config)
    wanted = np.asarray(forward(model)(params))
    rank_0 = dataclasses.replace(targets, rank=0)
    none, empty = models.attach(model, params, rank_0, jax.random.key(1))
    np.testing.assert_array_equal(forward(none)(empty), wanted)
    moved_model, moved = adapted(config, targets)
    start = started(config, targets)[1]
    np.testing.assert_array_equal(forward(moved_model)(start), wanted)
    np.testing.assert_array_equal(forward(moved_model)(adapters.off(moved)), wanted)
    assert np.abs(np.asarray(forward(moved_model)(moved)) - wanted).max() > 0.05


@pytest.mark.parametrize(
    ('backend', 'config', 'targets', 'count'),
    [
        ('blocked', MIXED, PARTS, 4 + 3 + 3),
        pytest.param('blocked', CONFIG, ALL, 2 * 4 + 3 + 3 + 3, marks=slow),
        pytest.param('ragged', CONFIG, ALL, 2 * 4 + 3 + 3 + 3, marks=slow),
    ],
)
def test_gradients_are_those_of_the_merged_model(backend, config, targets, count):
    """dA = s dW B^T and dB = s A^T dW, with dW of the merged model, in numpy."""
    model, params = adapted(config, targets)
    merged_model, merged = models.merge(with_backend(model, 'ragged'), params)
    model = with_backend(model, backend)
    value, grads = jax.jit(
        jax.value_and_grad(lambda own: loss(model, {**params, 'adapters': own}))
    )(params['adapters'])
    wanted, dw = jax.jit(jax.value_and_grad(functools.partial(loss, merged_model)))(merged)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    scale, left = 6.0 / 3, 2 * count
    for kind in params['adapters']:
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
                left -= 1
    assert left == 0


@SHAPES
def test_the_cache_and_the_merged_model_agree(config, targets):
    model, params = adapted(config, targets)
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
    model, params = adapted(MIXED, PARTS)
    with pytest.raises(ValueError, match='already'):
        models.attach(model, params, ALL, jax.random.key(0))
    with pytest.raises(ValueError, match='model has none'):
        base()[0].hidden(params, TOKENS)


def test_saving_needs_merging(tmp_path):
    model, params = adapted(MIXED, PARTS)
    with pytest.raises(ValueError, match='merge'):
        models.save(model, params, tmp_path / 'folder')


# ============================================================================ training


def batch_of(model, params):
    batch = random_batch(vocab=12)
    return on_policy(model, params, batch)


DENSE = dataclasses.replace(CONFIG, num_layers=1, moe=None, moe_layers=None, expert_dim=0)
SOME = models.AdapterConfig(rank=2, alpha=4.0, targets=('q', 'o', 'down'))


@pytest.mark.parametrize(
    ('algorithm', 'config', 'targets'),
    [
        ('grpo', DENSE, SOME),
        pytest.param('trpo', DENSE, SOME, marks=slow),
        pytest.param('gspo', CONFIG, ALL, marks=slow),
    ],
)
def test_an_update_moves_adapters_alone(algorithm, config, targets):
    model, params = adapted(config, targets)
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
    model, _ = adapted(MIXED, PARTS)
    own = models.build(dataclasses.replace(CONFIG, value_head=True))
    optimizer = learner.make_optimizer(learner.OptimizerConfig())
    with pytest.raises(ValueError, match='adapters'):
        learner.make_learner(
            model, po.algorithms.ppo_clip(), optimizer, critic=learner.Critic(optimizer, own)
        )


def test_the_reference_is_the_base_without_a_copy():
    _, params = adapted(MIXED, PARTS)
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


RUN = config_of(
    FOLDER,
    adapters=dict(rank=2, alpha=4.0, targets=('attention', 'mlp')),
    checkpoint=dict(every=1, keep=9),
)


@contextlib.contextmanager
def begun(config, workdir):
    """A job that holds its folder, and its loop."""
    job = train.start(config, workdir)
    with job.lock, job.checkpoints:
        yield job, loop_lib.make_loop(job.setup, workdir, job.checkpoints, stopping.Stop())


def test_a_run_keeps_adapters_names_its_base_and_goes_on(tmp_path):
    """A step that only moves the adapters: what it does costs a compile that nothing here needs."""
    workdir, path = tmp_path / 'run', tmp_path / 'base'
    shutil.copytree(FOLDER, path)
    config = {**RUN, 'model': dict(path=str(path)), 'steps': 2}
    with begun(config, workdir) as (job, loop):
        start = recipe.first_params(job.setup)
        point = loop_lib.new_point(job.setup, loop, start, evaluate.Accuracy(0, 0), 0)
        assert point.reference.params is None  # the base, with the adapters off
        moved = jax.tree.map(lambda x: x + 0.05, point.state.params['adapters'])
        params = {**point.state.params, 'adapters': moved}
        point = point._replace(state=point.state.replace(params=params), step=1)
        loop_lib.save(loop, point)
    held, notes = policy.read(workdir, job.setup, 1)
    assert set(held.params) == {'adapters'} and notes['base']['path'] == str(path)
    count = sum(x.size for x in jax.tree.leaves(moved))
    assert sum(x.size for x in jax.tree.leaves(held.opt_state)) < 2 * count + 9
    digests = (workdir / 'checkpoints' / '1' / 'meta' / 'metadata').read_text()
    assert 'adapters' in digests and 'embed' not in digests
    with begun(config, workdir) as (job, loop):
        assert job.resumed
        again = loop_lib.resume(job.setup, loop)
        assert again.step == 1 and again.reference.params is None and again.base == point.base
        jax.tree.map(np.testing.assert_array_equal, again.state.params, params)
    found = policy.load(policy.find(workdir))
    assert found.origin['step'] == 1
    export.export(workdir, tmp_path / 'folder')
    again, merged = models.load(tmp_path / 'folder')
    assert again.tokenizer.chat_template == found.model.tokenizer.chat_template
    _, wanted = models.merge(found.model, params)
    jax.tree.map(np.testing.assert_array_equal, merged, wanted)
    assert np.abs(merged['dense']['mlp']['up'] - start['dense']['mlp']['up']).max() > 1e-3

    # Another base, of the same shape.
    model, params = models.load(path)
    models.save(model, {**params, 'embed': params['embed'] + 1}, path)
    with pytest.raises(checkpoint.CheckpointError, match='put the one that they belong to back'):
        policy.load(policy.find(workdir))
    refused = pytest.raises(checkpoint.CheckpointError, match='were trained on the base')
    with begun(config, workdir) as (job, loop), refused:
        loop_lib.resume(job.setup, loop)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['folder', 'gguf', 'whole'])
def test_any_checkpoint_trains(kind, tmp_path):
    """From a folder or a GGUF file, in its own chat; adapters, or all parameters."""
    path, workdir = FOLDER, tmp_path / 'run'
    if kind == 'gguf':
        path = tmp_path / 'model.gguf'
        template = models.load(FOLDER)[0].tokenizer.chat_template
        gguf_files.write(path, chat_template=template)
    config = {**RUN, 'model': dict(path=str(path))}
    if kind == 'whole':
        config |= dict(adapters=None, algorithm='policyopt.algorithms.deepseek_v32')
    config |= dict(reward='tests.reward_functions.odd', judge=dict(workers=0))
    run(config, workdir)
    step = next(r for r in metrics.read(workdir / 'metrics.jsonl') if r['stage'] == 'rl')
    assert step['skipped'] == 0 and step['update_norm'] > 0 and abs(step['kl_behavior/k3']) < 1e-6
    start = models.load(path)[1]
    found = policy.load(policy.find(workdir))
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), start, adapters.off(found.params))
    assert any(jax.tree.leaves(changed)) == (kind == 'whole')


def test_what_would_have_no_effect_is_refused():
    for changes, text in (
        (dict(adapters=dict(rank=0)), 'rank is 0: nothing'),
        (dict(adapters=dict(targets=('experts',))), 'lacks'),
        (dict(adapters=dict(ranks=1)), 'Did you mean `rank`'),
    ):
        with pytest.raises(ValueError, match=text):
            recipe.prepare({**RUN, **changes})
