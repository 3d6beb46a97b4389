"""A run that is killed, stopped or hindered, and goes on: with the bytes of one that never was."""

import dataclasses
import errno
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from policyopt import (
    asynchronous,
    batches,
    checkpoint,
    metrics,
    recipe,
    reinforce,
    rewards,
    rollout,
    stopping,
    train,
)
from policyopt import loop as loop_lib
from policyopt import workdir as workdir_lib
from policyopt.state import TrainState
from policyopt.workdir import WorkdirError
from tests.events import events_of
from tests.learning import random_batch
from tests.test_quickstart import QUICKSTART, ROOT, get_config

# ============================================================================ in one process


def arrays_of(workdir, step):
    """Bytes of every array of a checkpoint, by name."""
    path = (workdir / 'checkpoints' / str(step) / 'state').resolve()
    tree = ocp.StandardCheckpointer().restore(path)
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(name): np.asarray(x).tobytes() for name, x in leaves}


def same_end(workdir, other, step):
    """Equal records and equal arrays in the last checkpoint."""
    records = [(folder / 'metrics.jsonl').read_bytes() for folder in (workdir, other)]
    assert records[0] == records[1] and records[0].count(b'"rl"') == step
    found, wanted = arrays_of(workdir, step), arrays_of(other, step)
    assert found == wanted and len(found) > 10


def killed_after(workdir, folder, step):
    """A copy of a finished run as a kill after `step` would have left it."""
    shutil.copytree(workdir, folder)
    for path in (folder / 'checkpoints').iterdir():
        if path.name.isdigit() and int(path.name) > step:
            shutil.rmtree(path)
    lines = (folder / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
    (folder / 'metrics.jsonl').write_bytes(b''.join(lines[:-1]) + lines[-1][:7])
    return folder


WATCH = train.Watch(writers=('tensorboard',))


def check_resume(config, tmp_path, steps, capsys):
    whole = train.run(train.start(config, tmp_path / 'whole', WATCH), tmp_path / 'whole')
    samples = (tmp_path / 'whole' / 'samples.jsonl').read_bytes()
    for step in steps:
        folder = killed_after(tmp_path / 'whole', tmp_path / f'from_{step}', step)
        job = train.start(config, folder, WATCH)
        assert job.resumed
        again = train.run(job, folder)
        assert f'resumed after RL step {step} of' in capsys.readouterr().out
        assert again._replace(curves=None) == whole._replace(curves=None)
        same_end(folder, tmp_path / 'whole', config['steps'])
        assert (folder / 'samples.jsonl').read_bytes() == samples
        rewards = events_of(folder)['reward']
        assert [step for step, _ in rewards] == list(range(1, config['steps'] + 1))
        assert (folder / 'batches' / f'batch_{config["steps"]:06d}.npz').is_file()


def test_a_run_goes_on_with_the_same_bytes(tmp_path, capsys):
    """Synced reference, moving average, evaluations in between; rows that time out by chance.

    Done again, steps and evaluations have the verdicts that they had.
    """
    config = get_config(
        'tiny,algorithm=grpo',
        warm_start=None,
        steps=4,
        checkpoint=dict(every=1, keep=9),
        evaluation__every=2,
        reference_every=2,
        ema=0.9,
        minibatches=1,
        reward='tests.reward_functions.moody',
        reward_kw={},
        judge=dict(workers=2, deadline=0.05),
    )
    check_resume(config, tmp_path, [1], capsys)
    steps = [r for r in metrics.read(tmp_path / 'whole' / 'metrics.jsonl') if r['stage'] == 'rl']
    late = sum(r['rewards/timed_out'] for r in steps)
    rows = sum(r['rollout/rows'] for r in steps)
    assert 0 < late < rows
    assert sum(r['rollout/not_judged'] * r['rollout/rows'] for r in steps) == pytest.approx(late)
    assert sum(r['rewards/right'] + r['rewards/wrong'] for r in steps) == rows - late
    names = [p.name for p in sorted((tmp_path / 'whole' / 'verdicts').iterdir())]
    assert names[:2] == ['000000_evaluation_000000.jsonl', '000001_rl_000001.jsonl']


@pytest.mark.slow
@pytest.mark.parametrize(
    ('algorithm', 'changes'),
    [
        ('ppo_penalty', dict(critic=dict(own=True, optimizer={}, pretrain=dict(max_steps=3)))),
        ('dapo', dict(warm_start=None, logp_old='recomputed', rollout__chunks=2, epochs=2)),
    ],
)
def test_a_run_goes_on_from_any_stage(algorithm, changes, tmp_path, capsys):
    """Adaptive controllers, the critic's own trunk and its pretraining; no warm start; the end."""
    config = get_config(
        f'tiny,algorithm={algorithm}', steps=3, checkpoint=dict(every=2, keep=9), **changes
    )
    check_resume(config, tmp_path, [0, 2, 3], capsys)


# ============================================================================ the folder


def started(workdir):
    """What a run leaves that was killed after its first checkpoint."""
    workdir_lib.claim(workdir).close()
    (workdir / 'config.json').write_text('{}')
    (workdir / 'checkpoints' / '0').mkdir(parents=True)
    return workdir


@pytest.mark.fault
def test_a_second_process_is_refused_and_a_stale_lock_is_not(tmp_path):
    with workdir_lib.claim(tmp_path / 'run') as lock:
        message = f'another process \\(id {os.getpid()}\\) works in'
        with pytest.raises(WorkdirError, match=message):
            workdir_lib.claim(tmp_path / 'run')
        lock.flush()
    (tmp_path / 'run' / 'lock').write_text('123456\n')  # left by a process that was killed
    workdir_lib.claim(tmp_path / 'run').close()


def test_a_lock_is_on_the_folder_that_is_there(tmp_path):
    """An earlier run is moved with its lock; the new folder is locked anew."""
    workdir = started(tmp_path / 'run')
    lock = workdir_lib.move_aside(workdir, workdir_lib.claim(workdir))
    with lock, pytest.raises(WorkdirError, match='another process'):
        workdir_lib.claim(workdir)
    workdir_lib.claim(tmp_path / 'run-1').close()


def test_what_is_unfinished(tmp_path):
    workdir = tmp_path / 'run'
    workdir.mkdir()
    assert not workdir_lib.unfinished(workdir)
    started(workdir)
    assert workdir_lib.unfinished(workdir)
    records = workdir / 'metrics.jsonl'
    records.write_text('{"stage": "rl", "step": 1}\n{"stage": "resu')
    assert workdir_lib.unfinished(workdir)
    records.write_text('{"stage": "rl", "step": 1}\n{"stage": "result", "step": 1}\n')
    assert not workdir_lib.unfinished(workdir)
    shutil.rmtree(workdir / 'checkpoints' / '0')
    records.unlink()
    assert not workdir_lib.unfinished(workdir)  # killed before its first checkpoint


def test_records_are_cut_to_what_the_checkpoint_knows(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    workdir_lib.cut(path, 0)
    assert workdir_lib.position(path) == 0
    metrics.append(path, 'rl', 1, {'loss': 1.0})
    size, text = workdir_lib.position(path), path.read_bytes()
    assert size == len(text)
    metrics.append(path, 'rl', 2, {'loss': 2.0})
    workdir_lib.cut(path, size)
    assert path.read_bytes() == text
    with pytest.raises(WorkdirError, match=f'has {size} bytes, its checkpoint knows of 999'):
        workdir_lib.cut(path, 999)


@pytest.mark.fault
@pytest.mark.parametrize(
    ('text', 'whole'), [('a\nb\nc', 'a\nb\n'), ('a\n', 'a\n'), ('abc', ''), ('', '')]
)
def test_half_a_line_is_cut_off(text, whole, tmp_path):
    (tmp_path / 'file').write_text(text)
    workdir_lib.drop_half_line(tmp_path / 'file')
    assert (tmp_path / 'file').read_text() == whole
    workdir_lib.drop_half_line(tmp_path / 'nothing')
    assert not (tmp_path / 'nothing').exists()


@pytest.mark.parametrize(
    ('code', 'advice'),
    [
        (errno.EACCES, 'the folder is not writable'),
        (errno.EROFS, 'the folder is not writable'),
        (errno.ENOSPC, 'no space is left'),
    ],
)
@pytest.mark.parametrize('where', ['mkdir', 'open'])
def test_a_folder_that_can_not_be_written(code, advice, where, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    if where == 'mkdir':
        monkeypatch.setattr(pathlib.Path, 'mkdir', fail)
    else:
        monkeypatch.setattr(workdir_lib, 'open', fail, raising=False)
    with pytest.raises(WorkdirError, match=advice):
        workdir_lib.claim(tmp_path / 'run')


@pytest.mark.fault
def test_a_folder_under_a_file(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(WorkdirError, match='can not be used: NotADirectoryError'):
        workdir_lib.claim(tmp_path / 'file' / 'run')


@pytest.mark.fault
def test_a_run_of_another_config_is_not_touched(tmp_path):
    """The error names the field; the folder stays as it was, and free."""
    config = get_config('tiny')
    workdir = started(tmp_path / 'run')
    shutil.rmtree(workdir / 'checkpoints')
    c = recipe.prepare(config).config
    with checkpoint.Checkpoints(workdir, 2, c) as checkpoints:
        state = {'x': jax.numpy.ones(3)}
        checkpoints.save(state, None, checkpoint.Progress(0, None, 0))
    before = sorted(p for p in workdir.rglob('*'))
    other = get_config('tiny', optimizer__learning_rate=0.5, seed=4)
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError, match='learning_rate: 0.001 -> 0.5') as e:
            train.start(other, workdir)
        assert 'config.seed: 0 -> 4' in str(e.value)
    assert sorted(p for p in workdir.rglob('*')) == before
    assert (workdir / 'config.json').read_text() == '{}'
    job = train.start(get_config('tiny', steps=7, evaluation__every=3), workdir)
    assert job.resumed
    job.lock.close()


def test_every_free_field_is_a_field():
    names = set(checkpoint.settings.flat(recipe.prepare(get_config('tiny')).config))
    fields = {f.name for f in dataclasses.fields(recipe.RunConfig)}
    ahead = dataclasses.fields(asynchronous.AsyncConfig)  # a section that the toy has not
    fields |= {f'asynchronous.{f.name}' for f in ahead}
    for name in checkpoint.FREE:
        assert name in fields or name in names, name


def test_checkpoints_can_be_off(tmp_path):
    job = train.start(get_config('tiny', checkpoint=dict(every=0)), tmp_path / 'run')
    assert job.checkpoints is None and not job.resumed
    job.lock.close()
    assert not (tmp_path / 'run' / 'checkpoints').exists()


# ============================================================================ stopping


def test_sigterm_ends_at_once_or_when_it_is_convenient(capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop = stopping.Stop().listen()
        with stop.patience():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert stop.asked
        with pytest.raises(SystemExit) as error:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        assert error.value.code == 0 and 'SIGTERM: stopped' in capsys.readouterr().out
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ('before', 'skipped', 'want'),
    [
        (0, [False, False], (0, None)),
        (0, [True, False, True], (1, None)),
        (2, [True, False], (3, 0)),
        (1, [True, True, False], (3, 1)),
        (2, [False, True, True], (2, None)),
        (2, [], (2, None)),
    ],
)
def test_skipped_updates_are_counted_in_a_row(before, skipped, want):
    assert stopping.skipped_in_a_row(before, skipped, 3) == want


class Recorder:
    """Stands in for Checkpoints."""

    def __init__(self, *steps):
        self._steps = list(steps)

    def steps(self):
        return self._steps

    def save(self, state, reference, progress, rollouts=None):
        self._steps.append(progress.step)

    def wait(self):
        pass


class Source:
    def get_state(self):
        return {}


def loop_of(tmp_path, **changes):
    setup = recipe.prepare(get_config('tiny', **changes))
    loop = loop_lib.Loop(None, None, Source(), tmp_path, Recorder(), stopping.Stop())
    return setup, loop


# A state of no parameter.
NOTHING = TrainState(params={}, opt_state={}, controllers={}, step=np.int32(0), key=None)


@pytest.mark.fault
def test_too_many_skipped_updates_end_the_run_with_the_batch_saved(tmp_path):
    setup, loop = loop_of(tmp_path, max_skipped=3, checkpoint=dict(every=1))
    parts = [random_batch(0), random_batch(1)]
    parts[1].advantages[:] = np.nan
    logp = [np.zeros_like(part.logp_old) for part in parts]
    point = loop_lib.Point(NOTHING, None, 5, 1, None, 0)
    state = types.SimpleNamespace(params={'w': np.ones(3, np.float32)})
    done = reinforce.Step(state, {}, {}, parts, logp, [True, False], {'kl': np.float32(0.5)})
    point = point._replace(skipped=reinforce.count_skipped(setup, loop, point, done))
    assert point.skipped == 0
    reinforce.save_if_due(setup, loop, point)
    assert loop.checkpoints.steps() == [5]
    point = point._replace(
        step=6, skipped=reinforce.count_skipped(setup, loop, point, done._replace(skipped=[True]))
    )
    reinforce.save_if_due(setup, loop, point)
    assert loop.checkpoints.steps() == [5]  # what it starts from may be what is wrong
    with pytest.raises(stopping.Unstable, match='3 updates in a row .* checkpoint is of step 5'):
        reinforce.count_skipped(setup, loop, point, done._replace(skipped=[True, True]))
    with np.load(tmp_path / 'batches' / 'offending_000006.npz') as saved:
        np.testing.assert_array_equal(saved['tokens'], parts[1].tokens)
        assert np.isnan(saved['advantages']).all() and saved['logp_new'].shape == logp[1].shape
        assert 'support' not in saved
    _, origin = batches.load_minibatch(tmp_path / 'batches' / 'offending_000006.npz')
    assert (origin.step, origin.epoch, origin.minibatch) == (6, 1, 2)
    assert origin.params == checkpoint.fingerprint(state.params) != checkpoint.fingerprint({})
    assert origin.controllers == {'kl': 0.5} and origin.config['max_skipped'] == 3
    done = done._replace(skipped=[True, True, False])
    with pytest.raises(stopping.Unstable):
        reinforce.count_skipped(setup, loop, point, done._replace(logp_new=logp * 2))
    _, origin = batches.load_minibatch(tmp_path / 'batches' / 'offending_000006.npz')
    assert origin.params is None  # the third update moved on


def test_steps_where_nothing_can_be_sampled_end_the_run_with_their_rows_saved(tmp_path):
    """They count as skipped updates; no parameter, controller or optimizer state moves."""
    setup, loop = loop_of(tmp_path, max_skipped=5, epochs=2, minibatches=1)
    batch = dataclasses.replace(random_batch(0), finish=np.full(8, 5, np.int32))
    metrics = {'rollout/not_sampled': 1.0, 'rollout/tokens': 9.0}

    def collect(*args, **kwargs):
        raise rollout.NotSampled(batch, metrics)

    state = types.SimpleNamespace(
        params={'w': np.ones(3, np.float32)},
        key=jax.random.key(0),
        controllers={'kl': np.float32(2.0)},
    )
    point = loop_lib.Point(state, None, 3, 0, None, 0)
    loop = loop._replace(collect=collect)
    for step in (4, 5):
        done = reinforce.rl_step(setup, loop, point, step)
        assert done.state is state and done.values == metrics | {'skipped': 1.0}
        point = point._replace(step=step, skipped=reinforce.count_skipped(setup, loop, point, done))
        assert point.skipped == 2 * (step - 3)
        reinforce.save_if_due(setup, loop, point)
    assert loop.checkpoints.steps() == []
    done = reinforce.rl_step(setup, loop, point, 6)
    with pytest.raises(stopping.Unstable, match='logits are not finite, the last at RL step 6'):
        reinforce.count_skipped(setup, loop, point._replace(step=6), done)
    arrays, origin = batches.load_minibatch(tmp_path / 'batches' / 'offending_000006.npz')
    assert 'logp_new' not in arrays and (arrays['finish'] == 5).all()
    assert (origin.epoch, origin.minibatch) == (0, 0) and origin.controllers == {'kl': 2.0}
    assert origin.params == checkpoint.fingerprint(state.params)


def test_checkpoints_are_due(tmp_path):
    setup, loop = loop_of(tmp_path, steps=8, checkpoint=dict(every=3))
    wanted = loop._replace(save_batches=(3, 8), checkpoints=Recorder())
    for step in range(1, 9):
        reinforce.save_if_due(setup, wanted, loop_lib.Point(NOTHING, None, step, 0, None, 0))
    assert wanted.checkpoints.steps() == [2, 3, 6, 7, 8]
    for step in range(1, 9):
        reinforce.save_if_due(setup, loop, loop_lib.Point(NOTHING, None, step, 0, None, 0))
    assert loop.checkpoints.steps() == [3, 6, 8]
    loop.stop.asked = True
    with pytest.raises(SystemExit) as error:
        reinforce.save_if_due(setup, loop, loop_lib.Point(NOTHING, None, 4, 0, None, 0))
    assert error.value.code == 0 and loop.checkpoints.steps()[-1] == 4


@pytest.mark.fault
@pytest.mark.slow
def test_a_run_that_diverges_stops_with_a_good_checkpoint(tmp_path, monkeypatch):
    """From step 3 on, no update is finite: the fifth in a row ends the run."""
    split, calls = reinforce.rollout_lib.minibatches, []

    def poisoned(batch, parts):
        calls.append(batch)
        found = split(batch, parts)
        if len(calls) < 3:
            return found
        nan = [np.full_like(part.advantages, np.nan) for part in found]
        return [dataclasses.replace(x, advantages=y) for x, y in zip(found, nan, strict=True)]

    monkeypatch.setattr(reinforce.rollout_lib, 'minibatches', poisoned)
    config = get_config(
        'tiny,algorithm=reinforce',
        warm_start=None,
        steps=30,
        minibatches=2,
        max_skipped=5,
        checkpoint=dict(every=1, keep=2),
    )
    workdir = tmp_path / 'run'
    with pytest.raises(stopping.Unstable, match='5 updates in a row .* RL step 5: .* of step 2'):
        train.run(train.start(config, workdir), workdir)
    skipped = [r['skipped'] for r in metrics.read(workdir / 'metrics.jsonl') if r['stage'] == 'rl']
    assert skipped == [0, 0, 1, 1, 1]
    assert sorted(int(p.name) for p in (workdir / 'checkpoints').iterdir()) == [1, 2]
    with np.load(workdir / 'batches' / 'offending_000005.npz') as saved:
        np.testing.assert_array_equal(saved['tokens'], calls[-1].tokens[:16])
    workdir_lib.claim(workdir).close()  # free


# ============================================================================ verdicts


def test_only_pages_that_a_checkpoint_may_need_are_kept(tmp_path):
    setup, loop = loop_of(tmp_path, steps=8, checkpoint=dict(every=3))
    loop = loop._replace(ledger=rewards.Ledger(tmp_path))
    for step in range(1, 9):
        loop.page('rl', step, step).write({(0, 0): (1, rewards.Verdict(1.0))})
        reinforce.save_if_due(setup, loop, loop_lib.Point(NOTHING, None, step, 0, None, 0))
    left = sorted(int(p.name[:6]) for p in (tmp_path / 'verdicts').iterdir())
    assert left == [3, 4, 5, 6, 7, 8] and loop.checkpoints.steps() == [3, 6, 8]


# ============================================================================ killed


CONFIG = """
import importlib.util

def get_config(argument=None):
    spec = importlib.util.spec_from_file_location('quickstart', {quickstart!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    c = module.get_config('tiny,algorithm={algorithm}')
    c.steps, c.minibatches, c.ema = {steps}, 1, 0.9
    if c.algorithm.endswith('grpo'):
        c.reference_every = 3
    c.evaluation.every = 5
    c.checkpoint.update(every=1, keep=2)
    {more}
    c.judge = dict(workers=2)
    return c
"""


class Command:
    """The training command on small runs that share their compiled programs."""

    def __init__(self, folder, steps, more=''):
        self._folder = folder
        algorithm = 'ppo_clip' if more else 'grpo'
        text = CONFIG.format(
            quickstart=str(QUICKSTART), steps=steps, algorithm=algorithm, more=more
        )
        (folder / 'config.py').write_text(text)
        self._env = os.environ | {
            'XLA_FLAGS': '--xla_backend_optimization_level=0',
            'JAX_COMPILATION_CACHE_DIR': str(folder / 'xla'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        }

    def begin(self, workdir):
        arguments = [f'--config={self._folder / "config.py"}', f'--workdir={workdir}']
        return subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-m', 'policyopt.train', *arguments],
            cwd=ROOT,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, workdir):
        process = self.begin(workdir)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
        return out


def lines(path, stage):
    if not path.exists():
        return 0
    return path.read_text().count(f'"stage": "{stage}"')


def wait_for(process, path, stage, more, seconds=math.inf):
    """Until the file has so many more records of the stage, or process or time are at an end."""
    target, end = lines(path, stage) + more, time.monotonic() + seconds
    while process.poll() is None and lines(path, stage) < target and time.monotonic() < end:
        time.sleep(0.002)


def being_saved(workdir):
    return any((workdir / 'checkpoints').glob('*.orbax-checkpoint-tmp*'))


@pytest.mark.slow
@pytest.mark.fault
def test_killed_at_20_random_moments_a_run_ends_as_one_never_stopped(tmp_path):
    """SIGKILL in the warm start, in steps, in saves, in restores; then the last life ends it."""
    command, steps, rng = Command(tmp_path, 60), 60, random.Random(20)
    command.finish(tmp_path / 'whole')
    workdir = tmp_path / 'run'
    timings = workdir / 'timings.jsonl'
    process = command.begin(workdir)
    wait_for(process, workdir / 'metrics.jsonl', 'warm_start', 1)
    process.kill()
    process.communicate()
    # Where in its life each of the others ends: in steps, in a save, or before its first step.
    kinds = ['steps', *rng.sample(['steps', 'save', 'start'] * 6, 18)]
    moments, in_saves, said, to_first = [], 0, '', math.inf
    for kind in kinds:
        began = time.monotonic()
        process = command.begin(workdir)
        if kind == 'start':  # imports, restore, tracing; a first step cuts it short
            wait_for(process, timings, 'rl', 1, rng.uniform(0.2, 1) * to_first)
        else:
            wait_for(process, timings, 'rl', 1)
            to_first = min(to_first, time.monotonic() - began)
            wait_for(process, timings, 'rl', rng.randint(0, 2))
        if kind == 'steps':
            time.sleep(rng.uniform(0, 0.1))
        while kind == 'save' and process.poll() is None and not being_saved(workdir):
            time.sleep(0.0005)
        process.kill()
        said += process.communicate()[0]
        moments.append(lines(workdir / 'metrics.jsonl', 'rl'))
        in_saves += being_saved(workdir)
    said += command.finish(workdir)
    assert (tmp_path / 'run-1').is_dir()  # killed before its first checkpoint: started over
    assert not (tmp_path / 'run-2').exists() and 'not usable' not in said, said
    assert 1 + len(kinds) == 20 and in_saves >= 3, (in_saves, moments)
    # How far each life came depends on the machine.
    assert len(set(moments)) >= 4 and said.count('resumed after RL step') >= 8, moments
    same_end(workdir, tmp_path / 'whole', steps)


STAGES = {
    'warm_start': 'SIGTERM: stopped',
    'value_pretraining': 'SIGTERM: stopped',
    'rl': 'SIGTERM: saved after RL step',
    'evaluation': 'SIGTERM: ',
}


@pytest.fixture(scope='module')
def staged(tmp_path_factory):
    """A command that goes through all stages, and the folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp('staged')
    command = Command(folder, 6, 'c.critic = dict(optimizer={}, pretrain=dict(max_steps=4))')
    command.finish(folder / 'whole')
    return command, folder / 'whole'


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize('stage', STAGES)
def test_sigterm_in_any_stage_exits_0_and_loses_nothing(stage, staged, tmp_path):
    """The command itself: asked to end in a stage, it does; the same command ends as if never."""
    command, whole = staged
    workdir = tmp_path / 'run'
    process = command.begin(workdir)
    wait_for(process, workdir / 'metrics.jsonl', stage, 1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and STAGES[stage] in out and 'Traceback' not in out, out
    assert lines(workdir / 'metrics.jsonl', 'result') == 0
    command.finish(workdir)
    same_end(workdir, whole, 6)


@pytest.mark.fault
@pytest.mark.slow
def test_sigterm_saves_and_exits_0_and_a_second_process_is_refused(tmp_path):
    command = Command(tmp_path, 400)
    workdir = tmp_path / 'run'
    process = command.begin(workdir)
    wait_for(process, workdir / 'timings.jsonl', 'rl', 2)
    second = command.begin(workdir)
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 1 and f'another process (id {process.pid}) works in' in out
    assert 'Traceback' not in out
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and 'SIGTERM: saved after RL step' in out, out
    done = lines(workdir / 'metrics.jsonl', 'rl')
    assert max(int(p.name) for p in (workdir / 'checkpoints').iterdir()) == done < 400
    assert json.loads((workdir / 'config.json').read_text())['steps'] == 400
    process = command.begin(workdir)
    wait_for(process, workdir / 'timings.jsonl', 'rl', 1)
    process.kill()
    out, _ = process.communicate()
    assert f'resumed after RL step {done} of 400' in out
