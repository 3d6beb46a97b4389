"""Slots: the rows that decode together, their cache on the device, their records on the host."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from policyopt import hosts
from policyopt.sampling import slots as slots_lib
from policyopt.sampling.config import EngineConfig, Finish, SamplingConfig
from policyopt.sampling.parking import Lot
from policyopt.sampling.rows import Buffers, Row, check_alike, empty_rules, stack_rows
from policyopt.sampling.rules import Constraint, make_rules
from policyopt.sampling.stats import Stats

ADMITTED = 8  # rows of one prefill that are put into slots by one call, at most
SHRINK = 4  # where few slots decode, only 1 / SHRINK of them take part, or 1 / SHRINK^2, ...


class Event(NamedTuple):
    """A row that stopped drawing: its slot, a Finish, and the fault of its logits."""

    slot: int
    finish: int
    fault: int


class Table:
    """The slots of an engine and what is done to them; knows no queue and no environment.

    Attributes:
      rows: [N], the row in each slot, None where it is free.
      stats: see Stats.
      admitted: rows that one `admit` takes at most.
    """

    def __init__(
        self,
        model: Any,
        config: SamplingConfig,
        engine: EngineConfig,
        size: int,
        constraint: Constraint | None,
    ):
        self.rows: list[Row | None] = [None] * engine.slots
        self.stats = Stats()
        self._model, self._engine = model, engine
        self._size, self._count, self._constraint = size, engine.slots, constraint
        self.admitted = min(ADMITTED, max(4, engine.refill), engine.slots)
        self._static, self._rules = make_rules(model, config, 1, None, constraint)
        self._slot_rules: Any = None  # until the first rows say which fields they set
        self._impl, self._key_shape = None, ()
        self._cache = slots_lib.empty(model, engine.slots, size)
        places = engine.slots if engine.parked is None else engine.parked
        self._lot = Lot(model, places, size, self.admitted, self._bucket)
        self._state = None if constraint is None else constraint.init(engine.slots)
        self._buffers: Any = None

    def prepare(self, static: Any, rules: Any, impl: Any, key_shape: tuple[int, ...]) -> None:
        """Fix what the first rows fix: K, the fields of single rows, the kind of key.

        Raises ValueError where later rows differ.
        """
        if self._slot_rules is None:
            self._static, self._impl, self._key_shape = static, impl, key_shape
            self._slot_rules = empty_rules(rules, self._count)
            self._buffers = Buffers.make(self._count, self._size, static.size, self._model.config)
            return
        check_alike(self._slot_rules, rules, self._static, static)
        if (impl, key_shape) != (self._impl, self._key_shape):
            raise ValueError(f'keys are {impl}; legal is the kind of the first, {self._impl}')

    def open(self, row: Row, prompt: Sequence[int]) -> None:
        """Give a row the record of its prompt."""
        row.static, row.impl = self._static, self._impl
        row.start(prompt, self._static.size, self._model.config)

    def free(self) -> list[int]:
        """Empty slots."""
        return [slot for slot, row in enumerate(self.rows) if row is None]

    def active(self) -> np.ndarray:
        """Slots that decode, [N] bool."""
        return np.array([row is not None and not row.thinking for row in self.rows])

    def row(self, slot: int) -> Row:
        """The row in a slot that has one."""
        row = self.rows[slot]
        assert row is not None
        return row

    def take(self, slot: int) -> Row:
        """Empty a slot; the row has its record with it."""
        row = self._recorded(slot, self.row(slot))
        self.rows[slot] = None
        return row

    def copy(self, slot: int) -> Row:
        """A copy of the row in a slot, with its record, as `take` would give it."""
        return self._recorded(slot, dataclasses.replace(self.row(slot)))

    def _recorded(self, slot: int, row: Row) -> Row:
        row.data = self._buffers.copy(slot, row.length)
        if self._state is not None:
            row.state = hosts.fetch(jax.tree.map(lambda x: x[slot], self._state))
        return row

    @property
    def room(self) -> int:
        """Rows that may be parked beside those that are."""
        return self._lot.room

    def park(self, slots: Sequence[int]) -> list[Row]:
        """Take rows out of their slots with a copy of their cache; at most `room` rows."""
        self._lot.park(self._cache, slots, [self.row(slot) for slot in slots])
        self.stats.parked += len(slots)
        return [self.take(slot) for slot in slots]

    def unpark(self, rows: Sequence[Row]) -> None:
        """Put parked rows into free slots, as they were."""
        slots = self.free()[: len(rows)]
        self._cache = self._lot.unpark(self._cache, slots, rows)
        for slot, row in zip(slots, rows, strict=True):
            self.rows[slot] = row
            self._buffers.load(slot, row.data)
            row.data = None
            if self._state is not None:
                put = functools.partial(_put_state, slot)
                self._state = jax.tree.map(put, self._state, row.state)

    def leave(self, row: Row) -> None:
        """Free the place of a row that is parked."""
        self._lot.leave(row)

    def prefill(self, params: Any, rows: Sequence[Row]) -> slots_lib.Prefix:
        """Run the tokens of rows of one `prefill_bucket`."""
        shape = (len(rows), self.prefill_bucket(rows[0].length))
        tokens, count = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        for i, row in enumerate(rows):
            tokens[i, : row.length], count[i] = row.tokens, row.length
        self.stats.prefill_tokens += int(count.sum())
        self.stats.prefill_slots += tokens.size
        return slots_lib.prefill(self._model, params, tokens, count, _replay(rows, shape))

    def prefill_bucket(self, length: int) -> int:
        """Width that a prompt of this length is padded to."""
        return _ladder(length, self._engine.prefill_width, self._size)

    def admit(
        self, rows: Sequence[Row], prefix: slots_lib.Prefix, source: Sequence[int], version: int
    ) -> list[Event]:
        """Put at most `admitted` rows, whose prompts are those at `source`, into free slots.

        Each draws its first token. The shape of the call is always that of `admitted` rows.
        """
        slots = self.free()[: len(rows)]
        for slot, row, at in zip(slots, rows, source, strict=True):
            self._place(slot, row, prefix, at)
        spare = self.admitted - len(rows)
        filled = [*rows, *[rows[0]] * spare]
        fresh = None
        if self._constraint is not None:
            initial = jax.tree.map(lambda x: np.asarray(x[0]), self._constraint.init(1))
            fresh = stack_rows([initial if row.state is None else row.state for row in filled])
        self._cache, self._state, new = slots_lib.admit(
            self._cache,
            self._state,
            prefix,
            np.array([*source, *[source[0]] * spare], np.int32),
            np.array(slots + [self._count] * spare, np.int32),
            fresh,
            self._live(filled, np.ones(self.admitted, bool)),
            dataclasses.replace(self._rules, rows=stack_rows([self._limited(r) for r in filled])),
            static=self._static,
            impl=self._impl,
        )
        new = hosts.fetch(new)
        return _stopped(self._drew(slot, new, i, version) for i, slot in enumerate(slots))

    def decode(self, params: Any, version: int, patience: int) -> list[Event]:
        """Up to `steps` tokens for every active slot, until `patience` rows have stopped.

        Until fewer have, where the others then fit a smaller batch.
        """
        active = np.flatnonzero(self.active())
        width, fewer = self._widths(len(active))
        slots = None  # all of them
        if width < self._count:
            slots = np.full(width, self._count, np.int32)
            slots[: len(active)] = active
        longest = max(self.row(slot).length for slot in active.tolist())
        self._cache, self._state, records = slots_lib.decode(
            self._model,
            params,
            self._cache,
            self._state,
            *self._rows_of(slots),
            slots,
            np.int32(min(patience, len(active) - fewer)),
            static=self._static,
            impl=self._impl,
            steps=self._engine.steps,
            bucket=self._bucket(longest + self._engine.steps),
            gather=self._engine.gather,
        )
        records = hosts.fetch(records)
        columns = np.arange(self._count) if slots is None else slots
        self._buffers.write(records, columns, self.rows, version)
        drew = records.drew.sum(axis=0)
        self.stats.decode_slots += int(records.steps) * width
        if slots is None:
            waiting = sum(row is not None and row.thinking for row in self.rows)
            self.stats.waiting_slots += int(records.steps) * waiting
        self.stats.decode_tokens += int(drew.sum())
        events = []
        for at, slot in enumerate(columns.tolist()):
            if slot not in active:
                continue
            row = self.row(slot)
            row.length += int(drew[at])
            row.drawn += int(drew[at])
            row.last = int(self._buffers.tokens[slot, row.length - 1])
            events.append(Event(slot, int(records.finish[at]), int(records.fault[at])))
        return _stopped(events)

    def turn(self, slot: int) -> list[int]:
        """Tokens of the turn that a row is in."""
        return self.turn_of(self.row(slot))

    def turn_of(self, row: Row) -> list[int]:
        """The same of a row in a slot, or outside one."""
        tokens = self._records(row)[0]
        return [] if row.new_turn else tokens[row.turn_start : row.length].tolist()

    def reward(self, row: Row, reward: float) -> None:
        """Record a turn's reward at its last token, and add it to the row's; NaN is none."""
        if not math.isnan(reward):
            self._records(row)[1][row.length - 1] = reward
            row.reward = reward + (0 if math.isnan(row.reward) else row.reward)

    def _records(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and rewards of a row, in a slot or parked."""
        if row.place is not None:
            assert row.data is not None
            tokens, rewards = row.data['tokens'], row.data['segment_rewards']
            assert tokens is not None and rewards is not None
            return tokens, rewards
        slot = self.rows.index(row)
        return self._buffers.tokens[slot], self._buffers.segment_rewards[slot]

    def observe(self, slot: int) -> np.ndarray:
        """Append a row's observation to its record: mask 0, a segment of its own.

        Returns what is now to be fed: the last token drawn, and the observation.
        """
        row = self.row(slot)
        new, last = row.observation, row.last
        row.observation, row.thinking, row.new_turn = None, False, True
        if len(new):
            row.segment += 1
            self._buffers.observe(slot, row.length, new, row.segment)
            row.length, row.last = row.length + len(new), int(new[-1])
            self.stats.observed_tokens += len(new)
        return np.concatenate([[last], new]).astype(np.int32)

    def feed(self, params: Any, version: int, tokens: Mapping[int, np.ndarray]) -> list[Event]:
        """Feed slots what `observe` returned, in chunks; each then draws its next token."""
        events: list[Event] = []
        chunk = self._engine.chunk
        # Where each row's first token to feed stands.
        start = {slot: self.row(slot).length - len(ids) for slot, ids in tokens.items()}
        for offset in range(0, max(map(len, tokens.values())), chunk):
            events += self._feed(params, version, tokens, start, offset, chunk)
        return events

    def _feed(self, params, version, tokens, start, offset, chunk) -> list[Event]:
        part = np.zeros((self._count, chunk), np.int32)
        count, draws = np.zeros(self._count, np.int32), np.zeros(self._count, bool)
        for slot, ids in tokens.items():
            ids = ids[offset : offset + chunk]
            part[slot, : len(ids)], count[slot] = ids, len(ids)
            draws[slot] = offset < len(tokens[slot]) <= offset + chunk
        fed = [slot for slot in tokens if count[slot]]
        self._cache, self._state, new, routing = slots_lib.feed(
            self._model,
            params,
            self._cache,
            self._state,
            part,
            count,
            draws,
            self._live(self.rows, draws),
            self._all_rules(),
            static=self._static,
            impl=self._impl,
            bucket=self._bucket(max(start[slot] + offset + int(count[slot]) for slot in fed)),
        )
        new, routing = hosts.fetch((new, routing))
        for slot in fed:
            if routing is not None:
                at = start[slot] + offset
                self._buffers.routing[slot, at : at + count[slot]] = routing[slot, : count[slot]]
        return _stopped(self._drew(slot, new, slot, version) for slot in fed if draws[slot])

    def _place(self, slot: int, row: Row, prefix: slots_lib.Prefix, source: int) -> None:
        self.stats.prompt_tokens += row.length
        self.rows[slot] = row
        self._buffers.load(slot, row.data)
        if prefix.routing is not None:
            # What is recorded already was replayed; the rest is new.
            known = row.fed_routing()
            new = hosts.fetch(prefix.routing[source])[known : row.length]
            self._buffers.routing[slot, known : row.length] = new
        row.data = None

    def _drew(self, slot: int, new: Any, at: int, version: int) -> Event:
        """Record the draw `at` of one call in a slot."""
        row = self.row(slot)
        if row.new_turn:
            row.segment, row.turn_start, row.new_turn = row.segment + 1, row.length, False
        finish, fault = int(new.finish[at]), int(new.draw.fault[at])
        if finish != Finish.ERROR:
            self._buffers.put(slot, row.length, new.draw, at, version, row.segment)
            row.length, row.drawn, row.last = row.length + 1, row.drawn + 1, int(new.draw.token[at])
        return Event(slot, finish, fault)

    def _live(self, rows: Sequence[Row | None], active: np.ndarray) -> slots_lib.Live:
        blank = np.zeros(self._key_shape, np.uint32)
        fields: dict[str, Any] = dict(
            active=active,
            fed=np.array([0 if row is None else row.last for row in rows], np.int32),
            drawn=np.array([0 if row is None else row.drawn for row in rows], np.int32),
            keys=np.stack([blank if row is None else row.key for row in rows]),
        )
        return slots_lib.Live(**fields)

    def _limited(self, row: Row) -> Any:
        """The row's rules, its limit cut to the room it has."""
        room = row.drawn + self._size - row.length
        return row.rules.replace(limit=np.minimum(row.rules.limit, np.int32(room)))

    def _widths(self, active: int) -> tuple[int, int]:
        """Slots that decode together where so many are active, and the next smaller number, or 0.

        Without `min_slots` always all of them, so that a row's company changes none of its bits.
        """
        least = self._engine.min_slots
        width, fewer = self._count, 0
        while least is not None and width > least:
            fewer = max(-(-width // SHRINK), least)
            if active > fewer:
                return width, fewer
            width, fewer = fewer, 0
        return width, fewer

    def _rows_of(self, slots: np.ndarray | None) -> tuple[slots_lib.Live, Any]:
        """Live and rules of these slots, of all where None; N stands for no slot."""
        live, rules = self._live(self.rows, self.active()), self._all_rules()
        if slots is None:
            return live, rules
        at = np.minimum(slots, self._count - 1)
        live, rows = jax.tree.map(lambda x: x[at], (live, rules.rows))
        live = live.replace(active=live.active & (slots < self._count))
        return live, dataclasses.replace(rules, rows=rows)

    def _all_rules(self) -> Any:
        for slot, row in enumerate(self.rows):
            if row is not None:
                jax.tree.map(
                    lambda into, x, slot=slot: into.__setitem__(slot, x),
                    self._slot_rules,
                    self._limited(row),
                )
        return dataclasses.replace(self._rules, rows=self._slot_rules)

    def _bucket(self, longest: int) -> int:
        return _ladder(longest, self._engine.bucket, self._size)


def _put_state(slot: int, into: Any, x: Any) -> Any:
    return into.at[slot].set(x)


def _stopped(events: Any) -> list[Event]:
    return [event for event in events if event.finish != Finish.RUNNING]


def _ladder(need: int, least: int, most: int) -> int:
    """The smallest least * 2^i that is at least `need`, at most `most`."""
    return min(least * 2 ** max(0, math.ceil(math.log2(max(need, 1) / least))), most)


def _replay(rows: Sequence[Row], shape: tuple[int, int]) -> np.ndarray | None:
    """Recorded routing of resumed rows, [R,P,L,k] with -1 where there is none; None without any."""
    if not any(row.fed_routing() for row in rows):
        return None
    routing = [row.data['routing'] for row in rows]  # type: ignore[index]
    out = np.full((*shape, *routing[0].shape[1:]), -1, routing[0].dtype)  # type: ignore[union-attr]
    for i, x in enumerate(routing):
        out[i, : len(x)] = x  # type: ignore[arg-type]
    return out
