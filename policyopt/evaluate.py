"""Held-out accuracy of a policy, with an interval that says how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from policyopt.data import Item
from policyopt.recipe import Setup
from policyopt.rewards import Judge, guarded
from policyopt.rollout import answers_of
from policyopt.sampling import SamplingConfig, pad_prompts, sample


class Accuracy(NamedTuple):
    """Correct answers of all, and what was answered.

    Attributes:
      correct: number of answers with full marks.
      total: number of problems.
      answers: text of every answer, in the problems' order.
    """

    correct: int
    total: int
    answers: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        """Share of correct answers."""
        return self.correct / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 % interval of the share."""
        return wilson(self.correct, self.total)

    def __str__(self) -> str:
        low, high = self.interval
        return f'{self.value:.1%} ({low:.1%} to {high:.1%}, {self.correct} of {self.total})'


def wilson(correct: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a proportion, at z standard normal deviates; (0, 1) for total 0."""
    if total == 0:
        return 0.0, 1.0
    share = correct / total
    centre = share + z**2 / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    scale = 1 + z**2 / total
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def accuracy(
    model: Any,
    params: Any,
    items: Sequence[Item],
    judge: Judge,
    key: jax.Array,
    config: SamplingConfig,
    *,
    prompt_width: int,
    batch: int,
) -> Accuracy:
    """Answer every item once and judge the answers.

    The last batch is filled up with the first items, so that all have one shape; fillers and
    answers without a reward do not count as correct.

    Args:
      model: a `policyopt.models` model with a tokenizer.
      params: its parameters.
      items: problems.
      judge: gives 1 for a correct answer.
      key: a typed key; unused noise at temperature 0.
      config: how answers are drawn.
      prompt_width: width that prompts are padded to.
      batch: rows sampled at once.
    """
    answers: list[str] = []
    for number, start in enumerate(range(0, len(items), batch)):
        rows = [items[(start + i) % len(items)] for i in range(batch)]
        prompts = pad_prompts([item.ids for item in rows], prompt_width)
        rollout = sample(model, params, prompts, jax.random.fold_in(key, number), config)
        answers += answers_of(rollout, model.tokenizer)
    answers = answers[: len(items)]
    rewards = guarded(judge)(answers, [item.entry for item in items])
    return Accuracy(int(np.sum(rewards == 1)), len(items), tuple(answers))


def held_out(setup: Setup, params: Any) -> Accuracy:
    """Accuracy on the held-out problems of a run."""
    c = setup.config
    return accuracy(
        setup.model,
        params,
        setup.task.held_out,
        setup.judge,
        jax.random.key(c.seed),
        c.sampling.at_temperature(c.evaluation.temperature),
        prompt_width=setup.task.prompt_width,
        batch=c.evaluation.batch,
    )
