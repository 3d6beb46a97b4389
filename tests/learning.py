"""What the suites of the learner share: a model that compiles in no time, and its minibatches."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import policyopt as po
from policyopt import scoring, sharding

ROWS, WIDTH, VOCAB, DIM = 8, 9, 12, 6


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = VOCAB
    value_head: bool = False
    moe: Any = None
    lax_precision: Any = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Running:
    """The state of a token is tanh of the running mean of embeddings: causal, and cheap."""

    config: Config = Config()
    rules: Any = sharding.DEFAULT_RULES

    def init(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        params = {name: rng.normal(size=(VOCAB, DIM)) for name in ('embed', 'head')}
        if self.config.value_head:
            params['value'] = rng.normal(size=DIM)
        return {name: x.astype(np.float32) for name, x in params.items()}

    def axes(self):
        table = ('vocab', 'embed')
        value = {'value': ('embed',)} if self.config.value_head else {}
        return {'embed': table, 'head': table, **value}

    def hidden(self, params, tokens, *, valid=None, routing=None):
        del routing
        x = params['embed'][tokens]
        x = x if valid is None else jnp.where(valid[:, :, None], x, 0)
        steps = 1 + jnp.arange(tokens.shape[1])[:, None]
        return SimpleNamespace(hidden=jnp.tanh(jnp.cumsum(x, axis=1) / steps), routing=None, aux={})

    def head(self, params):
        return params['head']

    def value(self, params, hidden):
        return hidden @ params['value']


def random_batch(seed: int = 0, rows: int = ROWS, width: int = WIDTH, vocab: int = VOCAB):
    """Rows of uneven length with gaps; row 5 has no token of the policy. Log-probs are noise."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 4, rows)
    length = np.minimum(prompt + rng.integers(1, width - 2, rows), width)
    at = np.arange(width)
    mask = (at >= prompt[:, None]) & (at < length[:, None])
    mask[5] = False
    shape = (rows, width)

    def noise(centre=0.0):
        return (centre + 0.3 * rng.normal(size=shape)).astype(np.float32)

    old = noise(-2.5)
    return po.TokenBatch(
        tokens=rng.integers(0, vocab, shape).astype(np.int32),
        mask=mask.astype(np.float32),
        advantages=np.where(mask, rng.normal(size=(rows, 1)), 0).astype(np.float32),
        logp_old=old,
        logp_behavior=old + noise(),
        logp_ref=old + noise(),
        length=length.astype(np.int32),
        rewards=rng.integers(0, 2, rows).astype(np.float32),
        group=(np.arange(rows) // 4).astype(np.int32),
        positive=rng.integers(0, 2, rows).astype(bool),
        values_old=noise(),
        returns=noise(),
        segment=np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32),
    )


def on_policy(model, params, batch):
    """The batch with the model's own log-probs as old and sampler's."""
    logp = np.asarray(jax.jit(lambda p, b: scoring.score(model, p, b).logp_new)(params, batch))
    return dataclasses.replace(batch, logp_old=logp, logp_behavior=logp)


def none(inputs):
    """No diagnostics: they are tested elsewhere, and cost compile time."""
    return {}


def fresh(learner, params, critic=None):
    """A state of its own: updates give theirs away."""
    params, critic = jax.tree.map(jnp.array, (params, critic))
    return learner.init(params, jax.random.key(1), critic)


def close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)
