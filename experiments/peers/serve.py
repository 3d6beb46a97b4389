"""A side of a comparison as a process: it is told what to do in lines of JSON, and answers in them.

Sides run in environments of their own, so this file imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PAD, BOS, EOS = 0, 1, 2  # ids of every vocabulary here
# Arguments of the objectives, which every side gives under its own names: clip ranges of tokens and
# of answers, CISPO's cap.
EPS, HIGH, GSPO, CAP = 0.2, 0.28, 3e-4, 5.0
Run = Callable[[], Mapping[str, Any]]


def resident(field: str) -> float:
    """Resident set of this process, MiB: VmRSS is now, VmHWM the largest since `forget`."""
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**10
    raise OSError(f'/proc/self/status has no {field}')


def forget() -> None:
    """Let the largest resident set begin anew."""
    Path('/proc/self/clear_refs').write_text('5')


def serve(works: Mapping[str, Callable[..., Run]]) -> None:
    """Answer until the input ends.

    The first line names the work, its folder and its arguments; it is answered by the seconds from
    loading to the end of the first run, which compiles. Every other line is answered by the seconds
    of one more run. Answers have what the run found, `memory`, which this process has taken at most
    beyond what importing libraries took, and `working`, what it had at most in this run beyond what
    was loaded.
    """
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # libraries print; their lines are no answers
    try:
        _answer(works, answers)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once, whatever threads of libraries are waiting for


def _answer(works: Mapping[str, Callable[..., Run]], answers: Any) -> None:
    forget()
    imported, loaded, most, run = resident('VmRSS'), 0.0, 0.0, None
    for line in sys.stdin:
        began = time.perf_counter()
        if run is None:
            asked = json.loads(line)
            run = works[asked['work']](Path(asked['folder']), **asked['arguments'])
            loaded, most = resident('VmRSS'), resident('VmHWM')
        forget()
        found = run()
        seconds = time.perf_counter() - began
        peak = resident('VmHWM')
        most = max(most, peak)
        answer = {'seconds': seconds, 'memory': most - imported, 'working': peak - loaded}
        answer['found'] = found
        answers.write(json.dumps(answer) + '\n')
        answers.flush()


def reward(prompt: str, answer: str) -> float:
    """Share of the sum's digits that the answer has, from the left."""
    left, right = prompt.rstrip('=').split('+')
    right_digits = str(int(left) + int(right))
    return sum(a == b for a, b in zip(answer, right_digits, strict=False)) / len(right_digits)
