"""Updates of the policy and of the critic, as functions of a `state.Binding`.

A minibatch is weighed as a whole and then split (`microbatches`); each part is evaluated by one
forward pass, and what the parts sum to is one step, or none where something is not finite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from policyopt import critic as critic_lib
from policyopt import masked
from policyopt import microbatches as microbatches_lib
from policyopt import optimizer as optimizer_lib
from policyopt.critic import CriticState, ExplainedVariance
from policyopt.losses import aggregates
from policyopt.microbatches import Found, Part
from policyopt.state import (
    Binding,
    Both,
    RouterLosses,
    TrainState,
    both_of,
    critic_params,
    merged,
    moving_of,
    pin,
    pin_both,
    pin_rest,
)
from policyopt.types import Array, LossInputs, Mean, Metrics, Scores, TokenBatch


class Shared(NamedTuple):
    """What all parts of a minibatch read: controllers' values, valid tokens of the minibatch."""

    controllers: Mapping[str, Array]
    tokens: Array


def evaluate(
    bound: Binding, params: Both, part: Part, shared: Shared
) -> tuple[Array, tuple[Found, Array]]:
    """Loss of one part, what it found, and logp_new [b,T]."""
    batch = part.batch
    scores, hidden = bound.score(params.policy, batch)
    if bound.own is not None:
        values = critic_lib.batch_values(bound.own, params.critic, batch)
        scores = dataclasses.replace(scores, values=values)
    inputs = loss_inputs(batch, scores, shared.controllers)
    out = bound.algorithm.loss.apply(inputs, part.weights)
    loss, metrics = out.loss, out.metrics | bound.diagnose(inputs)
    if inputs.values is not None and inputs.returns is not None:
        metrics |= explained(inputs.values, inputs.returns, inputs.mask)
    if batch.support is not None:
        metrics['replay/support'] = supported(batch.support, batch.mask)
    if hidden.aux:
        penalty, more = router_terms(bound.router, hidden.aux, shared.tokens)
        loss, metrics = loss + penalty, metrics | more
    found = Found(loss, metrics, hidden.aux.get('load'))
    return loss, (jax.lax.stop_gradient(found), scores.logp_new)


def explained(values: Array, returns: Array, mask: Array) -> Metrics:
    """Explained variance of a critic: of all tokens, and of each tenth of an answer; [B,T]."""
    return {
        'value/explained_variance': ExplainedVariance.of(values, returns, mask),
        'value/explained_at': ExplainedVariance.by_position(values, returns, mask),
    }


def supported(support: Array, mask: Array) -> Mean:
    """Share of the mask's tokens with a recorded support, from support [B,T,K] and mask [B,T]."""
    return Mean.of(jnp.any(support >= 0, axis=-1).astype(jnp.float32), mask)


def router_terms(
    router: RouterLosses, aux: Mapping[str, Any], tokens: Array
) -> tuple[Array, Metrics]:
    """Router losses of a part, as its share of the minibatch's `tokens`, and their metrics."""
    loads = aux['load']
    count = jnp.maximum(tokens * loads.shape[0], 1)
    loss = jnp.zeros((), jnp.float32)
    terms = (('load_balance', router.load_balance), ('router_z', router.router_z))
    for name, coefficient in terms:
        if coefficient:
            loss = loss + coefficient * aux[name].total / count
    agreement = aux['replay_agreement']
    replayed = Mean(total=agreement.count, count=jnp.sum(loads))
    names = ('load_balance', 'router_z', 'replay_agreement')
    return loss, {f'moe/{name}': aux[name] for name in names} | {'moe/replayed': replayed}


def load_metrics(load: Array) -> Metrics:
    """Of loads [L_moe,E]: how unevenly tokens are spread over experts.

    `moe/load_max` is the largest share that one expert takes of its layer, over layers and experts,
    1/E at perfect balance; `moe/load_entropy` is in nats, the mean over layers, log E at perfect
    balance. [L_moe], by mixture layer: `moe/load_over_mean`, the busiest expert's tokens over the
    mean expert's, 1 at perfect balance; `moe/unused`, the share of experts without a token.
    """
    share = masked.safe_divide(load, jnp.sum(load, axis=1, keepdims=True))
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), axis=1)
    return {
        'moe/load_max': one(jnp.max(share)),
        'moe/load_entropy': one(jnp.mean(entropy)),
        'moe/load_over_mean': one(jnp.max(share, axis=1) * load.shape[1]),
        'moe/unused': one(jnp.mean(load == 0, axis=1, dtype=jnp.float32)),
    }


def norm_metrics(name: str, tree: Any) -> Metrics:
    """Global norm of gradients or steps as `name`, and of each group of layers, `name/GROUP`."""
    groups = optimizer_lib.group_norms(tree)
    found = {f'{name}/{group}': one(size) for group, size in groups.items()}
    return {name: one(optimizer_lib.norm(tree)), **found}


def begin(bound: Binding, state: TrainState, batch: TokenBatch) -> tuple[Part, Shared]:
    """Prepare and weigh a whole minibatch."""
    chex.assert_rank([batch.tokens, batch.mask], 2)
    batch = bound.algorithm.prepare(microbatches_lib.pin_rows(batch, bound.rules))
    tokens = jnp.asarray(batch.tokens.size, jnp.float32)
    if batch.length is not None:
        tokens = jnp.sum(jnp.minimum(batch.length, batch.tokens.shape[1]), dtype=jnp.float32)
    whole = Part(batch, bound.algorithm.loss.weigh(batch))
    return microbatches_lib.pin_rows(whole, bound.rules), Shared(state.controllers, tokens)


def finish(
    bound: Binding, state: TrainState, grads: Both, found: Found
) -> tuple[TrainState, Metrics]:
    """One optimizer step from summed gradients, or none where something is not finite."""
    size, critic_size = optimizer_lib.norm(grads.policy), optimizer_lib.norm(grads.critic)
    ok = jnp.isfinite(found.loss) & jnp.isfinite(size) & jnp.isfinite(critic_size)
    params, opt_state, moved = optimizer_lib.apply(
        bound.optimizer, grads.policy, state.opt_state, moving_of(state).policy, ok
    )
    metrics = norm_metrics('grad_norm', grads.policy) | norm_metrics('update_norm', moved)
    side = state.critic
    if bound.critic is not None and side is not None and bound.own is not None:
        own, own_state, moved = optimizer_lib.apply(
            bound.critic.optimizer, grads.critic, side.opt_state, side.params, ok
        )
        side = CriticState(params=own, opt_state=own_state)
        metrics |= {
            'value/grad_norm': one(critic_size),
            'value/update_norm': one(optimizer_lib.norm(moved)),
        }
    return conclude(bound, state, params, opt_state, side, found, ok, metrics)


def conclude(
    bound: Binding,
    state: TrainState,
    params: Any,
    opt_state: Any,
    side: CriticState | None,
    found: Found,
    ok: Array,
    metrics: Metrics,
) -> tuple[TrainState, Metrics]:
    """The state with its new parts, laid out, and all metrics; `params` are the trained part."""
    ema = None if bound.ema is None else optimizer_lib.average(bound.ema, state.ema, params, ok)
    policy = merged(state.params, params)
    both = pin_both(bound, Both(policy, None if side is None else side.params))
    opt_state, ema, side_state = pin_rest(
        bound, both, opt_state, ema, None if side is None else side.opt_state
    )
    new = dataclasses.replace(
        state,
        params=both.policy,
        opt_state=opt_state,
        step=state.step + 1,
        ema=ema,
        critic=None if side is None else CriticState(params=both.critic, opt_state=side_state),
    )
    metrics = found.metrics | metrics | {'loss': one(found.loss), 'skipped': one(~ok)}
    metrics |= {f'controller/{name}': one(value) for name, value in state.controllers.items()}
    if found.load is not None:
        metrics |= load_metrics(found.load)
    return new, metrics


def policy_job(bound: Binding) -> microbatches_lib.Job:
    """The algorithm's update by its gradient."""

    def objective(state: TrainState, moving: Both, part: Part, shared: Shared):
        params = Both(merged(state.params, moving.policy), moving.critic)
        return evaluate(bound, params, part, shared)

    return microbatches_lib.Job(
        begin=functools.partial(begin, bound),
        params=moving_of,
        objective=objective,
        finish=functools.partial(finish, bound),
        pin=functools.partial(pin_both, bound),
    )


def natural_update(bound: Binding, parts: int) -> Callable[..., Any]:
    """The update by a natural-gradient rule (`trust_region`), over equal microbatches."""

    def update(state: TrainState, batch: TokenBatch) -> tuple[TrainState, Metrics, Array]:
        whole, shared = begin(bound, state, batch)
        pieces = microbatches_lib.split(whole, parts, bound.rules)
        moving, critic = moving_of(state)
        tokens = jnp.maximum(jnp.sum(whole.batch.mask != 0), 1)

        def looked(params: Any, part: Part):
            return evaluate(bound, Both(merged(state.params, params), critic), part, shared)

        def kl(params: Any, part: Part, centred: bool = False) -> Array:
            logp = bound.score(merged(state.params, params), part.batch)[0].logp_new
            old = jax.lax.stop_gradient(logp) if centred else part.batch.logp_old
            gap = masked.select(part.batch.mask, logp - old)
            return jnp.sum(masked.exp_excess(gap)) / tokens

        _, (found, logp_new) = jax.lax.scan(
            lambda _, part: (None, looked(moving, part)[1]), None, pieces
        )
        found = microbatches_lib.total(found)
        params, metrics = bound.algorithm.update.step(  # type: ignore[misc]
            moving,
            summed(lambda params, part: looked(params, part)[0], pieces),
            summed(kl, pieces),
            summed(functools.partial(kl, centred=True), pieces),
        )
        ok = jnp.isfinite(found.loss) & (metrics['trust_region/nonfinite'].value == 0)
        params = optimizer_lib.where(ok, params, moving)
        moved = jax.tree.map(jnp.subtract, params, moving)
        metrics |= norm_metrics('update_norm', moved)
        state, metrics = conclude(
            bound, state, params, state.opt_state, state.critic, found, ok, metrics
        )
        return state, metrics, microbatches_lib.join(logp_new)

    return jax.jit(update, donate_argnums=0)


def summed(term: Callable[..., Array], pieces: Part) -> Callable[[Any], Array]:
    """params -> sum over parts of term(params, part), whose backward pass keeps one part."""

    def run(params: Any) -> Array:
        body = jax.checkpoint(lambda acc, part: (acc + term(params, part), None))
        return jax.lax.scan(body, jnp.zeros((), jnp.float32), pieces)[0]

    return run


def critic_values(bound: Binding, policy: Any, params: Any, batch: Any) -> Array:
    """Values [b,T] from `state.critic_params`, on the policy's trunk where they are its head."""
    if bound.own is not None:
        return critic_lib.batch_values(bound.own, params, batch)
    return critic_lib.batch_values(bound.model, {**policy, **params}, batch, batch.routing)


def value_job(
    bound: Binding, targets: Callable[[TokenBatch], TokenBatch] = critic_lib.monte_carlo
) -> microbatches_lib.Job:
    """A fit of the critic alone: 1/2 (V - R)^2, the mean over tokens.

    To Monte-Carlo returns, as value pretraining does, or to what `targets` puts in `returns`.
    """
    assert bound.critic is not None
    optimizer, weigh = bound.critic.optimizer, aggregates.token_mean()

    def begin(state: TrainState, batch: TokenBatch) -> tuple[Part, None]:
        batch = targets(microbatches_lib.pin_rows(batch, bound.rules))
        return Part(batch, weigh(batch.mask, batch.group)), None

    def objective(state: TrainState, params: Any, part: Part, shared: None):
        del shared
        batch = part.batch
        values = critic_values(bound, state.params, params, batch)
        error = masked.select(batch.mask, jnp.square(values - batch.returns))
        loss = jnp.sum(masked.select(batch.mask, part.weights * 0.5 * error))
        metrics = {'value/error': Mean.of(error, batch.mask)}
        metrics |= explained(values, batch.returns, batch.mask)
        return loss, (jax.lax.stop_gradient(Found(loss, metrics)), values)

    def finish(state: TrainState, grads: Any, found: Found) -> tuple[TrainState, Metrics]:
        assert state.critic is not None
        size = optimizer_lib.norm(grads)
        ok = jnp.isfinite(found.loss) & jnp.isfinite(size)
        old = critic_params(bound, both_of(state))
        new, opt_state, moved = optimizer_lib.apply(
            optimizer, grads, state.critic.opt_state, old, ok
        )
        own = bound.own is not None
        both = Both(state.params if own else {**state.params, **new}, new if own else None)
        both = pin_both(bound, both)
        _, _, opt_state = pin_rest(bound, both, (), None, opt_state)
        metrics = found.metrics | {
            'value/loss': one(found.loss),
            'value/grad_norm': one(size),
            'value/update_norm': one(optimizer_lib.norm(moved)),
            'skipped': one(~ok),
        }
        side = CriticState(params=both.critic, opt_state=opt_state)
        return dataclasses.replace(state, params=both.policy, critic=side), metrics

    return microbatches_lib.Job(
        begin=begin,
        params=lambda state: critic_params(bound, both_of(state)),
        objective=objective,
        finish=finish,
        pin=lambda grads: pin(bound.own or bound.model, grads),
    )


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


def one(x: Array) -> Mean:
    """A single observation as a Mean; of an array, one of each of its elements."""
    return Mean(total=jnp.asarray(x, jnp.float32), count=jnp.ones(jnp.shape(x), jnp.float32))
