"""Verdicts on disk, so that steps which are done again get those that they got before.

A verdict may depend on the clock (a deadline), on the machine, or on chance; the rest of a run is a
function of its config. So each verdict is written down before it is used. Steps after the last
checkpoint, done again after a crash, find theirs here, and the run ends as if it had not crashed.
The same holds for what environments say to turns.
"""

from __future__ import annotations

import json
import re
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from policyopt.rewards.verdict import Case, Verdict, from_json, to_json

FOLDER = 'verdicts'
_HEARD = 'heard'  # where a verdict has its digest
_NAME = re.compile(r'(\d+)_\w+_\d+\.jsonl')

Key = tuple[int, int]  # round, row


def digest(case: Case) -> int:
    """32 bits that tell an answer's tokens from others."""
    return zlib.crc32(np.asarray(case.tokens, np.int32).tobytes())


class Page:
    """The verdicts of one step or measurement, one line each, by round and row.

    A row with an environment has a line of what it said, too.
    """

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[Key, tuple[int, Verdict]] = {}
        self._heard: dict[Key, list[Any]] = {}
        whole = path.read_bytes().rpartition(b'\n')[0] if path.exists() else b''
        for line in whole.splitlines():
            number, row, crc, *rest = json.loads(line)
            if crc == _HEARD:
                self._heard[number, row] = rest
            else:
                self._known[number, row] = crc, from_json(rest)
        self._size = len(whole) + bool(whole)  # a line that a kill cut short is written over

    def find(self, key: Key, case: Case) -> Verdict | None:
        """The verdict of this round and row, if it was on the same tokens."""
        crc, verdict = self._known.get(key, (None, None))
        return verdict if crc == digest(case) else None

    def heard(self, key: Key) -> list[Any]:
        """What the environment of this round and row said, [] where nothing is known."""
        return self._heard.get(key, [])

    def write(
        self,
        verdicts: Mapping[Key, tuple[int, Verdict]],
        heard: Mapping[Key, list[Any]] = types.MappingProxyType({}),
    ) -> None:
        """Write down verdicts with the digests of what they are on; they survive the process.

        And what environments said, as JSON values. By the first process, for all.
        """
        from policyopt import hosts  # with jax, which processes that judge do without

        self._known.update(verdicts)
        self._heard.update(heard)
        lines = [[*key, _HEARD, *said] for key, said in sorted(heard.items())]
        lines += [[*key, crc, *to_json(verdict)] for key, (crc, verdict) in verdicts.items()]
        if not lines or not hosts.first():
            return
        text = ''.join(json.dumps(line) + '\n' for line in lines).encode()
        self._path.parent.mkdir(exist_ok=True)
        with open(self._path, 'r+b' if self._size else 'wb') as file:
            file.seek(self._size)
            file.write(text)
            file.truncate()
        self._size += len(text)


class Ledger:
    """The pages of a run, in a folder of their own."""

    def __init__(self, workdir: Path):
        self._folder = workdir / FOLDER

    def page(self, stage: str, number: int, step: int) -> Page:
        """The page of a stage's `number`-th step, which is done again with RL step `step`."""
        return Page(self._folder / f'{step:06d}_{stage}_{number:06d}.jsonl')

    def prune(self, step: int) -> None:
        """Remove the pages of steps before this one, that of the oldest checkpoint."""
        from policyopt import hosts  # with jax, which processes that judge do without

        for path in self._folder.glob('*.jsonl') if hosts.first() else ():
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) < step:
                path.unlink(missing_ok=True)
