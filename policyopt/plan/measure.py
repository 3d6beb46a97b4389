"""One program compiled for a topology, and what the compiler says of it, as JSON."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from policyopt import sharding
from policyopt.plan import costs as costs_lib
from policyopt.plan import hlo, roofline
from policyopt.plan.hardware import GIB, Chip
from policyopt.plan.steps import Program

Record = dict[str, Any]
REFUSALS = {
    'total': r'Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm',
    'temporary': r'temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM',
}
STATS = ('argument', 'output', 'alias', 'temp', 'generated_code')


class Made(NamedTuple):
    """A compiled program, and what else its counts are made from; JSON values alone.

    Attributes:
      text: as `compile_text` gives it.
      stats: bytes, of the compiler's `memory_analysis`: STATS.
      mesh: axis -> size, in order.
      tokens, loops, held, filled: see `steps.Program`.
    """

    text: str
    stats: dict[str, int]
    mesh: dict[str, int]
    tokens: int
    loops: dict[str, int]
    held: dict[str, float]
    filled: dict[str, float]


def make(program: Program, mesh: Any, lowered: Any = None) -> Made:
    """Compile a program. Raises what lowering and compiling raise."""
    compiled, text = compile_text(program.lower() if lowered is None else lowered)
    analysis = compiled.memory_analysis()
    stats = {name: int(getattr(analysis, f'{name}_size_in_bytes')) for name in STATS}
    return Made(text, stats, dict(mesh.shape), **inputs_of(program))


def inputs_of(program: Program) -> dict[str, Any]:
    """What `Made` has of a program that was not compiled."""
    return {
        'tokens': program.tokens,
        'loops': dict(program.loops),
        'held': dict(program.held),
        'filled': dict(program.filled),
    }


def too_large(program: Program, chip: Chip) -> Record:
    """The record of a program whose arguments alone are more than the memory."""
    total = sum(program.held.values())
    return {
        'memory': dict(program.held) | {'total': total, 'hbm': chip.hbm},
        'fits': False,
        'error': 'not compiled: its arguments alone are more than the memory of a device',
        'tokens': program.tokens,
    }


def refused(program: Program, error: Exception, chip: Chip) -> Record:
    """The record of a program that the compiler finds no memory for: it says what it would need.

    Raises `error` where that is another one.
    """
    needed = out_of_memory(str(error))
    if needed is None:
        raise error
    if 'temporary' in needed:
        needed['total'] = needed['temporary'] + sum(program.held.values())
    return {
        'memory': dict(program.held) | needed | {'hbm': chip.hbm},
        'fits': False,
        'error': first_lines(str(error)),
        'tokens': program.tokens,
    }


def compile_text(lowered: Any) -> tuple[Any, str]:
    """A compiled program and its text, as the TPU compiler writes it down itself.

    What `Compiled.as_text()` gives went through jax, which fails where the compiler is newer.
    """
    folder = tempfile.TemporaryDirectory(prefix='policyopt-plan-')
    with folder as name, warnings.catch_warnings(), _own_flags():
        # A cache of compiled programs keeps these, and can't give them back without a TPU.
        warnings.filterwarnings('ignore', 'Error (reading|writing) persistent compilation')
        dump = {'xla_dump_to': name, 'xla_dump_hlo_as_text': True}
        compiled = lowered.compile(compiler_options=dump | options_for(lowered.as_text()))
        texts = pathlib.Path(name).glob('*.after_codegen.txt')
        found = sorted(texts, key=lambda path: path.stat().st_size)
        return compiled, found[-1].read_text() if found else compiled.as_text()


def options_for(text: str) -> dict[str, str]:
    """Of sharding.TPU_OPTIONS, those that make a difference to a lowered program."""
    return sharding.TPU_OPTIONS if 'ragged_dot' in text else {}


@contextlib.contextmanager
def _own_flags() -> Iterator[None]:
    """Without XLA_FLAGS: they are for this machine, and libtpu ends the process at unknown ones."""
    given = os.environ.pop('XLA_FLAGS', None)
    try:
        yield
    finally:
        if given is not None:
            os.environ['XLA_FLAGS'] = given


def describe(made: Made, chip: Chip) -> Record:
    """Memory, counts and times of a compiled program, as JSON values."""
    module = hlo.parse(made.text)
    mesh = list(made.mesh.items())
    costs = costs_lib.count(module, mesh, made.loops, filled=made.filled)
    found = roofline.times(costs, chip)
    memory = memory_of(made, hlo.saved(module), chip)
    return {
        'tokens': made.tokens,
        'memory': memory,
        'fits': memory['total'] <= chip.hbm,
        'flops': costs.flops + costs.kernel_flops,
        'bytes': costs.bytes + costs.kernel_bytes,
        'cycles': costs.cycles,
        'collectives': roofline.by_kind(costs.collectives),
        'kernels': costs.kernels,
        'silent': costs.silent,
        'unknown': costs.unknown,
        'host': costs.host,
        'seconds': found._asdict() | {'roofline': found.roofline, 'expected': found.expected},
        'bound': found.bound,
        'tokens_per_second': made.tokens / found.expected if found.expected else 0.0,
    }


def memory_of(made: Made, saved: float, chip: Chip) -> dict[str, float]:
    """Bytes on one device at the program's peak, by what they are.

    temporary: everything that is not an argument; of it, `activations` are what loops over layers
    keep for the backward pass.
    """
    stats = made.stats
    temporary = stats['temp'] + stats['generated_code']
    beside = max(stats['output'] - stats['alias'], 0)
    return dict(made.held) | {
        'activations': min(saved, float(temporary)),
        'temporary': float(temporary),
        'outputs': float(beside),
        'total': float(stats['argument'] + beside + temporary),
        'hbm': chip.hbm,
    }


def out_of_memory(text: str) -> dict[str, float] | None:
    """Bytes that a program would need, from the compiler's refusal; None for other errors.

    It says what all of it takes (`total`) or what comes to its arguments (`temporary`).
    """
    if 'RESOURCE_EXHAUSTED' not in text and 'Ran out of memory' not in text:
        return None
    scale = {'': 1.0, 'K': 2.0**10, 'M': 2.0**20, 'G': GIB, 'T': 2.0**40}
    for name, pattern in REFUSALS.items():
        if found := re.search(pattern, text):
            return {name: float(found[1]) * scale[found[2]]}
    return {'total': float('inf')}


def first_lines(text: str, lines: int = 3) -> str:
    """The beginning of a long message."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    return ' '.join(kept[:lines])[:500]
