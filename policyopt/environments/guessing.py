"""A game: find a number between two others, told whether it is higher or lower."""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from policyopt import checks
from policyopt.environments.scenario import Problem, Scenario
from policyopt.sampling.environments import Reply

HIGHER, LOWER = '>', '<'
_RANGE = re.compile(r'(\d+)-(\d+)\?', re.ASCII)


class Guessing:
    """Answers a guess with `>` (higher) or `<` (lower) and the numbers that are left: `>20-30?`.

    A guess that is no number of the range learns nothing: it is answered with the range as it was,
    behind `?`. The row is done with the right number, and with the last guess. A guess's reward is
    what it asked for (`information`), not what it was told: the luck of the number has no part.

    Args:
      tokenizer: text to ids and back.
      question: the prompt, such as `10-40?`.
      number: to be found.
      guesses: that are answered.
    """

    def __init__(self, tokenizer: Any, question: str, number: int, guesses: int):
        self._tokenizer, self._question = tokenizer, question
        self._number, self._guesses = number, guesses
        self._low, self._high = bounds(question)
        self._digits = len(question.partition('-')[0])

    def reset(self) -> Sequence[int]:
        """Ids of the question."""
        return self._tokenizer.encode(self._question)

    def step(self, tokens: Sequence[int]) -> Reply:
        """Where to look next, or the end."""
        text = self._tokenizer.decode(tokens)
        guess = int(text) if re.fullmatch(r'\d{1,9}', text, re.ASCII) else -1
        legal = self._low <= guess <= self._high
        reward = information(self._low, self._high, guess) if legal else 0.0
        self._guesses -= 1
        if guess == self._number or self._guesses <= 0:
            return Reply(done=True, reward=reward)
        sign = '?'
        if legal and guess < self._number:
            sign, self._low = HIGHER, guess + 1
        elif legal:
            sign, self._high = LOWER, guess - 1
        left = question_of(self._low, self._high, self._digits)
        return Reply(self._tokenizer.encode(sign + left), reward=reward)


def question_of(low: int, high: int, digits: int) -> str:
    """A range as it is written, `010-040?`."""
    return f'{low:0{digits}d}-{high:0{digits}d}?'


def bounds(text: str) -> tuple[int, int]:
    """Low and high of the range that a text ends with."""
    found = _RANGE.search(text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def information(low: int, high: int, guess: int) -> float:
    """Bits that a guess is expected to give, over those of the best guess; in [0, 1].

    The entropy of lower, right and higher, for a number that may be any from low to high. 1 where
    the range is one number, the guess.
    """

    def bits(at: int) -> float:
        n = high - low + 1
        parts = [part / n for part in (at - low, 1, high - at) if part]
        return -sum(p * math.log2(p) for p in parts)

    best = bits((low + high) // 2)
    return bits(guess) / best if best else 1.0


@checks.factory('environment')
def guessing(
    digits: int = 3, smallest: int = 20, largest: int = 31, guesses: int | None = None
) -> Scenario:
    """Ranges such as `105-131?`, in which a number is to be found.

    Each turn is a guess; see `Guessing`. The player to imitate guesses any number that is left.

    Args:
      digits: of a number.
      smallest, largest: how many numbers a range has.
      guesses: that are answered; None: as many as halving needs at most.
    """
    checks.number('digits', digits, 1, 6)
    checks.number('smallest', smallest, 2)
    checks.number('largest', largest, smallest, 10**digits)
    checks.number('guesses', 1 if guesses is None else guesses, 1)

    def problems(size: int, seed: int) -> Iterator[Problem]:
        rng = np.random.default_rng([seed, 2])
        for _ in range(size):
            width = int(rng.integers(smallest, largest + 1))
            low = int(rng.integers(0, 10**digits - width + 1))
            number = int(rng.integers(low, low + width))
            question = question_of(low, low + width - 1, digits)
            limit = (width).bit_length() if guesses is None else guesses
            hidden = {'number': number, 'guesses': limit}
            yield Problem(question, f'{number:0{digits}d}', hidden)

    def environment(tokenizer: Any, example: Mapping[str, Any]) -> Guessing:
        return Guessing(tokenizer, example['question'], example['number'], example['guesses'])

    def expert(example: Mapping[str, Any]) -> Callable[[str], str]:
        rng = random.Random(zlib.crc32(example['question'].encode()))

        def play(seen: str) -> str:
            low, high = bounds(seen or example['question'])
            return f'{rng.randint(low, high):0{digits}d}'

        return play

    return Scenario(problems, environment, expert)
