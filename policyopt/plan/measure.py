"""One program compiled for a topology, and what the compiler says of it, as JSON."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

from policyopt.plan import costs as costs_lib
from policyopt.plan import hlo, roofline
from policyopt.plan.hardware import GIB, Chip
from policyopt.plan.steps import Program

Record = dict[str, Any]


def measure(program: Program, chip: Chip, mesh: Any) -> Record:
    """Lower and compile a program, and count what it costs a device.

    Returns a record of JSON values; where it does not fit into memory, `error` says what the
    compiler said, and `memory` what it would need.

    Raises what lowering or compiling raises for other reasons.
    """
    began = time.monotonic()
    lowered = program.lower()
    try:
        compiled, text = compile_text(lowered)
    except Exception as error:  # of jax's runtime, whose class is not public
        needed = out_of_memory(str(error))
        if needed is None:
            raise
        memory = dict(program.held) | {'total': needed, 'hbm': chip.hbm}
        return {
            'memory': memory,
            'fits': False,
            'error': first_lines(str(error)),
            'tokens': program.tokens,
            'compile_seconds': time.monotonic() - began,
        }
    record = describe(text, compiled.memory_analysis(), program, chip, mesh)
    return record | {'compile_seconds': time.monotonic() - began}


def compile_text(lowered: Any) -> tuple[Any, str]:
    """A compiled program and its text, as the TPU compiler writes it down itself.

    What `Compiled.as_text()` gives went through jax, which fails where the compiler is newer.
    """
    folder = tempfile.TemporaryDirectory(prefix='policyopt-plan-')
    with folder as name, warnings.catch_warnings(), _own_flags():
        # A cache of compiled programs keeps these, and can't give them back without a TPU.
        warnings.filterwarnings('ignore', 'Error (reading|writing) persistent compilation')
        compiled = lowered.compile(
            compiler_options={'xla_dump_to': name, 'xla_dump_hlo_as_text': True}
        )
        texts = pathlib.Path(name).glob('*.after_codegen.txt')
        found = sorted(texts, key=lambda path: path.stat().st_size)
        return compiled, found[-1].read_text() if found else compiled.as_text()


@contextlib.contextmanager
def _own_flags() -> Iterator[None]:
    """Without XLA_FLAGS: they are for this machine, and libtpu ends the process at unknown ones."""
    given = os.environ.pop('XLA_FLAGS', None)
    try:
        yield
    finally:
        if given is not None:
            os.environ['XLA_FLAGS'] = given


def describe(text: str, stats: Any, program: Program, chip: Chip, mesh: Any) -> Record:
    """The record of a compiled program, from its text and `memory_analysis()`."""
    module = hlo.parse(text)
    costs = costs_lib.count(module, list(mesh.shape.items()), program.loops)
    found = roofline.times(costs, chip)
    memory = memory_of(stats, program, hlo.saved(module), chip)
    return {
        'tokens': program.tokens,
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
        'tokens_per_second': program.tokens / found.expected if found.expected else 0.0,
    }


def memory_of(stats: Any, program: Program, saved: float, chip: Chip) -> dict[str, float]:
    """Bytes on one device at the program's peak, by what they are.

    temporary: everything that is not an argument; of it, `activations` are what loops over layers
    keep for the backward pass.
    """
    temporary = stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    beside = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    total = stats.argument_size_in_bytes + beside + temporary
    return dict(program.held) | {
        'activations': min(saved, float(temporary)),
        'temporary': float(temporary),
        'outputs': float(beside),
        'total': float(total),
        'hbm': chip.hbm,
    }


def out_of_memory(text: str) -> float | None:
    """Bytes that a program would need, from the compiler's refusal; None for other errors."""
    if 'RESOURCE_EXHAUSTED' not in text and 'Ran out of memory' not in text:
        return None
    found = re.search(r'Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm', text)
    if not found:
        return float('inf')
    scale = {'': 1.0, 'K': 2.0**10, 'M': 2.0**20, 'G': GIB, 'T': 2.0**40}
    return float(found[1]) * scale[found[2]]


def first_lines(text: str, lines: int = 3) -> str:
    """The beginning of a long message."""
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    return ' '.join(kept[:lines])[:500]
