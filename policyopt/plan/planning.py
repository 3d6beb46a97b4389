"""A config's programs planned for a topology: compiled or found, changed until they fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from policyopt import recipe, sharding
from policyopt.plan import hardware, measure, steps, store, suggest
from policyopt.plan.suggest import Change

TRIES = 6


def plan(
    config: Mapping[str, Any],
    topology: str,
    chosen: Sequence[str] = steps.STEPS,
    kept: store.Store | None = None,
    again: bool = False,
    check: bool = False,
) -> dict[str, dict[str, Any]]:
    """Step -> record of each program of a config, compiled for a topology or found in `kept`.

    A record has, beside what `measure` finds, a `label` (what was planned), `suggestion` where it
    does not fit, and what it came from, see `store`. One that other modules counted in is counted
    anew where its compiled program was kept.

    Args:
      config: as `recipe.prepare` takes it.
      topology: 'CHIP:SHAPE'.
      chosen: of steps.STEPS.
      kept: results of earlier calls, which those of this one are added to.
      again: compile those too whose result was kept.
      check: lower those whose modules have changed since, and compile the ones that come out as
        another program.

    Raises ValueError or TypeError for a wrong config or topology, RuntimeError without libtpu.
    """
    chip, found = hardware.chip_of(topology), {}
    keys = {step: store.key_of(config, topology, step) for step in chosen}
    for step, key in keys.items():
        record = None if kept is None or again else kept.get(key)
        if record is not None and kept is not None:
            if check:
                record = refreshed(config, topology, step, kept) or record
            if not check or store.fresh(record):
                found[step] = recounted(record, key, chip, kept)
    missing = [step for step in chosen if step not in found]
    if missing:
        setup = prepare(config, topology)
        programs = steps.programs(setup)
        # Of the modules that were imported, before they may change while a program compiles.
        made_by = {'source': store.source_hash(), 'versions': store.versions()}
        made_by['counted'] = store.count_hash()
        for step in missing:
            record, made = _compiled(programs[step], chip, setup.mesh)
            record |= {'label': label(setup, topology, step)} | made_by
            if not record['fits']:
                change = suggest.suggest(step, record['memory'], run_of(setup))
                record['suggestion'] = None if change is None else list(change)
            record = json.loads(json.dumps(record))  # as it comes back from a file
            if kept is not None:
                if made is not None:
                    kept.keep(keys[step], {'lowered': record['lowered'], **made._asdict()})
                kept.put(keys[step], record)
            found[step] = record
    return {step: found[step] for step in chosen}


def _compiled(
    program: steps.Program, chip: hardware.Chip, mesh: Any
) -> tuple[dict[str, Any], measure.Made | None]:
    """A program's record, and what it was counted from; None where it finds no memory."""
    began, made = time.monotonic(), None
    lowered = program.lower()
    text = hash_of(lowered)
    if sum(program.held.values()) > chip.hbm:
        return measure.too_large(program, chip) | {'lowered': text}, None
    try:
        made = measure.make(program, mesh, lowered)
    except Exception as error:  # of jax's runtime, whose class is not public
        record = measure.refused(program, error, chip)
    else:
        record = measure.describe(made, chip)
    return record | {'lowered': text, 'compile_seconds': time.monotonic() - began}, made


def hash_of(lowered: Any) -> str:
    """Of a program before it is compiled, and of what the compiler is told."""
    text = lowered.as_text()
    return store.text_hash(''.join([text, *map(str, measure.options_for(text).items())]))


def refreshed(
    config: Mapping[str, Any], topology: str, step: str, kept: store.Store
) -> dict[str, Any] | None:
    """The kept record where its program lowers to the same with the modules as they are, else None.

    It is kept anew as theirs, with its counts; nothing is compiled, and it takes seconds.

    Raises as `plan`.
    """
    key = store.key_of(config, topology, step)
    record = kept.get(key)
    if record is None or store.fresh(record):
        return record
    program = steps.programs(prepare(config, topology))[step]
    text = hash_of(program.lower())
    if record.get('lowered') != text or record['versions'] != store.versions():
        return None
    record['source'], stored = store.source_hash(), kept.made(key)
    if stored is not None and stored['lowered'] == text:
        kept.keep(key, stored | measure.inputs_of(program))
        record.pop('counted', None)  # loops and rows may be others
        return recounted(record, key, hardware.chip_of(topology), kept)
    kept.put(key, record)
    return record


def recounted(
    record: dict[str, Any], key: str, chip: hardware.Chip, kept: store.Store
) -> dict[str, Any]:
    """The record, counted by the modules as they are where its compiled program was kept."""
    if store.counted(record):
        return record
    made = kept.made(key)
    if made is None or made.pop('lowered') != record.get('lowered'):
        return record
    counts = measure.describe(measure.Made(**made), chip)
    record = record | json.loads(json.dumps(counts)) | {'counted': store.count_hash()}
    kept.put(key, record)
    return record


def prepare(config: Mapping[str, Any], topology: str) -> recipe.Setup:
    """The config's run on a topology; nothing is read of its problems and no weights."""
    return recipe.prepare(config, problems=False, devices=hardware.devices(topology))


def run_of(setup: recipe.Setup) -> dict[str, Any]:
    """What `suggest` looks at."""
    sizes = steps.sizes_of(setup.config)
    with jax.set_mesh(setup.mesh):
        shards = sharding.batch_shards(setup.model.rules)
    return {
        'remat': setup.model.config.remat,
        'rows': sizes.rows,
        'micro': sizes.micro,
        'slots': sizes.slots,
        'gather': sizes.gather,
        'mesh': dict(setup.mesh.shape),
        'batch_shards': shards,
        'kv_heads': setup.model.config.num_kv_heads,
    }


def label(setup: recipe.Setup, topology: str, step: str) -> dict[str, Any]:
    """What a record is of."""
    config, sizes, c = setup.model.config, steps.sizes_of(setup.config), setup.config
    replayed = config.moe is not None and c.replay.routing == 'rollout'
    moe = '' if config.moe is None else f', {config.moe.experts} experts'
    count = sum(x.size for x in jax.tree.leaves(setup.model.shapes()))
    return {
        'model': f'{count / 1e9:.1f}B{moe}',
        'parameters': count,
        'algorithm': c.algorithm.rpartition('.')[2] + (' + routing replay' if replayed else ''),
        'length': sizes.width,
        'topology': topology,
        'mesh': dict(setup.mesh.shape),
        'step': step,
        'remat': config.remat,
        'rows': {
            'train': sizes.rows, 'score': sizes.rows, 'prefill': sizes.prefill
        }.get(step, sizes.slots),
    }  # fmt: skip


def fit(
    config: Mapping[str, Any],
    topology: str,
    step: str,
    kept: store.Store | None = None,
    say: Callable[[str], None] = lambda text: None,
    again: bool = False,
    check: bool = False,
) -> tuple[dict[str, Any], list[Change], dict[str, Any]]:
    """Follow the suggestions until a program fits: the config then, the changes, its record.

    Ends after TRIES programs, or where nothing is left to try; the last record says whether it
    fits. `say` is called with each change; `kept`, `again` and `check` are as in `plan`.
    """
    config, changes = dict(config), []
    record = plan(config, topology, [step], kept, again, check)[step]
    while not record['fits'] and record.get('suggestion') and len(changes) < TRIES:
        change = Change(*record['suggestion'])
        if change.field == suggest.SLICE:
            break  # for whoever chose the slice
        say(f'{step}: {change.field} = {change.value} ({change.why})')
        changes.append(change)
        config = suggest.apply(config, change, record['label']['mesh'])
        record = plan(config, topology, [step], kept, again, check)[step]
    return config, changes, record
