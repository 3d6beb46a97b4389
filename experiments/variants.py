"""Algorithms and rewards that differ from named ones in one part, for arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policyopt import advantages, checks, losses
from policyopt.rewards import Reward, Verdict
from policyopt.types import Algorithm, identity

NORMALISED = ('group', 'minibatch', 'none')


def normalised(by: str, eps: float = 0.2) -> Algorithm:
    """GRPO without a reference policy; advantages over the deviation of a group, a minibatch, or 1.

    Raises ValueError for `by` that is none of `NORMALISED`.
    """
    checks.one_of('by', by, NORMALISED)
    return Algorithm(
        advantages=advantages.group_zscore() if by == 'group' else advantages.group_mean_baseline(),
        prepare=advantages.normalise_minibatch() if by == 'minibatch' else identity,
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=losses.clipped(eps),
            aggregate=losses.sequence_mean(),
        ),
    )


def unclipped(gates: Sequence[Any] = ()) -> Algorithm:
    """GRPO without clip and reference policy: each token has its importance ratio as a weight."""
    return Algorithm(
        advantages=advantages.group_zscore(),
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=losses.unclipped(),
            aggregate=losses.sequence_mean(),
            gates=gates,
        ),
    )


def clip_higher(
    low: float = 0.2, high: float = 0.28, bonus: float = 0.0, beta: float = 0.0
) -> Algorithm:
    """GRPO with DAPO's clip; with a bonus for entropy, and beta times k3 to the reference."""
    penalties = [losses.entropy(bonus)] * bool(bonus)
    penalties += [losses.kl_to_reference(beta)] * bool(beta)
    return Algorithm(
        advantages=advantages.group_zscore(),
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=losses.clipped(low, high),
            aggregate=losses.sequence_mean(),
            penalties=penalties,
        ),
    )


def digits(answer: str, right: str) -> float:
    """Share of the digits of the right answer that are in their place, from the last one.

    Of an answer that is longer, the share of its own.
    """
    ends = zip(answer[::-1], right[::-1], strict=False)
    return sum(a == b for a, b in ends) / max(len(answer), len(right))


def share_of_digits(wrong: float = 0.0) -> Reward:
    """From `wrong` to 1 by the share of `digits` in their place."""

    def reward(answer: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        del tokens
        share = digits(answer.strip(), example['answer'])
        value = wrong + (1 - wrong) * share
        return Verdict(value, 'right' if share == 1 else 'wrong', right=share == 1)

    return reward
