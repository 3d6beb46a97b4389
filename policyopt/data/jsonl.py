"""Problems from a JSONL file of {"prompt": ..., "answer": ...}, and their scorer."""

from __future__ import annotations

import codecs
import hashlib
import json
import pathlib
from collections.abc import Iterator

from policyopt import checks
from policyopt.data.rows import BadRow, Row
from policyopt.rewards.scorers import exact_match

NAMES = ('prompt', 'answer')


def digest(path: pathlib.Path) -> str:
    """SHA-256 of the file's contents; ValueError where it cannot be read."""
    try:
        with path.open('rb') as file:
            return hashlib.file_digest(file, 'sha256').hexdigest()
    except OSError as error:
        raise ValueError(
            f'task.file {path} cannot be read: {error.strerror}; put it there, or name another'
        ) from error


def read(
    path: pathlib.Path, expected: str, names: tuple[str, str] = NAMES
) -> Iterator[Row | BadRow]:
    """Rows of the file in order, with line numbers from 1; blank lines are passed over.

    `names` are those of prompt and answer: the prompt is a text that is not blank, the answer one
    too, or a number. Other fields become `entry['metadata']`. A prompt that comes again with
    another answer is bad. Raises ValueError at the end where the contents do not have the digest
    `expected`: they changed while being read.
    """
    found = hashlib.sha256()
    first: dict[str, tuple[int, str]] = {}
    with path.open('rb') as file:
        for line, raw in enumerate(file, 1):
            found.update(raw)
            if line == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            row = parse(line, raw, names)
            if isinstance(row, Row):
                known, answer = first.setdefault(row.prompt, (line, row.entry['answer']))
                if not exact_match(answer, row.entry):
                    row = BadRow(line, f'the prompt of line {known} with another answer')
            yield row
    if found.hexdigest() != expected:
        raise ValueError(f'{path} changed while it was read')


def parse(line: int, raw: bytes, names: tuple[str, str] = NAMES) -> Row | BadRow:
    """The problem that a line holds, with prompt and answer of these names, or why it has none."""
    try:
        values = json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return BadRow(line, f'invalid UTF-8, byte {error.start + 1} of the line')
    except json.JSONDecodeError as error:
        return BadRow(line, f'invalid JSON, {error.msg} at column {error.colno}')
    except (ValueError, RecursionError) as error:
        return BadRow(line, f'invalid JSON, {error}')
    if not isinstance(values, dict):
        return BadRow(line, f'a JSON {type(values).__name__}, not an object')
    fields = {}
    for name, kinds in zip(names, ((str,), (str, int, float)), strict=True):
        if name not in values:
            return BadRow(line, f'no field `{name}`.{checks.hint(name, values)}'.rstrip('.'))
        value = values.pop(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            legal = ' or '.join('number' if kind is float else 'text' for kind in kinds[::2])
            return BadRow(line, f'`{name}` is {json.dumps(value)[:40]}; legal is a {legal}')
        fields[name] = str(value)
        if not fields[name].strip():
            return BadRow(line, f'`{name}` is empty')
        if any('\ud800' <= c <= '\udfff' for c in fields[name]):
            return BadRow(line, f'`{name}` has half a surrogate pair, which no UTF-8 can hold')
    prompt, answer = (fields[name] for name in names)
    return Row(line, prompt, {'prompt': prompt, 'answer': answer, 'metadata': values})


def _no_constant(name: str) -> None:
    raise ValueError(f'{name} is no JSON number')
