"""Train a policy: supervised warm start, then reinforcement learning with any algorithm.

    python -m policyopt.train --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config can be overridden: --config.optimizer.learning_rate=1e-4. A section that the
file leaves out is given as a whole: --config.length_buckets='{"token_budget": 64, "widths": (8,)}'.
Recipes of papers take a model and problems: --config=configs/grpo.py:model=PATH,data=FILE.jsonl
The same command on the folder of an unfinished run goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from policyopt import (
    commands,
    disk,
    evaluate,
    hosts,
    layout,
    metrics,
    profiling,
    recipe,
    reinforce,
    report,
    reward_training,
    settings,
    sharding,
    stopping,
    warm_start,
    writers,
)
from policyopt import loop as loop_lib
from policyopt import workdir as workdir_lib
from policyopt.checkpoint import CheckpointError, Checkpoints
from policyopt.loop import Loop, Point
from policyopt.recipe import Setup
from policyopt.reinforce import record_accuracy
from policyopt.rewards import JudgeError
from policyopt.rollout import NotSampled
from policyopt.sampling.config import RowErrors
from policyopt.workdir import PAGE, RECORDS, TIMINGS

# Fields that the file leaves out may be given, too: `recipe.prepare` knows which there are.
_CONFIG = config_flags.DEFINE_config_file(
    'config',
    None,
    'File with get_config(), or FILE:ARGUMENT; the docstring of its get_config says what ARGUMENT '
    'may be. --config.FIELD=VALUE overrides a field, --config.SECTION.FIELD=VALUE a nested one.',
    lock_config=False,
    accept_new_attributes=True,
)
# Errors of a run whose message says all.
ENDS = (
    CheckpointError,
    workdir_lib.WorkdirError,
    stopping.Unstable,
    RowErrors,
    NotSampled,
    JudgeError,
    writers.WriterError,
    hosts.HostError,
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for everything that the run writes.')
_SAVE_BATCHES = flags.DEFINE_list(
    'save_batches',
    [],
    'RL steps, as 1,40, whose minibatches are saved for `python -m policyopt.inspect`, each with a '
    'checkpoint of the step before that is kept (none where checkpoint.every is 0). It changes '
    'nothing that the run computes.',
)
_WRITERS = flags.DEFINE_list(
    'writers',
    [],
    'Copies of metrics.jsonl for other tools: tensorboard (event files in WORKDIR/tensorboard), '
    'wandb (Weights & Biases), or both, separated by a comma. A resumed run may have others.',
)
_PROFILE = flags.DEFINE_string(
    'profile',
    None,
    'RL steps to trace with jax.profiler into WORKDIR/profile: FIRST:LAST, both included, such as '
    '3:5. Early steps compile.',
)
_MULTIHOST = flags.DEFINE_string(
    'multihost',
    None,
    'Train as one of several processes, each started with the same command: auto where jax finds '
    'the others by itself (TPU pods, Slurm, Open MPI, Kubernetes), or HOST:PORT,COUNT,INDEX with '
    'the address of process 0, the number of processes and that of this one.',
)


class Watch(NamedTuple):
    """What is written of a run beside its results, none of which it changes.

    Attributes:
      writers: names of `policyopt.writers`.
      profile: first and last RL step to be traced.
      save_batches: RL steps whose minibatches are saved, each with a checkpoint of the step before.
      command: for the report: config file, and the fields that the command line overrides.
    """

    writers: tuple[str, ...] = ()
    profile: tuple[int, int] | None = None
    save_batches: tuple[int, ...] = ()
    command: Mapping[str, Any] = types.MappingProxyType({})


class Result(NamedTuple):
    """Held-out accuracy before and after reinforcement learning, and where the dashboard is."""

    before: evaluate.Accuracy
    after: evaluate.Accuracy
    warm_steps: int
    curves: Path | None


# ============================================================================ the run


class Job(NamedTuple):
    """A run that may begin.

    Attributes:
      setup: what every stage uses.
      checkpoints: of the run; None where the config wants none.
      resumed: whether it goes on from a checkpoint.
      lock: on the folder, until it is closed; of the first process, others have none.
      config: as given.
      watch: what is written beside the results.
    """

    setup: Setup
    checkpoints: Checkpoints | None
    resumed: bool
    lock: contextlib.ExitStack
    config: Mapping[str, Any]
    watch: Watch


def start(config: Mapping[str, Any], workdir: Path, watch: Watch = Watch()) -> Job:  # noqa: B008
    """Check the config and claim the folder, before anything is compiled.

    An unfinished run of the same config there is gone on with; any other is moved aside.

    Args:
      config: as `recipe.prepare` takes it.
      workdir: folder of the run.
      watch: what is written beside the results.

    Raises ValueError or TypeError as `recipe.prepare`, `workdir.claim` and `Checkpoints.check` do,
    and for a step to save that the run has not.
    """
    setup = recipe.prepare(config)
    for step in watch.save_batches:
        if not 1 <= step <= setup.config.steps:
            raise ValueError(
                f'--save_batches has {step}; legal are RL steps, 1 to {setup.config.steps}'
            )
    if watch.profile and watch.profile[1] > setup.config.steps:
        first, last = watch.profile
        raise ValueError(f'--profile is {first}:{last}; config.steps is {setup.config.steps}')
    hosts.check_alike({**settings.flat(setup.config), **setup.task.origins, **watch._asdict()})
    c, lock = setup.config, contextlib.ExitStack()
    text = json.dumps(dict(config), indent=2, default=str) + '\n'

    def claim() -> bool:
        claimed = lock.enter_context(workdir_lib.claim(workdir))
        resumed = bool(c.checkpoint.every) and workdir_lib.unfinished(workdir)
        if not resumed:
            lock.enter_context(workdir_lib.move_aside(workdir, claimed))
            with workdir_lib.explained(workdir):  # first of all: it says that the folder is a run's
                workdir_lib.write_settings(workdir, text)
        return resumed

    try:
        resumed = hosts.by_first(claim)
        with workdir_lib.explained(workdir):
            checkpoints = None
            if c.checkpoint.every:
                also = [step - 1 for step in (*watch.save_batches, *saved_steps(workdir))]
                origins = setup.task.origins
                checkpoints = Checkpoints(workdir, c.checkpoint.keep, c, also, origins)
            if resumed:
                assert checkpoints is not None
                checkpoints.check()
                hosts.by_first(lambda: workdir_lib.write_settings(workdir, text))
    except BaseException:
        lock.close()
        raise
    return Job(setup, checkpoints, resumed, lock, config, watch)


def saved_steps(workdir: Path) -> list[int]:
    """RL steps whose minibatches the folder has, as of a run that was told to save them."""
    names = [path.name for path in (workdir / 'batches').glob('update_*.npz')]
    matches = [re.fullmatch(r'update_(\d+)_\d+\.npz', name) for name in names]
    return sorted({int(match[1]) for match in matches if match})


def run(job: Job, workdir: Path, stop: stopping.Stop | None = None) -> Result:
    """Warm start, measure, reinforce, measure again, report; the folder is free afterwards."""
    saved = job.checkpoints or contextlib.nullcontext()
    mesh, judges = sharding.use(job.setup.mesh), contextlib.ExitStack()
    for judge in filter(None, (job.setup.truth, job.setup.judge)):
        judges.callback(judge.close)
    folder = hosts.folder(workdir)
    with workdir_lib.explained(workdir), job.lock, saved, mesh, judges, folder as own:
        job.setup.judge.start()  # while programs are compiled
        return _run(job, own, stop or stopping.Stop())


def _run(job: Job, workdir: Path, stop: stopping.Stop) -> Result:
    setup, watch = job.setup, job.watch
    begin = time.time()
    workdir_lib.drop_half_line(workdir / TIMINGS)
    metrics.append(workdir / TIMINGS, 'start', 0, {'time': begin, **watch.command})
    profile = None
    if watch.profile:
        profile = profiling.Profile(*watch.profile, workdir / profiling.FOLDER)
    loop = loop_lib.make_loop(setup, workdir, job.checkpoints, stop, watch.save_batches, profile)
    point = None
    if job.resumed:
        reward_training.give(setup, workdir)  # answers that wait may still have to be judged
        point = loop_lib.resume(setup, loop)
    with writers.Follower(watch.writers if hosts.first() else (), workdir, job.config):
        point = point or from_the_start(setup, loop)
        before, warm_steps = point.before, point.warm_steps
        params = reinforce.reinforce(setup, loop, point)
        after = record_accuracy(setup, params, loop, setup.config.steps)
        values = {'before': before.value, 'after': after.value, 'warm_steps': warm_steps}
        metrics.append(workdir / RECORDS, 'result', setup.config.steps, values)
        metrics.append(workdir / TIMINGS, 'result', setup.config.steps, {'time': time.time()})
    try:
        files = report.write(workdir)
    except OSError as error:  # the run is whole without it
        print(f'no report ({disk.short(error)}): python -m policyopt.report {workdir} writes it')
        files = report.Files(workdir / PAGE, None)
    show_answers(setup, before, after)
    print(f'held-out accuracy before RL: {before}')
    print(f'held-out accuracy after RL:  {after}, {metrics.change(after.value - before.value)}')
    parts = [evaluate.by_task(accuracy, setup.task.held_out) for accuracy in (before, after)]
    for name, part in parts[1].items():
        print(f'  {name}: {parts[0][name]} before, {part} after')
    print(f'dashboard: {files.figure or "not drawn, matplotlib is not installed"}')
    print(f'report: {files.page}')
    print(f'everything else: {workdir}; {time.time() - begin:.0f} s in all')
    return Result(before, after, warm_steps, files.figure)


def from_the_start(setup: Setup, loop: Loop) -> Point:
    """First parameters, the warm start and what it came to, the reward model; saved."""
    params = recipe.first_params(setup)
    size = sum(x.size for x in jax.tree.leaves(params))
    print(
        f'{setup.config.algorithm}: {size:,} parameters, {len(setup.task.train):,} problems to '
        f'train on, {len(setup.task.held_out)} held out, on {layout.words(setup.mesh)}'
    )
    params, warm_steps = warm_start.warm_start(setup, params, loop.records, loop.stop)
    before = record_accuracy(setup, params, loop, 0)
    print(f'warm start of {warm_steps} steps; held-out accuracy before RL: {before}', flush=True)
    if setup.config.preferences is not None:
        reward_training.stage(setup, params, loop.workdir, loop.records, loop.stop.check)
        reward_training.give(setup, loop.workdir)
    point = loop_lib.new_point(setup, loop, params, before, warm_steps)
    loop_lib.save(loop, point)
    return point


def show_answers(setup: Setup, before: evaluate.Accuracy, after: evaluate.Accuracy) -> None:
    """Print some held-out problems with the answers before and after."""
    count = min(setup.config.evaluation.samples, len(setup.task.held_out))
    print(f'\n{"problem":>16}  {"right":>8}  {"before":>8}  {"after":>8}')
    for i, item in enumerate(setup.task.held_out[:count]):
        print(f'{item.prompt:>16}  {item.answer:>8}  {before.answers[i]:>8}  {after.answers[i]:>8}')
    print()


def steps_of(texts: Sequence[str]) -> tuple[int, ...]:
    """The RL steps of --save_batches; ValueError for what is no number."""
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        raise ValueError(
            f'--save_batches is {",".join(texts)}; legal are RL steps, as 1,40'
        ) from None


def command() -> dict[str, Any]:
    """Config file and overridden fields of the command line, as JSON."""
    flag = flags.FLAGS['config']
    changed = config_flags.get_override_values(flag)
    named = {
        'config_file': config_flags.get_config_filename(flag),
        'overrides': dict(changed),
    }
    return json.loads(json.dumps(named, default=str))


def main(argv: list[str]) -> None:
    """Entry point of `python -m policyopt.train`."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}')
    logging.set_verbosity(logging.WARNING)  # tfds and orbax tell of every file
    sharding.ask_libtpu()
    workdir = Path(_WORKDIR.value or '')
    if _MULTIHOST.value is not None:
        try:
            hosts.join(_MULTIHOST.value)
        except ValueError as error:
            raise SystemExit(f'ValueError: {error}') from None
        print(hosts.words(), file=sys.stderr, flush=True)
    stop = stopping.Stop().listen()
    try:
        profile = profiling.parse(_PROFILE.value) if _PROFILE.value is not None else None
        steps = steps_of(_SAVE_BATCHES.value)
        watch = Watch(writers.check(_WRITERS.value), profile, steps, command())
        job = start(_CONFIG.value.to_dict(), workdir, watch)
    except (CheckpointError, hosts.HostError) as error:  # may have a line for each field
        raise SystemExit(f'{type(error).__name__}: {error}') from error
    except (ValueError, TypeError, OSError) as error:  # of the settings: no traceback needed
        text = ' '.join(str(error).split())
        raise SystemExit(f'{type(error).__name__}: {text}') from error
    try:
        run(job, workdir, stop)
    except KeyboardInterrupt:
        print(f'interrupted; the same command goes on from the last checkpoint in {workdir}')
        raise SystemExit(130) from None
    except ENDS as error:
        raise SystemExit(f'{type(error).__name__}: {error}') from error
    except jax.errors.JaxRuntimeError as error:
        if not hosts.several():
            raise
        hosts.leave(
            f'process {jax.process_index()} stopped, since another one is lost or failed '
            f'({disk.short(error)}); the same command on all hosts goes on from the last '
            f'checkpoint in {workdir}'
        )


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(main, flags_parser=commands.read_flags)
