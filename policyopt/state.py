"""What updates change, and where it lies: the train state, and its layout on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policyopt import checks, sharding
from policyopt import optimizer as optimizer_lib
from policyopt.critic import Critic, CriticState
from policyopt.losses import controllers as controllers_lib
from policyopt.models import adapters
from policyopt.types import Algorithm, Array, LossInputs, Metrics, Scores, struct


@dataclasses.dataclass(frozen=True)
class RouterLosses:
    """Coefficients of the router losses of a mixture of experts, added to the algorithm's loss.

    Both are means over the valid tokens and mixture layers of the minibatch. `router_z` adds over
    microbatches; `load_balance` does not: it becomes the token-weighted mean of the microbatches'
    own balance, so it depends on how a minibatch is split.

    Attributes:
      load_balance: of `E sum_e f_e P_e` (arXiv:2101.03961), 1 at perfect balance.
      router_z: of the squared log-sum-exp of the router's logits (arXiv:2202.08906).
    """

    load_balance: float = 0.0
    router_z: float = 0.0

    def __post_init__(self):
        for name in ('load_balance', 'router_z'):
            checks.number(name, getattr(self, name), 0)


@struct
class TrainState:
    """Everything an update changes.

    Attributes:
      params: parameters of the policy (and of the critic, where the model has a value head);
        those that are trained are float32 at least, whatever the model computes in. With adapters,
        they and the value head are trained, and the rest stays as it is.
      opt_state: state of the optimizer.
      controllers: name -> scalar, current values of the algorithm's adaptive coefficients.
      step: scalar int32, updates done, skipped ones included.
      key: source of all noise of the run; never consumed, only folded with step numbers.
      ema: exponential moving average of the trained part of `params`; None without one.
      critic: CriticState where the learner has a Critic; None without.
    """

    params: Any
    opt_state: Any
    controllers: dict[str, Array]
    step: Array
    key: Array
    ema: Any = None
    critic: CriticState | None = None


class Both(NamedTuple):
    """Parameters of the policy, and of a critic with its own trunk (or None)."""

    policy: Any
    critic: Any


@dataclasses.dataclass(frozen=True)
class Binding:
    """The arguments of `make_learner`, as the functions below read them."""

    model: Any
    algorithm: Algorithm
    optimizer: Any
    critic: Critic | None
    ema: float | None
    router: RouterLosses
    routing: str
    diagnose: Callable[[LossInputs], Metrics]
    score: Callable[..., tuple[Scores, Any]]

    @property
    def rules(self) -> sharding.Rules:
        """The model's sharding rules."""
        return getattr(self.model, 'rules', sharding.DEFAULT_RULES)

    @property
    def own(self) -> Any:
        """The critic's own model, None where it shares the policy's trunk or is absent."""
        return None if self.critic is None else self.critic.model


def init(bound: Binding, params: Any, key: Array, critic: Any = None) -> TrainState:
    """The state before the first update; see `Learner.init`.

    On a mesh, ValueError names a parameter that does not divide as the rules say.
    """
    if (critic is None) != (bound.own is None):
        raise ValueError(
            f'critic parameters are {"missing" if critic is None else "given"}, but the critic '
            f'{"has its own trunk" if critic is None else "has none of its own"}'
        )
    moving = optimizer_lib.masters(adapters.trained(params))
    both = Both(merged(params, moving), optimizer_lib.masters(critic))
    if not jax.sharding.get_abstract_mesh().empty:
        both = jax.jit(functools.partial(pin_both, bound))(both)

    def rest(both: Both) -> tuple[Any, Any, Any]:
        moving = adapters.trained(both.policy)
        ema = None if bound.ema is None else jax.tree.map(jnp.copy, moving)
        opt_state, side = bound.optimizer.init(moving), None
        if bound.critic is not None:
            side = bound.critic.optimizer.init(critic_params(bound, both))
        return pin_rest(bound, both, opt_state, ema, side)

    opt_state, ema, side = jax.jit(rest)(both)
    controllers, step, key = sharding.replicated(
        (controllers_lib.init(bound.algorithm.controllers), jnp.zeros((), jnp.int32), jnp.copy(key))
    )
    return TrainState(
        params=both.policy,
        opt_state=opt_state,
        controllers=controllers,
        step=step,
        key=key,
        ema=ema,
        critic=None if side is None else CriticState(params=both.critic, opt_state=side),
    )


def merged(params: Any, moving: Any) -> Any:
    """The parameters with their trained part replaced."""
    fixed = adapters.frozen(params)
    return {**fixed, **moving} if fixed else moving


def averaged(state: TrainState) -> Any:
    """The parameters to be used: the moving average where there is one."""
    return state.params if state.ema is None else merged(state.params, state.ema)


def kept(state: TrainState) -> TrainState:
    """The state as checkpoints hold it: of the parameters, the trained part."""
    return dataclasses.replace(state, params=adapters.trained(state.params))


def moving_of(state: TrainState) -> Both:
    """The parameters of a state that updates move."""
    both = both_of(state)
    return Both(adapters.trained(both.policy), both.critic)


def both_of(state: TrainState) -> Both:
    """All parameters of a state."""
    return Both(state.params, None if state.critic is None else state.critic.params)


def critic_params(bound: Binding, both: Both) -> Any:
    """What value pretraining moves: the critic's own trunk, or the value head of the policy's."""
    return {'value': both.policy['value']} if bound.own is None else both.critic


def pin(model: Any, tree: Any) -> Any:
    """Parameters of a model, or gradients of them, laid out on the ambient mesh by its rules."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or tree is None:
        return tree
    axes = {name: value for name, value in model.axes().items() if name in tree}
    rules = getattr(model, 'rules', sharding.DEFAULT_RULES)
    return jax.lax.with_sharding_constraint(
        tree,
        sharding.param_shardings(axes, tree, mesh, rules),  # type: ignore[arg-type]
    )


def pin_both(bound: Binding, both: Both) -> Both:
    """`pin` of the policy's parameters and of the critic's."""
    return Both(pin(bound.model, both.policy), pin(bound.own, both.critic))


def pin_rest(bound: Binding, both: Both, opt_state: Any, ema: Any, side: Any) -> tuple[Any, ...]:
    """Optimizer state, moving average and the critic's optimizer state, laid out like params."""

    def like(model: Any, params: Any, tree: Any) -> Any:
        structure = jax.tree.structure(params)

        def is_params(x: Any) -> bool:
            return jax.tree.structure(x) == structure

        return jax.tree.map(lambda x: pin(model, x) if is_params(x) else x, tree, is_leaf=is_params)

    opt_state = like(bound.model, adapters.trained(both.policy), opt_state)
    if side is not None:
        side = like(bound.own or bound.model, critic_params(bound, both), side)
    return opt_state, pin(bound.model, ema), side
