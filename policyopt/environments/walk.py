"""Walks along the alphabet that are to end at its beginning: long answers, judged by their end."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from policyopt import checks
from policyopt.environments.scenario import Problem, Scenario
from policyopt.rewards.spec import Spec
from policyopt.rewards.verdict import Score

PLACES, NAMES = string.ascii_uppercase, string.ascii_lowercase  # of a walk, and of its blocks
_BATCH = 2048  # walks that are drawn at once, most of which end elsewhere


def ends_home(blocks: int, steps: int, home: int) -> Score:
    """The scorer: 1 for blocks that go on step by step and end at home, else 0."""

    def score(answer: str, example: Mapping[str, Any]) -> float:
        text = example['question'] + answer
        names, places = text[:: steps + 1], [c for c in text if c in PLACES]
        whole = len(text) == blocks + len(places) == blocks * (steps + 1)
        if not whole or names != NAMES[:blocks]:
            return 0.0
        at = [PLACES.index(c) for c in places]
        legal = all(abs(a - b) == 1 for a, b in itertools.pairwise(at))
        return float(legal and at[-1] < home)

    return score


@checks.factory('environment')
def walk(blocks: int = 23, steps: int = 4, begun: int = 2, home: int = 3) -> Scenario:
    """A walk to bring home from letter to letter, `aMNONbMLMN`, in one turn.

    Each step leads to a neighbouring letter of the alphabet. The answer goes on in blocks,
    `cMLMNdOPQR...`, and is right where it ends at one of the first letters. The reward does not say
    which steps were wrong: credit over a long answer is what this is for, and how likely a walk is
    to come home can be told from where it is, the better the less is left of it. Walks to imitate
    are random ones that came home. An answer has (blocks - begun) * (steps + 1) characters.

    Args:
      blocks: of a walk, up to 26.
      steps: of a block.
      begun: blocks that the problem has.
      home: letters that count as such.
    """
    checks.number('blocks', blocks, 2, len(NAMES))
    checks.number('steps', steps, 1)
    checks.number('begun', begun, 1, blocks - 1)
    checks.number('home', home, 1, len(PLACES))

    def problems(size: int, seed: int) -> Iterator[Problem]:
        rng = np.random.default_rng([seed, 3])
        made = (walk for _ in itertools.count() for walk in _home(rng, blocks * steps, home))
        for places in itertools.islice(made, size):
            rows = zip(NAMES, places.reshape(blocks, steps), strict=False)
            parts = [name + ''.join(PLACES[i] for i in row) for name, row in rows]
            yield Problem(''.join(parts[:begun]), ''.join(parts[begun:]))

    scorer = Spec(
        'policyopt.environments.walk.ends_home', dict(blocks=blocks, steps=steps, home=home)
    )
    return Scenario(problems, scorer=scorer)


def _home(rng: np.random.Generator, length: int, home: int) -> np.ndarray:
    """Random walks that end at home: [some, length] places. At an end of the way they turn back."""
    last = len(PLACES) - 1
    at = [rng.integers(0, last + 1, _BATCH)]
    for _ in range(length - 1):
        step = rng.choice([-1, 1], _BATCH)
        step = np.where(at[-1] == 0, 1, np.where(at[-1] == last, -1, step))
        at.append(at[-1] + step)
    found = np.stack(at, axis=1)
    return found[found[:, -1] < home]
