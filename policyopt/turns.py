"""Rows of several turns: what they need of a config, metrics, timings, and turns as text."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from policyopt import hosts
from policyopt.sampling import EngineConfig, Finish, Stats, Turn

FAULTS = {'failed': Finish.ENV_FAILED, 'late': Finish.ENV_LATE, 'overflow': Finish.ENV_OVERFLOW}
LISTED = 8  # turns that have metrics of their own


def describe(rows: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Numbers for the log, of the turns of rows; {} where none has an environment.

    `turns/mean`, `turns/max`: turns of a row. `turns/tokens`, `turns/observed`: tokens of a turn,
    and of what the environment answered. `turns/reward`: of turns that have one. `turns/done`:
    share of rows that their environment ended; `turns/failed`, `turns/late`, `turns/overflow`: that
    it failed. `turns/rows/K`: rows with a turn K; `turns/NAME/K`: the same of turn K alone, for
    faults their number.
    """
    rows = [row for row in rows if row]
    if not rows:
        return {}
    found = {
        'turns/mean': float(np.mean([len(row) for row in rows])),
        'turns/max': float(max(len(row) for row in rows)),
        'turns/done': float(np.mean([row[-1].finish == Finish.DONE for row in rows])),
    }
    found |= {f'turns/{name}': value for name, value in _of([t for r in rows for t in r]).items()}
    for name, finish in FAULTS.items():
        found[f'turns/{name}'] = float(np.mean([row[-1].finish == finish for row in rows]))
    for number in range(min(LISTED, max(len(row) for row in rows))):
        turns = [row[number] for row in rows if len(row) > number]
        found[f'turns/rows/{number + 1}'] = float(len(turns))
        found |= {f'turns/{name}/{number + 1}': value for name, value in _of(turns).items()}
        for name, finish in FAULTS.items():
            found[f'turns/{name}/{number + 1}'] = float(sum(t.finish == finish for t in turns))
    return found


def _of(turns: Sequence[Turn]) -> dict[str, float]:
    found = {'tokens': float(np.mean([len(turn.tokens) for turn in turns]))}
    answered = [len(t.observation) for t in turns if t.asked and t.finish == Finish.RUNNING]
    if answered:
        found['observed'] = float(np.mean(answered))
    rewards = [turn.reward for turn in turns if not math.isnan(turn.reward)]
    if rewards:
        found['reward'] = float(np.mean(rewards))
    return found


def row_width(rollout: Any, stop_ids: Sequence[int], task: Any) -> int:
    """Tokens of a row of a run whose task (`data.Task`) has an environment.

    Raises ValueError, naming the field, where its `rollout.RolloutConfig` or stop ids are not what
    an environment needs.
    """
    engine = rollout.engine
    if engine is None or engine.size is None:
        raise ValueError(
            'config.rollout.engine.size is missing: the task has an environment, so rows are drawn '
            'by the engine, which needs the length of the longest: prompt, turns and answers'
        )
    if rollout.steps is not None:
        raise ValueError(
            'config.rollout.steps divides answers, but the task has an environment, whose turns '
            'are the segments of a row; legal is None'
        )
    if hosts.several():
        raise ValueError(
            'the task has an environment, which answers each process at another time; legal is one '
            'process, without --multihost'
        )
    missing = [i for i in task.stops if i not in stop_ids]
    if missing:
        raise ValueError(
            f'config.sampling.stop_ids is {tuple(stop_ids)}, without ids that end turns of the '
            f"task's environment: {missing}"
        )
    if engine.size <= task.prompt_width:
        raise ValueError(
            f'config.rollout.engine.size is {engine.size}; legal is above the longest prompt, '
            f'{task.prompt_width} tokens'
        )
    return engine.size


def with_slots(engine: EngineConfig, slots: int) -> EngineConfig:
    """An engine with other slots, whose rows do not depend on each other."""
    least = {n: min(getattr(engine, n) or slots, slots) for n in ('refill', 'prefill_rows')}
    return dataclasses.replace(engine, slots=slots, min_slots=None, **least)


def answered(item: Any, row: Any, decode: Callable[[Any], str]) -> Any:
    """A problem as a reward sees it: for a row with an environment, what came before its last turn.

    Its prompt is then the row up to there, and `entry['environment']` has `reward`, the sum of
    those of the turns (None without any), and `turns`, how many there are.

    Args:
      item: a `data.Item`.
      row: a `sampling.rows.Row` that ended.
      decode: ids to text.
    """
    if row.environment is None:
        return item
    total = None if math.isnan(row.reward) else float(row.reward)
    entry = {**item.entry, 'environment': {'reward': total, 'turns': len(row.turns)}}
    ids = tuple(row.tokens[: row.turn_start].tolist())
    return dataclasses.replace(item, prompt=decode(ids), ids=ids, entry=entry)


class Remarks:
    """Says of each kind of fault once, on stderr, what it was; metrics count them all."""

    def __init__(self):
        self._said: set[str] = set()

    def __call__(self, rows: Sequence[Sequence[Turn]]) -> None:
        """Look at the turns of a round."""
        for name, finish in FAULTS.items():
            bad = [row[-1].error for row in rows if row and row[-1].finish == finish]
            if bad and name not in self._said:
                self._said.add(name)
                print(
                    f'the environments of {len(bad)} of {len(rows)} rows failed ({bad[0]}); metric '
                    f'turns/{name} goes on counting',
                    file=sys.stderr,
                    flush=True,
                )


def timings(rows: Sequence[Sequence[Turn]], stats: Sequence[Stats]) -> dict[str, float]:
    """What depends on the clock: how busy slots were, and how long environments took.

    `slot_use`: share of decode slots that drew a token; `slots_waiting`: share held by rows that
    waited for their environment. `turn_seconds`, `turn_seconds/K`: mean time of an environment, of
    all turns and of turn K; `turn_seconds_longest`.
    """
    if not any(rows):
        return {}
    slots = max(sum(s.decode_slots for s in stats), 1)
    found = {
        'slot_use': sum(s.decode_tokens for s in stats) / slots,
        'slots_waiting': sum(s.waiting_slots for s in stats) / slots,
        'parked': float(sum(s.parked for s in stats)),
    }
    seconds = [[turn.seconds for turn in row if turn.asked] for row in rows]
    every = [x for row in seconds for x in row]
    if every:
        found |= {'turn_seconds': float(np.mean(every)), 'turn_seconds_longest': max(every)}
    for number in range(min(LISTED, max(map(len, seconds)))):
        its = [row[number] for row in seconds if len(row) > number]
        found[f'turn_seconds/{number + 1}'] = float(np.mean(its))
    return found


def spelled(turns: Sequence[Turn], tokenizer: Any) -> list[dict[str, Any]]:
    """Turns as they read, for files: drawn, answered, reward, and why the row ended."""
    found = []
    for turn in turns:
        line: dict[str, Any] = {'turn': tokenizer.decode(turn.tokens)}
        if turn.asked and turn.finish == Finish.RUNNING:
            line['observation'] = tokenizer.decode(turn.observation)
        if not math.isnan(turn.reward):
            line['reward'] = turn.reward
        if turn.finish != Finish.RUNNING:
            line['finish'] = Finish(turn.finish).name.lower()
        if turn.error is not None:
            line['error'] = turn.error
        found.append(line)
    return found
