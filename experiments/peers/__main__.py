"""Run us and our peers side by side, and write docs/performance.md.

    make peers                                  # environments of the peers, then all cells
    python -m experiments.peers --list
    python -m experiments.peers update-8192 score-576-full --rounds=7
    python -m experiments.peers --table         # the page from what was measured before

Every side is a process in an environment of its own, on the same files and the same processors.
All sides of a cell are started first; then they run in turn, `--rounds` times, so that each ratio
compares neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from experiments.claim import save
from experiments.peers import page
from experiments.peers.cells import OURS, PEERS, Cell, Side, cells
from policyopt import checks

HERE = Path(__file__).parent
RESULTS = Path('docs/performance.json')


class SideError(RuntimeError):
    """A side ended without an answer."""


class Process:
    """A side that has been asked for a work, and answers with one run at a time."""

    def __init__(self, label: str, side: Side, folder: Path, environments: Path):
        environ = os.environ | {'JAX_PLATFORMS': 'cpu'}
        environ |= {'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false'}
        environ |= {'JAX_COMPILATION_CACHE_DIR': str(folder / 'cache' / label)}
        environ |= {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
        peer = side.script if side.script in PEERS else OURS
        command = [str(environments / peer / 'bin' / 'python')]
        if peer == OURS:
            command += ['-m', f'experiments.peers.{side.script}']
        else:
            command += [str(HERE / f'{peer}_side.py')]
        self.label, self.log = label, folder / f'{label.replace(" ", "_")}.log'
        with open(self.log, 'w') as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
            )
        asked = {'work': side.work, 'folder': str(folder), 'arguments': dict(side.arguments)}
        self.first = self.ask(json.dumps(asked))
        self.cold = self.first['seconds']

    def ask(self, line: str = '') -> dict[str, Any]:
        """One run."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(line + '\n')
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ''
        if not answer:
            self.process.wait()
            said = [x for x in self.log.read_text().splitlines() if 'Error' in x]
            raise SideError(f'{self.label} ended ({self.log}): {"".join(said[-1:])}')
        return json.loads(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(cell: Cell, folder: Path, environments: Path, rounds: int) -> dict[str, Any]:
    """Of each side: seconds to the first result, seconds of each round, memory, what it found.

    Each side starts twice: what it compiled the first time may lie in its persistent cache.
    """
    folder = folder / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cell.prepare(folder)
    running: dict[str, Process] = {}
    out: dict[str, Any] = {}
    try:
        for label, side in cell.sides.items():
            try:
                cold = Process(label, side, folder, environments)
                cold.close()
                running[label] = Process(label, side, folder, environments)
                running[label].cold = cold.first['seconds']
            except SideError as error:
                if label == OURS:
                    raise
                out[label] = {'failed': str(error)}
        answers = {label: [] for label in running}
        for _ in range(rounds):
            for label, process in running.items():
                answers[label].append(process.ask())
    finally:
        for process in running.values():
            process.close()
        for path in folder.rglob('*'):
            if path.suffix in ('.npz', '.safetensors'):
                path.unlink()
    for label, process in running.items():
        out[label] = {
            'first': round(process.cold, 2),
            'again': round(process.first['seconds'], 2),
            'seconds': [round(answer['seconds'], 5) for answer in answers[label]],
            'memory': round(answers[label][-1]['memory'], 1),
            # Without the first run, which compiles.
            'working': round(max(answer['working'] for answer in answers[label]), 1),
            'found': process.first['found'],
        }
    return out


def versions(environments: Path) -> dict[str, str]:
    """Of what was compared, as each environment says."""
    named = {
        OURS: ('jax', 'flax'),
        'trl': ('trl', 'transformers', 'torch'),
        'tunix': ('google-tunix', 'jax', 'flax'),
    }
    out = {}
    for peer, packages in named.items():
        ask = (
            f'import importlib.metadata as m, json; '
            f'print(json.dumps([m.version(n) for n in {packages!r}]))'
        )
        python = environments / peer / 'bin' / 'python'
        found = subprocess.run([python, '-c', ask], capture_output=True, text=True, check=True)
        pairs = zip(packages, json.loads(found.stdout), strict=True)
        out[peer] = ', '.join(f'{name} {version}' for name, version in pairs)
    return out


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m experiments.peers', description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('names', nargs='*', help='cells to measure; all by default')
    parser.add_argument('--list', action='store_true', help='show cells and stop')
    parser.add_argument('--table', action='store_true', help='write the page and stop')
    parser.add_argument('--rounds', type=int, default=5, help='runs of each side, in turn')
    parser.add_argument('--folder', type=Path, default=Path('runs/peers'), help='for inputs, logs')
    parser.add_argument(
        '--environments', type=Path, default=Path('runs/peers/environments'), help='of all sides'
    )
    parser.add_argument('--fast', action='store_true', help='sizes of a test; docs stay')
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error(f'--rounds is {given.rounds}; legal is 1 or more')
    known = list(cells(given.fast))
    for name in given.names:
        if name not in known:
            parser.error(f'{name!r} is no cell.{checks.nearest(name, known)}')
    wanted = (OURS, *PEERS)
    missing = [p for p in wanted if not (given.environments / p / 'bin' / 'python').exists()]
    if missing and not (given.list or given.table):
        parser.error(
            f'no environment of {", ".join(missing)} in {given.environments}: `make peers`'
        )
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = arguments(argv)
    known, console = cells(given.fast), Console()
    if given.list:
        for cell in known.values():
            console.print(f'{cell.name:24} {cell.what}', soft_wrap=True)
        return
    held = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {'cells': {}}
    chosen = [] if given.table else given.names or list(known)
    with Progress(console=console) as progress:
        for name in progress.track(chosen, description='cells'):
            found = measure(known[name], given.folder, given.environments, given.rounds)
            progress.console.print('\n'.join(page.lines(known[name], found)))
            if not given.fast:
                held['cells'][name] = found
                held['versions'] = versions(given.environments)
                held['processors'] = os.cpu_count()
                save(RESULTS, held)
    if not given.fast:
        RESULTS.with_suffix('.md').write_text(page.page(held))
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 0.4 * len(held['cells']) + 1.5), layout='constrained')
        page.draw(figure, held['cells'])
        figure.savefig(RESULTS.with_suffix('.png'), dpi=100)


if __name__ == '__main__':
    main()
