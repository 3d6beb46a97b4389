"""Continuous batching: a fixed number of slots whose finished rows make room for waiting prompts.

The host decides which row sits in which slot; everything on the device is a pure function of
`sampling.slots`. A row's tokens depend on its key, its prompt and the parameters alone, so they are
those of `sampling.sample` for the same key, whatever the slots, their order or the refills.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from policyopt.sampling.config import (
    EngineConfig,
    Finish,
    PerRow,
    SamplingConfig,
    prompt_error,
    row_keys,
)
from policyopt.sampling.environments import (
    Environment,
    Outcome,
    Pool,
    Reply,
    Turn,
    checked_ids,
    checked_reply,
)
from policyopt.sampling.rows import Row
from policyopt.sampling.rules import Constraint, fault_text, make_rules
from policyopt.sampling.stats import Stats
from policyopt.sampling.table import Event, Table
from policyopt.types import Array


class Engine:
    """A queue of rows, slots for some of them, and environments that may have the turn.

    `submit` rows, then call `step(params, version)` while `busy`; it returns the rows that ended.
    New parameters may be given at any call and act from there on, with all rows kept. `abort` takes
    every row out as it stands; `resume` puts such rows back, here or in another engine.

    While a row waits for its environment, its slot goes to another row that could decode; see
    `EngineConfig.parked`. What a row holds of the cache is copied, so neither this nor how long
    environments take changes a bit of it.

    All state is on the host, but for the cache and the constraint's state.
    """

    def __init__(
        self,
        model: Any,
        config: SamplingConfig,
        engine: EngineConfig,
        *,
        constraint: Constraint | None = None,
    ):
        if engine.size is None:
            raise ValueError('size is None; an engine needs the length of its longest row')
        self._model, self._config, self._engine = model, config, engine
        self._size, self._constraint = engine.size, constraint
        self._table = Table(model, config, engine, engine.size, constraint)
        self._waiting: collections.deque[Row] = collections.deque()
        self._parked: list[Row] = []  # out of their slots, for their environment or for a slot
        self._starting: set[int] = set()  # ids of rows whose environment is being reset
        self._ended: list[Row] = []
        self._prefixes: dict[tuple, tuple[Any, int]] = {}  # prompt -> prefix, row in it
        self._seen: Any = None  # the parameters that the prefixes were made with
        self._pool = Pool(engine.workers, engine.time_limit)
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        rows = any(row is not None for row in self._table.rows)
        return bool(rows or self._waiting or self._parked or self._starting or self._ended)

    @property
    def load(self) -> int:
        """Rows that have not ended."""
        held = sum(row is not None for row in self._table.rows)
        return held + len(self._waiting) + len(self._parked) + len(self._starting)

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        return self._table.stats

    def submit(
        self,
        prompts: Sequence[Sequence[int]] | None,
        key: Array,
        *,
        per_row: PerRow | None = None,
        environments: Sequence[Environment | None] | None = None,
    ) -> list[int]:
        """Put rows in the queue; returns their ids, 0, 1, ... in order of submission.

        Rows with equal prompts share one prefill. A prompt that can't be used ends its own row with
        an error; `step` returns it.

        Args:
          prompts: lists of token ids; None where the `reset` of environments gives them.
          key: a typed key, or one per row; see `sample`.
          per_row: values of single rows. The fields set are those of the first call.
          environments: one per row, None for a row that ends with its first turn.

        Raises:
          ValueError: settings that no row could be drawn with, naming field, row and what is legal.
        """
        given = environments if prompts is None else prompts
        if given is None or (prompts is None and None in given):
            raise ValueError('give prompts, or an environment for each row, whose reset gives it')
        count = len(given)
        if environments is None:
            environments = [None] * count
        if len(environments) != count:
            raise ValueError(f'there are {len(environments)} environments for {count} prompts')
        static, rules = make_rules(self._model, self._config, count, per_row, self._constraint)
        keys = row_keys(key, count)
        data = np.asarray(jax.random.key_data(keys))
        self._table.prepare(static, rules.rows, jax.random.key_impl(keys), data.shape[1:])
        ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        for i, id_ in enumerate(ids):
            row = Row(id=id_, key=data[i], rules=jax.tree.map(lambda x, i=i: x[i], rules.rows))
            row.environment = environments[i]
            if prompts is not None:
                self._enqueue(row, prompts[i])
                continue
            self._starting.add(id_)
            self._pool.call(
                ('reset', row),
                lambda e=row.environment: checked_ids(e.reset(), self._model.config.vocab_size),
            )
        return ids

    def resume(self, rows: Iterable[Row]) -> None:
        """Put back what `abort` returned; the rows go on where they stood, with their own ids.

        Recorded experts are replayed for what a row holds, so that its cache is the one it had.

        Raises ValueError, and takes no row, where one has no room here or an id of a row here.
        """
        rows = list(rows)
        here = [*self._table.rows, *self._waiting, *self._parked, *self._ended]
        taken = self._starting | {row.id for row in here if row is not None}
        for row in rows:
            if row.id in taken:
                raise ValueError(f'row {row.id}: this engine has a row of that id')
            if row.length >= self._size:
                raise ValueError(
                    f'row {row.id}: it has {row.length} tokens; legal is 1 to {self._size - 1}'
                )
            taken.add(row.id)
        for row in rows:
            rules = jax.tree.map(lambda x: x[None], row.rules)
            self._table.prepare(row.static, rules, row.impl, row.key.shape)
            self._next_id = max(self._next_id, row.id + 1)
            self._waiting.append(row)

    def step(self, params: Any, version: int = 0, even: bool = False) -> list[Row]:
        """Refill slots, feed observations, decode up to `steps` tokens; returns rows that ended.

        `version` is recorded on every token drawn in this call. It ends early where a row could
        have the slot of one that ended, unless calls are to be of `even` length. Blocks for
        environments only where no row can decode.
        """
        if params is not self._seen:
            self._prefixes, self._seen = {}, params
        self._answers()
        while (left := self._grace()) > 0:
            self._answers(left)
        self._unpark()
        self._observe(params, version)
        self._admit(params, version)
        if self._table.active().any():
            rows = self._table.rows
            patience = len(rows)
            if (self._waiting or self._starting or self._parked) and not even:
                patience = max(1, self._engine.refill - len(self._table.free()))
            if any(r is not None and r.environment for r in rows):
                patience = min(patience, self._engine.refill)  # they have the turn at once
            self._settle(self._table.decode(params, version, patience))
        elif len(self._pool) and not self._ended:
            self._answers(self._engine.grace if self._hindered() else math.inf)
        ended, self._ended = self._ended, []
        self.stats.errors += sum(row.error is not None for row in ended)
        return ended

    def abort(self) -> list[Row]:
        """Take out all rows that have not ended, in order of their ids, and empty the slots.

        Waits for environment calls under way, so that what they answer is in the rows.
        """
        while len(self._pool):
            self._answers(math.inf)
        out = list(self._waiting)
        self._waiting.clear()
        self._prefixes.clear()
        while True:
            for slot, row in enumerate(self._table.rows):
                if row is not None:
                    if row.observation is not None:
                        self._table.observe(slot)
                    out.append(self._table.take(slot))
            if not self._parked:
                break
            self._unpark()
        return sorted(out, key=lambda row: row.id)

    def copies(self) -> list[Row]:
        """Copies of what `abort` would return, of rows without environments; all go on."""
        rows = [dataclasses.replace(row) for row in self._waiting]
        held = (slot for slot, row in enumerate(self._table.rows) if row is not None)
        return sorted([*rows, *map(self._table.copy, held)], key=lambda row: row.id)

    def drop(self, ids: Collection[int]) -> None:
        """Forget rows without environments that have not ended; their slots are free."""
        self._waiting = collections.deque(row for row in self._waiting if row.id not in ids)
        for slot, row in enumerate(self._table.rows):
            if row is not None and row.id in ids:
                self._table.take(slot)

    def _enqueue(self, row: Row, prompt: Sequence[int]) -> None:
        error = prompt_error(prompt, self._size - 1, self._model.config.vocab_size)
        self._table.open(row, prompt if error is None else ())
        if error is None:
            self._waiting.append(row)
        else:
            row.finish, row.error = Finish.ERROR, error
            self._ended.append(row)

    def _end(self, row: Row, finish: Finish, error: str | None = None) -> None:
        """A row in a slot, or parked, is over."""
        if row.place is None:
            self._table.take(self._table.rows.index(row))
        else:
            self._parked.remove(row)
            self._table.leave(row)
        row.finish, row.error, row.thinking = finish, error, False
        self._ended.append(row)

    def _admit(self, params: Any, version: int) -> None:
        """Fill free slots from the queue; a row that ends with its first token frees its own."""
        while free := self._open():
            if self._waiting[0].prefix_key() not in self._prefixes:
                self._prefill(params)
            prefix = self._prefixes[self._waiting[0].prefix_key()][0]
            rows: list[Row] = []
            source: list[int] = []
            keys: list[tuple] = []
            while self._waiting and len(rows) < min(free, self._table.admitted):
                key = self._waiting[0].prefix_key()
                if self._prefixes.get(key, (None,))[0] is not prefix:
                    break
                rows.append(self._waiting.popleft())
                source.append(self._prefixes[key][1])
                keys.append(key)
            self._settle(self._table.admit(rows, prefix, source, version))
            wanted = {row.prefix_key() for row in self._waiting} if self._waiting else ()
            for key in set(keys).difference(wanted):
                del self._prefixes[key]

    def _open(self) -> int:
        """Free slots that waiting rows may have now: `refill` at least, while others decode.

        Rows that wait for their environment are parked for them.
        """
        wanted = min(self._engine.refill, len(self._waiting))
        if not wanted:
            return 0
        slots = self._parkable()
        free = len(self._table.free())
        if free + len(slots) < wanted and self._table.active().any():
            return 0
        self._park(slots[: max(len(self._waiting) - free, 0)])
        return len(self._table.free())

    def _prefill(self, params: Any) -> None:
        """Run the prompt at the head of the queue with those after it that share its bucket.

        They may have to wait for a slot: prompts cost much less together than one at a time.
        """
        together = self._engine.prefill_rows
        bucket = self._table.prefill_bucket(self._waiting[0].length)
        new: dict[tuple, Row] = {}
        for row in self._waiting:
            key = row.prefix_key()
            if self._table.prefill_bucket(row.length) != bucket or len(new) == together:
                break
            if key not in self._prefixes:
                new.setdefault(key, row)
        # Two shapes, so that little is compiled and nothing is padded.
        keys = list(new)[: together if len(new) >= together else 1]
        prefix = self._table.prefill(params, [new[key] for key in keys])
        self._prefixes |= {key: (prefix, i) for i, key in enumerate(keys)}

    def _settle(self, events: Iterable[Event]) -> None:
        """What follows for rows that stopped drawing."""
        for slot, finish, fault in events:
            row = self._table.row(slot)
            error = fault_text(fault) if finish == Finish.ERROR else None
            turn = tuple(self._table.turn(slot)) if row.environment is not None else ()
            if row.environment is None or finish not in (Finish.EOS, Finish.STOP):
                if row.environment is not None:
                    row.turns.append(Turn(turn, finish=finish, error=error))
                self._end(row, Finish(finish), error)
                continue
            row.thinking, row.since = True, time.monotonic()
            self._pool.call(
                ('step', row),
                lambda e=row.environment, t=turn: checked_reply(
                    e.step(list(t)),
                    self._model.config.vocab_size,
                    self._engine.observation or self._size,
                ),
            )

    def _answers(self, wait: float = 0.0) -> None:
        """Take what environments answered; waits so many seconds where there is nothing yet."""
        for outcome in self._pool.collect(wait):
            self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        (kind, row), value, fault, seconds = outcome
        stats = self.stats
        stats.calls, stats.call_seconds = stats.calls + 1, stats.call_seconds + seconds
        stats.longest_call = max(stats.longest_call, seconds)
        if fault is not None:
            stats.failures += fault.finish == Finish.ENV_FAILED
            stats.timeouts += fault.finish == Finish.ENV_LATE
            stats.overflows += fault.finish == Finish.ENV_OVERFLOW
        if kind == 'step':
            self._answer(row, value or Reply(), fault, seconds)
            return
        self._starting.remove(row.id)
        if fault is None:
            self._enqueue(row, value)
            return
        self._table.open(row, ())
        row.finish, row.error = fault.finish, str(fault)
        self._ended.append(row)

    def _answer(self, row: Row, value: Reply, fault: Any, seconds: float) -> None:
        ids, finish = value.tokens, Finish.RUNNING
        if fault is not None:
            finish = fault.finish
        elif value.done:
            finish = Finish.DONE
        elif row.length + len(ids) >= self._size or row.drawn >= row.rules.limit:
            finish = Finish.LENGTH
        error = None if fault is None else str(fault)
        turn = tuple(self._table.turn_of(row))
        row.turns.append(Turn(turn, tuple(ids), value.reward, finish, error, seconds, True))
        self._table.reward(row, value.reward)
        if finish != Finish.RUNNING:
            self._end(row, finish, error)
        else:
            row.observation = np.asarray(ids, np.int32)

    # ---------------------------------------------------------------- rows out of their slots

    def _grace(self) -> float:
        """Seconds that the youngest call of an environment has before others go on without it."""
        begun = [row.since for _, row in self._pondering()]
        return max(begun, default=-math.inf) + self._engine.grace - time.monotonic()

    def _pondering(self) -> list[tuple[int, Row]]:
        """Slots whose row waits for its environment, with the row."""
        rows = enumerate(self._table.rows)
        return [(i, r) for i, r in rows if r is not None and r.thinking and r.observation is None]

    def _parkable(self) -> list[int]:
        """Slots that could be given up: their rows wait for longer than `grace`; oldest first."""
        late = time.monotonic() - self._engine.grace
        rows = [(row.since, slot) for slot, row in self._pondering() if row.since <= late]
        return [slot for _, slot in sorted(rows)[: self._table.room]]

    def _hindered(self) -> bool:
        """Whether a row could decode, if another were parked for it."""
        ready = any(row.observation is not None for row in self._parked)
        return bool(self._table.room and (self._waiting or ready))

    def _park(self, slots: Sequence[int]) -> None:
        if slots:
            self._parked += self._table.park(slots)

    def _unpark(self) -> None:
        """Give slots to parked rows that have their answer, oldest first."""
        ready = [row for row in self._parked if row.observation is not None]
        ready.sort(key=lambda row: row.since)
        self._park(self._parkable()[: max(len(ready) - len(self._table.free()), 0)])
        ready = ready[: len(self._table.free())]
        if ready:
            self._table.unpark(ready)
            self._parked = [row for row in self._parked if row.place is not None]

    def _observe(self, params: Any, version: int) -> None:
        """Feed the observations that have come, and draw the first token of the turns after."""
        ready = [
            slot
            for slot, row in enumerate(self._table.rows)
            if row is not None and row.observation is not None
        ]
        if ready:
            tokens = {slot: self._table.observe(slot) for slot in ready}
            self._settle(self._table.feed(params, version, tokens))
