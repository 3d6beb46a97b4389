"""A finished tiny run, for tests of what reads one."""

import pytest

from tests.test_quickstart import get_config
from tests.test_quickstart import run as train_run

# Dense, for a quick compile; a few right answers at the start, an average that lags.
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
def finished_run(tmp_path_factory):
    """The folder of the run; not to be changed."""
    workdir = tmp_path_factory.mktemp('runs') / 'run'
    train_run(CONFIG, workdir)
    return workdir
