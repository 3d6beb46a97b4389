"""Penalty slot: (LossInputs, log_ratio) -> [B,T], added to the token loss, minimised.

With p = pi_new, q the other policy, o = pi_old. Gates leave penalties alone.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from policyopt import checks, masked
from policyopt.types import Array, LossInputs, require

Penalty = Callable[[LossInputs, Array], Array]
Coefficient = float | Array
ESTIMATORS = ('k1', 'k2', 'k3')


def k1(log_qp: Array) -> Array:
    """-log(q/p): unbiased value, no expected gradient on-policy."""
    return -log_qp


def k2(log_qp: Array) -> Array:
    """log(q/p)^2 / 2: biased value, on-policy the reverse-KL gradient."""
    return 0.5 * jnp.square(log_qp)


def k3(log_qp: Array) -> Array:
    """q/p - log(q/p) - 1: unbiased, never negative; its gradient is that of the forward KL."""
    return masked.exp_excess(log_qp)


def weighted_k3(log_q: Array, log_p: Array, log_old: Array) -> Array:
    """(p/o) (q/p - log(q/p) - 1), differentiated through p/o too (DeepSeek-V3.2 2512.02556).

    The expectation under o of value and gradient are those of KL(p||q); the gradient is
    w log(p/q) grad log p. Where q > e p the product is written q/o - w (1 + log(q/p)), whose
    gradient does not subtract two huge numbers.
    """
    log_qp, w = log_q - log_p, masked.bounded_exp(log_p - log_old)
    far = log_qp > 1
    near_term = masked.exp_excess(jnp.where(far, 0, log_qp))
    far_term = masked.bounded_exp(log_q - log_old) - w * (1 + log_qp)
    return jnp.where(far, far_term, w * near_term)


@checks.factory('penalty')
def kl_to_reference(beta: Coefficient, estimator: str = 'k3', unbiased: bool = False) -> Penalty:
    """beta * KL(pi_new || pi_ref), estimated on the taken token.

    Args:
      beta: coefficient.
      estimator: `k1`, `k2` or `k3`; GRPO (2402.03300) uses k3.
      unbiased: weigh k3 by the token's own pi_new/pi_old, whatever the algorithm's ratio,
        differentiated: the exact reverse-KL gradient in expectation, on and off policy
        (DeepSeek-V3.2 2512.02556). Needs estimator k3.
    """
    checks.number('beta', beta, 0)
    if estimator not in ESTIMATORS:
        hint = checks.nearest(str(estimator), ESTIMATORS)
        raise ValueError(f'unknown estimator {estimator!r}.{hint}')
    if unbiased and estimator != 'k3':
        raise ValueError(f'unbiased=True weighs k3; it has no effect on estimator {estimator!r}')
    estimate = {'k1': k1, 'k2': k2, 'k3': k3}[estimator]

    def penalty(inputs: LossInputs, log_ratio: Array) -> Array:
        del log_ratio
        ref = masked.select(inputs.mask, require(inputs, 'logp_ref', 'kl_to_reference'))
        new = masked.select(inputs.mask, inputs.logp_new)
        old = masked.select(inputs.mask, inputs.logp_old)
        return beta * (weighted_k3(ref, new, old) if unbiased else estimate(ref - new))

    return penalty


@checks.factory('penalty')
def kl_to_old(beta: Coefficient) -> Penalty:
    """beta * (w - 1 - log w), w = pi_new/pi_old (PPO-penalty 1707.06347).

    Its expectation under pi_old is KL(pi_old || pi_new); never negative.
    """
    checks.number('beta', beta, 0)

    def penalty(inputs: LossInputs, log_ratio: Array) -> Array:
        del log_ratio
        return beta * k3(masked.select(inputs.mask, inputs.logp_new - inputs.logp_old))

    return penalty


@checks.factory('penalty')
def entropy(coefficient: Coefficient) -> Penalty:
    """-coefficient * entropy of the policy at the token: a bonus for entropy (PPO 1707.06347)."""
    checks.number('coefficient', coefficient)

    def penalty(inputs: LossInputs, log_ratio: Array) -> Array:
        del log_ratio
        return -coefficient * masked.select(inputs.mask, require(inputs, 'entropy', 'entropy'))

    return penalty
