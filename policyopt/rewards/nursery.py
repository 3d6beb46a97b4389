"""Processes that judge answers: a script that loads a reward once, and forks workers on demand.

It runs apart from the process that trains, which has threads and a device and must not fork; its
own forks take milliseconds, so a worker that was killed is soon replaced. It is driven through one
socket: a request of the reward, then a byte a command. Each worker has a socket of its own, on
which it reads cases and writes a line of JSON for each: what comes from a worker, which has handled
text that a model wrote, is never unpickled.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from typing import Any

SIZE = struct.Struct('<Q')
FORK, END = b'f', b'k'
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the package


def receive(channel: socket.socket) -> bytes:
    """A message of `send`; EOFError where the other side is gone."""
    return _exactly(channel, SIZE.unpack(_exactly(channel, SIZE.size))[0])


def send(channel: socket.socket, message: bytes) -> None:
    """Send the message after its length."""
    channel.sendall(SIZE.pack(len(message)) + message)


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = channel.recv(min(size - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _say(channel: socket.socket, values: Any) -> None:
    channel.sendall(json.dumps(values).encode() + b'\n')


def work(channel: socket.socket, reward: Any, memory: int) -> None:
    """Judge what comes, one case after another, until the other side is gone."""
    from policyopt.rewards.verdict import RAISED, fault, judged, to_json

    _say(channel, os.getpid())
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while True:
        for data in pickle.loads(receive(channel)):
            try:
                case = pickle.loads(data)
            except Exception as error:
                verdict = fault(RAISED, f'its example can not be read: {error!r}')
            else:
                verdict = judged(reward, case)
            _say(channel, to_json(verdict))


def _in_child(control: socket.socket, number: int, reward: Any, memory: int) -> None:
    """The life of a worker, in a process group of its own that can be killed as a whole."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
        control.close()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # what a reward prints has no place in a run's display
            os.dup2(quiet, stream)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        work(socket.socket(fileno=number), reward, memory)
    except (EOFError, OSError):
        status = 0
    finally:
        os._exit(status)


def _load(request: bytes) -> tuple[Any, int]:
    """The reward that was asked for, and the bytes that a worker may have."""
    asked: Mapping[str, Any] = pickle.loads(request)
    sys.path[:] = asked['path']
    _bare_package()
    from policyopt.rewards import spec

    return spec.build(spec.Spec(*asked['reward'])), asked['memory']


def _bare_package() -> None:
    """Let submodules of policyopt load without its names, which load jax; those load when used."""
    init = os.path.join(_ROOT, '__init__.py')
    found: Any = importlib.util.spec_from_file_location(
        'policyopt', init, submodule_search_locations=[_ROOT]
    )
    module: Any = importlib.util.module_from_spec(found)
    sys.modules['policyopt'] = module

    def later(name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        if importlib.util.find_spec(f'policyopt.{name}'):
            return importlib.import_module(f'policyopt.{name}')
        del module.__getattr__
        found.loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = later


def main(number: int) -> None:
    """Serve until the process that started this one is gone; no worker outlives it."""
    control = socket.socket(fileno=number)
    try:
        reward, memory = _load(receive(control))
    except BaseException as error:
        trace = ''.join(traceback.format_exception_only(error)).strip()
        _say(control, {'error': trace})
        return
    gc.collect()
    gc.freeze()  # pages of what is loaded stay shared
    _say(control, {'ready': True})
    alive: set[int] = set()
    try:
        while True:
            command, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if command == FORK:
                alive.add(_fork(control, descriptors[0], reward, memory))
            elif command == END:
                _end(alive, SIZE.unpack(_exactly(control, SIZE.size))[0])
            else:
                break
    except (EOFError, OSError):
        pass
    finally:
        for pid in list(alive):
            _end(alive, pid)


def _fork(control: socket.socket, number: int, reward: Any, memory: int) -> int:
    pid = os.fork()
    if pid == 0:
        _in_child(control, number, reward, memory)
    os.close(number)
    return pid


def _end(alive: set[int], pid: int) -> None:
    """Kill a worker with all that it started. It is waited for here alone, so its id is its own."""
    if pid not in alive:
        return
    for kill in (os.killpg, os.kill):  # it may have died before it had a group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    alive.discard(pid)


if __name__ == '__main__':
    main(int(sys.argv[1]))
