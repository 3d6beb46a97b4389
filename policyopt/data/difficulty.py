"""Problems that are neither too easy nor out of reach, by how often a model solved them.

    python -m policyopt.data.difficulty SAMPLES... --data=FILE.jsonl --out=KEPT.jsonl --stage=first

Magistral (2506.10910) filters twice. A first model answers every problem 16 times; those that it
always or never solves are left out, and a model is trained on the rest. That one answers all
problems of the original file, and its rates filter them anew: what was out of the first model's
reach may be right for it. So each stage is one call, on the same `--data`.
"""

from __future__ import annotations

import argparse
import collections
import collections.abc
import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from policyopt import checks, disk

FIELD = 'difficulty'
KEPT, EASY, UNSOLVED, DOUBTFUL = 'kept', 'too easy', 'never solved', 'doubtful'
FEW, UNKNOWN = 'too few samples', 'not sampled'
OUTCOMES = (KEPT, EASY, UNSOLVED, DOUBTFUL, FEW, UNKNOWN)


@dataclasses.dataclass
class Rate:
    """How a problem was answered.

    Attributes:
      right, samples: counts; an answer that was not judged is in neither.
      doubtful: share of the samples that agree on one wrong answer, the largest; above 1/2 the
        stated answer may be the wrong one.
      answer: the right answer, as the samples state it.
    """

    right: int = 0
    samples: int = 0
    doubtful: float = 0.0
    answer: str = ''

    @property
    def rate(self) -> float:
        """Share of right answers; NaN without any sample."""
        return self.right / self.samples if self.samples else math.nan


def solve_rates(*files: Iterable[Mapping[str, Any]]) -> dict[str, Rate]:
    """Rates by prompt, from the lines of files as `policyopt.evaluate --out` writes them.

    A line has `prompt` and `correct` (true, false, or null for not judged), and may have `vote`,
    the same for answers that are alike, and `right_answer`. A vote is a number within its file:
    where there are several, `doubtful` adds up the largest class of each. Raises ValueError for
    other lines.
    """
    found: dict[str, Rate] = {}
    agreed: collections.Counter[str] = collections.Counter()
    for lines in files:
        votes: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for number, line in enumerate(lines, 1):
            _check_sample(number, line)
            prompt, correct = line['prompt'], line['correct']
            rate = found.setdefault(prompt, Rate(answer=str(line.get('right_answer', ''))))
            if correct is None:
                continue
            rate.samples += 1
            rate.right += correct
            if not correct and line.get('vote') is not None:
                votes[prompt][line['vote']] += 1
        agreed.update({prompt: max(counts.values()) for prompt, counts in votes.items()})
    for prompt, count in agreed.items():
        found[prompt].doubtful = count / found[prompt].samples
    return found


def _check_sample(number: int, line: Any) -> None:
    if not isinstance(line, collections.abc.Mapping):
        raise ValueError(f'line {number} is no JSON object')
    for name, kinds in (('prompt', (str,)), ('correct', (bool, type(None)))):
        if name not in line or not isinstance(line[name], kinds):
            shown = json.dumps(line.get(name))[:40]
            raise ValueError(
                f'line {number} has `{name}` {shown}; legal are lines of samples.jsonl.'
                f'{checks.hint(name, line)}'
            )


def outcome(rate: Rate | None, low: float, high: float, least: int = 1) -> str:
    """What becomes of a problem: one of `OUTCOMES`.

    Kept is low < rate < high, except where more than half of the samples agree on a wrong answer
    (2506.10910 leaves these out as likely errors of the data).
    """
    if rate is None or not rate.samples:
        return UNKNOWN
    if rate.samples < least:
        return FEW
    if rate.doubtful > 0.5:
        return DOUBTFUL
    if rate.rate <= low:
        return UNSOLVED
    return EASY if rate.rate >= high else KEPT


def annotate(
    rows: Iterable[Mapping[str, Any]], rates: Mapping[str, Rate], stage: str
) -> Iterator[dict[str, Any]]:
    """Rows with `row['difficulty'][stage]`: rate, right, samples; those of other stages stay.

    Raises ValueError for a row whose `difficulty` is something else.
    """
    for row in rows:
        if not isinstance(row.get(FIELD, {}), collections.abc.Mapping):
            raise ValueError(
                f'a row has `{FIELD}` {json.dumps(row[FIELD])[:40]}, where rates belong; give that '
                'field another name'
            )
        rate = rates.get(row['prompt'])
        if rate is None or not rate.samples:
            yield dict(row)
            continue
        said = {'rate': round(rate.rate, 6), 'right': rate.right, 'samples': rate.samples}
        yield {**row, FIELD: {**row.get(FIELD, {}), stage: said}}


def filtered(
    rows: Sequence[Mapping[str, Any]],
    rates: Mapping[str, Rate],
    *,
    stage: str,
    low: float = 0.0,
    high: float = 1.0,
    least: int = 1,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows to keep, with their rates, and how many there are of each of `OUTCOMES`.

    Args:
      rows: of a dataset, each with `prompt`.
      rates: of `solve_rates`.
      stage: what the rates are called in the rows.
      low, high: kept is what is between, both excluded.
      least: samples that a rate needs to count.
    """
    checks.number('low', low, 0, 1)
    checks.number('high', high, 0, 1)
    checks.number('least', least, 1)
    if not low < high:
        raise ValueError(f'low is {low}; legal is below high, {high}')
    counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
    kept = []
    for row in annotate(rows, rates, stage):
        what = outcome(rates.get(row['prompt']), low, high, least)
        counts[what] += 1
        if what == KEPT:
            kept.append(row)
    return kept, counts


def read_lines(path: str | os.PathLike) -> Iterator[Any]:
    """Values of a JSONL file; ValueError, with file and line, for one that can't be read."""
    try:
        text = pathlib.Path(path).read_text(encoding='utf-8')
    except OSError as error:
        raise ValueError(f'{path} cannot be read: {error.strerror}') from error
    for number, line in enumerate(text.split('\n'), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f'{path}:{number}: invalid JSON, {error}') from error


def check_absent(path: str | os.PathLike) -> None:
    """Raise ValueError where there is such a file."""
    if os.path.lexists(path):
        raise ValueError(f'{path} is there already; nothing is overwritten')


def write_lines(path: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file that is there when it is whole; ValueError where one is there already."""
    path = pathlib.Path(path)
    check_absent(path)
    try:
        with disk.whole(path) as partial, open(partial, 'w', encoding='utf-8') as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + '\n')
    except OSError as error:
        raise ValueError(f'{path} cannot be written: {error.strerror}') from error


def read_problems(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Rows of a dataset, each with a `prompt`; ValueError for others."""
    rows = []
    for number, row in enumerate(read_lines(path), 1):
        if not isinstance(row, dict) or not isinstance(row.get('prompt'), str):
            hint = checks.hint('prompt', row) if isinstance(row, dict) else ''
            raise ValueError(f'{path}: row {number} has no text `prompt`.{hint}')
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    parser = argparse.ArgumentParser(
        prog='python -m policyopt.data.difficulty',
        description='Keep problems that a model solves sometimes, and write their solve rates.',
    )
    parser.add_argument('samples', nargs='+', help='samples.jsonl of policyopt.evaluate --out')
    parser.add_argument('--data', help='the dataset, JSONL; by default the problems of the samples')
    parser.add_argument('--out', required=True, help='file for the rows that are kept')
    parser.add_argument('--rated', help='file for all rows, with their rates')
    parser.add_argument('--stage', default='first', help='name of these rates (default: first)')
    parser.add_argument('--low', type=float, default=0.0, help='keep rates above (default: 0)')
    parser.add_argument('--high', type=float, default=1.0, help='keep rates below (default: 1)')
    parser.add_argument('--least', type=int, default=1, help='samples needed (default: 1)')
    options = parser.parse_args(argv)
    try:
        if options.out == options.rated:
            raise ValueError(f'--out and --rated are both {options.out}; name two files')
        for path in filter(None, (options.out, options.rated)):
            check_absent(path)
        rates = solve_rates(*map(read_lines, options.samples))
        rows = (
            read_problems(options.data)
            if options.data
            else [{'prompt': p, 'answer': rate.answer} for p, rate in rates.items()]
        )
        kept, counts = filtered(
            rows,
            rates,
            stage=options.stage,
            low=options.low,
            high=options.high,
            least=options.least,
        )
        if not kept:
            shown = ', '.join(f'{n} {what}' for what, n in counts.items() if n)
            raise ValueError(f'no problem is left of {len(rows)} ({shown}); widen low and high')
        write_lines(options.out, kept)
        if options.rated:
            write_lines(options.rated, annotate(rows, rates, options.stage))
    except ValueError as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return 2
    for what, count in counts.items():
        print(f'{count:7d} {what}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
