"""Rewards by import path and arguments, which other processes can build, too."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from policyopt import checks
from policyopt.rewards.verdict import Reward, Score

HOME = 'policyopt.rewards'  # of names without a module


class Spec(NamedTuple):
    """A factory by import path, with its arguments, in which Specs stand for what they make.

    Unlike the closure that it makes, it can be sent to another process.
    """

    path: str
    kwargs: Mapping[str, Any] = {}


def build(spec: Spec) -> Any:
    """Import the factory and call it, after those in its arguments.

    Raises ValueError or TypeError as `find` and the factory do.
    """
    return find(spec.path)(**{name: _built(value) for name, value in spec.kwargs.items()})


def _built(value: Any) -> Any:
    if isinstance(value, Spec):
        return build(value)
    if isinstance(value, collections.abc.Mapping):
        return {name: _built(v) for name, v in value.items()}
    return value


def walk(spec: Spec) -> Iterator[Spec]:
    """The spec, and those in its arguments."""
    yield spec
    for value in spec.kwargs.values():
        inner = value.values() if isinstance(value, collections.abc.Mapping) else (value,)
        for each in inner:
            if isinstance(each, Spec):
                yield from walk(each)


def arguments(spec: Spec) -> dict[str, Any]:
    """What the factory of a spec gets, defaults included."""
    bound = inspect.signature(find(spec.path)).bind(**spec.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def find(path: str, where: str = 'reward') -> Callable[..., Any]:
    """The function at a dotted path, or of `policyopt.rewards` for a name alone.

    Raises ValueError, naming `where` and the nearest spelling, where there is none, and for the
    main script, which other processes can't import.
    """
    module_name, _, name = path.rpartition('.')
    if module_name == '__main__':
        raise ValueError(
            f'{where} is {path!r}; legal is a function of a module: processes that judge answers '
            'import it, and the main script is not for import'
        )
    try:
        module = importlib.import_module(module_name or HOME)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{where} is {path!r}: {error}. Is its folder on PYTHONPATH? A name without a module '
            f'is one of {HOME}.{checks.nearest(name, names())}'
        ) from None
    make = vars(module).get(name)
    if not inspect.isfunction(make):
        known = names() if module.__name__ == HOME else _functions(module)
        found = 'not there' if make is None else f'{type(make).__name__}, not a function'
        raise ValueError(f'{where} is {path!r}: {found}.{checks.nearest(name, known)}')
    return make


def names() -> tuple[str, ...]:
    """The rewards of `policyopt.rewards`."""
    module = importlib.import_module(HOME)
    return tuple(sorted(k for k, v in vars(module).items() if getattr(v, 'slot', '') == 'reward'))


def _functions(module: Any) -> set[str]:
    return {k for k, v in vars(module).items() if inspect.isfunction(v)}


def read(path: str, kwargs: Mapping[str, Any], scorer: Spec, where: str = 'config.reward') -> Spec:
    """The reward that a config asks for, checked by building it once.

    Arguments of type `Reward` are given as a path, or as a section {'reward': PATH, ARGUMENTS}; one
    of type `Score` that is left out is the task's own scorer.

    Args:
      path: of a factory, which returns a Reward.
      kwargs: its arguments.
      scorer: of the task.
      where: field of the config, for errors, which name its `_kw` for arguments.

    Raises ValueError or TypeError naming the field, its value and the nearest spelling.
    """
    spec = _read(path, kwargs, scorer, where)
    reward = build(spec)
    if not callable(reward):
        raise ValueError(f'{where} is {path!r}, which made {reward!r}; legal is a Reward')
    return spec


def _read(path: str, kwargs: Mapping[str, Any], scorer: Spec, where: str) -> Spec:
    make = find(path, where)
    checks.check_arguments(make, (), kwargs, partial=True)
    hints = typing.get_type_hints(make)
    arguments: dict[str, Any] = {}
    for name in inspect.signature(make).parameters:
        hint = hints.get(name)
        kinds = (hint, *typing.get_args(hint))
        if name not in kwargs:
            if Score in kinds:
                arguments[name] = scorer
        elif Reward in kinds and hint != Mapping[str, Reward]:
            arguments[name] = _inner(kwargs[name], scorer, f'{where}_kw.{name}')
        elif hint == Mapping[str, Reward]:
            if not isinstance(kwargs[name], collections.abc.Mapping):
                raise ValueError(f'{where}_kw.{name} is {kwargs[name]!r}; legal is NAME: REWARD')
            inner = kwargs[name].items()
            arguments[name] = {k: _inner(v, scorer, f'{where}_kw.{name}.{k}') for k, v in inner}
        else:
            arguments[name] = kwargs[name]
    checks.check_arguments(make, (), arguments)
    return Spec(path, arguments)


def _inner(value: Any, scorer: Spec, where: str) -> Any:
    if isinstance(value, str):
        return _read(value, {}, scorer, where)
    if isinstance(value, collections.abc.Mapping) and isinstance(value.get('reward'), str):
        rest = {name: v for name, v in value.items() if name != 'reward'}
        return _read(value['reward'], rest, scorer, where)
    if value is None:
        return None
    raise ValueError(
        f"{where} is {value!r}; legal is the name of a reward, or {{'reward': NAME, ARGUMENTS}}"
    )
