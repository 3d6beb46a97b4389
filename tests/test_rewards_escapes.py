"""Code that tries to get out, to hang or to forge: none succeeds, and the next is judged normally.

Each sandbox that the machine has is attacked; pydantic-monty is everywhere that tests are.
"""

import errno
import os
import shutil
import socket
import struct
import subprocess
import time

import pytest

from policyopt import rewards
from policyopt.rewards import seccomp
from policyopt.rewards.sandbox import Clock, Limits, make
from tests.escapes import ESCAPES, HEAD, HUNTS

SANDBOXES = ('monty', *(('bwrap',) if shutil.which('bwrap') else ()))
TIMEOUT = 0.7
HONEST = {'tests': {'function': 'f', 'cases': [[[3], 4], [[-1], 0]]}}
SECRET = 'fr7Qm2-xw81'


@pytest.fixture(scope='module', params=SANDBOXES)
def judge(request):
    return rewards.code_tests(sandbox=request.param, timeout=TIMEOUT, memory=128)


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    """A folder with a file, a variable, a server and a process that code should not reach."""
    place = tmp_path_factory.mktemp('place')
    (place / 'canary').write_text('bird')
    os.environ['CANARY'] = 'bird-7713'
    sleeper = subprocess.Popen(['sleep', '1000'])
    with socket.create_server(('127.0.0.1', 0)) as server:
        head = HEAD.format(place=place, canary='bird-7713')
        head += f'PORT = {server.getsockname()[1]}\nHOST = {sleeper.pid}\n'
        yield place, head, sleeper
    del os.environ['CANARY']
    sleeper.kill()
    sleeper.wait()


def descendants():
    """Processes below this one, by id."""
    found = subprocess.run(['ps', '-eo', 'pid=,ppid='], capture_output=True, text=True).stdout
    parents = {int(a): int(b) for a, b in map(str.split, found.splitlines())}
    below = {os.getpid()}
    while new := {p for p, parent in parents.items() if parent in below} - below:
        below |= new
    return below


@pytest.mark.parametrize('name', ESCAPES)
def test_escape(judge, world, name):
    place, head, sleeper = world
    before = time.monotonic()
    # In two cases, so that what is left by the first call is there in the second one alone.
    hidden = [[[3], 'ESCAPED']] * (1 if 'leaves a file' in name else 2)
    verdict = judge(head + ESCAPES[name], (), {'tests': {'function': 'f', 'cases': hidden}})
    assert verdict.value == 0 and verdict.right is False, verdict
    assert time.monotonic() - before < TIMEOUT + 20  # a busy machine; a hang would have no end
    assert sorted(p.name for p in place.iterdir()) == ['canary']
    assert sleeper.poll() is None
    verdict = judge('def f(x):\n    return x + 1', (), HONEST)
    assert (verdict.value, verdict.reason) == (1.0, 'right')


@pytest.mark.parametrize('name', HUNTS)
def test_what_is_expected_is_not_there_to_be_found(judge, name):
    tests = {'function': 'f', 'cases': [[[3], SECRET]]}
    verdict = judge(HUNTS[name], (), {'tests': tests})
    assert verdict.value == 0 and verdict.right is False
    checked = {'function': 'f', 'check': CHECK}
    assert judge(HUNTS[name], (), {'tests': checked}).right is False


@pytest.mark.parametrize('name', SANDBOXES)
def test_packages_and_what_they_hold_are_not_there_to_be_read(name, monkeypatch):
    # Where a dataset is installed beside the interpreter, its solutions are, too.
    of_library = os.path.join(os.path.dirname(os.path.realpath(os.__file__)), 'site-packages')
    monkeypatch.syspath_prepend('/usr/share')
    judge = rewards.code_tests(sandbox=name)
    code = 'import os\ndef f(x):\n    return sorted(os.listdir(x))'
    for folder in filter(os.path.isdir, ('/usr/share', of_library)):
        seen = sorted(os.listdir(folder))
        verdict = judge(code, (), {'tests': {'function': 'f', 'cases': [[[folder], seen]]}})
        assert seen and verdict.right is False, folder


def verdict_of(program, call, arch, flags):
    """What the kernel would answer: the filter run instruction by instruction."""
    data = struct.pack('<IIQQ', call, arch, 0, flags) + bytes(40)
    lines = list(struct.iter_unpack('<HBBI', program))
    at, value = 0, 0
    while True:
        code, yes, no, k = lines[at]
        at += 1
        if code == 0x06:  # return
            return k
        if code == 0x20:  # load
            (value,) = struct.unpack_from('<I', data, k)
        else:
            found = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += yes if found else no


@pytest.mark.parametrize(('machine', 'column'), [('x86_64', 0), ('aarch64', 1)])
def test_the_filter_of_system_calls(machine, column):
    program = seccomp.program(machine)
    arch = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}[machine]
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    refused = {numbers[column] for numbers in seccomp._CALLS.values()}
    refused |= set(seccomp._EVERYWHERE.values())
    clone = (56, 220)[column]
    for call in range(600):
        found = verdict_of(program, call, arch, 0)
        want = refuse if call in refused else allow
        assert found == (0x00050000 | errno.ENOSYS if call == 435 else want), call
        assert verdict_of(program, call, 0x40000003, 0) == kill  # 32 bits
    for bit in (17, 25, 26, 27, 28, 29, 30):  # CLONE_NEWNS to CLONE_NEWNET
        assert verdict_of(program, clone, arch, 1 << bit | 17) == refuse
    assert verdict_of(program, clone, arch, 0x3D0F00) == allow  # a thread
    assert verdict_of(program, 0x40000000 + 39, arch, 0) == refuse  # x32
    with pytest.raises(ValueError, match='machine is riscv64; legal is x86_64 or aarch64'):
        seccomp.program('riscv64')


@pytest.mark.parametrize('name', [name for name in SANDBOXES if name == 'bwrap'])
def test_what_keeps_code_in_is_on(name):
    """Limits and filter, each by what it does: an attempt may fail for another reason."""
    code = """
import ctypes, errno, os, resource, time
def calls(numbers):
    libc, found = ctypes.CDLL(None, use_errno=True), []
    for number in numbers:
        found.append(libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno())
    return found
def forks(x):
    for i in range(40):
        try:
            if os.fork() == 0:
                time.sleep(60)
        except OSError:
            return i
    return 40
def limits(x):
    names = ('AS', 'CPU', 'NOFILE', 'FSIZE', 'CORE')
    return [resource.getrlimit(getattr(resource, f'RLIMIT_{name}')) for name in names]
def rights(x):
    return os.getuid() != 0 or os.geteuid() != 0, os.path.exists('/proc/self'), os.getppid() < 3
"""
    column = seccomp.MACHINES.index(os.uname().machine)
    numbers = [x[column] for x in seccomp._CALLS.values()] + list(seccomp._EVERYWHERE.values())
    sandbox, clock = make(name, Limits(20.0, 128)), Clock(20.0)
    with sandbox.program(code, 'calls', clock) as call:
        assert call((numbers,), {}) == [errno.EPERM] * len(numbers)
    with sandbox.program(code, 'forks', clock) as call:
        assert 0 < call((0,), {}) < 17
    with sandbox.program(code, 'limits', clock) as call:
        wanted = (128 * 2**20, 21, 64, 16 * 2**20, 0)
        assert call((0,), {}) == [(value, value) for value in wanted]
    if os.geteuid() == 0:
        with sandbox.program(code, 'rights', clock) as call:
            assert call((0,), {}) == (True, False, True)


def test_at_least_forty_attempts():
    assert len(ESCAPES) >= 40


def test_nothing_is_left_running(judge, world):
    _, head, _ = world
    before = descendants()
    example = {'tests': {'function': 'f', 'cases': [[[3], 4]]}}
    for name in (
        'leaves a process in a session of its own',
        'forks without end',
        'leaves a thread',
    ):
        judge(head + ESCAPES[name], (), example)
    end = time.monotonic() + 5
    while len(descendants() - before) > 2 and time.monotonic() < end:  # `ps`, a fresh interpreter
        time.sleep(0.05)
    assert len(descendants() - before) <= 2


@pytest.mark.parametrize(
    'code',
    [
        f'print("{SECRET}" and "passed")',
        'import sys\nsys.exit(0)',
        'import os\nos._exit(0)',
        'print(open("/proc/self/cmdline").read())',
        'print(open("/runner.py").read())',
        'import sys\nfor line in sys.stdin:\n    print(line)',
        'import glob\nfor p in glob.glob("/**", recursive=True):\n    print(p)',
        'input({i * (2**61 - 1) for i in range(60000)})',
        '{i * (2**61 - 1) for i in range(60000)}',
    ],
)
def test_a_program_can_not_print_what_it_can_not_know(judge, code):
    verdict = judge(code, (), {'tests': {'stdio': [['3\n', SECRET]]}})
    assert verdict.value == 0 and verdict.right is False
    honest = 'a, b = map(int, input().split())\nprint(a + b)'
    assert judge(honest, (), {'tests': {'stdio': [['3 4\n', '7\n']]}}).right


CHECK = f"""
def check(candidate):
    assert candidate(3) == '{SECRET}'
    for i in range(3):
        assert candidate(i) == str(i)
"""


@pytest.mark.parametrize(
    'code',
    [
        'def check(candidate):\n    pass\ndef f(x):\n    return check',
        'class A(str):\n    def __eq__(s, o):\n        return True\ndef f(x):\n    return A(3)',
        'import builtins\nbuiltins.AssertionError = ()\ndef f(x):\n    raise AssertionError',
        'import os\ndef f(x):\n    os._exit(0)',
        'import sys\ndef f(x):\n    sys.exit(0)',
        'def f(x):\n    raise KeyboardInterrupt',
        'def f(x):\n    raise GeneratorExit',
        'import sys\ndef f(x):\n    raise type("A", (BaseException,), {})',
        'import inspect\ndef f(x):\n    return inspect.stack()[1].frame.f_globals["check"]',
    ],
)
def test_a_check_runs_where_the_code_can_not_reach(judge, code):
    example = {'tests': {'function': 'f', 'check': CHECK}}
    verdict = judge(code, (), example)
    assert verdict.value == 0 and verdict.right is False
    honest = f'def f(x):\n    return "{SECRET}" if x == 3 else str(x)'
    assert judge(honest, (), example).right
