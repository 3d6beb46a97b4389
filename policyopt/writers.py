"""Copies of a run's records for other tools: TensorBoard event files, Weights & Biases.

`metrics.jsonl` is the record; writers follow it, in a thread of their own, and cost a step nothing.
They are no part of what a run is a function of: a resumed run may have others, which then begin
with all that came before. No point is written twice.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from policyopt import checks
from policyopt.workdir import RECORDS, TIMINGS

PACKAGES = {'tensorboard': 'tensorboardX', 'wandb': 'wandb'}
STAGES = ('warm_start', 'value_pretraining', 'rl', 'evaluation', 'result')
EVENTS, WANDB_RUN = 'tensorboard', 'wandb_run.txt'
SECONDS = 2.0  # between two looks at the files


class Record(NamedTuple):
    """A record of the run.

    Attributes:
      number: its line in `metrics.jsonl`, from 0.
      stage, step: as there.
      values: numbers by name; those of RL steps with `time/...`, from `timings.jsonl`.
      time: seconds since 1970.
    """

    number: int
    stage: str
    step: int
    values: Mapping[str, float]
    time: float


class WriterError(ValueError):
    """A writer that can't begin; the message says why."""


class Writer(Protocol):
    """What follows a run."""

    def write(self, record: Record) -> None:
        """Take a record; they come in the order of their numbers, from 0."""
        ...

    def close(self) -> None:
        """Finish; nothing comes after."""
        ...


def check(names: Iterable[str]) -> tuple[str, ...]:
    """The names of `--writers`, checked.

    Raises ValueError for one that is unknown, with the nearest spelling, or not installed.
    """
    names = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in names:
        if name not in PACKAGES:
            raise ValueError(f'--writers has no `{name}`.{checks.nearest(name, PACKAGES)}')
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ValueError(
                f'--writers={name} needs the package {PACKAGES[name]}, which is not installed: '
                f"pip install 'policyopt[{name}]'"
            )
    return names


class TensorBoard:
    """Event files in `workdir/tensorboard`, written anew from the first record on each start."""

    def __init__(self, workdir: Path, config: Mapping[str, Any]):
        from tensorboardX import FileWriter
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

        del config
        shutil.rmtree(workdir / EVENTS, ignore_errors=True)
        self._file, self._summary = FileWriter(str(workdir / EVENTS)), Summary

    def write(self, record: Record) -> None:
        """One event with all values of the record."""
        prefix = '' if record.stage == 'rl' else f'{record.stage}/'
        values = [
            self._summary.Value(tag=prefix + name, simple_value=value)
            for name, value in record.values.items()
        ]
        summary = self._summary(value=values)
        self._file.add_summary(summary, global_step=record.step, walltime=record.time)

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()


class Wandb:
    """A run of Weights & Biases, which a resumed run goes on with.

    Its step counts the records of the run, so that what it holds already is known by its number;
    the axis of a stage's charts is the stage's own step. The run's id is kept in
    `workdir/wandb_run.txt`.
    """

    def __init__(self, workdir: Path, config: Mapping[str, Any]):
        import wandb  # pyright: ignore

        path = workdir / WANDB_RUN
        old = path.read_text(encoding='utf-8').strip() if path.exists() else None
        self._run: Any = wandb.init(
            project='policyopt',
            name=workdir.name,
            dir=str(workdir),
            config=dict(config),
            id=old,
            resume='allow' if old else None,
        )
        path.write_text(f'{self._run.id}\n', encoding='utf-8')
        self._held = int(self._run.step)
        for stage in STAGES:
            self._run.define_metric(f'{stage}/*', step_metric=f'{stage}/step')

    def write(self, record: Record) -> None:
        """Log the record, unless the run has it."""
        if record.number >= self._held:
            values = {'step': record.step, **record.values}
            named = {f'{record.stage}/{name}': value for name, value in values.items()}
            self._run.log(named, step=record.number)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


MAKERS: dict[str, Callable[[Path, Mapping[str, Any]], Writer]] = {
    'tensorboard': TensorBoard,
    'wandb': Wandb,
}


class Tail:
    """New whole lines of a JSONL file that grows."""

    def __init__(self, path: Path):
        self._path, self._place = path, 0

    def take(self) -> list[dict[str, Any]]:
        """Records that were not taken yet; the rest of a line may still come."""
        if not self._path.exists():
            return []
        with open(self._path, 'rb') as file:
            file.seek(self._place)
            data = file.read()
        whole = data[: data.rfind(b'\n') + 1]
        self._place += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Follower:
    """Hands the records of a run to writers, as a context manager around the run.

    Enter it when `metrics.jsonl` is cut to what a resumed run goes on from. A writer that fails is
    left out from then on, with a message: the run goes on, and its records are on disk. Raises
    WriterError on entry where one can't begin.

    Args:
      names: of writers; see `check`.
      workdir: of the run.
      config: for tools that show it.
    """

    def __init__(self, names: Sequence[str], workdir: Path, config: Mapping[str, Any]):
        self._names, self._workdir, self._config = names, workdir, config
        self._writers: dict[str, Writer] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._records, self._timings = Tail(workdir / RECORDS), Tail(workdir / TIMINGS)
        self._waiting: list[dict[str, Any]] = []
        self._times: dict[tuple[str, int], dict[str, Any]] = {}
        self._count = 0

    def __enter__(self) -> Follower:
        for name in self._names:
            try:
                self._writers[name] = MAKERS[name](self._workdir, self._config)
            except Exception as error:  # of a foreign package: no account, no connection, ...
                text = ' '.join(str(error).split())
                raise WriterError(
                    f'--writers={name} could not begin: {type(error).__name__}: {text}; without it '
                    'the same command runs, and it can be added to a resumed run'
                ) from error
        if self._names:
            self._waiting = self._records.take()
            self._times = {(r['stage'], r['step']): r for r in self._timings.take()}
            # Times of steps that are about to be done again.
            here = {(r['stage'], r['step']) for r in self._waiting}
            self._times = {key: r for key, r in self._times.items() if key in here}
            self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._names:
            self._end.set()
            self._thread.join()
            self._pull(last=True)
            for name in list(self._writers):
                self._attempt(name, lambda writer: writer.close())

    def _follow(self) -> None:
        while not self._end.wait(SECONDS):
            self._pull()

    def _pull(self, last: bool = False) -> None:
        """Write what is new; an RL step waits for its times, which are written after it."""
        self._waiting += self._records.take()
        self._times |= {(r['stage'], r['step']): r for r in self._timings.take()}
        while self._waiting:
            raw = self._waiting[0]
            times = self._times.get((raw['stage'], raw['step']))
            if raw['stage'] == 'rl' and times is None and len(self._waiting) == 1 and not last:
                return
            self._write(self._waiting.pop(0), times or {})

    def _write(self, raw: Mapping[str, Any], times: Mapping[str, Any]) -> None:
        values = {k: v for k, v in raw.items() if isinstance(v, int | float) and k != 'step'}
        if raw['stage'] == 'rl':
            values |= {
                f'time/{k}': v for k, v in times.items() if k not in ('stage', 'step', 'time')
            }
        moment = times.get('time', time.time())
        record = Record(self._count, raw['stage'], raw['step'], values, moment)
        self._count += 1
        for name in list(self._writers):
            self._attempt(name, lambda writer: writer.write(record))

    def _attempt(self, name: str, act: Callable[[Writer], Any]) -> None:
        try:
            act(self._writers[name])
        except Exception as error:  # of a foreign package, about a copy
            del self._writers[name]
            print(
                f'--writers={name} stopped: {type(error).__name__}: {error}; metrics.jsonl has all '
                'records, and a resumed run begins with them',
                flush=True,
            )
