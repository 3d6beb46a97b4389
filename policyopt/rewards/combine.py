"""Rewards from a task's scorer, and from other rewards: weighted sums and gates."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policyopt import checks
from policyopt.rewards.verdict import FAULTS, NONSENSE, Case, Part, Reward, Score, Verdict, fault
from policyopt.rewards.verdict import judged as run


@checks.factory('reward')
def graded(score: Score, full: float = 1.0, right: float = 1.0, wrong: float = 0.0) -> Reward:
    """`right` where `score(text, example) >= full`, `wrong` elsewhere.

    Partial marks count as wrong: some scorers give a little to any text, or to a text that merely
    contains the answer. A scorer that gives anything but a finite number leaves the row without a
    reward, which is not the same as a wrong answer.

    Args:
      score: (answer, example) -> mark; in a config, the task's own where it is left out.
      full: the mark that counts as right.
      right, wrong: rewards.
    """
    check_values(right, wrong)

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        mark = score(text, example)
        if not isinstance(mark, numbers.Real | np.bool_) or not math.isfinite(mark):
            return fault(NONSENSE, f'the scorer gave {reprlib.repr(mark)}')
        return marked(mark >= full, right, wrong)

    return reward


def marked(ok: Any, right: float, wrong: float) -> Verdict:
    """The verdict on an answer that is right or wrong."""
    return Verdict(right, 'right', True) if ok else Verdict(wrong, 'wrong', False)


def check_values(right: float, wrong: float) -> None:
    """Raise where the reward of a right answer is not above that of a wrong one."""
    checks.number('right', right)
    checks.number('wrong', wrong)
    if not right > wrong:
        raise ValueError(f'right is {right}; legal is above wrong, {wrong}')


@checks.factory('reward')
def weighted_sum(parts: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """sum_k weights[k] * parts[k], each with its reason kept as `Verdict.parts`.

    A part that is a sum itself hands on its own parts, weighted; rewards of steps add up in the
    same way, over the parts that have some. The answer is right where every
    part that has a say calls it right. A part without a value (NaN) leaves the row without a
    reward, for the part's reason.

    Args:
      parts: rewards by name, judged in this order.
      weights: of each of them; may be negative.
    """
    if not parts:
        raise ValueError('parts is empty; legal is one reward or more')
    for name in {*parts, *weights}:
        if name not in parts or name not in weights:
            missing, others = ('parts', weights) if name not in parts else ('weights', parts)
            raise ValueError(f'{missing} has no `{name}`; names are {", ".join(others)}')
        checks.number(f'weights[{name!r}]', weights[name])

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        found: list[Part] = []
        rights: list[bool] = []
        steps: list[tuple[float, ...]] = []
        for name, part in parts.items():
            verdict = run(part, Case(text, tokens, example))
            if math.isnan(verdict.value):
                return in_part(name, verdict)
            own = verdict.parts or (Part(name, verdict.value, verdict.reason),)
            found += [part._replace(value=weights[name] * part.value) for part in own]
            rights += [] if verdict.right is None else [verdict.right]
            if verdict.steps:
                steps.append(tuple(weights[name] * step for step in verdict.steps))
        reason = ', '.join(f'{part.name} {part.reason}' for part in found)
        value = math.fsum(part.value for part in found)
        total = tuple(map(added, zip(*steps, strict=True)))
        return Verdict(value, reason, all(rights) if rights else None, tuple(found), total)

    return reward


def added(values: Sequence[float]) -> float:
    """Sum of those that are there; NaN where none is."""
    there = [value for value in values if not math.isnan(value)]
    return math.fsum(there) if there else math.nan


def in_part(name: str, verdict: Verdict) -> Verdict:
    """A part's verdict without a value, for the whole."""
    kind, _, detail = verdict.reason.partition(':')
    if kind not in FAULTS:
        return Verdict(math.nan, f'{verdict.kind}: in {name}')
    return fault(kind, f'in {name}{": " if detail else ""}{detail.strip()}')


@checks.factory('reward')
def all_of(parts: Mapping[str, Reward]) -> Reward:
    """1 where every part's value is above 0, for the last one's reason; else 0, for the first's.

    Args:
      parts: rewards by name, judged in this order until one fails.
    """
    if not parts:
        raise ValueError('parts is empty; legal is one reward or more')

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        verdict = Verdict(1.0)
        for name, part in parts.items():
            verdict = run(part, Case(text, tokens, example))
            if math.isnan(verdict.value):
                return in_part(name, verdict)
            if verdict.value <= 0:
                return Verdict(0.0, verdict.reason)
        return Verdict(1.0, verdict.reason)

    return reward


@checks.factory('reward')
def gated(gate: Reward, reward: Reward, otherwise: float = 0.0) -> Reward:
    """`reward` where the gate's value is above 0; else `otherwise`, wrong, for the gate's reason.

    What a gate stops is not judged further, as where an answer in the wrong form earns nothing.

    Args:
      gate, reward: rewards.
      otherwise: value of what the gate stops.
    """
    checks.number('otherwise', otherwise)

    def judge(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        verdict = run(gate, Case(text, tokens, example))
        if math.isnan(verdict.value):
            return in_part('gate', verdict)
        if verdict.value > 0:
            return run(reward, Case(text, tokens, example))
        return Verdict(otherwise, verdict.reason, False)

    return judge


@checks.factory('reward')
def audited(reward: Reward, truth: Reward) -> Reward:
    """`reward`, with what `truth` says of the answer written down beside it.

    Its value is the reward's alone; whether the answer is right is for the truth to say. The parts
    are `proxy` and `truth`, their values, and `gap`, proxy - truth: where it grows while the truth
    falls, the policy has learnt what the reward rewards and not what it stands for
    (over-optimisation, 2210.10760).

    Args:
      reward: what is trained on, such as `reward_model`.
      truth: what it stands for, such as `graded`; where it is on another scale, the growth of the
        gap tells something, and its value does not.
    """

    def judge(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        found = run(reward, Case(text, tokens, example))
        true = run(truth, Case(text, tokens, example))
        for name, verdict in (('proxy', found), ('truth', true)):
            if math.isnan(verdict.value):
                return in_part(name, verdict)
        parts = (
            Part('proxy', found.value, found.reason),
            Part('truth', true.value, true.reason),
            Part('gap', found.value - true.value, ''),
        )
        return Verdict(found.value, found.reason, true.positive, parts, found.steps)

    return judge
