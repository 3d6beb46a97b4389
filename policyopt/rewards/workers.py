"""Judging in processes that may be killed: a reward that hangs, crashes or eats costs its row."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pickle
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from policyopt.rewards import nursery
from policyopt.rewards.spec import Spec
from policyopt.rewards.verdict import (
    CRASHED,
    OUT_OF_MEMORY,
    RAISED,
    TIMED_OUT,
    Case,
    Verdict,
    fault,
    from_json,
)

START_LIMIT = 120.0  # seconds until a reward is loaded
CHUNK, QUICK = 16, 0.01  # cases sent to a worker at once, at most, and seconds that they take
_LINE = 1 << 16  # bytes of a verdict, at most
_FAILURES = 5  # starts in a row that may fail, beside one for each worker
# One thread a process, no device, and the same order of sets each time.
_ENVIRONMENT = dict.fromkeys(('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'), '1')
_ENVIRONMENT |= {'JAX_PLATFORMS': 'cpu', 'PYTHONHASHSEED': '0'}


class JudgeError(RuntimeError):
    """Answers can't be judged at all; the message says why."""


class Workers:
    """A judge whose reward runs in processes of its own, each row under a deadline.

    They start at the first `submit`, or at `start`, stay warm until `close`, and end with the
    process that has them, however it ends. A row whose reward is late, crashes its process or runs
    out of memory has no reward, for that reason; its worker is killed and replaced, and the others
    of the worker's rows are judged as if nothing had been. A crash, or a lack of memory, that
    befalls a worker which had judged other rows may be theirs: such a row is judged once more, in a
    fresh one.

    Args:
      spec: the reward; see `Spec`.
      workers: processes.
      deadline: seconds a row may take, by the clock.
      memory: GiB of address space a worker may have.
    """

    together = False

    def __init__(self, spec: Spec, workers: int = 2, deadline: float = 5.0, memory: float = 4.0):
        self._arguments = (spec, workers, deadline, int(memory * 2**30))
        self._lock = threading.Lock()
        self._dispatcher: _Dispatcher | None = None

    def start(self) -> None:
        """Start the processes, if they do not run; does not wait for them."""
        with self._lock:
            if self._dispatcher is None:
                self._dispatcher = _Dispatcher(*self._arguments)

    def submit(self, cases: Sequence[Case]) -> list[Future[Verdict]]:
        """Judge each case as soon as a worker is free; a JudgeError where none can be had."""
        self.start()
        assert self._dispatcher is not None
        return self._dispatcher.submit(cases)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """End the processes; cases that were not judged raise JudgeError."""
        with self._lock:
            if self._dispatcher is not None:
                self._dispatcher.close()
                self._dispatcher = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@dataclasses.dataclass(eq=False)
class _Job:
    data: bytes
    future: Future[Verdict]
    again: bool = False  # it has cost a worker, which other rows may be to blame for


@dataclasses.dataclass(eq=False)
class _Worker:
    """A process, as seen from here: `jobs` are with it, the first of them being judged."""

    channel: socket.socket
    since: float  # when it got the first of its jobs, or was asked for
    pid: int | None = None  # once it is ready
    jobs: collections.deque[_Job] = dataclasses.field(default_factory=collections.deque)
    judged: int = 0
    read: bytearray = dataclasses.field(default_factory=bytearray)


class _Dispatcher:
    """Hands cases to workers and watches the clock, in a thread of its own."""

    def __init__(self, spec: Spec, workers: int, deadline: float, memory: int):
        self._spec, self._count, self._deadline, self._memory = spec, workers, deadline, memory
        self._inbox: queue.SimpleQueue[list[_Job]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._lock = threading.Lock()
        self._closing = False
        self._over: str | None = None
        self._waiting: collections.deque[_Job] = collections.deque()
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._nursery: _Nursery | None = None
        self._failures = 0
        self._pace = QUICK  # seconds a row takes, lately
        self._thread = threading.Thread(target=self._run, name='judge', daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------- from other threads

    def submit(self, cases: Sequence[Case]) -> list[Future[Verdict]]:
        jobs = []
        for case in cases:
            future: Future[Verdict] = Future()
            try:
                jobs.append(_Job(pickle.dumps(tuple(case[:3])), future))
            except Exception as error:
                future.set_result(fault(RAISED, f'its example can not be sent: {error!r}'))
                jobs.append(_Job(b'', future))
        with self._lock:
            if self._over is not None:
                raise JudgeError(self._over)
            self._inbox.put([job for job in jobs if job.data])
        self._notify()
        return [job.future for job in jobs]

    def close(self) -> None:
        self._closing = True
        self._notify()
        self._thread.join(timeout=10)

    def _notify(self) -> None:
        with contextlib.suppress(OSError):  # full of notes that were not read yet, or closed
            self._wake.send(b'.')

    # -------------------------------------------------------------------- the thread

    def _run(self) -> None:
        why = 'the judge was closed'
        try:
            self._selector.register(self._woken, selectors.EVENT_READ, None)
            while not self._closing:
                self._keep()
                for key, _ in self._selector.select(self._patience()):
                    self._look(key.data)
                self._late()
        except JudgeError as error:
            why = str(error)
        except BaseException as error:  # a fault of this file must not leave anyone waiting
            why = f'the judge failed: {type(error).__name__}: {error}'
        finally:
            self._finish(why)

    def _finish(self, why: str) -> None:
        with self._lock:
            self._over = why
        self._take_inbox()
        left = [job for worker in self._workers for job in worker.jobs] + list(self._waiting)
        for worker in list(self._workers):
            self._forget(worker)
        if self._nursery is not None:
            self._nursery.close()
        for job in left:
            job.future.set_exception(JudgeError(why))
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _take_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.extend(self._inbox.get_nowait())

    def _keep(self) -> None:
        """Have a nursery and as many workers as asked for, and give work to the idle."""
        if self._nursery is None:
            self._nursery = _Nursery(self._spec, self._memory)
            self._selector.register(self._nursery.control, selectors.EVENT_READ, self._nursery)
        while self._nursery.ready and len(self._workers) < self._count:
            channel = self._nursery.fork()
            worker = _Worker(channel, time.monotonic())
            self._workers.append(worker)
            self._selector.register(channel, selectors.EVENT_READ, worker)
        for worker in list(self._workers):
            if self._waiting and worker.pid is not None and not worker.jobs:
                self._give(worker)

    def _give(self, worker: _Worker) -> None:
        if self._waiting[0].again and worker.judged:
            self._forget(worker)  # such a row is for a fresh one
            return
        # Rows behind one that hangs have to wait, so few are sent where they take long.
        share = min(CHUNK, int(QUICK / self._pace), len(self._waiting) // (2 * self._count)) or 1
        while self._waiting and len(worker.jobs) < share:
            if self._waiting[0].again and worker.jobs:
                break
            worker.jobs.append(self._waiting.popleft())
        try:
            worker.channel.settimeout(self._deadline)  # it is reading, unless it is gone
            nursery.send(worker.channel, pickle.dumps([job.data for job in worker.jobs]))
            worker.since = time.monotonic()
        except OSError:
            self._lost(worker, CRASHED)

    def _patience(self) -> float | None:
        limits = [self._limit(worker) for worker in self._workers]
        if self._nursery is not None and not self._nursery.ready:
            limits.append(self._nursery.since + START_LIMIT)
        soonest = min(limits, default=float('inf'))
        return None if soonest == float('inf') else max(soonest - time.monotonic(), 0)

    def _limit(self, worker: _Worker) -> float:
        """When the worker is late."""
        if worker.pid is None:
            return worker.since + START_LIMIT
        return worker.since + self._deadline if worker.jobs else float('inf')

    def _look(self, source: _Worker | _Nursery | None) -> None:
        if source is None:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            self._take_inbox()
        elif isinstance(source, _Worker):
            if source in self._workers:
                self._read(source)
        elif source is self._nursery and not source.hear():
            self._selector.unregister(source.control)
            source.close()
            self._nursery = None
            self._failed('the process that starts them ended')
            for worker in list(self._workers):
                self._lost(worker, CRASHED)

    def _read(self, worker: _Worker) -> None:
        try:
            worker.channel.setblocking(False)
            data = worker.channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b''
        worker.read += data
        *lines, rest = bytes(worker.read).split(b'\n')
        worker.read = bytearray(rest)
        sound = bool(data) and len(rest) < _LINE
        try:
            for line in lines:
                if not self._hear(worker, json.loads(line)):
                    return
        except (ValueError, TypeError, RecursionError):
            sound = False  # whatever it is, it is no verdict
        if not sound:
            self._lost(worker, CRASHED)

    def _hear(self, worker: _Worker, values: Any) -> bool:
        """Take a line of a worker; returns whether it is still there."""
        if worker.pid is None:
            worker.pid, self._failures = int(values), 0
            return True
        verdict = from_json(values)
        if not worker.jobs:
            raise ValueError('a verdict on nothing')
        if verdict.kind == OUT_OF_MEMORY:
            self._lost(worker, OUT_OF_MEMORY)
            return False
        worker.jobs.popleft().future.set_result(verdict)
        worker.judged += 1
        now = time.monotonic()
        self._pace += 0.1 * (max(now - worker.since, 1e-5) - self._pace)
        worker.since = now
        return True

    def _late(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if now >= self._limit(worker):
                self._read(worker)  # what it has said by now counts
                if worker in self._workers and now >= self._limit(worker):
                    self._lost(worker, TIMED_OUT)
        if self._nursery is not None and self._nursery.late(now):
            raise JudgeError(f'the reward was not loaded within {START_LIMIT:g} s')

    def _lost(self, worker: _Worker, kind: str) -> None:
        """Kill a worker; the row it was at is judged so, the others go to the next one."""
        if worker.pid is None:
            self._failed('they ended before they began')
        elif worker.jobs:
            job = worker.jobs.popleft()
            if kind != TIMED_OUT and worker.judged and not job.again:
                job.again = True
                worker.jobs.appendleft(job)
            else:
                detail = f'after {self._deadline:g} s' if kind == TIMED_OUT else ''
                job.future.set_result(fault(kind, detail))
        self._waiting.extendleft(reversed(worker.jobs))
        worker.jobs.clear()
        self._forget(worker)

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures > _FAILURES + self._count:
            raise JudgeError(f'processes that judge answers can not be started: {why}')

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.channel.close()
        if worker.pid is not None:
            if self._nursery is not None:
                self._nursery.end(worker.pid)
            else:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)


class _Nursery:
    """The process that forks workers; see `nursery`."""

    def __init__(self, spec: Spec, memory: int):
        self.since, self.ready, self._heard = time.monotonic(), False, b''
        self.control, other = socket.socketpair()
        request = {'path': sys.path, 'reward': tuple(spec), 'memory': memory}
        try:
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, '-P', str(Path(nursery.__file__)), str(other.fileno())],
                    pass_fds=[other.fileno()],
                    env=os.environ | _ENVIRONMENT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the run to handle
                )
            nursery.send(self.control, pickle.dumps(request))
        except OSError as error:
            raise JudgeError(f'processes that judge answers can not be started: {error}') from error

    def late(self, now: float) -> bool:
        """Whether it should be ready by now."""
        return not self.ready and now >= self.since + START_LIMIT

    def hear(self) -> bool:
        """Read what it says, which makes it ready; returns whether it is there."""
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b''
        self._heard += data
        if b'\n' in self._heard and not self.ready:
            said = json.loads(self._heard.split(b'\n')[0])
            if 'error' in said:
                raise JudgeError(f'the reward could not be loaded: {said["error"]}')
            self.ready = True
        return bool(data)

    def fork(self) -> socket.socket:
        """Have a worker made; returns the socket that leads to it."""
        mine, its = socket.socketpair()
        with its, contextlib.suppress(OSError):  # gone: its end is heard of by `hear`
            socket.send_fds(self.control, [nursery.FORK], [its.fileno()])
        return mine

    def end(self, pid: int) -> None:
        """Have a worker killed."""
        with contextlib.suppress(OSError):
            self.control.sendall(nursery.END + nursery.SIZE.pack(pid))

    def close(self) -> None:
        """End it with all its workers."""
        self.control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
