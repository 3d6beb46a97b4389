"""Header of a GGUF file: its fields, and where each tensor lies.

    'GGUF', uint32 version, uint64 tensors, uint64 fields
    fields: string key, uint32 type, and a number, a string, or an array: uint32 type, uint64 count
        and as many numbers or strings
    tensors: string name, uint32 rank, rank x uint64 sizes (fastest first), uint32 type, uint64
        offset from the start of the data
    padding to general.alignment (32 where no field says otherwise), data

A string is a uint64 length and UTF-8. Everything is little-endian. No length or count is believed
before it is compared with the size of the file, so that a broken file can't ask for memory.
"""

from __future__ import annotations

import math
import mmap
import pathlib
from typing import Any, NamedTuple

import numpy as np

MAGIC, VERSIONS, ALIGNMENT = b'GGUF', (2, 3), 32
STRING, ARRAY = 8, 9
SCALARS = {
    number: np.dtype(name).newbyteorder('<')
    for number, name in enumerate('u1 i1 u2 i2 u4 i4 f4 ? - - u8 i8 f8'.split())
    if name != '-'
}
STRING_BYTES = 8  # at least


class TensorInfo(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
      shape: slowest axis first, as in numpy.
      type: the format's number of its type.
      start: byte of the file at which it starts.
    """

    shape: tuple[int, ...]
    type: int
    start: int


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Fields by name, as Python values, and tensors by name.

    Raises ValueError naming the file, and the field or tensor, where the file is cut short, is no
    GGUF file of version 2 or 3, or breaks off inside a length. What it can't check: that the
    tensors' data end inside the file, which depends on their types.
    """
    with open(path, 'rb') as file:
        if not path.stat().st_size:
            raise ValueError(f'{path} is empty: no GGUF file')
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()


class _Cursor:
    """A place in the file that moves on with each value read."""

    def __init__(self, path: pathlib.Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0
        self.what = 'the header'

    def broken(self, why: str) -> ValueError:
        return ValueError(f'{self.path}: {self.what} {why}: cut short, or not a whole GGUF file')

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.broken(f'needs {size} bytes at {self.at}, of {len(self.data)} in all')
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = SCALARS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def uint32(self) -> int:
        return self.number(4)

    def uint64(self) -> int:
        return self.number(10)

    def string(self) -> str:
        try:
            return self.take(self.uint64()).decode()
        except UnicodeDecodeError as error:
            raise self.broken(f'is no UTF-8 before byte {self.at} ({error.reason})') from None

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(kind)
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.broken(f'has a value of type {kind}; legal: 0 to 12')
        kind, count = self.uint32(), self.uint64()
        if kind not in SCALARS and kind != STRING:
            raise self.broken(f'has entries of type {kind}; legal: numbers and strings')
        least = STRING_BYTES if kind == STRING else SCALARS[kind].itemsize
        if count * least > len(self.data) - self.at:
            raise self.broken(f'says that it has {count} entries')
        if kind == STRING:
            return [self.string() for _ in range(count)]
        return self.numbers(kind, count)

    def tensor(self) -> TensorInfo:
        rank = self.uint32()
        if not 1 <= rank <= 4:
            raise self.broken(f'has {rank} axes; legal: 1 to 4')
        sizes = self.numbers(10, rank)
        if not all(0 < n < 2**48 for n in sizes):
            raise self.broken(f'has sizes {sizes}')
        return TensorInfo(tuple(reversed(sizes)), self.uint32(), self.uint64())

    def header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if (magic := self.take(4)) != MAGIC:
            raise ValueError(f'{self.path} starts with {magic!r}, not {MAGIC!r}: no GGUF file')
        if (version := self.uint32()) not in VERSIONS:
            raise ValueError(f'{self.path}: GGUF version {version} is not known; legal: {VERSIONS}')
        tensor_count, field_count = self.uint64(), self.uint64()
        fields: dict[str, Any] = {}
        for number in range(field_count):
            self.what = f'field {number} of {field_count}'
            name = self.string()
            self.what = f'field {name!r}'
            if name in fields:
                raise self.broken('is there twice')
            fields[name] = self.value(self.uint32())
        found: dict[str, TensorInfo] = {}
        for number in range(tensor_count):
            self.what = f'tensor {number} of {tensor_count}'
            name = self.string()
            self.what = f'tensor {name!r}'
            if name in found:
                raise self.broken('is there twice')
            found[name] = self.tensor()
        align = fields.get('general.alignment', ALIGNMENT)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f'{self.path}: general.alignment={align!r} must be 1 or more')
        data = align * math.ceil(self.at / align)
        return fields, {
            name: info._replace(start=data + info.start) for name, info in found.items()
        }
