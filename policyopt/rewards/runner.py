"""A script inside a bubblewrap sandbox that runs code and answers calls; needs no package.

What it is told comes over one socket as lines of JSON, and its answers leave the same way. Code
under test shares this process and can take the socket; all it can say there is what its functions
return. Expected results never come here: they are compared on the other side.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

# Members of sets and dicts in one value whose hashes can be chosen so that they collide: all but
# texts and smaller ints, which are their own hashes.
MEMBERS, OWN_HASH = 4000, 2**61 - 1
_KINDS = {'tuple': tuple, 'set': set, 'frozenset': frozenset}


def encode(value: Any) -> Any:
    """A plain value (None, numbers, texts, bytes, lists, tuples, sets, dicts) as JSON values.

    Subclasses are taken for what they extend. Raises TypeError for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, bytes | bytearray):
        return {'bytes': bytes(value).hex()}
    if isinstance(value, complex):
        return {'complex': [value.real, value.imag]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(v) for v in value]}
    if isinstance(value, dict):
        return {'dict': [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(f'{type(value).__name__} is no plain value')


def decode(value: Any, members: float = MEMBERS) -> Any:
    """What `encode` was given; raises ValueError or TypeError for what it does not make.

    `members` is inf for what comes from outside of a sandbox.
    """
    left = members

    def member(value: Any) -> Any:
        nonlocal left
        value = of(value)
        left -= not (isinstance(value, str) or (isinstance(value, int) and abs(value) < OWN_HASH))
        if left < 0:
            raise ValueError(f'more than {MEMBERS} members of sets and dicts that are no texts')
        return value

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((name, inner),) = value.items()
        if name == 'bytes':
            return bytes.fromhex(inner)
        if name == 'complex':
            return complex(*inner)
        if name == 'dict':
            return {member(k): of(v) for k, v in inner}
        return _KINDS[name]((of if name == 'tuple' else member)(v) for v in inner)

    return of(value)


def exception(name: str, message: str) -> Exception:
    """The built-in exception of that name, RuntimeError where there is none."""
    kind = vars(__import__('builtins')).get(name)
    known = isinstance(kind, type) and issubclass(kind, Exception)
    try:
        return kind(message) if known else RuntimeError(message)
    except TypeError:  # UnicodeDecodeError takes more
        return RuntimeError(message)


def main(asked: Mapping[str, Any]) -> None:
    """Give up what is not needed, say so, and do the one job that comes."""
    for name, value in asked['limits'].items():
        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, value))
    if asked['uid'] is not None:  # of root, whom no limit of processes binds
        os.setgroups([])
        os.setresgid(*[asked['uid']] * 3)
        os.setresuid(*[asked['uid']] * 3)
    listen, speak = os.fdopen(asked['socket'], 'rb'), os.fdopen(os.dup(asked['socket']), 'wb', 0)

    def say(values: Any) -> None:
        speak.write(json.dumps(values).encode() + b'\n')

    say('ready')
    job = json.loads(listen.readline())
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    sys.argv = ['solution.py']
    if job['kind'] == 'script':
        listen.close()
        speak.close()
        _execute(job['source'], '__main__')
        return

    def tell(what: Callable[[], Any]) -> None:
        try:
            said = {'value': encode(what())}
            json.dumps(said)
        except BaseException as error:
            said = {'raised': [type(error).__name__, str(error)[:500]]}
        say(said)

    if job['kind'] == 'program':
        _program(job['source'], listen, tell)
    else:
        _check(job['source'], listen, say, tell)


def _execute(source: str, name: str, **given: Any) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    vars(module).update(given)
    exec(compile(source, 'solution.py', 'exec'), vars(module))
    return vars(module)


def _program(source: str, listen: Any, tell: Callable[[Callable[[], Any]], None]) -> None:
    """Run the code, then its functions on what comes."""
    scope: dict[str, Any] = {}

    def begin() -> None:
        scope.update(_execute(source, 'solution'))

    def call(line: bytes) -> Any:
        name, args, kwargs = decode(json.loads(line), math.inf)
        if name not in scope:
            raise NameError(f'{name} is not defined')
        return scope[name](*args, **kwargs)

    tell(begin)
    for line in listen:
        tell(lambda line=line: call(line))


def _check(source: str, listen: Any, say: Callable, tell: Callable) -> None:
    """Run a dataset's own check, whose `candidate` lives elsewhere."""

    def candidate(*args: Any, **kwargs: Any) -> Any:
        say({'call': encode([list(args), kwargs])})
        answer = json.loads(listen.readline())
        if 'raised' in answer:
            raise exception(*answer['raised'])
        return decode(answer['value'])

    def run() -> None:
        _execute(source, 'check', candidate=candidate)

    tell(run)


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
