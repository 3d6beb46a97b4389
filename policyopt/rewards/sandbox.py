"""Where code that a model wrote is run: what a sandbox does, its limits, and what goes wrong in it.

A sandbox runs code and hands out what it returns or prints, as plain data. Judging that is for the
process outside: no sandbox ever holds the expected results together with the code under test, so
there is nothing that such code could forge or read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from policyopt import checks

# What is wrong with code; kinds of reasons.
CODE_RAISED, CODE_TIMED_OUT, CODE_MEMORY = 'code_raised', 'code_timed_out', 'code_memory'
CODE_CRASHED, CODE_OUTPUT, UNSUPPORTED = 'code_crashed', 'code_output', 'unsupported'


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing of the code."""


class CodeError(Exception):
    """The code failed: `kind`, a word, and `detail`.

    `error` is what it raised, as (name of the type, message), where its process goes on.
    """

    def __init__(self, kind: str, detail: str = '', error: tuple[str, str] | None = None):
        super().__init__(f'{kind}: {detail}' if detail else kind)
        self.kind, self.detail, self.error = kind, detail, error


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one answer may take, all its tests together.

    Attributes:
      timeout: seconds by the clock.
      memory: MiB, of the heap or of each process.
      output: KiB that a test may print or return.
    """

    timeout: float = 3.0
    memory: int = 256
    output: int = 256

    def __post_init__(self):
        checks.number('timeout', self.timeout, 0.05)
        checks.number('memory', self.memory, 32)
        checks.number('output', self.output, 1)


class Clock:
    """Time of an answer: seconds by the clock, from now on, but for those that start a sandbox."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left; CodeError where there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise CodeError(CODE_TIMED_OUT)
        return left

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile costs no time."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._end += time.monotonic() - begun


# (args, kwargs) -> what the function returned; raises CodeError.
Call = Callable[[Sequence[Any], Mapping[str, Any]], Any]


class Sandbox(Protocol):
    """Runs code apart from everything; raises CodeError, or SandboxError where it can't."""

    def program(
        self, source: str, function: str, clock: Clock
    ) -> contextlib.AbstractContextManager[Call]:
        """Run the code, then its function on each call; what it prints goes nowhere."""
        ...

    def script(self, source: str, stdin: str, clock: Clock) -> str:
        """Run the code as a program by itself, on that input; returns what it printed."""
        ...

    def check(self, source: str, call: Call, clock: Clock) -> bool:
        """Run a dataset's own check, in which `candidate` is `call`; whether it raised nothing."""
        ...


SANDBOXES = ('monty', 'bwrap')


def make(name: str, limits: Limits) -> Sandbox:
    """The sandbox of that name: `monty` or `bwrap`; raises ValueError where it can't work here."""
    checks.one_of('sandbox', name, SANDBOXES)
    if name == 'monty':
        from policyopt.rewards.monty import MontySandbox

        return MontySandbox(limits)
    from policyopt.rewards.bubblewrap import Bubblewrap

    return Bubblewrap(limits)
