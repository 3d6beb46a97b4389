"""A place for rows that wait for their environment, while others decode in their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from policyopt.sampling import slots as slots_lib
from policyopt.sampling.rows import Row


class Lot:
    """Caches of parked rows, on the device beside the engine's; made when the first one comes.

    A cache is copied, not computed again: the row goes on with the same bits, whenever it parked.
    """

    def __init__(
        self, model: Any, places: int, size: int, width: int, bucket: Callable[[int], int]
    ):
        self._model, self._places, self._size = model, places, size
        self._width, self._bucket = width, bucket  # rows of a copy; tokens of a row to copy
        self._free = list(range(places))
        self._cache: Any = None

    @property
    def room(self) -> int:
        """Free places."""
        return len(self._free)

    def park(self, cache: Any, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy the rows in these slots of a cache to free places."""
        if self._cache is None:
            self._cache = slots_lib.empty(self._model, self._places, self._size)
        places = [self._free.pop() for _ in rows]
        self._cache = self._copy(self._cache, cache, slots, places, rows)
        for row, place in zip(rows, places, strict=True):
            row.place = place

    def unpark(self, cache: Any, slots: Sequence[int], rows: Sequence[Row]) -> Any:
        """The cache, given away, with parked rows in these slots; their places are free again."""
        places = [row.place for row in rows if row.place is not None]
        cache = self._copy(cache, self._cache, places, slots, rows)
        for row in rows:
            self.leave(row)
        return cache

    def leave(self, row: Row) -> None:
        """Free the place of a parked row."""
        if row.place is not None:
            self._free.append(row.place)
            row.place = None

    def _copy(
        self,
        into: Any,
        cache: Any,
        source: Sequence[int],
        target: Sequence[int],
        rows: Sequence[Row],
    ) -> Any:
        for start in range(0, len(rows), self._width):
            part = slice(start, start + self._width)
            at = np.zeros((2, self._width), np.int32)
            at[1] = into.length.shape[0]  # of those that only fill up the shape: nowhere
            at[0, : len(source[part])], at[1, : len(target[part])] = source[part], target[part]
            bucket = self._bucket(max(row.length for row in rows[part]))
            into = slots_lib.move(into, cache, *at, bucket=bucket)
        return into
