"""The supervised stage: imitate right answers until the policy is worth improving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from policyopt import data, evaluate, losses, metrics, stopping
from policyopt import learner as learner_lib
from policyopt.recipe import Setup
from policyopt.types import Algorithm, Estimates


def imitation() -> Algorithm:
    """Negative log-likelihood of right answers, the mean over tokens."""
    return Algorithm(
        advantages=lambda rollout: Estimates(jnp.zeros_like(rollout.mask)),
        loss=losses.positive_nll(aggregate=losses.token_mean()),
    )


def warm_start(setup: Setup, params: Any, records: Path, stop: stopping.Stop) -> tuple[Any, int]:
    """Imitate until the held-out accuracy is in the window of the config: (params, steps).

    Raises ValueError where it isn't within `max_steps`, with the accuracy reached.
    """
    c = setup.config.warm_start
    if c is None:
        return params, 0
    low, high = c.accuracy
    learner = learner_lib.make_learner(
        setup.model,
        imitation(),
        learner_lib.make_optimizer(c.optimizer),
        router=setup.config.router,
        diagnose=lambda inputs: {},
    )
    state = learner.init(params, jax.random.key(setup.config.seed))
    source = data.batches(setup.task.train, c.batch, setup.config.seed)
    with metrics.Display('warm start', c.max_steps, at_most=True) as display:
        for step in range(1, c.max_steps + 1):
            stop.check()
            batch = data.supervised(next(source), setup.model.tokenizer, setup.width)
            state, found, _ = learner.update(state, batch)
            if step % c.every and step < c.max_steps:
                continue
            accuracy = evaluate.held_out(setup, state.params)
            values = {'loss': float(found['loss'].value), 'held_out': accuracy.value}
            metrics.append(records, 'warm_start', step, values)
            display.update(step, values)
            if accuracy.value >= low:
                break
        else:
            raise ValueError(
                f'held-out accuracy is {accuracy} after {c.max_steps} steps of warm start, not '
                f'{low:.0%}: raise warm_start.max_steps or make the task easier'
            )
    if accuracy.value > high:
        print(f'the warm start went past {high:.0%}: look more often (warm_start.every)')
    return state.params, step
