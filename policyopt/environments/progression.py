"""Sequences written out term by term, of which the last term alone is judged: long answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from policyopt import checks
from policyopt.environments.scenario import Problem, Scenario
from policyopt.rewards.spec import Spec
from policyopt.rewards.verdict import Score


def last_term() -> Score:
    """The scorer: 1 where the last term is the right one, whatever stands before it, else 0."""

    def score(answer: str, example: Mapping[str, Any]) -> float:
        return float(_last(answer) == _last(example['answer']))

    return score


def _last(text: str) -> str:
    return text.rpartition(' ')[2]


@checks.factory('environment')
def progression(terms: int = 30, first: int = 99, step: int = 30) -> Scenario:
    """A number and a step, `37+12:`, to go on from: `049 061 073 ...`, in one turn.

    Each term is the one before it plus the step. One wrong term makes all that follow wrong, and
    the reward, which is for the last one, does not say which: credit over a long answer is what
    this is for. An answer has terms * (digits + 1) tokens of one character each, its end of
    sequence included, where digits are those of the largest term.

    Args:
      terms: to be written.
      first: the largest number to start from; the smallest is 0.
      step: the largest step; the smallest is 1.
    """
    checks.number('terms', terms, 1)
    checks.number('first', first, 0)
    checks.number('step', step, 1)
    digits = len(str(first + terms * step))

    def problems(size: int, seed: int) -> Iterator[Problem]:
        rng = np.random.default_rng([seed, 3])
        for _ in range(size):
            start, by = int(rng.integers(0, first + 1)), int(rng.integers(1, step + 1))
            found = [f'{start + by * n:0{digits}d}' for n in range(1, terms + 1)]
            prompt = f'{start:0{len(str(first))}d}+{by:0{len(str(step))}d}:'
            yield Problem(prompt, ' '.join(found))

    return Scenario(problems, scorer=Spec('policyopt.environments.progression.last_term'))
