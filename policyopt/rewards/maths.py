"""Reward for an answer that equals the right one as mathematics, whatever its form."""

from __future__ import annotations

import contextlib
import decimal
import functools
import importlib.util
import logging
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from policyopt import checks
from policyopt.rewards.combine import check_values, marked
from policyopt.rewards.formats import after_thought, boxes
from policyopt.rewards.scorers import exact_match
from policyopt.rewards.verdict import Reward, Verdict

_FRACTION = re.compile(r'(-?)(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)(?:/(\d+))?)', re.ASCII)
# Spaces between thousands: 12\,345 is no product.
_THOUSANDS = re.compile(r'(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))', re.ASCII)
PRECISION = 15  # digits of numbers that are compared
TAIL = 1000  # characters of an answer without a box that are looked at


@checks.factory('reward')
def math_equivalence(right: float = 1.0, wrong: float = 0.0, digits: int = 6) -> Reward:
    r"""`right` where the answer equals `example['answer']` as mathematics, else `wrong`.

    Looked at is what the last \boxed{...} after any thought holds, or without one the last formula
    or number of the answer's last 1000 characters. Equal texts and numbers are equal; anything else
    is parsed and compared by math-verify and sympy, which can take for ever on a hostile answer:
    judge it in workers, whose deadline ends it as `timed_out`. They have no limit here.

    Reasons: `right`, `wrong`, `no_answer` (nothing that can be read; wrong), and `no_gold` where
    the right answer can't be read, which leaves the row without a reward.

    Args:
      right, wrong: rewards.
      digits: to which numbers that are no fractions must agree, after the point; of one below
        .001 the zeros that it begins with are not counted, but for three.
    """
    check_values(right, wrong)
    checks.number('digits', digits, 0)
    if importlib.util.find_spec('math_verify') is None:
        raise ValueError(
            "math_equivalence needs math-verify, not installed: pip install 'policyopt[math]'"
        )
    import math_verify  # a second of start-up that only this reward needs

    verifier: Any = math_verify  # its hints forbid None where its text asks for it
    logging.getLogger('math_verify').setLevel(logging.ERROR)  # it warns of limits that are off

    def parse(text: str) -> list[Any]:
        return verifier.parse(text, parsing_timeout=None, raise_on_error=True)

    # What is imported and cached along the way is there in every process forked from this one.
    verifier.verify(
        parse(r'\boxed{\frac{x^2+2x+1}{2}}'), parse(r'$\frac{(x+1)^2}{2}$'), timeout_seconds=None
    )

    @functools.lru_cache(1024)
    def gold_of(answer: str) -> tuple[list[Any], int]:
        gold = parse(_formula(answer))
        return gold, _zeros(gold)

    @functools.lru_cache(4096)  # the answers to a problem are often alike
    def compared(text: str, answer: str) -> Verdict:
        gold, zeros = gold_of(answer)
        if not gold:
            return Verdict(math.nan, 'no_gold')
        given = parse(text)
        if not given:
            return Verdict(wrong, 'no_answer', False)
        equal = verifier.verify(
            gold,
            given,
            float_rounding=digits + max(zeros - 3, 0),
            numeric_precision=PRECISION + zeros,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
        return marked(equal, right, wrong)

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        answer, gold = _THOUSANDS.sub('', after_thought(text)), example['answer']
        found = boxes(answer)
        last = found[-1] if found else answer
        if exact_match(last, example):
            return marked(True, right, wrong)
        numbers = _rational(last), _rational(gold)
        if None not in numbers:
            return marked(numbers[0] == numbers[1], right, wrong)
        return compared(rf'\boxed{{{last}}}' if found else answer[-TAIL:], gold)

    return reward


def _rational(text: str) -> Fraction | None:
    """The integer or fraction of integers that a text is, None for any other."""
    match = _FRACTION.fullmatch(text.strip().strip('$').strip()) if len(text) < 100 else None
    if match is None:
        return None
    sign, *digits = match.groups()
    above, below = int(digits[0] or digits[2]), int(digits[1] or digits[3] or 1)
    return Fraction(-above if sign else above, below) if below else None


def _zeros(gold: Sequence[Any]) -> int:
    """Zeros after the point of the smallest number that a right answer is, or lists."""
    found = [0]
    for part in gold[:1]:
        for number in (part,) if getattr(part, 'is_number', False) else getattr(part, 'args', ()):
            with contextlib.suppress(AttributeError, TypeError, ValueError, ArithmeticError):
                if not number.is_zero:
                    found.append(-1 - decimal.Decimal(str(abs(number.evalf(3)))).adjusted())
    return max(found)


def _formula(answer: str) -> str:
    """A right answer in a form that is read as one formula, as a whole."""
    answer = _THOUSANDS.sub('', answer.replace(r'\$', ''))
    return answer if r'\boxed' in answer or '$' in answer else rf'\boxed{{{answer}}}'
