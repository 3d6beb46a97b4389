"""Walks of plus and minus that are to end high enough: long answers, judged by their end."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from policyopt import checks
from policyopt.environments.scenario import Problem, Scenario
from policyopt.rewards.spec import Spec
from policyopt.rewards.verdict import Score

NAMES = string.ascii_lowercase  # of blocks


def high_enough(blocks: int, steps: int, begun: int) -> Score:
    """The scorer: 1 for blocks that go on to the problem's number or above it, else 0."""
    form = re.compile(''.join(f'{name}[+-]{{{steps}}}' for name in NAMES[begun:blocks]))

    def score(answer: str, example: Mapping[str, Any]) -> float:
        if not form.fullmatch(answer):
            return 0.0
        end = example['start'] + answer.count('+') - answer.count('-')
        return float(end >= example['end'])

    return score


@checks.factory('environment')
def walk(blocks: int = 23, steps: int = 4, begun: int = 2, reach: int = 30) -> Scenario:
    """A number to end at or above by steps of one, and a beginning: `+12:a+-++b++--`, in one turn.

    The answer goes on with `c-++-d+-++...` up to the last letter. The reward is for the end, and
    does not say which steps were wrong: credit over a long answer is what this is for. How likely a
    walk is to end well can be told from how far it has come, the better the less is left of it.
    Walks to imitate are random ones that end at the number; who draws signs as often as they do
    ends below it in nearly half of all cases. An answer has (blocks - begun) * (steps + 1)
    characters.

    Args:
      blocks: of a walk, up to 26.
      steps: of a block.
      begun: blocks that the problem has.
      reach: largest distance of a number from 0.
    """
    checks.number('blocks', blocks, 1, len(NAMES))
    checks.number('steps', steps, 1)
    checks.number('begun', begun, 0, blocks - 1)
    checks.number('reach', reach, 0, min(blocks * steps, 99))
    total = blocks * steps

    def problems(size: int, seed: int) -> Iterator[Problem]:
        rng = np.random.default_rng([seed, 3])
        ends = [end for end in range(-reach, reach + 1) if (total + end) % 2 == 0]
        for _ in range(size):
            end = int(rng.choice(ends))
            signs = rng.permutation(['+'] * ((total + end) // 2) + ['-'] * ((total - end) // 2))
            rows = zip(NAMES, signs.reshape(blocks, steps), strict=False)
            parts = [name + ''.join(row) for name, row in rows]
            given = ''.join(parts[:begun])
            hidden = {'start': given.count('+') - given.count('-'), 'end': end}
            yield Problem(f'{end:+03d}:{given}', ''.join(parts[begun:]), hidden)

    kw = dict(blocks=blocks, steps=steps, begun=begun)
    return Scenario(problems, scorer=Spec('policyopt.environments.walk.high_enough', kw))
