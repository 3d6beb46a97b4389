"""Aggregate slot: (mask [B,T], group [B]) -> weights [B,T]; loss = sum(weights * token_loss).

Weights are computed once on the whole optimizer minibatch, from mask and group alone, so splitting
it into microbatches, padding it wider, permuting rows or sharding it changes nothing. A row without
a policy token counts in no denominator. n_i is the number of policy tokens of row i.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax.numpy as jnp

from policyopt import checks, masked
from policyopt.types import Array

Aggregate = Callable[[Array, Array | None], Array]


def _ones(mask: Array) -> Array:
    chex.assert_rank(mask, 2)
    return jnp.asarray(mask != 0, jnp.result_type(float))


def _rows(mask: Array) -> Array:
    """Rows with a policy token, at least 1."""
    return jnp.maximum(masked.count(masked.count(mask), axis=None), 1)


@checks.factory('aggregate')
def token_mean() -> Aggregate:
    """1 / sum_i n_i: every token of the minibatch counts the same (DAPO 2503.14476)."""
    return lambda mask, group=None: _ones(mask) / jnp.maximum(masked.count(mask, axis=None), 1)


@checks.factory('aggregate')
def sequence_mean() -> Aggregate:
    """1 / (rows n_i): every row counts the same (GRPO 2402.03300)."""

    def weights(mask: Array, group: Array | None = None) -> Array:
        del group
        return _ones(mask) / jnp.maximum(masked.count(mask), 1)[:, None] / _rows(mask)

    return weights


@checks.factory('aggregate')
def prompt_mean() -> Aggregate:
    """1 / (prompts * tokens of the row's prompt): every prompt counts the same, token by token."""

    def weights(mask: Array, group: Array | None = None) -> Array:
        if group is None:
            raise ValueError('prompt_mean needs `group`, the prompt id of every row')
        chex.assert_shape(group, mask.shape[:1])
        n = masked.count(mask)
        tokens = masked.group_sum(n, n, group)
        rows = masked.group_sum(jnp.ones_like(n), n, group)
        # Each prompt's rows with a token share one unit, so that the sum counts prompts.
        prompts = jnp.sum(masked.select(n, masked.safe_divide(jnp.ones_like(n), rows)))
        return _ones(mask) / jnp.maximum(tokens, 1)[:, None] / jnp.maximum(prompts, 1)

    return weights


@checks.factory('aggregate')
def constant_length(length: float) -> Aggregate:
    """1 / (rows * length): token sum over a constant budget (Dr.GRPO 2503.20783).

    Args:
      length: tokens; the generation budget, not the padded width, or padding would matter.
    """
    checks.number('length', length, 1)
    return lambda mask, group=None: _ones(mask) / (_rows(mask) * length)


@checks.factory('aggregate')
def sequence_sum() -> Aggregate:
    """1 / rows: the token sum of a row, mean over rows."""
    return lambda mask, group=None: _ones(mask) / _rows(mask)
