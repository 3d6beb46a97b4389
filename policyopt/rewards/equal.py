"""The scorer of problems whose answers are formulas or numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from policyopt.rewards.formats import after_thought, boxes
from policyopt.rewards.maths import math_equivalence
from policyopt.rewards.verdict import Score

_WORDS = ('yes', 'no')


def equal_score(digits: int = 6) -> Score:
    """1 where `math_equivalence` calls the answer right, 0 where wrong.

    A right answer of Yes or No is for the last box, or the last word, to say. Raises, when it
    scores, where the right answer can't be read.
    """
    reward = math_equivalence(digits=digits)

    def score(answer: str, example: Mapping[str, Any]) -> float:
        right = example['answer'].strip().lower()
        if right in _WORDS:
            text = after_thought(answer)
            found = boxes(text)
            words = (found[-1] if found else text).replace('\\text', ' ').split()
            return float(bool(words) and words[-1].strip('.!*{}$ ').lower() == right)
        verdict = reward(answer, (), example)
        if math.isnan(verdict.value):
            raise ValueError(verdict.reason)
        return verdict.value

    return score
