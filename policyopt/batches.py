"""Saved batches: what a training run writes and the tools around it read, as .npz files.

A batch holds the log-probs and advantages of one rollout as the learner saw them, for calibration.
A minibatch holds all that one update read, to look at, and where it comes from. Numpy only.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policyopt import checks, disk

_REQUIRED = ('logp_new', 'logp_old', 'mask', 'advantages')
_FLOATS = ('logp_new', 'logp_old', 'advantages', 'logp_behavior')
_ROWS = ('minibatch', 'rewards', 'group', 'positive')  # [B]; the others are [B,T]
FIELDS = (*_REQUIRED, 'logp_behavior', *_ROWS)
_ORIGIN = 'origin'
_INSPECTED = ('mask', 'tokens', 'advantages', 'logp_old')


class BatchError(ValueError):
    """A batch that can't be used; the message names the file, the field and what is legal."""


class Origin(NamedTuple):
    """Where a minibatch comes from.

    Attributes:
      step: RL step, from 1.
      epoch: pass over the step's rows, from 1; 0 where nothing could be sampled to learn from.
      minibatch: of the pass, from 1; 0 likewise.
      params: digest of the policy's parameters that the update saw; None where it isn't known.
      controllers: name -> value of the adaptive coefficients that the loss read.
      config: of the run, field -> value.
    """

    step: int
    epoch: int
    minibatch: int
    params: int | None
    controllers: Mapping[str, float]
    config: Mapping[str, Any]


def save_batch(path: str | os.PathLike, **arrays: Any) -> Path:
    """Write a batch as .npz, whole or not at all; returns the path.

    Args:
      path: name ending in .npz; folders are made. An existing file is replaced.
      **arrays: required `logp_new`, `logp_old`, `mask` [B,T], `advantages` [B,T] or [B]; optional
        `minibatch` [B] int (which optimizer minibatch of its rollout a row was in, from 1),
        `rewards`, `group`, `positive` [B], `logp_behavior` [B,T]. None is left out.

    Raises:
      BatchError: a field is missing, unknown, or of the wrong shape or dtype.
    """
    path = _npz(path)
    return _write(path, check_batch(arrays, str(path)))


def save_minibatch(path: str | os.PathLike, origin: Origin, **arrays: Any) -> Path:
    """Write a minibatch as .npz, whole or not at all; returns the path.

    Args:
      path: name ending in .npz; folders are made. An existing file is replaced.
      origin: where it comes from.
      **arrays: the fields of a `types.TokenBatch`, with what the loss saw as `logp_new`; of any
        content, NaN included. None is left out.

    Raises BatchError for another name.
    """
    found = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    return _write(_npz(path), {**found, _ORIGIN: np.asarray(json.dumps(origin._asdict()))})


def load_minibatch(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], Origin]:
    """Read what `save_minibatch` wrote: name -> array, and where it comes from.

    Raises BatchError for a file that is not there, not whole, or of another kind.
    """
    arrays = _read(Path(path))
    try:
        origin = Origin(**json.loads(str(arrays.pop(_ORIGIN))))
    except (KeyError, TypeError, ValueError):
        kind = 'a batch for policyopt.calibrate' if 'advantages' in arrays else 'another .npz file'
        raise BatchError(
            f'{path}: {kind}, with no record of where it comes from; legal is a minibatch that '
            'policyopt.train saved, batches/update_*.npz (--save_batches) or offending_*.npz'
        ) from None
    shape = arrays['mask'].shape if 'mask' in arrays else None
    for name in _INSPECTED:
        if name not in arrays or arrays[name].shape != shape:
            raise BatchError(f'{path}: field `{name}` is missing or not of the shape of `mask`')
    return arrays, origin


def _npz(path: str | os.PathLike) -> Path:
    if Path(path).suffix != '.npz':
        raise BatchError(f'{path}: the name of a batch ends in .npz')
    return Path(path)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.whole(path) as partial, open(partial, 'wb') as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    return path


def load_batch(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Read what `save_batch` wrote: name -> array. Raises BatchError naming file and field."""
    return check_batch(_read(Path(path)), str(path))


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise BatchError(f'{path}: no such file')
    if not zipfile.is_zipfile(path):
        raise BatchError(f'{path}: not a readable .npz file')
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise BatchError(f'{path}: not a readable .npz file ({error})') from None


def find_batch(path: str | os.PathLike) -> Path:
    """A file as it is; for a folder, the newest batch_*.npz in it or in its batches/ folder.

    Newest by time of modification, then by name. Raises BatchError where there is none.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    found = [p for folder in (path, path / 'batches') for p in folder.glob('batch_*.npz')]
    if not found:
        raise BatchError(f'{path}: no batch_*.npz in this folder or in its batches/ folder')
    return max(found, key=lambda p: (p.stat().st_mtime_ns, p.name))


def check_batch(arrays: Mapping[str, Any], where: str = 'batch') -> dict[str, np.ndarray]:
    """Fields that are not None as numpy arrays of the right shape and dtype; BatchError if not.

    Log-probs and advantages must be finite where the mask is nonzero; elsewhere anything may stand.

    Args:
      arrays: name -> array, as `save_batch` takes them.
      where: what to call the batch in errors.
    """
    for name in arrays:
        if name not in FIELDS:
            raise BatchError(f'{where}: unknown field `{name}`.{checks.nearest(name, FIELDS)}')
    found = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    for name in _REQUIRED:
        if name not in found:
            raise BatchError(f'{where}: field `{name}` is missing. Present: {", ".join(found)}.')
    shape = found['logp_new'].shape
    if len(shape) != 2:
        raise BatchError(f'{where}: `logp_new` must be [B,T], got shape {shape}')
    for name, x in found.items():
        legal: list[tuple[int, ...]] = [shape[:1]] if name in _ROWS else [shape]
        if name == 'advantages':
            legal.append(shape[:1])
        if x.shape not in legal:
            want = ' or '.join(map(str, legal))
            raise BatchError(f'{where}: `{name}` has shape {x.shape}, legal is {want}')
        kinds, want = ('f', 'float32 or float64') if name in _FLOATS else ('biuf', 'a number type')
        if x.dtype.kind not in kinds:
            raise BatchError(f'{where}: `{name}` is {x.dtype}, legal is {want}')
    mask = found['mask'] != 0
    for name in (name for name in found if name in _FLOATS):
        bad = ~np.isfinite(per_token(found[name], mask)) & mask
        if bad.any():
            row, token = np.argwhere(bad)[0]
            raise BatchError(f'{where}: `{name}` is not finite at row {row}, token {token}')
    if 'minibatch' in found and (low := found['minibatch'].min(initial=1)) < 1:
        raise BatchError(f'{where}: `minibatch` counts from 1, found {low}')
    return found


def per_token(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[B] or [B,T] as the mask's [B,T]."""
    return np.broadcast_to(x[:, None] if x.ndim == 1 else x, mask.shape)


def log_ratio(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """logp_new - logp_old of a checked batch: [B,T] float64, 0 off-mask."""
    keep = batch['mask'] != 0
    new, old = (np.where(keep, batch[k], 0).astype(np.float64) for k in ('logp_new', 'logp_old'))
    return new - old


def solve_rates(batch: Mapping[str, Any]) -> np.ndarray:
    """Share of right answers of each prompt of a batch: [groups].

    From `positive`, or from `rewards` where they take exactly two values, the larger one being
    right; rows without a reward (NaN) are left out. Raises BatchError without these or `group`.
    """
    batch = check_batch(batch)
    if 'group' not in batch:
        raise BatchError('solve rates need the field `group`')
    rewards = np.asarray(batch.get('positive', batch.get('rewards', ())), np.float64)
    keep = ~np.isnan(rewards)
    if 'positive' in batch:
        right = rewards != 0
    else:
        values = np.unique(rewards[keep])
        if values.size != 2:
            raise BatchError('solve rates need the field `positive`, or rewards of two values')
        right = rewards == values[1]
    _, index, times = np.unique(batch['group'][keep], return_inverse=True, return_counts=True)
    return np.bincount(index, weights=right[keep]) / times
