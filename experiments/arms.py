"""Arms that claims share, so that their curves are measured once."""

from __future__ import annotations

from typing import Any

from experiments.learning import Arm

# Without a reference policy, so that arms differ in one thing. GSPO's eps stops as many tokens as
# GRPO's .2: on seed 100, which is not among those measured, .11 to .18 did in steps 5 to 20.
TOKEN_CLIP, SEQUENCE_CLIP = (0.2, 0.2), (0.15, 0.15)


def grpo(**changes: Any) -> Arm:
    """GRPO with changes."""
    return Arm('grpo', dict(eps=TOKEN_CLIP[0], beta=0.0), changes)


def gspo(low: float = SEQUENCE_CLIP[0], high: float = SEQUENCE_CLIP[1], **changes: Any) -> Arm:
    """GSPO with changes."""
    return Arm('gspo', dict(low=low, high=high), changes)


def sapo(tau_negative: float = 1.05, **changes: Any) -> Arm:
    """SAPO with changes."""
    return Arm('sapo', dict(tau_negative=tau_negative), changes)
