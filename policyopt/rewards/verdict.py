"""What a reward is, what it says of an answer, and what becomes of one that fails."""

from __future__ import annotations

import collections
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Reasons of answers that got no reward because the reward failed; metrics always count them.
TIMED_OUT, RAISED, CRASHED = 'timed_out', 'raised', 'crashed'
OUT_OF_MEMORY, NONSENSE = 'out_of_memory', 'nonsense'
FAULTS = (TIMED_OUT, RAISED, CRASHED, OUT_OF_MEMORY, NONSENSE)

LONGEST, KINDS = 200, 20  # characters of a reason; kinds of reasons that metrics count by name


class Part(NamedTuple):
    """What one part of a composed reward said: its name, value (weight included) and reason."""

    name: str
    value: float
    reason: str


class Verdict(NamedTuple):
    """What a reward says of an answer.

    Attributes:
      value: the reward; NaN for none, which takes the row out of every statistic.
      reason: why, as a word that metrics count, or such a word with details after a colon.
      right: whether the answer is right, for accuracy and for rules that keep mixed groups; None
        where the reward has no say, and then a value above 0 counts as right.
      parts: of a composed reward.
      steps: rewards of the answer's steps, one for each of `example['steps']`, NaN where one has
        none; empty for a reward of the answer as a whole.
    """

    value: float
    reason: str = ''
    right: bool | None = None
    parts: tuple[Part, ...] = ()
    steps: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """The word that the reason begins with."""
        return kind_of(self.reason)

    @property
    def failed(self) -> bool:
        """Whether the reward failed: it has no value, for one of the `FAULTS`."""
        return math.isnan(self.value) and self.kind in FAULTS

    @property
    def positive(self) -> bool:
        """Whether the answer counts as right."""
        return self.value > 0 if self.right is None else self.right and not math.isnan(self.value)


class Step(NamedTuple):
    """A step of an answer: its text, and the number of its last token in the answer, from 0."""

    text: str
    end: int


class Case(NamedTuple):
    """An answer to be judged; a reward sees the first three.

    Attributes:
      text: the answer, without special tokens.
      tokens: its ids, as drawn, the end of sequence included.
      example: the entry of its problem; `example['answer']` is the right answer, and
        `example['steps']` the answer's `Step`s, where the run divides answers into steps.
      prompt, prompt_ids: of the problem, for reward models.
    """

    text: str
    tokens: Sequence[int]
    example: Mapping[str, Any]
    prompt: str = ''
    prompt_ids: Sequence[int] = ()


# Keys of an example, for what a run adds to it: an answer's steps, and scores of reward models.
STEPS, SCORES = 'steps', 'scores'

# (text, tokens, example) of a Case -> Verdict, a pure function: equal arguments, equal verdicts.
Reward = Callable[[str, Sequence[int], Mapping[str, Any]], Verdict]
# (answer text, example) -> mark; a task's own scorer.
Score = Callable[[str, Any], float]


def fault(kind: str, detail: str = '') -> Verdict:
    """No reward, for one of the reasons in `FAULTS`."""
    return Verdict(math.nan, f'{kind}: {detail}'[:LONGEST] if detail else kind)


def kind_of(reason: str) -> str:
    """The word that a reason begins with."""
    found = re.match(r'\w{1,40}', reason, re.ASCII)
    return found[0] if found else 'other'


def judged(reward: Reward, case: Case) -> Verdict:
    """The reward's verdict; where it raises, or gives anything but one, a verdict that says so.

    A real number stands for a verdict without a reason. This can not see what a reward does beside
    its verdict, and does not end one that hangs: see `rewards.Workers`.
    """
    try:
        return checked(reward(*case[:3]))
    except MemoryError:
        return fault(OUT_OF_MEMORY)
    except BaseException as error:  # SystemExit, too: it costs no more than its row
        return fault(RAISED, f'{type(error).__name__}: {error}')


def checked(found: Any) -> Verdict:
    """What a reward gave as a plain Verdict; `NONSENSE` where it is none."""
    verdict = found if isinstance(found, Verdict) else Verdict(found)
    value, reason, right, parts, steps = verdict
    if not _is_number(value) or math.isinf(value) or isinstance(found, bool | np.bool_):
        return fault(NONSENSE, f'{reprlib.repr(found)}, not a Verdict or a finite number')
    legal = isinstance(reason, str) and (right is None or isinstance(right, bool | np.bool_))
    whole = all(_is_part(part) for part in parts) and all(_is_step(step) for step in steps)
    if not legal or not whole:
        return fault(NONSENSE, reprlib.repr(found))
    plain = tuple(Part(name, float(v), why[:LONGEST]) for name, v, why in parts)
    says = None if right is None else bool(right)
    return Verdict(float(value), reason[:LONGEST], says, plain, tuple(map(float, steps)))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | np.bool_)


def _is_step(value: Any) -> bool:
    return _is_number(value) and not math.isinf(value)


def _is_part(part: Any) -> bool:
    name, value, reason = part
    return isinstance(name, str) and _is_number(value) and isinstance(reason, str)


def describe(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Numbers for the log: rows by reason, and of each part its mean value and rows by reason.

    `rewards/KIND` counts rows whose reason is of that kind, the `FAULTS` always; `rewards/PART` is
    a mean over rows that have a reward, `rewards/PART/KIND` a count. Of rewards of steps,
    `rewards/steps` is their number in a row, and `rewards/step_reward` the mean over all. Kinds
    beyond the `KINDS` most frequent are counted as `other`.
    """
    counts = collections.Counter({f'rewards/{kind}': 0 for kind in FAULTS})
    kinds = collections.Counter(v.kind for v in verdicts if v.reason and not v.parts)
    named = {kind for kind, _ in sorted(kinds.items(), key=lambda x: (-x[1], x[0]))[:KINDS]}
    for kind, count in kinds.items():
        counts[f'rewards/{kind if kind in named or kind in FAULTS else "other"}'] += count
    found = {name: float(count) for name, count in sorted(counts.items())}
    parts = [part for v in verdicts for part in v.parts if not math.isnan(v.value)]
    for name in sorted({part.name for part in parts}):
        own = [part for part in parts if part.name == name]
        found[f'rewards/{name}'] = float(np.mean([part.value for part in own]))
        kinds = collections.Counter(kind_of(part.reason) for part in own if part.reason)
        for kind, count in sorted(kinds.items()):
            found[f'rewards/{name}/{kind}'] = float(count)
    return found | _of_steps(verdicts)


def _of_steps(verdicts: Sequence[Verdict]) -> dict[str, float]:
    stepped = [v.steps for v in verdicts if v.steps and not math.isnan(v.value)]
    values = [step for steps in stepped for step in steps if not math.isnan(step)]
    if not values:
        return {}
    mean = float(np.mean([len(steps) for steps in stepped]))
    return {'rewards/steps': mean, 'rewards/step_reward': float(np.mean(values))}


def to_json(verdict: Verdict) -> list[Any]:
    """A verdict as JSON values; NaN, which JSON lacks, becomes null."""
    value, reason, right, parts, steps = verdict
    found = [_null(value), reason, right, [[p.name, _null(p.value), p.reason] for p in parts]]
    return [*found, [_null(step) for step in steps]] if steps else found


def from_json(values: Any) -> Verdict:
    """What `to_json` was given; ValueError or TypeError for anything else."""
    value, reason, right, parts, *rest = values
    plain = tuple(Part(name, _nan(v), why) for name, v, why in parts)
    steps = tuple(map(_nan, *rest)) if rest else ()
    verdict = Verdict(_nan(value), reason, right, plain, steps)
    if repr(checked(verdict)) != repr(verdict):  # NaN is not equal to itself
        raise ValueError(f'{values} is no verdict')
    return verdict


def _null(value: float) -> float | None:
    return None if math.isnan(value) else value


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
