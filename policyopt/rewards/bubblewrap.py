"""Code in bubblewrap: full CPython in namespaces of its own, one process tree for each run.

Inside there are the interpreter and /usr, read-only and without packages, a small /tmp, and nothing
else: no network, no /proc, no environment, no capability, no other user's processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import math
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from policyopt.rewards import runner, seccomp
from policyopt.rewards.sandbox import (
    CODE_CRASHED,
    CODE_MEMORY,
    CODE_OUTPUT,
    CODE_RAISED,
    CODE_TIMED_OUT,
    Call,
    Clock,
    CodeError,
    Limits,
    SandboxError,
)

PROCESSES, FILES, FILE_SIZE = 16, 64, 16 * 2**20
_START = 30.0  # seconds that starting may take; namespaces take long on a busy machine
_ENVIRONMENT = {'HOME': '/tmp', 'LANG': 'C.UTF-8', 'PATH': '/usr/bin', 'PYTHONHASHSEED': '0'}


class Bubblewrap:
    """A Sandbox of CPython, the running interpreter without its site-packages, in bubblewrap.

    Raises ValueError where bubblewrap is not there, or not allowed to work.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._bwrap = shutil.which('bwrap') or ''
        if not self._bwrap:
            raise ValueError(
                "sandbox is 'bwrap', which is not installed: apt install bubblewrap, or take "
                "'monty'"
            )
        try:
            self._filter = seccomp.program()
            with self.program('def f(): return 1', 'f', Clock(_START)) as call:
                if call((), {}) != 1:
                    raise SandboxError('it does not compute')
        except (CodeError, SandboxError, ValueError) as error:
            raise ValueError(
                f"sandbox is 'bwrap', which does not work here ({error}); user namespaces may be "
                "forbidden, as in many containers: allow them, or take 'monty'"
            ) from error

    @contextlib.contextmanager
    def program(self, source: str, function: str, clock: Clock) -> Iterator[Call]:
        """See `Sandbox`."""
        with self._started(clock) as process:
            _value(process.ask({'kind': 'program', 'source': source}))

            def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
                return _value(process.ask(runner.encode([function, list(args), dict(kwargs)])))

            yield call

    def script(self, source: str, stdin: str, clock: Clock) -> str:
        """See `Sandbox`."""
        with _sealed(stdin.encode()) as given, self._started(clock, given) as process:
            process.say({'kind': 'script', 'source': source})
            text = process.printed()
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CodeError(CODE_RAISED, 'it printed no UTF-8') from error

    def check(self, source: str, call: Call, clock: Clock) -> bool:
        """See `Sandbox`."""
        with self._started(clock) as process:
            said = process.ask({'kind': 'check', 'source': source})
            while 'call' in said:
                args, kwargs = runner.decode(said['call'], math.inf)
                try:
                    answer = {'value': runner.encode(call(args, kwargs))}
                except CodeError as error:
                    if error.error is None:
                        raise
                    answer = {'raised': error.error}
                said = process.ask(answer)
            return 'value' in said

    @contextlib.contextmanager
    def _started(self, clock: Clock, stdin: Any = subprocess.DEVNULL) -> Iterator[_Process]:
        ours, theirs = socket.socketpair()
        with ours, theirs, _sealed(self._filter) as rules, tempfile.TemporaryFile() as errors:
            command = self._command(theirs.fileno(), rules)
            script = stdin is not subprocess.DEVNULL
            try:
                child = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno(), rules],
                    stdin=stdin,
                    stdout=subprocess.PIPE if script else subprocess.DEVNULL,
                    stderr=errors,
                    env={},
                )
            except OSError as error:
                raise SandboxError(f'bubblewrap did not start: {error}') from error
            theirs.close()
            process = _Process(child, ours, Clock(_START), self._limits.output * 1024)
            try:
                with clock.paused():
                    process.wait_until_ready(errors)
                process.clock = clock
                yield process
            finally:
                child.kill()  # the first process in its namespace dies with it, and takes the rest
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()

    def _command(self, channel: int, rules: int) -> list[str]:
        root = os.geteuid() == 0
        memory = self._limits.memory * 2**20
        limits = {
            'RLIMIT_AS': memory,
            'RLIMIT_CPU': math.ceil(self._limits.timeout) + 1,
            'RLIMIT_NPROC': PROCESSES,
            'RLIMIT_NOFILE': FILES,
            'RLIMIT_FSIZE': FILE_SIZE,
            'RLIMIT_CORE': 0,
            'RLIMIT_MEMLOCK': 0,
        }
        # Processes are counted by user, so workers get different ones.
        asked = {'socket': channel, 'limits': limits}
        asked['uid'] = 20_000 + os.getpid() % 40_000 if root else None
        command = [self._bwrap, '--unshare-ipc', '--unshare-pid', '--unshare-net', '--unshare-uts']
        command += ['--unshare-cgroup-try', '--die-with-parent', '--new-session', '--clearenv']
        command += ['--hostname', 'sandbox', '--cap-drop', 'ALL']
        if root:
            command += ['--cap-add', 'CAP_SETUID', '--cap-add', 'CAP_SETGID']
        else:
            command += ['--unshare-user', '--disable-userns']
        for name, value in _ENVIRONMENT.items():
            command += ['--setenv', name, value]
        for path in ('/dev', '/etc', *_parents(os.path.realpath(sys.base_prefix))):
            command += ['--perms', '0755', '--dir', path]
        for path in _readable():
            if os.path.islink(path):
                command += ['--symlink', os.readlink(path), path]
            else:
                command += ['--ro-bind', path, path]
        for path in _hidden():
            command += ['--perms', '0555', '--size', '4096', '--tmpfs', path]
            command += ['--remount-ro', path]
        for device in ('null', 'zero', 'urandom'):
            command += ['--dev-bind', f'/dev/{device}', f'/dev/{device}']
        command += ['--ro-bind-try', '/etc/ld.so.cache', '/etc/ld.so.cache']
        command += ['--ro-bind', str(Path(runner.__file__).resolve()), '/runner.py']
        command += ['--perms', '1777', '--size', str(FILE_SIZE), '--tmpfs', '/tmp']
        command += ['--chdir', '/tmp', '--remount-ro', '/', '--seccomp', str(rules), '--']
        return [*command, _python(), '-I', '-S', '-B', '/runner.py', json.dumps(asked)]


def _python() -> str:
    """The running interpreter, outside any virtual environment."""
    return os.path.realpath(getattr(sys, '_base_executable', sys.executable))


def _parents(path: str) -> list[str]:
    return [str(p) for p in reversed(Path(path).parents)][1:]


def _readable() -> list[str]:
    """What code may read: /usr, its links in /, and the interpreter."""
    found = ['/usr', *(p for p in ('/lib', '/lib64', '/bin') if os.path.lexists(p))]
    prefix = os.path.realpath(sys.base_prefix)
    return found if prefix == '/usr' or prefix.startswith('/usr/') else [*found, prefix]


def _hidden() -> list[str]:
    """Packages among that, whose data may be the tests and their solutions."""
    roots = [path for path in _readable() if not os.path.islink(path)]
    places = ('lib', 'lib64', 'local/lib')
    found = [p for r in roots for at in places for p in glob.glob(f'{r}/{at}/python3*/*-packages')]
    library = os.path.dirname(os.path.realpath(os.__file__))
    found += [p for p in map(os.path.realpath, sys.path) if os.path.isdir(p)]
    kept: list[str] = []
    for path in sorted(set(found) - {library, f'{library}/lib-dynload'}):
        inside = any(path.startswith(f'{root}/') for root in roots)
        hidden = any(path.startswith(f'{other}/') for other in kept)
        if inside and not hidden and not library.startswith(f'{path}/'):
            kept.append(path)
    return kept


@contextlib.contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """A file in memory that nobody can change any more, open at its beginning."""
    number = os.memfd_create('sandbox', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(number), 'wb') as file:
            file.write(data)
        os.lseek(number, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
        yield number
    finally:
        os.close(number)


class _Process:
    """A runner in its sandbox, as seen from here; nothing that it says is trusted."""

    def __init__(self, child: Any, channel: socket.socket, clock: Clock, limit: int):
        self._child, self._channel = child, channel
        self.clock, self._limit = clock, limit
        self._read = bytearray()

    def wait_until_ready(self, errors: Any) -> None:
        """Until it has given up its rights; no code that could lie was run before."""
        try:
            if self._line() != b'"ready"':
                raise SandboxError('the runner did not start')
        except CodeError as error:
            errors.seek(0)
            said = errors.read(2000).decode(errors='replace').strip().splitlines()
            why = said[-1] if said else error
            raise SandboxError(f'bubblewrap: {why}') from error

    def say(self, values: Any) -> None:
        """Send a line."""
        self._channel.settimeout(self.clock.left())
        try:
            self._channel.sendall(json.dumps(values).encode() + b'\n')
        except TimeoutError:
            raise CodeError(CODE_TIMED_OUT) from None
        except OSError:
            raise CodeError(CODE_CRASHED) from None

    def ask(self, values: Any) -> dict[str, Any]:
        """Send a line; returns what it answers, some JSON object."""
        self.say(values)
        try:
            answer = json.loads(self._line())
        except (ValueError, RecursionError) as error:
            raise CodeError(CODE_RAISED, 'what it returned can not be read') from error
        if not isinstance(answer, dict):
            raise CodeError(CODE_RAISED, 'what it returned can not be read')
        return answer

    def printed(self) -> bytes:
        """All that it prints until it ends, which must be by itself and without an error."""
        found = bytearray()
        while True:
            ready, _, _ = select.select([self._child.stdout], [], [], self.clock.left())
            part = os.read(self._child.stdout.fileno(), 1 << 16) if ready else None
            if part == b'':
                break
            found += part or b''
            if len(found) > self._limit:
                raise CodeError(CODE_OUTPUT)
        try:
            status = self._child.wait(self.clock.left())
        except subprocess.TimeoutExpired:
            raise CodeError(CODE_TIMED_OUT) from None
        if status:
            raise CodeError(CODE_RAISED, f'exit status {status}')
        return bytes(found)

    def _line(self) -> bytes:
        while b'\n' not in self._read:
            self._channel.settimeout(self.clock.left())
            try:
                part = self._channel.recv(1 << 16)
            except TimeoutError:
                raise CodeError(CODE_TIMED_OUT) from None
            except OSError:
                part = b''
            if not part:
                raise CodeError(CODE_CRASHED)
            self._read += part
            if len(self._read) > self._limit:
                raise CodeError(CODE_OUTPUT)
        line, _, rest = bytes(self._read).partition(b'\n')
        self._read = bytearray(rest)
        return line


def _value(said: Mapping[str, Any]) -> Any:
    """The value in an answer, or the error in it."""
    try:
        if 'value' in said:
            return runner.decode(said['value'])
        name, message = said['raised']
        name, message = str(name)[:100], str(message)[:500]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CodeError(CODE_RAISED, 'what it returned can not be read') from error
    if name == 'MemoryError':
        raise CodeError(CODE_MEMORY)
    raise CodeError(CODE_RAISED, f'{name}: {message}', (name, message))
