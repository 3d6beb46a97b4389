"""Code in pydantic-monty: an interpreter of a subset of Python that has no way out.

It is a program of its own, without files, network, processes or C: code reaches what it is given
and nothing else. It lacks parts of the language (yield, inheritance) and most of the library.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import io
import json
import os
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policyopt.rewards.runner import decode, exception
from policyopt.rewards.sandbox import (
    CODE_CRASHED,
    CODE_MEMORY,
    CODE_OUTPUT,
    CODE_RAISED,
    CODE_TIMED_OUT,
    UNSUPPORTED,
    Call,
    Clock,
    CodeError,
    Limits,
    SandboxError,
)

_CALLS = 100_000  # of candidate(), in one run
_GRACE = 1.0  # seconds past the limit after which the interpreter is killed
# The same each time: nobody's clock, no waiting, one seed.
_POLICY = {
    'datetime': datetime.datetime(2000, 1, 1),
    'sleep': 'zero',
    'random_start': {'seed': 0},
}
# The part of `string` that is data; monty has none of it.
_STRING = {
    name: value
    for name, value in vars(string).items()
    if type(value) is str and not name.startswith('_')
}
# Values leave as a text alone: the interpreter would make sets and dicts of them in this process,
# whose members can be chosen so that their hashes collide. The text is made before code can give
# other meanings to the names that it is made by, and whatever code puts in its place is a text.
_SPEAK = """
import json
def _sandbox_plain(value, isinstance=isinstance, bool=bool, int=int, float=float, str=str,
                   bytes=bytes, complex=complex, list=list, dict=dict, type=type,
                   TypeError=TypeError, kinds=[('tuple', tuple), ('set', set),
                                               ('frozenset', frozenset)]):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_sandbox_plain(v) for v in value]
    if isinstance(value, dict):
        return {'dict': [[_sandbox_plain(k), _sandbox_plain(v)] for k, v in value.items()]}
    for name, kind in kinds:
        if isinstance(value, kind):
            return {name: [_sandbox_plain(v) for v in value]}
    if isinstance(value, bytes):
        return {'bytes': value.hex()}
    if isinstance(value, complex):
        return {'complex': [value.real, value.imag]}
    raise TypeError(f'{type(value).__name__} is no plain value')
def _sandbox_said(value, dumps=json.dumps):
    return dumps(_sandbox_plain(value))
"""
# input() without a call out of the interpreter, for the same reason. It lacks EOFError.
_LISTEN = """
EOFError = RuntimeError
def input(prompt='', left=_given_lines, error=RuntimeError):
    if not left:
        raise error('EOF when reading a line')
    return left.pop()
"""


class MontySandbox:
    """A Sandbox of pydantic-monty; each run has an interpreter process that no other run had.

    Raises ValueError where pydantic-monty is not installed or does not start.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._pool: tuple[int, Any] | None = None
        if importlib.util.find_spec('pydantic_monty') is None:
            raise ValueError(
                "sandbox 'monty' needs pydantic-monty, not installed: pip install 'policyopt[code]'"
            )
        # In a process of its own: threads of a pool would not survive the forks of `Workers`.
        script = (
            'import pydantic_monty as m\nwith m.Monty() as p, p.checkout() as s: s.feed_run("1")'
        )
        done = subprocess.run(
            [sys.executable, '-c', script], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ['it ended'])[-1]
            raise ValueError(f"sandbox is 'monty', which does not start here: {why}")
        import pydantic_monty  # processes forked from this one have it, then

        self._monty = pydantic_monty

    @contextlib.contextmanager
    def program(self, source: str, function: str, clock: Clock) -> Iterator[Call]:
        """See `Sandbox`."""
        with self._session(clock) as session:
            self._run(session, _SPEAK, clock)
            self._do(session, source, clock)

            def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
                given = {'_given_args': list(args), '_given_kwargs': dict(kwargs)}
                line = f"f'{{_sandbox_said({function}(*_given_args, **_given_kwargs))}}'"
                out = self._monty.CollectString(self._limits.output * 1024)
                found = self._run(session, line, clock, inputs=given, print_callback=out)
                return _value(found, self._limits.output * 1024)

            yield call

    def script(self, source: str, stdin: str, clock: Clock) -> str:
        """See `Sandbox`; the input is read by `input()` alone."""
        lines = io.StringIO(stdin, newline=None).read().removesuffix('\n').split('\n')[::-1]
        with self._session(clock) as session:
            self._run(session, _LISTEN, clock, inputs={'_given_lines': lines if stdin else []})
            return self._do(session, source, clock)

    def _do(self, session: Any, source: str, clock: Clock) -> str:
        """Run code for what it prints; a value that it ends with stays where it is."""
        out = self._monty.CollectString(self._limits.output * 1024)
        self._run(session, f'{source}\nNone', clock, print_callback=out)
        return out.output

    def check(self, source: str, call: Call, clock: Clock) -> bool:
        """See `Sandbox`."""
        failed: list[CodeError] = []

        def candidate(*args: Any, **kwargs: Any) -> Any:
            try:
                clock.left()
                return call(args, kwargs)
            except CodeError as error:
                if error.error is None:
                    failed.append(error)
                    raise RuntimeError(error.kind) from None
                raise exception(*error.error) from None

        given = {'candidate': candidate}
        out = self._monty.CollectString(None)
        with self._session(clock) as session:
            try:
                self._run(session, source, clock, external_lookup=given, print_callback=out)
            except CodeError as error:
                if error.kind not in (CODE_RAISED, UNSUPPORTED) and not failed:
                    raise
                if error.kind == UNSUPPORTED and not failed:
                    raise SandboxError(f'the check: {error.detail}') from error
                passed = False
            else:
                passed = True
        if failed:
            raise failed[0]
        return passed

    @contextlib.contextmanager
    def _session(self, clock: Clock) -> Iterator[Any]:
        limits = {
            'max_feed_duration_secs': clock.left(),
            'max_memory': self._limits.memory * 2**20,
            'max_suspensions': _CALLS,
        }
        with contextlib.ExitStack() as stack:
            try:
                with clock.paused():
                    modules = {'string': self._monty.ExternalModule(_STRING)}
                    session = self._here().checkout(
                        limits=limits, os_policy=_POLICY, external_modules=modules
                    )
                    stack.enter_context(session)
            except (self._monty.MontyError, OSError, TimeoutError) as error:
                raise SandboxError(f'pydantic-monty: {error}') from error
            yield session

    def _here(self) -> Any:
        """This process's pool of interpreters."""
        if self._pool is None or self._pool[0] != os.getpid():
            pool = self._monty.Monty(
                min_processes=1,
                max_processes=4,
                checkout_timeout=30.0,
                request_timeout=self._limits.timeout + _GRACE,
                max_checkouts_per_worker=1,  # whatever code did to its process ends with it
            )
            self._pool = os.getpid(), pool.__enter__()
        return self._pool[1]

    def _run(self, session: Any, source: str, clock: Clock, **given: Any) -> Any:
        monty = self._monty
        # A session's own limit is for one run, and time goes on from one to the next.
        end = threading.Timer(clock.left(), os.kill, (session.worker_pid, signal.SIGKILL))
        end.start()
        try:
            return session.feed_run(source, **given)
        except monty.MontyCrashedError as error:
            clock.left()
            raise CodeError(CODE_TIMED_OUT if error.timed_out else CODE_CRASHED) from None
        except monty.MontySyntaxError as error:
            raise CodeError(CODE_RAISED, str(error)) from None
        except monty.MontyRuntimeError as error:
            raise _failed(str(error), self._limits.output * 1024) from None
        except (monty.MontyConversionError, ValueError, TypeError, RecursionError) as error:
            raise CodeError(CODE_RAISED, f'what it returned is no plain value: {error}') from None
        except monty.MontyError as error:
            raise SandboxError(f'pydantic-monty: {error}') from error
        finally:
            end.cancel()


def _failed(said: str, output: int) -> CodeError:
    """The error that the interpreter tells of as `NAME: MESSAGE`."""
    name, _, message = said.partition(':')
    message = message.strip()
    if name == 'TimeoutError' and 'limit exceeded' in message:
        return CodeError(CODE_TIMED_OUT)
    if name == 'MemoryError':
        return CodeError(CODE_OUTPUT if message.endswith(f'> {output} bytes') else CODE_MEMORY)
    module = message.removeprefix("No module named '").split("'")[0].split('.')[0]
    lacks = name == 'ModuleNotFoundError' and module in sys.stdlib_module_names
    if name == 'NotImplementedError' or lacks or 'Internal error in monty' in message:
        return CodeError(UNSUPPORTED, message)
    return CodeError(CODE_RAISED, said, (name, message))


def _value(said: str, size: int) -> Any:
    """The value that a text of at most that size stands for."""
    if len(said) > size:
        raise CodeError(CODE_OUTPUT)
    try:
        return decode(json.loads(said))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CodeError(CODE_RAISED, 'what it returned can not be read') from error
