"""Code judged by unit tests: kinds of tests, what counts as equal, and who is to blame."""

import math
import shutil
import time

import pytest

from policyopt import rewards
from policyopt.rewards import Case, Spec, Workers
from policyopt.rewards.code import code_in, code_score, read_tests, same, source_of
from policyopt.rewards.runner import decode, encode
from policyopt.rewards.sandbox import Clock, CodeError, Limits, make

SANDBOXES = ('monty', *(('bwrap',) if shutil.which('bwrap') else ()))
ADD = {'tests': {'function': 'add', 'cases': [[[1, 2], 3], [[2, 2], 4], [[0, 0], 0], [[5, 1], 6]]}}


@pytest.fixture(scope='module', params=SANDBOXES)
def sandbox(request):
    return request.param


@pytest.fixture(scope='module')
def judge(sandbox):
    return rewards.code_tests(sandbox=sandbox, wrong=-1.0)


@pytest.mark.parametrize(
    ('code', 'reason'),
    [
        ('def add(a, b):\n    return a + b', 'right'),
        ('<think>```\nno\n```</think>\n```python\ndef add(a, b):\n    return a + b\n```', 'right'),
        ('def add(a, b):\n    return a * b', 'wrong_result: test 1'),
        ('def add(a, b):\n    return a + b if a != 2 else None', 'wrong_result: test 2'),
        ('def add(a, b):\n    return str(a + b)', 'wrong_result'),
        ('def add(a):\n    return a', 'code_raised'),
        ('def plus(a, b):\n    return a + b', 'code_raised: NameError'),
        ('def add(a, b:', 'code_raised'),
        ('def add(a, b):\n    return lambda: 3', ('wrong_result', 'code_raised')),
        ('```\n\n```', 'no_code'),
        ('<think>def add(a, b):\n    return a + b</think>', 'no_code'),
    ],
)
def test_functions(judge, code, reason):
    verdict = judge(code, (), ADD)
    assert verdict.value == (1.0 if reason == 'right' else -1.0)
    assert verdict.right is (reason == 'right') and verdict.reason.startswith(reason)


def test_share(sandbox):
    judge = rewards.code_tests(sandbox=sandbox, partial=True, wrong=-1.0)
    verdict = judge('def add(a, b):\n    return a + b if a < 2 else 7', (), ADD)
    assert verdict.value == 0 and verdict.reason == 'wrong_result: test 2; 2 of 4 passed'
    assert verdict.right is False
    raising = 'def add(a, b):\n    return a + b if a < 2 else 1 // 0'
    assert judge(raising, (), ADD).value == 0
    assert judge('def add(a, b):\n    return a + b', (), ADD).value == 1
    assert code_score(sandbox=sandbox)(raising, ADD) == 0.5
    assert code_score(sandbox=sandbox)(' ', ADD) == 0


@pytest.mark.parametrize(
    ('code', 'right'),
    [
        ('n = int(input())\nfor i in range(n):\n    print(i, "")', True),
        ('print("0\\n1\\n2")', False),
        ('n = int(input())\nprint(*range(n))', False),
        ('n = int(input())\nfor i in range(n):\n    print(i)\n1 // 0', False),
        ('n = int(input())\nm = input()\nfor i in range(n):\n    print(i)', False),
    ],
)
def test_programs(judge, code, right):
    example = {'metadata': {'tests': {'stdio': [['3\n', '0\n1\n2\n'], ['1', '0\n\n']]}}}
    assert judge(code, (), example).right is right


def test_large_sets_and_dicts(judge):
    many = list(range(6000))
    code = 'def f(x):\n    return {v for v in x if x[v] == v}'
    cases = [[[dict(zip(map(str, many), many, strict=True))], []]]
    assert judge(code, (), {'tests': {'function': 'f', 'cases': cases}}).reason == 'right'
    assert judge(code, (), {'tests': {'function': 'f', 'cases': [[[many], many]]}}).right
    check = f'def check(candidate):\n    assert len(candidate({{i: i for i in {many}}})) == 6000'
    assert judge(code, (), {'tests': {'function': 'f', 'check': check}}).right


def test_all_of_the_input_until_it_ends(judge):
    code = """
total = 0
while True:
    try:
        total += int(input())
    except EOFError:
        break
print(total)
"""
    assert judge(code, (), {'tests': {'stdio': [['1\r\n2\n3\n', '6'], ['', '0']]}}).right


def test_the_clock_goes_on_from_one_call_to_the_next(sandbox):
    clock = Clock(60.0)
    code = 'def f(x):\n    while x:\n        pass'
    with make(sandbox, Limits(60.0)).program(code, 'f', clock) as call:
        assert call((0,), {}) is None
        clock._end = time.monotonic() + 0.3  # as after a call that took long
        with pytest.raises(CodeError, match='code_timed_out'):
            call((1,), {})
    assert time.monotonic() < clock._end + 30


CHECK = {
    'function': 'scale',
    'before': 'import math\ndef half(x):\n    return x / 2\ndef scale(x):\n    """Twice x."""\n',
    'check': """
def check(candidate):
    for i in range(3):
        assert half(candidate(i)) == i and scale(i) == 2 * i
    assert candidate((1, 2)) == (1, 2, 1, 2)
    try:
        candidate(None)
        assert False
    except TypeError:
        pass
""",
}


@pytest.mark.parametrize(
    ('code', 'reason'),
    [
        ('    return x * 2', 'right'),
        ('def scale(x):\n    return x * 2 if math.pi else 0', 'right'),
        ('```python\ndef scale(x):\n    return half(4 * x) if x == 2 else x * 2\n```', 'right'),
        ('    return [*x, *x] if isinstance(x, tuple) else x * 2', 'wrong_result'),
        ('    return 0 if x is None else x * 2', 'wrong_result'),
        ('    return x + 2', 'wrong_result'),
        ('    raise ValueError', 'code_raised: ValueError'),
        ('    pass', 'wrong_result'),
    ],
)
def test_checks(judge, code, reason):
    verdict = judge(code, (), {'tests': CHECK})
    assert verdict.reason.startswith(reason), verdict


def test_bwrap_has_the_standard_library_that_monty_lacks():
    code = 'import heapq\ndef add(a, b):\n    return heapq.nsmallest(1, [a + b])[0]'
    found = {name: rewards.code_tests(sandbox=name)(code, (), ADD) for name in SANDBOXES}
    assert found['monty'].value == 0 and found['monty'].reason.startswith('unsupported')
    assert all(v.right for name, v in found.items() if name == 'bwrap')


@pytest.mark.parametrize(
    'example',
    [
        {},
        {'tests': 3},
        {'tests': {}},
        {'tests': {'function': 'f', 'cases': []}},
        {'tests': {'function': 'f', 'cases': [[1, 2, 3]]}},
        {'tests': {'function': 'f', 'cases': [[1, 2]]}},
        {'tests': {'function': 'f(); g', 'cases': [[[1], 2]]}},
        {'tests': {'cases': [[[1], 2]]}},
        {'tests': {'stdio': [[1, 2]]}},
        {'tests': {'function': 'f', 'check': 3}},
        {'tests': {'function': 'f', 'check': 'x', 'stdio': [['', '']]}},
    ],
)
def test_an_example_without_tests_gives_no_reward(example):
    verdict = rewards.code_tests()('def f(x):\n    return x', (), example)
    assert math.isnan(verdict.value) and verdict.kind == 'no_tests'
    with pytest.raises(ValueError, match='tests'):
        read_tests(example)


def test_a_sandbox_that_fails_gives_no_reward(monkeypatch):
    for name in SANDBOXES:
        module = {'monty': 'monty.MontySandbox._here', 'bwrap': 'bubblewrap._python'}[name]
        judge = rewards.code_tests(sandbox=name)

        def gone(*_):
            if name == 'bwrap':  # noqa: B023
                return '/no/python'
            raise OSError('no such interpreter')

        with monkeypatch.context() as patch:
            patch.setattr(f'policyopt.rewards.{module}', gone)
            verdict = judge('def add(a, b):\n    return a + b', (), ADD)
            assert math.isnan(verdict.value) and verdict.reason.startswith('raised: SandboxError: ')
        assert judge('def add(a, b):\n    return a + b', (), ADD).right


def test_a_sandbox_that_is_absent_is_an_error_at_the_start(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match='Did you mean `monty`'):
        rewards.code_tests(sandbox='monti')  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(ValueError, match="'bwrap', which is not installed: apt install bubblewrap"):
        rewards.code_tests(sandbox='bwrap')
    (tmp_path / 'bwrap').write_text('#!/bin/sh\necho no namespaces >&2\nexit 1\n')
    (tmp_path / 'bwrap').chmod(0o755)
    with pytest.raises(ValueError, match='does not work here.*no namespaces'):
        rewards.code_tests(sandbox='bwrap')
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r'policyopt\[code\]'):
        rewards.code_tests()
    with pytest.raises(ValueError, match='timeout must lie in'):
        rewards.code_tests(timeout=0)


def test_in_workers(sandbox):
    spec = Spec('code_tests', {'sandbox': sandbox, 'timeout': 1.0})
    codes = [
        'def add(a, b):\n    return a + b',
        'def add(a, b):\n    while True:\n        pass',
        '',
    ]
    with Workers(spec, workers=1, deadline=20.0) as workers:
        found = [
            f.result(timeout=60) for f in workers.submit([Case(c, (), ADD) for c in codes * 2])
        ]
    assert [v.kind for v in found] == ['right', 'code_timed_out', 'no_code'] * 2


@pytest.mark.parametrize(
    ('expected', 'found', 'equal'),
    [
        (1, 1, True),
        (1, True, False),
        (True, 1, False),
        (1, 1.0, True),
        (1.0, 1.0000001, True),
        (1.0, 1.00001, False),
        (0.0, 1e-10, True),
        (0.0, math.nan, False),
        (math.nan, math.nan, True),
        (1.0, True, False),
        (1.0, '1.0', False),
        (1.0, 10**400, False),
        ([1, [2]], (1, (2,)), True),
        ([1, 2], [1], False),
        ([2, 1], {1, 2}, True),
        ([2, 2], {1, 2}, False),
        ([[1]], {1}, False),
        ([1], {True}, False),
        ([[2, 1], [1, 2]], {(1, 2), (2, 1)}, True),
        ([0.3, 10, 'x'], {'x', 0.1 + 0.2, 10}, True),
        ([{'a': 1}], {3}, False),
        ({'1': [2.0]}, {1: (2,)}, True),
        ({'true': 1}, {True: 1}, True),
        ({'a': 1}, {'b': 1}, False),
        (None, None, True),
        (None, False, False),
        ('a', b'a', False),
    ],
)
def test_what_is_the_same(expected, found, equal):
    assert same(expected, found) is equal


def test_plain_values_are_what_they_were():
    value = [None, True, 1, 2.5, 'x', b'y', 1 + 2j, (1, (2,)), {3}, frozenset({4}), {(1, 2): [{}]}]
    assert repr(decode(encode(value))) == repr(value)
    collide = {'set': [2**61 * i for i in range(1, 4002)]}
    assert len(decode(collide, math.inf)) == 4001
    for nonsense in ({'set': [[1]]}, {'a': 1, 'b': 2}, {'no': []}, collide):
        with pytest.raises((ValueError, TypeError, KeyError)):
            decode(nonsense)
    with pytest.raises(TypeError, match='object is no plain value'):
        encode([object()])


def test_which_code_counts():
    assert code_in('x = 1') == 'x = 1'
    assert code_in('a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\nc') == 'y = 2\n'
    assert code_in('a\n```python\nx = 1\n```\nb\n```\ny') == 'x = 1\n'
    assert code_in('a\r\n```python\r\nx = 1') == 'x = 1'
    assert code_in('<think>```\nx\n```</think>y') == 'y'
    tests = read_tests({'tests': {'function': 'f', 'check': 'c', 'before': 'def f():\n'}})
    assert source_of('    return 1', tests) == 'def f():\n    return 1'
    assert source_of('def f():\n  return 2', tests) == 'def f():\n\n\ndef f():\n  return 2'
