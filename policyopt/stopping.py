"""Why a run stops before its end: SIGTERM, and too many updates that came to nothing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from policyopt import hosts


class Unstable(RuntimeError):
    """Too many updates in a row were skipped; the message says where, and what to try."""


class Stop:
    """SIGTERM: ends the process with status 0, at once or where it is convenient.

    Attributes:
      asked: a SIGTERM has come.
    """

    def __init__(self):
        self.asked = False
        self._patient = False

    def listen(self) -> Stop:
        """Take over SIGTERM; in the main thread."""
        signal.signal(signal.SIGTERM, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        del number, frame
        self.asked = True
        if not self._patient:
            self._leave()

    def check(self) -> None:
        """Leave where a SIGTERM has come: what it raised is lost where it hit a finaliser."""
        if self.asked:
            self._leave()

    def agreed(self) -> bool:
        """Whether a SIGTERM has come to any process of the run."""
        self.asked = hosts.any_of(self.asked)
        return self.asked

    def _leave(self) -> None:
        print(
            'SIGTERM: stopped; the same command goes on from a checkpoint, or starts over',
            flush=True,
        )
        raise SystemExit(0)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Within it, a SIGTERM is only noted: whoever opened it looks at `agreed`."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False


def skipped_in_a_row(before: int, skipped: Iterable[bool], limit: int) -> tuple[int, int | None]:
    """Count updates in a row that were skipped.

    Args:
      before: the count so far.
      skipped: of each update of an RL step, in order.
      limit: count at which to stop.

    Returns the new count and the index of the update that reached the limit, or None.
    """
    for index, one in enumerate(skipped):
        before = before + 1 if one else 0
        if before >= limit:
            return before, index
    return before, None
