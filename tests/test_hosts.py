"""Several processes train as one."""

import numpy as np
import pytest

from tests import processes

# An update, a checkpoint, another update; or the checkpoint of others, and the other update.
SAVED = """
import pathlib
import jax, numpy as np
from jax.experimental import multihost_utils
import policyopt as po
from policyopt import layout, learner, models
from policyopt.checkpoint import Checkpoints, Progress
from tests.learning import none, random_batch
from tests.test_checkpoint import Config
from tests.test_sharding import CONFIG

folder, begin, out = args
model = models.build(CONFIG)
with sharding.use(sharding.make_mesh([('data', 2), ('fsdp', 2), ('expert', 2)])):
    optimizer = learner.make_optimizer(learner.OptimizerConfig(learning_rate=1e-3))
    grpo, adaptive = po.algorithms.grpo(), po.algorithms.ppo_penalty().controllers
    algorithm = grpo._replace(controllers=adaptive)
    learn = learner.make_learner(model, algorithm, optimizer, ema=0.9, diagnose=none)
    batch = [random_batch(i, vocab=CONFIG.vocab_size) for i in range(2)]

    def start():
        params = layout.init(model, jax.random.key(0))
        return learn.init(params, jax.random.key(1)), params

    with Checkpoints(pathlib.Path(folder), 3, Config()) as saved:
        if begin == 'begin':
            state, _ = start()
            state, *_ = learn.update(state, batch[0])
            saved.save(state, state.params, Progress(step=1, source='', records=0))
            saved.wait()
            assert state.controllers and all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(state))
        else:
            state, reference, _ = saved.restore(start)
    state, *_ = learn.update(state, batch[1])
    found = (state.params, state.ema, state.opt_state, state.controllers, state.step)
    found = jax.tree.leaves(multihost_utils.process_allgather(found, tiled=True))
    if index == 0:
        np.savez(out, *found)
if count > 1:
    jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_checkpoints_are_written_once_and_restored_by_another_number_of_processes(tmp_path):
    """Two processes write one that one process goes on from, and the reverse."""
    ends = []
    for begin, end in ((2, 1), (1, 2)):
        folder = tmp_path / f'by{begin}'
        folder.mkdir()
        for count, name in ((begin, 'begin'), (end, 'end')):
            processes.run(count, SAVED, folder, name, folder / f'{name}.npz')
            ends.append(np.load(folder / f'{name}.npz'))
        assert [p.name for p in (folder / 'checkpoints').iterdir()] == ['1']
    for end in ends[1:]:
        assert len(end.files) == len(ends[0].files) > 20
        for name in end.files:
            np.testing.assert_allclose(end[name], ends[0][name], rtol=2e-5, atol=2e-5)
