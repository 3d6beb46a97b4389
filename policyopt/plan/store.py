"""Compiled programs and their counts on disk, by a hash of what they are of.

A record of JSON values names what it came from: `source`, the modules that its program is made of;
`lowered`, the program itself before it was compiled; `counted`, the modules that counted in it; and
the versions of jax and of the compiler. The compiled program lies beside, so that other counting
needs no other compile.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax

from policyopt import disk

PACKAGE = pathlib.Path(__file__).parents[1]
# Modules whose text decides what is compiled; tools around a run do not.
COMPILED = (
    'advantages.py algorithms.py critic.py learner.py masked.py microbatches.py optimizer.py '
    'scoring.py scoring_kernels.py scoring_loops.py sharding.py state.py types.py updates.py '
    'losses models sampling plan/steps.py'
).split()
COUNTED = [f'plan/{name}.py' for name in 'costs hardware hlo measure roofline traffic'.split()]


def versions() -> dict[str, str]:
    """Of jax and of the compiler."""
    try:
        library = importlib.metadata.version('libtpu')
    except importlib.metadata.PackageNotFoundError:
        library = 'none'
    return {'jax': jax.__version__, 'libtpu': library}


@functools.cache
def _hash_of(names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        path = PACKAGE / name
        for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def source_hash() -> str:
    """Of the text of the modules that programs are made of."""
    return _hash_of(tuple(COMPILED))


def count_hash() -> str:
    """Of the text of the modules that count in compiled programs."""
    return _hash_of(tuple(COUNTED))


def text_hash(text: str) -> str:
    """Of a program."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def key_of(config: Mapping[str, Any], topology: str, step: str) -> str:
    """Hash of what a result depends on, source and versions excepted: see `fresh`."""
    text = json.dumps([config, topology, step], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """A JSON file of records by key; several processes may add to it one after another.

    Compiled programs lie in `programs`, by default a folder beside the file that has its name.
    """

    def __init__(self, path: pathlib.Path | str, programs: pathlib.Path | str | None = None):
        self.path = pathlib.Path(path)
        self.programs = self.path.with_suffix('') if programs is None else pathlib.Path(programs)

    def read(self) -> dict[str, dict[str, Any]]:
        """All records. Raises ValueError where the file is no JSON."""
        if not self.path.exists():
            return {}
        try:
            return json.loads(self.path.read_text())
        except ValueError as error:
            raise ValueError(
                f'{self.path} is no JSON ({error}): remove it, or name another'
            ) from None

    def get(self, key: str) -> dict[str, Any] | None:
        """The record of a key."""
        return self.read().get(key)

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Add a record, or put it in the place of an older one."""
        records = self.read() | {key: dict(record)}
        text = json.dumps(records, indent=1, sort_keys=True) + '\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(self.path) as partial:
            partial.write_text(text)

    def keep(self, key: str, made: Mapping[str, Any]) -> None:
        """Keep a compiled program of a key, as JSON values."""
        path = self.programs / f'{key}.hlo.gz'
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk.whole(path) as partial:
            partial.write_bytes(gzip.compress(json.dumps(made).encode(), 6))

    def made(self, key: str) -> dict[str, Any] | None:
        """What `keep` kept; None where nothing can be read."""
        try:
            return json.loads(gzip.decompress((self.programs / f'{key}.hlo.gz').read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error):
            return None


def fresh(record: Mapping[str, Any]) -> bool:
    """Whether a record's program is of the source as it is, by the versions that are installed.

    Without libtpu, nothing is said of its version: a table can be printed anywhere.
    """
    here, made = versions(), record.get('versions', {})
    same = here['libtpu'] == 'none' or made == here
    return same and record.get('source') == source_hash()


def counted(record: Mapping[str, Any]) -> bool:
    """Whether its counts are of the modules as they are; there are none of what does not fit."""
    return 'error' in record or record.get('counted') == count_hash()
