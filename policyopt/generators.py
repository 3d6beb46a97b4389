"""Engines that draw the answers of a stream: on devices of their own, or on the trainer's."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from policyopt import sharding
from policyopt.sampling import Engine, EngineConfig, SamplingConfig
from policyopt.sampling.rows import Row


class Wanted(NamedTuple):
    """Rows to draw: whose they are, their prompt, and a key for each."""

    owner: Hashable
    prompt: Sequence[int]
    keys: Any


class Held(NamedTuple):
    """A row that a generator has, or had: which one, whose it is, its number among the owner's."""

    generator: int
    owner: Any
    member: int
    row: Row


@dataclasses.dataclass(eq=False)
class _Generator:
    """An engine, where it runs, its parameters, and whose rows it has: id -> owner and number."""

    engine: Engine
    mesh: Mesh | None
    params: Any = None
    rows: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)


class Generators:
    """Some engines that draw from one queue, in a fixed order of calls.

    Engines with devices of their own are called in threads, and all awaited: what comes out is the
    same as without.

    Attributes:
      slots: decode slots so far of all engines, each for the steps of the slowest in its call.
      tokens: drawn in them.
      seconds: spent in calls.

    Args:
      model, sampling, engine: as of an Engine.
      meshes: of each; None for one on the trainer's devices.
      even: whether calls are of `engine.steps` tokens even where a row waits for a slot that is
        free, so that those who wait for each other take equally long.
    """

    def __init__(
        self,
        model: Any,
        sampling: SamplingConfig,
        engine: EngineConfig,
        meshes: Sequence[Mesh | None],
        even: bool,
    ):
        self.slots = self.tokens = 0
        self.seconds = 0.0
        self._model, self._even = model, even
        # Some wait for the first free slot, if that ends a call.
        self._room = engine.slots + (0 if even else engine.refill)
        self._all: list[_Generator] = []
        for mesh in meshes:
            with sharding.use(mesh):
                self._all.append(_Generator(Engine(model, sampling, engine), mesh))
        self._version = 0
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        if len(meshes) > 1 and meshes[0] is not None:
            self._pool = concurrent.futures.ThreadPoolExecutor(len(meshes), 'generator')

    def renew(self, params: Any, version: int, recompute: bool, copy: bool) -> None:
        """Go on with these parameters.

        Args:
          params: of the trainer, which gives them to its next update.
          version: of these.
          recompute: make the caches of rows under way anew.
          copy: keep them for use during that update.
        """
        self._version = version
        shared = params  # by all on the trainer's devices
        if copy and any(one.mesh is None for one in self._all):
            shared = jax.tree.map(jnp.copy, params)
        for one in self._all:
            one.params = shared if one.mesh is None else self._placed(params, one.mesh)
            if recompute:
                with sharding.use(one.mesh):
                    one.engine.resume(one.engine.abort())

    def _placed(self, params: Any, mesh: Mesh) -> Any:
        axes, shapes = self._model.axes(), self._model.shapes()
        placed = sharding.param_shardings(axes, shapes, mesh, self._model.rules)
        return jax.device_put(params, placed)

    def advance(self, ask: Callable[[], Wanted | None]) -> list[Held]:
        """One call of each engine that has rows; returns those that ended, in order of engines.

        Args:
          ask: gives the next rows to draw, None where there are none. The engine with the fewest
            rows takes them, while it has free slots, or `refill` rows at most wait for one.
        """
        began = time.monotonic()
        while (one := self._freest()) and (wanted := ask()):
            with sharding.use(one.mesh):
                prompts = [list(wanted.prompt)] * len(wanted.keys)
                for member, id_ in enumerate(one.engine.submit(prompts, wanted.keys)):
                    one.rows[id_] = (wanted.owner, member)
        before = self._spent()
        run = map if self._pool is None else self._pool.map
        ended = list(run(self._step, self._all))
        spent = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, self._spent(), strict=True)]
        self.slots += max(slots for slots, _ in spent) * len(spent)
        self.tokens += sum(tokens for _, tokens in spent)
        self.seconds += time.monotonic() - began
        return [
            Held(number, *self._all[number].rows.pop(row.id), row)
            for number, rows in enumerate(ended)
            for row in rows
        ]

    def _freest(self) -> _Generator | None:
        """The first of those with the fewest rows, unless it has enough."""
        one = min(self._all, key=lambda one: one.engine.load)
        return one if one.engine.load < self._room else None

    def _spent(self) -> list[tuple[int, int]]:
        stats = [one.engine.stats for one in self._all]
        return [(s.decode_slots, s.decode_tokens) for s in stats]

    def _step(self, one: _Generator) -> list[Row]:
        if not one.engine.busy:
            return []
        with sharding.use(one.mesh):
            return one.engine.step(one.params, self._version, self._even)

    def drop(self, owners: Collection[Any]) -> None:
        """Forget the rows of these owners."""
        for one in self._all:
            ids = {id_ for id_, (owner, _) in one.rows.items() if owner in owners}
            one.engine.drop(ids)
            one.rows = {id_: its for id_, its in one.rows.items() if id_ not in ids}

    def copies(self) -> list[Held]:
        """Copies of the rows that have not ended; all go on."""
        return [
            Held(number, *one.rows[row.id], row)
            for number, one in enumerate(self._all)
            for row in one.engine.copies()
        ]

    def resume(self, held: Iterable[Held]) -> None:
        """Go on with rows that `copies` returned."""
        going: list[list[Row]] = [[] for _ in self._all]
        for number, owner, member, row in held:
            going[number].append(row)
            self._all[number].rows[row.id] = (owner, member)
        for one, rows in zip(self._all, going, strict=True):
            with sharding.use(one.mesh):
                one.engine.resume(rows)
