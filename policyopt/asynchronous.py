"""Rollouts that are drawn ahead of the policy that learns from them: their section of the config.

How it is done is in `policyopt.stream`; what it is worth, and at which staleness, in
`docs/asynchronous.md`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from policyopt import checks, hosts, sharding
from policyopt.losses import compose
from policyopt.losses import controllers as controllers_lib
from policyopt.types import Algorithm, LossInputs


@dataclasses.dataclass(frozen=True)
class AsyncConfig:
    """How far generation may be ahead of training, and on which devices.

    Up to (staleness + 1) * rollout.prompts problems have answers under way or waiting. A step takes
    the first rollout.prompts of them whose answers are all there; the others go on under the new
    parameters.

    Attributes:
      staleness: versions that a token may be older than the policy that learns from it; a version
        is an RL step. 0 waits for all answers of a step, as a run without this section does.
      generators: engines, each with rollout.engine.slots slots. Several wait for each other's
        calls, as does a trainer for those `ahead`, so calls then have all rollout.engine.steps
        tokens, and a row that ends leaves its slot empty until the next: few steps are better.
      late: what becomes of answers that would be too old at the next step: this one waits for them
        ('wait'), which loses none, or they are given up ('drop') and counted, which favours short
        answers.
      cache: what becomes of the keys and values of answers under way when parameters change:
        'recompute' makes new ones, so that a resumed run has the same bits; 'keep' goes on with
        those of older parameters, which costs nothing.
      devices: the last devices that generators have for themselves, in equal parts; None: they take
        turns with the trainer on all.
      mesh: (axis, devices) pairs of a generator's own devices, as in `mesh` of the run; None puts
        them all into 'data'.
      ahead: calls of each engine (rollout.engine.steps tokens of each row) that generators make
        while the trainer computes an update, with the parameters from before it.
    """

    staleness: int = 1
    generators: int = 1
    late: Literal['wait', 'drop'] = 'wait'
    cache: Literal['recompute', 'keep'] = 'recompute'
    devices: int | None = None
    mesh: tuple[tuple[str, int], ...] | None = None
    ahead: int = 0

    def __post_init__(self):
        for name, low in (('staleness', 0), ('generators', 1), ('ahead', 0)):
            checks.number(f'config.asynchronous.{name}', getattr(self, name), low)
        if self.staleness == 0:
            for name, value in (('late', 'wait'), ('cache', 'recompute'), ('ahead', 0)):
                if getattr(self, name) != value:
                    raise ValueError(
                        f'config.asynchronous.{name} is {getattr(self, name)!r}, which has no '
                        'effect at staleness 0: a step waits for all answers under way; legal is '
                        f'{value!r}'
                    )
        if self.devices is None:
            if self.mesh is not None:
                raise ValueError(
                    f'config.asynchronous.mesh is {self.mesh}, which has no effect without '
                    'config.asynchronous.devices: generators and trainer share config.mesh'
                )
            return
        checks.number('config.asynchronous.devices', self.devices, 1)
        if self.devices % self.generators:
            raise ValueError(
                f'config.asynchronous.devices is {self.devices}; legal are multiples of the '
                f'{self.generators} generators'
            )


def check(config: Any, name: str, algorithm: Algorithm, played: bool) -> None:
    """Raise ValueError where a `recipe.RunConfig` can't be run asynchronously as it says.

    Args:
      config: with its section.
      name: of the algorithm.
      algorithm: as built.
      played: whether the task has environments.
    """
    c, a = config, config.asynchronous
    if c.rollout.engine is None:
        raise ValueError(
            'config.asynchronous needs config.rollout.engine: only the engine goes on with answers '
            'under way; legal is a section such as dict(slots=64)'
        )
    if c.rollout.chunks != 1:
        raise ValueError(
            f'config.rollout.chunks is {c.rollout.chunks}, which has no effect with '
            'config.asynchronous: answers are judged as they end; legal is 1'
        )
    if played:
        raise ValueError(
            'config.asynchronous is set, but the task has environments, whose state no checkpoint '
            'could hold; legal is None'
        )
    if hosts.several():
        raise ValueError(
            'config.asynchronous is set, but there are several processes; legal is one, without '
            '--multihost, or None'
        )
    if a.staleness and not corrects(algorithm, c.logp_old):
        also = ''
        if c.logp_old == 'sampler' and corrects(algorithm, 'recomputed'):
            also = (
                ". Its gates compare logp_old with the sampler's, which config.logp_old="
                "'sampler' makes equal"
            )
        raise ValueError(
            f'config.asynchronous.staleness is {a.staleness}, but {name} with config.logp_old='
            f'{c.logp_old!r} does not correct for answers of older versions{also}. Legal are '
            "config.logp_old='recomputed' with algorithm_kw.gates=['truncated_importance'] or "
            "['masked_importance'], gates=['off_policy_sequence'] with either, an algorithm with "
            'a weight of its own (deepseek_v32, minirl), or staleness 0'
        )


def corrects(algorithm: Algorithm, logp_old: str) -> bool:
    """Whether a gate of the loss answers to a distance from the sampler.

    Found by running it on four tokens, whose log-probs under policy and sampler are 8 nats apart,
    in either direction, with the proximal policy at the policy ('recomputed') or at the 'sampler'.
    A loss that does not explain itself is taken at its word, if it reads `logp_behavior`.
    """
    coefficients = {
        k: jnp.float32(v) for k, v in controllers_lib.init(algorithm.controllers).items()
    }
    if algorithm.loss.explain is None:
        return 'logp_behavior' in compose.required_inputs(algorithm.loss, coefficients)
    new, behavior = np.array([[-8.1, -8.1], [-0.1, -0.1]]), np.array([[-0.1, -0.1], [-8.1, -8.1]])
    old = behavior if logp_old == 'sampler' else new
    x = np.ones((2, 2))
    inputs = LossInputs(
        **{name: jnp.asarray(value, jnp.float32) for name, value in dict(
            logp_new=new, logp_old=old, logp_behavior=behavior, logp_ref=new, mask=x, advantages=-x,
            entropy=x, values=x, values_old=x, returns=x,
        ).items()},
        segment=jnp.ones((2, 2), jnp.int32),
        coefficients=coefficients,
    )  # fmt: skip
    row = jnp.ones(2, jnp.int32)
    weights = algorithm.loss.weigh(_Rows(inputs.mask, row, row))
    terms = algorithm.loss.explain(inputs, weights).values()
    gates = [gate for term in terms for gate in (term.gates or {}).values()]
    return any(bool(jnp.any(gate != 1)) for gate in gates)


class _Rows:
    def __init__(self, mask: Any, group: Any, positive: Any):
        self.mask, self.group, self.positive = mask, group, positive


def meshes(config: AsyncConfig, rules: sharding.Rules) -> list[Mesh | None]:
    """A mesh for each generator over devices of its own; None for those that share the trainer's.

    Raises ValueError as `sharding.make_mesh` does, and where no device is left for the trainer.
    """
    if config.devices is None:
        return [None] * config.generators
    own = split(config.devices)[1]
    each = config.devices // config.generators
    axes = config.mesh or (('data', each),)
    sharding.check_axes('config.asynchronous.mesh', axes, rules)
    try:
        return [
            sharding.make_mesh(axes, own[i * each : (i + 1) * each])
            for i in range(config.generators)
        ]
    except ValueError as error:
        raise ValueError(f'config.asynchronous.{error}') from error


def split(devices: int | None) -> tuple[Sequence[Any], Sequence[Any]]:
    """Devices of the trainer, and the last ones, of generators."""
    found = jax.devices()
    if devices is None:
        return found, []
    if devices >= len(found):
        raise ValueError(
            f'config.asynchronous.devices is {devices} of {len(found)} devices, which leaves none '
            f'to the trainer; legal is 1 to {len(found) - 1}, or None to take turns'
        )
    return found[:-devices], found[-devices:]
