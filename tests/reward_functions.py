"""Rewards that other processes import, good and hostile; each answer says what is done to it."""

import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np

from policyopt.rewards import Verdict


def _hang():
    while True:
        pass


def _big_power():
    return 9 ** (9**9)  # in C, deaf to signals and to other threads


def _segfault():
    ctypes.string_at(0)


def _deep():
    return _deep() + 1


def _stuck_child():
    if os.fork() == 0:
        time.sleep(3600)
    time.sleep(3600)


def _kill_soon():
    """Judged well, but its process dies a little later."""
    threading.Timer(0.15, os._exit, [3]).start()
    return Verdict(1.0, 'right', True)


def _write_rubbish():
    for number in range(3, 64):
        try:
            os.write(number, b'{{{\n')
        except OSError:
            continue


ACTS = {
    'hang': _hang,
    'sleep': lambda: time.sleep(3600),
    'power': _big_power,
    'fork': _stuck_child,
    'exit': lambda: os._exit(0),
    'segfault': _segfault,
    'abort': os.abort,
    'kill': lambda: os.kill(os.getpid(), signal.SIGKILL),
    'kill_soon': _kill_soon,
    'parent': lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(3600)),
    'rubbish': _write_rubbish,
    'memory': lambda: bytearray(1 << 40),
    'hoard': lambda: [np.empty(1 << 26, np.uint8) for _ in range(1 << 20)],
    'deep': _deep,
    'raise': lambda: 1 / 0,
    'quit': lambda: sys.exit(0),
    'interrupt': lambda: signal.raise_signal(signal.SIGINT),
    'none': lambda: None,
    'text': lambda: 'one',
    'inf': lambda: float('inf'),
    'nan': lambda: Verdict(float('nan'), 'undecided'),
    'flood': lambda: print('x' * (1 << 22), flush=True),
    'slow': lambda: time.sleep(0.2),
    'pid': lambda: Verdict(float(os.getpid()), 'right'),
    'jax': lambda: Verdict(float('jax' in sys.modules), 'right'),
}


def acting():
    """A reward of 1, after what the answer asks for."""

    def reward(text, tokens, example):
        found = ACTS[text]() if text in ACTS else None
        if text in ('none', 'text', 'inf', 'nan') or isinstance(found, Verdict):
            return found
        return Verdict(1.0, 'right', True)

    return reward


def moody():
    """Right or wrong by the answer, but late by chance: a second time says nothing of the first."""

    def reward(text, tokens, example):
        if int.from_bytes(os.urandom(2), 'big') % 8 == 0:
            time.sleep(3600)
        return Verdict(float(len(tokens) % 2), 'right' if len(tokens) % 2 else 'wrong')

    return reward


def odd():
    """Right where the first token is odd, which any policy has to learn."""
    return lambda text, tokens, example: Verdict(float(tokens[0] % 2), 'first token')


def broken():
    """A reward that loads in no other process than the one that trains."""
    if 'jax' not in sys.modules:
        raise RuntimeError('no device here')
    return acting()


def not_a_reward():
    return 3
