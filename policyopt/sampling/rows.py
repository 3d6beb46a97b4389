"""Records of the engine's rows on the host: numpy arrays by slot, and a row outside a slot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from policyopt.sampling.config import Finish


@dataclasses.dataclass(eq=False)
class Row:
    """One row on its way through an engine; the host's to change.

    Attributes:
      id: as `Engine.submit` gave it.
      key: key data of the row's key.
      rules: RowRules of this row, scalars and rows in place of columns.
      environment: None without one.
      data: name -> array [length,...] of everything recorded, None while the row is in a slot;
        the names are those of `Buffers.FILL`, the values None where the model or config has none.
      length: tokens in the row.
      prompt_length: of them in the prompt.
      drawn: of them drawn.
      last: the last token; not in the cache while the row decodes.
      segment: the id of the segment that is being written; 0 is the prompt.
      turn_start: place of the turn's first token.
      new_turn: the next token drawn begins a turn.
      thinking: its environment has the turn.
      since: when it got it, by time.monotonic().
      observation: what the environment answered and is not fed yet.
      turns: those that are over, and what the environment did.
      place: of its cache, while the row is parked.
      state: of the constraint, where the row is out of a slot.
      reward: sum of the environment's rewards, NaN where it gave none.
      finish, error: how it ended, and what was wrong.
      static, impl: what it was sampled with.
    """

    id: int
    key: np.ndarray
    rules: Any
    environment: Any = None
    data: dict[str, np.ndarray | None] | None = None
    length: int = 0
    prompt_length: int = 0
    drawn: int = 0
    last: int = 0
    segment: int = 0
    turn_start: int = 0
    new_turn: bool = True
    thinking: bool = False
    since: float = 0.0
    observation: Any = None
    turns: list[Any] = dataclasses.field(default_factory=list)
    place: int | None = None
    state: Any = None
    reward: float = math.nan
    finish: int = Finish.RUNNING
    error: str | None = None
    static: Any = None
    impl: Any = None

    def start(self, prompt: Sequence[int], size: int | None, config: Any) -> None:
        """Make the record of a row that holds its prompt alone."""
        buffers = Buffers.make(1, len(prompt), size, config)
        buffers.tokens[0] = prompt
        self.data = buffers.copy(0, len(prompt))
        self.length = self.prompt_length = len(prompt)
        self.last = int(prompt[-1]) if len(prompt) else 0

    @property
    def tokens(self) -> np.ndarray:
        """Tokens [length] of a row outside a slot."""
        assert self.data is not None and self.data['tokens'] is not None
        return self.data['tokens']

    def fed_routing(self) -> int:
        """Tokens, from the first on, whose routing is recorded; outside a slot."""
        assert self.data is not None
        routing = self.data['routing']
        if routing is None or not routing.size:
            return 0
        return int(np.sum(np.all(routing >= 0, axis=(1, 2))))

    def prefix_key(self) -> tuple:
        """Rows outside slots with equal keys have the same tokens and may share a prefill."""
        own = self.id if self.drawn else None  # a resumed row replays its own routing
        return own, self.tokens.tobytes()


@dataclasses.dataclass
class Buffers:
    """Records of the rows in slots, [N,S,...] each; what they hold is described in Rollout."""

    FILL: ClassVar[dict[str, float]] = dict(
        tokens=0,
        mask=0,
        logp_behavior=0,
        logp_full=0,
        version=-1,
        segment=0,
        segment_rewards=math.nan,
        support=-1,
        routing=-1,
    )

    tokens: np.ndarray
    mask: np.ndarray
    logp_behavior: np.ndarray
    logp_full: np.ndarray
    version: np.ndarray
    segment: np.ndarray
    segment_rewards: np.ndarray
    support: np.ndarray | None
    routing: np.ndarray | None

    @classmethod
    def make(cls, slots: int, size: int, kept: int | None, config: Any) -> Buffers:
        """Empty records; `config` is the model's."""
        integers = ('tokens', 'version', 'segment', 'support')
        shapes: dict[str, Any] = dict.fromkeys(cls.FILL, ())
        shapes['support'] = None if kept is None else (kept,)
        shapes['routing'] = None
        dtype: Any = np.int32
        if getattr(config, 'moe', None) is not None:
            shapes['routing'] = (config.kinds.count('moe'), config.moe.top_k)
            dtype = np.int8 if config.moe.experts <= 128 else np.int16
        dtypes = {name: np.int32 if name in integers else np.float32 for name in shapes}
        dtypes['routing'] = dtype
        arrays: dict[str, Any] = {
            name: np.full((slots, size, *shape), cls.FILL[name], dtypes[name])
            for name, shape in shapes.items()
            if shape is not None
        }
        return cls(**{'support': None, 'routing': None, **arrays})

    def copy(self, slot: int, length: int) -> dict[str, np.ndarray | None]:
        """The first `length` entries of a slot, by name."""
        arrays = {name: getattr(self, name) for name in self.FILL}
        return {n: None if x is None else x[slot, :length].copy() for n, x in arrays.items()}

    def load(self, slot: int, data: dict[str, np.ndarray | None]) -> None:
        """Clear a slot and put a row's record into it."""
        for name, fill in self.FILL.items():
            into, new = getattr(self, name), data[name]
            if into is not None and new is not None:
                into[slot] = fill
                into[slot, : len(new)] = new

    def put(self, slot: int, place: int, draw: Any, at: int, version: int, segment: int) -> None:
        """One drawn token: entry `at` of a draw."""
        self.tokens[slot, place] = draw.token[at]
        self.mask[slot, place] = 1
        self.logp_behavior[slot, place] = draw.logp[at]
        self.logp_full[slot, place] = draw.logp_full[at]
        self.version[slot, place] = version
        self.segment[slot, place] = segment
        if self.support is not None:
            self.support[slot, place] = draw.support[at]

    def observe(self, slot: int, place: int, tokens: np.ndarray, segment: int) -> None:
        """Tokens that the policy did not choose."""
        self.tokens[slot, place : place + len(tokens)] = tokens
        self.segment[slot, place : place + len(tokens)] = segment

    def write(
        self, records: Any, slots: np.ndarray, rows: Sequence[Row | None], version: int
    ) -> None:
        """What decode steps recorded: column i belongs to slots[i], whose row is rows[slots[i]]."""
        length = np.array([0 if row is None else row.length for row in rows])
        segment = np.array([0 if row is None else row.segment for row in rows], np.int32)
        step, i = np.nonzero(records.drew)
        slot = slots[i]
        at = (slot, length[slot] + step)
        self.tokens[at] = records.token[step, i]
        self.mask[at] = 1
        self.logp_behavior[at] = records.logp[step, i]
        self.logp_full[at] = records.logp_full[step, i]
        self.version[at] = version
        self.segment[at] = segment[slot]
        if self.support is not None:
            self.support[at] = records.support[step, i]
        if self.routing is not None:
            step, i = np.nonzero(records.fed)
            slot = slots[i]
            # The token fed is the one before the token drawn.
            self.routing[slot, length[slot] + step - 1] = records.routing[step, i]


def stack_rows(rows: Sequence[Any]) -> Any:
    """Pytrees of equal structure as one with a leading axis, in numpy."""
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def empty_rules(rules: Any, slots: int) -> Any:
    """Rules for free slots, harmless ones, to be written into."""
    return jax.tree.map(lambda x: np.ones((slots, *x.shape[1:]), x.dtype), rules)


def check_alike(mine: Any, theirs: Any, static: Any, other: Any) -> None:
    """Raise ValueError where rows ask for other fields than those in the slots."""

    def shapes(tree: Any) -> Any:
        return jax.tree.structure(tree), [jnp.shape(x)[1:] for x in jax.tree.leaves(tree)]

    if shapes(mine) != shapes(theirs) or static != other:
        raise ValueError(
            'these rows set other fields of PerRow than the first rows of this engine, or another '
            f'constraint: {other} and {shapes(theirs)[1]}, not {static} and {shapes(mine)[1]}. '
            'Submit them with the same fields, or to another engine'
        )
