"""Rewards that hang, crash, eat or lie cost their own row; processes start once and end with us."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from policyopt import rewards
from policyopt.rewards import Case, JudgeError, Spec, Workers

ACTING = Spec('tests.reward_functions.acting')
ROOT = pathlib.Path(__file__).parents[1]


def case(text):
    return Case(text, (1, 2, 3), {'answer': ''})


def verdicts(judge, *texts):
    return [f.result(timeout=60) for f in judge.submit([case(text) for text in texts])]


@pytest.fixture(scope='module')
def judge():
    with Workers(ACTING, workers=2, deadline=1.0, memory=1.0) as workers:
        yield workers


HOSTILE = {
    'hang': 'timed_out',
    'sleep': 'timed_out',
    'power': 'timed_out',
    'fork': 'timed_out',
    'exit': 'crashed',
    'segfault': 'crashed',
    'abort': 'crashed',
    'kill': 'crashed',
    'rubbish': 'crashed',
    'memory': 'out_of_memory',
    'hoard': 'out_of_memory',
    'deep': 'raised',
    'raise': 'raised',
    'quit': 'raised',
    'interrupt': 'raised',
    'none': 'nonsense',
    'text': 'nonsense',
    'inf': 'nonsense',
    'nan': 'undecided',
}


def test_hostile_rows_cost_themselves_only(judge):
    """Every other row is a good one; all of those get their reward."""
    texts = [text for name in HOSTILE for text in (name, 'good')]
    began = time.monotonic()
    found = verdicts(judge, *texts)
    assert time.monotonic() - began < 20
    assert {name: v.kind for name, v in zip(HOSTILE, found[::2], strict=True)} == HOSTILE
    assert all(math.isnan(v.value) for v in found[::2])
    assert found[1::2] == [rewards.Verdict(1.0, 'right', True)] * len(HOSTILE)
    assert found[0].reason == 'timed_out: after 1 s'
    assert found[2 * list(HOSTILE).index('raise')].reason == (
        'raised: ZeroDivisionError: division by zero'
    )


def test_one_that_kills_what_started_it(judge):
    assert [v.kind for v in verdicts(judge, 'good', 'parent', 'good')] == [
        'right',
        'crashed',
        'right',
    ]


def test_a_crash_after_its_row_is_not_blamed_on_the_next(judge):
    found = verdicts(judge, *['kill_soon', 'slow', 'slow', 'good'] * 3)
    assert [v.kind for v in found] == ['right'] * 12


def test_output_goes_nowhere_and_jax_is_not_loaded(judge, capfd):
    found = verdicts(judge, 'flood', 'jax')
    assert [v.value for v in found] == [1.0, 0.0]
    assert capfd.readouterr().out == ''


def test_workers_are_warm_and_verdicts_in_order(judge):
    verdicts(judge, 'good')
    pids = [{v.value for v in verdicts(judge, *['pid'] * 20)} for _ in range(2)]
    assert len(pids[0] | pids[1]) <= 2
    mixed = ['slow', 'pid', 'nan', 'good'] * 5
    assert [v.kind for v in verdicts(judge, *mixed)] == ['right', 'right', 'undecided', 'right'] * 5


def test_rows_are_judged_in_parallel_while_the_caller_goes_on():
    with Workers(ACTING, workers=4, deadline=5) as judge:
        verdicts(judge, *['good'] * 8)
        began = time.monotonic()
        futures = judge.submit([case('slow')] * 8)
        assert time.monotonic() - began < 0.1
        assert [f.result(timeout=10).value for f in futures] == [1.0] * 8
        assert 0.4 <= time.monotonic() - began < 1.5  # 1.6 s one after another


def test_a_hang_delays_no_other_row():
    with Workers(ACTING, workers=2, deadline=3) as judge:
        verdicts(judge, 'good')
        began = time.monotonic()
        hang, *others = judge.submit([case(text) for text in ['hang'] + ['good'] * 30])
        assert all(f.result(timeout=10).value == 1 for f in others[CHUNK:])
        assert time.monotonic() - began < 2 and not hang.done()
        assert hang.result(timeout=10).kind == 'timed_out'
        assert all(f.result(timeout=10).value == 1 for f in others)


CHUNK = 16


def test_what_can_not_be_loaded_or_sent():
    with Workers(Spec('tests.reward_functions.broken'), workers=1) as judge:
        with pytest.raises(JudgeError, match='could not be loaded: RuntimeError: no device here'):
            verdicts(judge, 'good')
        with pytest.raises(JudgeError, match='could not be loaded'):
            verdicts(judge, 'good')
    with Workers(ACTING, workers=1) as judge:
        bad = Case('good', (), {'answer': lambda: 0})
        (found,) = judge.submit([bad])
        assert found.result(timeout=1).reason.startswith('raised: its example can not be sent')
        assert verdicts(judge, 'good')[0].value == 1


def test_close_ends_what_is_under_way():
    judge = Workers(ACTING, workers=1, deadline=60)
    pid = int(verdicts(judge, 'pid')[0].value)
    (future,) = judge.submit([case('hang')])
    judge.close()
    with pytest.raises(JudgeError, match='the judge was closed'):
        future.result(timeout=10)
    assert gone(pid)
    assert verdicts(judge, 'good')[0].value == 1  # it may be used again
    judge.close()
    judge.close()


def gone(pid):
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = pathlib.Path(f'/proc/{pid}/stat')
        if state.exists() and state.read_text().rpartition(')')[2].split()[0] == 'Z':
            return True
        time.sleep(0.05)
    return False


SCRIPT = """
import sys
from policyopt.rewards import Case, Spec, Workers
judge = Workers(Spec('tests.reward_functions.acting'), workers=2, deadline=600)
case = lambda text: Case(text, (), {})
print(*{int(f.result().value) for f in judge.submit([case('pid')] * 40)}, flush=True)
judge.submit([case('hang')] * 2)
sys.stdin.read()
"""


def test_no_worker_outlives_the_run_that_is_killed():
    with subprocess.Popen(
        [sys.executable, '-c', SCRIPT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert pids and not gone_now(pids[0])
        process.send_signal(signal.SIGKILL)
    assert all(gone(pid) for pid in pids)


def gone_now(pid):
    return not pathlib.Path(f'/proc/{pid}').exists()
