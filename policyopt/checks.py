"""Errors at the start: misspelt names and numbers out of range, with what is legal and near."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec('P')
R = TypeVar('R')


def hint(name: str, known: Iterable[str]) -> str:
    """' Did you mean `x`?' for the known name closest in spelling, '' where none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f' Did you mean `{close[0]}`?' if close else ''


def nearest(name: str, known: Iterable[str]) -> str:
    """Sentence naming the closest known spelling and all legal ones, for the end of an error."""
    known = sorted(known)
    return f'{hint(name, known)} Known: {", ".join(known) or "none"}.'


def one_of(field: str, value: Any, legal: Iterable[str]) -> None:
    """Raise ValueError, naming the field and the nearest legal value, unless value is legal."""
    legal = tuple(legal)
    if value not in legal:
        raise ValueError(f'{field}={value!r} is not known.{nearest(str(value), legal)}')


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> Any:
    """Return value; raises where it is no number in [low, high]. Traced values pass unchecked."""
    jax: Any = sys.modules.get('jax')  # processes that judge answers do without it
    if jax and any(isinstance(x, jax.core.Tracer) for x in (value, low, high)):
        return value
    arrays = (np.ndarray, jax.Array) if jax else (np.ndarray,)
    scalar = isinstance(value, arrays) and value.ndim == 0
    if isinstance(value, bool | np.bool_) or not (scalar or isinstance(value, numbers.Real)):
        raise TypeError(f'{name} must be a number, got {value!r}')
    if not low <= float(value) <= high:  # pyright: ignore[reportArgumentType]
        raise ValueError(f'{name} must lie in [{low:g}, {high:g}], got {value!r}')
    return value


def check_arguments(
    make: Callable, args: tuple, kwargs: Mapping[str, Any], partial: bool = False
) -> None:
    """Raise TypeError, with the nearest spelling, where make(*args, **kwargs) can't be called.

    With `partial`, more arguments may follow.
    """
    parameters = inspect.signature(make).parameters
    for name in kwargs:
        if name not in parameters:
            raise TypeError(
                f'{make.__name__}() has no argument `{name}`.{nearest(name, parameters)}'
            )
    signature = inspect.signature(make)
    try:
        (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f'{make.__name__}(): {error}. Arguments: {", ".join(parameters)}.'
        ) from None


def factory(slot: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that makes a part of the named slot.

    A misspelt argument raises with the nearest spelling; the part made remembers its slot, which
    `policy_loss` checks, and prints as the call that made it.
    """

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(make)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check_arguments(make, args, kwargs)
            part = make(*args, **kwargs)
            if inspect.isfunction(part):
                shown = [repr(a) for a in args] + [f'{k}={v!r}' for k, v in kwargs.items()]
                part.__qualname__ = part.__name__ = f'{make.__name__}({", ".join(shown)})'
                part.slot = slot  # pyright: ignore[reportFunctionMemberAccess]
            return part

        checked.slot = slot  # pyright: ignore[reportAttributeAccessIssue]
        return checked

    return decorate


def check_called(name: str, value: Any) -> None:
    """Raise TypeError where value is a factory where what it makes belongs."""
    if inspect.isfunction(value) and hasattr(value, '__wrapped__') and hasattr(value, 'slot'):
        raise TypeError(f'{name}={value.__name__}: call it, as in `{value.__name__}(...)`')


def check_slot(slot: str, part: Any) -> None:
    """Raise TypeError where part is no function, an uncalled factory, or made for another slot."""
    check_called(slot, part)
    found = getattr(part, 'slot', slot)
    if not callable(part) or found != slot:
        shown = getattr(part, '__name__', repr(part))
        kind = f'part of slot {found!r}' if found != slot else 'not a function'
        raise TypeError(f'{slot}={shown}: {kind}')


def unknown_name(module: str, name: str, scope: dict[str, Any], slots: tuple[str, ...]) -> Any:
    """For a module's __getattr__: raise AttributeError with the nearest public factory."""
    known = [k for k, v in scope.items() if getattr(v, 'slot', '') in slots]
    raise AttributeError(f'{module} has no `{name}`.{nearest(name, known)}')
