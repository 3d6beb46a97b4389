"""Programs in several processes that are one machine to jax."""

import os
import socket
import subprocess
import sys
import textwrap
import time

DEVICES = 8
START = """
import sys
from policyopt import hosts, sharding

port, count, index, args = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
if count > 1:
    hosts.start(f'127.0.0.1:{port}', count, index)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return str(probe.getsockname()[1])


def environment(count):
    flags = f'--xla_force_host_platform_device_count={DEVICES // count}'
    return {**os.environ, 'XLA_FLAGS': flags + ' --xla_backend_optimization_level=0'}


def run(count, program, *args, timeout=300):
    """What each of `count` processes printed, which have `DEVICES` devices together.

    The program finds `count`, `index` and `args`, and the processes joined.
    """
    port = free_port()
    command = [sys.executable, '-c', START + textwrap.dedent(program), port, str(count)]
    processes = [
        subprocess.Popen(
            [*command, str(index), *map(str, args)],
            env=environment(count),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]
    try:
        out = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, out, strict=True):
        assert process.returncode == 0, text
    return out


def wait_for(there, running, timeout=300):
    """Return when `there()`; AssertionError where one of the processes ends before."""
    end = time.monotonic() + timeout
    while not there():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in running)
        time.sleep(0.2)
