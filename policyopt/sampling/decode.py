"""Lock-step sampling: one prefill of all prompts, then a loop of one-token steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import hosts
from policyopt.sampling.config import (
    Finish,
    PerRow,
    RowErrors,
    SamplingConfig,
    prompt_error,
    row_keys,
)
from policyopt.sampling.rules import Constraint, Next, fault_text, make_rules, next_token
from policyopt.types import Array, Rollout, struct

OnError = Literal['raise', 'record']


@struct
class _State:
    """The decode loop between two steps.

    Attributes:
      step: scalar int32, tokens drawn so far by every row that is alive.
      alive: [B] bool, rows that go on.
      fed: [B] int32, the token drawn last, not yet in the cache.
      finish, fault: [B] int32, see Finish and logits.Draw.
      cache: keys and values of everything before `fed`.
      constraint: state of the constraint, None without one.
      tokens, mask, logp, logp_full: [B,T], the rows as they grow.
      support: [B,T,K] int32, -1 where nothing was drawn; None where not truncated.
      routing: [B,T,L,k] int, -1 where nothing was fed; None for dense models.
    """

    step: Array
    alive: Array
    fed: Array
    finish: Array
    fault: Array
    cache: Any
    constraint: Any
    tokens: Array
    mask: Array
    logp: Array
    logp_full: Array
    support: Array | None
    routing: Array | None


def sample(
    model: Any,
    params: Any,
    prompts: Sequence[Sequence[int]] | tuple[Any, Any],
    key: Array,
    config: SamplingConfig,
    *,
    version: int = 0,
    per_row: PerRow | None = None,
    constraint: Constraint | None = None,
    on_error: OnError = 'raise',
) -> Rollout:
    """Draw one answer per prompt.

    The t-th token of a row comes from one uniform number that depends on the row's key and t alone,
    by inverse CDF. `logp_behavior` is the log-prob under the distribution really drawn from, after
    temperature, masks and truncation; at temperature 0 it is 0. The mask is 1 on every drawn token,
    end of sequence included, and follows from lengths, never from token ids. No forward pass is run
    whose logits nobody reads. Prompt width, `max_new_tokens` and K fix the shapes: other values of
    the rest compile nothing.

    Args:
      model: a `policyopt.models` model.
      params: its parameters.
      prompts: lists of token ids, or (tokens [B,P] int, length [B] int) right padded, in which case
        the ids are the caller's word: they are not checked.
      key: a typed key, or one per row [B].
      config: see SamplingConfig.
      version: recorded as the parameters' version on every drawn token; -1 elsewhere.
      per_row: values of single rows in place of the config's.
      constraint: a mask that depends on what the row drew before.
      on_error: 'raise' RowErrors after all rows are done, or 'record' finish ERROR alone.

    Returns:
      A Rollout of width P + max_new_tokens without rewards and groups, segment 1 on what was drawn.

    Raises:
      ValueError: settings that no row could be drawn with.
      RowErrors: rows with an empty prompt, unknown ids, logits that are not finite or no token to
        draw; its `rollout` has all the others. A failed row keeps what it drew before.
    """
    tokens, length, errors = _arrays(model, prompts)
    rows = len(length)
    static, rules = make_rules(model, config, rows, per_row, constraint)
    rollout, fault = _decode(
        model,
        params,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(length, jnp.int32),
        row_keys(key, rows),
        rules,
        jnp.asarray(version, jnp.int32),
        static=static,
        steps=config.max_new_tokens,
    )
    if on_error == 'raise':
        fault, finish = hosts.fetch((fault, rollout.finish))
        for row in np.flatnonzero(finish == Finish.ERROR).tolist():
            text = fault_text(int(fault[row])) if fault[row] else _length_error(length, tokens, row)
            errors.setdefault(row, text)
        if errors:
            raise RowErrors(dict(sorted(errors.items())), rollout)
    return rollout


def _arrays(model: Any, prompts: Any) -> tuple[Any, Any, dict[int, str]]:
    """tokens [B,P], length [B] (0 for prompts that can't be used), and what is wrong with those."""
    if isinstance(prompts, tuple) and len(prompts) == 2 and np.ndim(prompts[0]) == 2:
        tokens, length = prompts
        chex.assert_rank([tokens, length], [2, 1])
        chex.assert_equal_shape_prefix([tokens, length], 1)
        return tokens, length, {}
    width = max([1, *map(len, prompts)])
    tokens = np.zeros((len(prompts), width), np.int32)
    length = np.zeros(len(prompts), np.int32)
    errors = {}
    for row, prompt in enumerate(prompts):
        error = prompt_error(prompt, width, model.config.vocab_size)
        if error is None:
            tokens[row, : len(prompt)], length[row] = prompt, len(prompt)
        else:
            errors[row] = error
    return tokens, length, errors


def _length_error(length: Any, tokens: Any, row: int) -> str:
    width = tokens.shape[1]
    return f'prompt has {int(length[row])} tokens; legal is 1 to {width}'


@functools.partial(jax.jit, static_argnames=('model', 'static', 'steps'))
def _decode(model, params, prompts, length, keys, rules, version, *, static, steps):
    rows, width = prompts.shape
    row = jnp.arange(rows)
    usable = (length >= 1) & (length <= width)
    length = jnp.where(usable, length, 0)

    def draw(state: _State, hidden: Array) -> Next:
        drawn = jnp.full(rows, state.step)
        logits = model.logits(params, hidden)
        return next_token(static, rules, keys, drawn, state.constraint, logits)

    def write(state: _State, new: Next) -> _State:
        drew = state.alive & (new.finish != Finish.ERROR)
        at = (row, jnp.where(drew, length + state.step, width + steps))  # past the end: drop
        draw, moved = new.draw, state.constraint
        if static.constraint is not None:
            moved = static.constraint.advance(state.constraint, draw.token)
        support = state.support
        if support is not None:
            support = support.at[at].set(draw.support, mode='drop')
        return dataclasses.replace(
            state,
            step=state.step + 1,
            alive=state.alive & (new.finish == Finish.RUNNING),
            fed=draw.token,
            finish=jnp.where(state.alive, new.finish, state.finish),
            fault=jnp.where(state.alive, draw.fault, state.fault),
            constraint=moved,
            tokens=state.tokens.at[at].set(draw.token, mode='drop'),
            mask=state.mask.at[at].set(1, mode='drop'),
            logp=state.logp.at[at].set(draw.logp, mode='drop'),
            logp_full=state.logp_full.at[at].set(draw.logp_full, mode='drop'),
            support=support,
        )

    def step(state: _State) -> _State:
        hidden, cache = model.extend(
            params, state.cache, state.fed[:, None], state.alive.astype(jnp.int32)
        )
        at = (row, jnp.where(state.alive, length + state.step - 1, width + steps))
        routing = state.routing
        if routing is not None:
            routing = routing.at[at].set(hidden.routing[:, 0], mode='drop')
        state = dataclasses.replace(state, cache=cache, routing=routing)
        return write(state, draw(state, hidden.hidden[:, 0]))

    hidden, state = _prefill(model, params, prompts, length, usable, static, steps)
    # The first token is drawn from the prefill, so that the loop body feeds before it draws and
    # the last token drawn is never fed.
    state = write(state, draw(state, hidden))
    state = jax.lax.while_loop(lambda s: (s.step < steps) & jnp.any(s.alive), step, state)
    return _rollout(state, length, version), state.fault


def _prefill(model, params, prompts, length, usable, static, steps) -> tuple[Array, _State]:
    """State [B,D] that predicts the first token, and the loop's state before it is drawn."""
    rows, width = prompts.shape
    shape = (rows, width + steps)
    cache = model.init_cache(*shape)
    hidden, cache = model.extend(params, cache, prompts, length)
    inside = jnp.arange(width) < length[:, None]
    routing = hidden.routing
    if routing is not None:
        routing = jnp.where(inside[:, :, None, None], routing, -1)
        routing = jnp.pad(routing, ((0, 0), (0, steps), (0, 0), (0, 0)), constant_values=-1)
    support = None if static.size is None else jnp.full((*shape, static.size), -1, jnp.int32)
    state = _State(
        step=jnp.zeros((), jnp.int32),
        alive=usable,
        fed=jnp.zeros(rows, jnp.int32),
        finish=jnp.where(usable, Finish.RUNNING, Finish.ERROR).astype(jnp.int32),
        fault=jnp.zeros(rows, jnp.int32),
        cache=cache,
        constraint=None if static.constraint is None else static.constraint.init(rows),
        tokens=jnp.pad(jnp.where(inside, prompts, 0), ((0, 0), (0, steps))),
        mask=jnp.zeros(shape, jnp.float32),
        logp=jnp.zeros(shape, jnp.float32),
        logp_full=jnp.zeros(shape, jnp.float32),
        support=support,
        routing=routing,
    )
    return hidden.hidden[jnp.arange(rows), jnp.maximum(length - 1, 0)], state


def _rollout(state: _State, length: Array, version: Array) -> Rollout:
    return Rollout(
        tokens=state.tokens,
        mask=state.mask,
        length=length + jnp.sum(state.mask, axis=-1, dtype=jnp.int32),
        prompt_length=length,
        logp_behavior=state.logp,
        logp_full=state.logp_full,
        truncated=state.finish == Finish.LENGTH,
        finish=state.finish,
        segment=(state.mask > 0).astype(jnp.int32),
        support=state.support,
        routing=state.routing,
        version=jnp.where(state.mask > 0, version, -1),
    )
