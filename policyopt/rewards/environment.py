"""What an environment gave, as the reward of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from policyopt import checks
from policyopt.rewards.verdict import Reward, Verdict


@checks.factory('reward')
def turns_total(right: float = 1.0) -> Reward:
    """Sum of the rewards that the environment gave for turns; right where it is at least `right`.

    For environments that know the outcome themselves. A row whose environment gave none has no
    reward. The same rewards are those of the turns (`segment_rewards`), where an algorithm reads
    them.

    Args:
      right: the sum from which on a row counts as right.
    """
    checks.number('right', right)

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        del text, tokens
        total = example.get('environment', {}).get('reward')
        if total is None:
            return Verdict(math.nan, 'no_turn_reward')
        ok = total >= right
        return Verdict(float(total), 'right' if ok else 'wrong', ok)

    return reward
