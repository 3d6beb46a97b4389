"""One draw for every row of a sampler: keys, masks, limits, and why a row ends there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyopt.sampling import logits as logits_lib
from policyopt.sampling.config import (
    COLDEST,
    HOTTEST,
    Finish,
    PerRow,
    SamplingConfig,
    allowed_mask,
    check_config,
    check_greedy,
    eos_ids,
)
from policyopt.types import Array, struct


class Constraint(NamedTuple):
    """Which tokens a row may draw, as a function of what it drew: constrained decoding.

    The state is a pytree of arrays with a leading row axis. The functions are traced, so their
    identity decides what is compiled: make a constraint once.

    Attributes:
      init: rows -> state before the first draw; the same for every row, and blind to prompts.
      allowed: state -> [B,V] bool. A row without any allowed token ends in an error.
      advance: (state, token [B]) -> state after drawing these.
    """

    init: Callable[[int], Any]
    allowed: Callable[[Any], Array]
    advance: Callable[[Any, Array], Any]


def automaton(transitions: Any) -> Constraint:
    """Constraint of a finite automaton.

    Args:
      transitions: [S,V] int; the state that a token leads to, -1 where it may not be drawn. Every
        row starts in state 0.
    """
    table = np.asarray(transitions, np.int32)
    if table.ndim != 2 or table.max(initial=-1) >= len(table):
        raise ValueError(f'transitions {table.shape} must be [S,V], with entries below S')
    return Constraint(
        init=lambda rows: jnp.zeros(rows, jnp.int32),
        allowed=lambda state: jnp.asarray(table)[state] >= 0,
        advance=lambda state, token: jnp.maximum(jnp.asarray(table)[state, token], 0),
    )


class Static(NamedTuple):
    """What a sampler is compiled for.

    Attributes:
      size: K, None where not truncated.
      constraint: None without one.
    """

    size: int | None
    constraint: Constraint | None


@struct
class RowRules:
    """What each row is drawn with and how long; every array has a leading row axis.

    Attributes:
      params: temperature and truncation, [B] each.
      limit: [B] int32, tokens to draw at most.
      stop_ids: [B,n] int32, -1 pads.
      allowed: [B,V] bool, None where no row has a set of its own.
    """

    params: logits_lib.Params
    limit: Array
    stop_ids: Array
    allowed: Array | None


@struct
class Rules:
    """The rows' rules and those of the run.

    Attributes:
      rows: see RowRules.
      eos_ids: [n] int32.
      allowed: [V] bool, None where every token is.
      forced: scalar int32, the end of sequence that a limit forces; None where it does not.
    """

    rows: RowRules
    eos_ids: Array
    allowed: Array | None
    forced: Array | None


class Next(NamedTuple):
    """A draw, and how each row stands after it.

    Attributes:
      draw: see logits.Draw.
      finish: [B] int32, a Finish.
    """

    draw: logits_lib.Draw
    finish: Array


def make_rules(
    model: Any,
    config: SamplingConfig,
    rows: int,
    per_row: PerRow | None = None,
    constraint: Constraint | None = None,
) -> tuple[Static, Rules]:
    """Arrays of a config for `rows` rows, on the host.

    Raises ValueError naming field and row, the value and what is legal.
    """
    check_config(model, config)
    per_row = PerRow() if per_row is None else per_row
    if rows < 1:
        raise ValueError('there are no prompts; legal is 1 row or more')
    check_greedy(config, per_row)
    vocab_size = model.config.vocab_size
    size = config.size(vocab_size, per_row.truncated or constraint is not None)

    def array(name: str, default: Any, dtype: Any, low: float, high: float) -> Any:
        value = getattr(per_row, name)
        value = np.full(rows, default) if value is None else np.asarray(value)
        if value.shape != (rows,):
            raise ValueError(f'{name} has shape {value.shape}; legal is ({rows},)')
        bad = ~((value >= low) & (value <= high))
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(f'row {row}: {name} is {value[row]}; legal is {low:g} to {high:g}')
        return value.astype(dtype)

    tiny = float(np.finfo(np.float32).tiny)
    temperature = array('temperature', config.temperature, np.float32, 0, HOTTEST)
    _check_temperature(temperature)
    params = logits_lib.Params(
        temperature=temperature,
        top_k=array('top_k', config.top_k or 0, np.int32, 0, size or vocab_size),
        top_p=array('top_p', config.top_p, np.float32, tiny, 1),
        min_p=array('min_p', config.min_p, np.float32, 0, 1),
    )
    limit = array('max_new_tokens', config.max_new_tokens, np.int32, 1, config.max_new_tokens)
    ends = eos_ids(model, config)
    forced: Any = np.int32(ends[0]) if config.force_eos else None
    ended: Any = np.asarray(ends, np.int32)
    allowed: Any = allowed_mask(config, vocab_size)
    return Static(size, constraint), Rules(
        rows=RowRules(
            params=params,
            limit=limit,
            stop_ids=_stop_ids(config, per_row, rows, vocab_size),
            allowed=_row_allowed(per_row, rows, vocab_size),
        ),
        eos_ids=ended,
        allowed=allowed,
        forced=forced,
    )


def _check_temperature(values: np.ndarray) -> None:
    bad = (values > 0) & (values < np.float32(COLDEST))
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f'row {row}: temperature is {values[row]:g}; legal is 0 (greedy), or {COLDEST:g} to '
            f'{HOTTEST:g}'
        )


def _stop_ids(config: SamplingConfig, per_row: PerRow, rows: int, vocab_size: int) -> Any:
    shared = np.broadcast_to(np.asarray(config.stop_ids, np.int32), (rows, len(config.stop_ids)))
    if per_row.stop_ids is None:
        return np.ascontiguousarray(shared)
    own = np.asarray(per_row.stop_ids, np.int32)
    if own.ndim != 2 or len(own) != rows:
        raise ValueError(f'stop_ids has shape {own.shape}; legal is ({rows}, n)')
    bad = (own < -1) | (own >= vocab_size)
    if bad.any():
        row, at = np.argwhere(bad)[0]
        raise ValueError(
            f'row {row}: stop_ids has {own[row, at]}, which is no token; legal is 0 to '
            f'{vocab_size - 1}, or -1 for none'
        )
    return np.concatenate([shared, own], axis=1)


def _row_allowed(per_row: PerRow, rows: int, vocab_size: int) -> Any:
    if per_row.allowed is None:
        return None
    allowed = np.asarray(per_row.allowed, bool)
    if allowed.shape != (rows, vocab_size):
        raise ValueError(f'allowed has shape {allowed.shape}; legal is ({rows}, {vocab_size})')
    return allowed


def next_token(
    static: Static, rules: Rules, keys: Array, drawn: Array, state: Any, logits: Array
) -> Next:
    """Draw the next token of every row.

    The uniform number of a row depends on its key and on how many tokens it drew before, alone.

    Args:
      static, rules: as `make_rules` makes them.
      keys: [B], typed.
      drawn: [B] int32, tokens that each row has drawn so far.
      state: of the constraint, None without one.
      logits: [B,V].
    """
    rows = rules.rows
    last = drawn + 1 >= rows.limit
    uniform = logits_lib.uniforms(jax.vmap(jax.random.fold_in)(keys, drawn))
    masks = () if rows.allowed is None else (rows.allowed,)
    if static.constraint is not None:
        masks += (static.constraint.allowed(state),)
    draw = logits_lib.draw(
        logits,
        uniform,
        rows.params,
        size=static.size,
        allowed=rules.allowed,
        masks=masks,
        forced=None if rules.forced is None else (rules.forced, last),
    )
    token = draw.token[:, None]
    finish = jnp.where(last, Finish.LENGTH, Finish.RUNNING)
    finish = jnp.where(jnp.any(token == rows.stop_ids, axis=1), Finish.STOP, finish)
    ended = jnp.any(token == rules.eos_ids, axis=1)
    if rules.forced is not None:
        ended &= ~last  # the limit chose it, not the policy
    finish = jnp.where(ended, Finish.EOS, finish)
    finish = jnp.where(draw.fault != 0, Finish.ERROR, finish)
    return Next(draw, finish.astype(jnp.int32))


def fault_text(fault: int) -> str:
    """A fault of `logits.draw` in words."""
    return {
        logits_lib.NOT_FINITE: 'the logits are not finite numbers',
        logits_lib.NONE_ALLOWED: 'no token may be drawn: the masks exclude all of them',
    }[fault]
