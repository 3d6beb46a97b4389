"""Sampling: rows of tokens with an exact record of how they were drawn."""

from policyopt.sampling.config import (
    EngineConfig,
    Finish,
    PerRow,
    RowErrors,
    SamplingConfig,
    allowed_mask,
    pad_prompts,
    row_keys,
)
from policyopt.sampling.continuous import sample_continuous, to_rollout
from policyopt.sampling.decode import sample
from policyopt.sampling.engine import Engine
from policyopt.sampling.environments import Environment, Reply, Turn
from policyopt.sampling.rules import Constraint, automaton
from policyopt.sampling.stats import Stats

__all__ = [
    'Constraint',
    'Engine',
    'EngineConfig',
    'Environment',
    'Finish',
    'PerRow',
    'Reply',
    'RowErrors',
    'SamplingConfig',
    'Stats',
    'Turn',
    'allowed_mask',
    'automaton',
    'pad_prompts',
    'row_keys',
    'sample',
    'sample_continuous',
    'to_rollout',
]
