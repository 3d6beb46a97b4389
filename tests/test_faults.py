"""What may go wrong around a run: each fault is told with what to do, and the run then goes on.

The faults are real ones (limits, devices that are full, permissions, signals, files that are gone)
in the real run; only what the model computes is replaced by something that takes no time.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from policyopt import (
    algorithms,
    batches,
    evaluate,
    reinforce,
    report,
    rollout,
    stopping,
    train,
)
from policyopt import workdir as workdir_lib
from policyopt.checkpoint import CheckpointError
from policyopt.workdir import WorkdirError
from tests import test_checkpoint, test_resume
from tests.learning import random_batch
from tests.test_quickstart import get_config

# A read or a write that fails leaves orbax's coroutines unfinished; their collection complains.
pytestmark = [
    pytest.mark.fault,
    pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
]
FAULTY = (test_checkpoint, test_resume)  # other modules with faults
STEPS = 4
NEEDED = rollout.required_fields(algorithms.grpo())
PROBLEMS = [{'prompt': f'{a}+{b}=', 'answer': a + b} for a in range(10) for b in range(10)]


def slow(*cases):
    """Cases of the slow suite."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


# ============================================================================ a run in no time


@pytest.fixture(scope='module')
def problems(tmp_path_factory):
    """A file of problems, at the same place for all runs."""
    file = tmp_path_factory.mktemp('data') / 'problems.jsonl'
    file.write_text('\n'.join(map(json.dumps, PROBLEMS)))
    return file


def config_of(problems):
    """A run on a file of problems, saved at every step."""
    return get_config(
        'tiny,algorithm=grpo',
        task=dict(file=str(problems), held_out=8, held_out_share=0.3, prompt_width=6),
        warm_start=None,
        steps=STEPS,
        checkpoint=dict(every=1, keep=9),
        evaluation__every=3,
    )


class Stage:
    """Stands in for what the model computes; `at` maps (stage, step) to something to do there."""

    def __init__(self, at=None):
        self._at = at or {}

    def install(self, patch):
        patch.setattr(reinforce, 'rl_step', self.rl_step)
        patch.setattr(evaluate, 'held_out', self.held_out)
        patch.setattr(rollout, 'required_fields', lambda algorithm: NEEDED)  # traced: a second
        if ('drawn', None) not in self._at:
            patch.setattr(report, 'write', lambda workdir: report.Files(workdir, None))

    def here(self, stage, step):
        self._at.get((stage, step), lambda: None)()

    def rl_step(self, setup, loop, point, step):
        """Parameters that depend on those before and on the problems drawn."""
        drawn = sum(len(item.prompt) * i for i, item in enumerate(next(loop.source)))
        state = dataclasses.replace(
            point.state, params=jax.tree.map(lambda x: x * 0.5 + drawn, point.state.params)
        )
        self.here('rl', step)
        names = ('reward', 'accuracy', 'entropy', 'kl_behavior/k3', 'policy/frozen')
        zero = ('rollout/not_sampled', 'rollout/not_judged', 'skipped')
        values = dict.fromkeys(names, float(drawn)) | dict.fromkeys(zero, 0.0)
        values['rollout/tokens'] = 8.0
        part = random_batch(step)
        return reinforce.Step(state, values, {}, [part], [np.array(part.logp_old)], [False])

    def held_out(self, setup, params, page):
        """An accuracy that depends on the parameters."""
        self.here('evaluation', None)
        size = sum(float(np.abs(x).sum()) for x in jax.tree.leaves(jax.device_get(params)))
        right = tuple(i < int(size) % 9 for i in range(8))
        return evaluate.Accuracy(sum(right), 8, ('1',) * 8, right)


@pytest.fixture(scope='module')
def quick():
    """run(config, workdir, at) -> Result, with a Stage."""

    def run(config, workdir, at=None, stop=None):
        stage = Stage(at)
        with pytest.MonkeyPatch.context() as patch:
            stage.install(patch)
            return train.run(train.start(config, workdir), workdir, stop)

    return run


def state_of(workdir):
    """Records, and bytes of the files of the newest checkpoint's description."""
    folder = workdir / 'checkpoints' / str(STEPS)
    meta = json.loads((folder / 'meta' / 'metadata').read_text())
    return (workdir / 'metrics.jsonl').read_bytes(), json.loads(meta['text'])['fingerprint']


class Whole(NamedTuple):
    """A run that nothing happened to: its config, its folder, and what it came to."""

    config: dict
    folder: pathlib.Path
    state: tuple


@pytest.fixture(scope='module')
def whole(quick, problems, tmp_path_factory):
    config, folder = config_of(problems), tmp_path_factory.mktemp('runs') / 'whole'
    quick(config, folder)
    return Whole(config, folder, state_of(folder))


@contextlib.contextmanager
def file_limit(size):
    """Within it, a file that would grow beyond `size` bytes can't: as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def a_plain_user(folder):
    """Within it, permissions count, for root, too: it becomes another user, who owns `folder`."""
    if os.geteuid():
        yield
        return
    for path in (folder, *folder.rglob('*')):
        os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that every user can reach."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix='policyopt-faults-'))
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob('*'):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def killed(workdir, folder, step):
    """A copy of a finished run as a kill after `step` would have left it."""
    shutil.copytree(workdir, folder)
    for path in (folder / 'checkpoints').iterdir():
        if path.name.isdigit() and int(path.name) > step:
            shutil.rmtree(path)
    lines = (folder / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
    (folder / 'metrics.jsonl').write_bytes(b''.join(lines[:-1]) + lines[-1][:7])
    return folder


def goes_on(quick, whole, workdir):
    """The same command ends the run, as one that nothing happened to."""
    quick(whole.config, workdir)
    assert state_of(workdir) == whole.state


# ============================================================================ the disk is full


def full(path):
    """Put a device that is always full in the place of a file."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to('/dev/full')


@pytest.mark.parametrize('name', ['batches', *slow('timings.jsonl')])
def test_disk_full_at_a_file_of_its_own(name, quick, whole, tmp_path):
    """What only people read: the run stops, and goes on when there is room again."""
    workdir = tmp_path / 'run'
    scratch = f'.batch_{STEPS:06d}.npz.{os.getpid()}.tmp'
    path = workdir / 'batches' / scratch if name == 'batches' else workdir / name
    with pytest.raises(WorkdirError, match='no space is left on the disk. Free some'):
        quick(whole.config, workdir, {('rl', 2): lambda: full(path)})
    path.unlink(missing_ok=True)
    goes_on(quick, whole, workdir)
    batches.load_batch(workdir / 'batches' / f'batch_{STEPS:06d}.npz')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['dashboard.png', 'report.md'])
def test_disk_full_at_the_report(name, quick, whole, tmp_path, capsys):
    """The run is whole without it: a line says how to have it later."""
    workdir = tmp_path / 'run'
    scratch = workdir / f'.{name}.{os.getpid()}.tmp'  # what takes the file's place when whole
    at = {('rl', STEPS): lambda: full(scratch), ('drawn', None): None}
    quick(whole.config, workdir, at)
    assert state_of(workdir) == whole.state
    out = capsys.readouterr().out
    assert 'No space left on device' in out and f'python -m policyopt.report {workdir}' in out


@pytest.mark.parametrize('room', [11, *slow(0)])
def test_disk_full_at_the_records(room, quick, whole, tmp_path):
    """Also in the middle of a line."""
    workdir = tmp_path / 'run'
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        size = (workdir / 'metrics.jsonl').stat().st_size + room
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    try:
        with pytest.raises(WorkdirError, match='ulimit -f.* the same command goes on'):
            quick(whole.config, workdir, {('rl', 3): limit})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    goes_on(quick, whole, workdir)


@pytest.mark.parametrize('step', [3, *slow(1, STEPS)])
def test_disk_full_at_a_checkpoint(step, quick, whole, tmp_path, monkeypatch):
    """The save fails in the thread that writes, or before; the one before it is gone on from."""
    workdir, count = tmp_path / 'run', reinforce.count_skipped
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(setup, loop, point, done):
        if point.step == step:
            loop.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        return count(setup, loop, point, done)

    with monkeypatch.context() as patch:
        patch.setattr(reinforce, 'count_skipped', limit)
        try:
            with pytest.raises((CheckpointError, WorkdirError), match='before is whole') as error:
                quick(whole.config, workdir)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 'ulimit -f' in str(error.value)
    saved = {int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit()}
    assert saved == set(range(step))
    goes_on(quick, whole, workdir)


@pytest.mark.parametrize('earlier', [True, *slow(False)])
def test_disk_full_at_the_config(earlier, quick, whole, tmp_path):
    """At the very start, of a new run and of one that goes on: nothing is half written."""
    workdir = tmp_path / 'run'
    if earlier:
        killed(whole.folder, workdir, 2)
    with file_limit(40), pytest.raises(WorkdirError, match='ulimit -f'):
        train.start(whole.config, workdir)
    if earlier:
        assert json.loads((workdir / 'config.json').read_text())['steps'] == STEPS
    goes_on(quick, whole, workdir)
    assert not (tmp_path / 'run-1').exists()


def test_disk_full_at_the_lock(whole, tmp_path):
    with file_limit(1), pytest.raises(WorkdirError, match='can not be used: .*ulimit -f'):
        train.start(whole.config, tmp_path / 'run')
    workdir_lib.claim(tmp_path / 'run').close()


# ============================================================================ may not write


@pytest.mark.parametrize('place', ['folder', 'parent', 'kernel', 'file'])
def test_a_workdir_that_can_not_be_written(place, open_folder):
    workdir = {'kernel': pathlib.Path('/proc/self'), 'file': open_folder / 'file'}.get(
        place, open_folder
    ) / ('' if place == 'folder' else 'run')
    (open_folder / 'file').write_text('')
    if place == 'folder':
        (open_folder / 'file').unlink()
    open_folder.chmod(0o555)
    with a_plain_user(open_folder), pytest.raises(WorkdirError) as error:
        workdir_lib.claim(workdir)
    text = str(error.value)
    assert str(workdir) in text and 'the same command goes on' in text
    assert place in ('kernel', 'file') or 'the folder is not writable' in text


@pytest.mark.slow
def test_a_run_that_may_not_be_written_any_more(quick, whole, tmp_path, open_folder):
    """All of it, on resume."""
    workdir = killed(whole.folder, open_folder / 'run', 2)
    workdir.chmod(0o555)
    (workdir / 'lock').chmod(0o444)
    with a_plain_user(open_folder), pytest.raises(WorkdirError, match='is not writable'):
        workdir_lib.claim(workdir)
    workdir.chmod(0o755)
    (workdir / 'lock').chmod(0o644)
    goes_on(quick, whole, workdir)


@pytest.mark.parametrize('step', [2, *slow(0)])
def test_a_checkpoint_folder_that_is_read_only(step, quick, whole, open_folder):
    """What it holds is read; the first save says what is wrong."""
    workdir = killed(whole.folder, open_folder / 'run', step)
    with contextlib.ExitStack() as stack:

        def protect():
            (workdir / 'checkpoints').chmod(0o555)
            stack.enter_context(a_plain_user(open_folder))

        with pytest.raises(CheckpointError, match='the folder is not writable .* Allow writing'):
            quick(whole.config, workdir, {('rl', step + 1): protect})
    (workdir / 'checkpoints').chmod(0o755)
    goes_on(quick, whole, workdir)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['checkpoints', 'batches', 'metrics.jsonl', 'timings.jsonl'])
def test_something_else_is_in_the_place_of_a_file(name, quick, whole, tmp_path):
    """A file where a folder belongs, and the other way round."""
    workdir = killed(whole.folder, tmp_path / 'run', 2)
    aside, path = tmp_path / 'aside', workdir / name
    shutil.move(path, aside)
    path.mkdir() if aside.is_file() else path.write_text('')
    if name == 'checkpoints':  # a folder without a checkpoint holds no unfinished run
        quick(whole.config, workdir)
        assert (tmp_path / 'run-1' / 'checkpoints').is_file()
        return
    with pytest.raises((WorkdirError, OSError), match=name):
        quick(whole.config, workdir)
    path.rmdir() if path.is_dir() else path.unlink()
    shutil.move(aside, path)
    goes_on(quick, whole, workdir)


# ============================================================================ what it reads


@pytest.fixture
def changing(problems):
    """The file of problems, which is put back afterwards."""
    text = problems.read_text()
    yield problems
    problems.write_text(text)


def test_a_data_file_that_is_gone_at_resume(changing, quick, whole, tmp_path):
    workdir, text = killed(whole.folder, tmp_path / 'run', 2), changing.read_text()
    changing.unlink()
    before = sorted(workdir.rglob('*'))
    with pytest.raises(ValueError, match='problems.jsonl cannot be read: No such file.*put it'):
        train.start(whole.config, workdir)
    assert sorted(workdir.rglob('*')) == before
    changing.write_text(text)
    goes_on(quick, whole, workdir)


@pytest.mark.parametrize('change', ['an answer', *slow('a row more', 'a row less', 'the order')])
def test_a_data_file_that_has_changed_at_resume(change, changing, quick, whole, tmp_path):
    workdir, text = killed(whole.folder, tmp_path / 'run', 2), changing.read_text()
    rows = {
        'a row more': [*PROBLEMS, {'prompt': '10+10=', 'answer': 20}],
        'a row less': PROBLEMS[:-1],
        'an answer': [{**PROBLEMS[0], 'answer': 7}, *PROBLEMS[1:]],
        'the order': PROBLEMS[::-1],
    }[change]
    changing.write_text('\n'.join(map(json.dumps, rows)))
    with pytest.raises(CheckpointError, match='problems.jsonl is not what .* Put the old one back'):
        train.start(whole.config, workdir)
    changing.write_text(text)
    goes_on(quick, whole, workdir)


@pytest.mark.slow
def test_a_data_file_that_is_damaged_at_resume(changing, quick, whole, tmp_path):
    workdir, text = killed(whole.folder, tmp_path / 'run', 2), changing.read_text()
    changing.write_text(text[:-9])
    with pytest.raises(ValueError, match='problems.jsonl:100: invalid JSON'):
        train.start(whole.config, workdir)
    changing.write_text(text)
    goes_on(quick, whole, workdir)


BREAKING = {
    'seed': 7,
    'algorithm': 'policyopt.algorithms.gspo',
    'optimizer__learning_rate': 0.5,
    'rollout__prompts': 4,
    'sampling__temperature': 0.7,
    'model__embed_dim': 8,
    'minibatches': 4,
    'ema': 0.5,
    'replay__routing': None,
    'reference_every': 2,
    'task__held_out': 4,
}


@pytest.mark.parametrize('field', BREAKING)
def test_a_config_that_breaks_resume(field, problems, whole, tmp_path):
    workdir = killed(whole.folder, tmp_path / 'run', 2)
    config = config_of(problems)
    *section, name = field.split('__')
    (config[section[0]] if section else config)[name] = BREAKING[field]
    before = sorted(workdir.rglob('*')), (workdir / 'config.json').read_text()
    with pytest.raises(
        CheckpointError, match=f'config.{field.replace("__", ".")}: .* -> '
    ) as error:
        train.start(config, workdir)
    assert 'Put them back to go on with it' in str(error.value)
    assert (sorted(workdir.rglob('*')), (workdir / 'config.json').read_text()) == before


# ============================================================================ what it wrote


def test_records_that_are_cut_short(quick, whole, tmp_path):
    """Refused; the advice to go on from an older checkpoint holds."""
    workdir = killed(whole.folder, tmp_path / 'run', 3)
    lines = (workdir / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
    (workdir / 'metrics.jsonl').write_bytes(b''.join(lines[:3]) + lines[3][:9])
    with pytest.raises(WorkdirError, match='records are missing. Put the file back; or move'):
        quick(whole.config, workdir)
    for step in (2, 3):
        shutil.move(workdir / 'checkpoints' / str(step), tmp_path / str(step))
    goes_on(quick, whole, workdir)


@pytest.mark.slow
def test_records_that_are_gone(quick, whole, tmp_path):
    workdir = killed(whole.folder, tmp_path / 'run', 3)
    shutil.move(workdir / 'metrics.jsonl', tmp_path / 'aside')
    with pytest.raises(WorkdirError, match='has 0 bytes'):
        quick(whole.config, workdir)
    shutil.move(tmp_path / 'aside', workdir / 'metrics.jsonl')
    goes_on(quick, whole, workdir)


def test_timings_that_end_in_half_a_line(quick, whole, tmp_path):
    workdir = killed(whole.folder, tmp_path / 'run', 3)
    with open(workdir / 'timings.jsonl', 'a') as file:
        file.write('{"stage": "rl", "st')
    goes_on(quick, whole, workdir)
    for line in (workdir / 'timings.jsonl').read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize('gone', ['3', *slow('2 3', '1 2 3')])
def test_checkpoints_that_were_deleted(gone, quick, whole, tmp_path):
    workdir = killed(whole.folder, tmp_path / 'run', 3)
    for step in gone.split():
        shutil.rmtree(workdir / 'checkpoints' / step)
    goes_on(quick, whole, workdir)


@pytest.mark.parametrize('how', ['flipped', *slow('truncated', 'missing')])
def test_an_array_file_that_is_corrupt(how, quick, whole, tmp_path, capsys):
    """The largest file of the newest checkpoint: the one before is used, the run ends the same."""
    workdir = killed(whole.folder, tmp_path / 'run', 3)
    files = [p for p in (workdir / 'checkpoints' / '3').rglob('*') if p.is_file()]
    path = max(files, key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    if how == 'missing':
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data[: len(data) // 2] if how == 'truncated' else data)
    goes_on(quick, whole, workdir)
    assert 'the checkpoint of step 3 is not usable' in capsys.readouterr().out
    assert (workdir / 'damaged' / '3-0').is_dir()


def test_killed_in_the_first_save(quick, whole, tmp_path):
    """A folder without its name yet is no checkpoint: moved aside, and started over."""
    workdir = killed(whole.folder, tmp_path / 'run', 0)
    folder = workdir / 'checkpoints' / '0'
    folder.rename(folder.with_name('0.orbax-checkpoint-tmp'))
    goes_on(quick, whole, workdir)
    assert (tmp_path / 'run-1' / 'checkpoints' / '0.orbax-checkpoint-tmp').is_dir()


@pytest.mark.parametrize('moment', ['checkpoints', *slow('claimed', 'config')])
def test_killed_while_it_starts(moment, quick, whole, tmp_path):
    """What each moment of the start leaves is taken for a run, never for files of somebody."""
    workdir = tmp_path / 'run'
    workdir_lib.claim(workdir).close()
    if moment == 'config':
        (workdir / '.config.json.1.tmp').write_text('{"se')
    if moment == 'checkpoints':
        workdir_lib.write_settings(workdir, '{}')
        (workdir / 'checkpoints').mkdir()
    goes_on(quick, whole, workdir)


@pytest.mark.slow
def test_a_clock_that_goes_backwards(quick, tmp_path, whole, monkeypatch):
    """Names and numbers order checkpoints and records, no time does."""
    now = [time.time()]

    def earlier():
        now[0] -= 3600
        return now[0]

    workdir = tmp_path / 'run'
    with monkeypatch.context() as patch:
        patch.setattr(time, 'time', earlier)
        quick(whole.config, workdir)
    assert state_of(workdir) == whole.state
    copy = killed(workdir, tmp_path / 'copy', 3)
    for step in range(4):  # the older, the newer
        for path in (copy / 'checkpoints' / str(step), copy / 'checkpoints' / str(step) / 'meta'):
            os.utime(path, (10_000 - step, 10_000 - step))
    goes_on(quick, whole, copy)


# ============================================================================ others


def test_a_second_process(quick, whole, tmp_path):
    """Refused while the first one lives, whatever it does; free when it is killed."""
    workdir = killed(whole.folder, tmp_path / 'run', 2)
    script = (
        'import fcntl, os, sys, time\n'
        'file = open(sys.argv[1], "r+")\n'
        'fcntl.flock(file, fcntl.LOCK_EX)\n'
        'file.truncate(0); print(os.getpid(), file=file, flush=True); print("held", flush=True)\n'
        'time.sleep(600)\n'
    )
    command = [sys.executable, '-c', script, str(workdir / 'lock')]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == 'held\n'
        try:
            with pytest.raises(WorkdirError, match=f'another process \\(id {first.pid}\\)'):
                train.start(whole.config, workdir)
        finally:
            first.kill()
    goes_on(quick, whole, workdir)


@pytest.mark.parametrize(
    ('stage', 'step', 'saved'),
    [
        ('rl', 3, 3),
        *slow(('rl', 1, 1), ('evaluation', 0, None), ('evaluation', 1, 3), ('evaluation', 2, 4)),
    ],
)
def test_sigterm_in_each_stage(stage, step, saved, quick, whole, tmp_path, capsys):
    """A step and a measurement between steps are ended and saved; before and after RL, at once."""
    workdir, seen, before = tmp_path / 'run', [], signal.getsignal(signal.SIGTERM)

    def terminate():
        seen.append(0)
        if stage == 'rl' or len(seen) == step + 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)  # python handles it here

    at = {(stage, step if stage == 'rl' else None): terminate}
    try:
        with pytest.raises(SystemExit) as error:
            quick(whole.config, workdir, at, stopping.Stop().listen())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert error.value.code == 0
    folders = [int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit()]
    assert (max(folders) if folders else None) == saved
    assert 'SIGTERM: ' + ('saved' if saved and saved < 4 else 'stopped') in capsys.readouterr().out
    goes_on(quick, whole, workdir)


# ============================================================================ how many there are


def cases(module):
    """Parameterised cases of a module that inject a fault."""
    count, everywhere = 0, getattr(module, 'pytestmark', [])
    everywhere = everywhere if isinstance(everywhere, list) else [everywhere]
    for name, test in inspect.getmembers(module, inspect.isfunction):
        marks = [*getattr(test, 'pytestmark', []), *everywhere] if name.startswith('test') else []
        if any(mark.name == 'fault' for mark in marks):
            lists = [mark.args[1] for mark in marks if mark.name == 'parametrize']
            count += math.prod(map(len, lists))
    return count


def test_faults_are_many():
    found = {module.__name__: cases(module) for module in (*FAULTY, sys.modules[__name__])}
    assert sum(found.values()) >= 60 and min(found.values()) >= 5, found
