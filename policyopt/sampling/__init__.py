"""Sampling: rows of tokens with an exact record of how they were drawn."""

from policyopt.sampling.config import (
    Finish,
    PerRow,
    RowErrors,
    SamplingConfig,
    allowed_mask,
    pad_prompts,
    row_keys,
)
from policyopt.sampling.decode import sample
from policyopt.sampling.rules import Constraint, automaton

__all__ = [
    'Constraint',
    'Finish',
    'PerRow',
    'RowErrors',
    'SamplingConfig',
    'allowed_mask',
    'automaton',
    'pad_prompts',
    'row_keys',
    'sample',
]
