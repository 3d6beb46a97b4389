"""What flows between the parts: batches, scores, losses, metrics, and what an algorithm is made of.

Shapes: B rows, T tokens per row, K kept token ids, L layers, k experts per token. Everything here
is a frozen dataclass or named tuple of arrays, registered as a pytree, so that it can be printed,
jitted over, sharded and differentiated. `None` marks what a run does not have.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import chex
import jax
import jax.numpy as jnp

from policyopt import checks

Array = jax.Array
T = TypeVar('T')
Metrics = dict[str, Any]  # name -> Mean, Histogram or EffectiveSampleSize; all of them add


@dataclass_transform(kw_only_default=True, frozen_default=True)
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen chex dataclass: a pytree of its fields, built by keyword."""
    return chex.dataclass(cls, frozen=True)  # pyright: ignore[reportReturnType]


class MissingInput(ValueError):
    """A loss part needs an input that the batch does not carry."""

    def __init__(self, field: str, part: str, have: tuple[str, ...]):
        self.field, self.part = field, part
        super().__init__(
            f'{part} needs `{field}`, which is None or absent here. Present: {", ".join(have)}.'
        )


def require(inputs: Any, field: str, part: str) -> Any:
    """Return `inputs.field`; raises MissingInput, naming the part, where it is None or absent."""
    value = getattr(inputs, field, None)
    if value is None:
        named = getattr(inputs, '__dataclass_fields__', None) or getattr(inputs, '_fields', None)
        have = tuple(n for n in (named or vars(inputs)) if getattr(inputs, n, None) is not None)
        raise MissingInput(field, part, have)
    return value


@struct
class Rollout:
    """Sampled rows with their rewards; what advantages, shaping and keep rules read.

    `logp_*[t]`, `support[t]`, `mask[t]` and `version[t]` describe drawing `tokens[t]`;
    `routing[t]` is the forward pass with `tokens[t]` as input.

    Attributes:
      tokens: [B,T] int32, prompt and response in one row, right padded.
      mask: [B,T], 1 on tokens the policy chose (EOS included); 0 on prompt, tool output, padding.
      length: [B] int32, tokens in the row, padding excluded.
      prompt_length: [B] int32, tokens before the first response token.
      rewards: [B] float32, NaN where a row has none.
      group: [B] int32, id of the row's prompt; any ids in any order.
      logp_behavior: [B,T] float32, log-prob under the distribution really sampled from.
      logp_full: [B,T] float32, log-prob at the sampler's temperature without its truncation; the
        kept mass is exp(logp_full - logp_behavior).
      logp_ref: [B,T] float32, log-prob under the reference policy on the same support.
      truncated: [B] bool, the row hit its length limit.
      finish: [B] int32, why the row ended; see `sampling.Finish`.
      positive: [B] bool, the row's answer is correct.
      values: [B,T] float32, critic's value of the state before `tokens[t]` is drawn.
      segment: [B,T] int32, turn or step id; any ids, unique within the row.
      segment_rewards: [B,T] float32, reward of a turn or step at its last token, NaN elsewhere.
      support: [B,T,K] int32, kept token ids, -1 pads; None where sampling is not truncated.
      routing: [B,T,L,k] int, chosen experts, -1 where there is none to replay; None for dense.
      version: [B,T] int32, version of the parameters that drew the token.
    """

    tokens: Array
    mask: Array
    length: Array | None = None
    prompt_length: Array | None = None
    rewards: Array | None = None
    group: Array | None = None
    logp_behavior: Array | None = None
    logp_full: Array | None = None
    logp_ref: Array | None = None
    truncated: Array | None = None
    finish: Array | None = None
    positive: Array | None = None
    values: Array | None = None
    segment: Array | None = None
    segment_rewards: Array | None = None
    support: Array | None = None
    routing: Array | None = None
    version: Array | None = None


@struct
class TokenBatch:
    """Rows of one optimizer minibatch: a rollout with its advantages and fixed log-probs.

    Attributes:
      advantages: [B,T] float32.
      logp_old: [B,T] float32, proximal policy (the ratio's denominator).
      returns: [B,T] float32, regression targets of the critic.
      values_old: [B,T] float32, the critic's values when the rollout was judged.
      The others are those of `Rollout`.
    """

    tokens: Array
    mask: Array
    advantages: Array
    logp_old: Array
    length: Array | None = None
    prompt_length: Array | None = None
    rewards: Array | None = None
    group: Array | None = None
    logp_behavior: Array | None = None
    logp_ref: Array | None = None
    positive: Array | None = None
    finish: Array | None = None
    values_old: Array | None = None
    returns: Array | None = None
    segment: Array | None = None
    support: Array | None = None
    routing: Array | None = None
    version: Array | None = None


@struct
class Scores:
    """What the scorer says of the taken tokens; each [B,T] float32.

    Attributes:
      logp_new: log-prob (nats) of `tokens[t]`, on the recorded support where there is one.
      entropy: entropy (nats) of the distribution that `tokens[t]` was drawn from.
      values: critic's value of the state before `tokens[t]` is drawn.
    """

    logp_new: Array
    entropy: Array | None = None
    values: Array | None = None


@struct
class LossInputs:
    """Everything a loss is a function of. Per-token arrays are [B,T] of one floating dtype.

    Attributes:
      logp_new: log-prob of the taken token under the policy being trained; differentiated.
      logp_old: the same under the proximal policy, the ratio's denominator.
      mask: [B,T] bool, int or float; nonzero on tokens the policy chose.
      advantages: [B,T].
      logp_behavior: the same as `logp_old` under the sampler's distribution.
      logp_ref: the same under the reference policy.
      entropy: entropy of the policy being trained, in nats; differentiated.
      values: the critic's values; differentiated.
      values_old: the critic's values when the rollout was judged.
      returns: the critic's targets.
      segment: [B,T] int, turn or step ids.
      coefficients: name -> scalar, current values of the algorithm's controllers.
    """

    logp_new: Array
    logp_old: Array
    mask: Array
    advantages: Array
    logp_behavior: Array | None = None
    logp_ref: Array | None = None
    entropy: Array | None = None
    values: Array | None = None
    values_old: Array | None = None
    returns: Array | None = None
    segment: Array | None = None
    coefficients: Mapping[str, Array] = dataclasses.field(default_factory=dict)


class LossOutput(NamedTuple):
    """A scalar loss to minimise, and metrics that add over microbatches."""

    loss: Array
    metrics: Metrics


class Estimates(NamedTuple):
    """Advantages [B,T], and the critic's targets [B,T] where the estimator has a critic."""

    advantages: Array
    returns: Array | None = None


class Terms(NamedTuple):
    """What a loss is made of at each token; arrays [B,T], to look at.

    Attributes:
      weights: of the loss's sum over tokens.
      loss: weighted loss; sums to the loss.
      log_ratio: of the policy term; None in a loss without one, like all that follow.
      objective: of the policy term, before gates.
      frozen: bool, the objective has exactly no slope in the token's own logp_new.
      gates: name -> factor of the objective.
      penalties: name -> value, before weighting.
    """

    weights: Array
    loss: Array
    log_ratio: Array | None = None
    objective: Array | None = None
    frozen: Array | None = None
    gates: dict[str, Array] | None = None
    penalties: dict[str, Array] | None = None


class LossTransform(NamedTuple):
    """A loss in two pure functions, and one to look inside.

    Attributes:
      weigh: TokenBatch -> weights, a pytree of [B,T] arrays. Once per optimizer minibatch, before
        it is split, so that splitting changes nothing.
      apply: (LossInputs, weights) -> LossOutput. Inside the gradient, once per microbatch; losses
        and gradients of the microbatches are summed.
      explain: (LossInputs, weights) -> {name: Terms}, whose losses sum to that of `apply`; None in
        a loss that does not say. `policyopt.inspect` reads it; training does not.
    """

    weigh: Callable[[Any], Any]
    apply: Callable[[LossInputs, Any], LossOutput]
    explain: Callable[[LossInputs, Any], dict[str, Terms]] | None = None


class Controller(NamedTuple):
    """A coefficient that adapts; its whole state is its current value.

    Attributes:
      init: value at step 0.
      update: (value, metrics of the last step, step) -> next value, all scalars.
    """

    init: float
    update: Callable[[Array, Metrics, Array], Array]


class UpdateRule(NamedTuple):
    """How parameters move. `step` None: the learner's optax optimizer follows the gradient.

    Attributes:
      step: (params, loss_fn, kl_fn, fisher_fn) -> (params, Metrics), each function params ->
        scalar: the loss, the mean KL(old||new) that is bounded, and a KL whose Hessian at params
        is the Fisher matrix.
    """

    step: Callable[..., tuple[Any, Metrics]] | None = None


def identity(x: Any) -> Any:
    """Return the argument."""
    return x


def keep_all(rollout: Rollout) -> Array:
    """Keep rule that keeps every row: [B] True."""
    return jnp.ones(rollout.mask.shape[:1], bool)


class _Algorithm(NamedTuple):
    advantages: Callable[[Any], Estimates]
    loss: LossTransform
    shape: Callable[[Any], Any] = identity
    keep: Callable[[Any], Array] = keep_all
    controllers: Mapping[str, Controller] = types.MappingProxyType({})
    prepare: Callable[[Any], Any] = identity
    update: UpdateRule = UpdateRule()


class Algorithm(_Algorithm):
    """A policy-optimization method as a value.

    Attributes:
      advantages: Rollout -> Estimates.
      loss: weights and loss.
      shape: Rollout -> Rollout, reward shaping and filtering, before `advantages`.
      keep: Rollout -> [B] bool, rows to train on (dynamic sampling), after `shape`.
      controllers: name -> Controller, read by loss parts through `losses.adaptive`.
      prepare: TokenBatch -> TokenBatch, once per optimizer minibatch, before `weigh`.
      update: how parameters move.

    Raises:
      TypeError: a field that is of another kind, or a factory that was not called.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Algorithm:
        """Check every field, then build the tuple."""
        self = super().__new__(cls, *args, **kwargs)
        for field in ('advantages', 'shape', 'keep', 'prepare'):
            checks.check_slot(field, getattr(self, field))
        for field, kind in (('loss', LossTransform), ('update', UpdateRule)):
            value = getattr(self, field)
            checks.check_called(field, value)
            if not isinstance(value, kind):
                raise TypeError(f'{field} must be a {kind.__name__}, got {value!r}')
        for name, controller in dict(self.controllers).items():
            checks.check_called(f'controllers[{name!r}]', controller)
            if not isinstance(controller, Controller):
                raise TypeError(f'controllers[{name!r}] must be a Controller, got {controller!r}')
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Algorithm:
        """Build from values in order, checked; `_replace` comes through here."""
        return cls(*iterable)


@struct
class Mean:
    """A mean that adds: total and count, float32 at least. `value` is 0 at count 0.

    Scalars, or arrays of one shape where there is a mean of each element.
    """

    total: Array
    count: Array

    @classmethod
    def of(cls, x: Array, mask: Array) -> Mean:
        """Mean of x where mask is nonzero; what stands elsewhere, NaN included, is ignored."""
        keep = mask != 0
        x = jnp.asarray(x)
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        dtype = jnp.promote_types(x.dtype, jnp.float32) if floating else jnp.float32
        return cls(
            total=jnp.sum(jnp.where(keep, x, 0), dtype=dtype), count=jnp.sum(keep, dtype=dtype)
        )

    @property
    def value(self) -> Array:
        """total / count, 0 where count is 0."""
        return jnp.where(self.count > 0, self.total / jnp.where(self.count > 0, self.count, 1), 0)

    def __add__(self, other: Mean) -> Mean:
        return jax.tree.map(jnp.add, self, other)


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Sum two metric dicts with the same names; every metric type defines `+`."""
    if set(a) != set(b):
        raise ValueError(f'metrics differ: only on one side {sorted(set(a) ^ set(b))}')
    return {name: a[name] + b[name] for name in a}
