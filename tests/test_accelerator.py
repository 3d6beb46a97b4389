"""The checks of an accelerator, on the CPU; and what is said without one."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import accelerator, accelerator_checks

CPU = jax.devices('cpu')
ROOT = pathlib.Path(__file__).parents[1]


def run(*args):
    command = [sys.executable, '-m', 'experiments.accelerator', *args]
    given = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=given)


def test_what_counts_as_wrong():
    assert accelerator_checks.Found('a', 1e-5, 1e-4).good
    assert not accelerator_checks.Found('a', 2e-4, 1e-4).good
    assert not accelerator_checks.Found('a', float('nan'), 1e-4).good
    mask = np.array([1, 0, 1])
    assert accelerator_checks.gap(np.array([1.0, 9.0, 3.0]), np.array([1.5, 0.0, 3.0]), mask) == 0.5
    trees = dict(a=np.array([1.0, 4.0])), dict(a=np.array([2.0, 4.0]))
    assert accelerator_checks.relative(*trees) == 0.25


def test_without_an_accelerator_there_is_no_device_to_take():
    assert accelerator.device_of(None) is None
    assert accelerator.device_of('cpu') == CPU[0]
    with pytest.raises(RuntimeError, match='tpu'):
        accelerator.device_of('tpu')


def test_operations_of_a_model():
    """By hand: two layers of width 4, one head and one key head of 4, inner width 8, 16 tokens."""
    config = accelerator.models.ModelConfig(
        vocab_size=16, embed_dim=4, num_layers=2, num_heads=1, num_kv_heads=1, mlp_dim=8
    )
    layer = 4 * 4 * 4 + 3 * 4 * 8
    weights, scores = 2 * layer + 16 * 4, 2 * 4 * (10 + 1)
    assert accelerator.flops(config, 3, 10) == 6 * 3 * 10 * (weights + scores)


@pytest.mark.slow
def test_without_an_accelerator_it_says_so_and_ends_well():
    found = run()
    assert found.returncode == 0, found.stderr
    assert 'no accelerator' in found.stdout and 'policyopt[cuda]' in found.stdout
    wrong = run('--parts=attentoin')
    assert wrong.returncode == 1 and 'Traceback' not in wrong.stderr
    assert 'Did you mean `attention`?' in wrong.stdout + wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize('check', accelerator_checks.CHECKS)
def test_checks_hold_between_two_devices_of_the_cpu(check, monkeypatch):
    monkeypatch.setattr(accelerator_checks, 'DRAWN', 4)
    monkeypatch.delitem(accelerator_checks.CONFIGS, 'dense')  # the mixture has all of its parts
    found = list(accelerator_checks.CHECKS[check](CPU[1], CPU[0]))
    assert len(found) >= 2
    assert [f.what for f in found if not f.good] == []


@pytest.mark.slow
def test_a_wrong_value_is_found_and_said(monkeypatch, capsys):
    layer = accelerator_checks.moe.moe_layer

    def wrong(x, params, config, backend):
        y, *rest = layer(x, params, config, backend=backend)
        return (y * 1.0005 if backend == 'ragged' else y), *rest

    monkeypatch.setattr(accelerator_checks.moe, 'moe_layer', wrong)
    found = list(accelerator_checks.moe_forms(CPU[0], CPU[0]))
    assert [f.good for f in found] == [True, True, False, True]  # slopes may be off by a thousandth


@pytest.mark.slow
def test_what_is_timed():
    found = list(accelerator.times(accelerator.SMALL, 1))
    assert [f.unit for f in found] == ['TFLOP/s'] * 2 + ['tokens/s'] * 3 + ['TFLOP/s', '%']
    assert all(f.seconds > 0 and f.rate > 0 for f in found)
