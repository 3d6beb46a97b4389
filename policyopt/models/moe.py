"""Dropless mixture-of-experts feed-forward layer, on one device or over an expert mesh axis.

    y = sum_j gate_j * down_ej(silu(gate_ej(x)) * up_ej(x)) + shared(x)

Tokens are never dropped: there is no capacity, and an expert works on as many rows as chose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from policyopt.checks import one_of
from policyopt.models import grouped_matmul as gm
from policyopt.models.router import (
    MoEConfig,
    Routes,
    balance,
    route,
    routing_dtype,
)
from policyopt.types import Array

__all__ = ['MoEConfig', 'moe_layer']


def moe_layer(
    x: Array,
    params: Mapping[str, Any],
    config: MoEConfig,
    *,
    valid: Array | None = None,
    routing: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array, dict[str, Any]]:
    """Mixture-of-experts layer on tokens x [N,D].

    Args:
      x: [N,D] floating; the result has its dtype.
      params: router [E,D]; gate and up [E,D,F] and down [E,F,D] in x's dtype; bias [E] with
        `config.selection_bias`; with `config.shared_experts` a dict `shared` of gate [D,G], up
        [D,G], down [G,D] and optionally shared_gate [D], whose sigmoid scales the shared output.
        Optionally, here and in `shared`, `adapters` of gate, up and down: see `grouped_swiglu`.
      config: what the router does.
      valid: [N]; tokens where it is 0 get zeros and routing -1, take no expert work and no part in
        statistics; None means all are valid.
      routing: [N,k] int, recorded experts. Entries >= 0 replace the live selection; gate weights
        still come from the live router over the experts used. Entries of -1, or of any other id
        that is not an expert, route natively: they are filled by the best live experts that the
        token's record does not name. An id recorded twice works twice, once for each entry.
      backend: 'blocked' or 'ragged' (see `grouped_matmul`); None picks by platform.

    Returns:
      y [N,D], the routing used [N,k] (int8 up to 128 experts, else int16; -1 for invalid tokens)
      and a dict of `load_balance`, `router_z`, `load`, `replay_agreement` (see `router.balance`).
    """
    chex.assert_rank(x, 2)
    check_params(x, params, config)
    routes = route(x, params['router'], params.get('bias'), config, valid, routing)
    y = gm.grouped_swiglu(
        x,
        params['gate'],
        params['up'],
        params['down'],
        routes.experts,
        routes.weights,
        backend=choose_backend(backend),
        precision=config.precision,
        adapters=params.get('adapters'),
    )
    return finish(x, y, routes, params, config, valid)


def finish(
    x: Array,
    routed: Array,
    routes: Routes,
    params: Mapping[str, Any],
    config: MoEConfig,
    valid: Array | None,
) -> tuple[Array, Array, dict[str, Any]]:
    """Result of the layer from the routed experts' sum [N,D]: adds the shared experts."""
    if config.shared_experts:
        clean = x if valid is None else jnp.where(valid[:, None] != 0, x, 0)
        routed = routed + _shared(clean, params['shared'], config)
    if valid is not None:
        routed = jnp.where(valid[:, None] != 0, routed, 0)
    record = routes.experts.astype(routing_dtype(config.experts))
    return routed.astype(x.dtype), record, balance(routes.stats, config)


def choose_backend(backend: str | None) -> str:
    """The named backend, the platform's for None; raises for an unknown name."""
    if backend is None:
        return gm.default_backend()
    one_of('backend', backend, gm.BACKENDS)
    return backend


def check_params(x: Array, params: Mapping[str, Any], config: MoEConfig) -> None:
    """Shapes, and that parameters and config agree on what is optional.

    Raises AssertionError for a shape, ValueError for a part that only one of them has.
    """
    experts, width = config.experts, x.shape[1]
    inner = params['gate'].shape[-1]
    chex.assert_shape([params['gate'], params['up']], (experts, width, inner))
    chex.assert_shape(params['down'], (experts, inner, width))
    for name, field in (('bias', 'selection_bias'), ('shared', 'shared_experts')):
        if (params.get(name) is not None) != bool(getattr(config, field)):
            raise ValueError(
                f'{field}={getattr(config, field)!r}, but params[{name!r}] is '
                f'{"absent" if params.get(name) is None else "present"}.'
            )
    if config.shared_experts and params['shared']['gate'].shape[-1] % config.shared_experts:
        raise ValueError(
            f'shared_experts={config.shared_experts} must divide the width '
            f"{params['shared']['gate'].shape[-1]} of params['shared']."
        )


def _shared(x, params, config):
    """The feed-forward layer that every token passes through."""

    def product(x, w):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.dot(x, w, precision=config.precision, preferred_element_type=wide)

    def project(x, name):
        y, own = product(x, params[name]), params.get('adapters', {}).get(name)
        return y if own is None else y + product(product(x, own['a']).astype(x.dtype), own['b'])

    inner = jax.nn.silu(project(x, 'gate')) * project(x, 'up')
    y = project(inner.astype(x.dtype), 'down')
    if params.get('shared_gate') is not None:
        y = y * jax.nn.sigmoid(product(x, params['shared_gate']))[:, None]
    return y
