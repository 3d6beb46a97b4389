"""Judges: what runs a reward on answers as they come, and returns verdicts in their order."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from policyopt import checks
from policyopt.rewards.ledger import Page, digest
from policyopt.rewards.spec import Spec, build
from policyopt.rewards.verdict import FAULTS, Case, Reward, Verdict, judged
from policyopt.rewards.workers import Workers


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """Where rewards are computed.

    Attributes:
      workers: processes that judge, beside the one that trains. 0 judges in a thread of that one:
        no process to start, but a reward that hangs there hangs the run, and one that crashes ends
        it. For pure, quick scorers.
      deadline: seconds a row may take, by the clock; it then has no reward, and counts as
        `rewards/timed_out`. Without effect, and not legal, for 0 workers, like `memory`.
      memory: GiB of address space of each worker; a row that takes more has no reward.
      batch: rows that a reward model scores at once; without effect where there is none.
    """

    workers: int = 2
    deadline: float = 5.0
    memory: float = 4.0
    batch: int = 32

    def __post_init__(self):
        checks.number('judge.workers', self.workers, 0)
        checks.number('judge.deadline', self.deadline, 0.01)
        checks.number('judge.memory', self.memory, 0.25)
        checks.number('judge.batch', self.batch, 1)
        for name in ('deadline', 'memory'):
            value, default = getattr(self, name), JudgeConfig.__dataclass_fields__[name].default
            if not self.workers and value != default:
                raise ValueError(
                    f'judge.{name} is {value}, but judge.workers is 0: rewards in the process that '
                    'trains have no limit; leave it out, or ask for workers'
                )


class Judge(Protocol):
    """Judges answers beside what its caller does; a context manager that frees what it holds.

    Attributes:
      together: whether it runs programs over all devices, so that each of several processes has to
        give it all rows, in the same order.
    """

    together: bool

    def start(self) -> None:
        """Get ready; does not wait."""
        ...

    def submit(self, cases: Sequence[Case]) -> list[Future[Verdict]]:
        """Verdicts on the cases, one each, as they will be."""
        ...

    def flush(self) -> None:
        """Begin with what was submitted and is held back, as for a batch that is not full."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class Local:
    """A judge in a thread of this process: rows one after another, in order, without a deadline.

    A reward that raises or gives nonsense costs its row only; one that hangs hangs its caller.
    """

    together = False

    def __init__(self, reward: Reward):
        self._reward = reward
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Have a thread."""
        self._pool = self._pool or concurrent.futures.ThreadPoolExecutor(1, 'judge')

    def submit(self, cases: Sequence[Case]) -> list[Future[Verdict]]:
        """Judge the cases after those before."""
        self.start()
        assert self._pool is not None
        return [self._pool.submit(judged, self._reward, case) for case in cases]

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Let the thread end."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def make_judge(spec: Spec, config: JudgeConfig) -> Judge:
    """The judge that a config asks for; starts nothing."""
    if not config.workers:
        return Local(build(spec))
    return Workers(spec, config.workers, config.deadline, config.memory)


NOT_SAMPLED = Verdict(math.nan, 'not_sampled')


class Round:
    """Answers that are judged while others are drawn: `add` them as they end, then `verdicts`.

    Of several processes each judges rows of its own, or all of them by a judge that works with the
    others' (`Judge.together`); all have the same verdicts on all rows.

    Args:
      judge: of the run.
      page: where verdicts are written down before they are given out, and found again; None for
        nowhere.
      number: of this round on the page.
    """

    def __init__(self, judge: Judge, page: Page | None = None, number: int = 0):
        self._judge, self._page, self._number = judge, page, number
        self._digests: dict[int, int] = {}
        self._found: dict[int, Verdict | Future[Verdict]] = {}
        self._heard: dict[int, list[Any]] = {}

    def heard(self, row: int) -> list[Any]:
        """What the environment of a row said when this was done before, as `hear` was given it."""
        return self._page.heard((self._number, row)) if self._page else []

    def hear(self, row: int, said: Sequence[Any]) -> None:
        """Have what an environment said (JSON) written down with the verdicts."""
        if list(said) != self.heard(row):
            self._heard[row] = list(said)

    def add(self, rows: Sequence[int], cases: Sequence[Case]) -> None:
        """Have answers judged, unless their verdicts are known; `rows` are their numbers."""
        from policyopt import hosts  # with jax, which processes that judge do without

        new = []
        for i, case in zip(rows, cases, strict=True):
            if not (self._judge.together or hosts.own(i)):
                continue
            known = self._page and self._page.find((self._number, i), case)
            if known:
                self._found[i] = known
                continue
            new.append((i, case))
        futures = self._judge.submit([case for _, case in new]) if new else []
        for (i, case), future in zip(new, futures, strict=True):
            self._found[i], self._digests[i] = future, digest(case)

    def verdicts(self, rows: int) -> list[Verdict]:
        """Verdicts on rows 0 to rows - 1, waited for; a row that was not added has no reward."""
        from policyopt import hosts  # with jax, which processes that judge do without

        self._judge.flush()
        given = {i: v.result() if isinstance(v, Future) else v for i, v in self._found.items()}
        parts = hosts.exchange((given, self._digests))
        given = {i: verdict for found, _ in parts for i, verdict in found.items()}
        digests = {i: crc for _, found in parts for i, crc in found.items()}
        if self._page is not None:
            new = {(self._number, i): (crc, given[i]) for i, crc in digests.items()}
            heard = {(self._number, i): said for i, said in self._heard.items()}
            self._page.write(dict(sorted(new.items())), heard)
        return [given.get(i, NOT_SAMPLED) for i in range(rows)]


class Remarks:
    """Says of each kind of fault once, on stderr, what it was; metrics count them all."""

    def __init__(self):
        self._said: set[str] = set()

    def __call__(self, verdicts: Sequence[Verdict]) -> None:
        """Look at the verdicts of a round."""
        counts = collections.Counter(v.kind for v in verdicts)
        for verdict in verdicts:
            kind = verdict.kind
            if kind in FAULTS and kind not in self._said:
                self._said.add(kind)
                print(
                    f'{counts[kind]} of {len(verdicts)} answers have no reward ({verdict.reason}); '
                    f'metric rewards/{kind} goes on counting',
                    file=sys.stderr,
                    flush=True,
                )
