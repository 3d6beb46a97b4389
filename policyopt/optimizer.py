"""Optimizers: schedule, clipping, decay by name, float32 masters, steps that may be skipped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from policyopt import checks
from policyopt.types import Array

SCHEDULES = ('constant', 'linear', 'cosine')
NOT_DECAYED = ('norm', 'bias')  # parts of the names of parameters without weight decay
# What the log tells apart; 'experts' are routed ones, a shared one counts as 'mlp'.
GROUPS = ('embedding', 'attention', 'mlp', 'experts', 'router', 'norms', 'head', 'value', 'other')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with global-norm clipping; a linear warm-up, then a schedule.

    Attributes:
      learning_rate: after the warm-up.
      warmup_steps: optimizer steps over which the learning rate rises from 0.
      schedule: after the warm-up: 'constant', or down to `final_fraction` of the learning rate
        within `decay_steps`, by a 'linear' or 'cosine' law, and constant from there.
      decay_steps: optimizer steps of the decay, warm-up excluded.
      final_fraction: what is left of the learning rate at the end.
      clip_norm: largest global norm of the gradient; larger ones are scaled down to it. None for no
        clipping.
      b1, b2: decay of the first and second moment.
      eps: added to the square root of the second moment.
      weight_decay: decoupled (times the learning rate); not on parameters whose name has one of
        `NOT_DECAYED` in it.

    Raises ValueError naming the field for a value out of range, and for one that a constant
    schedule would not read.
    """

    learning_rate: float = 1e-4
    warmup_steps: int = 0
    schedule: str = 'constant'
    decay_steps: int = 0
    final_fraction: float = 0.0
    clip_norm: float | None = 1.0
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self):
        checks.one_of('schedule', self.schedule, SCHEDULES)
        tiny = math.ulp(0.0)
        for name, low, high in (
            ('learning_rate', tiny, math.inf),
            ('warmup_steps', 0, math.inf),
            ('decay_steps', 0, math.inf),
            ('final_fraction', 0, 1),
            ('b1', 0, math.nextafter(1, 0)),
            ('b2', 0, math.nextafter(1, 0)),
            ('eps', tiny, math.inf),
            ('weight_decay', 0, math.inf),
        ):
            checks.number(name, getattr(self, name), low, high)
        if self.clip_norm is not None:
            checks.number('clip_norm', self.clip_norm, tiny)
        if self.schedule == 'constant':
            for name in ('decay_steps', 'final_fraction'):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect with schedule='constant'; "
                        "legal is 0, or a schedule of 'linear' or 'cosine'"
                    )
        elif not self.decay_steps:
            raise ValueError(f'decay_steps=0 with schedule={self.schedule!r}; legal is 1 or more')


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by optimizer step, counted from 0: the first step of a warm-up has 0."""
    rate, last = config.learning_rate, config.learning_rate * config.final_fraction
    after = {
        'constant': lambda: optax.constant_schedule(rate),
        'linear': lambda: optax.linear_schedule(rate, last, config.decay_steps),
        'cosine': lambda: optax.cosine_decay_schedule(
            rate, config.decay_steps, config.final_fraction
        ),
    }[config.schedule]()
    if not config.warmup_steps:
        return after
    rise = optax.linear_schedule(0.0, rate, config.warmup_steps)
    return optax.join_schedules([rise, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax optimizer of an OptimizerConfig."""

    def decayed(params: Any) -> Any:
        # By name: parameters are stacked over layers, so a norm's scale is a matrix, too.
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(name in str(path[-1].key) for name in NOT_DECAYED), params
        )

    adamw = optax.adamw(
        make_schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def masters(params: Any) -> Any:
    """Parameters in float32, where they are of a narrower floating type.

    A step of 1e-4 of a bfloat16 number rounds to none at all. Models cast parameters to their
    `dtype` where they use them, so the forward pass is the same.
    """

    def widen(x: Array) -> Array:
        x = jnp.asarray(x)
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
        return x.astype(jnp.float32) if narrow else x

    return jax.tree.map(widen, params)


def where(ok: Array, new: Any, old: Any) -> Any:
    """The tree `new` where the scalar `ok` is true, `old` elsewhere."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def norm(tree: Any) -> Array:
    """Global norm of a pytree of arrays."""
    return optax.tree.norm(tree)


def group(path: Sequence[str]) -> str:
    """Which of `GROUPS` a parameter belongs to, by the names on the way to it in the params."""
    if path and path[0] == 'adapters':  # they lie as what they are added to
        path = path[1:]
    first, last = (path[0], path[-1]) if path else ('', '')
    top = {'embed': 'embedding', 'head': 'head', 'value': 'value', 'reward': 'value'}
    if len(path) == 1 and first in top:
        return top[first]
    if 'norm' in last:
        return 'norms'
    if 'attention' in path:
        return 'attention'
    if 'mlp' not in path:
        return 'other'
    if 'shared' in path or first != 'moe':
        return 'mlp'
    return 'router' if last in ('router', 'bias') else 'experts'


def group_norms(tree: Any) -> dict[str, Array]:
    """Norm of each group of a params-like tree that has a part in it, float32 at least."""
    squares: dict[str, Array] = {}
    for path, x in jax.tree.leaves_with_path(tree):
        name = group([str(getattr(key, 'key', key)) for key in path])
        x = jnp.asarray(x)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares[name] = squares.get(name, 0) + jnp.sum(jnp.square(x))
    return {name: jnp.sqrt(squares[name]) for name in GROUPS if name in squares}


def apply(
    optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, ok: Array
) -> tuple[Any, Any, Any]:
    """One step where `ok`, none elsewhere: params, optimizer state, what was added (0)."""
    updates, new_state = optimizer.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates)
    moved = jax.tree.map(lambda u: jnp.where(ok, u, 0), updates)
    return where(ok, new, params), where(ok, new_state, opt_state), moved


def average(decay: float, ema: Any, params: Any, ok: Array) -> Any:
    """decay * ema + (1 - decay) * params where `ok`, ema elsewhere."""
    moved = jax.tree.map(lambda e, p: e + (1 - decay) * (p - e), ema, params)
    return where(ok, moved, ema)
