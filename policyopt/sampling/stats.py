"""What an engine counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Stats:
    """What an engine did so far.

    Attributes:
      decode_slots: slots of all decode steps, busy or not.
      decode_tokens: tokens that they drew; over decode_slots: the share of useful work.
      prompt_tokens: tokens that rows had when they got a slot.
      prefill_tokens: of them, those that went through the model; the rest was copied.
      prefill_slots: the same with padding.
      waiting_slots: of decode_slots, those whose row waited for its environment.
      parked: times that a row gave up its slot for others while it waited.
      observed_tokens: observation tokens fed.
      calls, call_seconds, longest_call: environment calls, the time they took together, and one.
      failures, timeouts, overflows: of them, those that raised or gave no answer, were late, or
        gave too many tokens.
      errors: rows that ended in an error of any kind.
    """

    decode_slots: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    prefill_slots: int = 0
    waiting_slots: int = 0
    parked: int = 0
    observed_tokens: int = 0
    calls: int = 0
    call_seconds: float = 0.0
    longest_call: float = 0.0
    failures: int = 0
    timeouts: int = 0
    overflows: int = 0
    errors: int = 0

    @property
    def useful(self) -> float:
        """Share of decode slots that drew a token."""
        return self.decode_tokens / max(self.decode_slots, 1)
