"""Idle devices and old tokens: synchronous against asynchronous training, 1 to 64 generators.

    python -m experiments.staleness --output=docs/figures
    python -m experiments.staleness --run=WORKDIR

Lengths are measured: of answers that the real engines draw from a small model with random weights,
or, with --run, of the last batch of a run. They are stretched so that the longest is `spread` times
the shortest, 5 by default (Magistral, arXiv:2506.10910, has over 5), or, with --spread=0, left as
they are. The simulation (`policyopt.simulation`) then runs schedules on them: a step takes 64
groups of 8, a generator has 8 slots, an update takes `update` of the time that busy slots would
need for a step's tokens. Prefills count as no time, and an update takes no longer with more
generators than generation does, so that the two stay in proportion.

First the simulation is checked against the engines: on the lengths that their rows came to, decode
slots, tokens and ages have to be equal. Writes `staleness.png` and `staleness.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from experiments import observed
from policyopt import batches
from policyopt.simulation import Outcome, Plan, lock_step, simulate

_OUTPUT = flags.DEFINE_string('output', 'docs/figures', 'Folder for the figure and its numbers.')
_RUN = flags.DEFINE_string('run', None, 'Folder of a run whose last batch has the lengths.')
_SPREAD = flags.DEFINE_float('spread', 5.0, 'Longest over shortest; 0: as measured.', lower_bound=0)
_UPDATE = flags.DEFINE_float('update', 1.0, 'Time of an update, over generation.', lower_bound=0)
_TAKES = flags.DEFINE_integer('takes', 24, 'Steps of a simulation.', lower_bound=2)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Simulations of each kind.', lower_bound=1)

GENERATORS = (1, 2, 4, 8, 16, 32, 64)
SHORTEST = 40  # tokens of the shortest answer, where lengths are stretched
BOUNDS = (1, 2, 4)
LARGE = Plan(prompts=64, group_size=8, slots=8, steps=4)


def check(takes: int = 8) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Compare simulation and engines at small size; returns the numbers, and lengths by group."""
    found, lengths = [], []
    for changes in (dict(), dict(staleness=1), dict(staleness=2, generators=2, ahead=2)):
        done, made = observed.compared(dataclasses.replace(observed.SMALL, **changes), takes)
        found.append(
            {
                'plan': changes,
                'slot_use': [done.tokens / done.slots, made.tokens / made.slots],
                'ages': [done.ages, made.ages.tolist()],
            }
        )
        whole = [list(rows.values()) for rows in done.lengths.values()]
        lengths += [rows for rows in whole if len(rows) == observed.SMALL.group_size]
    return found, lengths


def lengths_of(run: str) -> list[list[int]]:
    """Tokens of the answers of a run's last batch, by group."""
    path = sorted((Path(run) / 'batches').glob('batch_*.npz'))[-1]
    saved = batches.load_batch(path)
    counts = (saved['mask'] != 0).sum(axis=1)
    return [
        counts[(saved['group'] == group) & (counts > 0)].tolist()
        for group in np.unique(saved['group'][counts > 0])
    ]


def stretched(groups: Sequence[Sequence[int]], spread: float) -> list[list[int]]:
    """The same, the shortest at SHORTEST and the longest at `spread` times that; 0: as they are."""
    if not spread:
        return [list(rows) for rows in groups]
    low, high = min(map(min, groups)), max(map(max, groups))
    scale = SHORTEST * (spread - 1) / max(high - low, 1)
    return [[round(SHORTEST + scale * (n - low)) for n in rows] for rows in groups]


def drawn(groups: Sequence[Sequence[int]], seed: int) -> Callable[[int], list[int]]:
    """Lengths of group after group: those of a measured group, with replacement within it."""

    def lengths(number: int) -> list[int]:
        rng = np.random.default_rng((seed, number))
        return rng.choice(groups[int(rng.integers(len(groups)))], LARGE.group_size).tolist()

    return lengths


def schedules(generators: int, mean: float, share: float) -> dict[str, Plan]:
    """Label -> schedule."""
    tokens = LARGE.prompts * LARGE.group_size * mean
    update = share * tokens / (LARGE.slots * generators)
    plan = dataclasses.replace(LARGE, generators=generators, update=update)
    ahead = max(1, round(update / LARGE.steps))
    found = {'lock-step': plan, 'synchronous': plan}
    for bound in BOUNDS:
        found[f'staleness {bound}'] = dataclasses.replace(plan, staleness=bound)
    plan = dataclasses.replace(plan, apart=True)
    found['apart, synchronous'] = plan
    for bound in BOUNDS:
        found[f'apart, staleness {bound}'] = dataclasses.replace(plan, staleness=bound, ahead=ahead)
    return found


def sweep(
    groups: Sequence[Sequence[int]], share: float, takes: int, seeds: int
) -> dict[str, list[dict[str, Any]]]:
    """Label -> for each number of generators, means over seeds, with the lowest and highest."""
    mean = float(np.mean([n for rows in groups for n in rows]))
    found: dict[str, list[dict[str, Any]]] = {}
    for generators in GENERATORS:
        for label, plan in schedules(generators, mean, share).items():
            run = lock_step if label == 'lock-step' else simulate
            outcomes = [run(plan, drawn(groups, seed), takes) for seed in range(seeds)]
            found.setdefault(label, []).append({'generators': generators, **numbers(outcomes)})
    return found


def numbers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of the same plan with several seeds."""
    idle = [x.generator_idle for x in outcomes]
    ages = np.sum([x.ages for x in outcomes], axis=0)
    return {
        'idle': float(np.mean(idle)),
        'idle_range': [min(idle), max(idle)],
        'slot_idle': float(np.mean([x.slot_idle for x in outcomes])),
        'trainer_idle': float(np.mean([x.trainer_idle for x in outcomes])),
        'time_per_step': float(np.mean([x.time / len(x.groups) for x in outcomes])),
        'ages': (ages / ages.sum()).round(4).tolist(),
    }


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The figure: idle shares by generators, shared devices and apart; ages at most generators."""
    import matplotlib

    matplotlib.use('agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    for label, rows in found.items():
        x, apart = [row['generators'] for row in rows], label.startswith('apart')
        name = label.removeprefix('apart, ')
        line = axes[int(apart)].plot(x, [row['idle'] for row in rows], marker='.', label=name)[0]
        if apart:
            axes[1].plot(x, [row['trainer_idle'] for row in rows], ':', color=line.get_color())
    for axis, title in zip(
        axes, ('taking turns: idle slots', 'apart: idle generators (dotted: trainer)'), strict=False
    ):
        axis.set_title(title, fontsize=10)
        axis.set_xscale(
            'log',
            base=2,
        )
        axis.set_xticks(GENERATORS, [str(n) for n in GENERATORS])
        axis.set_xlabel('generators of 8 slots')
        axis.set_ylim(0, 1)
        axis.legend(frameon=False, fontsize=8)
    shown = {label: rows[-1]['ages'] for label, rows in found.items() if 'staleness' in label}
    width = 0.8 / len(shown)
    for i, (label, ages) in enumerate(shown.items()):
        places = np.arange(len(ages)) + (i - len(shown) / 2) * width
        axes[2].bar(places, ages, width, label=label)
    axes[2].set_title(f'share of tokens by age, {GENERATORS[-1]} generators', fontsize=10)
    axes[2].set_xlabel('versions behind')
    axes[2].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.spines[['top', 'right']].set_visible(False)
    figure.set_layout_engine('constrained')
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    """Entry point."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    checked, groups = check()
    for row in checked:
        use = row['slot_use']
        print(f'{row["plan"]}: slot use {use[0]:.3f} by the engines, {use[1]:.3f} simulated')
    if _RUN.value:
        groups = lengths_of(_RUN.value)
    groups = stretched(groups, _SPREAD.value)
    every = np.concatenate(groups)
    found = sweep(groups, _UPDATE.value, _TAKES.value, _SEEDS.value)
    output = Path(_OUTPUT.value)
    output.mkdir(parents=True, exist_ok=True)
    quantiles = dict(
        zip((0, 5, 50, 95, 100), np.percentile(every, (0, 5, 50, 95, 100)), strict=True)
    )
    content = {
        'lengths': {'answers': len(every), 'mean': every.mean(), 'quantiles': quantiles},
        'update': _UPDATE.value,
        'takes': _TAKES.value,
        'seeds': _SEEDS.value,
        'checked': checked,
        'schedules': found,
    }
    (output / 'staleness.json').write_text(json.dumps(content, indent=1) + '\n')
    draw(found, output / 'staleness.png')
    table = Table(title='idle share of generators / of a trainer of its own; time of a step')
    for column in ('schedule', *map(str, GENERATORS), 'mean age'):
        table.add_column(column, justify='right')
    for label, rows in found.items():
        cells = [f'{row["idle"]:.0%}' for row in rows]
        if label.startswith('apart'):
            cells = [f'{row["idle"]:.0%} / {row["trainer_idle"]:.0%}' for row in rows]
        age = np.dot(rows[-1]['ages'], np.arange(len(rows[-1]['ages'])))
        table.add_row(label, *cells, f'{age:.2f}')
    Console(width=110).print(table)


if __name__ == '__main__':
    app.run(main)
