"""What the real engines do with a schedule, beside what the simulation makes of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from policyopt import data, metrics, models, rewards, staleness, stream
from policyopt.asynchronous import AsyncConfig
from policyopt.rollout import RolloutConfig
from policyopt.sampling import EngineConfig, SamplingConfig
from policyopt.simulation import Outcome, Plan, simulate

SMALL = Plan(prompts=4, group_size=4, slots=8, steps=4)


class Observed(stream.Stream):
    """A stream that remembers what its answers came to: group -> tokens of each row that ended."""

    lengths: dict[int, dict[int, int]]

    def _ended(self, group: Any, member: int, row: Any) -> None:
        self.lengths.setdefault(group.number, {})[member] = row.length - row.prompt_length
        super()._ended(group, member, row)


class Real(NamedTuple):
    """What real engines did: decode slots and tokens, ages, and lengths by group and row."""

    slots: int
    tokens: int
    ages: list[int]
    lengths: dict[int, dict[int, int]]


def real(plan: Plan, takes: int, seed: int = 0) -> Real:
    """Run a plan with engines that draw from a small model with random weights."""
    tokenizer = data.arithmetic_tokenizer()
    sizes: dict[str, Any] = dict(
        embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=64
    )
    model = models.build(models.ModelConfig(vocab_size=tokenizer.vocab_size, **sizes), tokenizer)
    params = jax.jit(model.init)(jax.random.key(seed))
    prompts = [f'{i}+{j}=' for i in range(10) for j in range(10)]
    items = [data.Item(p, tuple(tokenizer.encode(p)), '', {}) for p in prompts]
    engine = EngineConfig(plan.slots, steps=plan.steps, prefill_width=64, bucket=64)
    one = Observed(
        model,
        RolloutConfig(plan.prompts, plan.group_size, engine=engine),
        SamplingConfig(max_new_tokens=60),
        4,
        rewards.Local(lambda *case: rewards.Verdict(0.0)),
        AsyncConfig(plan.staleness, plan.generators, ahead=plan.ahead),
        [None] * plan.generators,
    )
    one.lengths = {}
    source, ages = data.batches(items, plan.prompts, seed), np.zeros(plan.staleness + 1, int)
    for version in range(takes):
        key = jax.random.key(version)
        rollout = one.take(params, source, key, version, metrics.Stopwatch()).rollout
        found = staleness.ages(np.asarray(rollout.version), np.asarray(rollout.mask), version)
        ages += [(found == n).sum() for n in range(plan.staleness + 1)]
        one.run_ahead()
    return Real(*one.spent, ages.tolist(), one.lengths)


def compared(plan: Plan, takes: int, seed: int = 0) -> tuple[Real, Outcome]:
    """What the engines did, and what the simulation says of the lengths that their rows came to.

    Raises RuntimeError where decode slots, tokens and ages are not equal.
    """
    done = real(plan, takes, seed)

    def lengths(number: int) -> list[int]:
        rows = done.lengths.get(number, {})
        return [rows.get(member, 10**6) for member in range(plan.group_size)]  # goes on

    made = simulate(plan, lengths, takes)
    if (made.slots, made.tokens, made.ages.tolist()) != done[:3]:
        raise RuntimeError(f'{plan}: the engines did {done[:3]}, the simulation {made}')
    return done, made
