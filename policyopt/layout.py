"""The devices of a run: mesh and rules of its config, checked against the model and its batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from policyopt import hosts, sharding
from policyopt.checks import nearest
from policyopt.sharding import DEFAULT_MESH, DEFAULT_RULES, Rules


def run_rules(changes: Mapping[str, Any]) -> Rules:
    """DEFAULT_RULES with those of a config in their place, as `sharding.make_rules` reads them.

    Raises ValueError for a logical axis that no array has, and a value that is no mesh axis, tuple
    of mesh axes or None.
    """
    for name, axes in changes.items():
        listed = (axes,) if axes is None or isinstance(axes, str) else axes
        if not isinstance(listed, tuple | list) or not all(
            a is None or isinstance(a, str) for a in listed
        ):
            raise ValueError(
                f'config.rules.{name} is {axes!r}; legal is a mesh axis, several in a tuple, or '
                'None for none'
            )
    kept = dict(DEFAULT_RULES)
    if 'heads' in changes:
        del kept['kv_heads']  # it follows, or is given too
    try:
        return sharding.make_rules(kept | dict(changes))
    except ValueError as error:
        raise ValueError(f'config.{error}') from error


def run_mesh(
    axes: Sequence[tuple[str, int]] | None,
    rules: Rules,
    devices: Sequence[Any] | None = None,
    ahead: bool = False,
) -> Mesh | None:
    """Mesh of a run over its devices; None for a run on one, which needs no mesh.

    Args:
      axes: as `sharding.make_mesh` takes them; () for the first device alone; None for DEFAULT_MESH
        over accelerators and several processes, and for the first device on CPU, where more than
        one is no faster.
      rules: those of the run.
      devices: of the run; None for all. The first is that of a run on one.
      ahead: the devices are another machine's, to compile for: there is a mesh always, since it
        says what to compile for.

    Raises ValueError as `make_mesh` does, and for an axis of the mesh that no rule uses, or one of
    the rules that no mesh has, with the nearest spelling.
    """
    if axes is None:
        alone = jax.default_backend() == 'cpu' and not hosts.several() and not ahead
        axes = () if alone else DEFAULT_MESH
    sharding.check_axes('config.mesh', axes, rules)
    legal = {name for name, _ in (*DEFAULT_MESH, *axes)}
    for logical, wanted in rules:
        for name in wanted:
            if name not in legal:
                raise ValueError(
                    f'config.rules.{logical} names the mesh axis {name!r}, which config.mesh has '
                    f'not.{nearest(name, legal)}'
                )
    if not axes and hosts.several():
        raise ValueError(
            'config.mesh is (), one device, but there are several processes; legal are axes over '
            f'all {jax.device_count()} devices, or None'
        )
    if not axes and not ahead:
        return None
    try:
        if ahead:
            mine = devices if axes or devices is None else devices[:1]
            return sharding.make_mesh(axes or DEFAULT_MESH, mine)
        mesh = sharding.make_mesh(axes, devices)
    except ValueError as error:
        raise ValueError(f'config.{error}') from error
    return mesh if mesh.size > 1 else None


def check_gather(mesh: Mesh | None, model: Any) -> None:
    """Raise ValueError where the axes of rows hold no parts of weights that could be gathered."""
    rules = model.rules, sharding.gathered_rules(model.rules)
    placed = [
        None if mesh is None else sharding.param_shardings(model.axes(), model.shapes(), mesh, r)
        for r in rules
    ]
    if placed[0] == placed[1]:
        raise ValueError(
            'config.rollout.engine.gather is True, but no mesh axis splits rows and weights; legal '
            "is False, or a mesh with such an axis ('fsdp')"
        )


def check(
    mesh: Mesh | None,
    models: Iterable[Any],
    rows: Mapping[str, int],
    least: Mapping[str, int] | None = None,
    named: str = 'config.mesh',
) -> None:
    """Check that a mesh fits models and batches, before anything is compiled.

    Args:
      mesh: of the run; None passes.
      models: whose parameters it holds, all of the same rules.
      rows: by the name of what decides them, rows that go through a model at once.
      least: the same of rows that are rounded down to a number that divides.
      named: what decides the mesh, for errors.

    Raises ValueError where a parameter does not divide over its mesh axes, naming it; where rows do
    not divide, with what they are; and for a mesh axis that splits neither a parameter nor rows, so
    that its devices would all do the same.
    """
    if mesh is None:
        return
    sizes, used = dict(mesh.shape), set()
    for model in models:
        rules = model.rules
        placed = sharding.param_shardings(model.axes(), model.shapes(), mesh, rules)
        for leaf in jax.tree.leaves(placed):
            used |= {name for part in leaf.spec for name in _names(part)}
        batch = sharding.partition_spec(('batch',), rules, mesh)
        split = _names(batch[0]) if len(batch) else ()
        used |= set(split)
        shards = math.prod(sizes[name] for name in split)
        why = f'{shards}, the devices that {named} splits rows over ({", ".join(split)})'
        for what, count in rows.items():
            if count % shards:
                raise ValueError(f'{what} is {count}; legal are multiples of {why}')
        for what, count in (least or {}).items():
            if count < shards:
                raise ValueError(f'{what} is {count}; legal is at least {why}')
    for name, size in sizes.items():
        if size > 1 and name not in used:
            raise ValueError(
                f'{named} gives {size} devices to {name!r}, which splits no parameter of this '
                'model and no rows: they would all do the same. Legal is 1'
            )


def rows(c: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Rows that go through the model at once in a run of a `recipe.RunConfig`, for `check`."""
    r, least = c.rollout, {}
    each = r.prompts * r.group_size
    found = {'evaluation.batch': c.evaluation.batch, 'rollout.prompts * group_size': each}
    own = c.asynchronous is not None and c.asynchronous.devices is not None
    if r.engine is not None:
        found |= {} if own else {'rollout.engine.slots': r.engine.slots}
    else:
        found['rollout.prompts * group_size / chunks'] = each // r.chunks
    found['rollout.prompts * group_size / minibatches'] = each // c.minibatches
    if c.length_buckets is not None:
        budget, widths = c.length_buckets.token_budget, c.length_buckets.widths
        least['config.length_buckets.token_budget / the widest of widths'] = budget // widths[-1]
    else:
        rows = each // (c.minibatches * c.microbatches)
        found['rollout.prompts * group_size / (minibatches * microbatches)'] = rows
    if c.warm_start is not None:
        found['warm_start.batch'] = c.warm_start.batch
    return {f'config.{name}': count for name, count in found.items()}, least


def _names(part: Any) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())


def init(model: Any, key: jax.Array) -> Any:
    """Fresh parameters of a model, laid out on the ambient mesh by its rules."""
    if jax.sharding.get_abstract_mesh().empty:  # which may be asked while tracing, too
        return jax.jit(model.init)(key)
    mesh = jax.sharding.get_mesh()
    placed = sharding.param_shardings(model.axes(), model.shapes(), mesh, model.rules)
    return jax.jit(model.init, out_shardings=placed)(key)


def words(mesh: Mesh | None) -> str:
    """What a run runs on, to be printed."""
    if mesh is None:
        return jax.default_backend()
    sizes = ' x '.join(f'{name} {size}' for name, size in mesh.shape.items() if size > 1)
    return f'{mesh.size} devices ({jax.default_backend()}: {sizes})'
