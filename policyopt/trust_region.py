"""How parameters move: a plain gradient step, or the natural-gradient step of TRPO.

TRPO (arXiv:1502.05477) maximises a surrogate subject to mean KL(old||new) <= delta. With gradient
b of the surrogate and Fisher matrix F of the policy, one update is

    x = F^-1 b                         conjugate gradient on Fisher-vector products
    step = sqrt(2 delta / x'Fx) x      the quadratic model of the KL equals delta there
    theta + backtrack^k step           smallest k whose surrogate improves with mean KL <= delta

F is never formed: `F v` is the forward-mode derivative of the reverse-mode gradient of a KL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from policyopt.types import Array, Mean, Metrics, UpdateRule

Params = Any
Scalar = Callable[[Any], Array]  # params -> scalar


def gradient() -> UpdateRule:
    """The learner's optax optimizer follows the loss's gradient; the default of `Algorithm`."""
    return UpdateRule(step=None)


def natural_gradient(
    delta: float = 0.01,
    cg_iterations: int = 10,
    damping: float = 1e-3,
    backtrack: float = 0.5,
    max_backtracks: int = 10,
    cg_tolerance: float = 1e-6,
) -> UpdateRule:
    """TRPO's update (arXiv:1502.05477): natural gradient, then a backtracking line search.

    The rule's `step(params, loss_fn, kl_fn, fisher_fn) -> (params, Metrics)` takes any pytree;
    leaves that are not floating keep their value, and each leaf keeps its dtype. The functions are
    params -> scalar: `loss_fn` the negated surrogate, `kl_fn` the mean KL(old||new) to be bounded,
    `fisher_fn` a KL whose Hessian at `params` is the Fisher matrix. Jit it together with them.

    The sample estimate of KL(old||new), the mean of `w - 1 - l` over the taken tokens with
    `l = logp_new - logp_old` and `w = exp(l)`, has Hessian `mean(w g g' + (w - 1) grad^2 logp)`.
    Centred at the current policy (`logp_old = stop_gradient(logp_new)`, so l = 0) it is exactly the
    empirical Fisher `mean(g g')`: the `fisher_fn` to pass. `kl_fn` stays centred at the old policy,
    so that several updates on one rollout share one budget of delta.

    Products, inner products and the step are float32 (float64 where leaves are); candidates are
    judged after rounding to the dtype of their leaves. `params` come back unchanged, bit for bit,
    where the gradient is zero, anything is not finite, the direction has no curvature, or no step
    is accepted. Metrics are `Mean`s of count 1, finite in each of these cases: `trust_region/kl`
    (of the returned params), `/improvement` (loss before minus after), `/backtracks`, `/accepted`,
    `/cg_residual` (|b - (F + damping) x| / |b|) and `/nonfinite`.

    It can't check that the Hessian of `fisher_fn` is positive semi-definite, nor that `kl_fn` is a
    mean over the tokens it is meant for.

    Args:
      delta: bound of the mean KL in nats; .01 in the paper.
      cg_iterations: most Fisher-vector products of the solve; 10 in the paper.
      damping: added to the diagonal of F in the solve only, not in x'Fx; a choice, not published.
      backtrack: factor between tried steps.
      max_backtracks: shrinks after the full step before giving up.
      cg_tolerance: relative residual at which the solve stops early.

    Raises:
      ValueError: an argument is out of range, or `params` hold no floating array.
    """
    _check('delta', delta, delta > 0, 'above 0')
    _check('cg_iterations', cg_iterations, cg_iterations >= 1, 'at least 1')
    _check('damping', damping, damping >= 0, 'at least 0')
    _check('backtrack', backtrack, 0 < backtrack < 1, 'above 0 and below 1')
    _check('max_backtracks', max_backtracks, max_backtracks >= 0, 'at least 0')
    _check('cg_tolerance', cg_tolerance, cg_tolerance >= 0, 'at least 0')

    def step(
        params: Params, loss_fn: Scalar, kl_fn: Scalar, fisher_fn: Scalar
    ) -> tuple[Params, Metrics]:
        start, restore = _floating(params)
        loss, kl, fisher = (_on_leaves(f, restore) for f in (loss_fn, kl_fn, fisher_fn))
        loss_start, slope = jax.value_and_grad(loss)(start)
        ascent = [-g for g in slope]

        def damped(v):
            return fisher_vector_product(fisher, start, v, damping)

        x = conjugate_gradient(damped, ascent, cg_iterations, cg_tolerance)
        fx = fisher_vector_product(fisher, start, x)
        curvature = _dot(x, fx)
        left_over = [b - f - damping * v for b, f, v in zip(ascent, fx, x, strict=True)]
        size = _dot(ascent, ascent)
        residual = jnp.sqrt(_dot(left_over, left_over) / jnp.where(size > 0, size, 1))

        finite = jnp.isfinite(loss_start) & _all_finite(slope) & _all_finite(x + fx)
        possible = finite & (curvature > 0)
        scale = jnp.sqrt(2 * delta / jnp.where(possible, curvature, 1))
        possible &= jnp.isfinite(scale)
        full = [jnp.where(possible, scale * v, 0) for v in x]
        before = _Tried(loss_start, kl(start), jnp.asarray(0), jnp.asarray(False), start)
        after = _line_search(before, full, loss, kl, possible, delta, backtrack, max_backtracks)

        moved = [
            jnp.where(after.accepted, new, old) for new, old in zip(after.x, start, strict=True)
        ]
        metrics = {
            'kl': jnp.where(after.accepted, after.kl, before.kl),
            'improvement': jnp.where(after.accepted, loss_start - after.loss, 0),
            'backtracks': jnp.maximum(after.tries - 1, 0),
            'accepted': after.accepted,
            'cg_residual': residual,
            'nonfinite': ~finite,
        }
        return restore(moved), {f'trust_region/{k}': _single(v) for k, v in metrics.items()}

    return UpdateRule(step=step)


def fisher_vector_product(kl_fn: Scalar, params: Params, v: Params, damping: float = 0.0) -> Params:
    """(H + damping I) v with H the Hessian of `kl_fn` at `params`, forward over reverse.

    One jvp of the gradient: about the time of two gradients and the memory of one, for no matrix.

    Args:
      kl_fn: params -> scalar, twice differentiable.
      params: pytree of floating arrays.
      v: pytree like `params`, of the same shapes and dtypes.
      damping: added to the diagonal.
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(params, v)
    product = jax.jvp(jax.grad(kl_fn), (params,), (v,))[1]
    return jax.tree.map(lambda h, x: h + damping * x, product, v)


class _Solve(NamedTuple):
    x: Params
    residual: Params
    direction: Params
    square: Array  # |residual|^2
    iteration: Array
    go: Array


def conjugate_gradient(
    matvec: Callable[[Params], Params], b: Params, iterations: int, tolerance: float = 1e-6
) -> Params:
    """Solve A x = b for symmetric positive semi-definite A by conjugate gradient from x = 0.

    Stops after `iterations` products, at |b - A x| <= tolerance |b|, or where a direction's
    curvature is not positive (x is then the last good iterate, 0 for a zero b). Inner products are
    in float32, float64 where b is.

    Args:
      matvec: v -> A v, pytrees like b.
      b: pytree of floating arrays.
      iterations: most products, static.
      tolerance: relative residual that ends the solve.

    Returns:
      x, a pytree like b.
    """
    square = _dot(b, b)
    target = square * tolerance**2
    zero = jax.tree.map(jnp.zeros_like, b)
    state = _Solve(zero, b, b, square, jnp.asarray(0), square > target)

    def body(s: _Solve) -> _Solve:
        image = matvec(s.direction)
        curvature = _dot(s.direction, image)
        good = curvature > 0
        rate = jnp.where(good, s.square / jnp.where(good, curvature, 1), 0)
        x = jax.tree.map(lambda a, p: a + rate.astype(a.dtype) * p, s.x, s.direction)
        residual = jax.tree.map(lambda r, q: r - rate.astype(r.dtype) * q, s.residual, image)
        square = _dot(residual, residual)
        turn = square / s.square
        direction = jax.tree.map(lambda r, p: r + turn.astype(r.dtype) * p, residual, s.direction)
        iteration = s.iteration + 1
        go = good & (square > target) & (iteration < iterations)
        return _Solve(x, residual, direction, square, iteration, go)

    return jax.lax.while_loop(lambda s: s.go, body, state).x


class _Tried(NamedTuple):
    loss: Array
    kl: Array
    tries: Array
    accepted: Array
    x: list[Array]


def _line_search(before, full, loss, kl, possible, delta, backtrack, max_backtracks) -> _Tried:
    """First of full, backtrack * full, ... with a lower finite loss and a KL of at most delta."""

    def attempt(state: _Tried) -> _Tried:
        shrink = backtrack ** state.tries.astype(before.loss.dtype)
        x = [a + shrink.astype(a.dtype) * s for a, s in zip(before.x, full, strict=True)]
        new_loss, new_kl = loss(x), kl(x)
        better = jnp.isfinite(new_loss) & (new_loss < before.loss)
        return _Tried(new_loss, new_kl, state.tries + 1, better & (new_kl <= delta), x)

    def searching(state: _Tried) -> Array:
        return possible & ~state.accepted & (state.tries <= max_backtracks)

    return jax.lax.while_loop(searching, attempt, before)


def _floating(params: Params) -> tuple[list[Array], Callable[[list[Array]], Params]]:
    """Floating leaves in at least float32, and the function that puts such leaves back."""
    leaves, tree = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not moving:
        raise ValueError('params hold no floating array, so there is nothing to move')

    def restore(values: list[Array]) -> Params:
        filled = list(leaves)
        for i, value in zip(moving, values, strict=True):
            filled[i] = value.astype(leaves[i].dtype)
        return jax.tree.unflatten(tree, filled)

    return [leaves[i].astype(_accumulator(leaves[i].dtype)) for i in moving], restore


def _on_leaves(function: Scalar, restore: Callable) -> Scalar:
    """`function` of params as a function of their floating leaves, at least float32."""

    def on_leaves(values):
        result = jnp.asarray(function(restore(values)))
        chex.assert_shape(result, ())
        return result.astype(_accumulator(result.dtype))

    return on_leaves


def _accumulator(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _dot(a: Params, b: Params) -> Array:
    """Inner product of two pytrees, in at least float32."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    products = [jnp.sum(x.astype(_accumulator(x.dtype)) * y) for x, y in pairs]
    return sum(products[1:], start=products[0])


def _all_finite(leaves: list[Array]) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def _single(x: Array) -> Mean:
    """One observation; 0 where it is not finite, so that sums of metrics stay finite."""
    x = jnp.asarray(x, jnp.float32)
    return Mean.of(jnp.where(jnp.isfinite(x), x, 0), jnp.ones((), bool))


def _check(name: str, value: Any, legal: bool, which: str) -> None:
    if not legal:
        raise ValueError(f'natural_gradient: {name}={value!r}, legal is {which}')
