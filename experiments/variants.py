"""Algorithms that differ from named ones in one part, for arms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policyopt import advantages, checks, losses
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
