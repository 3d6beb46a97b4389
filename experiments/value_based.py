"""What value pretraining gives a critic, and VAPO and VC-PPO with and without their parts.

    python -m experiments.value_based --seeds=3 --folder=runs/value_based
    python -m experiments.value_based --lines=vapo,vapo-nll,vapo-token_loss,vapo-clip_higher

Runs configs/long_answers.py for each line and seed, one after another; a line is an algorithm, and
after each `-` a part that it goes without. All lines of a seed start from one warm start, which is
kept in the folder, and what is complete is not run again. Before and after value pretraining the
critic says what it thinks of the same answers. Draws docs/figures/value_based.png, and writes the
numbers beside it, as value_based.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from configs import long_answers as config_lib
from policyopt import critic as critic_lib
from policyopt import (
    data,
    masked,
    metrics,
    models,
    recipe,
    reinforce,
    report,
    runs,
    stopping,
    train,
)
from policyopt import loop as loop_lib
from policyopt import warm_start as warm_lib
from policyopt.disk import whole
from policyopt.workdir import RECORDS

LINES = flags.DEFINE_list(
    'lines', ['vapo', 'vc_ppo', 'vapo-pretraining'], 'Algorithms, with the parts they go without.'
)
SEEDS = flags.DEFINE_integer('seeds', 1, 'Number of seeds, from 0.', lower_bound=1)
STEPS = flags.DEFINE_integer('steps', 30, 'RL steps.', lower_bound=5)
ROUNDS = flags.DEFINE_integer('rounds', 4, 'Batches of answers the critic is looked at on.')
FOLDER = flags.DEFINE_string('folder', 'runs/value_based', 'Folder for the runs.')
OUTPUT = flags.DEFINE_string('output', 'docs/figures/value_based.png', 'Where the figure goes.')

BINS = config_lib.BLOCKS  # of a position in the answer: one for each block
PROFILE = 'critic.json'  # in the folder of a run
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000', '#999999')
SIDES = {'right': COLOURS[0], 'wrong': COLOURS[1]}
TAIL = 10  # RL steps that the accuracy at the end is the mean of


# ============================================================================ measurements


def along(x: Any, place: Any, bins: int) -> dict[str, list[float]]:
    """Mean of x over rows at each bin of a row's positions, and half its 95 % interval.

    Args:
      x: [B,T] numbers.
      place: [B,T] bin of each token, -1 for none; see `masked.position_bins`.
      bins: how many there are.

    Each row counts once in a bin, with the mean of its tokens there. Bins that no row reaches are
    None, as are intervals of a single row.
    """
    mean, half = [], []
    for i in range(bins):
        inside = place == i
        rows = inside.any(axis=1)
        values = (np.where(inside, x, 0).sum(axis=1)[rows]) / inside.sum(axis=1)[rows]
        mean.append(float(values.mean()) if rows.any() else None)
        many = len(values) > 1
        half.append(float(1.96 * values.std(ddof=1) / np.sqrt(len(values))) if many else None)
    return {'mean': mean, 'half': half}


def profile(
    values: Any, advantages: Any, rewards: Any, mask: Any, bins: int = BINS
) -> dict[str, Any]:
    """Values, advantages and explained variance by position; arrays [B,T], rewards [B]."""
    place = np.asarray(masked.position_bins(mask, bins))
    returns: Any = np.where(mask != 0, rewards[:, None], 0).astype(np.float32)
    found: dict[str, Any] = {'right': int((rewards > 0).sum()), 'answers': len(rewards)}
    for name, x in (('value', values), ('advantage', advantages)):
        found[name] = {}
        for side, rows in (('right', rewards > 0), ('wrong', rewards <= 0)):
            found[name][side] = along(x[rows], place[rows], bins)
    explained = critic_lib.ExplainedVariance.by_position(values, returns, mask, bins)
    whole_ = critic_lib.ExplainedVariance.of(values, returns, mask)
    found['explained'] = np.asarray(explained.value).tolist()
    found['explained_variance'] = float(whole_.value)
    return found


def drawn(setup: Any, loop: Any, state: Any, rounds: int) -> list[Any]:
    """Answers of the policy to problems of the training side, as rollouts on the host."""
    source = data.batches(setup.task.train, setup.config.rollout.prompts, setup.config.seed + 2)
    keys = jax.random.split(jax.random.fold_in(state.key, 2**31 - 1), rounds)
    return [loop.collect(state, None, source, key).rollout for key in keys]


def look(setup: Any, loop: Any, state: Any, rollouts: Sequence[Any]) -> dict[str, Any]:
    """What the critic thinks of answers, and what the algorithm makes of it; see `profile`."""
    parts: list[Any] = []
    for rollout in rollouts:
        values = np.asarray(loop.learner.values(state, rollout))
        valued = dataclasses.replace(rollout, values=values)
        advantages = np.asarray(setup.algorithm.advantages(valued).advantages)
        parts.append((values, advantages, np.asarray(rollout.rewards), np.asarray(rollout.mask)))
    values, advantages, rewards, mask = map(np.concatenate, zip(*parts, strict=True))
    return profile(values, advantages, rewards, mask)


# ============================================================================ runs


def argument_of(line: str) -> str:
    """The argument of the config for a line, `vapo-nll-pretraining`."""
    algorithm, *parts = line.split('-')
    return f'algorithm={algorithm}' + (f',without={"+".join(parts)}' if parts else '')


def words(line: str) -> str:
    """A line in words."""
    algorithm, *parts = line.split('-')
    name = {'vapo': 'VAPO', 'vc_ppo': 'VC-PPO'}[algorithm]
    return name + ''.join(f', no {part.replace("_", " ")}' for part in parts)


def complete(folder: pathlib.Path) -> bool:
    """Whether a run came to its end."""
    return (folder / RECORDS).is_file() and runs.read(folder).finished


def warm(setup: Any, root: pathlib.Path, records: pathlib.Path, stop: Any) -> tuple[Any, int]:
    """The warm start that all lines of a seed share: parameters and steps, made or found.

    Raises ValueError for one that was made by another config.
    """
    folder = root / f'warm_{setup.config.seed}'
    c = setup.config
    made_by = json.loads(json.dumps([c.task, c.model, c.warm_start], default=dataclasses.asdict))
    if (folder / 'steps.json').is_file():
        known = json.loads((folder / 'steps.json').read_text())
        if known['made_by'] != made_by:
            raise ValueError(f'{folder} was made by another config; name another --folder')
        return models.load(folder)[1], known['steps']
    params, steps = warm_lib.warm_start(setup, recipe.first_params(setup), records, stop)
    models.save(setup.model, params, folder)
    with whole(folder / 'steps.json') as path:
        path.write_text(json.dumps({'made_by': made_by, 'steps': steps}))
    return params, steps


def run(line: str, seed: int, root: pathlib.Path, steps: int, rounds: int) -> pathlib.Path:
    """One line of one seed, unless it is there; returns its folder."""
    folder = root / f'{line}_{seed}'
    if complete(folder):
        return folder
    config = config_lib.get_config(argument_of(line)).to_dict()
    config.update(seed=seed, steps=steps, checkpoint=dict(every=0))
    job = train.start(config, folder)
    setup, stop = job.setup, stopping.Stop()
    with job.lock, contextlib.closing(setup.judge):
        loop = loop_lib.make_loop(setup, folder, None, stop)
        params, warm_steps = warm(setup, root, loop.records, stop)
        before = reinforce.record_accuracy(setup, params, loop, 0)
        point = loop_lib.new_point(setup, loop, params, before, warm_steps)
        critic = setup.config.critic
        assert critic is not None
        if critic.pretrain is not None:
            answers = drawn(setup, loop, point.state, rounds)
            found = {'before': look(setup, loop, point.state, answers)}
            state = reinforce.pretrain_values(setup, loop, point.state, point.reference)
            found['after'] = look(setup, loop, state, answers)
            with whole(folder / PROFILE) as path:
                path.write_text(json.dumps(found))
            point = point._replace(state=state)
            done = dataclasses.replace(critic, pretrain=None)  # RL steps would begin with it
            setup = setup._replace(config=dataclasses.replace(setup.config, critic=done))
        params = reinforce.reinforce(setup, loop, point)
        after = reinforce.record_accuracy(setup, params, loop, steps)
        values = {'before': before.value, 'after': after.value, 'warm_steps': warm_steps}
        metrics.append(folder / RECORDS, 'result', steps, values)
    report.write(folder)
    return folder


# ============================================================================ figure


def numbers(found: Sequence[runs.Run]) -> dict[str, Any]:
    """What a line came to, a value for each seed."""

    def ends(index: int) -> list[list[float]]:
        names = ('held_out', 'low', 'high')
        return [[run.series(n, 'evaluation').values[index] for n in names] for run in found]

    def rounded(x: Any) -> Any:
        return [rounded(v) for v in x] if isinstance(x, list | tuple) else round(float(x), 4)

    accuracy = [run.series('accuracy').values for run in found]
    explained = [run.series('value/explained_variance').values for run in found]
    out = {
        'held_out_before': ends(0),
        'held_out_after': ends(-1),
        'sampled_mean': [x.mean() for x in accuracy],
        'sampled_end': [x[-TAIL:].mean() for x in accuracy],
        'explained_first_step': [x[0] for x in explained],
        'explained_end': [x[-TAIL:].mean() for x in explained],
        'length_end': [run.series('length').values[-TAIL:].mean() for run in found],
    }
    settled = [run.series('value/settled', 'value_pretraining') for run in found]
    if all(settled):
        out['pretraining_steps'] = [s.steps[-1] for s in settled]
        out['pretraining_settled'] = [s.values[-1] for s in settled]
    return {name: rounded(x) for name, x in out.items()}


def profile_of(folders: Sequence[pathlib.Path]) -> dict[str, Any]:
    """What `look` found before and after pretraining; of several seeds, all of them in a list."""
    found = [json.loads((folder / PROFILE).read_text()) for folder in folders]
    return {when: [x[when] for x in found] for when in ('before', 'after')}


def draw(
    path: pathlib.Path, looks: Mapping[str, Any], found: Mapping[str, Sequence[runs.Run]]
) -> None:
    """Values and advantages by position, explained variance by position, accuracy by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.4), layout='constrained')
    axes = figure.subplots(2, 3)
    at = (np.arange(BINS) + 0.5) / BINS
    for column, when in enumerate(('before', 'after')):
        for row, name in enumerate(('value', 'advantage')):
            axis = axes[row, column]
            for side, colour in SIDES.items():
                parts = [np.array([x[name][side][k] for x in looks[when]], float) for k in KEYS]
                mean, half = parts[0].mean(axis=0), np.sqrt((parts[1] ** 2).sum(axis=0))
                half = half / len(parts[1])
                axis.plot(at, mean, color=colour, label=f'{side} answers')
                axis.fill_between(at, mean - half, mean + half, color=colour, alpha=0.2, lw=0)
            axis.axhline(0, color='0.6', lw=0.8, zorder=0)
            axis.set_title(f'mean {name} {when} pretraining', fontsize=10)
    for before, after, _ in axes:
        ends = (*before.get_ylim(), *after.get_ylim())
        for axis in (before, after):
            axis.set_ylim(min(ends), max(ends))
    axes[0, 0].legend(frameon=False, fontsize=8)
    for when, style in (('before', ':'), ('after', '-')):
        explained = np.array([x['explained'] for x in looks[when]])
        axes[0, 2].plot(at, explained.mean(axis=0), style, color=COLOURS[2], label=when)
    axes[0, 2].axhline(0, color='0.6', lw=0.8, zorder=0)
    axes[0, 2].set_title('explained variance', fontsize=10)
    for (line, its), colour in zip(found.items(), COLOURS, strict=False):
        series = [run.series('accuracy') for run in its]
        values = [runs.smooth(s.values, 5) for s in series]
        axes[1, 2].plot(series[0].steps, np.mean(values, axis=0), color=colour, label=words(line))
    axes[1, 2].set_title('sampled accuracy (means of 5 steps)', fontsize=10)
    for axis in axes[:, 2]:
        axis.legend(frameon=False, fontsize=8)
    for axis in (*axes[1, :2], axes[0, 2]):
        axis.set_xlabel('position in the answer')
    axes[1, 2].set_xlabel('RL step')
    for axis in axes.flat:
        axis.grid(alpha=0.25, lw=0.5)
        axis.spines[['top', 'right']].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


KEYS = ('mean', 'half')


def main(argv: list[str]) -> None:
    """Entry point."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    for line in LINES.value:
        config_lib.get_config(argument_of(line))  # for its errors
    pretrained = [line for line in LINES.value if 'pretraining' not in line.split('-')]
    if not pretrained:
        raise app.UsageError('no line of --lines has value pretraining, which the figure shows')
    root, output = pathlib.Path(FOLDER.value).resolve(), pathlib.Path(OUTPUT.value)
    folders: dict[str, list[pathlib.Path]] = {line: [] for line in LINES.value}
    for seed in range(SEEDS.value):
        for line in LINES.value:
            folder = run(line, seed, root, STEPS.value, ROUNDS.value)
            folders[line].append(folder)
            print(line, seed, numbers([runs.read(folder)]), flush=True)
    found = {line: [runs.read(folder) for folder in its] for line, its in folders.items()}
    looks = profile_of(folders[pretrained[0]])
    draw(output, looks, found)
    table = {'critic': looks, 'lines': {line: numbers(its) for line, its in found.items()}}
    output.with_suffix('.json').write_text(json.dumps(table, indent=1) + '\n')


if __name__ == '__main__':
    app.run(main)
