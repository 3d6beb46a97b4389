"""Parameters of a checkpoint, for tools that look at a run: its folder is left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from policyopt import checkpoint


def peek(workdir: Path, step: int) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint of at most `step`, or else the oldest: its step and its parameters.

    For tools: a run may be at work in the folder, which is left as it is. Arrays are numpy's, and
    not compared with the checkpoint's fingerprint.

    Returns None without a checkpoint; else {'params': of the policy, 'critic': of a critic's own
    trunk, or None}. Raises CheckpointError for one that can't be read.
    """
    folder = (workdir / checkpoint.FOLDER).resolve()
    steps = sorted(int(path.name) for path in folder.glob('*') if path.name.isdigit())
    if not steps:
        return None
    chosen = max((s for s in steps if s <= step), default=steps[0])
    path = folder / str(chosen) / 'state'
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree['train']  # type: ignore[index]
            critic = (tree.get('critic') or {}).get('params')
            item = {'params': tree['params']} | ({'critic': {'params': critic}} if critic else {})
            args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
            train = checkpointer.restore(
                path,
                args=ocp.args.PyTreeRestore(
                    item={'train': item}, restore_args={'train': args}, partial_restore=True
                ),
            )['train']
    except Exception as error:
        why = ' '.join(str(error).split())[:200]
        raise checkpoint.CheckpointError(
            f'{path.parent}: its arrays can not be read ({type(error).__name__}: {why})'
        ) from error
    return chosen, {'params': train['params'], 'critic': train.get('critic', {}).get('params')}
