"""Extending a cache: tokens past the count, full caches, buckets, and what decode costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt import models
from policyopt.models import cache as cache_lib

CONFIG = models.ModelConfig(
    vocab_size=40, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=24
)
ROWS, SIZE = 3, 24


@functools.cache
def made():
    model = models.build(CONFIG)
    return (
        model,
        jax.jit(model.init)(jax.random.key(0)),
        jax.jit(model.extend, static_argnames='bucket'),
    )


def tokens(width, seed=0):
    return jax.random.randint(jax.random.key(seed), (ROWS, width), 0, 40)


def filled(counts):
    model, params, extend = made()
    return extend(params, model.init_cache(ROWS, SIZE), tokens(8), jnp.asarray(counts))[1]


def test_tokens_past_the_count_change_nothing():
    _, params, extend = made()
    cache, count = filled([8, 3, 5]), jnp.array([1, 4, 0])
    other = jnp.where(jnp.arange(8) < count[:, None], tokens(8, 1), 39)
    out, after = extend(params, cache, tokens(8, 1), count)
    again, after_again = extend(params, cache, other, count)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(after_again), strict=True):
        np.testing.assert_array_equal(a, b)
    for row, n in enumerate(count):
        np.testing.assert_array_equal(out.hidden[row, :n], again.hidden[row, :n])
    np.testing.assert_array_equal(after.length, [9, 7, 5])
    # A row that got nothing keeps every byte.
    np.testing.assert_array_equal(after.k[:, 2], cache.k[:, 2])
    # What was there stays: only the new positions differ.
    for row, (start, n) in enumerate(zip([8, 3, 5], count, strict=True)):
        changed = np.any(np.asarray(after.v[:, row] != cache.v[:, row]), axis=(0, 1, 3))
        np.testing.assert_array_equal(np.nonzero(changed)[0], np.arange(start, start + n))


def test_tokens_past_the_end_of_the_cache_are_dropped():
    _, params, extend = made()
    cache = dataclasses.replace(filled([8, 8, 8]), length=jnp.array([SIZE - 2, 8, SIZE]))
    _, after = extend(params, cache, tokens(8, 1), jnp.array([4, 4, 4]))
    assert after.k.shape == cache.k.shape
    np.testing.assert_array_equal(after.k[:, 0, :, : SIZE - 2], cache.k[:, 0, :, : SIZE - 2])
    np.testing.assert_array_equal(after.k[:, 2], cache.k[:, 2])


@pytest.mark.parametrize(('width', 'size'), [(1, 5), (4, 9), (5, 5), (7, 5)])
def test_writes_agree_with_loops(width, size):
    rng = np.random.default_rng(width)
    cache, new = rng.normal(size=(2, 6, 2, size, 3)), rng.normal(size=(6, width, 2, 3))
    length = np.array([0, 1, size - 1, size, size - 2, 2])
    count = np.array([width, 0, width, 1, min(width, 2), width // 2])
    out = cache.copy()
    for b, j in np.ndindex(6, width):
        if j < count[b] and length[b] + j < size:
            out[1, b, :, length[b] + j] = new[b, j]
    found = jax.jit(cache_lib.write)(*map(jnp.asarray, (cache, 1, length, count, new)))
    np.testing.assert_array_equal(found, out.astype(np.float32))


def test_buckets_read_less_and_say_the_same():
    _, params, extend = made()
    cache, count = filled([8, 3, 5]), jnp.array([1, 1, 1])
    dirty = models.Cache(
        k=cache.k.at[..., 16:, :].set(jnp.nan),
        v=cache.v.at[..., 16:, :].set(jnp.nan),
        length=cache.length,
    )
    whole, _ = extend(params, cache, tokens(1, 2), count)
    part, after = extend(params, dirty, tokens(1, 2), count, bucket=16)
    np.testing.assert_allclose(part.hidden, whole.hidden, atol=2e-6)
    assert after.k.shape == cache.k.shape


@pytest.mark.parametrize('backend', ['auto', 'xla'])
def test_what_stands_past_a_rows_length_is_unread(backend):
    _, params, _ = made()
    extend = models.build(dataclasses.replace(CONFIG, attention=backend)).extend
    cache, count = filled([8, 3, 5]), jnp.array([2, 1, 0])
    past = jnp.arange(SIZE) >= cache.length[:, None]
    k, v = (jnp.where(past[None, :, None, :, None], jnp.nan, x) for x in (cache.k, cache.v))
    dirty = models.Cache(k=k, v=v, length=cache.length)
    fed = tokens(2, 2)
    clean, _ = extend(params, cache, fed, count, bucket=16)
    out, _ = extend(params, dirty, fed, count, bucket=16)
    used = np.arange(2) < np.asarray(count)[:, None]
    np.testing.assert_array_equal(np.asarray(out.hidden)[used], np.asarray(clean.hidden)[used])


def test_rows_do_not_see_each_other():
    _, params, extend = made()
    order = np.array([2, 0, 1])
    cache, fed = filled([8, 3, 5]), tokens(1, 3)
    out, _ = extend(params, cache, fed, jnp.ones(3, int))
    moved = models.Cache(k=cache.k[:, order], v=cache.v[:, order], length=cache.length[order])
    again, _ = extend(params, moved, fed[order], jnp.ones(3, int))
    np.testing.assert_array_equal(again.hidden, out.hidden[order])


def test_a_step_writes_in_place_and_reads_its_bucket():
    # Donated, the cache is updated where it lies: a step needs no second cache, whatever its size.
    model, params, _ = made()

    def memory(size, bucket):
        cache = jax.eval_shape(lambda: model.init_cache(ROWS, size))
        step = jax.jit(model.extend, static_argnames='bucket', donate_argnums=1)
        count = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        fed = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32)
        compiled = step.lower(params, cache, fed, count, bucket=bucket).compile()
        return compiled.memory_analysis().temp_size_in_bytes, cache.k.size * 4

    small, _ = memory(256, 32)
    large, held = memory(4096, 32)
    assert large < small + held / 10, (small, large, held)


@pytest.mark.slow
def test_decode_cost_follows_the_bucket():
    config = dataclasses.replace(CONFIG, embed_dim=64, num_heads=8, num_kv_heads=8, head_dim=32)
    model = models.build(config)
    params = jax.jit(model.init)(jax.random.key(0))

    def flops(bucket):
        cache = jax.eval_shape(lambda: model.init_cache(32, 4096))
        one = jax.ShapeDtypeStruct((32,), jnp.int32)
        fed = jax.ShapeDtypeStruct((32, 1), jnp.int32)
        step = jax.jit(model.extend, static_argnames='bucket')
        return step.lower(params, cache, fed, one, bucket=bucket).compile().cost_analysis()['flops']

    assert flops(4096) > 10 * flops(128)
