"""Configuration read into frozen dataclasses: unknown names and wrong types fail at the start."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from policyopt import checks

T = TypeVar('T')


def check_names(where: str, names: Iterable[str], legal: Iterable[str]) -> None:
    """Raise ValueError for the first name that is not legal, with the nearest legal spelling."""
    legal = sorted(legal)
    for name in names:
        if name not in legal:
            raise ValueError(f'{where} has no `{name}`.{checks.nearest(str(name), legal)}')


def read(cls: type[T], values: Mapping[str, Any], where: str = 'config') -> T:
    """Build the dataclass `cls` from a mapping, with nested dataclasses from nested mappings.

    Every value must have the type of its field: int passes for float, lists pass for tuples, and
    nothing else is converted. Raises ValueError naming the field, its value and what is legal.
    """
    fields: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_names(where, values, fields)
    hints = typing.get_type_hints(cls)
    made = {}
    for name, field in fields.items():
        if name in values:
            made[name] = _convert(values[name], hints[name], f'{where}.{name}')
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f'{where}.{name} is missing')
    return cls(**made)


def _convert(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, collections.abc.Mapping):
            raise ValueError(f'{where} is {value!r}; legal is a section of settings')
        return read(hint, value, where)
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        sections = [a for a in args if dataclasses.is_dataclass(a)]
        if sections and isinstance(value, collections.abc.Mapping):
            return _convert(value, sections[0], where)  # for its errors, which name the field
        for option in args:
            try:
                return _convert(value, option, where)
            except ValueError:
                continue
    elif hint is types.NoneType:
        if value is None:
            return None
    elif origin is typing.Literal:
        if value in args:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        if args[-1] is Ellipsis:
            return tuple(_convert(v, args[0], where) for v in value)
        if len(value) == len(args):
            return tuple(_convert(v, a, where) for v, a in zip(value, args, strict=True))
    elif origin is collections.abc.Mapping and isinstance(value, collections.abc.Mapping):
        if args and dataclasses.is_dataclass(args[1]):  # named sections
            return {k: _convert(v, args[1], f'{where}.{k}') for k, v in value.items()}
        return dict(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    near = checks.hint(value, _words(hint)) if isinstance(value, str) else ''
    raise ValueError(f'{where} is {value!r}; legal is {_name(hint)}{"." if near else ""}{near}')


def _words(hint: Any) -> list[str]:
    """Texts among the literals that a hint allows."""
    if typing.get_origin(hint) is typing.Literal:
        return [a for a in typing.get_args(hint) if isinstance(a, str)]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [word for a in typing.get_args(hint) for word in _words(a)]
    return []


def _name(hint: Any) -> str:
    """A hint in words: `'a', 'b' or None`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is types.NoneType:
        return 'None'
    if origin is typing.Literal:
        return ', '.join(map(repr, args))
    if origin in (types.UnionType, typing.Union):
        return ' or '.join(map(_name, args))
    return str(hint) if origin else getattr(hint, '__name__', str(hint))


def parse_argument(text: str | None, **defaults: str | int | float | bool) -> dict[str, Any]:
    """The `name=value,name=value` behind the colon of --config=FILE:..., typed by the defaults.

    Raises ValueError for an unknown name, with the nearest spelling, or a value of another type.
    """
    found: dict[str, Any] = dict(defaults)
    for part in filter(None, (text or '').split(',')):
        name, equals, value = (p.strip() for p in part.partition('='))
        check_names('the argument of the config', [name], defaults)
        kind = type(defaults[name])
        try:
            if kind is bool:
                found[name] = {'': True, 'true': True, 'false': False}[value.lower()]
            else:
                found[name] = kind(value)
        except (KeyError, ValueError):
            raise ValueError(f'{name} is {value!r}; legal is {kind.__name__}') from None
        if not equals and kind is not bool:
            raise ValueError(f'{name} has no value; write {name}=VALUE')
    return found


def flat(config: Any) -> dict[str, Any]:
    """A config, dataclass or mapping, as field path -> JSON value; what JSON lacks is its text."""
    named = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)  # type: ignore[arg-type]
    plain = json.loads(json.dumps(named, default=str))

    def walk(node: Any, path: str) -> dict[str, Any]:
        if not isinstance(node, dict) or not node:
            return {path: node}
        found: dict[str, Any] = {}
        for name, value in node.items():
            found |= walk(value, f'{path}.{name}' if path else name)
        return found

    return walk(plain, '')


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Fields of two flat configs that differ, as 'FIELD: OLD -> NEW'."""
    missing = object()
    found = []
    for name in sorted({*old, *new}):
        values = [config.get(name, missing) for config in (old, new)]
        if values[0] != values[1]:
            shown = ['not there' if v is missing else repr(v) for v in values]
            found.append(f'config.{name}: {shown[0]} -> {shown[1]}')
    return found
