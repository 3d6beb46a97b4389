"""Meshes, logical-axis rules and array shardings.

Arrays name their dimensions by logical axes ('batch', 'embed', 'heads', ...); rules say which mesh
axes each logical axis is split over; a mesh says how many devices each mesh axis has. Changing the
layout of a run is changing the rules, never the model.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from policyopt.checks import nearest

LOGICAL_AXES = (
    'batch',
    'length',
    'layers',
    'embed',
    'heads',
    'kv_heads',
    'head_dim',
    'mlp',
    'vocab',
    'experts',
)

# logical axis -> mesh axes; an axis that is absent is not split.
Rules = tuple[tuple[str, tuple[str, ...]], ...]

DEFAULT_MESH = (('data', -1), ('fsdp', 1), ('expert', 1), ('tensor', 1))
DEFAULT_RULES: Rules = (
    ('batch', ('data', 'fsdp')),
    ('embed', ('fsdp',)),
    ('experts', ('expert',)),
    ('heads', ('tensor',)),
    ('kv_heads', ('tensor',)),
    ('mlp', ('tensor',)),
    ('vocab', ('tensor',)),
)


def make_rules(rules: Mapping[str, Any] | Rules | None = None) -> Rules:
    """Rules in hashable form, from a mapping of logical axis to mesh axis, mesh axes or None.

    `kv_heads` follows `heads` where it is not given. Raises ValueError for an unknown logical axis.
    What it can't check: that the mesh axes exist; a rule for an axis that the mesh lacks does not
    split.
    """
    if rules is None:
        return DEFAULT_RULES
    named = dict(rules)
    for name in named:
        if name not in LOGICAL_AXES:
            raise ValueError(
                f'rules name the logical axis {name!r}, which no array has.'
                f'{nearest(name, LOGICAL_AXES)}'
            )
    if 'heads' in named:
        named.setdefault('kv_heads', named['heads'])
    as_tuple = {
        name: (axes,) if isinstance(axes, str) else tuple(axes or ())
        for name, axes in named.items()
    }
    return tuple(sorted(as_tuple.items()))


def make_mesh(
    axes: Sequence[tuple[str, int]] = DEFAULT_MESH, devices: Sequence[Any] | None = None
) -> Mesh:
    """Mesh with the named axis sizes over `devices` (all by default).

    One size may be -1: it takes what the others leave. Raises ValueError where the sizes do not
    multiply to the number of devices, or a name repeats.
    """
    devices = list(jax.devices() if devices is None else devices)
    names = [name for name, _ in axes]
    sizes = [size for _, size in axes]
    if len(set(names)) != len(names):
        raise ValueError(f'mesh names an axis twice: {names}')
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f'mesh sizes {dict(axes)} must be positive, at most one of them -1')
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if -1 in sizes or math.prod(sizes) != len(devices):
        raise ValueError(f'mesh {dict(axes)} does not cover {len(devices)} devices')
    kinds = (AxisType.Auto,) * len(names)
    try:
        return jax.make_mesh(tuple(sizes), tuple(names), axis_types=kinds, devices=devices)
    except NotImplementedError:  # no size is a product of the torus' own: its axes are split
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(placed, tuple(names), axis_types=kinds)


def check_axes(field: str, axes: Sequence[tuple[str, int]], rules: Rules) -> None:
    """Raise ValueError, naming the field, for an axis that no rule splits anything over."""
    used = {axis for _, wanted in rules for axis in wanted}
    for name, _ in axes:
        if name not in used:
            raise ValueError(
                f'{field} names the axis {name!r}, which config.rules split nothing over.'
                f'{nearest(name, used)}'
            )


# By itself libtpu 0.0.52 compiles `ragged_dot` to a kernel on v5p, which works on each expert's own
# rows; on v5e and v6e it would multiply every row with every expert.
TPU_OPTIONS = {'xla_tpu_enable_ragged_dot_kernel': 'true'}


def ask_libtpu() -> None:
    """Add TPU_OPTIONS to LIBTPU_INIT_ARGS, which libtpu reads when jax first looks for devices.

    What is there already stays, and wins. Does nothing where there is no TPU.
    """
    given = os.environ.get('LIBTPU_INIT_ARGS', '')
    more = [f'--{name}={value}' for name, value in TPU_OPTIONS.items() if name not in given]
    os.environ['LIBTPU_INIT_ARGS'] = ' '.join(filter(None, [given, *more]))


def platform() -> str:
    """Platform that what is being traced will run on: 'cpu', 'gpu' or 'tpu'.

    That of the ambient mesh's devices, which a program compiled ahead of time need not have; jax's
    own default without a mesh.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return 'gpu' if name in ('cuda', 'rocm') else name


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Context in which `mesh` is the ambient mesh; without one it changes nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def partition_spec(
    axes: Sequence[str | None], rules: Rules, mesh: Mesh | jax.sharding.AbstractMesh
) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes, left to right.

    A mesh axis splits one dimension only: where two dimensions ask for it, the first gets it. Mesh
    axes of size 1 and axes that the mesh lacks are dropped.
    """
    table, sizes = dict(rules), dict(mesh.shape)
    used: set[str] = set()
    parts: list[Any] = []
    for name in axes:
        wanted = table.get(name, ()) if name else ()
        kept = tuple(a for a in wanted if sizes.get(a, 1) > 1 and a not in used)
        used.update(kept)
        parts.append(kept if len(kept) > 1 else kept[0] if kept else None)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _split(part: Any, sizes: Mapping[str, int]) -> int:
    names = (part,) if isinstance(part, str) else tuple(part or ())
    return math.prod(sizes[name] for name in names)


def param_shardings(axes: Any, shapes: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """NamedSharding for each parameter.

    Args:
      axes: pytree of tuples of logical axis names (or None), one name a dimension.
      shapes: pytree of the same structure whose leaves have `.shape`.
      mesh: the devices.
      rules: logical axis to mesh axes.

    Raises ValueError, naming the parameter, where a dimension does not divide by its mesh axes.
    """

    def one(path: Any, shape: Any, names: tuple[str | None, ...]) -> NamedSharding:
        spec = partition_spec(names, rules, mesh)
        for size, part, name in zip(shape.shape, spec, names, strict=False):
            if size % _split(part, dict(mesh.shape)):
                raise ValueError(
                    f'parameter {jax.tree_util.keystr(path)} of shape {shape.shape}: axis '
                    f'{name!r} ({size}) does not divide over mesh axes {part!r} '
                    f'({_split(part, dict(mesh.shape))} devices). Set rules {name}=None to '
                    'replicate it.'
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, shapes, axes)


def mesh_spec(
    axes: Sequence[str | None], shape: Sequence[int], rules: Rules
) -> PartitionSpec | None:
    """PartitionSpec of an array on the ambient mesh (`jax.set_mesh`), None where nothing is split.

    A dimension that does not divide by its mesh axes is not split: the rows of a short last batch
    are replicated rather than refused.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    if all(size == 1 for size in sizes.values()):
        return None
    fits = []
    for size, name in zip(shape, axes, strict=True):
        alone = partition_spec((name,), rules, mesh)
        whole = not len(alone) or size % _split(alone[0], sizes) == 0
        fits.append(name if whole else None)
    spec = partition_spec(fits, rules, mesh)
    return spec if len(spec) else None


def constrain(x: jax.Array, axes: Sequence[str | None], rules: Rules = DEFAULT_RULES) -> jax.Array:
    """x with its sharding pinned to the rules on the ambient mesh, under jit.

    Without a mesh it is x. Also the cotangent of x is pinned.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    spec = mesh_spec(axes, x.shape, rules)
    return jax.lax.with_sharding_constraint(x, PartitionSpec() if spec is None else spec)


def gathered_rules(rules: Rules) -> Rules:
    """Rules that split no parameter over the mesh axes of rows, but experts as they do."""
    rows = dict(rules).get('batch', ())
    return tuple(
        (name, axes if name in ('batch', 'experts') else tuple(a for a in axes if a not in rows))
        for name, axes in rules
    )


def feed(tree: Any, rules: Rules = DEFAULT_RULES) -> Any:
    """The host's arrays [B,...] on the ambient mesh, rows split as the rules say.

    Each device gets its rows alone, from its own process. Others' arrays, and all without a mesh,
    come out as they are.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.size == 1:
        return tree

    def one(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or not x.ndim:
            return x
        spec = mesh_spec(('batch',) + (None,) * (x.ndim - 1), x.shape, rules) or PartitionSpec()
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

    return jax.tree.map(one, tree)


def replicated(tree: Any) -> Any:
    """Arrays that every process has alike, as arrays of the whole ambient mesh, if there is one.

    Elsewhere they would belong to one device of one process, which others can't restore.
    """
    if jax.sharding.get_abstract_mesh().empty:  # which may be asked while tracing, too
        return tree
    return jax.device_put(tree, NamedSharding(jax.sharding.get_mesh(), PartitionSpec()))


def batch_shards(rules: Rules = DEFAULT_RULES) -> int:
    """Over how many devices of the ambient mesh the rules split rows; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    spec = partition_spec(('batch',), rules, mesh)
    return _split(spec[0], dict(mesh.shape)) if len(spec) else 1
