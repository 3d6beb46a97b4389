"""Meshes, rules and specs; a model over eight devices says what it says on one."""

import dataclasses
import functools
import os
import re
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from policyopt import hosts, models, sharding

MESH = [('data', 2), ('fsdp', 2), ('expert', 1), ('tensor', 2)]


def test_make_mesh_fills_in_what_is_left():
    mesh = sharding.make_mesh([('data', -1), ('fsdp', 2), ('tensor', 2)])
    assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}
    assert dict(sharding.make_mesh().shape) == {'data': 8, 'fsdp': 1, 'expert': 1, 'tensor': 1}
    for wrong, message in (
        ([('data', 3)], 'does not cover 8 devices'),
        ([('data', -1), ('fsdp', 3)], 'does not cover 8 devices'),
        ([('data', -1), ('fsdp', -1)], 'at most one of them -1'),
        ([('data', 4), ('data', 2)], 'twice'),
    ):
        with pytest.raises(ValueError, match=message):
            sharding.make_mesh(wrong)


def test_rules_are_checked_and_kv_heads_follow_heads():
    rules = dict(sharding.make_rules({'heads': 'tensor', 'embed': ('fsdp', 'data'), 'mlp': None}))
    assert rules == {
        'heads': ('tensor',),
        'kv_heads': ('tensor',),
        'embed': ('fsdp', 'data'),
        'mlp': (),
    }
    assert sharding.make_rules() == sharding.DEFAULT_RULES
    with pytest.raises(ValueError, match=r"'head', which no array has.*Did you mean `heads`"):
        sharding.make_rules({'head': 'tensor'})
    # Weights are whole but for experts and what rows are not split over.
    rules = {'batch': ('fsdp', 'expert'), 'embed': 'fsdp', 'mlp': ('fsdp', 'tensor')}
    rules = sharding.make_rules(rules | {'experts': 'expert'})
    wanted = dict(rules) | {'embed': (), 'mlp': ('tensor',)}
    assert dict(sharding.gathered_rules(rules)) == wanted


def test_a_mesh_axis_splits_one_dimension_only():
    mesh = sharding.make_mesh(MESH)
    spec = functools.partial(sharding.partition_spec, mesh=mesh)
    rules = sharding.make_rules({'embed': ('fsdp', 'data'), 'mlp': ('tensor', 'fsdp')})
    assert spec(('embed', 'mlp'), rules) == P(('fsdp', 'data'), 'tensor')
    assert spec(('mlp', 'embed'), rules) == P(('tensor', 'fsdp'), 'data')
    assert spec(('embed', 'embed'), rules) == P(('fsdp', 'data'))
    assert spec(('layers', None, 'mlp'), rules) == P(None, None, ('tensor', 'fsdp'))
    # Axes of size 1, and axes that the mesh lacks, are dropped.
    assert spec(('experts', 'embed'), sharding.DEFAULT_RULES) == P(None, 'fsdp')
    assert spec(('mlp',), sharding.make_rules({'mlp': 'model'})) == P()


CONFIG = models.ModelConfig(
    vocab_size=40,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    moe=models.MoEConfig(experts=4, top_k=2),
    expert_dim=8,
    moe_layers=(1,),
)


def test_parameters_that_do_not_divide_are_named():
    mesh = sharding.make_mesh([('tensor', 8)])
    model = models.build(CONFIG)
    with pytest.raises(ValueError, match=r"\['k'\] of shape .*'kv_heads' \(2\).*kv_heads=None"):
        sharding.param_shardings(model.axes(), model.shapes(), mesh)
    rules = sharding.make_rules({'heads': None, 'mlp': 'tensor'})
    placed = sharding.param_shardings(model.axes(), model.shapes(), mesh, rules)
    assert placed['dense']['mlp']['down'].spec == P(None, 'tensor')
    assert placed['dense']['attention']['q'].spec == P()


def test_constrain_pins_values_and_cotangents_and_is_nothing_without_a_mesh():
    x = jnp.arange(32.0).reshape(8, 4)
    assert sharding.constrain(x, ('batch', None)) is x
    mesh = sharding.make_mesh(MESH)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: sharding.constrain(x, ('batch', 'mlp')))(x)
        assert y.sharding.spec == P(('data', 'fsdp'), 'tensor')
        # Three rows do not divide over four devices: they are replicated.
        y = jax.jit(lambda x: sharding.constrain(x, ('batch', 'mlp')))(x[:3])
        assert y.sharding.spec == P(None, 'tensor')
        g = jax.jit(jax.grad(lambda x: jnp.sum(sharding.constrain(x, ('batch', None)) ** 2)))(x)
        assert g.sharding.spec == P(('data', 'fsdp'))


@functools.cache
def unsharded():
    model = models.build(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 12), 0, 40)
    return (
        model,
        params,
        tokens,
        jax.jit(jax.value_and_grad(functools.partial(loss, model)))(params, tokens),
    )


def loss(model, params, tokens):
    out = model.hidden(params, tokens, valid=jnp.tile(jnp.arange(12) < 10, (8, 1)))
    return jnp.mean(out.hidden[:, :10] ** 3)


LAYOUTS = [
    [('data', 1), ('fsdp', 2), ('expert', 2), ('tensor', 2)],
    MESH,
    [('data', 2), ('fsdp', 2), ('expert', 2)],
]


@pytest.mark.slow
@pytest.mark.parametrize('axes', LAYOUTS)
def test_a_sharded_model_is_the_same_function(axes):
    model, params, tokens, (value, gradient) = unsharded()
    mesh = sharding.make_mesh(axes)
    placed = sharding.param_shardings(model.axes(), model.shapes(), mesh, model.rules)
    with jax.set_mesh(mesh):
        # A fresh model is the same numbers on any mesh.
        fresh = jax.jit(model.init, out_shardings=placed)(jax.random.key(0))
        step = jax.jit(
            jax.value_and_grad(functools.partial(loss, model)), out_shardings=(None, placed)
        )
        got, grads = step(fresh, tokens)
    for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert len(fresh['embed'].sharding.device_set) == 8
    assert not fresh['moe']['mlp']['gate'].sharding.is_fully_replicated
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


def test_loading_gives_each_device_its_part(tmp_path):
    model, params, *_ = unsharded()
    models.save(model, params, tmp_path)
    for axes in (MESH, [('data', 2), ('fsdp', 2), ('expert', 2)]):
        mesh = sharding.make_mesh(axes)
        _, placed = models.load(tmp_path, mesh=mesh)
        wanted = sharding.param_shardings(model.axes(), model.shapes(), mesh)
        for a, b, s in zip(*map(jax.tree.leaves, (placed, params, wanted)), strict=True):
            assert a.sharding == s
            np.testing.assert_array_equal(a, b)
    # Saving gathers what is spread.
    models.save(model, placed, tmp_path / 'again')
    first = (tmp_path / 'model.safetensors').read_bytes()
    assert (tmp_path / 'again' / 'model.safetensors').read_bytes() == first


@pytest.mark.slow
def test_loading_holds_one_tensor_beside_the_result(tmp_path):
    config = dataclasses.replace(
        CONFIG,
        vocab_size=40_000,
        embed_dim=1024,
        mlp_dim=4096,
        moe=None,
        expert_dim=0,
        moe_layers=None,
        head_dim=64,
    )
    model = models.build(config)
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), model.shapes())
    models.save(model, params, tmp_path)
    script = textwrap.dedent("""
        import sys, threading, time
        import jax
        from policyopt import hosts, models, sharding

        def resident():
            with open('/proc/self/statm') as file:
                return int(file.read().split()[1]) * 4096

        axes = [('data', 2), ('fsdp', 2), ('tensor', 2)]
        mesh = sharding.make_mesh(axes) if sys.argv[2] == '8' else None
        jax.block_until_ready(jax.jit(lambda x: x + 1)(1))
        before, peak, done = resident(), [0], threading.Event()

        def watch():
            while not done.is_set():
                peak[0] = max(peak[0], resident())
                time.sleep(.001)

        thread = threading.Thread(target=watch)
        thread.start()
        _, params = models.load(sys.argv[1], mesh=mesh)
        jax.block_until_ready(params)
        done.set()
        thread.join()
        shards = sum(s.data.nbytes for a in jax.tree.leaves(params) for s in a.addressable_shards)
        print((peak[0] - before - shards) / params['embed'].nbytes)
    """)
    for devices in ('1', '8'):
        command = [sys.executable, '-c', script, str(tmp_path), devices]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f'{devices} devices: {run.stdout.strip()} of the largest tensor')
        assert float(run.stdout) < 1.3


def test_rows_of_the_host_go_to_their_own_devices():
    tree = {'x': np.arange(24.0).reshape(8, 3), 'odd': np.arange(3), 'none': None}
    assert sharding.feed(tree) is tree
    mesh = sharding.make_mesh([('data', 2), ('fsdp', 2), ('tensor', 2)])
    with sharding.use(mesh):
        fed = sharding.feed(tree)
        again = sharding.feed(fed)
    assert fed['x'].sharding.spec == P(('data', 'fsdp')) and fed['none'] is None
    assert {shard.data.shape for shard in fed['x'].addressable_shards} == {(2, 3)}
    assert fed['odd'].is_fully_replicated and again['x'] is fed['x']
    np.testing.assert_array_equal(fed['x'], tree['x'])


def test_process_numbers_are_checked():
    with pytest.raises(ValueError, match='index=2 must be from 0 to 1'):
        hosts.start('localhost:1', count=2, index=2)


@pytest.mark.slow
def test_two_processes_load_compute_and_save_one_model(tmp_path):
    model, params, tokens, (value, _) = unsharded()
    models.save(model, params, tmp_path)
    script = textwrap.dedent("""
        import sys
        import jax, jax.numpy as jnp, numpy as np
        from policyopt import hosts, models, sharding

        folder, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
        hosts.start(f'127.0.0.1:{port}', 2, index)
        mesh = sharding.make_mesh([('data', 2), ('fsdp', 2), ('tensor', 2)])
        with jax.set_mesh(mesh):
            model, params = models.load(folder, mesh=mesh)
            assert not params['embed'].is_fully_addressable
            rows = jax.NamedSharding(mesh, jax.P(('data', 'fsdp')))
            tokens = np.load(folder + '/tokens.npy')
            tokens = jax.make_array_from_callback(tokens.shape, rows, lambda i: tokens[i])

            def loss(params, tokens):
                valid = jnp.tile(jnp.arange(12) < 10, (8, 1))
                return jnp.mean(model.hidden(params, tokens, valid=valid).hidden[:, :10] ** 3)

            print('loss', float(jax.jit(loss)(params, tokens)), flush=True)
            models.save(model, params, folder + '/again')
        jax.distributed.shutdown()
    """)
    np.save(tmp_path / 'tokens.npy', tokens)
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, 'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}
    command = [sys.executable, '-c', script, str(tmp_path), port]
    runs = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    for run in runs:
        out, _ = run.communicate(timeout=300)
        assert run.returncode == 0
        (found,) = re.findall(r'loss (\S+)', out)
        np.testing.assert_allclose(float(found), value, rtol=1e-5)
    first = (tmp_path / 'model.safetensors').read_bytes()
    assert (tmp_path / 'again' / 'model.safetensors').read_bytes() == first
