"""Draw how a policy learns the errors of its reward model: model, truth and gap, against KL.

    python -m experiments.over_optimisation --folder=runs/over_optimisation --output=docs/figures

One warm start and one reward model (`configs/rlhf.py`), from which PPO-clip, PPO-penalty and TRPO
learn, PPO-clip also without a KL to the reference. Runs that are complete are not run again. Prints
a table, and writes `over_optimisation.png` and `over_optimisation.json`.

Reward model and truth are drawn in standard deviations about their means over answers of the policy
that all start from, to problems that the reward model was not trained on: both start at 0, and
their difference is the gap (2210.10760).
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from policyopt import export, metrics, runs, train
from policyopt.rewards.scored import read_calibration

_FOLDER = flags.DEFINE_string('folder', 'runs/over_optimisation', 'Folder for the runs.')
_OUTPUT = flags.DEFINE_string('output', 'docs/figures', 'Folder for the figure and its numbers.')
_STEPS = flags.DEFINE_integer('steps', 150, 'RL steps of each run; of TRPO a third.', lower_bound=2)
_BETA = flags.DEFINE_float('beta', 0.05, 'KL to the reference, nats to reward.', lower_bound=0)

SHOWN = 20  # steps that the numbers at the start and at the end are means of
STYLES = ('-', '--', '-.', ':')


def lines(beta: float) -> dict[str, str]:
    """Label -> argument of the config; the first run makes what all of them start from."""
    return {
        f'PPO-clip, beta {beta:g}': f'algorithm=ppo_clip,beta={beta}',
        'PPO-clip, beta 0': 'algorithm=ppo_clip,beta=0',
        f'PPO-penalty, beta {beta:g}': f'algorithm=ppo_penalty,beta={beta}',
        f'TRPO, beta {beta:g}': f'algorithm=trpo,beta={beta}',
    }


def config_of(argument: str, root: Path, steps: int) -> dict[str, Any]:
    """The config of a run; of another than the first, one that starts where the first did."""
    spec: Any = importlib.util.spec_from_file_location('rlhf', 'configs/rlhf.py')
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    c = module.get_config(argument).to_dict()
    c['steps'] = steps
    c['checkpoint'] = dict(every=steps, keep=9)
    if (root / 'policy').is_dir():
        c['model'] = dict(path=str(root / 'policy'))
        c['warm_start'] = c['preferences'] = None
        reward = {**c['reward_kw']['reward'], 'path': str(root / 'run0' / 'reward_model')}
        c['reward_kw'] = {**c['reward_kw'], 'reward': reward}
    return c


def run_all(root: Path, beta: float, steps: int) -> dict[str, Path]:
    """Run what is not complete; label -> folder of its run."""
    found = {}
    for number, (label, argument) in enumerate(lines(beta).items()):
        folder = root / f'run{number}'
        found[label] = folder
        # A natural step goes further than the four of PPO, and takes longer.
        own = steps // 3 if 'trpo' in argument else steps
        records = folder / train.RECORDS
        done = records.is_file() and metrics.read(records)[-1]['stage'] == 'result'
        if not done:
            train.run(train.start(config_of(argument, root, own), folder), folder)
        if not (root / 'policy').is_dir():
            export.export(folder, root / 'policy', step=0)
    return found


def series_of(folder: Path, root: Path) -> dict[str, np.ndarray]:
    """Of each RL step: step, KL to the reference (nats a token), proxy, truth and gap."""
    known = read_calibration(root / 'run0' / 'reward_model')
    assert known is not None and known.slope is not None and known.intercept is not None
    run = runs.read(folder)
    mean = known.intercept + known.slope * known.mean
    proxy = run.series('rewards/proxy')
    truth = (run.series('rewards/truth').values - mean) / math.sqrt(mean * (1 - mean))
    found = {
        'step': proxy.steps,
        'kl': run.series('kl_reference/k1').values,
        'proxy': proxy.values,
        'truth': truth,
        'right': run.series('rewards/truth').values,
    }
    if len(found['kl']) != len(proxy.steps):  # without a reference there is none to be far from
        del found['kl']
    return {**found, 'gap': found['proxy'] - found['truth']}


def numbers(found: dict[str, np.ndarray]) -> dict[str, float]:
    """What a run began and ended with, and where the truth was highest."""
    smooth = {n: runs.smooth(x, SHOWN + 1) for n, x in found.items()}
    best = int(np.argmax(smooth['right']))
    out = {'best_right': smooth['right'][best], 'best_step': found['step'][best]}
    for name in ('proxy', 'truth', 'right', 'gap', 'kl'):
        if name in found:
            out[f'{name}_first'] = found[name][:SHOWN].mean()
            out[f'{name}_last'] = found[name][-SHOWN:].mean()
    return {name: round(float(value), 4) for name, value in sorted(out.items())}


def draw(found: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """The figure: proxy and truth by step, their gap by step, and both by KL."""
    import matplotlib

    matplotlib.use('agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    colours = plt.rcParams['axes.prop_cycle'].by_key()['color']
    for (label, x), colour in zip(found.items(), colours, strict=False):
        s = {name: runs.smooth(values, SHOWN // 2 + 1) for name, values in x.items()}
        axes[0].plot(x['step'], s['proxy'], color=colour, label=label)
        axes[0].plot(x['step'], s['truth'], ':', color=colour)
        axes[1].plot(x['step'], s['gap'], color=colour)
        if 'kl' in s:
            axes[2].plot(s['kl'], s['proxy'], color=colour)
            axes[2].plot(s['kl'], s['truth'], ':', color=colour)
    titles = ('reward model (solid) and truth (dotted)', 'gap', 'both, by distance')
    labels = ('RL step', 'RL step', 'KL to the reference, nats a token')
    for axis, title, label in zip(axes, titles, labels, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
        axis.axhline(0, color='0.85', zorder=0)
        axis.spines[['top', 'right']].set_visible(False)
    axes[0].set_ylabel('standard deviations')
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc='outside lower center', ncols=4, frameon=False, fontsize=9)
    figure.set_layout_engine('constrained')
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    """Entry point."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    root, output = Path(_FOLDER.value).resolve(), Path(_OUTPUT.value)
    folders = run_all(root, _BETA.value, _STEPS.value)
    found = {label: series_of(folder, root) for label, folder in folders.items()}
    table = {label: numbers(x) for label, x in found.items()}
    known = json.loads((root / 'run0' / 'reward_model' / 'preferences.json').read_text())[-1]
    output.mkdir(parents=True, exist_ok=True)
    content = {'reward_model': known, 'runs': table}
    (output / 'over_optimisation.json').write_text(json.dumps(content, indent=2) + '\n')
    draw(found, output / 'over_optimisation.png')
    for label, row in table.items():
        print(label, *(f'{name} {value:.3f}' for name, value in row.items()), sep='  ')


if __name__ == '__main__':
    app.run(main)
