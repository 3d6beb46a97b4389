"""What an accelerator computes, held against values of the CPU and against reference forms.

Everything here runs in float32 at the highest matmul precision but for forms that only half
precision has. Run by `experiments.accelerator`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import policyopt as po
from policyopt import learner as learner_lib
from policyopt import models, sharding
from policyopt.models import attention, moe

FEW = models.MoEConfig(experts=8, top_k=2)
DENSE = models.ModelConfig(
    vocab_size=512, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=128,
    qk_norm=True,
)  # fmt: skip
CONFIGS = {'dense': DENSE, 'mixture': dataclasses.replace(DENSE, moe=FEW, mlp_dim=0, expert_dim=64)}
# Platform -> forms of attention that it has; cudnn takes half precision alone.
ATTENTION = {'cpu': ('blocked',), 'gpu': ('blocked', 'cudnn'), 'tpu': ('blocked', 'splash')}
HALF = ('cudnn',)
SINGLE_LIMIT, HALF_LIMIT = 1e-4, 3e-2
ROWS, PROMPT, DRAWN = 4, 8, 24


class Found(NamedTuple):
    """One comparison.

    Attributes:
      what: in words.
      value: largest difference.
      limit: above which it counts as wrong.
    """

    what: str
    value: float
    limit: float

    @property
    def good(self) -> bool:
        return bool(self.value <= self.limit)  # not for NaN


@contextlib.contextmanager
def on(device: Any) -> Iterator[Any]:
    """What is traced here takes the forms of this device's platform, and runs there."""
    mesh = sharding.make_mesh([('data', 1)], [device])
    with jax.default_device(device), jax.set_mesh(mesh):
        yield NamedSharding(mesh, PartitionSpec())


def run(device: Any, function: Callable[..., Any], *args: Any) -> Any:
    """The values of a jitted function on a device, on the host."""
    with on(device) as placed:
        args = jax.device_put(args, placed)
        return jax.device_get(jax.jit(lambda *args: function(*args))(*args))


def gap(a: Any, b: Any, mask: Any = None) -> float:
    """Largest difference of two arrays, where the mask is set."""
    apart = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    return float(np.max(apart if mask is None else apart[np.asarray(mask) > 0]))


def relative(a: Any, b: Any) -> float:
    """Largest difference of two trees, as a share of the largest value of each leaf of b."""

    def one(x: Any, y: Any) -> float:
        return gap(x, y) / max(float(np.max(np.abs(np.asarray(y, np.float64)))), 1e-12)

    return max(jax.tree.leaves(jax.tree.map(one, a, b)))


def parameters(model: Any, host: Any) -> Any:
    """Random, made by the host; the head is wide enough for logits that say something."""
    params = run(host, model.init, jax.random.key(0))
    return params | {'norm': params['norm'] * 3}


# ============================================================================ sampler and scorer


def drawn(device: Any, model: Any, params: Any, **settings: Any) -> Any:
    """Answers to random prompts, on the host."""
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (ROWS, PROMPT))
    length = np.array([PROMPT, PROMPT - 3, PROMPT, 2], np.int32)
    config = po.SamplingConfig(max_new_tokens=DRAWN, eos_id=-1, **settings)
    with on(device) as placed:
        params = jax.device_put(params, placed)
        key = jax.random.key(1)
        return jax.device_get(po.sample(model, params, (prompts, length), key, config))


def first_ratio(device: Any, host: Any) -> Iterator[Found]:
    """The log-probs of the sampler, computed again by the scorer; and by the scorer of the CPU."""
    for name, config in CONFIGS.items():
        model = models.build(config)
        params = parameters(model, host)
        for kind, settings in {'': {}, ', top-p 0.9 of 16': dict(top_p=0.9, top_k=16)}.items():
            rollout = drawn(device, model, params, **settings)

            def logp(params: Any, rollout: Any, model: Any = model) -> Any:
                return po.score(model, params, rollout).logp_new

            places = {host: "the CPU's scorer"} | {device: 'scorer'}  # they may be one
            for place, where in places.items():
                again = run(place, logp, params, rollout)
                value = gap(again, rollout.logp_behavior, rollout.mask)
                yield Found(f'sampler and {where}, {name}{kind}', value, SINGLE_LIMIT)


# ============================================================================ a train step


def minibatch(host: Any, model: Any, params: Any) -> Any:
    """Rows that the CPU drew, old log-probs a little off, with experts to replay."""
    rollout, rng = drawn(host, model, params), np.random.default_rng(2)
    mask = np.asarray(rollout.mask, np.float32)
    old = rollout.logp_behavior + 0.1 * rng.normal(size=mask.shape) * mask
    fields: dict[str, Any] = dict(
        tokens=rollout.tokens,
        mask=mask,
        advantages=(rng.normal(size=(ROWS, 1)) * mask).astype(np.float32),
        logp_old=old.astype(np.float32),
        logp_behavior=rollout.logp_behavior,
        length=rollout.length,
        group=np.arange(ROWS, dtype=np.int32) // 2,
        routing=rollout.routing,
    )
    return po.TokenBatch(**fields)


def train_step(device: Any, host: Any) -> Iterator[Found]:
    """One update by GRPO with plain gradient descent: its loss and, in its step, its gradient."""
    for name, config in CONFIGS.items():
        model = models.build(config)
        params = parameters(model, host)
        learn = learner_lib.make_learner(
            model, po.algorithms.grpo(beta=0.0), optax.sgd(1.0), microbatches=2
        )
        batch = minibatch(host, model, params)
        values = []
        for place in (device, host):
            with on(place) as placed:
                given, rows = jax.device_put((params, batch), placed)
                state = learn.init(jax.tree.map(jnp.copy, given), jax.random.key(0))
                state, metrics, _ = learn.update(state, rows)
                values.append(jax.device_get((metrics['loss'].value, state.params)))
        (loss, after), (right, wanted) = values
        slope, known = (jax.tree.map(np.subtract, x, params) for x in (after, wanted))
        yield Found(f'loss of a train step, {name}', gap(loss, right), SINGLE_LIMIT)
        yield Found(f'its gradient, share of the largest, {name}', relative(slope, known), 1e-3)


# ============================================================================ forms of one function


def attention_forms(device: Any, host: Any) -> Iterator[Found]:
    """Each form of attention against all scores at once, values and gradients."""
    rng = np.random.default_rng(3)
    shape, length = (2, 256, 4, 128), np.array([256, 100])
    q, k, v, weight = (rng.normal(size=shape).astype(np.float32) for _ in range(4))
    k, v, valid = k[:, :, :2], v[:, :, :2], np.arange(256) < length[:, None]
    weight = weight * valid[:, :, None, None]

    def values(backend: str, dtype: Any) -> Callable[..., Any]:
        def summed(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.astype(dtype) for x in (q, k, v))
            out = attention.attention(q, k, v, valid=jnp.asarray(valid), backend=backend)
            out = jnp.where(valid[:, :, None, None], out.astype(jnp.float32), 0)
            return jnp.sum(out * weight), out

        return jax.grad(summed, argnums=(0, 1, 2), has_aux=True)

    slopes, right = run(host, values('xla', jnp.float32), q, k, v)
    with on(device):
        forms = ATTENTION[sharding.platform()]
    for form in forms:
        half = form in HALF
        limit = HALF_LIMIT if half else SINGLE_LIMIT
        found = run(device, values(form, jnp.bfloat16 if half else jnp.float32), q, k, v)
        kind = f'attention, {form}' + (', bfloat16' if half else '')
        yield Found(kind, gap(found[1], right), limit)
        yield Found(
            f'its gradients, share of the largest, {form}', relative(found[0], slopes), limit
        )


def moe_forms(device: Any, host: Any) -> Iterator[Found]:
    """Each form of the mixture layer against every expert on every token, in float64 by numpy."""
    rng, width, inner, tokens = np.random.default_rng(4), 64, 32, 96
    shapes = dict(
        router=(FEW.experts, width),
        gate=(FEW.experts, width, inner),
        up=(FEW.experts, width, inner),
        down=(FEW.experts, inner, width),
    )
    params = {
        name: (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    x = rng.normal(size=(tokens, width)).astype(np.float32)
    right = _every_expert(x.astype(np.float64), params)

    def values(form: str) -> Callable[..., Any]:
        def summed(x: Any, params: Any) -> Any:
            y, *_ = moe.moe_layer(x, params, FEW, backend=form)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        return jax.grad(summed, argnums=(0, 1), has_aux=True)

    slopes, _ = run(host, values('blocked'), x, params)
    for form in ('blocked', 'ragged'):
        slope, y = run(device, values(form), x, params)
        yield Found(f'mixture layer, {form}', gap(y, right), SINGLE_LIMIT)
        kind = f'its gradients, share of the largest, {form}'
        yield Found(kind, relative(slope, slopes), 1e-3)


def _every_expert(x: np.ndarray, params: dict[str, np.ndarray]) -> np.ndarray:
    scores = x @ params['router'].T
    chosen = np.argsort(-scores, axis=-1)[:, : FEW.top_k]
    top = np.exp(np.take_along_axis(scores, chosen, -1))
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, top / top.sum(-1, keepdims=True), -1)
    gate, up = (np.einsum('nd,edf->nef', x, params[name]) for name in ('gate', 'up'))
    each = np.einsum('nef,efd->ned', gate / (1 + np.exp(-gate)) * up, params['down'])
    return np.einsum('ned,ne->nd', each, weights)


CHECKS = {
    'ratio': first_ratio,
    'train': train_step,
    'attention': attention_forms,
    'moe': moe_forms,
}
