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


def told(table: dict, name: str, where: str):
    """What a table of the suites says of an algorithm; a new one is put there by hand."""
    assert name in table, f'{name} is new: put it into {where}'
    return table[name]
