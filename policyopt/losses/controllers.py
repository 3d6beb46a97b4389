"""Coefficients that adapt between steps: name -> Controller(init, update), state = current value.

A loss part reads one through `compose.adaptive`. The state of all of them is a dict of scalars that
the trainer carries: `values = init(controllers)`, then, once per rollout, `values =
update(controllers, values, metrics, step)` with the metrics of its last optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from policyopt import checks
from policyopt.types import Array, Controller, Metrics

Values = dict[str, Array]


def init(controllers: Mapping[str, Controller]) -> Values:
    """Return the values at step 0, float32 scalars."""
    return {name: jnp.float32(controller.init) for name, controller in controllers.items()}


def update(
    controllers: Mapping[str, Controller],
    values: Mapping[str, Array],
    metrics: Metrics,
    step: Array,
) -> Values:
    """Return the next values, from the metrics of the step just taken."""
    return {
        name: jnp.asarray(controller.update(values[name], metrics, step), jnp.float32)
        for name, controller in controllers.items()
    }


def _read(metrics: Metrics, name: str) -> Array:
    if name not in metrics:
        raise KeyError(f'a controller reads the metric `{name}`.{checks.nearest(name, metrics)}')
    return metrics[name].value


@checks.factory('controllers')
def doubling_kl(
    init: float = 1.0,
    target: float = 0.01,
    metric: str = 'kl_old/k3',
    low: float = 1e-4,
    high: float = 1e4,
) -> Controller:
    """KL < target/1.5 halves the coefficient, KL > 1.5 target doubles it (PPO 1707.06347).

    As in the paper, once per rollout. What it reads is the KL that the rollout's last optimizer
    step saw, so more than one of them per rollout is needed: the first sees none.

    Args:
      init: first value; in [low, high].
      target: nats per token. Unpublished for language models: .01 is a choice.
      metric: name of the KL it reads.
      low: smallest value; a choice, so that a coefficient at rest can come back.
      high: largest value; a choice.
    """
    checks.number('low', low, 1e-12)
    checks.number('high', high, low)
    checks.number('init', init, low, high)
    checks.number('target', target, 1e-12)

    def step(value: Array, metrics: Metrics, count: Array) -> Array:
        del count
        kl = _read(metrics, metric)
        factor = jnp.where(kl < target / 1.5, 0.5, jnp.where(kl > 1.5 * target, 2.0, 1.0))
        return jnp.clip(value * factor, low, high)

    return Controller(init, step)


@checks.factory('controllers')
def proportional_kl(
    init: float, target: float, rate: float = 0.1, metric: str = 'kl_reference/k3'
) -> Controller:
    """value * (1 + rate clip(KL/target - 1, -.2, .2)) (1909.08593).

    Args:
      init: first value; above 0.
      target: nats per token.
      rate: how much of the clipped relative error one step answers.
      metric: name of the KL it reads.
    """
    checks.number('init', init, 1e-12)
    checks.number('target', target, 1e-12)
    checks.number('rate', rate, 0)

    def step(value: Array, metrics: Metrics, count: Array) -> Array:
        del count
        error = jnp.clip(_read(metrics, metric) / target - 1, -0.2, 0.2)
        return jnp.where(jnp.isfinite(error), value * (1 + rate * error), value)

    return Controller(init, step)


@checks.factory('controllers')
def adaptive_clip(
    init: float,
    metric: str,
    target: float = 0.1,
    rate: float = 0.5,
    low: float = 1e-6,
    high: float = 1.0,
) -> Controller:
    """eps <- clip(eps exp(rate (c - target)), low, high), c the share that the last step clipped.

    One controller a side: `policy/frozen_high`, a share of the tokens with A > 0, drives the upper
    distance, `policy/frozen_low` the lower one. A step that counted no such token changes nothing.
    It needs more than one optimizer step per rollout: at ratio 1 nothing is ever clipped, and eps
    shrinks to `low`.

    Args:
      init: first eps.
      metric: name of the share it reads.
      target: wanted share. Unpublished: .1 is the middle of a band of .05 to .15.
      rate: step size in log eps. Unpublished: .5 is a choice.
      low: smallest eps.
      high: largest eps.
    """
    checks.number('init', init, low, high)
    checks.number('target', target, 0, 1)
    checks.number('rate', rate, 0)

    def step(value: Array, metrics: Metrics, count: Array) -> Array:
        del count
        share = _read(metrics, metric)
        error = jnp.where(metrics[metric].count > 0, share - target, 0)
        return jnp.clip(value * jnp.exp(rate * error), low, high)

    return Controller(init, step)


@checks.factory('controllers')
def scheduled(schedule: Callable[[Array | int], Array | float]) -> Controller:
    """The value of an optax-style schedule, step -> value: schedule(k) at step k."""

    def step(value: Array, metrics: Metrics, count: Array) -> Array:
        del value, metrics
        return jnp.asarray(schedule(count + 1))

    return Controller(float(schedule(0)), step)
