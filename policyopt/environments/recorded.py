"""Answers of environments written down, so that steps which are done again get the same ones.

What an environment says may depend on the clock, a machine or chance, as a verdict does
(`policyopt.rewards.ledger`). A recorded answer is given again to the same turns of a row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from policyopt.sampling.config import Finish
from policyopt.sampling.environments import Environment, Fault, Reply, Turn

FAULTS = (Finish.ENV_FAILED, Finish.ENV_LATE, Finish.ENV_OVERFLOW)


class Said(NamedTuple):
    """What an environment did at a turn: `crc` tells the turn's tokens from others."""

    crc: int
    tokens: tuple[int, ...]
    reward: float | None
    finish: int
    error: str | None

    @classmethod
    def of(cls, turn: Turn) -> Said:
        """Of a turn that the environment was shown."""
        reward = None if math.isnan(turn.reward) else turn.reward
        return cls(_crc(turn.tokens), turn.observation, reward, int(turn.finish), turn.error)


def said(turns: Sequence[Turn]) -> list[list[Any]]:
    """What is to be written down of a row, as JSON values; of each turn a `Said`."""
    found = [Said.of(turn) for turn in turns if turn.asked]
    return [[x.crc, list(x.tokens), x.reward, x.finish, x.error] for x in found]


class Recorded:
    """An environment that answers as recorded for as long as the turns are those of the record.

    Where they are not, the environment itself goes on, after it was shown the turns before.

    Args:
      environment: of the row, fresh.
      known: what it said before, as `said` has it.
    """

    def __init__(self, environment: Environment, known: Sequence[Sequence[Any]] = ()):
        self._environment = environment
        self._known = [Said(crc, tuple(ids), *rest) for crc, ids, *rest in known]
        self._missed: list[Any] = []  # turns that it was not shown

    def reset(self) -> Sequence[int]:
        """The environment's own."""
        return self._environment.reset()

    def step(self, tokens: Sequence[int]) -> Reply:
        """The recorded answer, or the environment's."""
        at = len(self._missed)
        if at < len(self._known) and self._known[at].crc == _crc(tokens):
            self._missed.append(tokens)
            _, ids, reward, finish, error = self._known[at]
            if finish in FAULTS:
                raise Fault(Finish(finish), error or '')
            value = math.nan if reward is None else reward
            return Reply(ids, finish == Finish.DONE, value)
        self._known.clear()
        while self._missed:
            self._environment.step(self._missed.pop(0))
        return self._environment.step(tokens)


def _crc(tokens: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())
