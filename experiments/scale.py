"""The table of docs/scale.md: published shapes compiled for TPU slices, in pieces.

    python -m experiments.scale --cells=3       # compile up to three more programs
    python -m experiments.scale --table         # print what there is, compile nothing
    python -m experiments.scale --table --check # and lower what other source made: is it another?
    python -m experiments.scale --check --cells=9   # and compile what is
    python -m experiments.scale --table --write     # put the table into docs/scale.md

Results are kept in docs/scale.json, so that a later call goes on where an earlier one ended; a
program takes a minute or a few of one core. None of the numbers is measured on a TPU.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')

from typing import NamedTuple  # noqa: E402

from absl import app, flags, logging  # noqa: E402

from policyopt.plan import planning, report, store  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]
CELLS = flags.DEFINE_integer('cells', 1, 'Programs to compile at most.', lower_bound=0)
TABLE = flags.DEFINE_bool('table', False, 'Print the table of what was compiled; compile nothing.')
ONLY = flags.DEFINE_list('only', [], 'Words that the name of a cell must all have, as train,v5e.')
CACHE = flags.DEFINE_string('cache', str(ROOT / 'docs' / 'scale.json'), 'File of results.')
PROGRAMS = flags.DEFINE_string(
    'programs', str(ROOT / 'runs' / 'plan'), 'Folder of compiled programs, to count in them anew.'
)
PAGE = ROOT / 'docs' / 'scale.md'
WRITE = flags.DEFINE_bool('write', False, 'Put the table into docs/scale.md.')
CHECK = flags.DEFINE_bool(
    'check',
    False,
    'Lower anew the programs whose modules have changed, in seconds: those that come out the same '
    'are taken over, others stay marked, or are compiled where --cells leaves some.',
)


class Cell(NamedTuple):
    """One program of the table: the argument of configs/pods.py, and where it runs."""

    model: str
    algorithm: str
    length: int
    topology: str
    step: str
    sizes: str

    @property
    def argument(self) -> str:
        return f'model={self.model},algorithm={self.algorithm},length={self.length},{self.sizes}'

    @property
    def name(self) -> str:
        return ' '.join(map(str, self[:5]))


# Model and slice -> mesh axes, and over how many devices they split rows.
SMALL, MIDDLE, LARGE = 'qwen3-0.6b', 'qwen3-8b', 'qwen3-30b-a3b'
V5E, V5P, V6E = 'v5e:4x4', 'v5p:4x4x4', 'v6e:8x8'
SIZES = {
    (SMALL, V5E): ('fsdp=8', 16),
    (SMALL, V5P): ('fsdp=8', 64),
    (SMALL, V6E): ('fsdp=8', 64),
    (MIDDLE, V5E): ('fsdp=16', 16),
    (MIDDLE, V5P): ('fsdp=16', 64),
    (MIDDLE, V6E): ('fsdp=64', 64),
    (LARGE, V5E): ('fsdp=4,tensor=4', 4),
    (LARGE, V5P): ('fsdp=16,tensor=4', 16),
    (LARGE, V6E): ('fsdp=16,tensor=4', 16),
}
SHORT, LONG = 8192, 32768


def cells() -> list[Cell]:
    """All programs of the table.

    Training of every model on every slice that may hold it, at both lengths, by GSPO, and of the
    mixture by GRPO with routing replay as well; the programs beside it once for each model.
    """
    found = []
    for model, topology in SIZES:
        for length in (SHORT, LONG):
            if topology == V5E and model != SMALL and length == LONG:
                continue  # those of 8,192 tokens fill it, or are too large already
            found.append(_cell(model, 'gspo', length, topology, 'train'))
            if model == LARGE and topology != V5E:
                found.append(_cell(model, 'grpo', length, topology, 'train'))
    for step in ('score', 'prefill', 'decode'):
        found += [_cell(model, 'gspo', SHORT, V5P, step) for model in (SMALL, MIDDLE, LARGE)]
    return [*found, _cell(LARGE, 'gspo', LONG, V5P, 'decode')]


def _cell(model: str, algorithm: str, length: int, topology: str, step: str) -> Cell:
    mesh, shards = SIZES[model, topology]
    parts = 2 if length == SHORT else 4 if model == LARGE else 1  # of a minibatch
    sizes = f'{mesh},rows={2 * shards * parts},microbatches={parts}'
    sizes += f',slots={4 * shards if length == SHORT else shards}'
    return Cell(model, algorithm, length, topology, step, sizes)


def config_of(cell: Cell) -> dict:
    """The cell's config, as `recipe.prepare` takes it."""
    path = ROOT / 'configs' / 'pods.py'
    spec = importlib.util.spec_from_file_location('pods', path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(cell.argument).to_dict()


def described(rows: list[dict], missing: list[str]) -> str:
    """The table, what to do where a program does not fit, and what is not compiled yet."""
    lines = [report.table(rows), *(unfit(row, rows) for row in rows if not row['fits'])]
    if missing:
        count = 'one program' if len(missing) == 1 else f'{len(missing)} programs'
        lines.append(f'\nNot compiled yet: {count}.\n')
        lines += [f'- {name}' for name in missing]
    return '\n'.join(lines).rstrip() + '\n'


def written(page: str, text: str) -> str:
    """The page with this text from its table to its next heading."""
    start = page.index('| model | algorithm')
    return page[:start] + text + page[page.index('\n## ', start) :]


def unfit(row: dict, rows: list[dict]) -> str:
    """What to do for a program that does not fit, and on which slices of the table it does."""
    label, same = row['label'], ('model', 'algorithm', 'length', 'step')
    where = [
        r['label']['topology']
        for r in rows
        if r['fits'] and all(r['label'][name] == label[name] for name in same)
    ]
    name = f'{label["model"]} {label["step"]}, {label["length"]:,} tokens, {label["topology"]}'
    remedy = report.remedy(row) or 'nothing is left to try in its config'
    return f'- {name}: {remedy}.' + (f' It fits {" and ".join(where)}.' if where else '')


def main(argv: list[str]) -> None:
    """Entry point."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}')
    logging.set_verbosity(logging.ERROR)
    kept, left, rows, missing = store.Store(CACHE.value, PROGRAMS.value), CELLS.value, [], []
    if TABLE.value:
        left = 0
    for cell in cells():
        if not all(word in cell.name for word in ONLY.value):
            continue
        config = config_of(cell)
        record = kept.get(store.key_of(config, cell.topology, cell.step))
        if record is not None and CHECK.value:
            record = planning.refreshed(config, cell.topology, cell.step, kept) or record
        again = record is not None and CHECK.value and not store.fresh(record)
        if left and (record is None or again):
            print(f'compiling {cell.name}', file=sys.stderr, flush=True)
            left -= 1
            found = planning.plan(config, cell.topology, [cell.step], kept, again)
            record = found[cell.step]
        elif record is not None:
            record = planning.plan(config, cell.topology, [cell.step], kept)[cell.step]
        if record is None:
            missing.append(cell.name)
        else:
            label = record['label'] | {'model': cell.model}
            rows.append(record | {'label': label})
    text = described(rows, missing)
    print(text)
    if WRITE.value:
        PAGE.write_text(written(PAGE.read_text(), text))


if __name__ == '__main__':
    app.run(main)
