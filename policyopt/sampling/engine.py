"""Continuous batching: a fixed number of slots whose finished rows make room for waiting prompts.

The host decides which row sits in which slot; everything on the device is a pure function of
`sampling.slots`. A row's tokens depend on its key, its prompt and the parameters alone, so they are
those of `sampling.sample` for the same key, whatever the slots, their order or the refills.
"""

from __future__ import annotations

import collections
import math
import reprlib
from collections.abc import Iterable, Sequence
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
from policyopt.sampling.environments import Environment, Pool, Reply
from policyopt.sampling.rows import Row
from policyopt.sampling.rules import Constraint, fault_text, make_rules
from policyopt.sampling.table import Event, Stats, Table
from policyopt.types import Array


class Engine:
    """A queue of rows, slots for some of them, and environments that may have the turn.

    `submit` rows, then call `step(params, version)` while `busy`; it returns the rows that ended.
    New parameters may be given at any call and act from there on, with all rows kept. `abort` takes
    every row out as it stands; `resume` puts such rows back, here or in another engine.

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
        return bool(rows or self._waiting or self._starting or self._ended)

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
        environments: Sequence[Environment] | None = None,
    ) -> list[int]:
        """Put rows in the queue; returns their ids, 0, 1, ... in order of submission.

        Rows with equal prompts share one prefill. A prompt that can't be used ends its own row with
        an error; `step` returns it.

        Args:
          prompts: lists of token ids; None with environments, whose `reset` gives them.
          key: a typed key, or one per row; see `sample`.
          per_row: values of single rows. The fields set are those of the first call.
          environments: one per row.

        Raises:
          ValueError: settings that no row could be drawn with, naming field, row and what is legal.
        """
        given = environments if prompts is None else prompts
        if given is None or (prompts is not None and environments is not None):
            raise ValueError('give prompts, or environments whose reset gives them, not both')
        count = len(given)
        static, rules = make_rules(self._model, self._config, count, per_row, self._constraint)
        keys = row_keys(key, count)
        data = np.asarray(jax.random.key_data(keys))
        self._table.prepare(static, rules.rows, jax.random.key_impl(keys), data.shape[1:])
        ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        for i, id_ in enumerate(ids):
            row = Row(id=id_, key=data[i], rules=jax.tree.map(lambda x, i=i: x[i], rules.rows))
            if environments is not None:
                row.environment = environments[i]
                self._starting.add(id_)
                self._pool.call(('reset', row), row.environment.reset)
            elif prompts is not None:
                self._enqueue(row, prompts[i])
        return ids

    def resume(self, rows: Iterable[Row]) -> None:
        """Put back what `abort` returned; the rows go on where they stood, with their own ids.

        Recorded experts are replayed for what a row holds, so that its cache is the one it had.

        Raises ValueError, and takes no row, where one has no room here or an id of a row here.
        """
        rows = list(rows)
        here = [*self._table.rows, *self._waiting, *self._ended]
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

    def step(self, params: Any, version: int = 0) -> list[Row]:
        """Refill slots, feed observations, decode up to `steps` tokens; returns rows that ended.

        `version` is recorded on every token drawn in this call. Blocks for environments only where
        no row can decode.
        """
        if params is not self._seen:
            self._prefixes, self._seen = {}, params
        self._answers(wait=False)
        self._observe(params, version)
        self._admit(params, version)
        if self._table.active().any():
            rows = self._table.rows
            patience = len(rows)
            if self._waiting or self._starting:
                patience = max(1, self._engine.refill - len(self._table.free()))
            if any(r is not None and r.environment for r in rows):
                patience = 1  # it has the turn at once
            self._settle(self._table.decode(params, version, patience))
        elif len(self._pool) and not self._ended:
            self._answers(wait=True)
        ended, self._ended = self._ended, []
        self.stats.errors += sum(row.finish == Finish.ERROR for row in ended)
        return ended

    def abort(self) -> list[Row]:
        """Take out all rows that have not ended, in order of their ids, and empty the slots.

        Waits for environment calls under way, so that what they answer is in the rows.
        """
        while len(self._pool):
            self._answers(wait=True)
        out = list(self._waiting)
        self._waiting.clear()
        self._prefixes.clear()
        for slot, row in enumerate(self._table.rows):
            if row is not None:
                if row.observation is not None:
                    self._table.observe(slot)
                out.append(self._table.take(slot))
        return sorted(out, key=lambda row: row.id)

    def _enqueue(self, row: Row, prompt: Sequence[int]) -> None:
        error = prompt_error(prompt, self._size - 1, self._model.config.vocab_size)
        self._table.open(row, prompt if error is None else ())
        if error is None:
            self._waiting.append(row)
        else:
            row.finish, row.error = Finish.ERROR, error
            self._ended.append(row)

    def _end(self, slot: int, finish: Finish, error: str | None = None) -> None:
        row = self._table.take(slot)
        row.finish, row.error = finish, error
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
        """Free slots that waiting rows may have now: `refill` at least, while others decode."""
        free = len(self._table.free())
        wanted = min(self._engine.refill, len(self._waiting))
        return free if wanted and (free >= wanted or not self._table.active().any()) else 0

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
            if finish == Finish.ERROR:
                self._end(slot, Finish.ERROR, fault_text(fault))
            elif row.environment is not None and finish in (Finish.EOS, Finish.STOP):
                turn = self._table.turn(slot)
                row.thinking = True
                self._pool.call(('step', row), lambda e=row.environment, t=turn: e.step(t))
            else:
                self._end(slot, Finish(finish))

    def _answers(self, wait: bool) -> None:
        """Take what environments answered."""
        for (kind, row), value, error in self._pool.collect(wait):
            if kind == 'reset':
                self._starting.remove(row.id)
                error = error or _ids_error(value, self._model.config.vocab_size)
                self._enqueue(row, () if error else [int(i) for i in value])
                row.error = error or row.error
            else:
                self._answer(self._table.rows.index(row), row, value, error)
        self.stats.failures, self.stats.timeouts = self._pool.failures, self._pool.timeouts

    def _answer(self, slot: int, row: Row, value: Any, error: str | None) -> None:
        error = error or _reply_error(value, self._model.config.vocab_size)
        if error is not None:
            self._end(slot, Finish.ERROR, error)
            return
        self._table.reward(slot, float(value.reward))
        if value.done:
            self._end(slot, Finish.DONE)
        elif row.length + len(value.tokens) >= self._size or row.drawn >= row.rules.limit:
            self._end(slot, Finish.LENGTH)
        else:
            row.observation = np.asarray(value.tokens, np.int32).reshape(-1)

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


def _reply_error(value: Any, vocab_size: int) -> str | None:
    """What is wrong with what an environment answered, None if nothing."""
    if not isinstance(value, Reply):
        return f'environment returned {type(value).__name__}; legal is a Reply'
    if not isinstance(value.done, bool | np.bool_):
        return f'environment gave done {reprlib.repr(value.done)}; legal is True or False'
    reward = value.reward
    try:
        number = isinstance(reward, int | float | np.number) and not math.isinf(float(reward))
    except OverflowError:
        number = False
    if not number:
        return f'environment gave reward {reprlib.repr(reward)}; legal is a number, NaN for none'
    return None if value.done else _ids_error(value.tokens, vocab_size)


def _ids_error(value: Any, vocab_size: int) -> str | None:
    """What is wrong with token ids that an environment gave, None if nothing."""
    try:
        ids = np.asarray(value)
    except ValueError:
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        return f'environment gave {reprlib.repr(value)}; legal are token ids'
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        return f'environment gave a token outside 0 to {vocab_size - 1}'
    return None
