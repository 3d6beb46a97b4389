"""Code that tries to get out, to hang or to forge: none succeeds, and the next is judged normally.

Each sandbox that the machine has is attacked; pydantic-monty is everywhere that tests are.
"""

import os
import shutil
import socket
import subprocess
import time

import pytest

from policyopt import rewards
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
    for folder in ('/usr/share', of_library):
        seen = sorted(os.listdir(folder))
        verdict = judge(code, (), {'tests': {'function': 'f', 'cases': [[[folder], seen]]}})
        assert seen and verdict.right is False, folder


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
