"""What one run of a compiled program costs a device, with every loop counted as often as it runs.

`Compiled.cost_analysis()` counts the body of a loop once, and a model is a loop over its layers.
Here the instructions are counted one by one:

flops: of matrix products, twice their multiplications; elementwise work is left out. Kernels that
    the compiler does not see into are counted where they say what they do, and listed.
bytes: read from and written to HBM, by instruction: operands and results that are in HBM, of sliced
    operands the slice alone. Results that the compiler keeps in faster memory do not count.
cycles: the compiler's own estimate of each instruction's time, where it makes one (TPU).
collectives: bytes that a device sends, by kind and by the mesh axes that they cross, in the usual
    ring forms: (n-1)/n of the larger array for gathers and scatters, twice that for a sum.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from policyopt.plan import hlo, traffic
from policyopt.plan.hlo import Computation, Instruction, Module, Shape

COLLECTIVES = (
    'all-gather',
    'all-reduce',
    'reduce-scatter',
    'all-to-all',
    'ragged-all-to-all',
    'collective-permute',
    'collective-broadcast',
)
NOTHING = (  # calls that move nothing
    'AllocateBuffer', 'Sharding', 'AssumeGatherIndicesInBound', 'annotate_device', 'ConcatBitcast',
)  # fmt: skip
HOST = ('infeed', 'outfeed', 'send', 'recv')
HOST_CALLS = ('MoveToHost', 'MoveToDevice', 'callback', 'xla_ffi_python', 'xla_python')
# Matrix products of jax's splash attention: of the forward pass, of the gradient of the queries,
# and of keys and values; scores are computed anew in both.
SPLASH = {'splash_mha_fwd': 2, 'splash_mha_dq': 3, 'splash_mha_dkv': 4}


@dataclasses.dataclass
class Costs:
    """Sums over one run of a program on one device.

    Attributes:
      flops, bytes, cycles: see the module.
      kernel_flops, kernel_bytes: the part of kernels of which it is known.
      collectives: (kind, mesh axes) -> bytes sent.
      kernels: name of a kernel -> how often it runs.
      silent: kernels that don't say what they cost.
      unknown: loops of which nothing says how often they run, which are counted once.
      host: instructions that exchange data with the host.
    """

    flops: float = 0.0
    bytes: float = 0.0
    cycles: float = 0.0
    kernel_flops: float = 0.0
    kernel_bytes: float = 0.0
    collectives: dict[tuple[str, tuple[str, ...]], float] = dataclasses.field(default_factory=dict)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    silent: dict[str, float] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)
    host: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Costs, times: float = 1.0) -> None:
        """Add `times` runs of a part."""
        for name in ('flops', 'bytes', 'cycles', 'kernel_flops', 'kernel_bytes'):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for name in ('collectives', 'kernels', 'silent'):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = mine.get(key, 0.0) + times * value
        self.unknown += [name for name in other.unknown if name not in self.unknown]
        self.host += [name for name in other.host if name not in self.host]


def count(
    module: Module,
    mesh: Sequence[tuple[str, int]] = (),
    loops: Mapping[str, int] | None = None,
    once: bool = False,
    filled: Mapping[str, float] | None = None,
) -> Costs:
    """Costs of one run.

    Args:
      module: as `hlo.parse` reads it.
      mesh: (axis, size) in order, to name what collectives cross.
      loops: for loops whose number of turns depends on data: a part of their op_name -> turns; the
        first that matches is taken.
      once: count every loop once, as the compiler's own analysis does.
      filled: for kernels that work on the rows that are there, of an array with room for more: a
        part of their name -> the share of the rows that is expected to be there. A program does not
        say it, since it is data; what a kernel says that it costs is for all the room.
    """
    counter = _Counter(module, tuple(mesh), dict(loops or {}), once, dict(filled or {}))
    return counter.of(module.entry)


@dataclasses.dataclass
class _Counter:
    module: Module
    mesh: tuple[tuple[str, int], ...]
    loops: Mapping[str, int]
    once: bool
    filled: Mapping[str, float]
    seen: dict[str, Costs] = dataclasses.field(default_factory=dict)

    def of(self, name: str) -> Costs:
        if name not in self.seen:
            total = Costs()
            for instruction in self.module.computations[name]:
                self.one(total, self.module.computations[name], instruction)
            self.seen[name] = total
        return self.seen[name]

    def turns(self, where: Computation, loop: Instruction) -> tuple[int, bool]:
        if self.once:
            return 1, True
        for part, turns in self.loops.items():
            if part in loop.op_name and hlo.trip_count(self.module, where, loop) is None:
                return turns, True
        found = hlo.trip_count(self.module, where, loop)
        return (1, False) if found is None else (found, True)

    def one(self, total: Costs, where: Computation, at: Instruction) -> None:
        called = at.called
        if at.opcode == 'while':
            turns, known = self.turns(where, at)
            total.add(self.of(called['body'][0]), turns)
            if not known:
                total.unknown.append(at.op_name or at.name)
            return
        if at.opcode == 'conditional':
            branches = [self.of(n) for n in called.get('branch_computations', ())]
            if branches:  # the dearest
                total.add(max(branches, key=lambda c: (c.flops + c.kernel_flops, c.bytes)))
            return
        if at.opcode in ('call', 'async-start'):
            for name in called.get('calls', called.get('to_apply', ())):
                total.add(self.of(name))
            return
        kind = at.opcode.removesuffix('-start')
        if kind in COLLECTIVES:
            self.collective(total, where, at, kind)
        elif at.opcode == 'fusion':
            self.fusion(total, where, at)
        elif at.opcode == 'custom-call':
            self.kernel(total, where, at)
        elif at.opcode in ('dot', 'convolution'):
            total.flops += flops(where, at)
        if at.opcode.split('-')[0] in HOST or any(
            name in at.tail for name in HOST_CALLS if at.opcode == 'custom-call'
        ):
            total.host.append(f'{at.opcode} {at.name}')
        if at.opcode not in ('fusion', 'custom-call'):
            total.bytes += traffic.of(where, at)
        total.cycles += at.cycles

    def fusion(self, total: Costs, where: Computation, at: Instruction) -> None:
        inner = self.module.computations[at.called['calls'][0]]
        part = self.inside(inner.name)
        total.flops += part.flops
        for key, value in part.collectives.items():
            total.collectives[key] = total.collectives.get(key, 0.0) + value
        total.bytes += traffic.of_fusion(self.module, where, at, inner)

    def inside(self, name: str) -> Costs:
        """Products and collectives in a fused computation, which moves no bytes of its own."""
        key = f'fused {name}'
        if key in self.seen:
            return self.seen[key]
        total, inner = Costs(), self.module.computations[name]
        for at in inner:
            kind = at.opcode.removesuffix('-start')
            if at.opcode in ('dot', 'convolution'):
                total.flops += flops(inner, at)
            elif kind in COLLECTIVES and traffic.continued(inner, at):
                continue
            elif kind in COLLECTIVES:
                cut = kind == 'all-reduce' and _cut(inner, at.name)
                self.collective(total, inner, at, 'reduce-scatter' if cut else kind)
            elif at.opcode == 'fusion':
                total.add(self.inside(at.called['calls'][0]))
        self.seen[key] = total
        return total

    def collective(self, total: Costs, where: Computation, at: Instruction, kind: str) -> None:
        devices = math.prod(size for _, size in self.mesh) or 1
        group = hlo.first_group(at.tail, devices)
        if len(group) < 2:
            return
        arrays = [s for name in at.operands for s in self.module.shapes_of(where, name)]
        given = sum(s.bytes for s in arrays)
        share = (len(group) - 1) / len(group)
        sent = {
            'all-gather': given * (len(group) - 1),
            'all-reduce': 2 * given * share,
            'reduce-scatter': given * share,
            'all-to-all': given * share,
            'ragged-all-to-all': given * share,
        }.get(kind, float(given))
        key = kind, crossed(group, self.mesh)
        total.collectives[key] = total.collectives.get(key, 0.0) + sent

    def kernel(self, total: Costs, where: Computation, at: Instruction) -> None:
        target = re.search(r'custom_call_target="([^"]*)"', at.tail)
        name = target[1] if target else at.name
        if name in NOTHING:
            return
        if name.startswith('TODO('):  # so libtpu names gathers that the SparseCore does
            total.bytes += 2.0 * at.bytes
            return
        if name == 'tpu_custom_call':
            name = re.sub(r'\.\d+$', '', at.name)
        total.kernels[name] = total.kernels.get(name, 0.0) + 1
        arrays = [s for n in at.operands for s in self.module.shapes_of(where, n)]
        work = re.search(r'"cost_estimate":\{([^}]*)\}', at.tail)
        numbers = dict(re.findall(r'"(\w+)":"?(\d+)', work[1])) if work else {}
        if 'flops' in numbers:
            share = next((s for part, s in self.filled.items() if part in name), None)
            moved = float(numbers.get('bytes_accessed', 0))
            if share is not None:
                moved = max(moved - unread(arrays, at.shapes, share), 0.0)
            total.kernel_flops += (1.0 if share is None else share) * float(numbers['flops'])
            total.kernel_bytes += moved
        elif own := attention_flops(name, arrays):
            total.kernel_flops += own
            total.kernel_bytes += traffic.of(where, at)
        else:
            total.silent[name] = total.silent.get(name, 0.0) + 1
            total.bytes += traffic.of(where, at)


def _cut(inner: Computation, name: str) -> bool:
    """Whether of a sum each device keeps a slice alone: a reduce-scatter, as TPUs write it."""
    users = inner.users(name)
    parts = [i.name for i in users if i.opcode == 'get-tuple-element']
    return any(i.opcode == 'dynamic-slice' for i in users) or any(_cut(inner, n) for n in parts)


def unread(given: Sequence[Shape], made: Sequence[Shape], share: float) -> float:
    """Bytes in HBM that a product of rows [N,...] with experts [E,...,...] leaves alone.

    Of the rows, those that are not there; and the experts without a row, at least E - share * N.
    """
    rows = [s for s in (*given, *made) if len(s.dims) == 2 and s.dtype != 's32']
    count = max((s.dims[0] for s in rows), default=0) * share
    left = (1 - share) * traffic.in_hbm(rows)
    for weights in given:
        if len(weights.dims) == 3:
            left += max(1 - count / weights.dims[0], 0.0) * traffic.in_hbm([weights])
    return left


def attention_flops(name: str, arrays: Sequence[Shape]) -> float:
    """Work of causal splash attention, which says nothing of it itself; 0 for other kernels.

    Half of the T x T scores, two operations a multiplication, and as many products as the kernel
    has: queries [...,T,hd] are its first floating operand of three dimensions or more.
    """
    products = next((n for prefix, n in SPLASH.items() if name.startswith(prefix)), 0)
    queries = next((s for s in arrays if s.dtype in ('bf16', 'f32') and len(s.dims) > 2), None)
    if not products or queries is None:
        return 0.0
    return float(products * queries.size * queries.dims[-2])


def crossed(group: Sequence[int], mesh: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Mesh axes along which the devices of a group differ."""
    names, left = [], list(group)
    for name, size in reversed(list(mesh)):
        if len({n % size for n in left}) > 1:
            names.append(name)
        left = [n // size for n in left]
    return tuple(reversed(names))


def flops(where: Computation, at: Instruction) -> float:
    """Twice the multiplications of a dot or a convolution."""
    shapes = [where.instructions[n].shapes for n in at.operands if n in where.instructions]
    if len(shapes) < 2 or not shapes[0] or not shapes[1]:
        return 0.0
    left, right, out = shapes[0][0], shapes[1][0], at.shapes[0]
    if at.opcode == 'dot':
        match = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', at.tail)
        axes = [int(n) for n in match[1].split(',') if n] if match else []
        return 2.0 * out.size * math.prod(left.dims[a] for a in axes)
    return _convolution(left, right, out, at.tail)


def _convolution(left: Shape, right: Shape, out: Shape, tail: str) -> float:
    """As the compiler counts it: window places that fall on data. TPUs run products as these."""
    labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', tail)
    if labels is None:
        return 0.0
    window = _window(tail)
    work = 2.0 * right.dims[labels[2].index('i')]
    for name, size in zip(labels[3], out.dims, strict=True):
        if not name.isdigit():
            work *= size
            continue
        base = left.dims[labels[1].index(name)]
        taps = right.dims[labels[2].index(name)]
        work *= _valid_taps(int(name), size, base, taps, window)
    return work


def _window(tail: str) -> dict[str, list[tuple[int, ...]]]:
    found = re.search(r'window=\{([^}]*)\}', tail)
    out = {}
    for key, value in re.findall(r'(\w+)=([\dx_\-]+)', found[1] if found else ''):
        out[key] = [tuple(int(n) for n in part.split('_')) for part in value.split('x')]
    return out


def _valid_taps(axis: int, places: int, base: int, taps: int, window: Mapping[str, list]) -> int:
    """Pairs of a place of the result and a tap of the window that meet data, on one axis."""

    def value(name: str, default: int) -> int:
        listed = window.get(name)
        return listed[axis][0] if listed and axis < len(listed) else default

    stride, low = value('stride', 1), value('pad', 0)
    spread, dilate = value('lhs_dilate', 1), value('rhs_dilate', 1)
    last, total = (base - 1) * spread, 0
    for tap in range(taps):
        start = tap * dilate - low
        for place in range(places):
            index = start + place * stride
            total += 0 <= index <= last and index % spread == 0
    return total
