"""The folder of a run: claimed by one process, and new, resumed, or moved aside."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from policyopt import checkpoint, disk

RECORDS, TIMINGS, SAMPLES, SETTINGS = (
    'metrics.jsonl',
    'timings.jsonl',
    'samples.jsonl',
    'config.json',
)
DASHBOARD, PAGE = 'dashboard.png', 'report.md'
LOCK = 'lock'


class WorkdirError(ValueError):
    """A folder that a run can't have; the message says why, and what to do."""


def claim(workdir: Path) -> IO[str]:
    """Make the folder where there is none, and lock it until the returned file is closed.

    The kernel drops the lock with the process that holds it, so none outlives a killed run.

    Raises WorkdirError for a folder that holds anything but a run, that can't be written to, or
    that another process works in.
    """
    try:
        if workdir.exists() and _contents(workdir) and not (workdir / SETTINGS).is_file():
            raise WorkdirError(
                f'--workdir {workdir} holds files that are no run; name another folder'
            )
        while True:
            workdir.mkdir(parents=True, exist_ok=True)
            file = open(workdir / LOCK, 'a+', encoding='utf-8')  # noqa: SIM115, the lock outlives it
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or 'unknown'
                file.close()
                raise WorkdirError(
                    f'another process (id {owner}) works in --workdir {workdir}; wait for its end, '
                    'or name another folder'
                ) from None
            if _same(workdir / LOCK, file):
                break
            file.close()  # the folder was moved in between: the lock is on the one that is gone
        try:
            file.truncate(0)
            file.write(f'{os.getpid()}\n')
            file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # it tries to write again
                file.close()
            raise
    except OSError as error:
        raise WorkdirError(f'--workdir {workdir} can not be used: {disk.advice(error)}') from error
    return file


def _same(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _contents(workdir: Path) -> list[str]:
    names = [entry.name for entry in workdir.iterdir()]
    return [name for name in names if name != LOCK and not name.startswith(f'.{SETTINGS}.')]


def write_settings(workdir: Path, text: str) -> None:
    """Write the config of the run, whole or not at all."""
    with disk.whole(workdir / SETTINGS) as partial:
        partial.write_text(text, encoding='utf-8')


@contextlib.contextmanager
def explained(workdir: Path) -> Iterator[None]:
    """Within it, errors of the disk become WorkdirError, which says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in disk.FAULTS:
            raise
        where = error.filename or workdir
        raise WorkdirError(f'{where}: {disk.advice(error)}') from error


def unfinished(workdir: Path) -> bool:
    """Whether the folder holds a run with a checkpoint and without its end."""
    folder = workdir / checkpoint.FOLDER
    saved = folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())
    return saved and not _finished(workdir / RECORDS)


def _finished(records: Path) -> bool:
    if not records.is_file():
        return False
    lines = records.read_bytes().splitlines()
    try:
        return json.loads(lines[-1])['stage'] == 'result' if lines else False
    except ValueError:  # the run was killed in the middle of a line
        return False


def move_aside(workdir: Path, lock: IO[str]) -> IO[str]:
    """Move an earlier run to WORKDIR-1, -2, ..., if there is one: an empty folder, and its lock.

    Nothing is ever overwritten.
    """
    if not _contents(workdir):
        return lock
    number = 1
    while (aside := workdir.with_name(f'{workdir.name}-{number}')).exists():
        number += 1
    with lock:  # it goes with the folder
        shutil.move(workdir, aside)
    print(f'{workdir} held an earlier run: moved to {aside}')
    return claim(workdir)


def position(records: Path) -> int:
    """Bytes of the metrics file, which are on disk when this returns."""
    if not records.exists():
        return 0
    with open(records, 'rb') as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def drop_half_line(path: Path) -> None:
    """Cut off the line that a kill or a full disk left half written, if there is one."""
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data.rfind(b'\n') + 1
    if whole < len(data):
        os.truncate(path, whole)


def cut(records: Path, size: int) -> None:
    """Cut the metrics file to what a checkpoint knows of.

    Raises WorkdirError for a file that is shorter.
    """
    found = records.stat().st_size if records.exists() else 0
    if found < size:
        raise WorkdirError(
            f'{records} has {found} bytes, its checkpoint knows of {size}: records are missing. '
            f'Put the file back; or move the newest folders out of {records.parent}/'
            f'{checkpoint.FOLDER}, to go on from one that knows of less; or move all elsewhere to '
            'start over'
        )
    if records.exists():
        os.truncate(records, size)
