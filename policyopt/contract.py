"""The laws that every algorithm keeps, as functions, to put a new one through.

    from policyopt import contract
    contract.check(mine())

`LAWS` has them by name; docs/design.md says what each is for. Inputs are random, with prompts, gaps
and padding, empty rows and rows of one token. What they can't check: that an algorithm learns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from policyopt import checks
from policyopt.losses import controllers
from policyopt.types import Algorithm, LossInputs, Rollout, TokenBatch, add_metrics

GRADED = ('logp_new', 'values')
INPUT_FIELDS = [f for f in LossInputs.__dataclass_fields__ if f != 'coefficients']
Arrays = dict[str, Any]  # of numpy arrays


# ---------------------------------------------------------------- random inputs


def random_mask(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Prompt, answer with gaps (tool output), padding; one empty row and one of one token."""
    mask = np.zeros((rows, width), np.int32)
    for i in range(rows):
        start = rng.integers(0, width - 1)
        end = rng.integers(start + 1, width + 1)
        mask[i, start:end] = rng.random(end - start) < 0.8
    if rows > 2:
        mask[0] = 0
        mask[1] = 0
        mask[1, rng.integers(width)] = 1
    return mask


def random_arrays(seed: int, rows: int = 8, width: int = 7, drift: float = 0.3) -> Arrays:
    """Fields of LossInputs and TokenBatch together; advantages are constant in a row."""
    rng = np.random.default_rng(seed)
    shape = (rows, width)

    def logp(centre: np.ndarray) -> np.ndarray:
        return (centre + drift * rng.standard_normal(shape)).astype(np.float32)

    base = -np.abs(rng.standard_normal(shape)).astype(np.float32) - 0.5
    rows_advantage = rng.standard_normal((rows, 1)) * (rng.random((rows, 1)) < 0.8)
    values = rng.standard_normal(shape).astype(np.float32)
    return dict(
        logp_new=logp(base),
        logp_old=logp(base),
        logp_behavior=logp(base),
        logp_ref=logp(base),
        entropy=np.abs(rng.standard_normal(shape)).astype(np.float32),
        values=values,
        values_old=(values + 0.3 * rng.standard_normal(shape)).astype(np.float32),
        returns=rng.standard_normal(shape).astype(np.float32),
        advantages=np.broadcast_to(rows_advantage, shape).astype(np.float32),
        mask=random_mask(rng, rows, width),
        segment=np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32),
        group=rng.integers(0, 3, rows).astype(np.int32) * 7 - 5,
        positive=rng.integers(0, 2, rows).astype(np.int32),
        rewards=rng.standard_normal(rows).astype(np.float32),
    )


def loss_inputs(arrays: Arrays, algorithm: Algorithm) -> LossInputs:
    """The inputs of an algorithm's loss, its controllers at their first values."""
    coefficients = controllers.init(algorithm.controllers)
    return LossInputs(**{k: arrays[k] for k in INPUT_FIELDS}, coefficients=coefficients)


def token_batch(arrays: Arrays) -> TokenBatch:
    """What weights are made of."""
    fields = {k: arrays[k] for k in TokenBatch.__dataclass_fields__ if k in arrays}
    return TokenBatch(**fields | {'tokens': np.zeros_like(arrays['mask'])})


def rollout(seed: int, rows: int = 12, width: int = 7) -> Rollout:
    """Judged rows with rewards of segments, in groups of any size."""
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, rows, width)
    segment = np.sort(rng.integers(0, 3, (rows, width)), axis=1).astype(np.int32)
    segment_rewards = np.full((rows, width), np.nan, np.float32)
    for i in range(rows):
        for k in set(segment[i]):
            where = np.flatnonzero((segment[i] == k) & (mask[i] == 1))
            if len(where):
                segment_rewards[i, where[-1]] = rng.standard_normal()
    logp = -np.abs(rng.standard_normal((rows, width))).astype(np.float32)
    fields: Arrays = dict(
        tokens=rng.integers(0, 9, (rows, width)).astype(np.int32),
        mask=mask,
        rewards=rng.standard_normal(rows).astype(np.float32),
        group=rng.integers(0, 4, rows).astype(np.int32),
        logp_behavior=logp,
        logp_ref=logp - 0.1,
        truncated=rng.integers(0, 2, rows).astype(bool),
        positive=rng.integers(0, 2, rows).astype(bool),
        values=rng.standard_normal((rows, width)).astype(np.float32),
        segment=segment,
        segment_rewards=segment_rewards,
    )
    return Rollout(**fields)


# ---------------------------------------------------------------- an algorithm, compiled


class Subject(NamedTuple):
    """An algorithm to be checked, with its parts jitted; built by `subject`.

    Attributes:
      algorithm: itself.
      grad: (LossInputs, weights) -> ((loss, metrics), gradients in GRADED).
      weigh: TokenBatch -> weights.
      judge: Rollout -> (keep, Estimates, mask after shaping).
    """

    algorithm: Algorithm
    grad: Callable[..., Any]
    weigh: Callable[..., Any]
    judge: Callable[..., Any]

    def run(self, arrays: Arrays) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
        """Loss, gradients by name, metrics."""
        weights = self.weigh(token_batch(arrays))
        (loss, metrics), grads = self.grad(loss_inputs(arrays, self.algorithm), weights)
        return np.asarray(loss), jax.tree.map(np.asarray, grads), metrics


def value_and_grads(algorithm: Algorithm, inputs: LossInputs, weights: Any) -> Any:
    """((loss, metrics), gradients in logp_new and values)."""

    def run(graded: dict[str, Any]) -> Any:
        out = algorithm.loss.apply(dataclasses.replace(inputs, **graded), weights)
        return out.loss, out.metrics

    return jax.value_and_grad(run, has_aux=True)({k: getattr(inputs, k) for k in GRADED})


def subject(algorithm: Algorithm) -> Subject:
    """Jit the parts of an algorithm; each shape of inputs compiles once."""

    def judge(rolled: Rollout) -> Any:
        shaped = algorithm.shape(rolled)
        return algorithm.keep(shaped), algorithm.advantages(shaped), shaped.mask

    return Subject(
        algorithm,
        jax.jit(functools.partial(value_and_grads, algorithm)),
        jax.jit(algorithm.loss.weigh),
        jax.jit(judge),
    )


def size(weights: Any, arrays: Arrays, grads: Any) -> float:
    """What float32 rounding is relative to: sum |weight x advantage|, terms that cancel included.

    Gradients count where they are larger.
    """
    terms = [np.abs(w * arrays['advantages']).sum() for w in jax.tree.leaves(weights)]
    return float(max(terms + [np.abs(x).sum() for x in jax.tree.leaves(grads)]))


def assert_same(a: Any, b: Any, scale: float = 1.0, tolerance: float = 1e-6) -> None:
    """Leaves of two trees are equal to rounding."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * scale)


# ---------------------------------------------------------------- the laws


def on_policy(
    found: Subject, seed: int, weigh: Callable[[np.ndarray], np.ndarray] | None = None
) -> None:
    """Where no policy differs from another, the gradient is REINFORCE's, weights x advantages.

    Weights are those that the loss explains, or mask -> weights [B,T] from elsewhere. With a gate
    that is not 1, sums of rows are compared: a ratio of a row shares the gated sum among its
    tokens. A loss without `explain` whose weights are several arrays does not say which are the
    policy's, and is not compared.
    """
    arrays = random_arrays(seed)
    for field in ('logp_old', 'logp_behavior', 'logp_ref'):
        arrays[field] = arrays['logp_new']
    arrays['positive'] = np.zeros_like(arrays['positive'])  # the NLL term is not the policy term
    _, grads, _ = found.run(arrays)
    slope, mask = grads['logp_new'], arrays['mask'] != 0
    weights, gated = _policy_weights(found, arrays) if weigh is None else (weigh(mask), 1.0)
    if weights is None:
        return
    expected = np.where(mask, -weights * gated * arrays['advantages'], 0)
    if np.any((gated != 1) & mask):
        slope, expected = slope.sum(1), expected.sum(1)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-6)


def _policy_weights(found: Subject, arrays: Arrays) -> tuple[np.ndarray | None, np.ndarray]:
    """Weights of the policy term, None where the loss doesn't say, and the product of its gates."""
    weights, loss = found.weigh(token_batch(arrays)), found.algorithm.loss
    gated = np.ones(arrays['mask'].shape)
    if loss.explain is not None:
        term = loss.explain(loss_inputs(arrays, found.algorithm), weights).get('policy')
        if term is None:
            return None, gated
        for gate in (term.gates or {}).values():
            gated = gated * np.asarray(gate)
        return np.asarray(term.weights), gated
    leaves = jax.tree.leaves(weights)
    return (np.asarray(leaves[0]) if len(leaves) == 1 else None), gated


def off_mask(found: Subject, seed: int, poisons: Sequence[float] = (np.nan, np.inf)) -> None:
    """What stands off the mask, NaN and infinity included, matters to nothing."""
    arrays = random_arrays(seed)
    loss, grads, metrics = found.run(arrays)
    off = arrays['mask'] == 0
    for poison in poisons:
        poisoned = dict(arrays)
        for field in INPUT_FIELDS:
            if arrays[field].dtype == np.float32:
                poisoned[field] = np.where(off, np.float32(poison), arrays[field])
        chex.assert_trees_all_equal((loss, grads, metrics), found.run(poisoned))
    assert all(not g[off].any() for g in grads.values()), 'a gradient off the mask'


def microbatches(found: Subject, seed: int) -> None:
    """Loss, gradients and metrics of four parts add up to those of the whole."""
    arrays = random_arrays(seed)
    loss, grads, metrics = found.run(arrays)
    weights = found.weigh(token_batch(arrays))
    order = np.random.default_rng(seed).permutation(len(arrays['mask']))
    total, parts, sums = 0.0, jax.tree.map(np.zeros_like, grads), None
    for rows in np.split(order, 4):
        part = loss_inputs({k: v[rows] for k, v in arrays.items()}, found.algorithm)
        some = jax.tree.map(lambda w, r=rows: w[r], weights)
        (piece, counted), slopes = found.grad(part, some)
        total += float(piece)
        sums = counted if sums is None else add_metrics(sums, counted)
        for field in GRADED:
            parts[field][rows] = slopes[field]
    scale = size(weights, arrays, grads)
    np.testing.assert_allclose(total, loss, atol=1e-6 * scale, rtol=1e-6)
    assert_same(parts, grads, scale)
    assert sums is not None
    whole, added = ({k: m.count for k, m in x.items()} for x in (metrics, sums))
    assert_same(whole, added, tolerance=0)
    for key, metric in metrics.items():
        np.testing.assert_allclose(sums[key].total, metric.total, rtol=1e-5, atol=1e-4, err_msg=key)


def arrangement(found: Subject, seed: int) -> None:
    """Order of the rows, names of the groups and width of the padding change nothing."""
    arrays = random_arrays(seed)
    loss, grads, _ = found.run(arrays)
    scale = size(found.weigh(token_batch(arrays)), arrays, grads)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(arrays['mask']))
    loss2, grads2, _ = found.run({k: v[order] for k, v in arrays.items()})
    assert_same((loss2, grads2), (loss, {k: g[order] for k, g in grads.items()}), scale)

    ids = np.unique(arrays['group'])
    names = dict(zip(ids, rng.permutation(len(ids)) * 1000 - 7, strict=True))
    renamed = np.array([names[g] for g in arrays['group']], np.int32)
    loss3, grads3, _ = found.run({**arrays, 'group': renamed})
    assert_same((loss3, grads3), (loss, grads), scale)

    wide = {
        k: np.pad(v, ((0, 0), (0, 3)), mode='edge') if v.ndim == 2 else v for k, v in arrays.items()
    }
    wide['mask'][:, -3:] = 0
    loss4, grads4, _ = found.run(wide)
    assert_same((loss4, {k: g[:, :-3] for k, g in grads4.items()}), (loss, grads), scale)


def huge_ratios(found: Subject, seed: int, drift: float = 60.0) -> None:
    """Loss, gradients and metrics are finite for log-ratios up to 60 nats."""
    arrays = random_arrays(seed)
    rng = np.random.default_rng(seed)
    for field in ('logp_old', 'logp_behavior', 'logp_ref'):
        away = rng.choice([-1, 0, 1], arrays['mask'].shape)
        arrays[field] = (arrays['logp_new'] + drift * away).astype(np.float32)
    loss, grads, metrics = found.run(arrays)
    assert np.isfinite(loss)
    chex.assert_tree_all_finite((grads, metrics))


def empty_batch(found: Subject, seed: int) -> None:
    """A batch without a token has no loss, no gradient, and metrics of 0."""
    arrays = random_arrays(seed)
    arrays['mask'] = np.zeros_like(arrays['mask'])
    loss, grads, metrics = found.run(arrays)
    assert loss == 0 and all(not g.any() for g in grads.values())
    chex.assert_tree_all_finite(metrics)
    assert all(m.value == 0 for m in metrics.values())


def rollout_side(found: Subject, seed: int) -> None:
    """Shaping, keep rule and advantages can be jitted, are finite, and 0 off the mask."""
    rolled = rollout(seed)
    keep, estimates, mask = found.judge(rolled)
    assert keep.shape == rolled.mask.shape[:1] and keep.dtype == bool
    chex.assert_tree_all_finite(estimates)
    assert not np.asarray(estimates.advantages)[np.asarray(mask) == 0].any()


LAWS: dict[str, Callable[..., None]] = {
    law.__name__: law
    for law in (
        on_policy,
        off_mask,
        microbatches,
        arrangement,
        huge_ratios,
        empty_batch,
        rollout_side,
    )
}


def check(
    algorithm: Algorithm, *, laws: Sequence[str] = tuple(LAWS), seeds: Sequence[int] = range(5)
) -> tuple[str, ...]:
    """Put an algorithm through the laws, and return their names.

    Args:
      algorithm: as a factory returns it.
      laws: names of LAWS.
      seeds: of random inputs; each law sees all of them.

    Raises:
      AssertionError: it breaks a law; the message names it, says what it asks, and has the numbers.
      ValueError: there is no such law, or no seed.
      TypeError: a factory that was not called, or no algorithm at all.
    """
    checks.check_called('algorithm', algorithm)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f'algorithm must be an Algorithm, as a factory returns it; got {algorithm!r}'
        )
    if not seeds:
        raise ValueError('seeds is empty; legal is one seed or more')
    found = subject(algorithm)
    for name in laws:
        if name not in LAWS:
            raise ValueError(f'there is no law {name!r}.{checks.nearest(name, tuple(LAWS))}')
        for seed in seeds:
            try:
                LAWS[name](found, seed)
            except AssertionError as error:
                asked = (LAWS[name].__doc__ or '').split('\n')[0]
                raise AssertionError(f'{name}, seed {seed}: {asked}\n{error}') from error
    return tuple(laws)
