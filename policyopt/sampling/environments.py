"""Turns of a row with something outside the model: a protocol, its faults, a pool with time limits.

An environment speaks token ids. What a turn drew reaches it as it was drawn, and what it answers is
appended as it stands: nothing is decoded to text and encoded again on the way.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import queue
import reprlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from policyopt.sampling.config import Finish


class Reply(NamedTuple):
    """What an environment says to a turn.

    Attributes:
      tokens: observation ids to append to the row; may be empty. Not read where done.
      done: the row ends here.
      reward: of this turn; NaN where there is none.
    """

    tokens: Sequence[int] = ()
    done: bool = False
    reward: float = math.nan


class Environment(Protocol):
    """The world of one row; one object a row, whose methods run off the main thread."""

    def reset(self) -> Sequence[int]:
        """Prompt ids; not called where the prompt is given."""
        ...

    def step(self, tokens: Sequence[int]) -> Reply:
        """Answer a turn: the ids it drew, its end of sequence or stop id included.

        A turn that the row's limit cuts off is not shown.
        """
        ...


class Turn(NamedTuple):
    """One turn of a row, and what its environment did.

    Attributes:
      tokens: ids that the policy drew.
      observation: ids that the environment answered.
      reward: of the turn; NaN where there is none.
      finish: why the row ended with this turn; `Finish.RUNNING` where it went on.
      error: what was wrong with the environment, None if nothing.
      seconds: that the call took.
      asked: whether the environment was shown the turn: not where the row's limit cut it off.
    """

    tokens: tuple[int, ...]
    observation: tuple[int, ...] = ()
    reward: float = math.nan
    finish: int = Finish.RUNNING
    error: str | None = None
    seconds: float = 0.0
    asked: bool = False


class Fault(Exception):
    """What an environment did wrong; `finish` says of which kind it is."""

    def __init__(self, finish: Finish, text: str):
        self.finish = finish
        super().__init__(text)


class Outcome(NamedTuple):
    """A call that ended: its tag, what it returned, what went wrong (or None), how long it took."""

    tag: Any
    value: Any
    fault: Fault | None
    seconds: float


@dataclasses.dataclass(eq=False)
class _Call:
    tag: Any
    run: Callable[[], Any]
    start: float = math.inf
    over: bool = False


class Pool:
    """Runs calls in parallel threads, each within a time limit.

    A thread cannot be stopped. A call that is late is reported as failed, its thread is left to
    itself (a daemon, so that it does not keep the process alive), and its place is free again.
    """

    def __init__(self, workers: int, time_limit: float):
        if workers < 1:
            raise ValueError(f'workers is {workers}; legal is 1 or more')
        if not time_limit > 0:
            raise ValueError(f'time_limit is {time_limit}; legal is seconds above 0')
        self._workers, self._time_limit = workers, time_limit
        self._waiting: collections.deque[_Call] = collections.deque()
        self._running: list[_Call] = []
        self._done: queue.SimpleQueue = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def call(self, tag: Any, run: Callable[[], Any]) -> None:
        """Run `run()` as soon as a worker is free; its outcome carries the tag."""
        self._waiting.append(_Call(tag, run))
        self._start()

    def collect(self, wait: float = 0.0) -> list[Outcome]:
        """Outcomes so far; where there is none, waits so many seconds at most for one."""
        found: list[Outcome] = []
        end = time.monotonic() + wait
        while True:
            self._start()
            left = 0.0 if found or not self._running else min(end, self._soonest())
            left = max(left - time.monotonic(), 0.0)
            try:
                call, value, fault, seconds = (
                    self._done.get(timeout=left) if left else self._done.get_nowait()
                )
            except queue.Empty:
                found += self._late()
                if found or not self._running or time.monotonic() >= end:
                    return found
                continue
            if not call.over:
                call.over = True
                self._running.remove(call)
                found.append(Outcome(call.tag, value, fault, seconds))

    def _soonest(self) -> float:
        return min(call.start for call in self._running) + self._time_limit

    def _late(self) -> list[Outcome]:
        now = time.monotonic()
        late = [call for call in self._running if call.start + self._time_limit <= now]
        for call in late:
            call.over = True
            self._running.remove(call)
        self._start()
        text = f'environment took longer than {self._time_limit:g} s'
        fault = Fault(Finish.ENV_LATE, text)
        return [Outcome(call.tag, None, fault, now - call.start) for call in late]

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._workers:
            call = self._waiting.popleft()
            call.start = time.monotonic()
            self._running.append(call)
            threading.Thread(target=self._work, args=(call,), daemon=True).start()

    def _work(self, call: _Call) -> None:
        began = time.monotonic()
        try:
            value, fault = call.run(), None
        except Fault as error:
            value, fault = None, error
        except BaseException as error:  # whatever it raises ends its own row only
            text = f'environment raised {type(error).__name__}: {error}'
            value, fault = None, Fault(Finish.ENV_FAILED, text[:LONGEST])
        self._done.put((call, value, fault, time.monotonic() - began))


LONGEST = 200  # characters of what is said of a fault


def checked_reply(value: Any, vocab_size: int, limit: int) -> Reply:
    """What an environment answered, with plain numbers; Fault where it is no Reply, or too long.

    Args:
      value: as returned.
      vocab_size: ids are below it.
      limit: tokens of an observation.
    """
    if not isinstance(value, Reply):
        raise _nonsense(f'returned {type(value).__name__}; legal is a Reply')
    if not isinstance(value.done, bool | np.bool_):
        raise _nonsense(f'gave done {reprlib.repr(value.done)}; legal is True or False')
    reward = value.reward
    try:
        number = isinstance(reward, int | float | np.number) and not math.isinf(float(reward))
    except OverflowError:
        number = False
    if not number:
        raise _nonsense(f'gave reward {reprlib.repr(reward)}; legal is a number, NaN for none')
    ids = () if value.done else checked_ids(value.tokens, vocab_size, limit)
    return Reply(ids, bool(value.done), float(reward))


def checked_ids(value: Any, vocab_size: int, limit: int | None = None) -> tuple[int, ...]:
    """Token ids that an environment gave; Fault where they are none, or more than `limit`."""
    try:
        if limit is not None and len(value) > limit:
            text = f'environment gave {len(value)} tokens; legal is up to {limit}'
            raise Fault(Finish.ENV_OVERFLOW, text)
        ids = np.asarray(value)
    except (TypeError, ValueError):
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise _nonsense(f'gave {reprlib.repr(value)}; legal are token ids')
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise _nonsense(f'gave a token outside 0 to {vocab_size - 1}')
    return tuple(int(i) for i in ids)


def _nonsense(text: str) -> Fault:
    return Fault(Finish.ENV_FAILED, f'environment {text}')
