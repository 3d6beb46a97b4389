"""Reward models: a scalar head on a trunk; what scores a row, and what scores are like."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import models, sharding
from policyopt.models import Model, hf
from policyopt.rewards import Calibration, Case
from policyopt.rewards.scored import TEMPLATE, read_calibration
from policyopt.types import Array

FOLDER = 'reward_model'  # of a run that trains one
LEAST = 16  # width of the narrowest bucket


class RewardModel(NamedTuple):
    """A model with a reward head, its parameters, and what its scores are like, where known."""

    model: Model
    params: Any
    calibration: Calibration | None = None


def load(path: str | Path, mesh: Any = None, rules: Any = None) -> RewardModel:
    """A reward model from a folder, onto a mesh by the rules.

    Raises ValueError as `check_folder` and `models.load` do.
    """
    check_folder(path)
    model, params = models.load(path, mesh=mesh, rules=rules)
    if model.tokenizer is None:
        raise ValueError(f'{path} has no tokenizer')
    return RewardModel(model, params, read_calibration(path))


def check_folder(path: str | Path) -> None:
    """Raise ValueError where a folder has no model with a reward head; no parameter is read."""
    folder, data = Path(path), {}
    if (folder / 'config.json').exists():
        data = json.loads((folder / 'config.json').read_text())
    if 'model_type' not in data:
        own = folder / FOLDER
        hint = f'; the one of this run is {own}' if own.is_dir() else ''
        raise ValueError(
            f'{path!s} is no reward model: no config.json of a model is there; legal is a folder '
            f'that `python -m policyopt.train_reward` wrote, or a Hugging Face one{hint}'
        )
    if not hf.read_config(data).reward_head:
        raise ValueError(
            f'{path} has no reward head (a tensor `score.weight`); legal is what `python -m '
            'policyopt.train_reward` writes, or a *ForSequenceClassification of one label'
        )


@functools.lru_cache(maxsize=16)  # so that equal models share their programs
def make_score(model: Model, every: bool = False) -> Callable[[Any, Any, Any], Array]:
    """Build score(params, tokens [B,T] int, length [B] int) -> float32 scores, jitted.

    The score of the last of each row's `length` tokens, [B]; with `every`, that of each token,
    [B,T], which means nothing past the length. The head is computed in float32.
    """

    @jax.jit
    def score(params: Any, tokens: Array, length: Array) -> Array:
        chex.assert_rank([tokens, length], [2, 1])
        valid = jnp.arange(tokens.shape[1]) < length[:, None]
        hidden = model.hidden(params, tokens, valid=valid).hidden
        if every:
            rows = hidden.reshape(-1, 1, hidden.shape[-1])
            found = model.reward(params, rows).reshape(valid.shape)
        else:
            found = model.reward(params, hidden, length)
        return sharding.constrain(found, (None,) * found.ndim)  # whole on every host

    return score


def width_of(length: int) -> int:
    """The width that a row of this length is padded to: the next LEAST * 2^i."""
    return LEAST * 2 ** max(0, math.ceil(math.log2(max(length, 1) / LEAST)))


def pad(rows: Sequence[Sequence[int]], count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as tokens [count, width] and length [count], filled up with empty rows."""
    tokens, length = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], length[i] = row, len(row)
    return tokens, length


def scores(model: Model, params: Any, rows: Sequence[Sequence[int]], batch: int) -> np.ndarray:
    """Scores [N] of rows of ids, at most `batch` of one width at a time; waits for them."""
    score, out = make_score(model), np.zeros(len(rows), np.float32)
    order = sorted(range(len(rows)), key=lambda i: (width_of(len(rows[i])), i))
    for width in dict.fromkeys(width_of(len(rows[i])) for i in order):
        at = [i for i in order if width_of(len(rows[i])) == width]
        for start in range(0, len(at), batch):
            part = at[start : start + batch]
            found = score(params, *pad([rows[i] for i in part], batch, width))
            out[part] = np.asarray(found)[: len(part)]
    return out


def calibrate(found: np.ndarray, true: np.ndarray | None = None) -> Calibration:
    """What scores [N] are like, and the least-squares line to true rewards [N], where known.

    Raises ValueError where the scores do not vary.
    """
    found = np.asarray(found, np.float64)
    mean, std = float(found.mean()), float(found.std())
    if not std > 0:
        raise ValueError(f'all {len(found)} scores are {mean}: there is no scale to measure')
    if true is None:
        return Calibration(len(found), mean, std)
    true = np.asarray(true, np.float64)
    slope = float(np.mean((found - mean) * (true - true.mean())) / std**2)
    return Calibration(len(found), mean, std, slope, float(true.mean() - slope * mean))


# ============================================================================ rows


def same_ids(a: Any, b: Any) -> bool:
    """Whether two tokenizers have the same ids, by what each id stands for."""
    if a is b:
        return True
    if a.vocab_size != b.vocab_size or a.eos_id != b.eos_id:
        return False
    return all(a.decode([i]) == b.decode([i]) for i in range(a.vocab_size))


def make_rows(own: Any, policy: Any, template: str, path: str) -> Callable[[Case], list[int]]:
    """Build row(case) -> ids of prompt and answer for a reward model.

    With the policy's tokenizer these are the very ids that were drawn, end of sequence included;
    with another, those of the template's text.

    Args:
      own, policy: tokenizers of the reward model and of the policy.
      template: see `rewards.reward_model`.
      path: of the model, for errors.

    Raises ValueError for a template that would have no effect.
    """
    if same_ids(own, policy):
        if template != TEMPLATE:
            raise ValueError(
                f"template={template!r} has no effect: {path} has the policy's tokenizer, and gets "
                'its ids; leave it out'
            )
        return lambda case: [*case.prompt_ids, *case.tokens]
    return lambda case: own.encode(template.format(prompt=case.prompt, answer=case.text))
