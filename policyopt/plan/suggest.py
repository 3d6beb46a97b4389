"""What to change in a config whose program does not fit, as fields and their values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

ROOM = 0.92  # of the memory: what a plan should leave free for fragments and the runtime
SLICE = 'topology'  # the field of a change that no config can make: to another slice


class Change(NamedTuple):
    """One field of a config to set, and why.

    Attributes:
      field: its path, such as 'model.remat'; 'mesh.fsdp' is the size of a mesh axis, and SLICE the
        flag that names the slice.
      value: what to set it to.
      why: in words.
    """

    field: str
    value: Any
    why: str


def suggest(step: str, memory: dict[str, float], run: dict[str, Any]) -> Change | None:
    """The next thing to try for a program that does not fit; None where nothing is left to try.

    Args:
      step: which program.
      memory: of its record.
      run: what it was compiled with: remat, rows, micro, slots, gather, mesh (axis -> size),
        batch_shards and kv_heads.
    """
    hbm = memory['hbm'] * ROOM
    mesh = run['mesh']
    held = sum(memory.get(name, 0.0) for name in ('parameters', 'optimizer'))
    if held > hbm / 2 and mesh.get('data', 1) > 1:
        times = 2 ** max(1, math.ceil(math.log2(held / (hbm / 2))))
        times = min(times, mesh.get('data', 1))
        return Change(
            'mesh.fsdp',
            mesh.get('fsdp', 1) * times,
            f'parameters and moments take {held / 2**30:.1f} GiB of a device: split them further',
        )
    if held > hbm and mesh.get('data', 1) == 1:
        devices = math.prod(mesh.values())
        wanted = devices * 2 ** math.ceil(math.log2(held / (hbm / 2)))
        return Change(
            SLICE,
            f'one of {wanted} chips, or of larger ones',
            f'parameters and moments take {held / 2**30:.1f} GiB of each of {devices} devices',
        )
    if step == 'decode' and run['gather'] and memory.get('temporary', 0.0) > hbm / 4:
        return Change(
            'rollout.engine.gather',
            False,
            f'temporary memory, which gathered weights are in, takes '
            f'{memory["temporary"] / 2**30:.1f} GiB of a device: gather them for each token',
        )
    if (
        step == 'decode'
        and memory.get('cache', 0.0) > hbm / 4
        and run['slots'] > run['batch_shards']
    ):
        times = _times(memory['cache'], hbm - held)
        return Change(
            'rollout.engine.slots',
            max(run['slots'] // times, run['batch_shards']),
            f'the cache takes {memory["cache"] / 2**30:.1f} GiB of a device: decode fewer rows',
        )
    if step in ('train', 'score'):
        if step == 'train' and run['remat'] != 'full':
            return Change('model.remat', 'full', 'keep layer inputs alone for the backward pass')
        if run['micro'] > run['batch_shards']:
            times = _times(memory.get('temporary', 0.0), hbm - held)
            return Change('microbatches', _more(run, times), 'fewer rows through the model at once')
    if mesh.get('data', 1) > 1:
        return Change('mesh.fsdp', mesh.get('fsdp', 1) * 2, 'split parameters and moments further')
    wider = mesh.get('tensor', 1) * 2
    if run['kv_heads'] % wider == 0 and mesh.get('fsdp', 1) > 1:
        return Change(
            'mesh.tensor', wider, 'split heads and widths: a row is shared by more devices'
        )
    return None


def _times(needed: float, room: float) -> int:
    """By how much to divide what should fit into the room: a power of two, 2 at least."""
    over = max(needed / room if room > 0 else 2.0, 2.0)
    return 2 ** math.ceil(math.log2(over))


def _more(run: dict[str, Any], times: int) -> int:
    """So many times more microbatches, or a few more, of which each device has equal rows."""
    parts, each = run['rows'] // run['micro'], run['rows'] // run['batch_shards']
    possible = [n for n in range(parts + 1, each + 1) if each % n == 0]
    return next((n for n in possible if n >= times * parts), possible[-1])


def apply(config: dict[str, Any], change: Change, mesh: dict[str, int]) -> dict[str, Any]:
    """A copy of a config (nested dicts) with the change in it.

    Args:
      config: as `recipe.prepare` takes it.
      change: as `suggest` makes it. A mesh axis grows at the expense of 'data', or of 'fsdp' where
        'data' has no devices left.
      mesh: axis -> size, as the config's own came out.
    """
    head, _, rest = change.field.partition('.')
    if head == 'mesh':
        times, sizes = change.value // mesh.get(rest, 1), dict(mesh)
        source = 'data' if sizes.get('data', 1) >= times else 'fsdp'
        sizes[source] = sizes[source] // times
        return {**config, 'mesh': tuple({**sizes, rest: change.value}.items())}
    if not rest:
        return {**config, head: change.value}
    inner = Change(rest, change.value, change.why)
    return {**config, head: apply(dict(config[head]), inner, mesh)}
