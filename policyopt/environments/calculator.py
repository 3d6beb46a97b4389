"""Expressions of three numbers, with a calculator for two of them at a time."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from policyopt import checks
from policyopt.environments.scenario import Problem, Scenario
from policyopt.sampling.environments import Reply

OPEN, CLOSE = '<', '>'  # around what the calculator is asked
_CALL = re.compile(r'<(-?\d+)([-+*])(-?\d+)>', re.ASCII)
_SIGNS = {'+': operator.add, '-': operator.sub, '*': operator.mul}
_TERMS = re.compile(r'\d+|[-+*]', re.ASCII)


class Calculator:
    """Answers `<12*34>` with `408`, and any turn without `>` at its end with the end of the row.

    What is no expression of two integers is answered by `?`. A call's reward is 1 where it is a
    step of the way that `steps` names, the first time; else 0. A row may call `calls` times: the
    next call ends it. The last turn has no reward of its own here: what it says is judged.

    Args:
      tokenizer: text to ids and back.
      question: the prompt.
      steps: expressions that lead to the answer, such as ['12*34', '408+56'].
      calls: that are answered.
    """

    def __init__(self, tokenizer: Any, question: str, steps: Sequence[str], calls: int = 4):
        self._tokenizer, self._question = tokenizer, question
        self._left, self._calls = list(steps), calls

    def reset(self) -> Sequence[int]:
        """Ids of the question."""
        return self._tokenizer.encode(self._question)

    def step(self, tokens: Sequence[int]) -> Reply:
        """A value for a call; the end of the row for an answer."""
        text = self._tokenizer.decode(tokens)
        if not text.endswith(CLOSE):
            return Reply(done=True)
        self._calls -= 1
        if self._calls < 0:
            return Reply(done=True, reward=0.0)
        found = _CALL.fullmatch(text)
        if found is None:
            return Reply(self._tokenizer.encode('?'), reward=0.0)
        useful = text[1:-1] in self._left
        if useful:
            self._left.remove(text[1:-1])
        return Reply(self._tokenizer.encode(str(evaluate(text[1:-1]))), reward=float(useful))


def evaluate(expression: str) -> int:
    """Value of `a+b`, `a-b` or `a*b` of integers."""
    a, sign, b = _CALL.fullmatch(f'<{expression}>').groups()  # type: ignore[union-attr]
    return _SIGNS[sign](int(a), int(b))


def ways(question: str) -> list[str]:
    """Calls that lead from `a*b+c=` to its value, products first, then from left to right."""
    terms = _TERMS.findall(question)
    found = []
    while len(terms) > 1:
        signs = terms[1::2]
        at = 2 * (signs.index('*') if '*' in signs else 0)
        found.append(''.join(terms[at : at + 3]))
        terms[at : at + 3] = [str(evaluate(found[-1]))]
    return found


@checks.factory('environment')
def calculator(digits: int = 2, calls: int = 4) -> Scenario:
    """Questions such as `12*34+56=`, to be answered with a calculator for two numbers.

    A turn `<12*34>` is answered `408`; a turn that ends with the end of sequence is the answer.
    A product and a sum or difference, in either order; values are never negative.

    Args:
      digits: most digits of a number.
      calls: of the calculator that are answered; the next one ends the row.
    """
    checks.number('digits', digits, 1, 6)
    checks.number('calls', calls, 1)

    def problems(size: int, seed: int) -> Iterator[Problem]:
        rng = np.random.default_rng([seed, 1])
        for _ in range(size):
            a, b, c = (int(x) for x in rng.integers(1, 10**digits, 3))
            question = [f'{a}*{b}+{c}=', f'{c}+{a}*{b}=', f'{a}*{b}-{c}='][int(rng.integers(3))]
            steps = ways(question)
            answer = evaluate(steps[-1])
            if answer >= 0:
                yield Problem(question, str(answer), {'way': steps})

    def environment(tokenizer: Any, example: Mapping[str, Any]) -> Calculator:
        return Calculator(tokenizer, example['question'], example['way'], calls)

    def expert(example: Mapping[str, Any]) -> Callable[[str], str]:
        turns = [f'{OPEN}{step}{CLOSE}' for step in example['way']] + [example['answer']]
        return lambda seen: turns.pop(0)

    return Scenario(problems, environment, expert, stops=CLOSE)
