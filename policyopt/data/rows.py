"""What sources of problems yield, how it is stored, and how bad rows are reported."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

SHOWN = 5  # bad rows that a report spells out


class Row(NamedTuple):
    """A problem: where it stands in its source, its prompt, and the entry that its scorer reads.

    `entry['answer']` is the right answer, a text.
    """

    line: int
    prompt: str
    entry: Mapping[str, Any]


class BadRow(NamedTuple):
    """What stands where a problem should, and why it is none."""

    line: int
    reason: str


def in_held_out(prompt: str, share: float) -> bool:
    """Whether a problem belongs to the held-out split: a hash of its text, the same everywhere."""
    return zlib.crc32(prompt.encode()) < share * 2**32


def report(bad: Sequence[BadRow], count: int, where: Callable[[int], str]) -> str:
    """The first of `count` bad rows with their places and reasons, as one text."""
    shown = '; '.join(f'{where(row.line)}: {row.reason}' for row in sorted(bad)[:SHOWN])
    more = f'; and {count - SHOWN} more' if count > SHOWN else ''
    return shown + more


# JSON has no tuples, sets or keys that are no text, and scorers compare with them: they are stored
# as an object with one of these keys.
_TUPLE, _SET, _DICT = '(tuple)', '(set)', '(dict)'


def dumps(value: Any) -> str:
    """JSON from which `loads` makes an equal value; TypeError for what it cannot hold."""
    return json.dumps(_tagged(value), ensure_ascii=False, separators=(',', ':'))


def loads(text: str | bytes) -> Any:
    """The value that `dumps` was given."""
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [_tagged(v) for v in value]}
    if isinstance(value, list):
        return [_tagged(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return {_SET: [_tagged(v) for v in sorted(value, key=repr)]}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) for k in value) and not {_TUPLE, _SET, _DICT} & set(value):
            return {k: _tagged(v) for k, v in value.items()}
        return {_DICT: [[_tagged(k), _tagged(v)] for k, v in value.items()]}
    raise TypeError(f'{type(value).__name__} cannot be stored')


def _untagged(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == _TUPLE:
            return tuple(inner)
        if tag == _SET:
            return set(inner)
        if tag == _DICT:
            return dict(inner)
    return value
