"""Turn-level GSPO-token against outcome-only GRPO, on two tasks of several turns.

    python -m experiments.turns --seeds=3 --folder=runs/turns

Runs configs/turns.py for both tasks, both algorithms and each seed, one after another. The two
algorithms of a seed go on from one warm start. What is complete is not run again. Draws
docs/figures/turns.png, and writes the numbers beside it, as turns.json.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from configs import turns as config_lib
from policyopt import loop as loop_lib
from policyopt import metrics, recipe, reinforce, report, runs, stopping, train, warm_start
from policyopt.workdir import RECORDS

TASKS = flags.DEFINE_list('tasks', ['guessing', 'calculator'], 'Tasks of configs/turns.py.')
SEEDS = flags.DEFINE_integer('seeds', 1, 'Number of seeds, from 0.', lower_bound=1)
STEPS = flags.DEFINE_integer('steps', 60, 'RL steps.', lower_bound=10)
FOLDER = flags.DEFINE_string('folder', 'runs/turns', 'Folder for the runs.')
OUTPUT = flags.DEFINE_string('output', 'docs/figures/turns.png', 'Where the figure goes.')

ALGORITHMS = {
    'gspo_token': ('GSPO-token, advantages of turns', '#0072B2'),
    'grpo': ('GRPO, the outcome alone', '#D55E00'),
}
PANELS = (
    ('held_out', 'evaluation', 'held-out accuracy'),
    ('accuracy', 'rl', 'sampled accuracy'),
    ('turns/reward', 'rl', 'reward of turns'),
)


def complete(folder: pathlib.Path) -> bool:
    """Whether a run came to its end."""
    return (folder / RECORDS).is_file() and runs.read(folder).finished


def compare(task: str, seed: int, folders: dict[str, pathlib.Path]) -> None:
    """Run the algorithms of one seed, name -> folder, from one warm start."""
    warm: Any = None
    for name, folder in folders.items():
        config = config_lib.get_config(f'task={task},algorithm={name}').to_dict()
        config.update(seed=seed, steps=STEPS.value, checkpoint=dict(every=0))
        job = train.start(config, folder)
        setup, stop = job.setup, stopping.Stop()
        with job.lock, contextlib.closing(setup.judge):
            loop = loop_lib.make_loop(setup, folder, None, stop)
            if warm is None:
                warm = warm_start.warm_start(setup, recipe.first_params(setup), loop.records, stop)
            params, steps = jax.tree.map(jnp.copy, warm[0]), warm[1]
            before = reinforce.record_accuracy(setup, params, loop, 0)
            point = loop_lib.new_point(setup, loop, params, before, steps)
            params = reinforce.reinforce(setup, loop, point)
            after = reinforce.record_accuracy(setup, params, loop, STEPS.value)
            values = {'before': before.value, 'after': after.value, 'warm_steps': steps}
            metrics.append(folder / RECORDS, 'result', STEPS.value, values)
        report.write(folder)


def numbers(found: list[runs.Run]) -> dict[str, Any]:
    """Held-out accuracy of each seed before and after, and the seconds of all."""
    held_out = [run.series('held_out', 'evaluation') for run in found]
    return {
        'before': [float(s.values[0]) for s in held_out],
        'after': [float(s.values[-1]) for s in held_out],
        'halfway': [float(s.values[len(s.values) // 2]) for s in held_out],
        'turn_reward': [float(run.series('turns/reward').values[-5:].mean()) for run in found],
        'turns': [float(run.series('turns/mean').values[-5:].mean()) for run in found],
        'slot_use': [float(run.times('slot_use').values.mean()) for run in found],
    }


def draw(path: pathlib.Path, found: dict[tuple[str, str], list[runs.Run]]) -> None:
    """A row for each task: a thin line for each seed, a thick one for their mean."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(task for task, _ in found))
    figure = Figure(figsize=(10.5, 2.9 * len(tasks)), layout='constrained')
    axes = figure.subplots(len(tasks), len(PANELS), squeeze=False)
    for row, task in zip(axes, tasks, strict=True):
        for axis, (metric, stage, label) in zip(row, PANELS, strict=True):
            for name, (words, colour) in ALGORITHMS.items():
                series = [run.series(metric, stage) for run in found[task, name]]
                values = [runs.smooth(s.values, 5 if stage == 'rl' else 1) for s in series]
                for s, v in zip(series, values, strict=True):
                    axis.plot(s.steps, v, color=colour, alpha=0.3, lw=0.8)
                axis.plot(series[0].steps, np.mean(values, axis=0), color=colour, lw=2, label=words)
            axis.set_title(f'{task}: {label}', fontsize=10)
            axis.grid(alpha=0.25, lw=0.5)
            axis.spines[['top', 'right']].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel('RL step')
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=2, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    root, output = pathlib.Path(FOLDER.value), pathlib.Path(OUTPUT.value)
    found: dict[tuple[str, str], list[runs.Run]] = {}
    for seed, task in itertools.product(range(SEEDS.value), TASKS.value):
        folders = {name: root / f'{task}_{name}_{seed}' for name in ALGORITHMS}
        if not all(complete(folder) for folder in folders.values()):
            compare(task, seed, folders)
        for name, folder in folders.items():
            run = runs.read(folder)
            found.setdefault((task, name), []).append(run)
            print(task, name, seed, run.series('held_out', 'evaluation').values, flush=True)
    table = {f'{task} {name}': numbers(its) for (task, name), its in found.items()}
    draw(output, found)
    output.with_suffix('.json').write_text(json.dumps(table, indent=2) + '\n')
    for name, row in table.items():
        shown = {k: f'{np.mean(v):.3f} ({min(v):.3f} to {max(v):.3f})' for k, v in row.items()}
        print(name, shown, flush=True)


if __name__ == '__main__':
    app.run(main)
