"""Sections of a run's config that belong to no other module."""

from __future__ import annotations

import dataclasses
from typing import Literal

from policyopt import checks
from policyopt import critic as critic_lib
from policyopt import learner as learner_lib


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised learning on right answers, until the policy is worth improving.

    Attributes:
      optimizer: of this stage.
      batch: rows of a step.
      max_steps: the run fails where the accuracy is not reached by then.
      every: steps between looks at the held-out accuracy; the last step is looked at, too.
      accuracy: (low, high) held-out accuracy; the first look at or above `low` ends the warm start,
        and one above `high` is remarked on.
    """

    optimizer: learner_lib.OptimizerConfig
    batch: int = 128
    max_steps: int = 1000
    every: int = 10
    accuracy: tuple[float, float] = (0.25, 0.5)

    def __post_init__(self):
        for name in ('batch', 'max_steps', 'every'):
            checks.number(f'warm_start.{name}', getattr(self, name), 1)
        low, high = self.accuracy
        if not 0 < low < high <= 1:
            raise ValueError(
                f'warm_start.accuracy is {(low, high)}; legal is 0 < low < high <= 1, or '
                'warm_start=None for a policy that needs none'
            )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How held-out accuracy is measured.

    Attributes:
      every: RL steps between measurements; the first and the last are always made.
      batch: rows sampled at once.
      temperature: 0 takes the most probable token.
      samples: answers printed at the end.
    """

    every: int = 25
    batch: int = 512
    temperature: float = 0.0
    samples: int = 8

    def __post_init__(self):
        for name, low in (('every', 1), ('batch', 1), ('temperature', 0), ('samples', 0)):
            checks.number(f'evaluation.{name}', getattr(self, name), low)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What scoring takes from the sampler's record, so that the first ratio is 1.

    Attributes:
      support: the kept token ids of truncated sampling. False scores under the full distribution:
        the first ratio is then the kept mass, below 1.
      routing: experts of a mixture: 'rollout' replays the sampler's (R3, arXiv:2510.11370),
        'recompute' those of the proximal policy's own forward pass (R2, arXiv:2512.01374), None
        routes live each time.
    """

    support: bool = True
    routing: Literal['rollout', 'recompute'] | None = 'rollout'


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """A critic with its own optimizer, for algorithms that estimate values.

    Attributes:
      optimizer: of the critic's trunk; on a shared trunk, of value pretraining alone.
      own: its own trunk, of the policy's shape and starting from its parameters (after the warm
        start); False shares the policy's.
      pretrain: steps that fit the critic to Monte-Carlo returns of the frozen policy before RL, and
        when they stop; None for none.
      fits: steps that fit it to returns after each one of an algorithm with natural-gradient steps,
        which leave it alone; None for others, whose own loss trains it.
    """

    optimizer: learner_lib.OptimizerConfig
    own: bool = False
    pretrain: critic_lib.ValueStop | None = None
    fits: int | None = None

    def __post_init__(self):
        if self.fits is not None:
            checks.number('critic.fits', self.fits, 1)
        if not self.own and self.pretrain is None and self.fits is None:
            raise ValueError(
                'critic has no effect without its own trunk, pretraining and fits; legal is '
                'own=True, a `pretrain` section, fits, or critic=None, which trains a value head '
                "on the policy's trunk with the policy's optimizer"
            )
