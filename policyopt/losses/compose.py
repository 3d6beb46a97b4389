"""Put loss parts together: policy_loss, value_loss, positive_nll, add, scale, adaptive.

A LossTransform is two pure functions. `weigh(batch)` fixes every token's weight on the whole
minibatch; `apply(inputs, weights)` returns sum(weights * token_loss) and metrics. Anyone may write
one by hand; these cover the published methods.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policyopt import checks, masked
from policyopt.types import (
    Array,
    LossInputs,
    LossOutput,
    LossTransform,
    Mean,
    MissingInput,
    Terms,
    require,
)

_OPTIONAL = ('logp_behavior', 'logp_ref', 'entropy', 'values', 'values_old', 'returns')
_FLOATS = ('logp_new', 'logp_old', 'advantages', *_OPTIONAL)


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A part whose coefficients are the current values of named controllers."""

    make: Callable[..., Any]
    arguments: Mapping[str, Any]
    slot: str

    def __call__(self, coefficients: Mapping[str, Array]) -> Any:
        """Make the part from the controllers' current values."""
        values = {}
        for argument, value in self.arguments.items():
            if isinstance(value, str):
                if value not in coefficients:
                    raise ValueError(
                        f'no controller named `{value}` in `coefficients`.'
                        f'{checks.nearest(value, coefficients)}'
                    )
                value = coefficients[value]
            values[argument] = value
        return self.make(**values)


def adaptive(make: Callable[..., Any], **arguments: Any) -> Any:
    """Return make(**arguments), made anew at each step from controllers' values.

    It goes into any slot but `aggregate`, whose weights depend on mask and group alone.

    Example: `adaptive(clipped, low=.2, high='clip_high')` in an algorithm with
    `controllers={'clip_high': controllers.adaptive_clip(.28, 'policy/frozen_high')}`.

    Args:
      make: factory of a loss part.
      **arguments: a string names a controller; anything else is the argument itself. An argument
        that is a string in its own right goes through functools.partial.
    """
    inner = make.func if isinstance(make, functools.partial) else make
    checks.check_arguments(inner, (), arguments, partial=True)
    return Adaptive(make, arguments, getattr(inner, 'slot', ''))


def _check_aggregate(aggregate: Any) -> None:
    if isinstance(aggregate, Adaptive):
        raise TypeError('aggregate is adaptive; token weights depend on mask and group alone')
    checks.check_slot('aggregate', aggregate)


def _bind(part: Any, coefficients: Mapping[str, Array]) -> Any:
    return part(coefficients) if isinstance(part, Adaptive) else part


def _ran(slot: str, part: Any, value: Any, shape: tuple[int, ...]) -> Array:
    """What a part returned, as [B,T]; raises where its shape can only broadcast by accident."""
    value = jnp.asarray(value)
    if value.shape != shape and not (value.ndim == 2 and value.shape in ((shape[0], 1), (1, 1))):
        name = getattr(part, '__name__', repr(part))
        raise ValueError(f'{slot} {name} returned shape {value.shape}, wanted {shape}')
    return jnp.broadcast_to(value, shape)


def clean(inputs: LossInputs, fields: Sequence[str] = _FLOATS) -> LossInputs:
    """Check shapes and dtypes, and put 0 wherever the mask is 0, so that nothing there can matter.

    Raises:
      ValueError: a field's shape is not that of logp_new, [B,T].
      TypeError: a field is not floating, is below float32, or differs in dtype from logp_new.
    """
    shape = jnp.shape(inputs.logp_new)
    if len(shape) != 2:
        raise ValueError(f'logp_new must be [B,T], got shape {shape}')
    mask = jnp.asarray(inputs.mask)
    if mask.shape != shape:
        raise ValueError(f'mask has shape {mask.shape}, logp_new {shape}')
    changes: dict[str, Any] = {'mask': mask != 0}
    dtype = jnp.asarray(inputs.logp_new).dtype
    for field in fields:
        if (value := getattr(inputs, field)) is None:
            continue
        value = jnp.asarray(value)
        if value.shape != shape:
            raise ValueError(f'{field} has shape {value.shape}, logp_new {shape}')
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f'{field} is {value.dtype}; legal: float32, float64')
        if jnp.finfo(value.dtype).bits < 32:
            raise TypeError(
                f'{field} is {value.dtype}; legal: float32, float64 (bf16 rounds 1.0004 to 1)'
            )
        if value.dtype != dtype:
            raise TypeError(f'{field} is {value.dtype}, logp_new {dtype}: all must be the same')
        changes[field] = masked.select(mask, value)
    if inputs.segment is not None:
        segment = jnp.asarray(inputs.segment)
        if segment.shape != shape:
            raise ValueError(f'segment has shape {segment.shape}, logp_new {shape}')
        if not jnp.issubdtype(segment.dtype, jnp.integer):
            raise TypeError(f'segment is {segment.dtype}; legal: integers')
        changes['segment'] = segment
    return dataclasses.replace(inputs, **changes)


def _check_weights(weights: Array, inputs: LossInputs) -> Array:
    if jnp.shape(weights) != inputs.mask.shape:
        raise ValueError(f'weights have shape {jnp.shape(weights)}, logp_new {inputs.mask.shape}')
    return jnp.asarray(weights, inputs.logp_new.dtype)


def _transform(
    name: str,
    weigh: Callable[[Any], Array],
    look: Callable[[LossInputs, Array], tuple[Terms, dict[str, Mean]]],
) -> LossTransform:
    """A weighted sum over tokens; `look` takes clean inputs and weights to terms and metrics."""

    def clean_look(inputs: LossInputs, weights: Array) -> tuple[Terms, dict[str, Mean]]:
        inputs = clean(inputs)
        return look(inputs, _check_weights(weights, inputs))

    def apply(inputs: LossInputs, weights: Array) -> LossOutput:
        terms, metrics = clean_look(inputs, weights)
        metrics = {f'{name}/{k}': v for k, v in metrics.items()}
        return LossOutput(jnp.sum(terms.loss), jax.lax.stop_gradient(metrics))

    return LossTransform(weigh, apply, lambda inputs, w: {name: clean_look(inputs, w)[0]})


def _by(aggregate: Any) -> Callable[[Any], Array]:
    return lambda batch: aggregate(batch.mask, getattr(batch, 'group', None))


def _weighted(weights: Array, token_loss: Array, mask: Array) -> Array:
    return masked.select(mask, weights * token_loss)


def _named(parts: Sequence[Any]) -> list[str]:
    """Names of parts, each once: the factory's, with a number behind it where it comes again."""
    names: list[str] = []
    for part in parts:
        made = part.make if isinstance(part, Adaptive) else part
        made = made.func if isinstance(made, functools.partial) else made
        name = getattr(made, '__name__', type(made).__name__).partition('(')[0]
        times = sum(n.partition(' ')[0] == name for n in names)
        names.append(f'{name} {times + 1}' if times else name)
    return names


@checks.factory('loss')
def policy_loss(
    *,
    ratio: Any,
    surrogate: Any,
    aggregate: Any,
    gates: Sequence[Any] = (),
    penalties: Sequence[Any] = (),
    name: str = 'policy',
) -> LossTransform:
    """sum_t weight_t (sum penalties_t - sg[prod gates_t] surrogate(log_ratio_t, A_t)).

    Metrics, each a Mean named `{name}/...`: over policy tokens `objective` (gated surrogate),
    `penalty` (where there is one), `ratio`, `extreme` (share with |log_ratio| >= 20); over active
    tokens, those with A != 0, `frozen` (share where the ungated surrogate has exactly no gradient
    in the token's logp_new), `gated` (share that a gate sets to 0), `stopped` (frozen or gated);
    `frozen_high` is the frozen share of tokens with A > 0 alone, `frozen_low` of those with A < 0.

    Args:
      ratio: member of losses.ratios.
      surrogate: member of losses.surrogates.
      aggregate: member of losses.aggregates.
      gates: members of losses.gates.
      penalties: members of losses.penalties.
      name: first part of the metrics' names.

    Returns:
      A LossTransform whose weights are one [B,T] array.

    Raises:
      TypeError: a part of another slot. At the first trace: MissingInput, and the errors of
        `clean`.
    """
    checks.check_slot('ratio', ratio)
    checks.check_slot('surrogate', surrogate)
    _check_aggregate(aggregate)
    for slot, parts in (('gate', gates), ('penalty', penalties)):
        if callable(parts):
            raise TypeError(f'{slot}s are a list: [{getattr(parts, "__name__", parts)}]')
        for part in parts:
            checks.check_slot(slot, part)

    def look(inputs: LossInputs, weights: Array) -> tuple[Terms, dict[str, Mean]]:
        bind = functools.partial(_bind, coefficients=inputs.coefficients)
        log_ratio_of, surrogate_of = bind(ratio), bind(surrogate)

        shape = inputs.mask.shape

        def policy_term(logp_new: Array) -> tuple[Array, Array]:
            log_ratio = log_ratio_of(dataclasses.replace(inputs, logp_new=logp_new))
            log_ratio = _ran('ratio', ratio, log_ratio, shape)
            objective = surrogate_of(log_ratio, inputs.advantages)
            return _ran('surrogate', surrogate, objective, shape), log_ratio

        objective, log_ratio = policy_term(inputs.logp_new)

        def run(slot: str, parts: Sequence[Any]) -> dict[str, Array]:
            values = [_ran(slot, x, bind(x)(inputs, log_ratio), shape) for x in parts]
            return dict(zip(_named(parts), values, strict=True))

        factors, added = run('gate', gates), run('penalty', penalties)
        gate = functools.reduce(jnp.multiply, factors.values(), jnp.ones_like(objective))
        gated = jax.lax.stop_gradient(gate) * objective
        penalty = functools.reduce(jnp.add, added.values(), jnp.zeros_like(objective))

        slope = jax.grad(lambda logp: jnp.sum(masked.select(inputs.mask, policy_term(logp)[0])))
        frozen = slope(jax.lax.stop_gradient(inputs.logp_new)) == 0
        metrics = _policy_metrics(inputs, log_ratio, gated, gate, frozen)
        if penalties:
            metrics['penalty'] = Mean.of(penalty, inputs.mask)
        loss = _weighted(weights, penalty - gated, inputs.mask)
        return Terms(weights, loss, log_ratio, objective, frozen, factors, added), metrics

    return _transform(name, _by(aggregate), look)


def _policy_metrics(
    inputs: LossInputs, log_ratio: Array, gated: Array, gate: Array, frozen: Array
) -> dict[str, Mean]:
    mask, advantages = inputs.mask, inputs.advantages
    active = mask & (advantages != 0)
    return {
        'objective': Mean.of(gated, mask),
        'ratio': Mean.of(masked.bounded_exp(log_ratio), mask),
        'extreme': Mean.of(jnp.abs(log_ratio) >= masked.EXTREME, mask),
        'frozen': Mean.of(frozen, active),
        'frozen_high': Mean.of(frozen, mask & (advantages > 0)),
        'frozen_low': Mean.of(frozen, mask & (advantages < 0)),
        'gated': Mean.of(gate == 0, active),
        'stopped': Mean.of(frozen | (gate == 0), active),
    }


@checks.factory('loss')
def value_loss(*, aggregate: Any, clip: float | None = None, name: str = 'value') -> LossTransform:
    """sum_t weight_t 1/2 (V_t - R_t)^2, with clip the larger of it and that of the clipped V.

    Clipping keeps V within +-clip of values_old (PPO's reference implementation).

    Args:
      aggregate: member of losses.aggregates.
      clip: in units of the value; None for no clipping.
      name: first part of the metrics' names: `error` (mean squared), `clipped` (share).
    """
    _check_aggregate(aggregate)
    if clip is not None:
        checks.number('clip', clip, 0)

    def look(inputs: LossInputs, weights: Array) -> tuple[Terms, dict[str, Mean]]:
        values, returns = require(inputs, 'values', name), require(inputs, 'returns', name)
        error = jnp.square(values - returns)
        metrics = {'error': Mean.of(error, inputs.mask)}
        if clip is not None:
            old = require(inputs, 'values_old', f'{name} with clip')
            kept = old + jnp.clip(values - old, -clip, clip)
            other = jnp.square(kept - returns)
            metrics['clipped'] = Mean.of(other > error, inputs.mask)
            error = jnp.where(other > error, other, error)
        return Terms(weights, _weighted(weights, 0.5 * error, inputs.mask)), metrics

    return _transform(name, _by(aggregate), look)


@checks.factory('loss')
def positive_nll(*, aggregate: Any, name: str = 'nll') -> LossTransform:
    """-sum_t weight_t logp_new_t over rows whose answer is correct (VAPO 2504.05118).

    Args:
      aggregate: member of losses.aggregates, over the tokens of `batch.positive` rows.
      name: first part of the metric's name: `logp`, mean log-prob of those tokens.
    """
    _check_aggregate(aggregate)

    def weigh(batch: Any) -> Array:
        positive = jnp.asarray(require(batch, 'positive', 'positive_nll')) > 0
        mask = (jnp.asarray(batch.mask) != 0) & positive[:, None]
        return aggregate(mask, getattr(batch, 'group', None))

    def look(inputs: LossInputs, weights: Array) -> tuple[Terms, dict[str, Mean]]:
        metrics = {'logp': Mean.of(inputs.logp_new, weights)}
        return Terms(weights, _weighted(weights, -inputs.logp_new, inputs.mask)), metrics

    return _transform(name, weigh, look)


def add(*losses: LossTransform) -> LossTransform:
    """Sum of losses; weights become a tuple.

    Raises TypeError for what is no LossTransform, and at the first trace ValueError where two
    report the same metric: give one of them another `name`.
    """
    _check_losses(*losses)

    def weigh(batch: Any) -> tuple[Any, ...]:
        return tuple(loss.weigh(batch) for loss in losses)

    def apply(inputs: LossInputs, weights: tuple[Any, ...]) -> LossOutput:
        if len(weights) != len(losses):
            raise ValueError(f'{len(losses)} losses were given {len(weights)} sets of weights')
        total, metrics = jnp.zeros((), inputs.logp_new.dtype), {}
        for loss, part in zip(losses, weights, strict=True):
            out = loss.apply(inputs, part)
            if shared := sorted(set(metrics) & set(out.metrics)):
                raise ValueError(f'two losses report {shared[0]!r}: give one of them a `name`')
            total, metrics = total + out.loss, metrics | out.metrics
        return LossOutput(total, metrics)

    def explain(inputs: LossInputs, weights: tuple[Any, ...]) -> dict[str, Terms]:
        parts = zip(losses, weights, strict=True)
        found = [loss.explain(inputs, part) for loss, part in parts if loss.explain]
        return {name: terms for each in found for name, terms in each.items()}

    said = all(loss.explain is not None for loss in losses)
    return LossTransform(weigh, apply, explain if said else None)


def _check_losses(*losses: Any) -> None:
    for loss in losses:
        checks.check_called('loss', loss)
        if not isinstance(loss, LossTransform):
            raise TypeError(f'a LossTransform belongs here, got {loss!r}')


def scale(factor: float | Array, loss: LossTransform) -> LossTransform:
    """factor * loss; its metrics are those of the unscaled loss."""
    checks.number('factor', factor)
    _check_losses(loss)

    def apply(inputs: LossInputs, weights: Any) -> LossOutput:
        out = loss.apply(inputs, weights)
        return LossOutput(factor * out.loss, out.metrics)

    def explain(inputs: LossInputs, weights: Any) -> dict[str, Terms]:
        terms = loss.explain(inputs, weights) if loss.explain else {}

        def scaled(x: Terms) -> Terms:
            return x._replace(weights=factor * x.weights, loss=factor * x.loss)

        return {name: scaled(x) for name, x in terms.items()}

    return LossTransform(loss.weigh, apply, explain if loss.explain else None)


def required_inputs(
    loss: LossTransform, coefficients: Mapping[str, Any] | None = None
) -> frozenset[str]:
    """Optional LossInputs fields without which `loss` raises MissingInput.

    Found by tracing the loss abstractly with one field at a time left out; nothing is computed.
    A trainer scores a reference policy only where this names `logp_ref`. `coefficients` are those
    of `controllers.init(algorithm.controllers)`; an adaptive loss needs them.
    """
    x = jnp.zeros((1, 1), jnp.float32)
    row = jnp.ones((1,), jnp.int32)
    full = LossInputs(
        **dict.fromkeys(_FLOATS, x),
        mask=x,
        segment=jnp.zeros((1, 1), jnp.int32),
        coefficients={k: jnp.float32(v) for k, v in (coefficients or {}).items()},
    )

    def run(inputs: LossInputs) -> Array:
        batch = _Batch(mask=inputs.mask, group=row, positive=row)
        return loss.apply(inputs, loss.weigh(batch)).loss

    def missing(field: str) -> bool:
        try:
            jax.eval_shape(run, dataclasses.replace(full, **{field: None}))
        except MissingInput as error:
            return error.field == field
        except (TypeError, ValueError, AttributeError):
            return True  # a part that reads the field without asking for it
        return False

    jax.eval_shape(run, full)  # an error here is the loss's own
    return frozenset(field for field in (*_OPTIONAL, 'segment') if missing(field))


class _Batch(NamedTuple):
    mask: Array
    group: Array
    positive: Array
