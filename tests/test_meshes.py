"""Runs over eight devices: what they say is what one device says, and nothing is replicated."""

import functools
import itertools
import json
import pathlib
import re
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from policyopt import (
    checkpoint,
    layout,
    learner,
    models,
    recipe,
    reinforce,
    rewards,
    sharding,
    stopping,
    train,
)
from policyopt import loop as loop_lib
from policyopt.plan import hlo
from policyopt.sampling import decode, slots
from policyopt.sampling.rules import make_rules
from tests.learning import none
from tests.test_quickstart import get_config

MODEL = dict(
    embed_dim=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    vocab_size=16,
    expert_dim=8,
    moe=dict(experts=8, top_k=2),
)
DENSE = dict(MODEL, moe=None, expert_dim=0, mlp_dim=16, num_layers=1)
STEPS = 3
# Together: every axis, and every pair of axes, at size 2 or more.
MESHES = (
    dict(fsdp=2, expert=2, tensor=2),
    dict(data=2, fsdp=2, tensor=2),
    dict(data=2, expert=4),
    dict(data=8),
    dict(fsdp=8),
    dict(expert=8),
    dict(data=2, tensor=4),
    dict(fsdp=2, expert=4),
)


def odd(text, tokens, example):
    """Something to learn for a policy that knows nothing: answers of odd length."""
    return rewards.Verdict(float(len(text) % 2), 'length')


def config_of(mesh, **changes):
    """Truncated sampling from a mixture of experts: support and routing are replayed."""
    layers = changes.pop('num_layers', 1)
    return get_config(
        'tiny,algorithm=reinforce',
        model=MODEL | dict(num_layers=layers),
        warm_start=None,
        dynamic_sampling=False,
        steps=STEPS,
        mesh=mesh if mesh is None else tuple(mesh.items()),
        optimizer=dict(learning_rate=1e-3),
        ema=None,
        **changes,
    )


def prepared(mesh, **changes):
    return recipe.prepare(config_of(mesh, **changes))._replace(judge=rewards.Local(odd))


def make_loop(setup, tmp_path):
    """Without diagnostics, which are tested elsewhere and take long to compile."""
    with pytest.MonkeyPatch.context() as patch:
        quick = functools.partial(learner.make_learner, diagnose=none)
        patch.setattr(learner, 'make_learner', quick)
        return loop_lib.make_loop(setup, tmp_path, None, stopping.Stop())


def steps(setup, tmp_path):
    """Whole RL steps: tokens of each, parameters at the end, and the last state."""
    tokens = []
    with sharding.use(setup.mesh):
        loop = make_loop(setup, tmp_path)
        point = loop_lib.new_point(setup, loop, recipe.first_params(setup), None, 0)
        for step in range(1, STEPS + 1):
            done = reinforce.rl_step(setup, loop, point, step)
            part = done.parts[0]
            assert part.support is not None and part.routing is not None
            tokens += [np.asarray(part.tokens) for part in done.parts]
            point = point._replace(state=done.state, step=step)
    return tokens, jax.device_get(done.state.params), done


# With logp_old='recomputed' and a reference, every scorer there is takes part.
SCORED = dict(algorithm='policyopt.algorithms.grpo', logp_old='recomputed', num_layers=2)


@functools.cache
def alone(**changes):
    """What one device comes to."""
    with tempfile.TemporaryDirectory() as folder:
        return steps(prepared({}, **changes), pathlib.Path(folder))


def agree(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def names(mesh):
    return '-'.join(f'{name}{size}' for name, size in mesh.items())


CASES = [
    pytest.param(mesh, changes, id=f'{names(mesh)}-{kind}', marks=marks)
    for kind, changes, meshes, marks in (
        ('plain', {}, MESHES[:1], []),
        ('scored', SCORED, MESHES, [pytest.mark.slow]),
    )
    for mesh in meshes
]


def test_the_meshes_use_every_pair_of_axes():
    axes = [name for name, _ in sharding.DEFAULT_MESH]
    pairs = {pair for mesh in MESHES for pair in itertools.combinations(mesh, 2)}
    assert pairs == set(itertools.combinations(axes, 2)) and len(MESHES) == 8


@pytest.mark.parametrize(('mesh', 'changes'), CASES)
def test_rl_steps_over_a_mesh_are_those_of_one_device(mesh, changes, tmp_path):
    setup = prepared(mesh, **changes)
    tokens, params, done = steps(setup, tmp_path)
    wanted_tokens, wanted_params, _ = alone(**changes)
    np.testing.assert_array_equal(np.concatenate(tokens), np.concatenate(wanted_tokens))
    agree(params, wanted_params)
    before = jax.device_get(recipe.first_params(prepared({}, **changes)))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, before)
    assert min(moved['embed'], moved['moe']['mlp']['gate']) > 5e-4  # and they did move
    wanted = sharding.param_shardings(
        setup.model.axes(), done.state.params, setup.mesh, setup.model.rules
    )
    jax.tree.map(
        lambda x, s: np.testing.assert_(x.sharding.is_equivalent_to(s, x.ndim), (x.sharding, s)),
        done.state.params,
        wanted,
    )
    check_no_axis_is_replicated(setup.model, wanted, mesh)


def check_no_axis_is_replicated(model, placed, mesh):
    """Large parameters: each axis of the mesh that a rule gives one of their dimensions is used."""
    rules, axes = dict(model.rules), model.axes()
    large = [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(model.shapes())
        if leaf.size >= 16 * 16
    ]
    assert len(large) >= 8
    for path, _ in large:
        wanted, found = axes, placed
        for key in path:
            wanted, found = wanted[key.key], found[key.key]
        asked = {a for name in wanted if name for a in rules.get(name, ()) if mesh.get(a, 1) > 1}
        used = {a for part in found.spec for a in layout._names(part)}
        assert used == asked, (path, found.spec)


# ============================================================================ the cache


def shapes_in(text, layers, size):
    """Shapes of arrays of all layers and `size` positions in a compiled program."""
    found = {tuple(map(int, s.split(','))) for s in re.findall(r'f32\[([\d,]+)\]', text)}
    return {s for s in found if len(s) == 5 and (s[0], s[3]) == (layers, size)}


def cache_of(setup):
    """Wanted sharding of keys and values [L,B,KV,S,hd]."""
    rows = sharding.partition_spec(('batch',), setup.model.rules, setup.mesh)[0]
    return jax.NamedSharding(setup.mesh, jax.P(None, rows, 'tensor'))


def test_the_cache_is_split(tmp_path):
    """As it begins, and as any extension leaves it, in the compiled program."""
    setup = prepared(dict(data=2, fsdp=2, tensor=2))
    model, want = setup.model, cache_of(setup)
    with sharding.use(setup.mesh):
        cache = slots.empty(model, 8, 12)
        compiled = (
            jax.jit(model.extend)
            .lower(model.shapes(), cache, jnp.ones((8, 2), jnp.int32), jnp.ones(8, jnp.int32))
            .compile()
        )
    after = compiled.output_shardings[1]
    for found in (cache.k.sharding, cache.v.sharding, after.k, after.v):
        assert found.is_equivalent_to(want, 5), found
    assert want.shard_shape(cache.k.shape) == (1, 2, 2, 12, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('mesh', 'rows'), [(dict(data=2, fsdp=2, tensor=2), 2), (dict(fsdp=2, expert=2, tensor=2), 4)]
)
def test_the_cache_is_split_in_the_samplers(mesh, rows):
    """While a batch is decoded, by what is compiled; and in the engine's slots, over its calls."""
    setup = prepared(mesh, num_layers=2)
    model, size = setup.model, 11
    static, rules = make_rules(model, setup.config.sampling, 8, None, None)
    with sharding.use(setup.mesh):
        params = layout.init(model, jax.random.key(0))
        tokens, keys = jnp.ones((8, 6), jnp.int32), jax.random.split(jax.random.key(1), 8)
        inputs = (model, params, tokens, jnp.full(8, 3), keys, rules, jnp.int32(0))
        program = decode._decode.lower(*inputs, static=static, steps=size - 6).compile()
        assert shapes_in(program.as_text(), 2, size) == {(2, rows, 2, size, 4)}
        fields = dict(active=np.ones(8, bool), keys=np.asarray(jax.random.key_data(keys)))
        live = slots.Live(fed=np.ones(8, np.int32), drawn=np.ones(8, np.int32), **fields)
        prefix = slots.prefill(model, params, tokens[:1], np.full(1, 3, np.int32), None)
        cache, source, place = slots.empty(model, 8, size), np.zeros(8, np.int32), np.arange(8)
        common = dict(static=static, impl=jax.random.key_impl(keys))
        cache, _, _ = slots.admit(
            cache, None, prefix, source, place.astype(np.int32), None, live, rules, **common
        )
        after, _, _ = slots.decode(
            *(model, params, jax.tree.map(jnp.copy, cache), None, live, rules, None, np.int32(8)),
            **common,
            steps=2,
            bucket=size,
        )
        for x in (cache.k, cache.v, after.k, after.v):
            assert x.sharding.is_equivalent_to(cache_of(setup), 5), x.sharding


@pytest.mark.slow
def test_weights_are_gathered_once_for_several_tokens():
    """The decoder's loop gathers none, and draws the same tokens."""
    setup = prepared(dict(fsdp=2, expert=2, tensor=2), num_layers=2)
    model, rows, found = setup.model, 8, {}
    static, rules = make_rules(model, setup.config.sampling, rows, None, None)
    keys = jax.random.split(jax.random.key(1), rows)
    with sharding.use(setup.mesh):
        params = layout.init(model, jax.random.key(0))
        fields = dict(active=np.ones(rows, bool), keys=np.asarray(jax.random.key_data(keys)))
        live = slots.Live(fed=np.ones(rows, np.int32), drawn=np.ones(rows, np.int32), **fields)
        for gather in (False, True):
            cache = slots.empty(model, rows, 9)
            inputs = (model, params, cache, None, live, rules, None, np.int32(rows))
            common = dict(static=static, impl=jax.random.key_impl(keys), steps=3, bucket=9)
            program = slots.decode.lower(*inputs, **common, gather=gather).compile()
            _, _, records = program(*(x for x in inputs if x is not model))
            module = hlo.parse(program.as_text())
            inside = {
                s.dims
                for where in module.computations.values()
                for i in where
                if i.opcode == 'all-gather' and where.name != module.entry
                for s in i.shapes
            }
            found[gather] = inside, records
    np.testing.assert_array_equal(found[True][1].token, found[False][1].token)
    np.testing.assert_allclose(found[True][1].logp, found[False][1].logp, atol=2e-6)
    assert (1, 4, 16, 4) in found[False][0]  # the query heads of one layer
    assert found[True][0] <= {(4, 16), (8, 16)}  # logits of the rows drawn


# ============================================================================ another mesh


def train_on(mesh, workdir, **changes):
    job = train.start(config_of(mesh, **changes), workdir)
    return train.run(job._replace(setup=job.setup._replace(judge=rewards.Local(odd))), workdir)


def arrays_of(workdir, step):
    path = (workdir / 'checkpoints' / str(step) / 'state').resolve()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # wherever it was saved
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        args = ocp.args.StandardRestore(fallback_sharding=here)
        return reader.restore(path, args=args)['train']


def resumed_elsewhere(first, then, tmp_path, capsys):
    """A run that was saved on one mesh goes on, from its second step, on another."""
    kept = dict(checkpoint=dict(every=1, keep=9))
    train_on(first, tmp_path / 'whole', **kept)
    folder = shutil.copytree(tmp_path / 'whole', tmp_path / 'moved')
    shutil.rmtree(folder / 'checkpoints' / str(STEPS))
    records = (folder / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
    (folder / 'metrics.jsonl').write_bytes(b''.join(records[:-1]))
    capsys.readouterr()
    train_on(then, folder, **kept)
    out = capsys.readouterr().out
    assert f'resumed after RL step {STEPS - 1} of {STEPS}' in out
    assert 'config.mesh: ' in out and 'numbers agree to rounding' in out
    found, wanted = (arrays_of(f, STEPS) for f in (folder, tmp_path / 'whole'))
    agree(
        [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)],
        [x for x in jax.tree.leaves(wanted) if jnp.issubdtype(x.dtype, jnp.floating)],
    )
    for a, b in zip(*map(records_of, (folder, tmp_path / 'whole')), strict=True):
        assert a.keys() == b.keys()
        for name in ('reward', 'length', 'held_out'):
            assert a.get(name) == b.get(name)


def records_of(workdir):
    return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('first', 'then'), [(MESHES[0], MESHES[1]), ({}, dict(data=2, expert=4)), (dict(fsdp=8), {})]
)
def test_a_run_goes_on_on_another_mesh(first, then, tmp_path, capsys):
    resumed_elsewhere(first, then, tmp_path, capsys)


# ============================================================================ errors


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(mesh=(('tensr', 8),)), "'tensr', which config.rules split nothing.*`tensor`"),
        (dict(mesh=(('data', 4),)), 'config.mesh .* does not cover 8 devices'),
        (dict(mesh=(('data', -1), ('fsdp', 3))), 'does not cover 8 devices'),
        (dict(mesh=(('data', 2), ('data', 4))), 'config.mesh names an axis twice'),
        (dict(mesh=(('data', 'two'),)), 'config.mesh is .*legal is'),
        (dict(rules=dict(head='tensor')), "the logical axis 'head'.*Did you mean `heads`"),
        (dict(rules=dict(heads='tenser')), "config.rules.heads names .*'tenser'.*`tensor`"),
        (dict(rules=dict(heads=3)), 'config.rules.heads is 3; legal is a mesh axis'),
        (
            dict(mesh=(('tensor', 8),)),
            r"\['attention'\]\['k'\] of shape .*'kv_heads' \(4\) does not divide .*kv_heads=None",
        ),
        (dict(mesh=(('data', 8),), evaluation__batch=12), 'evaluation.batch is 12; .* of 8'),
        (
            dict(mesh=(('data', 8),), minibatches=8),
            'prompts . group_size / minibatches is 4; legal are multiples of 8',
        ),
        (
            dict(mesh=(('expert', 8),), model=DENSE),
            "config.mesh gives 8 devices to 'expert', which splits no parameter",
        ),
        (
            dict(mesh=(('data', 8),), rollout__engine=dict(slots=8, gather=True)),
            'config.rollout.engine.gather is True, but no mesh axis splits rows and weights',
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error_at_the_start(changes, message):
    config = config_of({}) | {'mesh': changes.get('mesh', ())}
    for path, value in changes.items():
        *section, name = path.split('__')
        (config[section[0]] if section else config)[name] = value
    with pytest.raises(ValueError, match=message):
        recipe.prepare(config)


def test_meshes_and_rules_by_default():
    """On CPU one device; where there is a mesh, rules change one by one, and kv_heads follow."""
    rules = layout.run_rules({})
    assert rules == sharding.DEFAULT_RULES
    assert layout.run_mesh(None, rules) is None and layout.run_mesh((), rules) is None
    assert dict(layout.run_mesh(sharding.DEFAULT_MESH, rules).shape)['data'] == 8
    assert layout.words(None) == 'cpu'
    mesh = layout.run_mesh((('data', -1), ('tensor', 2)), rules)
    assert layout.words(mesh) == '8 devices (cpu: data 4 x tensor 2)'
    changed = dict(layout.run_rules({'heads': None, 'embed': ['fsdp', 'data']}))
    assert changed['kv_heads'] == () and changed['embed'] == ('fsdp', 'data')
    assert changed['mlp'] == ('tensor',)
    config = models.ModelConfig(
        vocab_size=16, embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=8
    )
    model = models.build(config, rules=changed)
    assert model.rules == layout.run_rules({'heads': None, 'embed': ('fsdp', 'data')})
    names = {'mesh', 'rules'}
    assert names < set(checkpoint.FREE)
