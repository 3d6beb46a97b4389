"""Check claims of the literature: numbers with seeds, a figure, and a verdict each.

    python -m experiments.run --list
    python -m experiments.run clip_fraction group_size --seeds=5
    python -m experiments.run --all --workers=2

Seeds that were measured before are not measured again, so a stopped command goes on, unless what
measures them has changed since (`experiments.sources`). Seeds that are there are judged, too, where
fewer are asked for, and a verdict on more seeds than are there is not replaced. Results go to
docs/claims/NAME.json and NAME.png, and docs/claims.md is written anew from all that are there;
--fast takes the sizes of a test and leaves both alone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import pkgutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments import claims, sources
from experiments.beyond import BEYOND
from experiments.claim import Claim, Place, Verdict, save
from policyopt import checks

DOCS = Path('docs')


def names() -> list[str]:
    """Modules of experiments.claims."""
    return sorted(module.name for module in pkgutil.iter_modules(claims.__path__))


def load(name: str) -> Claim:
    """A claim by its module's name; ValueError with the nearest one where there is none."""
    if name not in names():
        raise ValueError(f'{name!r} is no claim.{checks.nearest(name, names())}')
    return importlib.import_module(f'experiments.claims.{name}').CLAIM


def held(name: str, place: Place) -> Any:
    """Numbers of a seed in the folder; None where it has none by the measurement as it is now."""
    path = place.folder / name / f'{"fast_" * place.fast}{place.seed}.json'
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return found['numbers'] if found.get('source') == source_of(name) else None


def source_of(name: str) -> str:
    """What numbers of a claim depend on, of the code here."""
    return sources.digest(f'experiments.claims.{name}', without=('judge', 'draw', 'CLAIM'))


def numbers_of(name: str, place: Place) -> Any:
    """Numbers of a seed, measured now where they are not in the folder."""
    found = held(name, place)
    if found is not None:
        return found
    began, source = time.monotonic(), source_of(name)
    found = load(name).measure(place)
    path = place.folder / name / f'{"fast_" * place.fast}{place.seed}.json'
    seconds = round(time.monotonic() - began, 1)
    save(path, {'numbers': found, 'seconds': seconds, 'source': source})
    return json.loads(path.read_text())['numbers']


def seeds_of(name: str, asked: int, folder: Path, fast: bool) -> list[int]:
    """Seeds from 0 to what is asked for, and those after them that are in the folder."""
    files = (folder / name).glob(f'{"fast_" * fast}[0-9]*.json')
    there = [int(file.stem.removeprefix('fast_')) for file in files]
    more = [n for n in there if held(name, Place(n, folder, fast)) is not None]
    return sorted({*range(asked), *more})


def recorded(name: str) -> int:
    """Seeds of the verdict that docs have."""
    path = DOCS / 'claims' / f'{name}.json'
    return len(json.loads(path.read_text())['seeds']) if path.is_file() else 0


def measured(name: str, places: Sequence[Place], workers: int) -> list[Any]:
    """Numbers of all seeds, each in a process of its own where there are several workers."""

    def apart(place: Place) -> None:
        command = [sys.executable, '-m', 'experiments.run', name, f'--only={place.seed}']
        command += [f'--folder={place.folder}', *['--fast'] * place.fast]
        subprocess.run(command, check=True)

    if workers > 1:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(apart, places))
    return [numbers_of(name, place) for place in places]


def conclude(name: str, seeds: Sequence[Any], folder: Path) -> Verdict:
    """Judge, and write numbers and figure."""
    from matplotlib.figure import Figure

    claim = load(name)
    verdict = claim.judge(seeds)
    figure = Figure(figsize=(6.4, 3.6), layout='constrained')
    claim.draw(figure, seeds)
    save(folder / f'{name}.json', {'verdict': verdict._asdict(), 'seeds': list(seeds)})
    figure.savefig(folder / f'{name}.png', dpi=100)
    return verdict


@functools.cache
def verdict_of(name: str) -> Verdict | None:
    """What docs/claims has, None where the claim was not checked yet."""
    path = DOCS / 'claims' / f'{name}.json'
    if not path.is_file():
        return None
    held = json.loads(path.read_text())['verdict']
    return Verdict(**held | {'interval': tuple(held['interval'])})


def sizes(verdict: Verdict) -> str:
    """Effect and interval in words."""
    low, high = verdict.interval
    return f'{verdict.effect}: {verdict.value:.3g} [{low:.3g}, {high:.3g}]'


def page() -> str:
    """docs/claims.md, from the claims and their results."""
    out = [
        '# Claims of the literature',
        '',
        'Written by `python -m experiments.run`, which measures them again (`--list`). Policies',
        'have about a million parameters and answer in a few tokens, where nothing else is said;',
        'intervals are 95 % bootstrap intervals over seeds, of which there are few. *Reproduced*',
        "means that the whole interval is on the claim's side of what is said to count.",
        '',
        '| claim | source | published | verdict |',
        '| --- | --- | --- | --- |',
    ]
    for name in names():
        claim, verdict = load(name), verdict_of(name)
        word = f'not run yet, {claim.minutes:g} minutes a seed'
        if verdict:
            word = f'[{verdict.word}](#{name})'
        out.append(f'| {claim.text} | {claim.source} | {claim.published} | {word} |')
    for name in names():
        verdict = verdict_of(name)
        if verdict is not None:
            out += ['', f'## {name}', '', load(name).text, '']
            out += [f'**{verdict.word.capitalize()}.** {verdict.text}', '']
            out += [f'{sizes(verdict)}.', '', f'![{load(name).text}](claims/{name}.png)']
    out += ['', '## Beyond this budget', '']
    out += [
        'These compare what runs come to, which takes hours a seed; nothing here decides them.',
        '',
    ]
    out += ['| claim | source | published | nearest measurement |', '| --- | --- | --- | --- |']
    out += [f'| {" | ".join(each)} |' for each in BEYOND]
    return '\n'.join(out) + '\n'


def show() -> None:
    """Print all claims."""
    table = Table('name', 'claim', 'published', 'minutes a seed', 'verdict so far')
    for name in names():
        claim, verdict = load(name), verdict_of(name)
        word = f'{verdict.word}: {sizes(verdict)}' if verdict else '-'
        table.add_row(name, claim.text, claim.published, f'{claim.minutes:g}', word)
    for each in BEYOND:
        table.add_row('-', each.text, each.published, 'hours', 'beyond this budget')
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command was asked for."""
    parser = argparse.ArgumentParser(
        prog='python -m experiments.run', description='Check claims of the literature.'
    )
    parser.add_argument('names', nargs='*', help='claims to check; --list shows them')
    parser.add_argument('--list', action='store_true', help='show claims, costs and verdicts')
    parser.add_argument('--all', action='store_true', help='check all claims')
    parser.add_argument('--seeds', type=int, default=5, help='number of seeds, from 0')
    parser.add_argument('--only', type=int, help='measure this seed alone, and judge nothing')
    parser.add_argument('--workers', type=int, default=1, help='seeds measured at the same time')
    parser.add_argument('--folder', type=Path, default='runs/claims', help='for what seeds leave')
    parser.add_argument('--fast', action='store_true', help='sizes of a test; docs stay')
    given = parser.parse_args(argv)
    for name, least in (('seeds', 2), ('workers', 1)):
        if getattr(given, name) < least:
            parser.error(f'--{name} is {getattr(given, name)}; legal is {least} or more')
    if given.all and given.names:
        parser.error('--all has no effect beside names')
    try:
        for name in given.names:
            load(name)
    except ValueError as error:
        parser.error(str(error))
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments(argv)
    chosen = names() if given.all else given.names
    if given.list or not chosen:
        show()
        return
    if given.only is not None:
        for name in chosen:
            numbers_of(name, Place(given.only, given.folder, given.fast))
        return
    for name in chosen:
        check(name, given)


def check(name: str, given: argparse.Namespace) -> None:
    """Measure, judge and write down one claim."""
    numbers = seeds_of(name, given.seeds, given.folder, given.fast)
    places = [Place(seed, given.folder, given.fast) for seed in numbers]
    seeds = measured(name, places, given.workers)
    kept = given.fast or len(seeds) < recorded(name)
    aside = given.folder / ('fast' if given.fast else 'fewer')
    verdict = conclude(name, seeds, aside if kept else DOCS / 'claims')
    print(f'{name}: {verdict.word}. {sizes(verdict)}.\n  {verdict.text}', flush=True)
    if kept and not given.fast:
        print(
            f'  docs keep their verdict on {recorded(name)} seeds, since these are {len(seeds)}: '
            f'--seeds={recorded(name)} or more replaces it',
            flush=True,
        )
    if not kept:
        verdict_of.cache_clear()
        (DOCS / 'claims.md').write_text(page())


if __name__ == '__main__':
    main()
