"""HBM traffic of single instructions of a compiled program."""

from __future__ import annotations

from collections.abc import Iterable

from policyopt.plan.hlo import Computation, Instruction, Module, Shape

FREE = (  # that move nothing by themselves
    'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional',
    'call', 'after-all', 'iota', 'partition-id', 'replica-id', 'opt-barrier', 'async-start',
    'domain', 'add-dependency',
)  # fmt: skip
# Begun apart from their end: their result is a tuple of both sides, and of what the end waits for.
BOTH_SIDES = ('copy-start', 'all-gather-start', 'collective-permute-start')
SUMS = ('all-reduce-start',)  # begun likewise, but with the result alone
WRITES = {'dynamic-update-slice': 1, 'scatter': 2}  # in place: number of the operand put there
SLICES = ('dynamic-slice', 'slice', 'gather')


def of(where: Computation, at: Instruction) -> float:
    """HBM bytes that an instruction by itself reads and writes."""
    opcode = at.opcode
    if opcode in FREE or opcode.endswith(('-done', '-update')):
        return 0.0
    if opcode in BOTH_SIDES:
        return float(in_hbm(at.shapes))
    given = [s for name in at.operands for s in shapes_of(where, name)]
    made = list(at.shapes)
    if opcode.endswith('-start') and opcode not in SUMS:  # operands come first in its result
        opcode = opcode.removesuffix('-start')
        made = [s for s in made[len(given) :] if s.dims]
    if opcode in SLICES:
        # Of an array that is in HBM, what is taken is read from there, wherever it goes.
        taken = sum(s.bytes for s in made)
        return float(taken * (in_hbm(given[:1]) > 0) + in_hbm(made))
    if opcode in WRITES:
        update = shapes_of(where, at.operands[WRITES[opcode]])
        return float(in_hbm(update) + sum(s.bytes for s in update) * (in_hbm(made) > 0))
    return float(in_hbm(given) + in_hbm(made))


def in_hbm(shapes: Iterable[Shape]) -> int:
    """Bytes of those arrays that are in HBM."""
    return sum(s.bytes for s in shapes if s.space == 0)


def shapes_of(where: Computation, name: str) -> tuple[Shape, ...]:
    """Arrays of an operand."""
    found = where.instructions.get(name)
    return () if found is None else found.shapes


def continued(inner: Computation, at: Instruction) -> bool:
    """Whether a collective inside a fusion is one that another fusion began.

    Collectives that overlap with other work stand in every fusion on their way: in the one that
    begins them, in those that compute meanwhile, and in the one that waits for their end.
    """
    begun = any(i.opcode == 'custom-call' and 'AsyncCollectiveStart' in i.tail for i in inner)
    return 'chain_id="' in at.tail and not begun


def _idle(inner: Computation, name: str) -> bool:
    """Whether a parameter only goes through a fusion, or belongs to what another one began."""
    return all(
        (user.root and user.opcode == 'tuple')
        or 'AsyncCollectiveDone' in user.tail
        or continued(inner, user)
        for user in inner.users(name)
    )


def of_fusion(module: Module, where: Computation, at: Instruction, inner: Computation) -> float:
    """The same of a fusion, which of an operand that it slices reads the slice alone."""
    total = 0.0
    for number, name in enumerate(at.operands):
        found, parameter = where.instructions.get(name), inner.parameters.get(number)
        if found is None or parameter is None:
            continue
        whole = 0 if _idle(inner, parameter.name) else in_hbm(found.shapes)
        part = _sliced(module, inner, parameter.name) if whole else 0
        total += whole if part is None else min(part, whole)
    parts = [inner.root]
    if inner.root.opcode == 'tuple':
        parts = [inner.instructions[n] for n in inner.root.operands if n in inner.instructions]
    if 'AsyncCollectiveStart' in inner.root.tail:  # (what is sent, what comes, ...)
        return total + in_hbm(at.shapes[1:2])
    for shape, part in zip(at.shapes, parts, strict=False):
        if shape.space or part.opcode == 'parameter' or 'AsyncCollectiveDone' in part.tail:
            continue
        if continued(inner, part):
            continue
        behind = _through(module, inner, part)
        if behind is not None and behind[1].opcode in WRITES:
            update = behind[0].instructions.get(behind[1].operands[WRITES[behind[1].opcode]])
            total += min(shape.bytes, update.bytes if update is not None else shape.bytes)
        else:
            total += shape.bytes
    return total


def _through(module: Module, where: Computation, at: Instruction):
    """What computes a value, behind bitcasts and fusions inside a fusion."""
    for _ in range(20):
        if at.opcode == 'bitcast' and at.operands[0] in where.instructions:
            at = where.instructions[at.operands[0]]
        elif at.opcode == 'fusion':
            where = module.computations[at.called['calls'][0]]
            at = where.root
        else:
            return where, at
    return None


def _sliced(module: Module, inner: Computation, name: str, depth: int = 0) -> int | None:
    """Bytes of a value that its users read, where all of them slice it; else None: all of it."""
    total = 0
    for user in inner.users(name):
        if user.opcode in ('dynamic-slice', 'slice') or (
            user.opcode == 'gather' and user.operands[0] == name
        ):
            total += user.bytes
        elif user.opcode in WRITES and user.operands[0] == name:
            continue  # written in place
        elif user.opcode == 'bitcast' and depth < 8:
            part = _sliced(module, inner, user.name, depth + 1)
            if part is None:
                return None
            total += part
        elif user.opcode == 'fusion' and depth < 8:
            below = module.computations[user.called['calls'][0]]
            number = user.operands.index(name)
            part = _sliced(module, below, below.parameters[number].name, depth + 1)
            if part is None:
                return None
            total += part
        else:
            return None
    return total
