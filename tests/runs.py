"""The folder of a run, for tests of what reads one."""

import atexit
import functools
import pathlib
import shutil
import tempfile

import jax
import pytest

from policyopt import loop as loop_lib
from policyopt import reinforce, stopping, train
from policyopt.state import averaged
from tests.test_quickstart import get_config

# Dense, for a quick compile.
CONFIG = get_config(
    'tiny',
    model=dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32),
    router={},
    replay={},
    steps=2,
    ema=0.5,
    evaluation=dict(every=1, batch=16, temperature=0.0, samples=2),
    checkpoint=dict(every=1, keep=9),
)


@pytest.fixture(scope='session')
def finished_run():
    """A run with a warm start and checkpoints of steps 0, 1 and 2; not to be changed.

    The RL steps only shrink the parameters: what they do costs a compile that nothing here needs.
    """
    return _made()


@functools.cache  # modules that import a fixture get one each
def _made():
    folder = pathlib.Path(tempfile.mkdtemp(prefix='policyopt-runs-'))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    workdir = folder / 'run'
    job = train.start(CONFIG, workdir)
    assert job.checkpoints is not None
    with job.lock, job.checkpoints:
        loop = loop_lib.make_loop(job.setup, workdir, job.checkpoints, stopping.Stop())
        point = train.from_the_start(job.setup, loop)
        for step in (1, 2):
            params = jax.tree.map(lambda x: 0.5 * x, point.state.params)
            ema = jax.tree.map(lambda a, b: 0.8 * a + 0.2 * b, point.state.ema, params)
            point = point._replace(state=point.state.replace(params=params, ema=ema), step=step)
            reinforce.record_accuracy(job.setup, averaged(point.state), loop, step)
            loop_lib.save(loop, point)
    return workdir
