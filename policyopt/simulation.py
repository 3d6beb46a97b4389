"""What a schedule of generation and training makes of lengths: time, idle slots, ages; no model.

The unit of time is a decode step of an engine. Takes, calls, slots and the bound on staleness are
those of `policyopt.stream` and `policyopt.sampling.engine`, count by count (with refill 1 and
without min_slots), so that its numbers are those of the real thing for the lengths it had.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule.

    Attributes:
      prompts, group_size: groups of a take, and rows of a group.
      slots: of each generator.
      generators: engines.
      steps: decode steps of a call, at most.
      staleness, late, ahead: as in `asynchronous.AsyncConfig`; a take is a version.
      recompute: rows under way are put into their slots anew at each version, which draws a token
        of each beside the decode steps.
      apart: generators and trainer have devices of their own.
      update: decode steps that an update takes.
    """

    prompts: int
    group_size: int
    slots: int
    generators: int = 1
    steps: int = 16
    staleness: int = 0
    late: str = 'wait'
    ahead: int = 0
    recompute: bool = True
    apart: bool = False
    update: float = 0.0


class Outcome(NamedTuple):
    """What came of a plan.

    Attributes:
      time: decode steps that all takes and updates took.
      slots: decode slots of all generators while one of them decoded.
      tokens: drawn in them.
      training: decode steps that updates took.
      ages: [staleness + 1] tokens learned from, by age in versions.
      groups: numbers of the groups of each take.
      dropped: groups given up.
      generators: of the plan, all of them at once.
      apart: of the plan.
    """

    time: float
    slots: int
    tokens: int
    training: float
    ages: np.ndarray
    groups: list[list[int]]
    dropped: int
    generators: int
    apart: bool

    @property
    def slot_idle(self) -> float:
        """Share of decode slots without a token: metric `async/idle`."""
        return 1 - self.tokens / max(self.slots, 1)

    @property
    def generator_idle(self) -> float:
        """Share of the generators' slots and time in which they neither draw nor train."""
        whole = self.generators * self.time
        used = self.tokens + (0 if self.apart else self.generators * self.training)
        return max(1 - used / max(whole, 1e-9), 0.0)

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer's own devices wait; 0 where it has none."""
        return 1 - self.training / max(self.time, 1e-9) if self.apart else 0.0


@dataclasses.dataclass(eq=False)
class _Row:
    group: _Group
    left: int
    drawn: dict[int, int] = dataclasses.field(default_factory=dict)  # version -> tokens

    def draw(self, count: int, version: int) -> None:
        self.left -= count
        self.drawn[version] = self.drawn.get(version, 0) + count
        self.group.running -= self.left == 0


@dataclasses.dataclass(eq=False)
class _Group:
    number: int
    version: int
    rows: list[_Row] = dataclasses.field(default_factory=list)
    running: int = 0
    begun: bool = False


class _Engine:
    """Slots and a queue."""

    def __init__(self, slots: int):
        self.slots = slots
        self.active: list[_Row] = []
        self.waiting: collections.deque[_Row] = collections.deque()

    @property
    def load(self) -> int:
        """Rows that have not ended."""
        return len(self.active) + len(self.waiting)

    def call(self, steps: int, version: int, even: bool) -> tuple[int, int]:
        """Fill free slots, then decode; returns decode steps and tokens drawn in them."""
        while self.waiting and len(self.active) < self.slots:
            row = self.waiting.popleft()
            row.draw(1, version)
            if row.left:
                self.active.append(row)
        if not self.active:
            return 0, 0
        patience = 1 if self.waiting and not even else len(self.active)
        lengths = [row.left for row in self.active]
        took = min(steps, heapq.nsmallest(patience, lengths)[-1])
        tokens = 0
        for row in self.active:
            count = min(row.left, took)
            row.draw(count, version)
            tokens += count
        self.active = [row for row in self.active if row.left]
        return took, tokens

    def restart(self, order: Callable[[_Row], int]) -> None:
        """Put all rows back into the queue, in the order in which they came."""
        self.waiting = collections.deque(sorted([*self.active, *self.waiting], key=order))
        self.active = []

    def drop(self, gone: set[_Group]) -> None:
        """Forget the rows of these groups."""
        self.active = [row for row in self.active if row.group not in gone]
        self.waiting = collections.deque(row for row in self.waiting if row.group not in gone)


class _Run:
    """A plan under way."""

    def __init__(self, plan: Plan, lengths: Callable[[int], Sequence[int]]):
        self.plan, self._lengths = plan, lengths
        self.engines = [_Engine(plan.slots) for _ in range(plan.generators)]
        self.open: list[_Group] = []
        self.next = self.slots = self.tokens = self.dropped = self.version = 0

    def ask(self) -> None:
        plan = self.plan
        while len(self.open) <= plan.staleness * plan.prompts:
            for _ in range(plan.prompts):
                group = _Group(self.next, self.version)
                group.rows = [_Row(group, max(int(n), 1)) for n in self._lengths(self.next)]
                group.running = len(group.rows)
                self.open.append(group)
                self.next += 1

    def advance(self) -> int:
        """One call of each engine; returns the decode steps of the slowest."""
        even = len(self.engines) > 1 or self.plan.ahead > 0
        room = self.plan.slots + (0 if even else 1)
        for group in self.open:
            if group.begun:
                continue
            engine = min(self.engines, key=lambda one: one.load)
            if engine.load >= room:
                break
            group.begun = True
            engine.waiting.extend(group.rows)
        spent = [engine.call(self.plan.steps, self.version, even) for engine in self.engines]
        longest = max(took for took, _ in spent)
        self.slots += longest * self.plan.slots * len(self.engines)
        self.tokens += sum(tokens for _, tokens in spent)
        return longest

    def ready(self) -> list[_Group]:
        """As `Stream._ready`."""
        plan = self.plan
        whole = [group for group in self.open if not group.running][: plan.prompts]
        if len(whole) < plan.prompts:
            return []
        if plan.late == 'wait':
            chosen = set(whole)
            left = [g.version + plan.staleness - self.version for g in self.open if g not in chosen]
            for ahead in range(plan.staleness):
                if sum(due <= ahead for due in left) > ahead * plan.prompts:
                    return []
        return whole

    def renew(self, version: int) -> None:
        self.version = version
        gone = {group for group in self.open if group.version + self.plan.staleness < version}
        self.dropped += len(gone)
        self.open = [group for group in self.open if group not in gone]
        place = {id(row): i for i, row in enumerate(r for g in self.open for r in g.rows)}
        for engine in self.engines:
            engine.drop(gone)
            if self.plan.recompute:
                engine.restart(lambda row: place[id(row)])


def simulate(plan: Plan, lengths: Callable[[int], Sequence[int]], takes: int) -> Outcome:
    """Run a plan for some takes, each with an update after it.

    Prefills are counted as no time. With devices of their own, the `ahead` calls of generators run
    while the update does; else one after the other.

    Args:
      plan: the schedule.
      lengths: number of a group, from 0 -> tokens of each of its rows, 1 or more.
      takes: how many.
    """
    run = _Run(plan, lengths)
    time = 0.0
    ages = np.zeros(plan.staleness + 1, np.int64)
    groups = []
    for version in range(takes):
        run.renew(version)
        run.ask()
        while not (chosen := run.ready()):
            time += run.advance()
        for group in chosen:
            for row in group.rows:
                for drawn, count in row.drawn.items():
                    ages[version - drawn] += count
        groups.append([group.number for group in chosen])
        run.open = [group for group in run.open if group not in chosen]
        during = 0
        for _ in range(plan.ahead):
            if any(group.running for group in run.open):
                during += run.advance()
        time += max(during, plan.update) if plan.apart else during + plan.update
    return Outcome(
        time=time,
        slots=run.slots,
        tokens=run.tokens,
        training=takes * plan.update,
        ages=ages,
        groups=groups,
        dropped=run.dropped,
        generators=plan.generators * plan.slots,
        apart=plan.apart,
    )


def lock_step(plan: Plan, lengths: Callable[[int], Sequence[int]], takes: int) -> Outcome:
    """The same for batches as large as all slots, each decoded until its longest row ends."""
    width, time, slots, tokens, groups = plan.slots * plan.generators, 0.0, 0, 0, []
    for take in range(takes):
        numbers = list(range(take * plan.prompts, (take + 1) * plan.prompts))
        rows = [n for number in numbers for n in lengths(number)]
        for start in range(0, len(rows), width):
            part = rows[start : start + width]
            time, slots = time + max(part), slots + max(part) * width
            tokens += sum(part)
        time += plan.update
        groups.append(numbers)
    ages = np.array([tokens])
    return Outcome(time, slots, tokens, takes * plan.update, ages, groups, 0, width, False)
