"""Checkpoints of a run: atomic, written while training goes on, checked before they are trusted.

A checkpoint is what the rest of the run is a function of: the train state, the reference policy,
answers that nothing has learned from yet, and `Progress`, the host's side. It lies in
`checkpoints/STEP` under the run's folder, STEP being the RL steps done; the end of the warm start
is step 0. It appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from policyopt import checks, disk, hosts, settings
from policyopt.bits import abstract, crc, fingerprint, like, plain
from policyopt.state import TrainState

SCHEMA = 1  # of what `Checkpoints.save` writes; raised whenever an older reader would misread it
FOLDER, DAMAGED = 'checkpoints', 'damaged'

# Fields of the config that may change between a checkpoint and its resume: those that say how work
# is split, over devices too, change numbers by rounding; the others what happens from there on.
OWN = ('asynchronous.devices', 'asynchronous.mesh')
SPLITS = ('microbatches', 'length_buckets', 'rollout.chunks', 'mesh', 'rules', *OWN)
FREE = ('steps', 'max_skipped', 'evaluation', 'checkpoint', 'judge', *SPLITS)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved.

    Attributes:
      every: RL steps between checkpoints; the end of the warm start, the last step and SIGTERM save
        as well. None or 0 for no checkpoint at all: such a run can't be resumed.
      keep: newest checkpoints that are kept; 2 or more leave one to fall back on.
    """

    every: int | None = 25
    keep: int = 2

    def __post_init__(self):
        checks.number('checkpoint.every', self.every or 0, 0)
        checks.number('checkpoint.keep', self.keep, 1)


class CheckpointError(ValueError):
    """A checkpoint that can't be written or used; the message says why, and what to do."""


class Progress(NamedTuple):
    """The host's side of a checkpoint.

    Attributes:
      step: RL steps done.
      source: state of the iterator over problems.
      records: bytes of the metrics file.
      skipped: skipped updates in a row, up to now.
      notes: what the report at the end needs from before; JSON.
    """

    step: int
    source: Any
    records: int
    skipped: int = 0
    notes: Any = None


class Saved(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      train: the train state.
      reference: parameters of the reference policy; None where no term reads one.
      progress: the host's side.
      rollouts: answers under way or not yet learned from, as arrays; None without any.
    """

    train: TrainState
    reference: Any
    progress: Progress
    rollouts: Mapping[str, np.ndarray] | None = None


# ============================================================================ the folder


def breaks(difference: str, free: Iterable[str] = FREE) -> bool:
    """Whether what `settings.differences` says is of a field outside `free` and its sections."""
    field = difference.partition(':')[0].removeprefix('config.')
    return not any(field == name or field.startswith(name + '.') for name in free)


class Checkpoints:
    """The checkpoints of one run, as a context manager that waits for the last one at its end.

    Args:
      workdir: folder of the run.
      keep: how many are kept.
      config: the run's, a dataclass with `steps`; written into each checkpoint and compared with
        those found.
      also: steps whose checkpoints are kept, too, however old.
      origins: what the run's problems come from (`data.Task.origins`); likewise compared.
    """

    def __init__(
        self,
        workdir: Path,
        keep: int,
        config: Any,
        also: Sequence[int] = (),
        origins: Mapping[str, str] | None = None,
    ):
        self.folder = (workdir / FOLDER).resolve()
        self.workdir, self._config, self._steps = workdir, settings.flat(config), config.steps
        self._origins = dict(origins or {})
        self._last: int | None = None  # step that was saved last
        lib = ocp.checkpoint_managers
        kept = lib.AnyPreservationPolicy([lib.LatestN(keep), lib.CustomSteps(steps=tuple(also))])
        with _explained(f'{self.folder} could not be opened'):
            hosts.by_first(lambda: _sweep(self.folder))
            self._manager = ocp.CheckpointManager(
                self.folder,
                item_names=('state', 'meta', 'rollouts'),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=kept,
                    # Else threads of a failed save hold the process for minutes at its end.
                    async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
                ),
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        failed = None
        for finish in (self.wait, self._close):
            try:
                finish()
            except CheckpointError as why:
                failed = failed or why
        if failed is not None and kind is None:
            raise failed

    def _close(self) -> None:
        with _explained(f'{self.folder} could not be closed'):
            self._manager.close()

    def steps(self) -> list[int]:
        """RL steps of the checkpoints that are whole, oldest first."""
        return sorted(self._manager.all_steps())

    def wait(self) -> None:
        """Return when all that was saved is on disk; CheckpointError where it can't be."""
        with _explained(f'step {self._last} could not be written to {self.folder}'):
            self._manager.wait_until_finished()

    def save(
        self,
        train: TrainState,
        reference: Any,
        progress: Progress,
        rollouts: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Start to save, unless this step is there: arrays are copied now, written meanwhile.

        Args:
          train, reference, progress: as in Saved.
          rollouts: the host's arrays, of any shapes.

        Raises CheckpointError where this save or the one before failed; those before it stay.
        """
        self.wait()
        if progress.step in self.steps():
            return
        self._last = progress.step
        arrays = plain({'train': train, 'reference': reference})
        meta = {
            'config': self._config,
            'origins': self._origins,
            'progress': progress._asdict(),
            'fingerprint': fingerprint(arrays),
            'jax': jax.__version__,
            'devices': f'{jax.device_count()} {jax.default_backend()}',
        }
        items: dict[str, Any] = {'state': ocp.args.StandardSave(arrays)}
        if rollouts is not None:
            rollouts = {name: x for name, x in rollouts.items() if x.size}  # which orbax wants
            meta['rollouts'] = {
                'crc': crc(rollouts),
                'arrays': {name: [x.dtype.name, list(x.shape)] for name, x in rollouts.items()},
            }
            if rollouts:
                items['rollouts'] = ocp.args.StandardSave(rollouts)
        with _explained(f'step {progress.step} could not be written to {self.folder}'):
            self._manager.save(
                progress.step,
                args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(_sealed(meta))),
            )

    def check(self) -> None:
        """Compare the config with that of the newest checkpoint that tells; no array is read.

        Raises CheckpointError for another schema, for a config that differs in a field outside
        `FREE`, with all such fields and both their values, and for problems of another origin.
        """
        for step in reversed(self.steps()):
            try:
                meta = self._meta(step)
            except _Damaged:
                continue  # `restore` says so
            # All processes read it, as orbax wants; one says what changed.
            return self._check(step, meta, print if hosts.first() else lambda text: None)
        return None

    def restore(self, template: Callable[[], Any]) -> Saved:
        """The newest checkpoint whose arrays are what was saved.

        A damaged one, or a foreign one, is moved to `damaged/` with a message, and the one before
        it is used.

        Args:
          template: () -> (TrainState, reference) of arrays like those saved, which say shapes,
            dtypes and layout; the mesh may be another than at the save.

        Raises CheckpointError where none is usable, and as `check` does.
        """
        wanted = template()
        bad: list[tuple[int, str]] = []
        for step in reversed(self.steps()):
            try:
                meta = self._meta(step)
                self._check(step, meta, lambda text: None)
                train, reference = self._arrays(step, meta, wanted)
                rollouts = self._rollouts(step, meta)
            except _Damaged as error:
                if hosts.several():  # others may have read it: they would not follow to another
                    raise CheckpointError(
                        f'the checkpoint of step {step} in {self.folder} is not usable: {error}. '
                        'One process alone, without --multihost, moves it aside'
                    ) from error
                bad.append((step, str(error)))
                print(f'the checkpoint of step {step} is not usable: {error}', flush=True)
                continue
            self._set_aside([step for step, _ in bad])
            return Saved(train, reference, Progress(**meta['progress']), rollouts)
        raise CheckpointError(
            f'no checkpoint in {self.folder} is usable ('
            + '; '.join(f'step {step}: {why}' for step, why in bad)
            + f'). Move {self.workdir} elsewhere to start over, or put a good copy of a '
            'checkpoint there'
        )

    def _meta(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        try:
            args = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta = self._manager.restore(step, args=args)['meta']
        except Exception as error:
            raise _Damaged(f'it has no readable description ({disk.short(error)})') from error
        return _unsealed(meta, self.folder / str(step))

    def _check(self, step: int, meta: Mapping[str, Any], say: Callable[[str], Any]) -> None:
        changed = settings.differences(meta['config'], self._config)
        if broken := [x for x in changed if breaks(x)]:
            raise CheckpointError(
                f'{self.workdir} holds an unfinished run of another config (checkpoint at step '
                f'{step}); these fields differ, old -> new:\n  '
                + '\n  '.join(broken)
                + '\nPut them back to go on with it. To start over, name another --workdir or move '
                'this one'
            )
        if self._steps < step:
            raise CheckpointError(
                f'config.steps is {self._steps}, but the checkpoint in {self.workdir} has done '
                f'{step}; legal is {step} or more, or another --workdir'
            )
        for name, old in meta.get('origins', {}).items():
            new = str(self._origins.get(name, old))
            if new != old:
                raise CheckpointError(
                    f'{name} is not what the run in {self.workdir} began with: {old[:16]} -> '
                    f'{new[:16]}. Put the old one back to go on with it. To start over, name '
                    'another --workdir or move this one'
                )
        for line in changed:
            rounding = '' if breaks(line, SPLITS) else ' (numbers agree to rounding)'
            say(f'resumed with another setting: {line}{rounding}')
        here = {'jax': jax.__version__, 'devices': f'{jax.device_count()} {jax.default_backend()}'}
        for name, value in here.items():
            if meta.get(name) != value:
                say(f'saved with {name} {meta.get(name)}, now {value}: bits may differ')

    def _arrays(self, step: int, meta: Mapping[str, Any], wanted: Any) -> tuple[Any, Any]:
        """Arrays of a checkpoint, compared with its fingerprint."""
        names = ('train', 'reference')
        arrays = self._read(step, meta, abstract(plain(dict(zip(names, wanted, strict=True)))))
        return like(tuple(arrays[name] for name in names), wanted)

    def _rollouts(self, step: int, meta: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """The host's arrays of a checkpoint, compared with their digest."""
        known = meta.get('rollouts')
        if known is None:
            return None
        wanted = {name: np.zeros(shape, dtype) for name, (dtype, shape) in known['arrays'].items()}
        found = wanted
        if wanted:
            try:
                args = ocp.args.Composite(rollouts=ocp.args.StandardRestore(wanted))
                found = self._manager.restore(step, args=args)['rollouts']
            except Exception as error:
                raise _Damaged(f'its rollouts can not be read ({disk.short(error)})') from error
        found = {name: np.asarray(x) for name, x in found.items()}
        if crc(found) != known['crc']:
            raise _Damaged('its rollouts are not those that were saved')
        return found

    def _read(self, step: int, meta: Mapping[str, Any], wanted: Any) -> Any:
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
            arrays = self._manager.restore(step, args=args)['state']
        except Exception as error:
            raise _Damaged(f'its arrays can not be read ({disk.short(error)})') from error
        kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (arrays, wanted)]
        if kinds[0] != kinds[1] or fingerprint(arrays) != meta['fingerprint']:
            raise _Damaged('its arrays are not those that were saved')
        return arrays

    def _set_aside(self, steps: list[int]) -> None:
        """Move checkpoints out of the way of those to come."""
        for step in steps:
            number = 0
            while (aside := self.workdir / DAMAGED / f'{step}-{number}').exists():
                number += 1
            with _explained(f'{self.folder / str(step)} could not be moved to {aside}'):
                aside.parent.mkdir(exist_ok=True)
                shutil.move(self.folder / str(step), aside)
            print(f'moved it to {aside}', flush=True)
        if steps:
            self._manager.reload()


def _sweep(folder: Path) -> None:
    """Remove what a killed run, or a save that failed, had begun to write."""
    for path in folder.glob('*.orbax-checkpoint-tmp*'):
        for _ in range(40):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                break
            time.sleep(0.05)  # threads of a failed save may still write


class _Damaged(CheckpointError):
    """A checkpoint that is not used; why."""


def _sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a description: its text, a checksum of it, and the schema."""
    text = json.dumps(meta)
    return {'schema': SCHEMA, 'text': text, 'crc': zlib.crc32(f'{SCHEMA} {text}'.encode())}


def _unsealed(meta: Any, path: Path) -> dict[str, Any]:
    if not isinstance(meta, dict) or not isinstance(schema := meta.get('schema'), int):
        raise _Damaged('it was not written by policyopt')
    text, crc = meta.get('text'), meta.get('crc')
    sealed = schema == SCHEMA or text is not None
    if sealed and crc != zlib.crc32(f'{schema} {text}'.encode()):
        raise _Damaged('its description is not what was saved')
    if schema != SCHEMA:
        age = 'an older' if schema < SCHEMA else 'a newer'
        raise CheckpointError(
            f'{path} was written by {age} policyopt: its schema is {schema}, this one reads '
            f'{SCHEMA}. Go on with that version, or name another --workdir to start over'
        )
    return json.loads(str(text))


class _explained:  # noqa: N801, it reads as a phrase
    """Turns errors of the file system into CheckpointError, with what to do."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise CheckpointError(f'{self._what}: {disk.advice(error)}') from error
