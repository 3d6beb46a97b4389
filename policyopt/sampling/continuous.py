"""`sample` by a slot engine: the same rows, and no step spent on those that ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyopt.sampling.config import (
    EngineConfig,
    Finish,
    PerRow,
    RowErrors,
    SamplingConfig,
    prompt_error,
)
from policyopt.sampling.decode import OnError
from policyopt.sampling.engine import Engine
from policyopt.sampling.environments import Environment
from policyopt.sampling.rows import Buffers, Row
from policyopt.sampling.rules import Constraint
from policyopt.sampling.stats import Stats
from policyopt.types import Array, Rollout


def sample_continuous(
    model: Any,
    params: Any,
    prompts: Sequence[Sequence[int]] | tuple[Any, Any] | None,
    key: Array,
    config: SamplingConfig,
    *,
    engine: EngineConfig | None = None,
    version: int = 0,
    per_row: PerRow | None = None,
    constraint: Constraint | None = None,
    environments: Sequence[Environment | None] | None = None,
    on_error: OnError = 'raise',
    ended: Callable[[int, Row], Any] | None = None,
    done: Callable[[Stats], Any] | None = None,
) -> Rollout:
    """`sampling.sample` by a slot engine: same arguments, same rows, no step spent on ended rows.

    Args:
      engine: sizes; see EngineConfig.
      environments: one per row, None for rows without; rewards and segment_rewards are then
        filled. Where prompts are None, their `reset` gives them.
      ended: called with each row's number and record as it ends, while others go on.
      done: called at the end with what the engine did.
      The others: as in `sample`.

    Returns:
      A Rollout of width engine.size, or longest prompt + max_new_tokens where that is None; row b
      is prompt b.

    Raises as `sample`.
    """
    engine = EngineConfig() if engine is None else engine
    errors: dict[int, str] = {}
    if isinstance(prompts, tuple) and len(prompts) == 2 and np.ndim(prompts[0]) == 2:
        tokens, length = jax.device_get(prompts)
        width = tokens.shape[1]
        found = {b: prompt_error(range(max(n, 0)), width) for b, n in enumerate(length.tolist())}
        errors = {b: error for b, error in found.items() if error is not None}
        prompts = [
            [] if b in errors else row[:n].tolist()
            for b, (row, n) in enumerate(zip(tokens, length.tolist(), strict=True))
        ]
    else:
        width = max([1, *map(len, prompts or ())])
    if engine.size is None:
        if environments is not None:
            raise ValueError('engine.size is None; rows of environments need a length')
        engine = dataclasses.replace(engine, size=width + config.max_new_tokens)
    slots = Engine(model, config, engine, constraint=constraint)
    ids = slots.submit(prompts, key, per_row=per_row, environments=environments)
    rows: dict[int, Row] = {}
    while slots.busy:
        for row in slots.step(params, version):
            rows[row.id] = row
            if ended is not None:
                ended(row.id, row)
    if done is not None:
        done(slots.stats)
    ordered = [rows[i] for i in ids]
    rollout = to_rollout(ordered, engine.size)  # type: ignore[arg-type]
    for i, row in enumerate(ordered):
        if row.error is not None:
            errors.setdefault(i, row.error)
    if errors and on_error == 'raise':
        raise RowErrors(dict(sorted(errors.items())), rollout)
    return rollout


def to_rollout(rows: Sequence[Row], width: int) -> Rollout:
    """A Rollout of rows that an engine returned, padded to `width`, in the order given."""
    data = {
        name: stack_padded([row.data[name] for row in rows], width, fill)  # type: ignore[index]
        for name, fill in Buffers.FILL.items()
        if rows[0].data[name] is not None  # type: ignore[index]
    }
    finish = np.array([row.finish for row in rows], np.int32)
    judged = any(row.environment is not None for row in rows)
    if not judged:
        data.pop('segment_rewards')
    return Rollout(
        **{name: jnp.asarray(x) for name, x in data.items()},
        length=jnp.array([row.length for row in rows], jnp.int32),
        prompt_length=jnp.array([row.prompt_length for row in rows], jnp.int32),
        rewards=jnp.array([row.reward for row in rows], jnp.float32) if judged else None,
        truncated=jnp.asarray(finish == Finish.LENGTH),
        finish=jnp.asarray(finish),
    )


def stack_padded(arrays: Sequence[np.ndarray], width: int, fill: float) -> np.ndarray:
    """Arrays [n_b,...] as one [B,width,...]."""
    out = np.full((len(arrays), width, *arrays[0].shape[1:]), fill, arrays[0].dtype)
    for i, x in enumerate(arrays):
        out[i, : len(x)] = x
    return out
