"""Reward an answer that a task's own scorer gives full marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# (answer texts, entries of their problems) -> [B] float32, 1 right, 0 wrong, NaN where not judged.
Judge = Callable[[Sequence[str], Sequence[Any]], np.ndarray]


def graded(score: Callable[[str, Any], float], full: float = 1.0) -> Judge:
    """Judge that gives 1 where `score(answer, entry) >= full` and 0 elsewhere.

    Partial marks count as wrong: some scorers give a little to any text, or to a text that merely
    contains the answer. A scorer that raises leaves the row without a reward (NaN), which is not
    the same as a wrong answer.
    """

    def judge(answers: Sequence[str], entries: Sequence[Any]) -> np.ndarray:
        if len(answers) != len(entries):
            raise ValueError(f'{len(answers)} answers for {len(entries)} entries')
        rewards = np.full(len(answers), np.nan, np.float32)
        for i, (answer, entry) in enumerate(zip(answers, entries, strict=True)):
            try:
                rewards[i] = float(score(answer, entry) >= full)
            except Exception:
                continue
        return rewards

    return judge
