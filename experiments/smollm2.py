"""SmolLM2-135M-Instruct by three algorithms: held-out accuracy before and after, and on the way.

    python -m experiments.smollm2 [--folder=runs/smollm2_three]

Runs configs/smollm2.py: 30 steps of GRPO, 10 of GSPO, 10 of DeepSeek-V3.2, one after another, each
in a process of its own. What is complete is not run again, and a run that was stopped goes on, so
it may take several evenings: a step is about a minute of one core. Draws docs/figures/smollm2.png
and writes the numbers beside it, as smollm2.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

from policyopt import at_k, runs
from policyopt.workdir import RECORDS

FOLDER = flags.DEFINE_string('folder', 'runs/smollm2_three', 'Folder for the runs.')
OUTPUT = flags.DEFINE_string('output', 'docs/figures/smollm2.png', 'Where the figure goes.')

STEPS = {'grpo': 30, 'gspo': 10, 'deepseek_v32': 10}
COLOURS = {'grpo': '#0072B2', 'gspo': '#D55E00', 'deepseek_v32': '#009E73'}
TASKS = {'chain_sum': 'a sum of two digits', 'gsm_symbolic': 'word problems'}


def run(name: str, folder: Path) -> runs.Run:
    """The run of an algorithm, begun, gone on with, or found complete."""
    if not (folder / RECORDS).is_file() or not runs.read(folder).finished:
        config = f'--config=configs/smollm2.py:algorithm={name}'
        command = [sys.executable, '-m', 'policyopt.train', config, f'--workdir={folder}']
        subprocess.run([*command, f'--config.steps={STEPS[name]}'], check=True)
    return runs.read(folder)


def numbers(found: runs.Run) -> dict[str, Any]:
    """Right answers of all before and after, with 95 % Wilson intervals, for each task and both."""
    tasks = found.config['tasks']
    counts = {name: tasks[name]['held_out'] for name in TASKS} | {'all': 0}
    counts['all'] = sum(counts.values())
    out: dict[str, Any] = {'steps': found.steps}
    for name, count in counts.items():
        values = found.series('held_out' + f'/{name}' * (name != 'all'), 'evaluation').values
        for when, share in (('before', values[0]), ('after', values[-1])):
            interval = [round(x, 4) for x in at_k.wilson(round(share * count), count)]
            out[f'{name} {when}'] = {
                'right': round(share * count),
                'of': count,
                'interval': interval,
            }
    sampled = found.series('accuracy').values
    out |= {'sampled, first 3 steps': round(float(sampled[:3].mean()), 4)}
    out |= {'sampled, last 3 steps': round(float(sampled[-3:].mean()), 4)}
    seconds = found.times('seconds').values
    return out | {'seconds of a step, median': round(float(sorted(seconds)[len(seconds) // 2]), 1)}


def label(its: runs.Run) -> str:
    """The algorithm in words."""
    return its.title.split(' on ')[0]


def draw(path: Path, found: dict[str, runs.Run], table: dict[str, dict[str, Any]]) -> None:
    """Accuracy before and after with intervals for each task, and sampled accuracy by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout='constrained')
    *bars, curves = figure.subplots(1, len(TASKS) + 1)
    for axis, (task, words) in zip(bars, TASKS.items(), strict=True):
        for place, (name, row) in enumerate(table.items()):
            for shift, when in ((-0.18, 'before'), (0.18, 'after')):
                cell = row[f'{task} {when}']
                share, (low, high) = cell['right'] / cell['of'], cell['interval']
                colour = COLOURS[name] if when == 'after' else '#bbbbbb'
                error = [[max(share - low, 0)], [max(high - share, 0)]]
                axis.bar(place + shift, share, 0.34, color=colour, yerr=error, capsize=3)
        titles = [f'{label(its)}\n{its.steps} steps' for its in found.values()]
        axis.set_xticks(range(len(table)), titles, fontsize=8)
        axis.set_ylim(0, 1)
        axis.set_title(f'held-out accuracy: {words}', fontsize=10)
    for name, its in found.items():
        accuracy = its.series('accuracy')
        curves.plot(accuracy.steps, accuracy.values, color=COLOURS[name], alpha=0.3, lw=0.8)
        smooth = runs.smooth(accuracy.values, 5)
        curves.plot(accuracy.steps, smooth, color=COLOURS[name], lw=2, label=label(its))
    curves.set_title('sampled accuracy of a step', fontsize=10)
    curves.set_xlabel('RL step')
    curves.legend(frameon=False, fontsize=8)
    for axis in (*bars, curves):
        axis.grid(alpha=0.25, lw=0.5, axis='y')
        axis.spines[['top', 'right']].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    output = Path(OUTPUT.value)
    found = {name: run(name, Path(FOLDER.value) / name) for name in STEPS}
    table = {name: numbers(its) for name, its in found.items()}
    draw(output, found, table)
    output.with_suffix('.json').write_text(json.dumps(table, indent=2) + '\n')
    for name, row in table.items():
        for task in (*TASKS, 'all'):
            parts = [row[f'{task} {when}'] for when in ('before', 'after')]
            shown = [
                f'{p["right"]}/{p["of"]} [{p["interval"][0]:.3f}, {p["interval"][1]:.3f}]'
                for p in parts
            ]
            print(name, task, ' -> '.join(shown))


if __name__ == '__main__':
    app.run(main)
