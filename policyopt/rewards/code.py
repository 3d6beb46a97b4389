"""Rewards for code that passes unit tests, run where it can do no harm."""

from __future__ import annotations

import collections.abc
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from policyopt import checks
from policyopt.rewards.combine import check_values
from policyopt.rewards.formats import after_thought
from policyopt.rewards.sandbox import Clock, CodeError, Limits, Sandbox, SandboxError, make
from policyopt.rewards.verdict import RAISED, Reward, Score, Verdict, fault

NO_CODE, WRONG, NO_TESTS = 'no_code', 'wrong_result', 'no_tests'
REL, ABS = 1e-6, 1e-9  # to which a float must agree
_FENCE = re.compile(r'^[ \t]*```([^\n`]*)$', re.MULTILINE)
_KINDS = 'cases, stdio or check'


class Tests(NamedTuple):
    """Tests of an example, of one kind.

    Attributes:
      kind: `cases`, `stdio` or `check`.
      tests: pairs of (arguments, expected result) or (input, expected output), or one source text.
      function: that is called; '' for stdio.
      before: source that stands before the answer: imports, or the beginning that it completes.
    """

    kind: str
    tests: Sequence[Any]
    function: str = ''
    before: str = ''


class _Missing(ValueError):
    """An example has no tests, or none that can be read."""


def read_tests(example: Mapping[str, Any]) -> Tests:
    """The tests in `example['tests']`, or in its metadata; ValueError where they are no tests."""
    given = example.get('tests')
    if given is None:
        metadata = example.get('metadata')
        given = metadata.get('tests') if isinstance(metadata, collections.abc.Mapping) else None
    if not isinstance(given, collections.abc.Mapping):
        raise _Missing('the example has no `tests`')
    kinds = [kind for kind in ('cases', 'stdio', 'check') if kind in given]
    if len(kinds) != 1:
        raise _Missing(f'`tests` has {" and ".join(kinds) or "no kind"}; legal is {_KINDS}')
    kind, function = kinds[0], given.get('function', '')
    tests = [given[kind]] if kind == 'check' else given[kind]
    legal = isinstance(tests, list | tuple) and len(tests) > 0
    if kind == 'check':
        legal = isinstance(given[kind], str)
    elif legal:
        legal = all(isinstance(t, list | tuple) and len(t) == 2 for t in tests)
        inner = (str,) if kind == 'stdio' else (list, tuple)
        legal = legal and all(isinstance(t[0], inner) for t in tests)
    if not legal:
        raise _Missing(f'`tests.{kind}` holds no tests of that form')
    if kind != 'stdio' and not (isinstance(function, str) and function.isidentifier()):
        raise _Missing(f'`tests.function` is {function!r}; legal is the name of a function')
    before = given.get('before', '')
    if not isinstance(before, str):
        raise _Missing('`tests.before` is no text')
    return Tests(kind, tests, function, before)


def code_in(text: str) -> str:
    """The code of an answer: its last closed ``` block after any thought, or all of it without one.

    A block that does not end counts as far as it goes.
    """
    answer = after_thought(text).replace('\r\n', '\n')
    marks = list(_FENCE.finditer(answer))
    if not marks:
        return answer
    if len(marks) == 1:
        return answer[marks[0].end() + 1 :]
    last = len(marks) - len(marks) % 2
    return answer[marks[last - 2].end() + 1 : marks[last - 1].start()]


def source_of(answer: str, tests: Tests) -> str:
    """The program to test: what stands before, then the answer's code.

    Where the answer defines the function that is called, `before` is there for its imports and
    helpers; where it does not, the answer goes on where `before` ends.
    """
    code = code_in(answer)
    if not tests.before:
        return code
    defined = re.search(rf'^(?:async +)?def +{tests.function}\b', code, re.MULTILINE)
    return tests.before + ('\n\n' if defined else '') + code


def same(expected: Any, found: Any) -> bool:
    """Whether a result is the expected one, which may have come through JSON.

    Floats agree to 1e-6 relative or 1e-9 absolute, and NaN with NaN; lists and tuples are alike, a
    set is alike to a list of its members, and keys of dicts to their JSON texts.
    """
    if isinstance(expected, float) or isinstance(found, float):
        if not _is_number(expected) or not _is_number(found):
            return False
        try:
            both_nan = math.isnan(expected) and math.isnan(found)
            return both_nan or math.isclose(expected, found, rel_tol=REL, abs_tol=ABS)
        except OverflowError:  # an int that is no float
            return False
    if isinstance(found, set | frozenset) and isinstance(expected, list | tuple):
        return len(expected) == len(found) and all(map(same, *map(_in_order, (expected, found))))
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        left, right = _by_text(expected), _by_text(found)
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return type(expected) is type(found) and expected == found


def _in_order(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: json.dumps(value, default=repr))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _by_text(value: Mapping[Any, Any]) -> dict[Any, Any]:
    def text(key: Any) -> Any:
        scalar = key is None or isinstance(key, bool | int | float)
        return json.dumps(key) if scalar else key

    return {text(key): inner for key, inner in value.items()}


def same_output(expected: str, found: str) -> bool:
    """Whether a program printed what it should, up to white space that ends lines and texts."""
    return _lines(expected) == _lines(found)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class Report(NamedTuple):
    """How tests went: how many there are, how many passed, and why the first failed."""

    total: int
    passed: int
    failure: str = ''


def run_tests(sandbox: Sandbox, limits: Limits, source: str, tests: Tests, every: bool) -> Report:
    """Test the program, until the first failure or, with `every`, all of it.

    Raises SandboxError where the sandbox fails, or the example's own check can't run in it.
    """
    clock = Clock(limits.timeout)
    outcomes = _OUTCOMES[tests.kind](sandbox, source, tests, clock)
    passed, failure = 0, ''
    try:
        for i, ok in enumerate(outcomes, 1):
            passed += ok is None
            if ok is not None:
                failure = failure or f'{ok}{": " if ":" not in ok else ", "}test {i}'
                if not every:
                    break
    except (RecursionError, OverflowError) as error:
        failure = failure or f'{WRONG}: {type(error).__name__} when compared'
    finally:
        close: Any = getattr(outcomes, 'close', None)
        if close:
            close()
    return Report(len(tests.tests), passed, failure)


def _failure(error: CodeError) -> str:
    return f'{error.kind}: {error.detail[:120]}' if error.detail else error.kind


def _cases(sandbox: Sandbox, source: str, tests: Tests, clock: Clock) -> Iterable[str | None]:
    done = 0
    try:
        with sandbox.program(source, tests.function, clock) as call:
            for args, expected in tests.tests:
                try:
                    found = call(args, {})
                except CodeError as error:
                    if error.error is None:  # its process is gone, or talks nonsense
                        raise
                    yield _failure(error)
                else:
                    yield None if same(expected, found) else WRONG
                done += 1
    except CodeError as error:
        for _ in range(len(tests.tests) - done):
            yield _failure(error)


def _stdio(sandbox: Sandbox, source: str, tests: Tests, clock: Clock) -> Iterable[str | None]:
    for given, expected in tests.tests:
        try:
            found = sandbox.script(source, given, clock)
        except CodeError as error:
            yield _failure(error)
        else:
            yield None if same_output(expected, found) else WRONG


def _check(sandbox: Sandbox, source: str, tests: Tests, clock: Clock) -> Iterable[str | None]:
    # Some checks call the function by its own name.
    name = f'\n\n{tests.function} = candidate\n'
    check = f'{tests.before}{name}{tests.tests[0]}\n\ncheck(candidate)\n'
    raised: list[CodeError] = []
    try:
        with sandbox.program(source, tests.function, clock) as call:

            def kept(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
                try:
                    return call(args, kwargs)
                except CodeError as error:
                    raised.append(error)
                    raise

            passed = sandbox.check(check, kept, clock)
    except CodeError as error:
        yield _failure(error)
    else:
        yield None if passed else _failure(raised[-1]) if raised else WRONG


_OUTCOMES: Mapping[str, Callable[..., Iterable[str | None]]] = {
    'cases': _cases,
    'stdio': _stdio,
    'check': _check,
}


@checks.factory('reward')
def code_tests(
    sandbox: Literal['monty', 'bwrap'] = 'monty',
    partial: bool = False,
    right: float = 1.0,
    wrong: float = 0.0,
    timeout: float = 3.0,
    memory: int = 256,
    output: int = 256,
) -> Reward:
    """`right` for an answer whose code passes the unit tests in `example['tests']`, else `wrong`.

    Tested is the last ``` block after any thought, or the whole answer without one; docs/rewards.md
    shows the kinds of tests. Code runs in a sandbox, and results are compared outside of it: what
    code says of itself, by exit status, output or exception, means nothing.

    Reasons: `right`; `no_code`, `wrong_result`, `code_raised`, `code_timed_out`, `code_memory`,
    `code_output` (more than the limit), `code_crashed`, and `unsupported`, for what the sandbox
    lacks (all wrong, of the first test that failed); `no_tests` for an example without any, and
    `raised` where the sandbox itself failed, which leave the row without a reward.

    Args:
      sandbox: `monty`, a subset of Python anywhere (extra `code`), or `bwrap`, all of CPython's
        standard library, where bubblewrap is installed and allowed.
      partial: wrong + (right - wrong) * share of the tests passed, which runs them all; else the
        first failure ends it.
      right, wrong: rewards.
      timeout: seconds for all tests of an answer, by the clock; stay below `judge.deadline`.
      memory: MiB that the code may use; of each process, for bwrap.
      output: KiB that it may print or return in a test.

    Raises ValueError where the sandbox does not work here.
    """
    check_values(right, wrong)
    limits = Limits(timeout, memory, output)
    where = make(sandbox, limits)

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        try:
            tests = read_tests(example)
            if not code_in(text).strip():
                return Verdict(wrong, NO_CODE, False)
            found = run_tests(where, limits, source_of(text, tests), tests, partial)
        except _Missing as error:
            return Verdict(math.nan, f'{NO_TESTS}: {error}')
        except SandboxError as error:
            return fault(RAISED, f'SandboxError: {error}')
        if found.passed == found.total:
            return Verdict(right, 'right', True)
        share = found.passed / found.total if partial else 0.0
        reason = f'{found.failure}; {found.passed} of {found.total} passed'
        return Verdict(wrong + (right - wrong) * share, reason, False)

    return reward


def code_score(
    sandbox: Literal['monty', 'bwrap'] = 'monty', timeout: float = 3.0, memory: int = 256
) -> Score:
    """The scorer of problems with unit tests: the share that passes, 1 for all of them.

    Raises, when it scores, where the example has no tests or the sandbox fails; see `code_tests`.
    """
    limits = Limits(timeout, memory)
    where = make(sandbox, limits)

    def score(answer: str, example: Mapping[str, Any]) -> float:
        tests = read_tests(example)
        if not code_in(answer).strip():
            return 0.0
        found = run_tests(where, limits, source_of(answer, tests), tests, every=True)
        return found.passed / found.total

    return score
