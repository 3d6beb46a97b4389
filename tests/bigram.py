"""A stand-in for a model whose next token depends on the last one alone: cheap, and exact."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from policyopt.models.cache import Cache


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    moe: Any = None


@dataclasses.dataclass(frozen=True)
class Bigram:
    """Params are a table [V,V] of logits: row i is what follows token i."""

    config: Config
    tokenizer: Any = None

    def init_cache(self, batch, size):
        empty = jnp.zeros((1, batch, 1, size, 1))
        return Cache(k=empty, v=empty + 0, length=jnp.zeros(batch, jnp.int32))

    def extend(self, params, cache, tokens, count, *, routing=None, bucket=None):
        del params, routing, bucket
        hidden = SimpleNamespace(hidden=tokens[..., None].astype(jnp.float32), routing=None)
        return hidden, Cache(k=cache.k, v=cache.v, length=cache.length + count)

    def logits(self, params, hidden):
        return params[hidden[..., 0].astype(jnp.int32)]


def chain(vocab_size: int, step: int = 1) -> np.ndarray:
    """Token i is followed by i + step, surely."""
    table = np.zeros((vocab_size, vocab_size), np.float32)
    table[np.arange(vocab_size), (np.arange(vocab_size) + step) % vocab_size] = 80.0
    return table


def noise(vocab_size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Random logits."""
    return scale * np.random.default_rng(seed).normal(size=(vocab_size,) * 2).astype(np.float32)
