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
from policyopt.metrics import Stopwatch
from policyopt.rewards import Case, Round, Verdict
from policyopt.rewards.steps import make_case
from policyopt.rewards.verdict import STEPS
from policyopt.sampling import (
    Finish,
    SamplingConfig,
    pad_prompts,
    row_keys,
    sample,
    sample_continuous,
)
from policyopt.sampling.rows import Row
from policyopt.types import Rollout


class Drawn(NamedTuple):
    """Rows of a round, and what was said of each."""

    rollout: Rollout
    verdicts: list[Verdict]


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

    Args:
      model: with a tokenizer.
      config: a `rollout.RolloutConfig`.
      sampling: how answers are drawn.
      prompt_width: width that prompts are padded to.
    """
    size = prompt_width + sampling.max_new_tokens
    engine = config.engine and dataclasses.replace(config.engine, size=config.engine.size or size)
    make = make_case(config.steps, model.tokenizer.decode)

    def lock_step(add: Any, items: Sequence[Item], *arguments: Any, **kw: Any):
        part = sample(*arguments, **kw)
        error = hosts.fetch(part.finish) == Finish.ERROR
        found = zip(_answer_ids(part), items, strict=True)
        cases = [make(item, ids.tolist()) for ids, item in found]
        rows = [i for i in range(len(cases)) if not error[i]]
        add(rows, [cases[i] for i in rows])
        return part

    def slots(add: Any, items: Sequence[Item], *arguments: Any, **kw: Any):
        def ended(i: int, row: Row) -> None:
            add([i], [make(items[i], row.tokens[row.prompt_length :].tolist())])

        return sample_continuous(*arguments, engine=engine, ended=ended, **kw)

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
        parts = []
        ends: dict[int, list[int]] = {}  # of the steps of each row

        def add(start: int, rows: Sequence[int], cases: Sequence[Case]) -> None:
            judging.add([start + i for i in rows], cases)
            for i, case in zip(rows, cases, strict=True):
                ends[start + i] = [step.end for step in case.example.get(STEPS, ())]

        for start in range(0, len(repeated), size):
            chunk = repeated[start : start + size]
            prompts = pad_prompts([item.ids for item in chunk], prompt_width)
            with watch('sample'):
                part = (lock_step if engine is None else slots)(
                    functools.partial(add, start),
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
        with watch('reward'):
            verdicts = judging.verdicts(len(repeated))
        rollout = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        rollout = dataclasses.replace(
            rollout,
            group=np.repeat(np.arange(len(items), dtype=np.int32), config.group_size),
            positive=np.array([v.positive for v in verdicts]),
            rewards=np.array([v.value for v in verdicts], np.float32),
        )
        if config.steps is not None:
            rollout = in_steps(rollout, [ends.get(i, []) for i in range(len(verdicts))], verdicts)
        return Drawn(rollout, verdicts)

    return draw


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
