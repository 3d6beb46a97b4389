"""Answers in steps, and rewards of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from policyopt import checks
from policyopt.rewards.combine import added, in_part
from policyopt.rewards.verdict import SCORES, STEPS, Case, Reward, Step, Verdict
from policyopt.rewards.verdict import judged as run

TOTALS = ('sum', 'mean', 'min', 'last')


@dataclasses.dataclass(frozen=True)
class StepsConfig:
    r"""Where a step of an answer ends.

    Attributes:
      marker: text that ends a step, as '\n' or '\n\n'; None for none.
      tokens: ids that end one.
    """

    marker: str | None = '\n'
    tokens: tuple[int, ...] = ()

    def __post_init__(self):
        if self.marker is not None and not self.marker:
            raise ValueError('steps.marker is empty; legal is a text, or None with steps.tokens')
        if self.marker is None and not self.tokens:
            raise ValueError('steps has neither marker nor tokens; legal is one of them, or both')


Decode = Callable[[Iterable[int]], str]


def make_case(config: StepsConfig | None, decode: Decode) -> Callable[[Any, Sequence[int]], Case]:
    """Build case(item, ids) -> Case of an answer, divided into steps where the run does that.

    Args:
      config: what ends a step; None for answers as a whole.
      decode: ids to text, special tokens to nothing.
    """

    @functools.lru_cache(maxsize=1 << 16)
    def piece(i: int) -> str:
        return decode([i])

    def case(item: Any, ids: Sequence[int]) -> Case:
        example = item.entry
        if config is not None:
            example = {**example, STEPS: divide(config, ids, decode, piece)}
        return Case(decode(ids), ids, example, item.prompt, item.ids)

    return case


def divide(
    config: StepsConfig,
    ids: Sequence[int],
    decode: Decode,
    piece: Callable[[int], str] | None = None,
) -> list[Step]:
    """The steps of an answer; together they have all of its tokens.

    A marker is looked for in the texts of the single tokens, one after another, so that it may
    begin in one and end in another; the step ends with the token that completes it. Markers in a
    row end one step. What follows the last marker is a step of its own where it has text beside
    white space; else it belongs to the step before.

    Args:
      config: what ends a step.
      ids: of the answer.
      decode: ids to text, special tokens to nothing.
      piece: the same of a single id, for callers that remember it.
    """
    piece = piece or (lambda i: decode([i]))
    ends = sorted(
        {at for at, i in enumerate(ids) if i in config.tokens}
        | _marked(config.marker, [piece(i) for i in ids])
    )
    found: list[Step] = []
    for end in dict.fromkeys((*ends, len(ids) - 1) if len(ids) else ()):
        start = found[-1].end + 1 if found else 0
        text = decode(ids[start : end + 1])
        if found and not text.strip():
            start = found[-2].end + 1 if found[1:] else 0
            found[-1] = Step(decode(ids[start : end + 1]), end)
        else:
            found.append(Step(text, end))
    return found


def _marked(marker: str | None, pieces: Sequence[str]) -> set[int]:
    """Numbers of the tokens in which a marker ends, from the texts of all."""
    if marker is None:
        return set()
    text, stops = ''.join(pieces), list(itertools.accumulate(map(len, pieces)))
    found, token, at = set(), 0, text.find(marker)
    while at >= 0:
        stop = at + len(marker)
        while stops[token] < stop:
            token += 1
        found.add(token)
        at = text.find(marker, stop)
    return found


def steps_of(example: Mapping[str, Any], reward: str) -> list[Step]:
    """The steps of an answer, from its example; ValueError where the run has none."""
    if STEPS not in example:
        raise ValueError(f'{reward} is of steps, but answers are not divided: set rollout.steps')
    return [Step(*step) for step in example[STEPS]]


def total_of(values: Sequence[float], how: str) -> float:
    """Sum, mean, least or last of the rewards of steps, those without one (NaN) left out."""
    there = [value for value in values if not math.isnan(value)]
    if not there:
        return math.nan
    if how == 'last':
        return there[-1]
    return {'sum': added(there), 'mean': added(there) / len(there), 'min': min(there)}[how]


@checks.factory('reward')
def by_step(
    step: Reward,
    outcome: Reward | None = None,
    total: Literal['sum', 'mean', 'min', 'last'] = 'sum',
) -> Reward:
    """Rewards of an answer's steps, by a reward that judges each as an answer of its own.

    For runs that divide answers (`rollout.steps`). `step` gets a step's text and tokens, and
    `example['before']`, the text before it. What it has no value for (NaN) has none; where it
    fails, the whole answer has none. With algorithms that read the rewards of steps
    (`advantages.process_rewards`, `advantages.gae(segment_weight=...)`).

    Args:
      step: judges a step.
      outcome: judges the answer as a whole, which is then the verdict's value, reason and say on
        whether it is right; None for the `total` of the steps, without a say.
      total: of the steps' rewards, without an `outcome`.
    """
    checks.one_of('total', total, TOTALS)

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        values: list[float] = []
        before, start = '', 0
        problem = {k: v for k, v in example.items() if k not in (STEPS, SCORES)}
        for number, (part, end) in enumerate(steps_of(example, 'by_step')):
            case = Case(part, tokens[start : end + 1], {**problem, 'before': before})
            verdict = run(step, case)
            if verdict.failed:
                return in_part(f'step {number}', verdict)
            values.append(verdict.value)
            before, start = before + part, end + 1
        if outcome is None:
            return Verdict(total_of(values, total), 'stepped', steps=tuple(values))
        found = run(outcome, Case(text, tokens, example))
        return found._replace(steps=tuple(values))

    return reward
