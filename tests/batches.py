"""Random loss inputs and rollouts for the suites, from a seed."""

import numpy as np

import policyopt as po
from policyopt.types import TokenBatch

ALGORITHMS = po.algorithms.names()
REQUIRED = {'dr_grpo': {'length': 16}}


def algorithm(name: str, **kwargs) -> po.Algorithm:
    """The named algorithm with its defaults, and its required arguments."""
    return po.algorithms.resolve(name, **REQUIRED.get(name, {}), **kwargs)


def told(table: dict, name: str, where: str):
    """What a table of the suites says of an algorithm; a new one is put there by hand."""
    assert name in table, f'{name} is new: put it into {where}'
    return table[name]


def random_mask(rng, rows: int, width: int) -> np.ndarray:
    """Prompt, answer with gaps (tool output), padding; one empty row and one of one token."""
    mask = np.zeros((rows, width), np.int32)
    for i in range(rows):
        start = rng.integers(0, width - 1)
        end = rng.integers(start + 1, width + 1)
        mask[i, start:end] = rng.random(end - start) < 0.8
    if rows > 2:
        mask[0] = 0
        mask[1] = 0
        mask[1, rng.integers(width)] = 1
    return mask


def random_arrays(seed: int, rows: int = 8, width: int = 7, drift: float = 0.3) -> dict:
    """Fields of LossInputs and TokenBatch together; advantages are constant in a row."""
    rng = np.random.default_rng(seed)
    shape = (rows, width)

    def logp(centre):
        return (centre + drift * rng.standard_normal(shape)).astype(np.float32)

    base = -np.abs(rng.standard_normal(shape)).astype(np.float32) - 0.5
    rows_advantage = rng.standard_normal((rows, 1)) * (rng.random((rows, 1)) < 0.8)
    values = rng.standard_normal(shape).astype(np.float32)
    return dict(
        logp_new=logp(base),
        logp_old=logp(base),
        logp_behavior=logp(base),
        logp_ref=logp(base),
        entropy=np.abs(rng.standard_normal(shape)).astype(np.float32),
        values=values,
        values_old=(values + 0.3 * rng.standard_normal(shape)).astype(np.float32),
        returns=rng.standard_normal(shape).astype(np.float32),
        advantages=np.broadcast_to(rows_advantage, shape).astype(np.float32),
        mask=random_mask(rng, rows, width),
        segment=np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32),
        group=rng.integers(0, 3, rows).astype(np.int32) * 7 - 5,
        positive=rng.integers(0, 2, rows).astype(np.int32),
        rewards=rng.standard_normal(rows).astype(np.float32),
    )


INPUT_FIELDS = [f for f in po.LossInputs.__dataclass_fields__ if f != 'coefficients']


def loss_inputs(arrays: dict, algorithm: po.Algorithm) -> po.LossInputs:
    coefficients = po.losses.controllers.init(algorithm.controllers)
    return po.LossInputs(**{k: arrays[k] for k in INPUT_FIELDS}, coefficients=coefficients)


def token_batch(arrays: dict) -> TokenBatch:
    fields = {k: arrays[k] for k in TokenBatch.__dataclass_fields__ if k in arrays}
    return TokenBatch(tokens=np.zeros_like(arrays['mask']), **fields)


def rollout(seed: int, rows: int = 12, width: int = 7) -> po.Rollout:
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, rows, width)
    segment = np.sort(rng.integers(0, 3, (rows, width)), axis=1).astype(np.int32)
    segment_rewards = np.full((rows, width), np.nan, np.float32)
    for i in range(rows):
        for k in set(segment[i]):
            where = np.flatnonzero((segment[i] == k) & (mask[i] == 1))
            if len(where):
                segment_rewards[i, where[-1]] = rng.standard_normal()
    logp = -np.abs(rng.standard_normal((rows, width))).astype(np.float32)
    return po.Rollout(
        tokens=rng.integers(0, 9, (rows, width)).astype(np.int32),
        mask=mask,
        rewards=rng.standard_normal(rows).astype(np.float32),
        group=rng.integers(0, 4, rows).astype(np.int32),
        logp_behavior=logp,
        logp_ref=logp - 0.1,
        truncated=rng.integers(0, 2, rows).astype(bool),
        positive=rng.integers(0, 2, rows).astype(bool),
        values=rng.standard_normal((rows, width)).astype(np.float32),
        segment=segment,
        segment_rewards=segment_rewards,
    )
