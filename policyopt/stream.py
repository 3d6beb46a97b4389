"""Answers on their way: groups that are asked for ahead, drawn, judged, and taken as they finish.

Generators (engines), the judge, and the trainer are three stages. Generators go on with the rows
they have when parameters change; answers are judged as they end; the trainer takes whole groups.
What is taken, and by which version each token was drawn, is a function of counts (engine calls,
tokens, takes), never of the clock, so a run can be repeated and resumed to the bit.

The bound on staleness. A group that was asked for at version u has to be taken at version u +
staleness or before. Every version takes `prompts` groups at least, the oldest whole ones, and waits
until those that it leaves behind can be taken in time: at version v, of those due at version d or
before, at most (d - v) * prompts are left. At most staleness * prompts groups are open between two
takes, so this holds at the latest when all groups are whole: nothing waits forever, and nothing is
too old.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from policyopt import staleness
from policyopt.asynchronous import AsyncConfig
from policyopt.data import Item
from policyopt.drawing import Drawn, in_steps, with_verdicts
from policyopt.generators import Generators, Held, Wanted
from policyopt.metrics import Stopwatch
from policyopt.rewards import Judge, Ledger, Page, Round
from policyopt.rewards.steps import make_case
from policyopt.rewards.verdict import STEPS
from policyopt.sampling import SamplingConfig, row_keys, stored, to_rollout
from policyopt.sampling.rows import Row
from policyopt.sampling.rules import make_rules

_EXTRA = 2**31 - 1  # folded into keys of batches that are asked for beside a take's own


@dataclasses.dataclass(eq=False)
class Group:
    """The answers to one problem.

    Attributes:
      number: counts all groups, from 0.
      version: of the policy, when it was asked for.
      batch: number of its batch of problems.
      item: the problem.
      keys: [G,...] uint32, key data of its rows.
      judging: its verdicts.
      rows: those that ended.
      ends: of the steps of rows that ended, where answers are divided.
      begun: whether a generator has it.
    """

    number: int
    version: int
    batch: int
    item: Item
    keys: np.ndarray
    judging: Round
    rows: list[Row | None]
    ends: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    begun: bool = False

    @property
    def whole(self) -> bool:
        """Whether all its rows ended."""
        return all(row is not None for row in self.rows)


class Stream:
    """Groups of answers under way, finished, and to be taken; all its state is on the host.

    Args:
      model: with a tokenizer.
      config: a `rollout.RolloutConfig`, with an engine.
      sampling: how answers are drawn.
      prompt_width: longest prompt.
      judge: of the run.
      asynchronous: see AsyncConfig.
      meshes: of the generators; None for those that share the trainer's devices.
      ledger: where verdicts are written down; None for nowhere.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        sampling: SamplingConfig,
        prompt_width: int,
        judge: Judge,
        asynchronous: AsyncConfig,
        meshes: Sequence[Mesh | None],
        ledger: Ledger | None = None,
    ):
        self._model, self._config, self._sampling = model, config, sampling
        self._judge, self._async, self._ledger = judge, asynchronous, ledger
        size = config.engine.size or prompt_width + sampling.max_new_tokens
        self._engine_config = dataclasses.replace(config.engine, size=size)
        self._make = make_case(config.steps, model.tokenizer.decode)
        even = len(meshes) > 1 or asynchronous.ahead > 0
        self._generators = Generators(model, sampling, self._engine_config, meshes, even)
        self._groups: list[Group] = []  # open ones, oldest first
        self._states: dict[int, Any] = {}  # batch -> state of the problems' source before it
        self._pages: dict[int, Page] = {}  # version -> where verdicts on its groups are
        self._next = self._batches = 0
        self._version = -1
        self._impl: Any = None
        self._taken = self._dropped = 0
        self._seen, self._busy = (0, 0), 0.0  # slots, tokens; seconds: what was told of

    @property
    def bound(self) -> int:
        """Versions that a token may be behind, at most."""
        return self._async.staleness

    @property
    def spent(self) -> tuple[int, int]:
        """Decode slots of all generators so far, and tokens drawn in them."""
        return self._generators.slots, self._generators.tokens

    # ---------------------------------------------------------------- for the trainer

    def take(
        self, params: Any, source: Iterator[list[Item]], key: Any, version: int, watch: Stopwatch
    ) -> Drawn:
        """The next `prompts` groups, in the order in which they were asked for, with verdicts.

        Args:
          params: of the policy, from now on.
          source: of problems.
          key: of this take; each batch of problems that is asked for has noise of its own.
          version: of `params`.
          watch: is told the seconds of 'sample' and 'reward'.

        Raises FutureVersion where a row is of a later version than `version`.
        """
        with watch('sample'):
            if version != self._version:
                self._version = version
                self._close([group for group in self._groups if self._due(group) < version])
                recompute, ahead = self._async.cache == 'recompute', self._async.ahead > 0
                self._generators.renew(params, version, recompute, copy=ahead)
            self._ask(source, key)
            while not (chosen := self._ready()):
                self._advance()
        self._close(chosen, taken=len(chosen))
        with watch('reward'):
            size = self._config.group_size
            verdicts = [v for group in chosen for v in group.judging.verdicts(size)]
        rows: list[Any] = [row for group in chosen for row in group.rows]
        rollout = to_rollout(rows, self._engine_config.size or 0)
        staleness.ages(rollout.version, rollout.mask, version)  # type: ignore[arg-type]
        rollout = with_verdicts(rollout, verdicts, size)
        if self._config.steps is not None:
            ends = [group.ends.get(i, []) for group in chosen for i in range(size)]
            rollout = in_steps(rollout, ends, verdicts)
        return Drawn(rollout, verdicts)

    def run_ahead(self) -> None:
        """Go on with the parameters as they are, for `ahead` calls of each engine."""
        for _ in range(self._async.ahead):
            if all(group.whole for group in self._groups):
                break
            self._advance()

    def describe(self) -> dict[str, float]:
        """Numbers for the log since the last call.

        `async/idle`: share of decode slots that drew no token; `async/dropped`: groups given up, of
        those and the ones taken; `async/waiting`, `async/running`: rows that wait to be taken, and
        those that have not ended.
        """
        slots, tokens = np.subtract(self.spent, self._seen).tolist()
        ended = sum(row is not None for group in self._groups for row in group.rows)
        found = {
            'async/idle': 1 - tokens / slots if slots else 0.0,
            'async/dropped': self._dropped / max(self._dropped + self._taken, 1),
            'async/waiting': float(ended),
            'async/running': float(len(self._groups) * self._config.group_size - ended),
        }
        self._taken = self._dropped = 0
        self._seen = self.spent
        return found

    def idle(self, seconds: float, waited: float) -> dict[str, float]:
        """Shares of a step of so many seconds in which devices of one stage alone did nothing.

        Args:
          seconds: of the step.
          waited: of them, those in which the trainer waited for `take`.
        """
        busy, self._busy = self._generators.seconds - self._busy, self._generators.seconds
        if self._async.devices is None:
            return {}
        return {
            'async/trainer_idle': waited / seconds,
            'async/generators_idle': max(1 - busy / seconds, 0.0),
        }

    # ---------------------------------------------------------------- generation

    def _ask(self, source: Iterator[list[Item]], key: Any) -> None:
        """Ask for batches of problems for as long as there is room."""
        self._impl = jax.random.key_impl(key)
        config = self._config
        for extra in range(self._async.staleness + 1):
            if len(self._groups) > self._async.staleness * config.prompts:
                return
            own = jax.random.fold_in(jax.random.fold_in(key, _EXTRA), extra) if extra else key
            self._states[self._batches] = _state_of(source)
            items = next(source)
            keys = jax.random.key_data(row_keys(own, len(items) * config.group_size))
            keys = np.asarray(keys).reshape(len(items), config.group_size, -1)
            for item, its in zip(items, keys, strict=True):
                where = (self._next, self._version, self._batches)
                self._groups.append(self._group(*where, item, its))
                self._next += 1
            self._batches += 1

    def _group(self, number: int, version: int, batch: int, item: Item, keys: np.ndarray) -> Group:
        judging = Round(self._judge, self._page(version), number)
        rows: list[Row | None] = [None] * self._config.group_size
        return Group(number, version, batch, item, keys, judging, rows)

    def _page(self, version: int) -> Page | None:
        """Where verdicts on what was asked for at a version are, until none of it can be taken."""
        if self._ledger is None:
            return None
        if version not in self._pages:
            step = version + 1
            self._pages[version] = self._ledger.page('rl', step, step + self._async.staleness)
        return self._pages[version]

    def _wanted(self) -> Wanted | None:
        """The rows of the oldest group that no generator has."""
        for group in self._groups:
            if not group.begun:
                group.begun = True
                keys = jax.random.wrap_key_data(jnp.asarray(group.keys), impl=self._impl)
                return Wanted(group, group.item.ids, keys)
        return None

    def _advance(self) -> None:
        """One call of each engine that has rows; what ended goes to the judge."""
        for _, group, member, row in self._generators.advance(self._wanted):
            self._ended(group, member, row)

    def _ended(self, group: Group, member: int, row: Row) -> None:
        group.rows[member] = row
        if row.error is not None:
            return
        case = self._make(group.item, row.tokens[row.prompt_length :].tolist())
        group.judging.add([member], [case])
        if self._config.steps is not None:
            group.ends[member] = [step.end for step in case.example.get(STEPS, ())]

    # ---------------------------------------------------------------- takes

    def _due(self, group: Group) -> int:
        """The last version that may learn from it."""
        return group.version + self._async.staleness

    def _ready(self) -> list[Group]:
        """The groups to take, [] where generation has to go on first."""
        whole = [group for group in self._groups if group.whole][: self._config.prompts]
        if len(whole) < self._config.prompts:
            return []
        if self._async.late == 'wait':
            left = [
                self._due(group) - self._version for group in self._groups if group not in whole
            ]
            for ahead in range(self._async.staleness):
                if sum(due <= ahead for due in left) > ahead * self._config.prompts:
                    return []
        return whole

    def _close(self, gone: Sequence[Group], taken: int = 0) -> None:
        """Groups that are no longer open: taken, or given up with the rows that go on."""
        if not gone:
            return
        self._generators.drop(gone)
        self._groups = [group for group in self._groups if group not in gone]
        self._taken += taken
        self._dropped += len(gone) - taken
        batches = {group.batch for group in self._groups}
        self._states = {b: state for b, state in self._states.items() if b in batches}
        versions = {group.version for group in self._groups} | {self._version}
        self._pages = {v: page for v, page in self._pages.items() if v in versions}

    # ---------------------------------------------------------------- checkpoints

    def save(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Everything that is open, as arrays and as JSON; nothing changes here."""
        place = {group: i for i, group in enumerate(self._groups)}
        rows, ended, running = [], [], []
        for i, group in enumerate(self._groups):
            for member, row in enumerate(group.rows):
                if row is not None:
                    rows.append(row)
                    ended.append([i, member])
        for number, group, member, row in self._generators.copies():
            rows.append(row)
            running.append([number, place[group], member])
        arrays, told = stored.store(rows)
        if self._groups:
            arrays['asked'] = np.stack([group.keys for group in self._groups])
        notes = {
            'version': self._version,
            'next': self._next,
            'batches': self._batches,
            'states': sorted(self._states.items()),
            'groups': [[g.number, g.version, g.batch, g.begun] for g in self._groups],
            'rows': told,
            'ended': ended,
            'running': running,
        }
        return arrays, notes

    def restore(
        self, arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any], source: Any, key: Any
    ) -> None:
        """Have what `save` returned; answers without a verdict are judged.

        Args:
          arrays, notes: as it returned them.
          source: of problems; it is left somewhere.
          key: of the kind that takes have.
        """
        self._impl = jax.random.key_impl(key)
        self._version, self._next = notes['version'], notes['next']
        self._batches = notes['batches']
        self._states, items = {}, {}
        for batch, state in notes['states']:
            source.set_state(state)
            self._states[batch], items[batch] = state, next(source)
        prompts = self._config.prompts
        for i, (number, version, batch, begun) in enumerate(notes['groups']):
            item = items[batch][number % prompts]
            self._groups.append(self._group(number, version, batch, item, arrays['asked'][i]))
            self._groups[-1].begun = begun
        static, rules = make_rules(self._model, self._sampling, 1)
        shared = dict(static=static, rules=jax.tree.map(lambda x: x[0], rules.rows))
        rows = stored.load(arrays, notes['rows'], impl=self._impl, **shared)
        for row, (i, member) in zip(rows, notes['ended'], strict=False):
            self._ended(self._groups[i], member, row)
        going = zip(notes['running'], rows[len(notes['ended']) :], strict=True)
        self._generators.resume(
            Held(number, self._groups[i], member, row) for (number, i, member), row in going
        )


def _state_of(source: Any) -> Any:
    """State of an iterator over problems; None where it has none, as in a run that is not saved."""
    return source.get_state() if hasattr(source, 'get_state') else None
