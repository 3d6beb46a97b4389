"""The table of docs/scale.md: published shapes compiled for TPU slices, in pieces.

    python -m experiments.scale --cells=3       # compile up to three more programs
    python -m experiments.scale --table         # print what there is, compile nothing

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


# Model and slice -> mesh axes and what they split rows over.
SMALL, MIDDLE, LARGE = 'qwen3-0.6b', 'qwen3-8b', 'qwen3-30b-a3b'
SIZES = {
    (SMALL, 'v5e:4x4'): ('fsdp=8', 16),
    (SMALL, 'v5p:4x4x4'): ('fsdp=8', 64),
    (SMALL, 'v6e:8x8'): ('fsdp=8', 64),
    (MIDDLE, 'v5p:4x4x4'): ('fsdp=16', 64),
    (MIDDLE, 'v6e:8x8'): ('fsdp=64', 64),
    (LARGE, 'v5p:4x4x4'): ('fsdp=16,tensor=4', 16),
    (LARGE, 'v6e:8x8'): ('fsdp=16,tensor=4', 16),
}
ALGORITHMS = ('gspo', 'grpo')


def cells() -> list[Cell]:
    """All programs of the table; those that say most come first."""
    found = []
    for step in ('train', 'decode', 'prefill', 'score'):
        for length in (8192, 32768):
            for (model, topology), (mesh, shards) in SIZES.items():
                parts = 2 if length == 8192 else 1  # of a minibatch
                sizes = f'{mesh},rows={2 * shards * parts},microbatches={parts}'
                sizes += f',slots={4 * shards if length == 8192 else shards}'
                for algorithm in ALGORITHMS:
                    if step != 'train' and algorithm != 'gspo':
                        continue  # one sampler and one scorer for both
                    found.append(Cell(model, algorithm, length, topology, step, sizes))
    return found


def config_of(cell: Cell) -> dict:
    """The cell's config, as `recipe.prepare` takes it."""
    path = ROOT / 'configs' / 'pods.py'
    spec = importlib.util.spec_from_file_location('pods', path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(cell.argument).to_dict()


def main(argv: list[str]) -> None:
    """Entry point."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {" ".join(argv[1:])}')
    logging.set_verbosity(logging.ERROR)
    kept, left, rows, missing = store.Store(CACHE.value), CELLS.value, [], []
    if TABLE.value:
        left = 0
    for cell in cells():
        if not all(word in cell.name for word in ONLY.value):
            continue
        config = config_of(cell)
        record = kept.get(store.key_of(config, cell.topology, cell.step))
        if record is None and left:
            print(f'compiling {cell.name}', file=sys.stderr, flush=True)
            record = planning.plan(config, cell.topology, [cell.step], kept)[cell.step]
            left -= 1
        if record is None:
            missing.append(cell.name)
        else:
            label = record['label'] | {'model': cell.model}
            rows.append(record | {'label': label})
    print(report.table(rows))
    if missing:
        print(f'Not compiled yet: {len(missing)} programs.')
        for name in missing:
            print(f'- {name}')


if __name__ == '__main__':
    app.run(main)
