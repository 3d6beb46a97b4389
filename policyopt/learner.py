"""An algorithm bound to a model and an optimizer: what a trainer calls.

A minibatch is weighed as a whole and then split into microbatches; losses, gradients and metrics of
the microbatches are summed, so the split changes nothing but memory. With a mesh (`jax.set_mesh`),
parameters, optimizer state and gradients are laid out as the model's rules say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from policyopt import checks, scoring, sharding, updates
from policyopt import critic as critic_lib
from policyopt import microbatches as microbatches_lib
from policyopt import optimizer as optimizer_lib
from policyopt import state as state_lib
from policyopt.critic import Critic
from policyopt.losses import controllers as controllers_lib
from policyopt.losses import diagnostics
from policyopt.microbatches import LengthBuckets
from policyopt.optimizer import OptimizerConfig, make_optimizer
from policyopt.state import Binding, Both, RouterLosses, TrainState, both_of
from policyopt.types import Algorithm, Array, LossInputs, Metrics, TokenBatch

__all__ = [
    'Critic',
    'Learner',
    'LengthBuckets',
    'OptimizerConfig',
    'RouterLosses',
    'TrainState',
    'make_learner',
    'make_optimizer',
]

ROUTING = ('rollout', 'recompute')


class Learner(NamedTuple):
    """An algorithm bound to a model and an optimizer.

    Attributes:
      init: (params, key, critic=None) -> TrainState; `critic` are the params of its own trunk.
        Arrays that are float32 already are taken over, not copied: an update gives them away.
      update: (TrainState, TokenBatch) -> (TrainState, Metrics, logp_new [B,T]); jitted, and the
        state is donated. `logp_new` is what the loss saw, before the parameters moved. A loss or
        gradient that is not finite leaves params, optimizer states and ema as they are, and metric
        `skipped` says so.
      adapt: (TrainState, Metrics of the last update) -> TrainState with its controllers moved. Once
        per rollout, after its last minibatch: at the first one the ratio is 1, and a controller
        that looked then would see neither KL nor clipping. After a skipped update they stay.
      recompute: (params, TokenBatch) -> TokenBatch with logp_old under `params`, for minibatches
        before a rollout's first update; logp_behavior stays the sampler's, so that ratios and
        off-policy gates see both (decoupled, arXiv:2110.00641). With routing='recompute' the
        experts of that forward pass are recorded and replayed from then on (arXiv:2512.01374).
      values: (TrainState, batch) -> [B,T] float32 values of the critic; None without one.
      value_update: (TrainState, TokenBatch) -> (TrainState, Metrics): the critic's parameters
        alone (a shared trunk's value head) follow 1/2 (V - R)^2 to Monte-Carlo returns, from
        `rewards`; the state is donated. None without a Critic.
      value_fit: the same to the batch's own `returns`, for natural-gradient algorithms, whose
        `update` leaves the critic alone. None for others, and without a Critic.
    """

    init: Callable[..., TrainState]
    update: Callable[[TrainState, TokenBatch], tuple[TrainState, Metrics, Array]]
    adapt: Callable[[TrainState, Metrics], TrainState]
    recompute: Callable[[Any, TokenBatch], TokenBatch]
    values: Callable[[TrainState, Any], Array] | None = None
    value_update: Callable[[TrainState, TokenBatch], tuple[TrainState, Metrics]] | None = None
    value_fit: Callable[[TrainState, TokenBatch], tuple[TrainState, Metrics]] | None = None


def make_learner(
    model: Any,
    algorithm: Algorithm,
    optimizer: Any,
    *,
    critic: Critic | None = None,
    ema: float | None = None,
    router: RouterLosses = RouterLosses(),  # noqa: B008, it is frozen
    routing: str = 'rollout',
    temperature: float = 1.0,
    allowed: Any = None,
    microbatches: int = 1,
    length_buckets: LengthBuckets | None = None,
    diagnose: Callable[[LossInputs], Metrics] = diagnostics.diagnose,
) -> Learner:
    """Bind an algorithm to a model and an optimizer.

    One update is: `prepare` and `weigh` on the whole minibatch; then, for a gradient rule, loss,
    gradients and metrics summed over microbatches, and one optimizer step; for a natural-gradient
    rule, its step on the summed loss, with the optimizer and the critic's own trunk left alone.

    Args:
      model: a `policyopt.models` model.
      algorithm: its `loss`, `prepare`, `controllers` and `update` are used here.
      optimizer: an optax optimizer (`make_optimizer`), for gradient rules.
      critic: its own trunk, or the optimizer of value pretraining on the policy's trunk. A model
        with a value head needs none to be trained by the algorithm's own value loss.
      ema: decay of the parameters' moving average, in (0, 1); None for none.
      router: coefficients of router losses; expert load is reported for any mixture of experts.
      routing: what `recompute` does with experts: 'rollout' replays the batch's, 'recompute'
        routes live and records them.
      temperature: that of the sampler; log-probs are scored under the distribution drawn from.
      allowed: [V] bool, the sampler's set of tokens (`sampling.allowed_mask`); None allows all.
      microbatches: parts of a minibatch; they must divide its rows, and change memory only.
      length_buckets: microbatches by length instead; `TokenBatch.length` should be on the host.
      diagnose: LossInputs -> metrics beside those of the loss; controllers may read them.

    Raises:
      ValueError: at construction, naming the argument, for a value that is out of range or has no
        effect here; at the first trace where `microbatches` doesn't divide the rows.
    """
    scored = dict(temperature=temperature, allowed=allowed)
    score = functools.partial(scoring.score_and_hidden, model, **scored)
    bound = Binding(model, algorithm, optimizer, critic, ema, router, routing, diagnose, score)
    _check(bound, temperature, microbatches, length_buckets)
    run, look = _ways(microbatches, length_buckets, bound.rules)
    if algorithm.update.step is None:
        update = run(updates.policy_job(bound))
    else:
        update = updates.natural_update(bound, microbatches)
    return Learner(
        init=functools.partial(state_lib.init, bound),
        update=update,
        adapt=make_adapt(algorithm),
        recompute=make_recompute(bound, look),
        values=make_values(bound, look),
        value_update=make_value_update(bound, run),
        value_fit=None
        if algorithm.update.step is None
        else make_value_update(bound, run, critic_lib.estimated),
    )


def _ways(
    parts: int, buckets: LengthBuckets | None, rules: sharding.Rules
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How minibatches are split: functions that drive a Job, and that map a look over rows."""
    lib = microbatches_lib
    if buckets is None:
        named = dict(parts=parts, rules=rules)
        return functools.partial(lib.scanned, **named), functools.partial(lib.mapped, **named)
    named = dict(buckets=buckets, rules=rules)
    return functools.partial(lib.bucketed, **named), functools.partial(lib.bucket_mapped, **named)


def _check(bound: Binding, temperature: float, parts: int, buckets: LengthBuckets | None) -> None:
    """Raise ValueError for arguments of `make_learner` that are illegal or would do nothing."""
    if not temperature > 0:
        raise ValueError(f'temperature is {temperature}; training needs one above 0')
    if parts < 1:
        raise ValueError(f'microbatches={parts}; legal is 1 or more')
    if buckets is not None and parts != 1:
        raise ValueError(f'microbatches={parts} has no effect with length_buckets; legal is 1')
    if buckets is not None and bound.algorithm.update.step is not None:
        raise ValueError(
            f'length_buckets={buckets} with a natural-gradient algorithm; legal is None'
        )
    if bound.ema is not None and not 0 < bound.ema < 1:
        raise ValueError(f'ema={bound.ema}; legal is above 0 and below 1, or None')
    checks.one_of('routing', bound.routing, ROUTING)
    config = bound.model.config
    if config.moe is None and bound.routing == 'recompute':
        raise ValueError("routing='recompute' for a model without experts; legal is 'rollout'")
    if config.moe is None and bound.router != RouterLosses():
        raise ValueError(f'router={bound.router} for a model without experts; legal is 0 for both')
    if bound.critic is None:
        return
    if bound.own is not None and getattr(bound.model, 'adapters', None) is not None:
        raise ValueError(
            "critic has its own trunk, all of which would be trained beside the policy's adapters; "
            'legal is a value head on the shared trunk'
        )
    if bound.own is None and not config.value_head:
        raise ValueError(
            'critic shares the trunk of a model without a value head; set value_head=True, or give '
            'Critic a model'
        )
    if bound.own is not None and config.value_head:
        raise ValueError('critic has its own trunk, and the policy a value head: legal is one')
    if bound.own is not None and not bound.own.config.value_head:
        raise ValueError('critic.model has no value head; legal is value_head=True')
    if bound.own is not None and bound.own.config.vocab_size != config.vocab_size:
        raise ValueError(
            f'critic.model has vocab_size={bound.own.config.vocab_size}, the policy '
            f'{config.vocab_size}; legal is the same'
        )


def make_adapt(algorithm: Algorithm) -> Callable[[TrainState, Metrics], TrainState]:
    """Build `Learner.adapt`."""

    @jax.jit
    def move(values: Mapping[str, Array], metrics: Metrics, step: Array) -> Mapping[str, Array]:
        moved = controllers_lib.update(algorithm.controllers, values, metrics, step)
        return optimizer_lib.where(metrics['skipped'].value == 0, moved, values)

    def adapt(state: TrainState, metrics: Metrics) -> TrainState:
        if not algorithm.controllers:
            return state
        # A schedule counts optimizer steps: `step - 1` is the last one taken.
        values = move(state.controllers, metrics, state.step - 1)
        return dataclasses.replace(state, controllers=values)

    return adapt


def make_recompute(bound: Binding, look: Callable[..., Any]) -> Callable[..., TokenBatch]:
    """Build `Learner.recompute`."""
    record = bound.routing == 'recompute'

    def see(params: Any, batch: TokenBatch) -> tuple[Array, Array | None]:
        scores, hidden = bound.score(params, batch, replay_routing=not record, entropy=False)
        return scores.logp_new, hidden.routing if record else None

    run = look(see)

    def recompute(params: Any, batch: TokenBatch) -> TokenBatch:
        logp_old, routing = run(params, batch)
        changes = {'routing': routing} if record else {}
        return dataclasses.replace(batch, logp_old=logp_old, **changes)

    return recompute


def make_values(bound: Binding, look: Callable[..., Any]) -> Callable[..., Array] | None:
    """Build `Learner.values`."""
    if bound.own is None and not bound.model.config.value_head:
        return None

    def see(params: Both, batch: Any) -> Array:
        moving = state_lib.critic_params(bound, params)
        return updates.critic_values(bound, params.policy, moving, batch)

    run = look(see)
    return lambda state, batch: run(both_of(state), batch)


def make_value_update(
    bound: Binding,
    run: Callable[..., Any],
    targets: Callable[[TokenBatch], TokenBatch] = critic_lib.monte_carlo,
) -> Callable[..., Any] | None:
    """Build `Learner.value_update`, and `Learner.value_fit` with other targets."""
    if bound.critic is None:
        return None
    update = run(updates.value_job(bound, targets))
    return lambda state, batch: update(state, batch)[:2]
