"""docs/performance.md from what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.claim import COLOURS, tidy
from experiments.peers.cells import OURS, PEERS, Cell, cells

HEAD = """# Beside other libraries

The same work by policyopt, [TRL](https://github.com/huggingface/trl) (transformers, PyTorch) and
[tunix](https://github.com/google/tunix) (jax), on the same weights and the same rows, in one run.
Written by `python -m experiments.peers`, which `make peers` sets up and runs.

Every side is a process of its own in an environment of its own, ours and tunix's with the same
jax; sides of a cell run in turn, so that a ratio compares neighbours in time. A ratio above 1 means
that we are faster: the median over rounds, and the least and the largest. Memory is what a process
takes at most beyond what importing its libraries takes: weights, loading them, and compiled
programs from a cache included. An aim behind it is for theirs over ours; where weights and
gradients are most of it, which nobody can do without, for *temporaries*: what the process has at
most in a later run beyond what was loaded and the gradients that the run returns. *First* is
seconds from reading the weights to the first result, compiling included: in a first process, and
in a second that finds the first one's compiled programs in jax's persistent cache. Everything is
float32.

![Time over ours, by cell and side](performance.png)

*Time over ours: median and range over the rounds; a bar across is what was aimed at.*

On TPU nothing is slower for it by the compiler's estimates: of the thirty programs of
[scale.md](scale.md) 27 are the same as before, and the three of prefill take 1 to 8 % less.
"""

CISPO = (
    'Values of CISPO differ where gradients agree: both stand for a gradient and are no objective. '
    'With the weight held fixed, ours is weight x A x log-ratio, which is 0 at the first update, '
    "and TRL's weight x A x log-prob."
)

TOLERANCE = 1e-4  # of results, relative, in float32
NOISE = 16.0  # MiB, of a difference of resident sets: less counts as this


def ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> np.ndarray:
    """Their time over ours, round by round."""
    return np.array(theirs['seconds']) / np.array(ours['seconds'])


def speed(found: Mapping[str, Any]) -> str:
    """Seconds of a run, and tokens a second where the work is to draw them."""
    seconds = float(np.median(found['seconds']))
    if tokens := found['found'].get('tokens'):
        return f'{tokens / seconds:,.0f} tokens/s'
    if operations := found['found'].get('operations'):
        return f'{seconds:.3g} s, {operations / seconds / 1e9:.0f} GFLOP/s'
    return f'{seconds:.3g} s'


def aimed(aim: float | None, value: float) -> str:
    """The aim, and whether it was met."""
    if not aim:
        return ''
    return f'{aim:.2g} {"met" if value >= aim else "**missed**"}'


def rows(cell: Cell, found: Mapping[str, Any]) -> list[list[str]]:
    """A row of the table for each side."""
    ours, out = found[OURS], []
    for label, held in found.items():
        name = PEERS.get(label, label)
        if 'failed' in held:
            out.append([name, held['failed'], '', '', '', ''])
            continue
        middle, spread = '', ''
        if label != OURS:
            times = ratio(ours, held)
            middle = f'{np.median(times):.2f} ({times.min():.2f}-{times.max():.2f})'
            spread = aimed(cell.sides[label].aim, float(np.median(times)))
        first = f'{held["first"]:.1f} / {held["again"]:.1f} s'
        out.append([name, speed(held), middle, spread, memory(cell, label, found), first])
    return out


def memory(cell: Cell, label: str, found: Mapping[str, Any]) -> str:
    """MiB of a side, over ours, and the aim: for temporaries where the cell has them."""
    held, ours, out, over = found[label], found[OURS], [], 0.0
    measures = {'': lambda x: x['memory']}
    if cell.returned is not None:
        measures['temporaries '] = lambda x: max(x['working'] - cell.returned, NOISE)
    for name, of in measures.items():
        over = of(held) / of(ours)
        out.append(f'{name}{of(held):,.0f} MiB')
        if label != OURS:
            out[-1] += f', {over:.1f} times ours'
    aim = cell.sides[label].memory
    return '; '.join([*out, aimed(aim, over)] if aim else out)


def correctness(found: Mapping[str, Any]) -> list[str]:
    """The table of losses and gradients."""
    ours = found[OURS]['found']
    out = [
        '| loss | ours | side | theirs | largest gap of the gradient, over its largest entry |',
        '| --- | --- | --- | --- | --- |',
    ]
    for label in PEERS:
        for name, held in found.get(label, {}).get('found', {}).items():
            out.append(
                f'| `{name}` | {ours[name]:.7f} | {PEERS[label]} | {held["loss"]:.7f} '
                f'| {held["gap"]:.1e} |'
            )
    return out + ['', CISPO]


def lines(cell: Cell, found: Mapping[str, Any]) -> list[str]:
    """A cell as Markdown."""
    out = [f'### {cell.name}', '', f'{cell.what[0].upper()}{cell.what[1:]}.', '']
    if cell.name == 'correctness':
        return out + correctness(found)
    out += ['| side | a run | their time over ours | aim | memory | first |']
    out += ['| --- | --- | --- | --- | --- | --- |']
    out += [f'| {" | ".join(row)} |' for row in rows(cell, found)]
    agree = gaps(found)
    if agree:
        word = 'agree to' if max(agree) <= TOLERANCE else '**differ by**'
        out += ['', f'Results {word} {max(agree):.0e}.']
    out += ['', ' '.join(cell.notes)] if cell.notes else []
    return out + [f'{PEERS.get(label, label)}: {why}.' for label, why in cell.absent.items()]


def gaps(found: Mapping[str, Any]) -> list[float]:
    """Relative differences of what peers found from what we did, of numbers that must agree."""
    ours = found[OURS]['found']
    out = []
    for label in found.keys() - {OURS, 'dense layer'}:
        theirs = found[label].get('found', {})
        for name in ('loss', 'sum', 'kept', 'norm'):
            if name in theirs and name in ours:
                out.append(abs(theirs[name] - ours[name]) / abs(ours[name]))
    return out


def draw(figure: Any, held: Mapping[str, Any]) -> None:
    """Their time over ours, by cell and side."""
    shown = [name for name in cells() if name in held and name != 'correctness']
    axis = figure.subplots()
    labels = dict.fromkeys(side for name in shown for side in held[name] if side != OURS)
    for colour, label in zip(itertools.cycle(COLOURS), labels):
        said = PEERS.get(label, label)
        for row, name in enumerate(shown):
            found = held[name].get(label, {})
            if 'seconds' in found:
                times, at = ratio(held[name][OURS], found), row + 0.12 * list(labels).index(label)
                axis.plot([times.min(), times.max()], [at, at], color=colour, lw=2)
                axis.plot(np.median(times), at, 'o', color=colour, ms=5, label=said)
                if aim := cells()[name].sides[label].aim:
                    axis.plot(aim, at, '|', color=colour, ms=9, mew=1.5)
                said = None
    axis.axvline(1, color='grey', lw=1, zorder=0)
    axis.set(xscale='log', xlabel='time over ours', yticks=range(len(shown)), yticklabels=shown)
    low, high = axis.get_xlim()
    axis.set_xticks([n for n in 2.0 ** np.arange(-4, 10) if low <= n <= high])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter('{x:g}')
    axis.invert_yaxis()
    figure.legend(loc='outside upper center', ncols=3, frameon=False, fontsize=8)
    tidy(axis)


def page(held: Mapping[str, Any]) -> str:
    """The page."""
    out = [HEAD]
    if 'versions' in held:
        named = '; '.join(f'{PEERS.get(k, k)}: {v}' for k, v in held['versions'].items())
        out += [f'{held["processors"]} processors. {named}.', '']
    for name, cell in cells().items():
        if name in held['cells']:
            out += [*lines(cell, held['cells'][name]), '']
    missing = [name for name in cells() if name not in held['cells']]
    if missing:
        out += [f'Not measured yet: {", ".join(f"`{name}`" for name in missing)}.', '']
    return '\n'.join(out).rstrip() + '\n'
