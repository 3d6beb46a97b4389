"""Low-rank adapters: trained factors beside frozen kernels (LoRA, arXiv:2106.09685).

    y = x W + (alpha / rank) (x A) B

They are one more entry, 'adapters', of the params dict. Without it a model is its base, so the base
needs no copy beside an adapted policy. The product A B is formed by `merge` alone: no gradient and
no optimizer state has the size of a kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policyopt import checks
from policyopt.types import Array

KEY = 'adapters'  # of the params dict
TRAINED = (KEY, 'value')  # entries that training moves, where there are adapters


class Place(NamedTuple):
    """Where a target's kernel is: [layers, experts?, *in, *out].

    Attributes:
      kinds: of layers that may have it.
      path: of the kernel in the parameters of a layer.
      lead: stacked axes, layers included.
      inputs: axes that are contracted with the input.
    """

    kinds: tuple[str, ...]
    path: tuple[str, ...]
    lead: int = 1
    inputs: int = 1


BOTH, SWIGLU = ('dense', 'moe'), ('gate', 'up', 'down')
PLACES = {name: Place(BOTH, ('attention', name)) for name in ('q', 'k', 'v')}
PLACES |= {'o': Place(BOTH, ('attention', 'o'), inputs=2)}
PLACES |= {name: Place(('dense',), ('mlp', name)) for name in SWIGLU}
PLACES |= {f'experts.{name}': Place(('moe',), ('mlp', name), lead=2) for name in SWIGLU}
PLACES |= {f'shared.{name}': Place(('moe',), ('mlp', 'shared', name)) for name in SWIGLU}
GROUPS = {
    'attention': ('q', 'k', 'v', 'o'),
    'mlp': SWIGLU,
    'experts': tuple(f'experts.{name}' for name in SWIGLU),
    'shared': tuple(f'shared.{name}' for name in SWIGLU),
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters of chosen projections.

    Attributes:
      rank: inner width of each; 0 leaves the base as it is, bit for bit.
      alpha: their sum is scaled by alpha / rank, so that the learning rate can stay when the rank
        changes.
      targets: projections, by name: q, k, v, o; gate, up, down of dense layers; experts.gate, ...
        of routed experts and shared.gate, ... of shared ones; or groups: attention, mlp, experts,
        shared.

    Raises ValueError naming the field, with the nearest spelling.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ('attention', 'mlp')

    def __post_init__(self):
        checks.number('adapters.rank', self.rank, 0)
        checks.number('adapters.alpha', self.alpha, math.ulp(0.0))
        if not self.targets:
            raise ValueError('adapters.targets is (); legal is one projection or more')
        for name in self.targets:
            checks.one_of('adapters.targets', name, (*PLACES, *GROUPS))
        if len(set(self.names)) != len(self.names):
            raise ValueError(f'adapters.targets names a projection twice: {self.targets}')

    @property
    def names(self) -> tuple[str, ...]:
        """The projections alone, groups spelt out."""
        return tuple(name for t in self.targets for name in GROUPS.get(t, (t,)))

    @property
    def scale(self) -> float:
        """Factor of x A B; 0 at rank 0."""
        return self.alpha / self.rank if self.rank else 0.0


# ============================================================================ the partition


def trained(params: Any) -> Any:
    """The entries that training moves: adapters and value head; all of them without adapters."""
    if not isinstance(params, Mapping) or KEY not in params:
        return params
    return {name: params[name] for name in TRAINED if name in params}


def off(params: Any) -> Any:
    """The base: all entries but the adapters."""
    return {name: value for name, value in params.items() if name != KEY}


def frozen(params: Any) -> Any:
    """The entries that training leaves alone; {} without adapters."""
    moving = trained(params)
    return {} if moving is params else {k: v for k, v in params.items() if k not in moving}


# ============================================================================ shapes and values


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _kernels(config: AdapterConfig, shapes: Any) -> Iterator[tuple[str, Place, tuple[str, ...]]]:
    """(target, place, path in the params dict) of each kernel that the base has.

    Raises ValueError for a target that the base lacks.
    """
    for name in config.names:
        place = PLACES[name]
        found = [(kind, *place.path) for kind in place.kinds]
        found = [path for path in found if _get(shapes, path) is not None]
        # `gate` of a mixture lies where that of a dense layer does.
        if not found:
            known = [
                n
                for n, p in PLACES.items()
                if any(_get(shapes, (k, *p.path)) is not None for k in p.kinds)
            ]
            raise ValueError(
                f'adapters.targets has {name!r}, which the model lacks.'
                f'{checks.nearest(name, known)}'
            )
        for path in found:
            yield name, place, path


def _build(config: AdapterConfig, tree: Any, make: Any) -> dict[str, Any]:
    """{kind: {...: {'a', 'b'}}} from make(leaf of `tree`, place) -> (a, b)."""
    out: dict[str, Any] = {}
    for _, place, path in _kernels(config, tree):
        at = out
        for name in path:
            at = at.setdefault(name, {})
        at['a'], at['b'] = make(_get(tree, path), place)
    return out


def axes(config: AdapterConfig, base: Any) -> dict[str, Any]:
    """Logical axes of the adapters from those of the base; the rank is never split."""

    def make(names: tuple[Any, ...], place: Place) -> tuple[Any, Any]:
        cut = place.lead + place.inputs
        return (*names[:cut], None), (*names[: place.lead], None, *names[cut:])

    return _build(config, base, make)


def init(config: AdapterConfig, shapes: Any, key: Array) -> dict[str, Any]:
    """Fresh adapters, float32: A normal with variance 1 / inputs, B zero, so that A B is zero.

    Args:
      config: rank and targets.
      shapes: of the base's parameters (`Model.shapes` of the base, or its params).
      key: of the draw.

    Raises ValueError for a target that the base lacks.
    """
    numbers = iter(range(1 << 20))

    def make(leaf: Any, place: Place) -> tuple[Array, Array]:
        cut = place.lead + place.inputs
        lead, inputs, outputs = (
            leaf.shape[: place.lead],
            leaf.shape[place.lead : cut],
            leaf.shape[cut:],
        )
        draw = jax.random.normal(
            jax.random.fold_in(key, next(numbers)), (*lead, *inputs, config.rank)
        )
        return draw * math.prod(inputs) ** -0.5, jnp.zeros((*lead, config.rank, *outputs))

    return _build(config, shapes, make)


def attach(model: Any, params: Any, config: AdapterConfig, key: Array) -> tuple[Any, Any]:
    """The model with adapters, and its params with fresh ones; the base's arrays are shared.

    Raises ValueError for a model that has adapters already, and a target that it lacks.
    """
    if model.adapters is not None or KEY in params:
        raise ValueError('the model has adapters already; legal is a base, or `merge` first')
    new = {**params, KEY: jax.jit(lambda key: init(config, params, key))(key)}
    return dataclasses.replace(model, adapters=config), new


def merge(model: Any, params: Any) -> tuple[Any, Any]:
    """The model without adapters, and params whose kernels are W + (alpha / rank) A B.

    Sums are formed in float32 at least, and rounded to the kernel's own type.
    """
    config = model.adapters
    if config is None:
        return model, params
    out = jax.tree.map(lambda x: x, off(params))
    for _, place, path in _kernels(config, out) if config.rank else ():
        own, at = _get(params[KEY], path), _get(out, path[:-1])
        at[path[-1]] = _sum(at[path[-1]], own['a'], own['b'], config.scale, place)
    return dataclasses.replace(model, adapters=None), out


def _sum(kernel: Array, a: Array, b: Array, scale: float, place: Place) -> Array:
    lead, cut = kernel.shape[: place.lead], place.lead + place.inputs
    inner = math.prod(kernel.shape[place.lead : cut])
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    product = jnp.einsum(
        '...ir,...ro->...io',
        a.reshape(*lead, inner, a.shape[-1]).astype(wide),
        b.reshape(*lead, a.shape[-1], -1).astype(wide),
        precision='highest',
    )
    return (kernel.astype(wide) + scale * product.reshape(kernel.shape)).astype(kernel.dtype)


# ============================================================================ in a layer


def ready(tree: Any, config: AdapterConfig | None, dtype: Any) -> Any:
    """A layer's adapters as its matmuls take them: in `dtype`, with the scale inside B.

    {} without adapters, and at rank 0.
    """
    if not tree or config is None or not config.rank:
        return {}
    if 'a' in tree:
        return {'a': tree['a'].astype(dtype), 'b': (config.scale * tree['b']).astype(dtype)}
    return {name: ready(value, config, dtype) for name, value in tree.items()}
