"""Compiled results on disk, by a hash of everything that they depend on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from policyopt import disk

PACKAGE = pathlib.Path(__file__).parents[1]
# Modules whose text decides what is compiled; tools around a run do not.
COMPILED = (
    'advantages.py algorithms.py critic.py learner.py masked.py microbatches.py optimizer.py '
    'scoring.py scoring_kernels.py sharding.py state.py types.py updates.py losses models '
    'sampling plan/steps.py'
).split()


def versions() -> dict[str, str]:
    """Of jax and of the compiler."""
    try:
        library = importlib.metadata.version('libtpu')
    except importlib.metadata.PackageNotFoundError:
        library = 'none'
    return {'jax': jax.__version__, 'libtpu': library}


@functools.cache
def source_hash() -> str:
    """Of the text of the modules that programs are made of."""
    digest = hashlib.sha256()
    for name in COMPILED:
        path = PACKAGE / name
        for file in sorted(path.rglob('*.py')) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def key_of(config: Mapping[str, Any], topology: str, step: str) -> str:
    """Hash of what a result depends on, source and versions excepted: see `fresh`."""
    text = json.dumps([config, topology, step], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """A JSON file of records by key; several processes may add to it one after another."""

    def __init__(self, path: pathlib.Path | str):
        self.path = pathlib.Path(path)

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


def fresh(record: Mapping[str, Any]) -> bool:
    """Whether a record was made from the source as it is, by the versions that are installed.

    Without libtpu, nothing is said of its version: a table can be printed anywhere.
    """
    here, made = versions(), record.get('versions', {})
    same = here['libtpu'] == 'none' or made == here
    return same and record.get('source') == source_hash()
