"""From problems to batches: sample, judge, shape, keep, estimate advantages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyopt import scoring
from policyopt.data import Item
from policyopt.losses import compose
from policyopt.losses import controllers as controllers_lib
from policyopt.rewards import Judge
from policyopt.sampling import SamplingConfig, allowed_mask, pad_prompts, sample
from policyopt.types import Algorithm, MissingInput, Rollout, TokenBatch


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How many rows a step trains on, and what they earn.

    Attributes:
      prompts: problems of a step.
      group_size: answers drawn for each.
      max_rounds: batches of problems drawn at most until enough rows are kept, where the
        algorithm drops some.
      right: reward of a right answer.
      wrong: reward of a wrong one.
    """

    prompts: int = 64
    group_size: int = 8
    max_rounds: int = 10
    right: float = 1.0
    wrong: float = 0.0

    def __post_init__(self):
        for name in ('prompts', 'group_size', 'max_rounds'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}; legal is 1 or more')
        if not self.right > self.wrong:
            raise ValueError(f'right is {self.right}; legal is above wrong, {self.wrong}')


class Collected(NamedTuple):
    """One step's rows.

    Attributes:
      batch: prompts * group_size rows; those past the kept ones have mask 0 and no reward.
      rollout: the same rows, shaped, before advantages.
      metrics: name -> number, over every row drawn, dropped ones included.
    """

    batch: TokenBatch
    rollout: Rollout
    metrics: dict[str, float]


Collect = Callable[..., Collected]


def answers_of(rollout: Rollout, tokenizer: Any) -> list[str]:
    """Text of each row's answer: its tokens from `prompt_length` to `length`."""
    tokens, start, stop = jax.device_get((rollout.tokens, rollout.prompt_length, rollout.length))
    return [tokenizer.decode(t[a:b]) for t, a, b in zip(tokens, start, stop, strict=True)]


def required_fields(algorithm: Algorithm) -> frozenset[str]:
    """Optional fields that some part of the algorithm cannot do without.

    Of the rollout: logp_ref, values, segment, segment_rewards; of the loss: those of
    `losses.required_inputs`. Found by abstract tracing with one field left out at a time.
    """
    x, row = jnp.zeros((2, 2), jnp.float32), jnp.zeros(2, jnp.float32)
    ids, segment = jnp.zeros(2, jnp.int32), jnp.zeros((2, 2), jnp.int32)
    optional = dict(logp_ref=x, values=x, segment=segment, segment_rewards=x)
    full = Rollout(
        tokens=segment,
        mask=x,
        length=ids,
        prompt_length=ids,
        rewards=row,
        group=ids,
        logp_behavior=x,
        truncated=ids,
        positive=ids,
        **optional,
    )

    def run(rollout: Rollout):
        rollout = algorithm.shape(rollout)
        return algorithm.keep(rollout), algorithm.advantages(rollout)

    needed = set()
    for field in optional:
        try:
            jax.eval_shape(run, dataclasses.replace(full, **{field: None}))
        except MissingInput as error:
            needed.add(error.field)
    coefficients = controllers_lib.init(algorithm.controllers)
    return frozenset(needed) | compose.required_inputs(algorithm.loss, coefficients)


def make_collector(
    model: Any,
    algorithm: Algorithm,
    judge: Judge,
    config: RolloutConfig,
    sampling: SamplingConfig,
    prompt_width: int,
) -> Collect:
    """Build collect(params, reference, source, key, version) -> Collected.

    Each round takes `config.prompts` problems from `source`, draws `group_size` answers to each,
    judges them, shapes the rewards and asks the keep rule; rounds go on until prompts * group_size
    rows are kept or `max_rounds` are spent. Surplus rows are cut, missing ones filled up with rows
    of mask 0, which count in no mean. Advantages are estimated on the rows that stay.

    The reference policy is scored only where the algorithm reads it, the critic likewise. The
    answer is one segment, and `segment_rewards` holds its reward at its last token.

    `collect` raises ValueError where no row is kept within `max_rounds`.
    """
    needed = required_fields(algorithm)
    rows = config.prompts * config.group_size
    score = jax.jit(
        functools.partial(
            scoring.score,
            model,
            temperature=sampling.temperature,
            allowed=allowed_mask(sampling, model.config.vocab_size),
            entropy=False,
        )
    )
    advantages = jax.jit(algorithm.advantages)

    @jax.jit
    def shape_and_keep(rollout: Rollout):
        rollout = algorithm.shape(rollout)
        return rollout, algorithm.keep(rollout)

    def draw(
        params: Any, reference: Any, items: Sequence[Item], key: Any, version: int, first: int
    ):
        repeated = [item for item in items for _ in range(config.group_size)]
        prompts = pad_prompts([item.ids for item in repeated], prompt_width)
        drawn: Any = sample(model, params, prompts, key, sampling, version=version)
        marks = judge(answers_of(drawn, model.tokenizer), [item.entry for item in repeated])
        changes: dict[str, Any] = dict(
            group=first + np.repeat(np.arange(len(items), dtype=np.int32), config.group_size),
            positive=marks == 1,
            rewards=np.where(np.isnan(marks), np.nan, np.where(marks, config.right, config.wrong)),
        )
        changes['rewards'] = changes['rewards'].astype(np.float32)
        if needed & {'logp_ref'}:
            changes['logp_ref'] = score(reference, drawn).logp_new
        if needed & {'values', 'values_old', 'returns'}:
            changes['values'] = score(params, drawn).values
        if needed & {'segment', 'segment_rewards'}:
            changes['segment'] = jnp.zeros(drawn.tokens.shape, jnp.int32)
            last = jnp.arange(drawn.tokens.shape[1]) == drawn.length[:, None] - 1
            changes['segment_rewards'] = jnp.where(last, changes['rewards'][:, None], jnp.nan)
        return dataclasses.replace(drawn, **changes)

    def collect(
        params: Any, reference: Any, source: Iterator[list[Item]], key: Any, version: int = 0
    ) -> Collected:
        kept, drawn, count = [], [], 0
        for number in range(config.max_rounds):
            first = number * config.prompts
            round_key = jax.random.fold_in(key, number)
            drawn.append(draw(params, reference, next(source), round_key, version, first))
            shaped, keep = jax.device_get(shape_and_keep(drawn[-1]))
            kept.append(jax.tree.map(lambda x, keep=keep: x[keep], shaped))
            count += int(keep.sum())
            if count >= rows:
                break
        if count == 0:
            raise ValueError(
                f'none of {len(drawn) * rows} answers in {len(drawn)} rounds was kept: the keep '
                'rule of the algorithm drops all of them, as where every group of answers has '
                'equal rewards. Use easier or harder problems (task), a longer warm start, a '
                'higher temperature, a larger rollout.group_size, or an algorithm without one'
            )
        rollout = fill(jax.tree.map(lambda *x: np.concatenate(x), *kept), rows)
        estimates = advantages(rollout)
        metrics = describe(jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(drawn)))
        metrics |= {'rollout/rounds': float(len(drawn)), 'rollout/kept': min(count / rows, 1.0)}
        return Collected(to_batch(rollout, *estimates), rollout, metrics)

    return collect


def fill(rollout: Rollout, rows: int) -> Rollout:
    """Cut a rollout of numpy arrays to `rows`, or fill it up with empty rows.

    An empty row has mask 0, one prompt token, no reward (NaN), and a group of its own kind, -1.
    """
    missing = rows - len(rollout.mask)
    if missing <= 0:
        return jax.tree.map(lambda x: x[:rows], rollout)
    padded = jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]), rollout
    )
    special = {'group': -1, 'rewards': np.nan, 'length': 1, 'prompt_length': 1, 'version': -1}
    special |= {'segment_rewards': np.nan, 'support': -1, 'routing': -1}
    for field, value in special.items():
        if (array := getattr(padded, field)) is not None:
            array[rows - missing :] = value
    return padded


def to_batch(rollout: Any, advantages: Any, returns: Any = None) -> TokenBatch:
    """A rollout with its advantages, the sampler's log-probs being the proximal policy's."""
    return TokenBatch(
        tokens=rollout.tokens,
        mask=rollout.mask,
        advantages=advantages,
        logp_old=rollout.logp_behavior,
        length=rollout.length,
        prompt_length=rollout.prompt_length,
        rewards=rollout.rewards,
        group=rollout.group,
        logp_behavior=rollout.logp_behavior,
        logp_ref=rollout.logp_ref,
        positive=rollout.positive,
        values_old=rollout.values,
        returns=returns,
        segment=rollout.segment,
        support=rollout.support,
        routing=rollout.routing,
        version=rollout.version,
    )


def minibatches(batch: TokenBatch, parts: int) -> list[TokenBatch]:
    """Consecutive slices of equal size; those without a single policy token are left out.

    Raises ValueError where `parts` does not divide the rows.
    """
    rows = len(batch.mask)
    if rows % parts:
        raise ValueError(f'{parts} minibatches do not divide {rows} rows')
    size = rows // parts
    slices = [
        jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch) for i in range(parts)
    ]
    return [part for part in slices if np.any(np.asarray(part.mask))]


def describe(rollout: Any) -> dict[str, float]:
    """Numbers for the log, over all rows of a rollout of numpy arrays."""
    judged = np.isfinite(rollout.rewards)
    lengths = rollout.mask.sum(axis=1)
    return {
        'reward': float(rollout.rewards[judged].mean()) if judged.any() else 0.0,
        'accuracy': float(rollout.positive[judged].mean()) if judged.any() else 0.0,
        'length': float(lengths.mean()),
        'truncated': float(rollout.truncated.mean()),
        'rollout/not_judged': float((~judged).mean()),
        'rollout/rows': float(len(lengths)),
        'rollout/tokens': float(lengths.sum()),
    }
