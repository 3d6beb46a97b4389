"""One minibatch in parts: gradients summed over equal microbatches, or over buckets by length.

Weights are fixed on the whole minibatch before it is split, so losses, gradients and metrics of the
parts just add, and how it is split changes memory and speed alone. Both ways of splitting share
`accumulate` and a job's `finish`. Rows stay whole: groups and segments may be read in any part.

Every array of a batch is [B] or [B,T,...].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from policyopt import sharding
from policyopt.types import Array, Metrics, add_metrics, require

Rules = sharding.Rules


class Part(NamedTuple):
    """Rows of a minibatch with their token weights; arrays [b] or [b,T,...]."""

    batch: Any
    weights: Any


class Found(NamedTuple):
    """What parts add up to, beside gradients.

    Attributes:
      loss: scalar.
      metrics: name -> metric that adds.
      load: [L_moe,E] tokens that each expert took; None for a dense model.
    """

    loss: Array
    metrics: Metrics
    load: Array | None = None


class Job(NamedTuple):
    """One kind of update, in the functions that both ways of splitting share. All are traceable.

    Attributes:
      begin: (state, batch) -> (Part of the whole minibatch, anything that all parts read).
      params: state -> the parameters that move.
      objective: (state, params, Part, shared) -> (loss, (Found, output [b,T])); differentiated in
        params.
      finish: (state, gradients, Found) -> (state, Metrics).
      pin: gradients -> gradients with their sharding pinned.
    """

    begin: Callable[[Any, Any], tuple[Part, Any]]
    params: Callable[[Any], Any]
    objective: Callable[[Any, Any, Part, Any], tuple[Array, tuple[Found, Array]]]
    finish: Callable[[Any, Any, Found], tuple[Any, Metrics]]
    pin: Callable[[Any], Any]


Update = Callable[[Any, Any], tuple[Any, Metrics, Array]]


@dataclasses.dataclass(frozen=True)
class LengthBuckets:
    """Microbatches by length, under a budget of tokens.

    Attributes:
      token_budget: tokens of one microbatch, padding included.
      widths: widths that rows are padded to, increasing. A row takes the smallest that holds it;
        a microbatch of width w has token_budget // w rows, and compiles once.
    """

    token_budget: int
    widths: tuple[int, ...]

    def __post_init__(self):
        widths = self.widths
        if not widths or list(widths) != sorted(set(widths)) or widths[0] < 1:
            raise ValueError(f'widths={widths}; legal are increasing numbers of tokens from 1')
        if self.token_budget < widths[-1]:
            raise ValueError(
                f'token_budget={self.token_budget} holds no row of the widest bucket; legal is '
                f'{widths[-1]} or more'
            )


def plan(length: Any, buckets: LengthBuckets, multiple: int = 1) -> list[tuple[np.ndarray, int]]:
    """Which rows go together: [(row numbers, width)], on the host.

    Rows are sorted by length, longest first. Each microbatch has the width that its longest row
    needs and takes as many rows as the budget allows at that width, so that only the last one has
    empty places; they hold the number of rows B, which is no row.

    Args:
      length: [B] int, tokens of each row.
      buckets: budget and widths.
      multiple: row counts are rounded down to it where they exceed it: shards of the batch axis.

    Raises ValueError for a row longer than the widest bucket.
    """
    length = np.asarray(length)
    chex.assert_rank(length, 1)
    order = np.argsort(-length, kind='stable').astype(np.int32)
    if len(order) and length[order[0]] > buckets.widths[-1]:
        raise ValueError(
            f'row {order[0]} has {length[order[0]]} tokens, the widest bucket {buckets.widths[-1]}'
        )
    groups = []
    while len(order):
        width = next(w for w in buckets.widths if w >= length[order[0]])
        rows = min(buckets.token_budget // width, len(length))
        rows = rows // multiple * multiple or rows
        index = np.full(rows, len(length), np.int32)
        index[: len(order)] = order[:rows]
        groups.append((index, width))
        order = order[rows:]
    return groups


# ============================================================================ ways to split


def accumulate(job: Job, state: Any, shared: Any, total: Any, part: Part) -> tuple[Any, Any]:
    """total + gradients of one part, and its (Found, output)."""

    def objective(params: Any):
        return job.objective(state, params, part, shared)

    grads, aux = jax.grad(objective, has_aux=True)(job.params(state))
    return job.pin(jax.tree.map(jnp.add, total, job.pin(grads))), aux


def zeros(job: Job, state: Any) -> Any:
    """Gradients of nothing."""
    return job.pin(jax.tree.map(jnp.zeros_like, job.params(state)))


def add(a: Found, b: Found) -> Found:
    """Sum of what two parts found."""
    load = None if a.load is None or b.load is None else a.load + b.load
    return Found(a.loss + b.loss, add_metrics(a.metrics, b.metrics), load)


def total(stacked: Found) -> Found:
    """Sum of what a scan over parts found, in the order of the parts.

    By a scan, too: metrics are many, and a program that grew with the number of parts would take
    minutes to compile.
    """
    first, rest = jax.tree.map(lambda x: x[0], stacked), jax.tree.map(lambda x: x[1:], stacked)
    return jax.lax.scan(lambda sum_, part: (add(sum_, part), None), first, rest)[0]


def scanned(job: Job, parts: int, rules: Rules) -> Update:
    """update(state, batch) -> (state, metrics, output [B,T]) by a scan over equal microbatches.

    Jitted as one, and the state is donated. ValueError at the first trace where `parts` does not
    divide the rows.
    """

    def update(state: Any, batch: Any) -> tuple[Any, Metrics, Array]:
        whole, shared = job.begin(state, batch)
        step = functools.partial(accumulate, job, state, shared)
        grads, (found, out) = jax.lax.scan(step, zeros(job, state), split(whole, parts, rules))
        state, metrics = job.finish(state, grads, total(found))
        return state, metrics, join(out)

    return jax.jit(update, donate_argnums=0)


def bucketed(job: Job, buckets: LengthBuckets, rules: Rules) -> Update:
    """update(state, batch) -> (state, metrics, output [B,T]) over microbatches by length.

    A few jitted calls, of which one is compiled for each bucket; the state is donated. Nothing
    waits for the device where `batch.length` is an array of the host.
    """
    begin = jax.jit(job.begin)
    start = jax.jit(functools.partial(zeros, job))
    finish = jax.jit(job.finish, donate_argnums=0)
    together = jax.jit(add)

    @functools.partial(jax.jit, static_argnames='width', donate_argnums=(0, 1))
    def step(
        grads: Any, out: Array, state: Any, whole: Part, shared: Any, index: Array, width: int
    ):
        part = take(whole, index, width, rules)
        grads, (found, new) = accumulate(job, state, shared, grads, part)
        return grads, place(out, new, index), found

    def update(state: Any, batch: Any) -> tuple[Any, Metrics, Array]:
        groups = plan(
            require(batch, 'length', 'length_buckets'), buckets, sharding.batch_shards(rules)
        )
        whole, shared = begin(state, sharding.feed(batch, rules))
        grads, found = start(state), None
        out = jnp.zeros(batch.mask.shape, jnp.float32)
        for index, width in groups:
            grads, out, new = step(grads, out, state, whole, shared, index, width=width)
            found = new if found is None else together(found, new)
        if found is None:
            raise ValueError('the minibatch has no rows')
        state, metrics = finish(state, grads, found)
        return state, metrics, out

    return update


def mapped(look: Callable[[Any, Any], Any], parts: int, rules: Rules) -> Callable[[Any, Any], Any]:
    """(params, batch) -> what `look(params, rows)` says, [B,T,...], over equal microbatches."""

    def run(params: Any, batch: Any) -> Any:
        found = jax.lax.map(functools.partial(look, params), split(batch, parts, rules))
        return jax.tree.map(join, found)

    return jax.jit(run)


def bucket_mapped(
    look: Callable[[Any, Any], Any], buckets: LengthBuckets, rules: Rules
) -> Callable[[Any, Any], Any]:
    """As `mapped`, over microbatches by length; past a bucket stands 0, in integers -1."""

    @functools.partial(jax.jit, static_argnames='width', donate_argnums=0)
    def step(out: Any, params: Any, batch: Any, index: Array, width: int) -> Any:
        new = look(params, take(batch, index, width, rules))
        return jax.tree.map(lambda a, b: place(a, b, index), out, new)

    def empty(x: Any) -> Array:
        return jnp.full(x.shape, -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0, x.dtype)

    def run(params: Any, batch: Any) -> Any:
        groups = plan(
            require(batch, 'length', 'length_buckets'), buckets, sharding.batch_shards(rules)
        )
        out = jax.tree.map(empty, jax.eval_shape(look, params, batch))
        batch = sharding.feed(batch, rules)
        for index, width in groups:
            out = step(out, params, batch, index, width=width)
        return out

    return run


# ============================================================================ rows and columns


def pin_rows(tree: Any, rules: Rules) -> Any:
    """Arrays [B,...] with their rows split over the mesh as the rules say."""
    return jax.tree.map(
        lambda x: sharding.constrain(x, ('batch',) + (None,) * (x.ndim - 1), rules),
        jax.tree.map(jnp.asarray, tree),
    )


def split(tree: Any, parts: int, rules: Rules) -> Any:
    """[B, ...] -> [parts, B / parts, ...], part i with rows i, i + parts, ...

    With a stride, so that each device keeps its rows. ValueError where `parts` does not divide B.
    """

    def one(x: Array) -> Array:
        if x.shape[0] % parts:
            raise ValueError(f'{parts} microbatches do not divide a minibatch of {x.shape[0]} rows')
        x = jnp.asarray(x).reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return sharding.constrain(x, (None, 'batch') + (None,) * (x.ndim - 2), rules)

    return jax.tree.map(one, tree)


def join(x: Array) -> Array:
    """The inverse of `split`: [parts, B / parts, ...] -> [B, ...]."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def take(tree: Any, index: Array, width: int, rules: Rules) -> Any:
    """Rows `index` and the first `width` columns of every array; an empty row where no row is.

    In an empty row all is 0, its length included: no token of it is valid.
    """

    def one(x: Array) -> Array:
        x = jnp.asarray(x)
        x = x[:, :width] if x.ndim > 1 else x
        return x.at[index].get(mode='fill', fill_value=0)

    return pin_rows(jax.tree.map(one, tree), rules)


def place(out: Array, new: Array, index: Array) -> Array:
    """out [B,T,...] with new [b,w,...] put into rows `index`, columns up to w."""
    return out.at[index, : new.shape[1]].set(new, mode='drop')
