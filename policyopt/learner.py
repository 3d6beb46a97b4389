"""The optimizer side: state, one jitted update over a minibatch, and scoring with other parameters.

A minibatch is weighed as a whole and then split into microbatches; losses, gradients and metrics of
the microbatches are summed, so the split changes nothing but memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from policyopt import masked, scoring
from policyopt.losses import controllers as controllers_lib
from policyopt.losses import diagnostics
from policyopt.types import (
    Algorithm,
    Array,
    LossInputs,
    Mean,
    Metrics,
    Scores,
    TokenBatch,
    add_metrics,
    struct,
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with global-norm clipping and a linear warm-up.

    Attributes:
      learning_rate: after the warm-up.
      warmup_steps: optimizer steps over which the learning rate rises from 0.
      clip_norm: largest global norm of the gradient; larger ones are scaled down to it.
      b1, b2: decay of the first and second moment.
      weight_decay: decoupled; on matrices only, not on scales and biases.
    """

    learning_rate: float = 1e-4
    warmup_steps: int = 0
    clip_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.0


@struct
class TrainState:
    """Everything an update changes.

    Attributes:
      params: parameters of the policy (and of the critic, where the model has a value head).
      opt_state: state of the optimizer.
      controllers: name -> scalar, current values of the algorithm's adaptive coefficients.
      step: scalar int32, updates done.
      key: source of all noise of the run; never consumed, only folded with step numbers.
    """

    params: Any
    opt_state: Any
    controllers: dict[str, Array]
    step: Array
    key: Array


class Learner(NamedTuple):
    """An algorithm bound to a model and an optimizer.

    Attributes:
      init: (params, key) -> TrainState.
      update: (TrainState, TokenBatch) -> (TrainState, Metrics, logp_new [B,T]); jitted, and the
        state is donated. `logp_new` is what the loss saw, before the parameters moved.
      adapt: (TrainState, Metrics of the last update) -> TrainState with its controllers moved. Once
        per rollout, after its last minibatch: at the first one the ratio is 1, and a controller
        that looked then would see neither KL nor clipping.
    """

    init: Callable[[Any, Array], TrainState]
    update: Callable[[TrainState, TokenBatch], tuple[TrainState, Metrics, Array]]
    adapt: Callable[[TrainState, Metrics], TrainState]


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax optimizer of an OptimizerConfig."""
    schedule = config.learning_rate
    if config.warmup_steps:
        schedule = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)

    def decayed(params: Any) -> Any:
        # By name: parameters are stacked over layers, so a norm's scale is a matrix, too.
        names = ('norm', 'bias')
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(name in str(path[-1].key) for name in names), params
        )

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def make_learner(
    model: Any,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float = 1.0,
    allowed: Any = None,
    microbatches: int = 1,
    diagnose: Callable[[LossInputs], Metrics] = diagnostics.diagnose,
) -> Learner:
    """Bind an algorithm to a model and an optimizer.

    One update is: `prepare` and `weigh` on the whole minibatch; then, for a gradient rule, a scan
    over microbatches that sums loss, gradients and metrics, and one optimizer step; for a
    natural-gradient rule, its step on the summed loss, with the optimizer left alone.

    Args:
      model: a `policyopt.models` model.
      algorithm: its `loss`, `prepare`, `controllers` and `update` are used here.
      optimizer: for gradient rules.
      temperature: that of the sampler; log-probs are scored under the distribution drawn from.
      allowed: [V] bool, the sampler's set of tokens (`sampling.allowed_mask`); None allows all.
      microbatches: parts of a minibatch; they must divide its rows, and change memory only.
      diagnose: LossInputs -> metrics beside those of the loss; controllers may read them.

    Raises:
      ValueError: at construction for a temperature of 0, whose log-probs have no gradient; at the
        first trace where `microbatches` doesn't divide the rows.
    """
    if not temperature > 0:
        raise ValueError(f'temperature is {temperature}; training needs one above 0')

    score = functools.partial(scoring.score, model, temperature=temperature, allowed=allowed)

    def init(params: Any, key: Array) -> TrainState:
        return TrainState(
            params=params,
            opt_state=optimizer.init(params),
            controllers=controllers_lib.init(algorithm.controllers),
            step=jnp.zeros((), jnp.int32),
            key=key,
        )

    def evaluate(params: Any, batch: TokenBatch, weights: Any, coefficients: Mapping[str, Array]):
        scores = score(params, batch)
        inputs = loss_inputs(batch, scores, coefficients)
        out = algorithm.loss.apply(inputs, weights)
        return out.loss, (out.metrics | diagnose(inputs), scores.logp_new)

    def gradient_step(state: TrainState, parts: tuple[TokenBatch, Any]):
        def body(total, part):
            (loss, aux), grads = jax.value_and_grad(evaluate, has_aux=True)(
                state.params, *part, state.controllers
            )
            return jax.tree.map(jnp.add, total, grads), (loss, aux)

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        grads, (losses, (metrics, logp_new)) = jax.lax.scan(body, zeros, parts)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = sum_parts(metrics, microbatches) | {
            'loss': one(jnp.sum(losses)),
            'grad_norm': one(optax.tree.norm(grads)),
            'update_norm': one(optax.tree.norm(updates)),
        }
        return params, opt_state, metrics, logp_new

    def natural_step(state: TrainState, parts: tuple[TokenBatch, Any]):
        def total(term: Callable[..., Array]) -> Callable[[Any], Array]:
            def run(params: Any) -> Array:
                body = jax.checkpoint(lambda acc, part: (acc + term(params, part), None))
                return jax.lax.scan(body, jnp.zeros((), jnp.float32), parts)[0]

            return run

        def loss(params: Any, part: tuple[TokenBatch, Any]) -> Array:
            return evaluate(params, *part, state.controllers)[0]

        tokens = jnp.maximum(jnp.sum(parts[0].mask != 0), 1)

        def kl(params: Any, part: tuple[TokenBatch, Any], centred: bool = False) -> Array:
            batch = part[0]
            logp = score(params, batch).logp_new
            old = jax.lax.stop_gradient(logp) if centred else batch.logp_old
            return jnp.sum(masked.exp_excess(masked.select(batch.mask, logp - old))) / tokens

        _, (losses, (metrics, logp_new)) = jax.lax.scan(
            lambda _, part: (None, evaluate(state.params, *part, state.controllers)), None, parts
        )
        params, rule_metrics = algorithm.update.step(  # type: ignore[misc]
            state.params, total(loss), total(kl), total(functools.partial(kl, centred=True))
        )
        moved = jax.tree.map(jnp.subtract, params, state.params)
        metrics = sum_parts(metrics, microbatches) | {
            'loss': one(jnp.sum(losses)),
            'update_norm': one(optax.tree.norm(moved)),
        }
        return params, state.opt_state, metrics | rule_metrics, logp_new

    step = gradient_step if algorithm.update.step is None else natural_step

    def update(state: TrainState, batch: TokenBatch) -> tuple[TrainState, Metrics, Array]:
        chex.assert_rank([batch.tokens, batch.mask], 2)
        batch = algorithm.prepare(batch)
        weights = algorithm.loss.weigh(batch)
        parts = jax.tree.map(functools.partial(split_rows, microbatches), (batch, weights))
        params, opt_state, metrics, logp_new = step(state, parts)
        metrics |= {f'controller/{k}': one(value) for k, value in state.controllers.items()}
        state = dataclasses.replace(state, params=params, opt_state=opt_state, step=state.step + 1)
        return state, metrics, logp_new.reshape(batch.mask.shape)

    @jax.jit
    def move(values: Mapping[str, Array], metrics: Metrics, step: Array) -> Mapping[str, Array]:
        return controllers_lib.update(algorithm.controllers, values, metrics, step)

    def adapt(state: TrainState, metrics: Metrics) -> TrainState:
        if not algorithm.controllers:
            return state
        # A schedule counts optimizer steps: `step - 1` is the last one taken.
        values = move(state.controllers, metrics, state.step - 1)
        return dataclasses.replace(state, controllers=values)

    return Learner(init=init, update=jax.jit(update, donate_argnums=0), adapt=adapt)


def loss_inputs(
    batch: TokenBatch, scores: Scores, coefficients: Mapping[str, Array] | None = None
) -> LossInputs:
    """What a loss reads, from a batch and the scores of its tokens."""
    return LossInputs(
        logp_new=scores.logp_new,
        logp_old=batch.logp_old,
        mask=batch.mask,
        advantages=batch.advantages,
        logp_behavior=batch.logp_behavior,
        logp_ref=batch.logp_ref,
        entropy=scores.entropy,
        values=scores.values,
        values_old=batch.values_old,
        returns=batch.returns,
        segment=batch.segment,
        coefficients=dict(coefficients or {}),
    )


def split_rows(parts: int, x: Array) -> Array:
    """[B, ...] -> [parts, B / parts, ...]; ValueError where it does not divide."""
    if x.shape[0] % parts:
        raise ValueError(f'{parts} microbatches do not divide a minibatch of {x.shape[0]} rows')
    return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def sum_parts(metrics: Metrics, parts: int) -> Metrics:
    """Metrics stacked over microbatches by a scan, added with each type's own `+`."""
    split = [jax.tree.map(lambda x, i=i: x[i], metrics) for i in range(parts)]
    return functools.reduce(add_metrics, split)


def one(x: Array) -> Mean:
    """A single observation as a Mean."""
    return Mean(total=jnp.asarray(x, jnp.float32), count=jnp.ones((), jnp.float32))
