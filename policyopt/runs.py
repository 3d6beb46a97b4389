"""What a run left in its folder, finished or not, as series of numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policyopt import checks
from policyopt.workdir import RECORDS, SAMPLES, SETTINGS, TIMINGS

# Names in words where they are no words already.
ALGORITHMS = {
    'reinforce_pp': 'REINFORCE++',
    'ppo_clip': 'PPO',
    'ppo_penalty': 'PPO with a KL penalty',
    'dr_grpo': 'Dr. GRPO',
    'gspo_token': 'GSPO-token',
    'gspo_turn': 'GSPO by turns',
    'gspo_step': 'GSPO by steps',
    'magistral': 'Magistral',
    'vc_ppo': 'VC-PPO',
    'deepseek_v32': 'DeepSeek-V3.2',
    'minirl': 'MiniRL',
}
TIMES = ('sample', 'reward', 'score', 'update')  # parts of a step, as `reinforce` measures them


class Series(NamedTuple):
    """Values [n] at steps [n], float64; what a run lacks is left out."""

    steps: np.ndarray
    values: np.ndarray

    def __bool__(self) -> bool:
        return len(self.steps) > 0


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its folder has it.

    Attributes:
      name: of the folder; with those around it where several runs are called the same.
      folder: where it is.
      config: as run, {} where it is missing.
      records: of `metrics.jsonl`, in order.
      timings: of `timings.jsonl`, in order; steps that a resumed run did again are there twice.
      samples: of `samples.jsonl`.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    timings: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]

    @property
    def title(self) -> str:
        """Algorithm and problems in words: `GSPO on basic arithmetic`."""
        algorithm = str(self.config.get('algorithm', '')).rpartition('.')[2]
        if not algorithm:
            return self.name
        words = ALGORITHMS.get(algorithm)
        if words is None:
            short = len(algorithm) < 6 or algorithm == 'reinforce'
            words = algorithm.upper() if short else algorithm.replace('_', ' ')
        tasks = self.config.get('tasks') or {'': self.config.get('task') or {}}
        names = [name or _task(task) for name, task in tasks.items()]
        return f'{words} on {" and ".join(names).replace("_", " ")}' if all(names) else words

    @property
    def steps(self) -> int:
        """RL steps done."""
        return max((r['step'] for r in self.records if r['stage'] == 'rl'), default=0)

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return bool(self.records) and self.records[-1]['stage'] == 'result'

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """A record of each process that worked on the run."""
        return [r for r in self.timings if r['stage'] == 'start']

    def names(self, stage: str = 'rl') -> list[str]:
        """Metrics of a stage."""
        found = {name for r in self.records if r['stage'] == stage for name in r}
        return sorted(found - {'stage', 'step'})

    def series(self, name: str, stage: str = 'rl') -> Series:
        """A metric over the steps of a stage; empty where the run has none."""
        return _series([r for r in self.records if r['stage'] == stage], name)

    def times(self, name: str) -> Series:
        """Of `timings.jsonl`, over RL steps; of a step done twice, the last time."""
        last = {r['step']: r for r in self.timings if r['stage'] == 'rl'}
        return _series([last[step] for step in sorted(last) if step <= self.steps], name)

    def group(self, prefix: str, stage: str = 'rl') -> dict[str, Series]:
        """Metrics PREFIX/NAME by NAME; numbers in their order."""
        names = [n[len(prefix) + 1 :] for n in self.names(stage) if n.startswith(f'{prefix}/')]
        names.sort(key=lambda n: (int(n), '') if n.isdigit() else (-1, n))
        return {n: self.series(f'{prefix}/{n}', stage) for n in names}


def _task(task: Mapping[str, Any]) -> str:
    if task.get('environment'):
        return task['environment'].rpartition('.')[2]
    return Path(task['file']).stem if task.get('file') else str(task.get('name', ''))


def _series(records: Sequence[Mapping[str, Any]], name: str) -> Series:
    points = [(r['step'], r[name]) for r in records if isinstance(r.get(name), int | float)]
    return Series(*np.array(points, float).reshape(-1, 2).T)


def read(folder: Path) -> Run:
    """The run in a folder.

    Raises ValueError, with the nearest name, for a folder that isn't there or holds no run, and for
    a line that is no record.
    """
    if not folder.is_dir():
        near = [p.name for p in folder.parent.glob('*') if p.is_dir()] if folder.parent else []
        raise ValueError(f'there is no folder {folder}.{checks.hint(folder.name, near)}')
    if not (folder / RECORDS).is_file():
        inside = sorted(p.parent.name for p in folder.glob(f'*/{RECORDS}'))
        more = f' Runs in it: {", ".join(inside)}.' if inside else ''
        raise ValueError(f'{folder} holds no run: it has no {RECORDS}.{more}')
    config: Any = {}
    if (folder / SETTINGS).is_file():
        config = json.loads((folder / SETTINGS).read_text(encoding='utf-8'))
    files = [_lines(folder / name) for name in (RECORDS, TIMINGS, SAMPLES)]
    return Run(folder.resolve().name, folder, config, *files)


def read_all(folders: Sequence[Path]) -> list[Run]:
    """The runs in some folders, with names that differ.

    Raises ValueError as `read` does, and for a folder given twice.
    """
    runs = [read(folder) for folder in folders]
    paths = [run.folder.resolve() for run in runs]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f'{path} is compared with itself; name each folder once')
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [
        dataclasses.replace(run, name='/'.join(path.parts[-depth:]))
        for run, path in zip(runs, paths, strict=True)
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file, without a last line that is still being written."""
    if not path.is_file():
        return []
    found = []
    lines = path.read_text(encoding='utf-8').split('\n')
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            found.append({**record, 'stage': record['stage'], 'step': record['step']})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path}, line {number}: no record of a run: {line[:60]!r}') from error
    return found


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the `width` values about each, of those there are at the ends; `width` is odd."""
    half = width // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def width_of(count: int) -> int:
    """Steps that the figures and tables take the mean of, where there are `count`: odd, 1 to 51."""
    return min(1 + 2 * (count // 50), 51)
