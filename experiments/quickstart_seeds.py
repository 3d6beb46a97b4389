"""The main job over seeds: accuracy before and after, and how long it took.

    python -m experiments.quickstart_seeds --seeds=10 --folder=runs/seeds

Seeds run one after another, each in a process of its own, since the times of runs that share cores
say little. A seed whose run is complete is not run again. Prints a table and writes `seeds.json`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

from policyopt import metrics, train

_SEEDS = flags.DEFINE_integer('seeds', 10, 'Number of seeds, from 0.', lower_bound=1)
_FIRST = flags.DEFINE_integer('first', 0, 'The first seed.', lower_bound=0)
_RECIPE = flags.DEFINE_string('recipe', 'configs/quickstart.py', 'Config file, or FILE:ARGUMENT.')
_FOLDER = flags.DEFINE_string('folder', 'runs/seeds', 'Folder for the runs.')

COLUMNS = ('seed', 'before', 'after', 'gain', 'warm_steps', 'first_step_seconds', 'seconds')


def result(folder: Path) -> dict[str, Any] | None:
    """Result of a complete run, None where there is none."""
    if not (folder / train.TIMINGS).is_file():
        return None
    found = [r for r in metrics.read(folder / train.RECORDS) if r['stage'] == 'result']
    times = {(r['stage'], r['step']): r['time'] for r in metrics.read(folder / train.TIMINGS)}
    if not found:
        return None
    start, end = times['start', 0], times['result', found[0]['step']]
    spent = {'first_step_seconds': times['rl', 1] - start, 'seconds': end - start}
    return found[0] | spent


def main(argv: list[str]) -> None:
    """Entry point."""
    del argv
    root, rows = Path(_FOLDER.value), []
    for seed in range(_FIRST.value, _FIRST.value + _SEEDS.value):
        folder = root / str(seed)
        if result(folder) is None:
            command = [sys.executable, '-m', 'policyopt.train', f'--config={_RECIPE.value}']
            command += [f'--workdir={folder}', f'--config.seed={seed}']
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = result(folder)
        assert found is not None, f'{folder} holds no result'
        row = {name: found[name] for name in COLUMNS if name in found}
        rows.append({'seed': seed, **row, 'gain': found['after'] - found['before']})
        print('  '.join(f'{name} {rows[-1][name]:.4g}' for name in COLUMNS), flush=True)
    (root / 'seeds.json').write_text(json.dumps(rows, indent=2) + '\n')
    for name in COLUMNS[1:]:
        values = [row[name] for row in rows]
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f'{name}: {low:.4g} to {high:.4g}, median {middle:.4g}')
    good = sum(row['gain'] >= 0.25 and row['after'] > 0.8 for row in rows)
    print(f'{good} of {len(rows)} seeds gain 25 points or more and end above 80 %')


if __name__ == '__main__':
    app.run(main)
