"""What is asked of a sampler, checked before anything is compiled, and why a row ended."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt.types import Array, Rollout

SUPPORT_SIZE = 64  # K, where truncation is on and nothing says otherwise
COLDEST, HOTTEST = 1e-6, 1e6  # temperatures above 0 that float32 logits can be divided by


class Finish(enum.IntEnum):
    """Why a row ended; `Rollout.finish` holds these.

    RUNNING: it has not. EOS: end of sequence. STOP: a stop id. LENGTH: its limit of tokens, or an
    observation had no room. DONE: its environment said so. ERROR: its logits are no numbers, or its
    prompt can't be used. Of rows whose environment failed, which costs no other row: ENV_FAILED: it
    raised, or what it gave is no answer. ENV_LATE: it took too long. ENV_OVERFLOW: it gave too
    many tokens.
    """

    RUNNING = 0
    EOS = 1
    STOP = 2
    LENGTH = 3
    DONE = 4
    ERROR = 5
    ENV_FAILED = 6
    ENV_LATE = 7
    ENV_OVERFLOW = 8


class RowErrors(ValueError):
    """Some rows could not be sampled; the others were.

    Attributes:
      errors: row -> what is wrong with it.
      rollout: every row, the failed ones with what they had and finish ERROR, or one of ENV_*.
    """

    def __init__(self, errors: Mapping[int, str], rollout: Rollout | None = None):
        self.errors, self.rollout = dict(errors), rollout
        super().__init__('; '.join(f'row {row}: {text}' for row, text in self.errors.items()))


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn. The order of the masks is that of `sampling.logits`.

    Truncated sampling keeps at most K ids and records them: K is `support_size`, else `top_k`, else
    64. It is on where support_size, top_k, top_p or min_p is set, where force_eos is on, at
    temperature 0 (K is 1) and with masks of single rows.

    Attributes:
      max_new_tokens: tokens drawn per row at most, end of sequence included.
      temperature: divides the logits; 0 takes the most probable token.
      top_k: keeps so many most probable tokens; None does not.
      top_p: keeps the shortest prefix of the most probable tokens with this mass; 1 does not.
      min_p: keeps tokens with at least this share of the largest probability; 0 does not.
      support_size: K. Set alone it truncates to the K most probable.
      eos_id: id that ends a row; None takes the tokenizer's and those of the model's config; -1
        lets every row run to its limit.
      stop_ids: further ids that end a row, kept as its last token.
      allowed_ids: the only ids that may be drawn; None allows all.
      banned_ids: ids that are never drawn.
      force_eos: the last token that the limit allows is end of sequence, with probability 1.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    support_size: int | None = None
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    banned_ids: tuple[int, ...] = ()
    force_eos: bool = False

    def __post_init__(self):
        for name in ('max_new_tokens', 'top_k', 'support_size'):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | np.integer):
                raise ValueError(f'{name} is {value!r}; legal is a whole number')
        if self.max_new_tokens < 1:
            raise ValueError(f'max_new_tokens is {self.max_new_tokens}; legal is 1 or more')
        if not (self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST):
            raise ValueError(
                f'temperature is {self.temperature}; legal is 0 (greedy), or {COLDEST:g} to '
                f'{HOTTEST:g}'
            )
        for name in ('top_k', 'support_size'):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name} is {value}; legal is 1 or more, or None')
        if not 0 < self.top_p <= 1:
            raise ValueError(f'top_p is {self.top_p}; legal is above 0, up to 1 (off)')
        if not 0 <= self.min_p <= 1:
            raise ValueError(f'min_p is {self.min_p}; legal is 0 (off) to 1')
        if self.top_k is not None and (self.support_size or self.top_k) < self.top_k:
            raise ValueError(
                f'top_k is {self.top_k}; legal is up to support_size, {self.support_size}'
            )
        if self.temperature == 0:
            defaults = dict(top_k=None, top_p=1.0, min_p=0.0, support_size=None)
            for name, off in defaults.items():
                if getattr(self, name) != off:
                    raise ValueError(
                        f'{name} is {getattr(self, name)} and has no effect at temperature 0, '
                        f'which keeps the most probable token alone; legal is {off}'
                    )

    @property
    def truncated(self) -> bool:
        """Whether a support is recorded whatever the rows ask for."""
        return (
            self.support_size is not None
            or self.top_k is not None
            or self.top_p < 1
            or self.min_p > 0
            or self.force_eos
            or self.temperature == 0
        )

    def at_temperature(self, temperature: float) -> SamplingConfig:
        """The same at another temperature; at 0 without truncation, which has no effect there."""
        off: dict[str, Any] = {}
        if temperature == 0:
            off = dict(top_k=None, top_p=1.0, min_p=0.0, support_size=None)
        return dataclasses.replace(self, temperature=temperature, **off)

    def size(self, vocab_size: int, needed: bool = False) -> int | None:
        """K, at most the vocabulary; None where nothing truncates and none is `needed`."""
        if not (self.truncated or needed):
            return None
        if self.temperature == 0:
            return 1
        return min(self.support_size or self.top_k or SUPPORT_SIZE, vocab_size)


@dataclasses.dataclass(frozen=True)
class PerRow:
    """What single rows ask for in place of the config's value; None leaves it to the config.

    Other values in these arrays compile nothing; another set of them does.

    Attributes:
      temperature, top_p, min_p: [B] float.
      top_k: [B] int, at most K; 0 keeps all K.
      max_new_tokens: [B] int, at most the config's.
      stop_ids: [B,n] int, ids that end the row besides the config's, -1 pads.
      allowed: [B,V] bool, the only tokens of this row; a support is recorded.
    """

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    max_new_tokens: Any = None
    stop_ids: Any = None
    allowed: Any = None

    @property
    def truncated(self) -> bool:
        """Whether these need a recorded support."""
        fields = (self.top_k, self.top_p, self.min_p, self.allowed)
        return any(x is not None for x in fields)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine; they decide shapes and speed, and no token.

    At their defaults each row comes out the same to the bit in whatever order rows are submitted.
    With `min_slots`, or `prefill_rows` above 1, shapes depend on the other rows, and log-probs
    agree to rounding. The same holds for how long environments take.

    Attributes:
      slots: rows that decode together.
      size: longest row, prompt and all turns. Rows that reach it end with finish LENGTH. None takes
        longest prompt + max_new_tokens, where prompts are known (`sample_continuous`).
      steps: tokens per slot between two looks of the host. A call ends early when a slot is free
        and a prompt waits.
      refill: free slots that prompts wait for while other rows decode, so that one call fills them.
      min_slots: where few rows decode, as at the end of a queue, the batch shrinks to a quarter, a
        sixteenth, ..., of the slots, to this many at least. None: it does not.
      prefill_rows: prompts in one prefill where so many wait, else one alone; their caches are kept
        beside the slots until they have one.
      prefill_width: shortest prefill; wider ones are this times a power of two.
      bucket: shortest stretch of the cache that attention reads; longer ones are this times a power
        of two.
      gather: gather the parts of weights that the mesh axes of rows hold (fsdp) once for each call
        of `steps` tokens, not for each token; a device then holds its share of the whole weights
        during the call, beside its part. A run whose mesh has no such axis refuses it.
      chunk: observation tokens fed at once.
      workers: environment calls under way at once.
      time_limit: seconds that one of them may take.
      grace: seconds that decoding stops for calls that were just begun, so that answers of quick
        environments are fed together; a row whose environment takes longer may be parked.
      parked: rows that wait for their environment outside the slots, at most, so that others decode
        in their place: their part of the cache is copied out, and back into a free slot once they
        have their answer. None: as many as there are slots, which doubles the memory of the cache
        (where a row has an environment). 0: rows keep their slots.
      observation: tokens that an environment may answer to one turn; None: as many as a row.
    """

    slots: int = 8
    size: int | None = None
    steps: int = 16
    refill: int = 1
    min_slots: int | None = None
    prefill_rows: int = 1
    prefill_width: int = 16
    bucket: int = 128
    gather: bool = False
    chunk: int = 32
    workers: int = 8
    time_limit: float = 10.0
    grace: float = 0.005
    parked: int | None = None
    observation: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ('grace', 'parked') else 1
            if field.name not in ('time_limit', 'gather') and value is not None and value < least:
                raise ValueError(f'{field.name} is {value}; legal is {least} or more')
        for name in ('refill', 'min_slots'):
            value = getattr(self, name)
            if value is not None and value > self.slots:
                raise ValueError(f'{name} is {value}; legal is up to slots, {self.slots}')


def eos_ids(model: Any, config: SamplingConfig) -> tuple[int, ...]:
    """Ids that end a row: the config's, else the tokenizer's and those of the model's config."""
    if config.eos_id is not None:
        return () if config.eos_id == -1 else (config.eos_id,)
    found = getattr(getattr(model, 'tokenizer', None), 'eos_id', None)
    first = () if found is None else (int(found),)
    return tuple(dict.fromkeys((*first, *getattr(model.config, 'eos_ids', ()))))


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raise ValueError naming the field and the first id outside [0, vocab_size)."""
    for i in ids:
        if not 0 <= int(i) < vocab_size:
            raise ValueError(
                f'{name} has {int(i)}, which is no token; legal is 0 to {vocab_size - 1}'
            )


def check_config(model: Any, config: SamplingConfig) -> None:
    """Raise ValueError for ids that are no tokens, and for forced EOS without one."""
    vocab_size = model.config.vocab_size
    ends = eos_ids(model, config)
    check_ids('eos_id', ends, vocab_size)
    check_ids('stop_ids', config.stop_ids, vocab_size)
    check_ids('banned_ids', config.banned_ids, vocab_size)
    check_ids('allowed_ids', config.allowed_ids or (), vocab_size)
    if config.top_k is not None and config.top_k > vocab_size:
        raise ValueError(
            f'top_k is {config.top_k}; legal is up to the {vocab_size} tokens there are'
        )
    allowed = allowed_mask(config, vocab_size)
    if allowed is not None and not allowed.any():
        raise ValueError('allowed_ids and banned_ids leave no token to draw')
    if config.force_eos and not ends:
        raise ValueError('force_eos is on, but there is no end of sequence: set eos_id')
    if config.force_eos and allowed is not None and not allowed[ends[0]]:
        raise ValueError(f'force_eos is on, but end of sequence, {ends[0]}, may not be drawn')


def check_greedy(config: SamplingConfig, per_row: PerRow) -> None:
    """Raise ValueError for values of single rows that a greedy config leaves without effect."""
    for name in ('temperature', 'top_k', 'top_p', 'min_p'):
        if config.temperature == 0 and getattr(per_row, name) is not None:
            raise ValueError(
                f"{name} of single rows has no effect at the config's temperature 0, which keeps "
                'the most probable token alone. Set the config above 0, and 0 in the greedy rows'
            )


def allowed_mask(config: SamplingConfig, vocab_size: int) -> Any:
    """The run's set of tokens, [V] bool, None where it is all; `scoring.score` takes the same."""
    if config.allowed_ids is None and not config.banned_ids:
        return None
    allowed = np.full(vocab_size, config.allowed_ids is None)
    allowed[list(config.allowed_ids or ())] = True
    allowed[list(config.banned_ids)] = False
    return allowed


def prompt_error(prompt: Sequence[int], width: int, vocab_size: int | None = None) -> str | None:
    """What is wrong with a prompt, None if nothing."""
    if not 1 <= len(prompt) <= width:
        return f'prompt has {len(prompt)} tokens; legal is 1 to {width}'
    if vocab_size is not None:
        ids = np.asarray(prompt)
        if np.any((ids < 0) | (ids >= vocab_size)):
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            return f'prompt has token {wrong}; legal is 0 to {vocab_size - 1}'
    return None


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
        error = prompt_error(prompt, width)
        if error is not None:
            raise ValueError(f'row {row}: {error}')
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
