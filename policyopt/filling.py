"""Empty rows of a rollout: to fill it up, and in place of rows that could not be sampled.

An empty row has mask 0, one prompt token and no reward (NaN), so it counts in no mean. On the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from policyopt.types import Rollout


def fill(rollout: Rollout, rows: int) -> Rollout:
    """Cut a rollout of numpy arrays to `rows`, or fill it up with empty rows.

    An empty row has mask 0, one prompt token, no reward (NaN), and a group of its own kind, -1.
    """
    missing = rows - len(rollout.mask)
    if missing <= 0:
        return jax.tree.map(lambda x: x[:rows], rollout)
    padded = jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), rollout
    )
    return emptied(padded, np.arange(rows) >= rows - missing, group=-1)


def emptied(rollout: Rollout, rows: np.ndarray, **special: Any) -> Rollout:
    """A rollout whose `rows` [B] bool hold nothing: mask 0, one prompt token, no reward (NaN).

    They keep their group, and why they ended. Others come out as they are, on the host.

    Args:
      special: field -> value in place of these.
    """
    values: dict[str, Any] = {name: getattr(rollout, name) for name in ('group', 'finish')}
    values |= {'rewards': np.nan, 'length': 1, 'prompt_length': 1, 'version': -1}
    values |= {'segment_rewards': np.nan, 'support': -1, 'routing': -1, **special}
    changes = {}
    for field, array in vars(rollout).items():
        if array is not None:
            array, at = np.asarray(array), rows.reshape((-1,) + (1,) * (np.ndim(array) - 1))
            changes[field] = np.where(at, values.get(field, 0), array).astype(array.dtype)
    return dataclasses.replace(rollout, **changes)
