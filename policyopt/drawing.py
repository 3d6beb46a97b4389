"""Answers to problems, group by group, each judged while others are drawn."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyopt import credit, hosts
from policyopt.data import Item
from policyopt.environments import Recorded, said
from policyopt.metrics import Stopwatch
from policyopt.rewards import Case, Round, Verdict
from policyopt.rewards.steps import make_case
from policyopt.rewards.verdict import STEPS
from policyopt.sampling import (
    Finish,
    SamplingConfig,
    Stats,
    Turn,
    pad_prompts,
    row_keys,
    sample,
    sample_continuous,
)
from policyopt.sampling.rows import Row
from policyopt.turns import answered
from policyopt.types import Rollout


class Drawn(NamedTuple):
    """Rows of a round, what was said of each, and what happened on the way.

    Attributes:
      rollout: the rows.
      verdicts: on each of them.
      turns: of each row; None where no row has an environment.
      stats: of each engine that drew.
    """

    rollout: Rollout
    verdicts: list[Verdict]
    turns: list[list[Turn]] | None = None
    stats: tuple[Stats, ...] = ()


def answers_of(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Text of each row's answer: its tokens from `prompt_length` to `length`."""
    return [tokenizer.decode(ids) for ids in _answer_ids(rollout)]


def _answer_ids(rollout: Rollout) -> list[np.ndarray]:
    tokens, start, stop = hosts.fetch((rollout.tokens, rollout.prompt_length, rollout.length))
    return [t[a:b] for t, a, b in zip(tokens, start, stop, strict=True)]


def make_draw(
    model: Any, config: Any, sampling: SamplingConfig, prompt_width: int
) -> Callable[..., Drawn]:
    """Build draw(params, judging, items, key, version, watch): answers, judged by a Round.

    The rows of a group follow each other; each row's noise depends on `key` and its number alone.
    Answers are judged while others are drawn: as they end, by the engine, else chunk by chunk. Rows
    that the reward fails on have none (NaN), nor do those whose logits are not finite numbers: they
    finish as ERROR, with what they drew before, and are not judged. Where answers are divided into
    steps (`config.steps`), `segment` and `segment_rewards` are theirs.

    Items with an environment are drawn in turns, by the engine. Their answer is the last turn; what
    the environment gave for turns is in `segment_rewards`. A row whose environment failed is not
    judged, and finishes as ENV_FAILED, ENV_LATE or ENV_OVERFLOW. What environments say is written
    down with the verdicts, and said again where a step is done again.

    Args:
      model: with a tokenizer.
      config: a `rollout.RolloutConfig`.
      sampling: how answers are drawn.
      prompt_width: width that prompts are padded to.
    """
    size = prompt_width + sampling.max_new_tokens
    engine = config.engine and dataclasses.replace(config.engine, size=config.engine.size or size)
    make = make_case(config.steps, model.tokenizer.decode)

    def lock_step(
        add: Any, judging: Round, first: int, items: Sequence[Item], *arguments: Any, **kw: Any
    ):
        del judging, first
        part = sample(*arguments, **kw)
        error = hosts.fetch(part.finish) == Finish.ERROR
        found = zip(_answer_ids(part), items, strict=True)
        cases = [make(item, ids.tolist()) for ids, item in found]
        rows = [i for i in range(len(cases)) if not error[i]]
        add(rows, [cases[i] for i in rows])
        return part, None, []

    def slots(
        add: Any, judging: Round, first: int, items: Sequence[Item], *arguments: Any, **kw: Any
    ):
        def ended(i: int, row: Row) -> None:
            rows[i] = row
            if row.error is None:
                start = row.prompt_length if row.environment is None else row.turn_start
                item = answered(items[i], row, model.tokenizer.decode)
                add([i], [make(item, row.tokens[start:].tolist())])

        rows: dict[int, Row] = {}
        stats: list[Stats] = []
        worlds = None
        if any(item.play for item in items):
            worlds = [
                item.play and Recorded(item.play.environment(item.entry), judging.heard(first + i))
                for i, item in enumerate(items)
            ]
        part = sample_continuous(
            *arguments, engine=engine, environments=worlds, ended=ended, done=stats.append, **kw
        )
        if worlds is None:
            return part, None, stats
        turns = [rows[i].turns for i in range(len(items))]
        for i, its in enumerate(turns):
            judging.hear(first + i, said(its))
        return part, turns, stats

    def draw(
        params: Any,
        judging: Round,
        items: Sequence[Item],
        key: Any,
        version: int,
        watch: Stopwatch,
    ) -> Drawn:
        repeated = [item for item in items for _ in range(config.group_size)]
        keys = row_keys(key, len(repeated))
        size = len(repeated) // config.chunks
        parts, turns, stats = [], [], []
        ends: dict[int, list[int]] = {}  # of the steps of each row

        def add(start: int, rows: Sequence[int], cases: Sequence[Case]) -> None:
            judging.add([start + i for i in rows], cases)
            if config.steps is None:
                return
            for i, case in zip(rows, cases, strict=True):
                ends[start + i] = [step.end for step in case.example.get(STEPS, ())]

        for start in range(0, len(repeated), size):
            chunk = repeated[start : start + size]
            prompts = pad_prompts([item.ids for item in chunk], prompt_width)
            with watch('sample'):
                part, its, counts = (lock_step if engine is None else slots)(
                    functools.partial(add, start),
                    judging,
                    start,
                    chunk,
                    model,
                    params,
                    prompts,
                    keys[start : start + size],
                    sampling,
                    version=version,
                    on_error='record',
                )
            parts.append(part)
            stats += counts
            turns += its or [[] for _ in chunk]
        with watch('reward'):
            verdicts = judging.verdicts(len(repeated))
        played = any(item.play for item in items)
        if played:
            parts = [_with_segment_rewards(part) for part in parts]
        rollout = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        rollout = with_verdicts(rollout, verdicts, config.group_size)
        if config.steps is not None:
            rollout = in_steps(rollout, [ends.get(i, []) for i in range(len(verdicts))], verdicts)
        return Drawn(rollout, verdicts, turns if played else None, tuple(stats))

    return draw


def with_verdicts(rollout: Rollout, verdicts: Sequence[Verdict], group_size: int) -> Rollout:
    """Rows of groups that follow each other, with what was said of each."""
    groups = len(verdicts) // group_size
    return dataclasses.replace(
        rollout,
        group=np.repeat(np.arange(groups, dtype=np.int32), group_size),
        positive=np.array([v.positive for v in verdicts]),
        rewards=np.array([v.value for v in verdicts], np.float32),
    )


def in_steps(
    rollout: Rollout, ends: Sequence[Sequence[int]], verdicts: Sequence[Verdict]
) -> Rollout:
    """A rollout of answers divided into steps, with their rewards at their ends.

    Where a verdict has no rewards of steps, the last one has the answer's.

    Args:
      rollout: with `rewards`, and no segments.
      ends: of each row, number of each step's last token in the answer.
      verdicts: on each row.
    """
    width, start = rollout.tokens.shape[1], hosts.fetch(rollout.prompt_length).tolist()
    values = [
        v.steps or [math.nan] * (len(row) - 1) + [v.value] * bool(row)
        for v, row in zip(verdicts, ends, strict=True)
    ]
    return dataclasses.replace(
        rollout,
        segment=credit.numbered(ends, start, width),
        segment_rewards=credit.spread(ends, values, start, width),
    )


def _with_segment_rewards(part: Rollout) -> Rollout:
    """The same with rewards of turns, none, where there are none."""
    if part.segment_rewards is not None:
        return part
    none = jnp.full(part.tokens.shape, jnp.nan, jnp.float32)
    return dataclasses.replace(part, segment_rewards=none, rewards=none[:, 0])
