"""Turns of a row with something outside the model: a protocol, a pool with time limits, an example.

An environment speaks token ids. What a turn drew reaches it as it was drawn, and what it answers is
appended as it stands: nothing is decoded to text and encoded again on the way.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


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
        """Prompt ids."""
        ...

    def step(self, tokens: Sequence[int]) -> Reply:
        """Answer a turn: the ids it drew, its end of sequence or stop id included.

        A turn that the row's limit cuts off is not shown.
        """
        ...


class Outcome(NamedTuple):
    """A call that ended: its tag, what it returned, and what went wrong, None if nothing."""

    tag: Any
    value: Any
    error: str | None


@dataclasses.dataclass(eq=False)
class _Call:
    tag: Any
    run: Callable[[], Any]
    deadline: float = math.inf
    over: bool = False


class Pool:
    """Runs calls in parallel threads, each within a time limit.

    A thread cannot be stopped. A call that is late is reported as failed, its thread is left to
    itself (a daemon, so that it does not keep the process alive), and its place is free again.

    Attributes:
      failures: calls that raised.
      timeouts: calls that were late.
    """

    def __init__(self, workers: int, time_limit: float):
        if workers < 1:
            raise ValueError(f'workers is {workers}; legal is 1 or more')
        if not time_limit > 0:
            raise ValueError(f'time_limit is {time_limit}; legal is seconds above 0')
        self.failures = self.timeouts = 0
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

    def collect(self, wait: bool) -> list[Outcome]:
        """Outcomes so far; with `wait`, and calls under way, at least one."""
        found: list[Outcome] = []
        while True:
            self._start()
            timeout = self._patience() if wait and not found and self._running else 0
            try:
                call, value, error = (
                    self._done.get(timeout=timeout) if timeout else (self._done.get_nowait())
                )
            except queue.Empty:
                found += self._late()
                if found or not wait or not self._running:
                    return found
                continue
            if not call.over:
                call.over = True
                self._running.remove(call)
                self.failures += error is not None
                found.append(Outcome(call.tag, value, error))

    def _patience(self) -> float:
        return max(min(c.deadline for c in self._running) - time.monotonic(), 1e-3)

    def _late(self) -> list[Outcome]:
        now = time.monotonic()
        late = [call for call in self._running if call.deadline <= now]
        for call in late:
            call.over = True
            self._running.remove(call)
        self.timeouts += len(late)
        self._start()
        text = f'environment took longer than {self._time_limit:g} s'
        return [Outcome(call.tag, None, text) for call in late]

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._workers:
            call = self._waiting.popleft()
            call.deadline = time.monotonic() + self._time_limit
            self._running.append(call)
            threading.Thread(target=self._work, args=(call,), daemon=True).start()

    def _work(self, call: _Call) -> None:
        try:
            value, error = call.run(), None
        except BaseException as problem:  # whatever it raises ends its own row only
            value, error = None, f'environment raised {type(problem).__name__}: {problem}'
        self._done.put((call, value, error))


@dataclasses.dataclass
class Calculator:
    """A question with a calculator at hand, over any tokenizer with encode and decode.

    A turn that ends in `=` asks the tool: the expression before it, of integers with + - and *, is
    replaced by nothing and answered by its value. Any other turn is the answer: reward 1 where the
    number it ends with is right, else 0, and the row is done. Sample with the id of `=` among
    `stop_ids`.

    Attributes:
      tokenizer: text to ids and back.
      question: text of the prompt.
      answer: the right number.
      turns: calls of the tool that are answered; the next one ends the row with reward 0.
    """

    tokenizer: Any
    question: str
    answer: int
    turns: int = 4

    def reset(self) -> Sequence[int]:
        """Ids of the question."""
        return self.tokenizer.encode(self.question)

    def step(self, tokens: Sequence[int]) -> Reply:
        """A value for an expression, a reward for an answer."""
        text = self.tokenizer.decode(tokens)
        if not text.endswith('='):
            found = re.search(r'-?\d+$', text)
            return Reply(done=True, reward=float(bool(found) and int(found[0]) == self.answer))
        self.turns -= 1
        if self.turns < 0:
            return Reply(done=True, reward=0.0)
        value = evaluate(text[:-1])
        return Reply(self.tokenizer.encode('' if value is None else str(value)))


def evaluate(text: str) -> int | None:
    """Value of the expression of integers, + - and * that text ends with; None without one."""
    found = re.search(r'-?\d+(?:[-+*]\d+)*$', text)
    if not found:
        return None
    total = 0
    for term in re.findall(r'[-+]?\d+(?:\*\d+)*', found[0]):
        total += math.prod(int(factor) for factor in term.split('*'))
    return total
