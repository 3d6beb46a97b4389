"""Command lines whose --config names a file: read, and what is wrong with them said in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

from absl import flags

from policyopt import checks


def missing_config(argv: list[str]) -> str:
    """What is wrong with the file that --config names, '' where it is there."""
    words = [*argv, '']
    for word, after in itertools.pairwise(words):
        name, equals, value = word.partition('=')
        if name in ('--config', '-config'):
            path = Path((value if equals else after).partition(':')[0])
            if not path.is_file():
                near = checks.hint(path.name, (p.name for p in path.parent.glob('*.py')))
                near = near.replace('`', f'`{path.parent}/', 1) if path.name != str(path) else near
                return f'--config: there is no file {path}.{near}'
    return ''


def read_flags(argv: list[str]) -> list[str]:
    """Parse the command line, for `app.run`; what is wrong with it ends the program in one line."""
    if missing := missing_config(argv):
        raise SystemExit(missing)
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, LookupError, ValueError, TypeError, OSError) as error:
        # An error in get_config() comes with its traceback, whose last line says what it was; those
        # of missing sections are wrapped in each other.
        text: object = error
        while isinstance(text, Exception):
            text = text.args[0] if text.args and not isinstance(text, OSError) else str(text)
        lines = [line.strip() for line in str(text).splitlines() if line.strip()]
        trace = any(line.startswith('Traceback') for line in lines)
        raise SystemExit(lines[-1] if trace else ' '.join(lines)) from None
