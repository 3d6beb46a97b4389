"""Look into a minibatch that a training run saved: every token's part in the loss.

    python -m policyopt.inspect runs/a/batches/offending_000012.npz

It needs the folder of the run, for its config and checkpoints: the one around `batches/`, or
--workdir. `python -m policyopt.train --save_batches=STEP,STEP` saves minibatches of chosen steps; a
run that stops because its updates came to nothing saves the last of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from policyopt import inspection, unusual
from policyopt.inspection import Inspection
from policyopt.sampling import Finish
from policyopt.sampling.config import eos_ids

WIDE = 400  # columns of a table that goes into a file
TOP = 8  # rows listed by gradient share
TEXTS, LOUD = ('what it says', 'marks'), ('marks', 'mark', 'field')


# ---------------------------------------------------------------- what is shown


def ranked(made: Inspection) -> list[int]:
    """Rows with tokens: those with numbers that are not finite first, then by gradient share."""
    worst = made.marks['not finite'].sum(axis=1)
    share = np.nansum(made.share, axis=1)
    order = sorted(range(len(share)), key=lambda row: (-worst[row], -share[row], row))
    return [row for row in order if made.mask[row].any()]


def chosen_tokens(made: Inspection, row: int, limit: int) -> list[int]:
    """Positions to show of a row, in order: marked tokens first, then by gradient share."""
    places = np.flatnonzero(made.mask[row])
    marked = np.sum([mark[row] for mark in made.marks.values()], axis=0)
    share = np.nan_to_num(made.share[row])
    best = sorted(places, key=lambda t: (-marked[t], -share[t], t))
    return sorted(int(t) for t in best[:limit])


def token_text(made: Inspection, token: int) -> str:
    """A token as it reads; what reads as nothing, by its name or id."""
    model = made.setup.model
    text = model.tokenizer.decode([token])
    if text:
        return repr(text)
    return '<end>' if token in eos_ids(model, made.setup.config.sampling) else f'<{token}>'


def token_record(made: Inspection, row: int, t: int) -> dict[str, Any]:
    """Everything about one token, as plain numbers."""
    batch, at = made.batch, (row, t)

    def number(x: Any) -> float | None:
        return None if x is None else float(np.asarray(x)[at])

    found: dict[str, Any] = {
        'position': t,
        'id': int(batch.tokens[at]),
        'text': token_text(made, int(batch.tokens[at])),
        'logp_new': number(made.logp_new),
        'logp_old': number(batch.logp_old),
        'logp_behavior': number(batch.logp_behavior),
        'ratio': number(made.ratio),
        'advantage': number(batch.advantages),
    }
    several = sum(bool(term.gates or term.penalties) for term in made.terms.values()) > 1
    for name, term in made.terms.items():
        head = f'{name} ' if several else ''  # two losses may have the same gate
        found |= {f'{head}gate {key}': number(x) for key, x in (term.gates or {}).items()}
        found |= {f'{head}penalty {key}': number(x) for key, x in (term.penalties or {}).items()}
        found |= {f'{name} weight': number(term.weights), f'{name} loss': number(term.loss)}
    found['share'] = number(made.share)
    found['marks'] = [name for name, mark in made.marks.items() if mark[at]]
    return found


def row_record(made: Inspection, row: int) -> dict[str, Any]:
    """What is to be said of a row beside its tokens."""
    batch: Any = made.batch
    decode, mask = made.setup.model.tokenizer.decode, made.mask[row]
    start, stop = (int(x[row]) for x in (batch.prompt_length, batch.length))
    advantages = np.unique(batch.advantages[row][mask])
    counts = {name: int(mark[row].sum()) for name, mark in made.marks.items()}
    marks = [name for name, mark in made.row_marks.items() if mark[row]]
    marks += [f'{name} {count}' for name, count in counts.items() if count]
    return {
        'row': row,
        'group': int(batch.group[row]),
        'reward': float(batch.rewards[row]),
        'advantage': float(advantages[0]) if len(advantages) == 1 else advantages.tolist(),
        'finish': 'none' if batch.finish is None else Finish(int(batch.finish[row])).name.lower(),
        'tokens': int(mask.sum()),
        'share': float(np.sum(made.share[row], where=mask)),
        'marks': marks,
        'prompt': decode(batch.tokens[row, :start]),
        'answer': decode(batch.tokens[row, start:stop]),
    }


def turn_records(made: Inspection, row: int) -> list[dict[str, Any]]:
    """Turns of a row and what its environment answered; [] for an answer in one piece."""
    batch: Any = made.batch
    start, stop = (int(x[row]) for x in (batch.prompt_length, batch.length))
    mask = made.mask[row]
    if batch.segment is None or mask[start:stop].all():
        return []
    cuts = np.flatnonzero(np.diff(np.asarray(batch.segment)[row, start:stop])) + start + 1
    found, number = [], 0
    for a, b in itertools.pairwise([start, *cuts.tolist(), stop]):
        number += bool(mask[a])
        part = slice(a, b)
        advantages = np.asarray(batch.advantages)[row, part][mask[part]].tolist()
        ratio = np.asarray(made.ratio)[row, part][mask[part]].tolist()
        found.append(
            {
                'turn': number,
                'who': 'policy' if mask[a] else 'environment',
                'tokens': b - a,
                'text': made.setup.model.tokenizer.decode(batch.tokens[row, part]),
                'advantage': advantages[0] if len(set(advantages)) == 1 else advantages or None,
                'ratio': ratio or None,
                'share': float(np.sum(made.share[row, part], where=mask[part])),
            }
        )
    return found


def summary(made: Inspection) -> dict[str, Any]:
    """What is to be said of the minibatch as a whole."""
    origin = made.origin
    counts = {n: int(x.sum()) for n, x in {**made.row_marks, **made.marks}.items()}
    return {
        'file': str(made.path),
        'run': str(made.workdir),
        'algorithm': made.setup.config.algorithm,
        'step': origin.step,
        'epoch': origin.epoch,
        'minibatch': origin.minibatch,
        'log_probs': made.logp._asdict(),
        'controllers': dict(origin.controllers),
        'loss': made.loss,
        'rows': len(made.mask),
        'tokens': int(made.mask.sum()),
        'nonfinite': [each._asdict() for each in made.nonfinite],
        'marks': {name: count for name, count in counts.items() if count},
        'notes': list(made.notes),
    }


# ---------------------------------------------------------------- as text


def shown(value: Any) -> str:
    """A number or a list of marks for a table."""
    if value is None:
        return '-'
    if isinstance(value, float):
        return f'{value:.4g}'
    if isinstance(value, list):
        numbers = value and isinstance(value[0], float)
        return f'{min(value):.4g} .. {max(value):.4g}' if numbers else ', '.join(map(str, value))
    return str(value)


def percent(share: float) -> str:
    """A share for a table."""
    return f'{share:.2%}' if math.isfinite(share) else 'nan'


class Page:
    """Tables on standard output: in parts where a terminal is too narrow, else as wide as needed.

    Columns that may be folded are those of `TEXTS`.
    """

    def __init__(self):
        from rich.console import Console

        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = WIDE

    def line(self, text: str = '', style: str = '') -> None:
        """Print a line."""
        self._console.print(text, style=style)

    def table(self, title: str, records: Sequence[dict[str, Any]], keys: int = 1) -> None:
        """Print records of equal fields; the first `keys` columns are repeated in every part."""
        columns = {name: [shown(each[name]) for each in records] for name in records[0]}
        if not any(columns.get('marks', ())):
            columns.pop('marks', None)
        for number, names in enumerate(self._parts(columns, keys)):
            self._print('' if number else title, {name: columns[name] for name in names})

    def _parts(self, columns: dict[str, list[str]], keys: int) -> list[list[str]]:
        """Names of the columns of each part."""

        def width(name: str) -> int:
            cells = max(map(len, columns[name]))
            least = min(cells, 12) if name in TEXTS else cells
            return 3 + max(least, *map(len, name.split(' ')))

        names = list(columns)
        parts = [names[:keys]]
        for name in names[keys:]:
            if sum(map(width, [*parts[-1], name])) >= self._console.width:
                parts.append(names[:keys])
            parts[-1].append(name)
        return parts

    def _print(self, title: str, columns: dict[str, list[str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title) if title else None, title_justify='left')
        for name in columns:
            left = name in (*TEXTS, 'token', 'field', 'mark')
            table.add_column(
                name if name in TEXTS else name.replace(' ', '\n'),
                justify='left' if left else 'right',
                style='yellow' if name in LOUD else '',
                no_wrap=name not in TEXTS,
            )
        for row in zip(*columns.values(), strict=True):
            table.add_row(*map(Text, row))
        self._console.print(table)


def print_summary(page: Page, made: Inspection) -> None:
    """Print where the minibatch comes from and what is unusual about it."""
    found, origin = summary(made), made.origin
    where = f'pass {origin.epoch}, minibatch {origin.minibatch}'
    if origin.epoch == 0:
        where = 'nothing could be sampled to learn from: no update'
    page.line(f'{made.path}: {found["algorithm"]}, RL step {origin.step}, {where}')
    page.line(f'log-probs: {made.logp.text}')
    page.line(f'{found["rows"]} rows, {found["tokens"]} tokens, loss {made.loss:.6g}')
    if origin.controllers:
        values = ', '.join(f'{name} {value:.4g}' for name, value in origin.controllers.items())
        page.line(f'controllers: {values}')
    for note in made.notes:
        page.line(f'note: {note}', style='yellow')
    if made.nonfinite:
        rows: list[dict[str, Any]] = [
            {'field': x.field, 'tokens': x.count, 'first row': x.row, 'first position': x.token}
            for x in made.nonfinite
        ]
        page.table('Not finite, in the order of computation', rows)
    rows = [
        {'mark': name, 'of': kind, 'how many': int(marks[name].sum()), 'what it says': text}
        for kind, texts, marks in (
            ('rows', unusual.ROW_MARKS, made.row_marks),
            ('tokens', unusual.TOKEN_MARKS, made.marks),
        )
        for name, text in texts.items()
        if marks[name].any()
    ]
    if rows:
        page.table('Unusual', rows)
    else:
        page.line('nothing unusual')
    records = [row_record(made, row) for row in ranked(made)[:TOP]]
    hidden = ('prompt', 'answer')
    if records:
        rows = [{k: v for k, v in each.items() if k not in hidden} for each in records]
        rows = [each | {'share': percent(each['share'])} for each in rows]
        page.table('Rows: not finite first, then by gradient share', rows)


def print_row(page: Page, made: Inspection, row: int, limit: int) -> None:
    """Print a row's tokens."""
    found = row_record(made, row)
    words = [f'row {row}: {found["prompt"]!r} -> {found["answer"]!r}']
    words += [f'{name} {shown(found[name])}' for name in ('group', 'reward', 'finish')]
    words += [f'share {percent(found["share"])}', *found['marks']]
    page.line()
    places = chosen_tokens(made, row, limit)
    if not places:
        page.line(', '.join(words))
        return
    if turns := turn_records(made, row):
        turns = [each | {'share': percent(each['share'])} for each in turns]
        page.table('turns, and what the environment answered', turns, keys=2)
    records = []
    for t in places:
        record = token_record(made, row, t)
        record = {'at': record.pop('position'), 'token': record.pop('text'), **record}
        record.pop('id')
        records.append(record | {'share': percent(record['share'])})
    if len(places) < found['tokens']:
        words.append(f'{len(places)} of {found["tokens"]} tokens')
    page.table(', '.join(words), records, keys=2)


def finite(value: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(made: Inspection, rows: Iterable[int], limit: int) -> dict[str, Any]:
    """The summary, and the rows with their tokens; None for what is not finite."""
    listed = [
        row_record(made, row)
        | {'turns': turn_records(made, row)}
        | {'detail': [token_record(made, row, t) for t in chosen_tokens(made, row, limit)]}
        for row in rows
    ]
    legend = {**unusual.ROW_MARKS, **unusual.TOKEN_MARKS}
    return finite({**summary(made), 'legend': legend, 'detail': listed})


# ---------------------------------------------------------------- command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m policyopt.inspect',
        description='Look into a minibatch that a training run saved: every token of a row with '
        'its log-probs, ratio, advantage, gates, penalties, weight and share of the gradient.',
    )
    parser.add_argument(
        'batch', help='batches/update_*.npz or batches/offending_*.npz in the folder of a run'
    )
    parser.add_argument('--workdir', help='folder of the run, where the file lies elsewhere')
    parser.add_argument(
        '--row', type=int, action='append', metavar='ROW', help='a row to show; may be repeated'
    )
    parser.add_argument(
        '--rows',
        type=int,
        help='how many to show: not finite first, then by gradient share (default: 4; all in JSON)',
    )
    parser.add_argument(
        '--tokens',
        type=int,
        help='of a row at most: marked first, then by gradient share (default: 40; all in JSON)',
    )
    parser.add_argument('--json', action='store_true', help='print one JSON object instead')
    options = parser.parse_args(argv)
    if options.row is not None and options.rows is not None:
        parser.error('--rows has no effect on the rows that --row names: give one of them')
    for name, low, usual in (('rows', 0, 4), ('tokens', 1, 40)):
        value = getattr(options, name)
        if value is None:
            setattr(options, name, sys.maxsize if options.json else usual)
        elif value < low:
            parser.error(f'--{name} is {value}; legal is {low} or more')
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    logging.set_verbosity(logging.ERROR)  # orbax tells of every file
    options = parse(argv)
    workdir = Path(options.workdir) if options.workdir else None
    try:
        made = inspection.load(Path(options.batch), workdir)
        rows = options.row or ranked(made)[: options.rows]
        for row in rows:
            if not 0 <= row < len(made.mask):
                raise ValueError(f'--row is {row}; legal is 0 to {len(made.mask) - 1}')
    except (ValueError, TypeError, OSError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(made, rows, options.tokens), indent=1))
        return 0
    page = Page()
    print_summary(page, made)
    for row in rows:
        print_row(page, made, row, options.tokens)
    return 0


if __name__ == '__main__':
    sys.exit(main())
