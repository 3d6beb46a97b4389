"""Arrays as JSON values: lists, or base64 with dtype and shape."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_PACKED = 16  # numbers from which an array is written as base64


def packed(value: Any) -> Any:
    """A JSON value of an array: a list, or base64 with dtype and shape where it is long."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size < _PACKED:
        return value.tolist()
    data = np.ascontiguousarray(value.astype(value.dtype.newbyteorder('<')))
    text = base64.b64encode(data.tobytes()).decode()
    return {'dtype': value.dtype.name, 'shape': list(value.shape), 'base64': text}


def unpacked(value: Any, shape: Sequence[int] | None = None) -> np.ndarray:
    """The array of a JSON value; `shape` is that of bare base64 text, of int32.

    Raises ValueError, TypeError or KeyError for anything else.
    """
    if isinstance(value, str):
        if shape is None:
            raise ValueError('text')
        value = {'dtype': 'int32', 'shape': shape, 'base64': value}
    if isinstance(value, Mapping):
        dtype = np.dtype(str(value['dtype'])).newbyteorder('<')
        if dtype.kind not in 'biuf':
            raise ValueError(f'dtype {value["dtype"]}')
        data = np.frombuffer(base64.b64decode(value['base64'], validate=True), dtype)
        return data.reshape(value['shape']).astype(dtype.newbyteorder('='))
    array = np.asarray(value)
    if array.dtype.kind not in 'biuf':
        raise ValueError(f'{array.dtype} values')
    return array
