"""Running a stack of layers of several kinds as few scans over stacked parameters.

Layers of one kind lie stacked in one array per parameter, in model order. The order of kinds is cut
into segments, each a pattern of kinds that repeats, and each segment is one `lax.scan` whose body
is the pattern: a model with its first layers dense is two scans, one that alternates is one scan,
and compile time does not grow with depth.

A kind that a pattern holds several times costs memory, and time where tokens are few: the loop
copies that kind's weights of one repetition, and its gradients once as a whole. Patterns of one of
each kind, and the leading dense layers of most mixtures, do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policyopt.types import Array

# What `remat` keeps for the backward pass, by name; None keeps everything and replays nothing.
POLICIES = {
    'none': None,
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Segment(NamedTuple):
    """A pattern of layer kinds and how often it repeats."""

    pattern: tuple[str, ...]
    repeats: int


def segments(kinds: tuple[str, ...]) -> tuple[Segment, ...]:
    """Cut a sequence of kinds into repeated patterns, from the front, each as long as possible."""
    out, start = [], 0
    while start < len(kinds):
        rest = kinds[start:]
        best = Segment(rest[:1], 1)
        for period in range(1, len(rest) // 2 + 1):
            pattern, repeats = rest[:period], 1
            while rest[repeats * period : (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > len(best.pattern) * best.repeats:
                best = Segment(pattern, repeats)
        out.append(best)
        start += len(best.pattern) * best.repeats
    return tuple(out)


def _cut(tree: Any, start: int, repeats: int, count: int) -> Any:
    """Entries from `start` on of each array's first axis, as [repeats, count, ...].

    With a count of 1, [repeats, ...]: a reshape before the loop would copy every weight.
    """

    def one(x: Array) -> Array:
        whole = start == 0 and x.shape[0] == repeats * count
        x = x if whole else jax.lax.slice_in_dim(x, start, start + repeats * count)
        return x if count == 1 else x.reshape(repeats, count, *x.shape[1:])

    return jax.tree.map(one, tree)


def run(
    layer: Callable[..., tuple[Any, Any]],
    carry: Any,
    params: Mapping[str, Any],
    kinds: tuple[str, ...],
    extra: Mapping[str, Any],
    remat: str = 'none',
) -> tuple[Any, dict[str, Any]]:
    """Run every layer in order.

    Args:
      layer: (kind, index, carry, params, extra) -> (carry, record): `index` is the layer's number
        in the model, `params` and `extra` its own entries; records of a kind have one structure.
      carry: what flows from layer to layer.
      params: kind -> pytree of arrays stacked over the layers of that kind.
      kinds: kind of each layer.
      extra: kind -> pytree of arrays stacked in the same way (None: nothing), not differentiated
        by this function's own doing.
      remat: a key of POLICIES.

    Returns:
      carry, and for each kind the records stacked over its layers.
    """
    done = dict.fromkeys(kinds, 0)
    records: dict[str, list[Any]] = {kind: [] for kind in done}
    first = 0
    for pattern, repeats in segments(kinds):
        counts = {kind: pattern.count(kind) for kind in done if kind in pattern}
        xs = {
            kind: _cut((params[kind], extra.get(kind)), done[kind], repeats, count)
            for kind, count in counts.items()
        }
        starts = first + len(pattern) * jnp.arange(repeats)

        def body(carry, xs, pattern=pattern):
            start, entries = xs
            seen = dict.fromkeys(pattern, 0)
            out: dict[str, list[Any]] = {kind: [] for kind in seen}
            for step, kind in enumerate(pattern):
                own, more = entries[kind]
                if pattern.count(kind) > 1:
                    own, more = jax.tree.map(lambda x, i=seen[kind]: x[i], (own, more))
                carry, record = layer(kind, start + step, carry, own, more)
                out[kind].append(record)
                seen[kind] += 1
            return carry, {
                kind: jax.tree.map(lambda *r: jnp.stack(r), *r) for kind, r in out.items()
            }

        if POLICIES[remat] is not None:
            body = jax.checkpoint(body, policy=POLICIES[remat], prevent_cse=False)
        carry, out = jax.lax.scan(body, carry, (starts, xs))
        for kind, record in out.items():
            records[kind].append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), record))
            done[kind] += repeats * counts[kind]
        first += repeats * len(pattern)
    joined = {
        kind: jax.tree.map(lambda *r: jnp.concatenate(r), *parts) if len(parts) > 1 else parts[0]
        for kind, parts in records.items()
    }
    return carry, joined
