"""Routing tokens to experts: scores, selection, replay of recorded selections, balance statistics.

Shapes: N tokens, D width, E experts, k experts per token. Scores, softmax and statistics are
float32 (float64 where the inputs are), whatever the model's dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from policyopt.checks import one_of
from policyopt.types import Array, Mean

SCORINGS = ('softmax', 'sigmoid')
PRECISIONS = ('default', 'high', 'highest')


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """How a mixture-of-experts layer routes and computes; hashable, so it may be a static argument.

    Presets: Mixtral and Qwen3-MoE with `norm_topk_prob` are the defaults (the softmax over the
    chosen experts' logits); Qwen3-MoE without it is `renormalise=False`; DeepSeek-V3
    (arXiv:2412.19437) is `scoring='sigmoid', selection_bias=True, groups=8, top_groups=4,
    route_scale=2.5, shared_experts=1`; DeepSeek-V2's group limit is softmax scoring with groups.

    Attributes:
      experts: routed experts E.
      top_k: experts per token, k.
      renormalise: divide the chosen experts' scores by their sum, so that gate weights add up to
        `route_scale`.
      scoring: 'softmax' over all experts, or 'sigmoid' of each logit by itself.
      selection_bias: parameters hold `bias` [E], added to scores for selection only; gate weights
        come from the unbiased scores, and no gradient reaches the bias.
      groups: experts form this many equal groups of consecutive ids; 1 means no group limit.
      top_groups: a token chooses among the experts of its best `top_groups` groups. A group counts
        as the sum of its two best selection scores for sigmoid scoring, as its best for softmax.
      route_scale: factor on gate weights.
      shared_experts: experts that every token passes through, stored as one feed-forward layer of
        `shared_experts` times an expert's width under params['shared']; 0 for none.
      precision: of the expert matmuls: 'default', 'high' or 'highest'. The router is 'highest'.
    """

    experts: int
    top_k: int
    renormalise: bool = True
    scoring: str = 'softmax'
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    route_scale: float = 1.0
    shared_experts: int = 0
    precision: str = 'highest'

    def __post_init__(self):
        one_of('scoring', self.scoring, SCORINGS)
        one_of('precision', self.precision, PRECISIONS)
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f'top_k={self.top_k} must be from 1 to experts={self.experts}.')
        if self.experts > 2**15:
            raise ValueError(
                f'experts={self.experts}: routing is recorded in int16, 32768 at most.'
            )
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f'groups={self.groups} must divide experts={self.experts}.')
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f'top_groups={self.top_groups} must be from 1 to {self.groups}.')
        reachable = self.top_groups * (self.experts // self.groups)
        if self.top_k > reachable:
            raise ValueError(
                f'top_k={self.top_k} exceeds the {reachable} experts of top_groups='
                f'{self.top_groups} groups.'
            )
        if self.shared_experts < 0:
            raise ValueError(f'shared_experts={self.shared_experts} must be 0 or more.')


class RouterStats(NamedTuple):
    """Sums over valid tokens; adding those of two sets of tokens gives those of their union.

    Attributes:
      load: [E] entries that each expert works on (replayed selection where there is one).
      live_load: [E] entries that the live router would have sent to each expert.
      probability: [E] sum of the live router's scores, each token's normalised to add up to 1.
      z: sum of squared log-sum-exp of the router logits.
      tokens: valid tokens.
      replayed: entries taken from a record.
      agreeing: entries taken from a record that the live router chooses as well.
    """

    load: Array
    live_load: Array
    probability: Array
    z: Array
    tokens: Array
    replayed: Array
    agreeing: Array


class Routes(NamedTuple):
    """Where tokens go: experts [N,k] int32 (-1 for invalid tokens), gate weights [N,k] float."""

    experts: Array
    weights: Array
    stats: RouterStats


def routing_dtype(experts: int) -> Any:
    """Smallest integer type that holds every expert id and -1: int8 up to 128 experts, or int16."""
    return jnp.int8 if experts <= 2**7 else jnp.int16


def select_experts(scores: Array, config: MoEConfig) -> Array:
    """The live router's choice: ids [N,k] int32 of the k best selection scores [N,E], best first.

    Ties go to the lower id. With groups, experts outside the token's best groups are left out.
    """
    if config.top_groups < config.groups:
        grouped = scores.reshape(-1, config.groups, config.experts // config.groups)
        best = min(2 if config.scoring == 'sigmoid' else 1, grouped.shape[-1])
        strength = jnp.sum(jax.lax.top_k(grouped, best)[0], axis=-1)
        chosen = jax.lax.top_k(strength, config.top_groups)[1]
        allowed = jnp.any(chosen[:, :, None] == jnp.arange(config.groups), axis=1)
        scores = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, config.top_k)[1].astype(jnp.int32)


def replay_experts(live: Array, routing: Array, experts: int) -> Array:
    """Recorded ids where there are some, the live router's elsewhere: [N,k] int32.

    Every entry outside 0..experts-1 counts as not recorded; such entries of a token are filled, in
    order, by the best live experts that the token's record does not name, so that a partly
    recorded token still reaches k different experts, and an unrecorded one routes natively.
    An id recorded twice for a token stays twice: it counts as two entries with one gate weight
    each.
    """
    chex.assert_equal_shape([live, routing])
    chex.assert_type(routing, int)
    routing = routing.astype(jnp.int32)
    known = (routing >= 0) & (routing < experts)
    unused = ~jnp.any((live[:, :, None] == routing[:, None, :]) & known[:, None, :], axis=-1)
    rank = jnp.cumsum(unused, axis=-1) * unused  # 1, 2, .. over unused live experts, 0 elsewhere
    need = jnp.cumsum(~known, axis=-1)
    match = rank[:, None, :] == need[:, :, None]
    fill = jnp.sum(jnp.where(match, live[:, None, :], 0), axis=-1)
    return jnp.where(known, routing, fill)


def gate_weights(log_scores: Array, chosen: Array, config: MoEConfig) -> Array:
    """Gate weights [N,k] of chosen experts [N,k] from live log-scores [N,E].

    `w = route_scale * s[chosen]`, divided by its sum over k with `renormalise`: computed as a
    softmax of log-scores, which is finite however improbable the (replayed) experts are.
    """
    picked = jnp.take_along_axis(log_scores, chosen, axis=-1)
    weights = jax.nn.softmax(picked, axis=-1) if config.renormalise else jnp.exp(picked)
    return config.route_scale * weights


class _Scores(NamedTuple):
    """The live router on each token: log-scores, selection scores, probabilities; all [N,E]."""

    log: Array
    selection: Array
    probability: Array
    log_sum: Array  # [N], log-sum-exp of the logits


def _live_scores(x: Array, router: Array, bias: Array | None, config: MoEConfig) -> _Scores:
    """Scores of tokens x [N,D] in x's dtype; selection scores carry no gradient."""
    logits = jnp.einsum(
        'nd,ed->ne', x, router.astype(x.dtype), precision='highest', preferred_element_type=x.dtype
    )
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    if config.scoring == 'softmax':
        log = logits - log_sum[:, None]
        selection = logits  # in the order of the softmax, with fewer ties
        probability = jnp.exp(log)
    else:
        log = jax.nn.log_sigmoid(logits)
        selection = jnp.exp(log)
        probability = jax.nn.softmax(log, axis=-1)
    if config.selection_bias:
        assert bias is not None, 'selection_bias needs a bias'
        chex.assert_shape(bias, (config.experts,))
        selection = jnp.exp(log) + bias.astype(x.dtype)
    return _Scores(log, jax.lax.stop_gradient(selection), probability, log_sum)


def route(
    x: Array,
    router: Array,
    bias: Array | None,
    config: MoEConfig,
    valid: Array | None = None,
    routing: Array | None = None,
) -> Routes:
    """Choose experts and gate weights for tokens x [N,D] by router weights [E,D].

    Selection is replayed where `routing` [N,k] names an expert (see `replay_experts`); gate weights
    always come from the live router over the experts used, so d loss / d router is the gradient of
    the same function that a replayed forward computes. Tokens that are not valid [N] get -1 and
    weight 0; what stands in them, NaN included, reaches neither statistics nor gradients.

    Raises AssertionError for a routing that is not of an integer type. What it can't check under
    jit is that its ids are experts: `scoring.check_routing` does, on the host.
    """
    chex.assert_rank([x, router], 2)
    chex.assert_shape(router, (config.experts, x.shape[1]))
    ok = jnp.ones(x.shape[0], bool) if valid is None else valid != 0
    chex.assert_shape(ok, (x.shape[0],))
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    scores = _live_scores(jnp.where(ok[:, None], x, 0).astype(dtype), router, bias, config)
    live = select_experts(scores.selection, config)
    experts, known = live, jnp.zeros(live.shape, bool)
    if routing is not None:
        experts = replay_experts(live, routing, config.experts)
        known = (routing >= 0) & (routing < config.experts) & ok[:, None]
    weights = jnp.where(ok[:, None], gate_weights(scores.log, experts, config), 0)
    agreeing = known & jnp.any(live[:, None, :] == experts[:, :, None], axis=-1)
    stats = RouterStats(
        load=count_experts(experts, ok, config.experts, dtype),
        live_load=count_experts(live, ok, config.experts, dtype),
        probability=jnp.sum(jnp.where(ok[:, None], scores.probability, 0), axis=0),
        z=jnp.sum(jnp.where(ok, scores.log_sum, 0) ** 2),
        tokens=jnp.sum(ok, dtype=dtype),
        replayed=jnp.sum(known, dtype=dtype),
        agreeing=jnp.sum(agreeing, dtype=dtype),
    )
    return Routes(jnp.where(ok[:, None], experts, -1), weights, stats)


def count_experts(ids: Array, ok: Array, experts: int, dtype: Any) -> Array:
    """Entries [E] of ids [N,k] that name each expert, over tokens with ok [N]."""
    hit = (ids[:, :, None] == jnp.arange(experts)) & ok[:, None, None]
    return jnp.sum(hit, axis=(0, 1), dtype=dtype)


def balance(stats: RouterStats, config: MoEConfig) -> dict[str, Any]:
    """Losses and metrics of one layer from its statistics.

    load_balance: Mean whose value is `E sum_e f_e P_e` (arXiv:2101.03961, eq. 4), f_e the share of
    live entries at expert e and P_e the live router's mean probability: 1 at perfect balance (top_k
    times less than implementations that leave f_e unnormalised). Its count is the number of tokens,
    so adding microbatches gives their token-weighted mean, which is not the value of the joined
    batch: that one follows from the sum of `RouterStats`.
    router_z: Mean of squared log-sum-exp of the logits (arXiv:2202.08906, eq. 5); adds exactly.
    load: [E] entries worked on. replay_agreement: Mean over replayed entries of whether the live
    router chooses that expert too.
    """
    tokens = jnp.maximum(stats.tokens, 1)
    share = stats.live_load / (tokens * config.top_k)
    total = config.experts * jnp.sum(share * stats.probability)
    return {
        'load_balance': Mean(total=total, count=stats.tokens),
        'router_z': Mean(total=stats.z, count=stats.tokens),
        'load': stats.load,
        'replay_agreement': Mean(total=stats.agreeing, count=stats.replayed),
    }
