"""A side of a comparison as a process: it is told what to do in lines of JSON, and answers in them.

Sides run in environments of their own, so this file imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Run = Callable[[], Mapping[str, Any]]


def resident() -> float:
    """Largest resident set of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def serve(works: Mapping[str, Callable[..., Run]]) -> None:
    """Answer until the input ends.

    The first line names the work, its folder and its arguments; it is answered by the seconds from
    loading to the end of the first run, which compiles. Every other line is answered by the seconds
    of one more run. Answers have what the run found, and the memory that this process has taken at
    most beyond what importing libraries took.
    """
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # libraries print; their lines are no answers
    base = resident()
    run = None
    for line in sys.stdin:
        began = time.perf_counter()
        if run is None:
            asked = json.loads(line)
            run = works[asked['work']](Path(asked['folder']), **asked['arguments'])
        found = run()
        seconds = time.perf_counter() - began
        answer = {'seconds': seconds, 'memory': resident() - base, 'found': found}
        answers.write(json.dumps(answer) + '\n')
        answers.flush()
