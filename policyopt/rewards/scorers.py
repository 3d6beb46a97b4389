"""Scorers of tasks: (answer text, example) -> mark; made by factories that any process can call."""

from __future__ import annotations

import decimal
import re
from collections.abc import Mapping
from typing import Any

from policyopt.rewards.verdict import Score

_NUMBER = re.compile(r'[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?', re.ASCII)


def exact_match(answer: str, example: Mapping[str, Any]) -> float:
    """1 where the answer is `example['answer']`, 0 elsewhere.

    White space around either does not count, and two decimal numbers are compared by value, exactly
    (`0.50` is `.5` is `5e-1`). Fractions, units and thousands separators are text.
    """
    given, right = answer.strip(), example['answer'].strip()
    if given == right:
        return 1.0
    if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(right):
        return float(decimal.Decimal(given) == decimal.Decimal(right))
    return 0.0


def exact() -> Score:
    """The scorer of problems from a file, `exact_match`."""
    return exact_match


def gym(name: str, kw: Mapping[str, Any], size: int, seed: int) -> Score:
    """The scorer of a reasoning-gym dataset, given what the dataset is made with."""
    import reasoning_gym  # a second of start-up that only its tasks need

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **kw).score_answer


def gym_entry() -> Score:
    """The scorer of the reasoning-gym dataset that an example names, at its default settings."""
    import reasoning_gym

    def score(answer: str, example: Mapping[str, Any]) -> float:
        name = example['metadata']['source_dataset']
        return reasoning_gym.get_score_answer_fn(name)(answer, example)  # pyright: ignore[reportCallIssue]

    return score


def by_task(scores: Mapping[str, Score]) -> Score:
    """The scorer of a mixture: each example's task, `example['task']`, has its own."""
    return lambda answer, example: scores[example['task']](answer, example)
