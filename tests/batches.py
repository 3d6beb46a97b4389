"""Random loss inputs and rollouts for the suites, from a seed."""

import policyopt as po
from policyopt.contract import (
    INPUT_FIELDS,
    loss_inputs,
    random_arrays,
    random_mask,
    rollout,
    token_batch,
)

__all__ = ['INPUT_FIELDS', 'loss_inputs', 'random_arrays', 'random_mask', 'rollout', 'token_batch']

ALGORITHMS = po.algorithms.names()
REQUIRED = {'dr_grpo': {'length': 16}}


def algorithm(name: str, **kwargs) -> po.Algorithm:
    """The named algorithm with its defaults, and its required arguments."""
    return po.algorithms.resolve(name, **REQUIRED.get(name, {}), **kwargs)
