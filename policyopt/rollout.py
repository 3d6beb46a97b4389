"""From problems to batches: sample, judge, shape, keep, estimate advantages."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyopt import credit, filling, hosts, scoring
from policyopt import metrics as metrics_lib
from policyopt import turns as turns_lib
from policyopt.data import Item
from policyopt.drawing import make_draw
from policyopt.losses import compose
from policyopt.losses import controllers as controllers_lib
from policyopt.rewards import Judge, Page, Remarks, Round, StepsConfig, Verdict
from policyopt.rewards import describe as describe_verdicts
from policyopt.sampling import (
    EngineConfig,
    Finish,
    SamplingConfig,
    Stats,
    Turn,
    allowed_mask,
)
from policyopt.stream import Stream
from policyopt.types import Algorithm, MissingInput, Rollout, TokenBatch


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How many rows a step trains on, how they are drawn, and what they earn.

    Attributes:
      prompts: problems of a step.
      group_size: answers drawn for each.
      max_rounds: batches of problems drawn at most until enough rows are kept, where the
        algorithm drops some.
      shortage: what to do where they are not: train on a 'smaller' batch, or raise an 'error'.
      chunks: parts of a round, decoded one after another; while one is decoded, the answers of
        those before are judged. They change no token.
      engine: draw with the slot engine (continuous batching), which spends no step on ended rows,
        and has each judged as it ends; None draws in lock-step.
      steps: what divides answers into steps, for rewards and ratios of these; None leaves them
        whole.
    """

    prompts: int = 64
    group_size: int = 8
    max_rounds: int = 10
    shortage: Literal['smaller', 'error'] = 'smaller'
    chunks: int = 1
    engine: EngineConfig | None = None
    steps: StepsConfig | None = None

    def __post_init__(self):
        for name in ('prompts', 'group_size', 'max_rounds', 'chunks'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}; legal is 1 or more')
        if self.prompts % self.chunks:
            raise ValueError(
                f'chunks is {self.chunks}; legal are divisors of prompts, {self.prompts}'
            )


class Collected(NamedTuple):
    """One step's rows.

    Attributes:
      batch: prompts * group_size rows; those past the kept ones have mask 0 and no reward.
      rollout: the same rows, shaped, before advantages.
      metrics: name -> number, over every row drawn, dropped ones included.
      timings: the same of what depends on the clock.
    """

    batch: TokenBatch
    rollout: Rollout
    metrics: dict[str, float]
    timings: Mapping[str, float] = types.MappingProxyType({})


Collect = Callable[..., Collected]


class NotSampled(RuntimeError):
    """Nothing to learn from, because logits of rows were not finite numbers.

    Attributes:
      batch: the rows of one round, with what they drew before; advantages are 0.
      metrics: as in Collected.
    """

    def __init__(self, batch: TokenBatch, metrics: dict[str, float]):
        self.batch, self.metrics = batch, metrics
        super().__init__(f'{metrics["rollout/not_sampled"]:.0%} of the rows could not be sampled')


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


def check_groups(
    algorithm: Algorithm, needed: frozenset[str], config: RolloutConfig, name: str
) -> None:
    """Raise ValueError for groups of one answer where the algorithm compares those of a group.

    Found by running it on four such rows, of rewards 0 and 1: none is kept, or has an advantage.
    One that reads values or segments, by `required_fields`, is taken to learn from them.
    """
    if config.group_size > 1 or needed & {'values', 'segment', 'segment_rewards'}:
        return
    zeros, rewards = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1], np.float32)
    fields: dict[str, Any] = dict(
        tokens=np.zeros((4, 2), np.int32),
        mask=zeros + 1,
        length=np.full(4, 2),
        prompt_length=np.zeros(4, int),
        rewards=rewards,
        group=np.arange(4),
        logp_behavior=zeros,
        logp_ref=zeros,
        truncated=np.zeros(4, bool),
        positive=rewards > 0,
    )

    @jax.jit
    def learns(rollout: Rollout) -> Any:
        rollout = algorithm.shape(rollout)
        advantages = algorithm.advantages(rollout).advantages
        return jnp.any(algorithm.keep(rollout)) & jnp.any(advantages != 0)

    if not learns(Rollout(**fields)):
        raise ValueError(
            f'config.rollout.group_size is 1, from which {name} learns nothing: it compares the '
            'answers to a problem with each other; legal is 2 or more'
        )


def make_collector(
    model: Any,
    algorithm: Algorithm,
    judge: Judge,
    config: RolloutConfig,
    sampling: SamplingConfig,
    prompt_width: int,
    *,
    values: Callable[[Any, Rollout], Any] | None = None,
    replay: Sequence[str] = ('support', 'routing'),
) -> Collect:
    """Build collect(state, reference, source, key, version, watch, page, stream) -> Collected.

    Each round takes `config.prompts` problems from `source`, draws `group_size` answers to each,
    judges them, shapes the rewards and asks the keep rule; rounds go on until prompts * group_size
    rows are kept or `max_rounds` are spent. Surplus rows are cut, missing ones filled up with rows
    of mask 0, which count in no mean. Rows without a reward lose their mask, too; metrics
    `rollout/not_judged` and `rewards/...` say how many they are, and why; `turns/...` do for rows
    whose environment failed. Rows whose logits are not
    finite numbers have no reward either and are emptied, so that no forward pass meets their
    numbers again; metric `rollout/not_sampled` counts them. Advantages are estimated on the rows
    that stay. Verdicts are written down on `page`, if there is one, and those that it has from
    before are used again. With a `stream`, which has a page of its own, rounds are taken from it.

    The reference policy is scored only where the algorithm reads it, the critic likewise. An
    answer that was not divided into steps or turns is one segment, and `segment_rewards` holds its
    reward at its last token.

    Args:
      model, algorithm, judge, config, sampling: as named.
      prompt_width: width that prompts are padded to.
      values: (TrainState, Rollout) -> [B,T], the critic's (`Learner.values`), where one is read.
      replay: recorded fields that scoring replays: of 'support' and 'routing'.

    `collect` raises ValueError where no row is kept within `max_rounds`, or too few of them and
    `config.shortage` is 'error', where no kept row has a reward and a token to learn from, and
    where the reference gives a taken token no finite mass. Where rows could not be sampled, the
    first and the third of these are NotSampled. A `metrics.Stopwatch` is told the seconds that went
    into 'sample', 'reward' (waiting for the judge alone) and 'score' (reference, values, shaping,
    and getting the rows to the host).

    Raises ValueError where the algorithm reads values and `values` is None.
    """
    needed = required_fields(algorithm)
    if values is None and needed & {'values', 'values_old', 'returns'}:
        raise ValueError('the algorithm reads values, but `values` is None; give Learner.values')
    draw = make_draw(model, config, sampling, prompt_width)
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
    remark, remark_turns = Remarks(), turns_lib.Remarks()

    @jax.jit
    def shape_and_keep(rollout: Any):
        rollout = algorithm.shape(rollout)
        judged = jnp.isfinite(rollout.rewards)[:, None]
        masked = dataclasses.replace(rollout, mask=jnp.where(judged, rollout.mask, 0))
        return masked, algorithm.keep(rollout)

    def enrich(state: Any, reference: Any, rollout: Any) -> Rollout:
        dropped = {name: None for name in ('support', 'routing') if name not in replay}
        changes: dict[str, Any] = dict(dropped)
        rollout = dataclasses.replace(rollout, **dropped)
        if needed & {'logp_ref'}:
            changes['logp_ref'] = score(reference, rollout).logp_new
        if needed & {'values', 'values_old', 'returns'}:
            assert values is not None
            changes['values'] = values(state, rollout)
        if 'segment' in needed and rollout.segment is None:
            changes['segment'] = jnp.zeros(rollout.tokens.shape, jnp.int32)
        if 'segment_rewards' in needed and rollout.segment_rewards is None:
            last = credit.last_token(jnp.asarray(rollout.mask))
            changes['segment_rewards'] = jnp.where(last, rollout.rewards[:, None], jnp.nan)
        return dataclasses.replace(rollout, **changes)

    def collect(
        state: Any,
        reference: Any,
        source: Iterator[list[Item]],
        key: Any,
        version: int = 0,
        watch: metrics_lib.Stopwatch | None = None,
        page: Page | None = None,
        stream: Stream | None = None,
    ) -> Collected:
        watch = watch or metrics_lib.Stopwatch()
        rows = config.prompts * config.group_size
        kept, drawn, count, failed = [], [], 0, None
        verdicts: list[Verdict] = []
        turns: list[list[Turn]] = []
        stats: list[Stats] = []
        for number in range(config.max_rounds):
            own = jax.random.fold_in(key, number)
            if stream is None:
                judging = Round(judge, page, number)
                found = draw(state.params, judging, next(source), own, version, watch)
            else:
                found = stream.take(state.params, source, own, version, watch)
            verdicts += found.verdicts
            turns += found.turns or []
            stats += found.stats
            remark(found.verdicts)
            remark_turns(found.turns or [])
            raw: Any = found.rollout
            raw = dataclasses.replace(raw, group=raw.group + number * config.prompts)
            lost = hosts.fetch(raw.finish) == Finish.ERROR
            if lost.any():
                failed = hosts.fetch(raw)
                raw = filling.emptied(failed, lost)
            # The log has no use for what is large.
            drawn.append(hosts.fetch(dataclasses.replace(raw, support=None, routing=None)))
            with watch('score'):
                shaped, keep = hosts.fetch(shape_and_keep(enrich(state, reference, raw)))
            if shaped.logp_ref is not None:
                scoring.check_reference(shaped.logp_ref, shaped.mask)
            kept.append(jax.tree.map(lambda x, keep=keep: x[keep], shaped))
            count += int(keep.sum())
            if count >= rows:
                break
        everything = jax.tree.map(lambda *x: np.concatenate(x), *drawn)
        metrics = describe(everything) | describe_verdicts(verdicts) | turns_lib.describe(turns)
        try:
            rollout = enough(everything, kept, count, config, verdicts[0].reason)
        except ValueError as error:
            if failed is None:
                raise
            batch = to_batch(failed, np.zeros_like(failed.logp_behavior))
            raise NotSampled(batch, metrics) from error
        estimates = advantages(rollout)
        metrics |= {'rollout/rounds': float(len(drawn)), 'rollout/kept': min(count / rows, 1.0)}
        timings = turns_lib.timings(turns, stats)
        return Collected(to_batch(rollout, *estimates), rollout, metrics, timings)

    return collect


def enough(
    everything: Any, kept: Sequence[Any], count: int, config: RolloutConfig, first: str = ''
) -> Rollout:
    """The kept rows of all rounds, cut or filled up; ValueError where there is nothing to learn.

    Args:
      everything: all rows drawn.
      kept: those kept, of each round.
      count: how many these are.
      config: says how many there should be.
      first: reason of the first row's verdict.
    """
    rows = config.prompts * config.group_size
    if not np.isfinite(everything.rewards).any():
        raise ValueError(
            f'none of {len(everything.rewards)} answers got a reward: the judge failed on all, as '
            f'on the first: {first or "no reason given"}'
        )
    check_count(count, rows, len(kept), config.shortage)
    rollout = filling.fill(jax.tree.map(lambda *x: np.concatenate(x), *kept), rows)
    if not rollout.mask.any():
        raise ValueError(
            f'none of {rows} answers has a token to learn from: they have no reward, or the '
            "algorithm's shaping filters all of them out, as where all are overlong "
            '(sampling.max_new_tokens)'
        )
    return rollout


def check_count(count: int, rows: int, rounds: int, shortage: str) -> None:
    """Raise ValueError where no row was kept, or too few and `shortage` is 'error'."""
    advice = (
        'the keep rule of the algorithm drops rows, as where every group of answers has equal '
        'rewards. Use easier or harder problems (task), a longer warm start, a higher temperature, '
        'a larger rollout.group_size, or an algorithm without one'
    )
    if count == 0:
        raise ValueError(f'none of {rounds * rows} answers in {rounds} rounds was kept: {advice}')
    if count < rows and shortage == 'error':
        raise ValueError(
            f'only {count} of {rows} rows were kept in {rounds} rounds, and rollout.shortage is '
            f"'error': {advice}; or raise rollout.max_rounds"
        )


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
        finish=rollout.finish,
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
    judged, lost = np.isfinite(rollout.rewards), rollout.finish >= Finish.ERROR
    lengths = rollout.mask.sum(axis=1)
    return {
        'reward': float(rollout.rewards[judged].mean()) if judged.any() else 0.0,
        'reward_std': float(rollout.rewards[judged].std()) if judged.any() else 0.0,
        'accuracy': float(rollout.positive[judged].mean()) if judged.any() else 0.0,
        'length': float(lengths.mean()),
        'truncated': float(rollout.truncated.mean()),
        'rollout/not_judged': float((~judged & ~lost).mean()),
        'rollout/not_sampled': float((rollout.finish == Finish.ERROR).mean()),
        'rollout/rows': float(len(lengths)),
        'rollout/tokens': float(lengths.sum()),
    }
