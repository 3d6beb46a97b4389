"""Tensors in files, read a few rows at a time, and safetensors files written tensor by tensor.

A safetensors file is an 8-byte little-endian header length, a JSON header of name -> dtype, shape
and byte range, and the bytes. Nothing here holds more than one tensor in memory.
"""

from __future__ import annotations

import json
import math
import operator
import os
import pathlib
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    'F64': np.dtype(np.float64),
    'F32': np.dtype(np.float32),
    'F16': np.dtype(np.float16),
    'BF16': np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 22  # bytes of a tensor held while it is copied into place
INDEX = 'model.safetensors.index.json'
# What `write_safetensors` may leave in a folder.
WEIGHTS = re.compile(
    r'model(-\d{5}-of-\d{5})?\.safetensors(\.partial)?|model\.safetensors\.index\.json(\.partial)?'
)


class FileTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
      shape: of the whole tensor.
      dtype: of what `rows` returns.
      rows: (start, stop) -> array [stop - start, ...] of first-axis entries, read now.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    rows: Callable[[int, int], np.ndarray]


class Layout(NamedTuple):
    """How a tensor in a file becomes a parameter.

    Attributes:
      file: shape in the file.
      view: the same elements with axes split.
      order: axes of `view` in the parameter's order.
      shape: shape of the parameter, which may merge axes of the permuted view.
    """

    file: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]


def layout(
    view: tuple[int, ...],
    order: tuple[int, ...] | None = None,
    file: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> Layout:
    """Layout whose file shape and parameter shape default to the view's and the permuted view's."""
    order = tuple(range(len(view))) if order is None else order
    permuted = tuple(view[i] for i in order)
    return Layout(file or view, view, order, shape or permuted)


def read(tensor: FileTensor, how: Layout, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """The slice `index` of the parameter that a file's tensor is, in this dtype.

    Reads CHUNK bytes at a time, so that beside the result little is held.
    """
    permuted = tuple(how.view[i] for i in how.order)
    index = index + (slice(None),) * (len(how.shape) - len(index))
    same = 0  # leading axes that the parameter shares with the permuted view can be cut early
    while same < len(how.shape) and how.shape[same] == permuted[same]:
        same += 1
    spans = [s.indices(n)[:2] for s, n in zip(index[:same], permuted, strict=False)]
    spans += [(0, n) for n in permuted[same:]]
    by_view = [spans[how.order.index(axis)] for axis in range(len(how.view))]
    out = np.empty([stop - start for start, stop in spans], dtype)
    into = out.transpose(np.argsort(how.order))
    (first, last), rest = by_view[0], tuple(slice(*span) for span in by_view[1:])
    per_row = math.prod(how.file) // how.view[0]
    rows_per = how.file[0] // how.view[0]  # file rows of one entry of the view's first axis
    step = max(1, CHUNK // max(1, per_row * tensor.dtype.itemsize))
    if rows_per == 0:  # the view drops a leading axis of size 1: (1, D) as (D,)
        into[...] = tensor.rows(0, 1).reshape(how.view)[first:last]
    else:
        for start in range(first, last, step):
            stop = min(start + step, last)
            block = tensor.rows(start * rows_per, stop * rows_per)
            block = block.reshape(stop - start, *how.view[1:])
            into[start - first : stop - first] = block[(slice(None), *rest)]
    merged = out.reshape([n if i >= same else out.shape[i] for i, n in enumerate(how.shape)])
    return merged[(slice(None),) * same + index[same:]]


def to_file(parameter: np.ndarray, how: Layout) -> np.ndarray:
    """A parameter as its tensor in a file: the inverse of `read`."""
    permuted = parameter.reshape([how.view[i] for i in how.order])
    return np.ascontiguousarray(permuted.transpose(np.argsort(how.order))).reshape(how.file)


def _safetensors_file(path: pathlib.Path) -> dict[str, FileTensor]:
    """Name -> tensor; raises ValueError naming the file where it is cut short or no such file."""
    length = path.stat().st_size
    with open(path, 'rb') as file:
        start = file.read(8)
        if start == b'version ':
            raise ValueError(f'{path} is a Git LFS pointer, not the tensors: run git lfs pull')
        size = struct.unpack('<Q', start)[0] if len(start) == 8 else length
        if 8 + size > length:
            raise ValueError(
                f'{path} has {length} bytes, fewer than its header: cut short, or not safetensors'
            )
        try:
            header = dict(json.loads(file.read(size)))
        except (ValueError, TypeError) as error:
            raise ValueError(f'{path}: the header is not JSON of tensors: {error}') from None
    header.pop('__metadata__', None)
    out = {}
    for name, entry in header.items():
        where = f'tensor {name!r} in {path}'
        try:
            kind, shape = entry['dtype'], tuple(operator.index(n) for n in entry['shape'])
            begin, end = (operator.index(at) for at in entry['data_offsets'])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'{where}: the header entry {entry!r} is broken: {error!r}') from None
        if kind not in DTYPES:
            raise ValueError(f'{where} has dtype {kind}; legal: {", ".join(DTYPES)}')
        dtype = DTYPES[kind]
        if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f'{where}: {end - begin} bytes at {begin} for shape {shape}')
        if 8 + size + end > length:
            raise ValueError(
                f'{where} ends at byte {8 + size + end}, but the file at {length}: cut short'
            )
        out[name] = FileTensor(shape, dtype, _reader(path, 8 + size + begin, dtype, shape))
    return out


def _reader(
    path: pathlib.Path, offset: int, dtype: np.dtype, shape: tuple[int, ...]
) -> Callable[[int, int], np.ndarray]:
    per_row = math.prod(shape[1:])

    def rows(start: int, stop: int) -> np.ndarray:
        count = (stop - start) * per_row
        at = offset + start * per_row * dtype.itemsize
        data = np.fromfile(path, dtype, count, offset=at)
        if data.size != count:
            raise ValueError(f'{path} ends before the tensor at byte {offset} does')
        return data.reshape(stop - start, *shape[1:])

    return rows


def open_safetensors(folder: pathlib.Path) -> dict[str, FileTensor]:
    """Name -> tensor of a folder's model.safetensors, or of the files that its index names.

    Raises FileNotFoundError, and ValueError naming the file and the tensor that is cut short, has
    another dtype or is not where the index says.
    """
    index = folder / INDEX
    if not index.exists():
        single = folder / 'model.safetensors'
        if not single.exists():
            raise FileNotFoundError(f'{folder} has neither model.safetensors nor {INDEX}')
        return _safetensors_file(single)
    try:
        weight_map = dict(json.loads(index.read_text())['weight_map'])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{index} is not JSON with a weight_map: {error!r}') from None
    out: dict[str, FileTensor] = {}
    for name in sorted(set(weight_map.values())):
        held = _safetensors_file(folder / name)
        stray = [tensor for tensor in held if weight_map.get(tensor) != name]
        if stray:
            raise ValueError(f'{folder / name} holds {stray[0]!r}, which {INDEX} places elsewhere')
        out |= held
    missing = sorted(set(weight_map) - set(out))
    if missing:
        raise ValueError(f'{INDEX} names tensors that its files lack: {", ".join(missing[:5])}')
    return out


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file beside its name and move it there when complete."""
    partial = path.with_name(f'{path.name}.partial')
    partial.write_text(text)
    os.replace(partial, path)


def write_safetensors(
    folder: pathlib.Path,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[tuple[str, np.ndarray]],
    shard_bytes: int,
) -> None:
    """Write tensors, which come in the order of `shapes`, as one file or as an index and shards.

    A file is written beside its name and moved there when complete. Then files of those names
    that an earlier model left are removed.
    """
    shards: list[dict[str, Any]] = [{}]
    held = total = 0
    for name, (shape, dtype) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if held and held + size > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = {
            'dtype': NAMES[dtype],
            'shape': list(shape),
            'data_offsets': [held, held + size],
        }
        held, total = held + size, total + size
    count = len(shards)
    names = ['model.safetensors']
    if count > 1:
        names = [f'model-{i + 1:05d}-of-{count:05d}.safetensors' for i in range(count)]
    stream = iter(tensors)
    for file_name, header in zip(names, shards, strict=True):
        text = json.dumps({'__metadata__': {'format': 'pt'}, **header}).encode()
        text += b' ' * (-len(text) % 8)
        partial = folder / f'{file_name}.partial'
        with open(partial, 'wb') as file:
            file.write(struct.pack('<Q', len(text)) + text)
            for expected in header:
                name, tensor = next(stream)
                assert name == expected, (name, expected)
                file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
        os.replace(partial, folder / file_name)
    if count > 1:
        weight_map = {name: f for f, header in zip(names, shards, strict=True) for name in header}
        index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2) + '\n')
        names.append(INDEX)
    for path in folder.iterdir():
        if WEIGHTS.fullmatch(path.name) and path.name not in names:
            path.unlink()
