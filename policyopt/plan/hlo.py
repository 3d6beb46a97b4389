"""Compiled programs as XLA prints them: computations, instructions, shapes, trip counts of loops.

The printed form is no stable interface; what is read here is what jax 0.10 and libtpu 0.0.5x print,
and what is not understood is left out rather than guessed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BITS = dict(
    pred=8, s2=2, u2=2, s4=4, u4=4, s8=8, u8=8, s16=16, u16=16, s32=32, u32=32, s64=64, u64=64,
    f16=16, bf16=16, f32=32, f64=64, c64=64, c128=128, f4e2m1fn=4, f8e4m3fn=8, f8e5m2=8,
    f8e8m0fnu=8, f8e4m3b11fnuz=8, f8e4m3fnuz=8, f8e5m2fnuz=8, f8e4m3=8, f8e3m4=8, token=0,
)  # fmt: skip
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?')
_NAME = re.compile(r'%([\w.\-]+)')
_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$')
_LINE = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = ')
_SPACE = re.compile(r'S\((\d+)\)')
NEVER = 2**53  # cycles; the compiler writes larger numbers where it has no estimate
CALLED = ('calls', 'to_apply', 'body', 'condition', 'branch_computations', 'called_computations')


class Shape(NamedTuple):
    """One array: element type, dimensions, and the memory it is in (0 is HBM)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return -(-self.size * BITS.get(self.dtype, 32) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name, opcode: as printed.
      shapes: of the result, one for each array of a tuple.
      operands: names.
      tail: everything behind the operands.
      root: whether it is the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    tail: str
    root: bool
    inside: str = ''

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Attribute -> names of the computations that it calls."""
        found = {}
        for key in CALLED:
            match = re.search(rf'\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)', self.tail)
            if match:
                text = match[1]
                names = _NAME.findall(text) or [t.strip() for t in text.strip('{}').split(',')]
                found[key] = tuple(name for name in names if name)
        return found

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from."""
        match = re.search(r'op_name="([^"]*)"', self.tail)
        return match[1] if match else ''

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def cycles(self) -> int:
        """The compiler's estimate of its time, in clock cycles; 0 where it made none."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.tail)
        found = int(match[1]) if match else 0
        return found if found < NEVER else 0


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in order of the text, by name."""

    name: str
    instructions: dict[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(i for i in self if i.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Number -> parameter."""
        return {int(i.inside): i for i in self if i.opcode == 'parameter'}

    def users(self, name: str) -> list[Instruction]:
        """Instructions that read one."""
        return [i for i in self if name in i.operands]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: name of the one that runs first.
    """

    computations: dict[str, Computation]
    entry: str

    def shapes_of(self, where: Computation, name: str) -> tuple[Shape, ...]:
        """Shapes of an operand."""
        found = where.instructions.get(name)
        return () if found is None else found.shapes


def parse(text: str) -> Module:
    """Read the text of a compiled program (`Compiled.as_text()`).

    Raises ValueError for a text without an entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name = '', ''
    lines: dict[str, Instruction] = {}
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name, lines = head[2], {}
            entry = name if head[1] else entry
        elif name and (line.rstrip() == '}' or line.startswith('}, execution_thread=')):
            computations[name] = Computation(name, lines)
            name = ''
        elif name:
            found = _instruction(line)
            if found is not None:
                lines[found.name] = found
            elif lines:  # what kernels say of themselves has lines of its own
                last = next(reversed(lines))
                lines[last] = dataclasses.replace(lines[last], tail=lines[last].tail + line)
    if not entry:
        raise ValueError('the text has no ENTRY computation: it is no compiled HLO module')
    return Module(computations, entry)


def read_shapes(text: str) -> tuple[Shape, ...]:
    """Arrays of a printed type: of `bf16[8,64]{1,0:T(8,128)S(1)}`, or of a tuple of such."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype not in BITS:
            continue
        sizes = tuple(int(d.lstrip('<=')) for d in dims.split(',') if d)
        space = _SPACE.search(layout or '')
        found.append(Shape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == '(') - (text[at] == ')')
        if depth == 0:
            return at
    return len(text)


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if not match:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith('(') else rest.find(' ')
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.find('(')
    if start < 0:
        return None
    stop = _closing(rest, start)
    inside = rest[start + 1 : stop]
    return Instruction(
        name=match[2],
        opcode=rest[:start],
        shapes=read_shapes(shape),
        operands=tuple(_NAME.findall(inside)),
        tail=rest[stop + 1 :],
        root=bool(match[1]),
        inside=inside,
    )


# ============================================================================ loops


def trip_count(module: Module, where: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None where the program decides that as it runs.

    Read from what the compiler notes, or else from a condition that compares a counter, which the
    loop starts at a constant and moves by one, with a constant.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.tail)
    if known:
        return int(known[1])
    condition = module.computations.get(loop.called.get('condition', ('',))[0])
    if condition is None:
        return None
    compare = _behind(module, condition, condition.root)
    if compare is None or compare[1].opcode != 'compare':
        return None
    inner, test = compare
    direction = re.search(r'direction=(\w+)', test.tail)
    sides = [_source(module, condition, inner, name) for name in test.operands]
    if direction is None or direction[1] not in ('LT', 'GT', 'LE', 'GE') or len(sides) != 2:
        return None
    if direction[1] in ('GT', 'GE'):
        sides.reverse()
    counter, limit = sides
    if not isinstance(counter, _Element) or not isinstance(limit, int):
        return None
    first = _initial(module, where, loop, counter.index)
    if first is None:
        return None
    return max(limit - first + (direction[1] in ('LE', 'GE')), 0)


class _Element(NamedTuple):
    """Element of a loop's tuple."""

    index: int


def _behind(
    module: Module, where: Computation, at: Instruction
) -> tuple[Computation, Instruction] | None:
    """What really computes a value: through fusions and copies."""
    while True:
        if at.opcode == 'fusion':
            where = module.computations[at.called['calls'][0]]
            at = where.root
        elif at.opcode in ('copy', 'bitcast', 'convert', 'reshape') and at.operands:
            if at.operands[0] not in where.instructions:
                return None
            at = where.instructions[at.operands[0]]
        else:
            return where, at


def _source(module: Module, outer: Computation, inner: Computation, name: str):
    """An operand of the comparison: an int constant, an element of the loop's tuple, or None."""
    at = inner.instructions.get(name)
    while at is not None:
        if at.opcode == 'constant':
            return int(at.inside) if re.fullmatch(r'-?\d+', at.inside) else None
        if at.opcode == 'get-tuple-element':
            match = re.search(r'index=(\d+)', at.tail)
            return _Element(int(match[1])) if match else None
        if at.opcode in ('copy', 'bitcast', 'convert', 'reshape'):
            at = inner.instructions.get(at.operands[0])
        elif at.opcode == 'parameter' and inner is not outer:
            # A parameter of a fused comparison: what the condition passes to it.
            caller = next((i for i in outer if inner.name in i.called.get('calls', ())), None)
            if caller is None:
                return None
            at, inner = outer.instructions.get(caller.operands[int(at.inside)]), outer
        else:
            return None
    return None


def _initial(module: Module, where: Computation, loop: Instruction, index: int) -> int | None:
    """Constant that an element of a loop's tuple starts at."""
    start = where.instructions.get(loop.operands[0])
    if start is None or start.opcode != 'tuple' or index >= len(start.operands):
        return None
    found = where.instructions.get(start.operands[index])
    found = _behind(module, where, found) if found is not None else None
    if found is None or found[1].opcode != 'constant':
        return None
    text = found[1].inside
    return int(text) if re.fullmatch(r'-?\d+', text) else None


# ============================================================================ replica groups


def first_group(tail: str, devices: int) -> tuple[int, ...]:
    """Devices of the first replica group of a collective, as numbers in the mesh's order.

    Forms: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}`, and pairs
    of a permutation, of which the first is taken. None named means all devices.
    """
    found = re.search(r'replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}', tail)
    if found:
        sizes = [int(n) for n in re.findall(r'=(\d+)', found[1])]
        names = re.findall(r"'([^']+)'=", found[1])
        wanted = re.findall(r"'([^']+)'", found[2])
        return _along(sizes, [names.index(n) for n in wanted if n in names])
    found = re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', tail)
    if found:
        sizes = [int(n) for n in found[3].split(',')]
        order = [int(n) for n in found[4].split(',')] if found[4] else list(range(len(sizes)))
        numbers = _transposed(sizes, order)
        return tuple(numbers[: int(found[2])])
    found = re.search(r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}', tail)
    if found:
        return tuple(int(n) for n in found[1].split(','))
    return tuple(range(devices))


def _strides(sizes: list[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _along(sizes: list[int], axes: list[int]) -> tuple[int, ...]:
    """Numbers that the device 0 reaches by moving along some axes."""
    strides, found = _strides(sizes), [0]
    for axis in axes:
        found = [n + i * strides[axis] for n in found for i in range(sizes[axis])]
    return tuple(found)


def _transposed(sizes: list[int], order: list[int]) -> list[int]:
    """0, 1, ... in the given shape, transposed, in order."""
    strides, found = _strides(sizes), [0]
    for axis in order:
        found = [n + i * strides[axis] for n in found for i in range(sizes[axis])]
    return found


# ============================================================================ what loops keep


def saved(module: Module) -> float:
    """Bytes that loops over layers write for later, one slice a turn: saved activations.

    Arrays that a forward loop carries, whose first dimension is its number of turns, and that it
    changes. Gradients, which the loops of the backward pass write in the same way, do not count.
    0 for a program without a backward pass, whose loops may carry a cache.
    """
    loops = [i for where in module.computations.values() for i in where if i.opcode == 'while']
    if not any('transpose(' in loop.op_name for loop in loops):
        return 0.0
    total = 0.0
    for where in module.computations.values():
        for loop in where:
            if loop.opcode != 'while' or 'transpose(' in loop.op_name:
                continue
            turns = trip_count(module, where, loop)
            body = module.computations[loop.called['body'][0]]
            if turns is None or turns < 2 or body.root.opcode != 'tuple':
                continue
            for number, name in enumerate(body.root.operands):
                made, shape = body.instructions[name], loop.shapes
                if number >= len(shape) or len(shape[number].dims) < 3:
                    continue
                same = made.opcode == 'get-tuple-element' and f'index={number}' in made.tail
                if shape[number].dims[0] == turns and not same:
                    total += shape[number].bytes
    return total
