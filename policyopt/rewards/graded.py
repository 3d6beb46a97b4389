"""Reward an answer that a task's own scorer gives full marks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# (answer texts, entries of their problems) -> [B] float32, 1 right, 0 wrong, NaN where not judged.
Judge = Callable[[Sequence[str], Sequence[Any]], np.ndarray]


def graded(score: Callable[[str, Any], float], full: float = 1.0) -> Judge:
    """Judge that gives 1 where `score(answer, entry) >= full` and 0 elsewhere.

    Partial marks count as wrong: some scorers give a little to any text, or to a text that merely
    contains the answer. A scorer that raises, or gives anything but a finite number, leaves the row
    without a reward (NaN), which is not the same as a wrong answer.
    """

    def judge(answers: Sequence[str], entries: Sequence[Any]) -> np.ndarray:
        if len(answers) != len(entries):
            raise ValueError(f'{len(answers)} answers for {len(entries)} entries')
        rewards = np.full(len(answers), np.nan, np.float32)
        for i, (answer, entry) in enumerate(zip(answers, entries, strict=True)):
            try:
                mark = score(answer, entry)
            except Exception:
                continue
            if isinstance(mark, numbers.Real | np.bool_) and math.isfinite(mark):
                rewards[i] = mark >= full
        return rewards

    return judge


def guarded(judge: Judge) -> Judge:
    """The judge, whose failures cost no more than their own rows: [B] float32 of 0, 1 and NaN.

    Where it raises, or gives anything but one number a row, the rows are judged one by one; a row
    where it does so again, and a value other than 0, 1 and NaN, become NaN.
    """

    def attempt(answers: Sequence[str], entries: Sequence[Any]) -> np.ndarray | None:
        try:
            marks = np.asarray(judge(answers, entries))
            return marks.astype(np.float32) if marks.shape == (len(answers),) else None
        except Exception:
            return None

    def guard(answers: Sequence[str], entries: Sequence[Any]) -> np.ndarray:
        marks = attempt(answers, entries)
        if marks is None:
            single = [attempt([a], [e]) for a, e in zip(answers, entries, strict=True)]
            marks = np.array([np.nan if x is None else x[0] for x in single], np.float32)
        return np.where((marks == 0) | (marks == 1), marks, np.float32(np.nan))

    return guard
