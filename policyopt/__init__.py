"""policyopt: policy optimisation for language models, as pure functions in JAX."""

from policyopt import advantages, algorithms, losses, masked, shaping
from policyopt.types import (
    Algorithm,
    Controller,
    Estimates,
    LossInputs,
    LossOutput,
    LossTransform,
    Mean,
    Rollout,
    Scores,
    TokenBatch,
)

__all__ = [
    'Algorithm',
    'Controller',
    'Estimates',
    'LossInputs',
    'LossOutput',
    'LossTransform',
    'Mean',
    'Rollout',
    'Scores',
    'TokenBatch',
    'advantages',
    'algorithms',
    'losses',
    'masked',
    'shaping',
]
