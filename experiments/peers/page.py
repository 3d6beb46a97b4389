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
[tunix](https://github.com/google/tunix) (jax), on the same weights and the same rows. Written by
`python -m experiments.peers`, which `make peers` sets up and runs.

Every side is a process of its own in an environment of its own, ours and tunix's with the same jax,
which is newer than the one that `make setup` installs. Sides of a cell run in turn, round after
round, so that a ratio compares neighbours in time; cells may be of different days, and their
seconds don't compare. Everything is float32. V is the vocabulary, D the width; the models of
`correctness`, `update`, `generate` and `long-tail` have 4 layers, D 256, feed-forward layers of
768, 8 heads and 4 key heads of 32, that of `rl-step` 2 layers of D 128 and 512, mixture layers
D 256 and experts of 512 (8) or 128 (64).

- *A run*: the median over rounds.
- *Their time over ours*: the median of the rounds' ratios, and the least and the largest; it need
  not be the ratio of the medians. Above 1 we are faster. The *aim* is what we wanted it to be at
  least, set before anything was measured; where the range spans it, met or missed is noise.
- *Memory*: what a process takes at most beyond what importing its libraries takes: weights, loading
  them, and compiled programs from a cache included. Its aim is for theirs over ours. In scoring,
  weights and gradients are most of memory, and nobody can do without: there an aim that was first
  set for all of it is for *temporaries*, what the process has at most in a later run beyond what
  was loaded and the gradients that the run returns. Less than 16 MiB counts as 16, and what
  compiling left behind is counted too.
- *First*: seconds from reading the weights to the first result, compiling included: in a first
  process, and in a second that finds the first one's compiled programs in jax's persistent cache.
- *Results agree*: the relative difference of one number of each side's, the loss of an update, the
  sum of log-probs, the norm of a mixture's gradient. Drawn tokens are not compared.

![Time over ours, by cell and side](performance.png)

*Time over ours: median and range over the rounds; a bar across is what was aimed at.*

What was made faster for processors changes little on TPU: of the thirty programs of
[scale.md](scale.md), compiled before and after, 27 are the same, and the three of prefill take 1 to
8 % less by the compiler's estimate.
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
    for label, why in cell.absent.items():
        out += ['', f'{PEERS.get(label, label)}: {why}.']
    return out


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
    for row in range(1, len(shown)):
        axis.axhline(row - 0.5, color='gainsboro', lw=0.5, zorder=0)
    for colour, label in zip(itertools.cycle(COLOURS), labels):
        said = PEERS.get(label, label)
        for row, name in enumerate(shown):
            found, sides = held[name].get(label, {}), [x for x in held[name] if x != OURS]
            if 'seconds' in found:
                times = ratio(held[name][OURS], found)
                at = row + 0.18 * (sides.index(label) - (len(sides) - 1) / 2)
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


def summary(held: Mapping[str, Any]) -> str:
    """How many aims were met, and where others are ahead of us."""
    aims, ahead, smaller = [], [], {}
    for name, cell in cells().items():
        for label, side in cell.sides.items():
            theirs = held.get(name, {}).get(label, {})
            if side.aim and 'seconds' in theirs:
                middle = float(np.median(ratio(held[name][OURS], theirs)))
                aims.append(middle >= side.aim)
                if middle < min(side.aim, 1):
                    ahead.append(f'{PEERS.get(label, label)} in `{name}` ({middle:.2f})')
                if label in PEERS and theirs['memory'] < held[name][OURS]['memory']:
                    smaller.setdefault(PEERS[label], []).append(f'`{name}`')
    others = f' Faster than we are: {", ".join(ahead)}.' if ahead else ''
    for peer, names in smaller.items():
        others += f' {peer} takes less memory in {", ".join(names)}.'
    return f'Of {len(aims)} aims for time {sum(aims)} are met.{others}'


def page(held: Mapping[str, Any]) -> str:
    """The page."""
    out = [HEAD, summary(held['cells']), '']
    if 'versions' in held:
        named = '; '.join(f'{PEERS.get(k, k)}: {v}' for k, v in held['versions'].items())
        sides = [side for found in held['cells'].values() for side in found.values()]
        rounds = min(len(side['seconds']) for side in sides if 'seconds' in side)
        out += [f'{held["processors"]} processors, {rounds} rounds. {named}.', '']
    for name, cell in cells().items():
        if name in held['cells']:
            out += [*lines(cell, held['cells'][name]), '']
    missing = [name for name in cells() if name not in held['cells']]
    if missing:
        out += [f'Not measured yet: {", ".join(f"`{name}`" for name in missing)}.', '']
    return '\n'.join(out).rstrip() + '\n'
