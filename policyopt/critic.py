"""The critic: a value head on the policy's trunk, or a trunk of its own; value pretraining.

Value pretraining (VC-PPO arXiv:2503.01491, VAPO arXiv:2504.05118) fits the critic with the policy
frozen, to Monte-Carlo targets: with lambda 1 and gamma 1 the return of every token of a row is the
row's final reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import checks, masked, scoring
from policyopt.types import Array, TokenBatch, require, struct

POSITIONS = 10  # bins of a row's positions


@dataclasses.dataclass(frozen=True)
class Critic:
    """What a learner needs to know of its critic.

    Attributes:
      optimizer: optax optimizer of the critic's own trunk; with a shared trunk that of value
        pretraining, which moves the value head alone (the policy's optimizer moves it later).
      model: a model with a value head, for a trunk of its own; None for the policy's.
    """

    optimizer: Any
    model: Any = None


@struct
class CriticState:
    """The critic's part of a TrainState.

    Attributes:
      params: of its own trunk; None with a shared one, whose value head is with the policy's.
      opt_state: state of the critic's optimizer.
    """

    params: Any
    opt_state: Any


@struct
class ExplainedVariance:
    """1 - Var(returns - values) / Var(returns) over tokens; adds by merging means and squares.

    1 for a perfect critic, 0 for one that knows the mean alone, below 0 for a worse one. All-zero
    leaves are the neutral element of `+`. Scalars, or arrays of one shape where there is one of
    each element.

    Attributes:
      count: tokens, as the other fields float32 or wider.
      mean, squares: of the returns, their mean and their sum of squares about it.
      error_mean, error_squares: the same of returns - values.
    """

    count: Array
    mean: Array
    squares: Array
    error_mean: Array
    error_squares: Array

    @classmethod
    def of(cls, values: Array, returns: Array, mask: Array) -> ExplainedVariance:
        """Of values and returns [B,T] where mask is nonzero; carries no gradient."""
        chex.assert_equal_shape([values, returns, mask])
        values, returns = jax.lax.stop_gradient((values, returns))
        dtype = jnp.promote_types(returns.dtype, jnp.float32)
        count = jnp.sum(mask != 0, dtype=dtype)

        def moments(x: Array) -> tuple[Array, Array]:
            x = masked.select(mask, x).astype(dtype)
            mean = masked.safe_divide(jnp.sum(x), count)
            return mean, jnp.sum(masked.select(mask, jnp.square(x - mean)))

        mean, squares = moments(returns)
        error_mean, error_squares = moments(returns - values)
        return cls(
            count=count,
            mean=mean,
            squares=squares,
            error_mean=error_mean,
            error_squares=error_squares,
        )

    @classmethod
    def by_position(
        cls, values: Array, returns: Array, mask: Array, bins: int = POSITIONS
    ) -> ExplainedVariance:
        """One of each bin of a row's positions (`masked.position_bins`): fields [bins].

        A bin is compared with the same bin of other rows. Where the return is a row's outcome, it
        says how much of that is known so far into an answer.
        """
        place = masked.position_bins(mask, bins)
        return jax.vmap(lambda i: cls.of(values, returns, place == i))(jnp.arange(bins))

    @property
    def value(self) -> Array:
        """The explained variance; 0 where the returns do not vary."""
        varied = self.squares > 0
        return jnp.where(varied, 1 - self.error_squares / jnp.where(varied, self.squares, 1), 0)

    def __add__(self, other: ExplainedVariance) -> ExplainedVariance:
        count = self.count + other.count
        share = masked.safe_divide(other.count, count)

        def merge(mean: Array, squares: Array, mean2: Array, squares2: Array):
            gap = mean2 - mean
            return mean + gap * share, squares + squares2 + gap**2 * self.count * share

        mean, squares = merge(self.mean, self.squares, other.mean, other.squares)
        error = merge(self.error_mean, self.error_squares, other.error_mean, other.error_squares)
        return ExplainedVariance(
            count=count, mean=mean, squares=squares, error_mean=error[0], error_squares=error[1]
        )


@dataclasses.dataclass(frozen=True)
class ValueStop:
    """When value pretraining ends: value loss and explained variance have settled, or max_steps.

    Both are averaged over the last `window` steps. Settled means that in each of the last `looks`
    steps the averaged loss changed by less than `tolerance` of itself and the averaged explained
    variance by less than `tolerance`. max_steps is VAPO's 50; the other numbers are choices.

    A critic that has not begun to learn looks settled, too: it says the mean everywhere, and its
    explained variance stands at 0. `min_steps` should be long enough for it to begin.

    Attributes:
      max_steps: steps at most.
      window: steps of the running means.
      looks: consecutive steps that must be settled.
      tolerance: relative for the loss, absolute for the explained variance.
      min_steps: steps at least.
    """

    max_steps: int = 50
    window: int = 5
    looks: int = 3
    tolerance: float = 0.02
    min_steps: int = 1

    def __post_init__(self):
        for name in ('max_steps', 'min_steps', 'window', 'looks'):
            checks.number(name, getattr(self, name), 1)
        if self.min_steps > self.max_steps:
            raise ValueError(
                f'min_steps={self.min_steps}; legal is up to max_steps={self.max_steps}'
            )
        if not self.tolerance > 0:
            raise ValueError(f'tolerance={self.tolerance}; legal is above 0')

    def __call__(self, losses: Sequence[float], explained: Sequence[float]) -> bool:
        """Whether to stop after these steps: value loss and explained variance of each."""
        return self.settled(losses, explained) or len(losses) >= self.max_steps

    def settled(self, losses: Sequence[float], explained: Sequence[float]) -> bool:
        """Whether both have settled after these steps, whatever max_steps is."""
        if len(losses) != len(explained):
            raise ValueError(f'{len(losses)} losses but {len(explained)} explained variances')
        if len(losses) < max(self.min_steps, self.window + self.looks):
            return False

        def changes(x: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
            tail = np.asarray(x[-(self.window + self.looks) :], np.float64)
            mean = np.convolve(tail, np.full(self.window, 1 / self.window), 'valid')
            return np.abs(np.diff(mean)), np.abs(mean[:-1])

        change, size = changes(losses)
        varied, _ = changes(explained)
        return bool(np.all(change < self.tolerance * size) and np.all(varied < self.tolerance))


def batch_values(model: Any, params: Any, batch: Any, routing: Array | None = None) -> Array:
    """Values [B,T] of a batch under a model with a value head.

    `routing` [B,T,L,k] is replayed where it is given; the batch's own belongs to the policy.
    """
    tokens = batch.tokens
    chex.assert_rank(tokens, 2)
    valid = None
    if batch.length is not None:
        valid = jnp.arange(tokens.shape[1]) < batch.length[:, None]
    hidden = model.hidden(params, tokens, valid=valid, routing=routing).hidden
    return scoring.token_values(model, params, hidden, batch.mask)


def monte_carlo(batch: TokenBatch) -> TokenBatch:
    """The batch with returns = its row's reward at every token; rows without one lose their mask.

    Raises MissingInput without `rewards`.
    """
    rewards = jnp.asarray(require(batch, 'rewards', 'value pretraining'))
    chex.assert_shape(rewards, batch.mask.shape[:1])
    present = jnp.isfinite(rewards)
    mask = masked.select(present[:, None], jnp.asarray(batch.mask))
    returns = masked.select(mask, jnp.broadcast_to(rewards[:, None], mask.shape))
    return dataclasses.replace(batch, mask=mask, returns=returns.astype(jnp.float32))


def estimated(batch: TokenBatch) -> TokenBatch:
    """The batch with the returns that its estimator gave; MissingInput where it gave none."""
    require(batch, 'returns', 'the critic of a natural-gradient algorithm')
    return batch
