"""Records as text: one program in full, or many as a table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policyopt.plan import store, suggest

GIB = 2.0**30
WORDS = {
    'activations': 'of it, kept for the backward pass',
    'temporary': 'temporary, and the program',
    'optimizer': 'optimizer state',
    'cache': 'cache of keys and values',
}
ORDER = ('parameters', 'optimizer', 'cache', 'batch', 'outputs', 'temporary', 'activations')


def describe(step: str, record: Mapping[str, Any]) -> str:
    """One program, in lines."""
    lines = [f'{step}: {_verdict(record)}']
    memory = record['memory']
    for name in ORDER:
        if memory.get(name):
            lines.append(f'  {size(memory[name]):>10}  {WORDS.get(name, name)}')
    lines.append(f'  {size(memory["total"]):>10}  in all, of {size(memory["hbm"])}')
    if record.get('error'):
        return '\n'.join([*lines, f'  the compiler: {record["error"]}'])
    seconds = record['seconds']
    lines += [
        f'  {record["flops"]:.3g} flops, {record["bytes"]:.3g} bytes of HBM traffic, '
        f'{sum(row["bytes"] for row in record["collectives"]):.3g} bytes sent, by device and run',
        f'  at the peaks: compute {time(seconds["compute"])}, memory {time(seconds["memory"])}, '
        f'network {time(seconds["network"])}: bound by {record["bound"]}',
        f"  by the compiler's estimate {time(seconds['compiler'])}, kernels at the roofline "
        f'{time(seconds["kernels"])}, then the network: {time(seconds["expected"])}',
        f'  {record["tokens"]:,} tokens a run: {record["tokens_per_second"]:,.0f} tokens/s',
    ]
    for row in record['collectives'][:8]:
        axes = ' x '.join(row['axes']) or 'all devices'
        lines.append(f'  {size(row["bytes"]):>10}  {row["kind"]} over {axes}')
    for name, count in record['kernels'].items():
        silent = ', of unknown cost' if name in record['silent'] else ''
        lines.append(f'  kernel {name} x {count:g}{silent}')
    if step == 'decode' and record['bound'] == 'network':
        lines.append(
            '  parameters come from other devices, for each token unless rollout.engine.gather '
            'gathers them once a call; a wider tensor axis, or rules with embed=None, leave less '
            'to gather'
        )
    for name in record['unknown']:
        lines.append(f'  counted once, since nothing says how often it runs: {name}')
    for name in record['host']:
        lines.append(f'  exchanges data with the host: {name}')
    return '\n'.join(lines)


def _verdict(record: Mapping[str, Any]) -> str:
    return 'fits' if record['fits'] else 'DOES NOT FIT'


def size(value: float) -> str:
    """Bytes in a unit that people read."""
    if value == float('inf'):
        return 'too much'
    for unit, scale in (('GiB', 2.0**30), ('MiB', 2.0**20), ('KiB', 2.0**10)):
        if value >= scale:
            return f'{value / scale:.1f} {unit}'
    return f'{value:.0f} B'


def time(value: float) -> str:
    """Seconds in a unit that people read."""
    for unit, scale in (('s', 1.0), ('ms', 1e-3)):
        if value >= scale:
            return f'{value / scale:.2f} {unit}'
    return f'{value * 1e6:.1f} us'


COLUMNS = (
    'model', 'algorithm', 'tokens of a row', 'topology', 'mesh', 'program', 'rows', 'memory (GiB)',
    'fits', 'bound by', 'a run', 'tokens/s',
)  # fmt: skip


def remedy(record: Mapping[str, Any]) -> str:
    """What to change for a program that does not fit, as flags; '' where there is nothing."""
    if not record.get('suggestion'):
        return ''
    field, value, why = record['suggestion']
    return f'{"--" if field == suggest.SLICE else "--config."}{field}={value}: {why}'


NOTES = {
    '*': 'its modules, or versions of jax or the compiler, have changed since it was compiled',
    '+': 'other modules counted in it, and its compiled program is not here to count anew',
}


def mark_of(record: Mapping[str, Any]) -> str:
    """Marks of NOTES for what a record is not."""
    return ('' if store.fresh(record) else '*') + ('' if store.counted(record) else '+')


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as a table in Markdown, in their order; each has `label` beside its own fields.

    Rows of what is no longer so are marked, and the marks explained below.
    """
    rows = [COLUMNS, tuple('---' for _ in COLUMNS), *map(_row, records)]
    lines = ['| ' + ' | '.join(row) + ' |' for row in rows]
    marks = ''.join(map(mark_of, records))
    notes = [f'\\{mark} {text}.' for mark, text in NOTES.items() if mark in marks]
    return '\n'.join([*lines, *(['', *notes] if notes else [])]) + '\n'


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    label, memory = record['label'], record['memory']
    mesh = ' x '.join(f'{name} {n}' for name, n in label['mesh'].items() if n > 1) or 'one device'
    used = 'more' if memory['total'] == float('inf') else f'{memory["total"] / GIB:.1f}'
    measured = ('-', '-', '-')
    if not record.get('error'):
        rate = f'{record["tokens_per_second"]:,.0f}'
        measured = (record['bound'], time(record['seconds']['expected']), rate)
    return (
        label['model'] + ' '.join(['', *(f'\\{mark}' for mark in mark_of(record))]),
        label['algorithm'],
        f'{label["length"]:,}',
        label['topology'],
        mesh,
        label['step'],
        f'{label["rows"]:,}',
        f'{used} of {memory["hbm"] / GIB:.0f}',
        'yes' if record['fits'] else 'no',
        *measured,
    )
