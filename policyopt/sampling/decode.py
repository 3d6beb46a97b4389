"""Lock-step sampling: one prefill of all prompts, then a loop of one-token steps."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt.sampling import logits as logits_lib
from policyopt.types import Array, Rollout, struct


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
      max_new_tokens: tokens drawn per row at most, end of sequence included.
      temperature: divides the logits; 0 takes the most probable token.
      eos_id: id that ends a row; None takes the tokenizer's, and where the model has no tokenizer
        every row runs to `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    eos_id: int | None = None

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f'max_new_tokens is {self.max_new_tokens}; legal is 1 or more')
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f'temperature is {self.temperature}; legal is 0 (greedy) or above')


@struct
class _State:
    """The decode loop between two steps.

    Attributes:
      step: scalar int32, tokens drawn per row so far.
      alive: [B] bool, rows that have not drawn end of sequence.
      fed: [B] int32, the token drawn last, not yet in the cache.
      cache: keys and values of everything before `fed`.
      tokens, mask, logp: [B,T], the rows as they grow.
      routing: [B,T,L,k] int, -1 where nothing was fed; None for dense models.
    """

    step: Array
    alive: Array
    fed: Array
    cache: Any
    tokens: Array
    mask: Array
    logp: Array
    routing: Array | None


def pad_prompts(
    prompts: Sequence[Sequence[int]], width: int | None = None, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of different lengths as (tokens [B,width] int32, length [B] int32), right padded.

    `width` None takes the longest prompt. Raises ValueError naming the row of an empty prompt or of
    one longer than `width`.
    """
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    width = int(length.max(initial=1)) if width is None else width
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    for row, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= width:
            raise ValueError(f'prompt {row} has {len(prompt)} tokens; legal is 1 to {width}')
        tokens[row, : len(prompt)] = prompt
    return tokens, length


def row_keys(key: Array, rows: int) -> Array:
    """One key per row, a function of `key` and the row's number alone; a [rows] key array passes.

    Raises TypeError for raw uint32 keys: `jax.random.key(seed)` makes a typed one.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f'key has dtype {key.dtype}; make it with jax.random.key(seed)')
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
    chex.assert_shape(key, (rows,))
    return key


def sample(
    model: Any,
    params: Any,
    prompts: Sequence[Sequence[int]] | tuple[Any, Any],
    key: Array,
    config: SamplingConfig,
    *,
    version: int = 0,
) -> Rollout:
    """Draw one answer per prompt.

    The t-th token of a row comes from one uniform number that depends on the row's key and t alone,
    by inverse CDF. `logp_behavior` is the log-prob under the distribution really drawn from (that
    is, at the temperature); at temperature 0 it is 0. The mask is 1 on every drawn token, end of
    sequence included, and follows from lengths, never from token ids. No forward pass is run whose
    logits nobody reads. Prompt width and `max_new_tokens` fix the shapes: only they recompile.

    Args:
      model: a `policyopt.models` model.
      params: its parameters.
      prompts: lists of token ids, or (tokens [B,P] int, length [B] int) right padded, in which case
        the lengths are the caller's word: they are not checked.
      key: a typed key, or one per row [B].
      config: see SamplingConfig.
      version: recorded as the parameters' version on every drawn token; -1 elsewhere.

    Returns:
      A Rollout of width P + max_new_tokens without rewards and groups.
    """
    if isinstance(prompts, tuple) and len(prompts) == 2 and np.ndim(prompts[0]) == 2:
        tokens, length = prompts
    else:
        tokens, length = pad_prompts(prompts)  # type: ignore[arg-type]
    chex.assert_rank([tokens, length], [2, 1])
    chex.assert_equal_shape_prefix([tokens, length], 1)
    eos_id = config.eos_id
    if eos_id is None:
        eos_id = getattr(getattr(model, 'tokenizer', None), 'eos_id', None)
    return _decode(
        model,
        params,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(length, jnp.int32),
        row_keys(key, len(length)),
        jnp.asarray(config.temperature, jnp.float32),
        jnp.asarray(-1 if eos_id is None else eos_id, jnp.int32),
        jnp.asarray(version, jnp.int32),
        steps=config.max_new_tokens,
    )


@functools.partial(jax.jit, static_argnames=('model', 'steps'))
def _decode(model, params, prompts, length, keys, temperature, eos_id, version, *, steps):
    rows, width = prompts.shape
    row = jnp.arange(rows)

    def draw(hidden: Array, step: Array) -> tuple[Array, Array]:
        uniform = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, step)))(keys)
        return logits_lib.draw(model.logits(params, hidden), uniform, temperature)

    def write(state: _State, token: Array, logp: Array) -> _State:
        at = (row, jnp.where(state.alive, length + state.step, width + steps))  # past the end: drop
        return dataclasses.replace(
            state,
            step=state.step + 1,
            alive=state.alive & (token != eos_id),
            fed=token,
            tokens=state.tokens.at[at].set(token, mode='drop'),
            mask=state.mask.at[at].set(1, mode='drop'),
            logp=state.logp.at[at].set(logp, mode='drop'),
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
        return write(state, *draw(hidden.hidden[:, 0], state.step))

    cache = model.init_cache(rows, width + steps)
    hidden, cache = model.extend(params, cache, prompts, length)
    inside = jnp.arange(width) < length[:, None]
    routing = hidden.routing
    if routing is not None:
        routing = jnp.where(inside[:, :, None, None], routing, -1)
        routing = jnp.pad(routing, ((0, 0), (0, steps), (0, 0), (0, 0)), constant_values=-1)
    shape = (rows, width + steps)
    state = _State(
        step=jnp.zeros((), jnp.int32),
        alive=jnp.ones(rows, bool),
        fed=jnp.zeros(rows, jnp.int32),
        cache=cache,
        tokens=jnp.pad(jnp.where(inside, prompts, 0), ((0, 0), (0, steps))),
        mask=jnp.zeros(shape, jnp.float32),
        logp=jnp.zeros(shape, jnp.float32),
        routing=routing,
    )
    # The first token is drawn from the prefill, so that the loop body feeds before it draws and
    # the last token drawn is never fed.
    state = write(state, *draw(hidden.hidden[row, length - 1], state.step))
    state = jax.lax.while_loop(lambda s: (s.step < steps) & jnp.any(s.alive), step, state)
    return Rollout(
        tokens=state.tokens,
        mask=state.mask,
        length=length + jnp.sum(state.mask, axis=-1, dtype=jnp.int32),
        prompt_length=length,
        logp_behavior=state.logp,
        truncated=state.alive,
        routing=state.routing,
        version=jnp.where(state.mask > 0, version, -1),
    )
