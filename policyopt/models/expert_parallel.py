"""The mixture-of-experts layer over a device mesh, by `shard_map`; exact, without a capacity.

Every device holds E / (devices over the expert axes) experts, and works on the rows of the tokens
in its batch shard that chose them. What crosses devices, n tokens in a batch shard:

    expert axes hold other tokens ('batch' is split over them too): all-gather of x [n,D] and of the
        routing, reduce-scatter of the partial sums [n,D]; the backward pass has the transposes.
    expert axes hold the same tokens: nothing is sent to the experts; one all-reduce of the partial
        sums [n,D] forward, and one of the gradient of x backward.
    mlp axes split every expert's hidden width; they join the all-reduce.
    weights that are stored split over further axes (fsdp) are gathered before the layer, their
        gradients summed over the batch axes after it.
    statistics [E] are summed over the batch axes.

An all-to-all would send less for many expert shards, but needs either a capacity or a size that
depends on data; here every shape is static and no token is dropped. Each expert shard's buffer has
room for the case that all its tokens choose its experts; the blocked and the ragged backend do work
for the rows that are used.

Also without an expert axis this is the form to use on a mesh: sorting tokens by expert then stays
inside each batch shard, where the plain layer would sort over all devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import chex
import jax
from jax.sharding import PartitionSpec as P

from policyopt.models import grouped_matmul as gm
from policyopt.models.moe import check_params, choose_backend, finish, moe_layer
from policyopt.models.router import MoEConfig, RouterStats, Routes, route
from policyopt.sharding import DEFAULT_RULES, Rules
from policyopt.types import Array

Axes = tuple[str, ...]


def _split_axes(name: str, rules: Rules, sizes: Mapping[str, int], taken: Axes = ()) -> Axes:
    """Mesh axes larger than 1 that the rules split a logical axis over, less those taken."""
    wanted = dict(rules).get(name, ())
    return tuple(a for a in wanted if sizes.get(a, 1) > 1 and a not in taken)


def _shards(axes: Axes, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[a] for a in axes)


def _layer_axes(
    tokens: int, inner: int, config: MoEConfig, rules: Rules, sizes: Mapping[str, int]
) -> tuple[Axes, Axes, Axes]:
    """Mesh axes that split tokens, experts and an expert's width; raises where one can't."""
    batch = _split_axes('batch', rules, sizes)
    if tokens % _shards(batch, sizes):
        batch = ()
    experts = _split_axes('experts', rules, sizes)
    mlp = _split_axes('mlp', rules, sizes, batch + experts)
    for field, size, axes in (('experts', config.experts, experts), ('mlp', inner, mlp)):
        if size % _shards(axes, sizes):
            raise ValueError(
                f'{field}={size} does not divide over mesh axes {axes} '
                f'({_shards(axes, sizes)} devices).'
            )
    return batch, experts, mlp


def moe_layer_sharded(
    x: Array,
    params: Mapping[str, Any],
    config: MoEConfig,
    *,
    valid: Array | None = None,
    routing: Array | None = None,
    backend: str | None = None,
    mesh: Any = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[Array, Array, dict[str, Any]]:
    """`moe_layer` on tokens x [N,D] over a mesh: same arguments, results and gradients.

    Args:
      mesh: the devices; None means the ambient mesh (`jax.set_mesh`). Without one, or where the
        rules split nothing over it, this is `moe_layer`.
      rules: which mesh axes split 'batch' (the tokens), 'experts' and 'mlp' (an expert's width).
        Tokens that do not divide by their axes are not split. A mesh axis that splits tokens or
        experts does not split the width.

    Raises ValueError where experts, or an expert's width, do not divide by their mesh axes.
    """
    chex.assert_rank(x, 2)
    check_params(x, params, config)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    sizes: dict[str, int] = {} if mesh.empty else dict(mesh.shape)
    inner = params['gate'].shape[-1]
    tokens, experts, mlp = _layer_axes(x.shape[0], inner, config, rules, sizes)
    if not tokens + experts + mlp:
        return moe_layer(x, params, config, valid=valid, routing=routing, backend=backend)
    local = _local_layer(config, choose_backend(backend), tokens, experts, mlp)
    by_token: Any = P(tokens or None)
    by_expert: Any = P(experts or None, None, mlp or None)
    whole: Any = P()
    down: Any = P(experts or None, mlp or None)
    in_specs = (by_token, whole, whole, by_expert, by_expert, down, by_token, by_token)
    out_specs = (by_token, Routes(by_token, by_token, RouterStats(*[whole] * 7)))
    adapters = dict(params.get('adapters') or {})
    in_specs += ({name: _adapter_specs(name, experts, mlp) for name in adapters},)
    routed, routes = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(
        x,
        params['router'],
        params.get('bias'),
        params['gate'],
        params['up'],
        params['down'],
        valid,
        routing,
        adapters,
    )
    return finish(x, routed, routes, params, config, valid)


def _adapter_specs(name: str, experts: Axes, mlp: Axes) -> dict[str, Any]:
    """Layout of an expert's adapter: a [E,in,r] and b [E,r,out], split as its kernel is."""
    inner, outer = (mlp, ()) if name == 'down' else ((), mlp)
    return {'a': P(experts or None, inner or None), 'b': P(experts or None, None, outer or None)}


def _local_layer(config: MoEConfig, backend: str, tokens: Axes, experts: Axes, mlp: Axes):
    """What one device computes: routed sum of its tokens [n,D] and their Routes."""
    gathered = tuple(a for a in experts if a in tokens)  # axes whose tokens must be gathered
    summed = tuple(a for a in experts if a not in tokens) + mlp
    axes = tokens + summed

    def vary(tree: Any, over: Axes) -> Any:
        """Arrays that differ over some axes, as differing over all; gradients are then summed."""
        return jax.lax.pcast(tree, tuple(a for a in axes if a not in over), to='varying')

    def layer(x, router, bias, gate, up, down, valid, routing, adapters):
        routes = route(x, router, bias, config, valid, routing)
        ids, weights = routes.experts, routes.weights
        if gathered:
            x, ids, weights = jax.lax.all_gather((x, ids, weights), gathered, tiled=True)
        if experts:
            ids = ids - jax.lax.axis_index(experts) * gate.shape[0]
        gate, up, down = vary((gate, up, down), experts + mlp)
        low = {}
        for name, own in adapters.items():
            split = {'a': mlp if name == 'down' else (), 'b': () if name == 'down' else mlp}
            low[name] = {key: vary(own[key], experts + split[key]) for key in own}
        y = gm.grouped_swiglu(
            vary(x, tokens),
            gate,
            up,
            down,
            vary(ids, tokens + experts),
            vary(weights, tokens),
            backend=backend,
            precision=config.precision,
            axes=axes,
            adapters=low,
        )
        if gathered:
            y = jax.lax.psum_scatter(y, gathered, tiled=True)
        if summed:
            y = jax.lax.psum(y, summed)
        if tokens:
            routes = routes._replace(stats=jax.lax.psum(routes.stats, tokens))
        return y, routes

    return layer
