"""policyopt: policy optimisation for language models, as pure functions in JAX.

`models`, `sample`, `SamplingConfig` and `score` load flax when first used; the loss side does not.
"""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from policyopt import models
    from policyopt.sampling import SamplingConfig, sample
    from policyopt.scoring import score

_LATER = {
    'SamplingConfig': 'policyopt.sampling',
    'models': 'policyopt.models',
    'sample': 'policyopt.sampling',
    'score': 'policyopt.scoring',
}

__all__ = [
    'Algorithm',
    'Controller',
    'Estimates',
    'LossInputs',
    'LossOutput',
    'LossTransform',
    'Mean',
    'Rollout',
    'SamplingConfig',
    'Scores',
    'TokenBatch',
    'advantages',
    'algorithms',
    'losses',
    'masked',
    'models',
    'sample',
    'score',
    'shaping',
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f'policyopt has no `{name}`')
    module = importlib.import_module(_LATER[name])
    return module if name == 'models' else getattr(module, name)
