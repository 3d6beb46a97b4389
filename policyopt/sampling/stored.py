"""Rows of an engine as plain arrays and JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policyopt.sampling.rows import Buffers, Row

_NUMBERS = (
    'id',
    'length',
    'prompt_length',
    'drawn',
    'last',
    'segment',
    'turn_start',
    'new_turn',
    'finish',
)


def store(rows: Sequence[Row]) -> tuple[dict[str, np.ndarray], list[list[Any]]]:
    """Arrays of rows outside slots, one after another, and what else there is to say of each.

    Their rules and constraint are not stored, nor are environments: rows that have one, or whose
    rules are not those of all, can't be brought back.
    """
    if not rows:
        return {}, []
    arrays = {'keys': np.stack([row.key for row in rows])}
    for name in Buffers.FILL:
        parts: list[Any] = [row.data[name] for row in rows if row.data is not None]
        if parts[0] is not None:
            arrays[name] = np.concatenate(parts)
    return arrays, [[*(int(getattr(row, n)) for n in _NUMBERS), row.error] for row in rows]


def load(
    arrays: Mapping[str, np.ndarray], notes: Sequence[Sequence[Any]], **shared: Any
) -> list[Row]:
    """The rows that `store` was given.

    Args:
      arrays, notes: as it returned them.
      shared: fields that all rows have alike: `rules`, `static` and `impl`.
    """
    rows, start = [], 0
    for i, (*numbers, error) in enumerate(notes):
        fields = dict(zip(_NUMBERS, numbers, strict=True))
        stop = start + fields['length']
        fields['new_turn'] = bool(fields['new_turn'])
        data = {
            name: arrays[name][start:stop].copy() if name in arrays else None
            for name in Buffers.FILL
        }
        rows.append(Row(key=arrays['keys'][i], data=data, error=error, **fields, **shared))
        start = stop
    return rows
