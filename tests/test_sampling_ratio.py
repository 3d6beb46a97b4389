"""The first importance ratio is one: scoring gives back the log-probs that were sampled with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from policyopt import models, scoring
from policyopt.sampling import (
    EngineConfig,
    SamplingConfig,
    allowed_mask,
    sample,
    sample_continuous,
)

SAMPLERS = {
    'decode': sample,
    'engine': functools.partial(sample_continuous, engine=EngineConfig(slots=3, steps=4)),
}


@pytest.fixture(params=SAMPLERS)
def draw(request):
    return SAMPLERS[request.param]


def key(seed=0):
    return jax.random.key(seed)


@functools.cache
def scorer(model, replay_support):
    return jax.jit(
        lambda params, rollout, temperature, allowed: scoring.score(
            model,
            params,
            rollout,
            temperature=temperature,
            allowed=allowed,
            replay_support=replay_support,
        )
    )


def first_ratio(model, params, rollout, temperature=0.7, allowed=None, replay_support=True):
    """|logp_new - logp_behavior| on the policy's tokens, and the scores."""
    run = scorer(model, replay_support)
    scores = jax.device_get(run(params, rollout, jnp.float32(temperature), allowed))
    chosen = np.asarray(rollout.mask) > 0
    return np.abs(scores.logp_new - np.asarray(rollout.logp_behavior))[chosen], scores


FIRST_RATIO = SamplingConfig(max_new_tokens=14, temperature=0.7, top_k=20, top_p=0.9)


@pytest.mark.parametrize(
    'name',
    [
        'llama_tied',
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ('mixtral', 'qwen2', 'qwen3', 'qwen3_moe')
        ),
    ],
)
def test_first_ratio_is_one(name):
    model, params = models.load(f'tests/data/hf/{name}')
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 160, n).tolist() for n in (3, 11, 6, 1, 6, 8)]
    engine = EngineConfig(slots=3, steps=5)
    rollouts = {
        'decode': sample(model, params, prompts, key(1), FIRST_RATIO),
        'engine': sample_continuous(model, params, prompts, key(1), FIRST_RATIO, engine=engine),
    }
    np.testing.assert_array_equal(*(r.tokens for r in rollouts.values()))
    logits = jax.jit(lambda p, t: model.apply(p, t).logits / 0.7)(params, rollouts['decode'].tokens)
    logits = np.asarray(logits, np.float64)
    scale = max(1.0, np.abs(logits).max())  # the bound scales with max |logit| / temperature
    for which, rollout in rollouts.items():
        assert rollout.support.shape[2] == 20
        assert (rollout.routing is not None) == (model.config.moe is not None)
        if rollout.routing is not None:
            last = np.arange(rollout.tokens.shape[1]) == np.asarray(rollout.length)[:, None] - 1
            fed = np.arange(rollout.tokens.shape[1]) < np.asarray(rollout.length)[:, None] - 1
            assert np.all(np.asarray(rollout.routing)[last] == -1)
            assert np.all(np.asarray(rollout.routing)[fed] >= 0)
        gap, _ = first_ratio(model, params, rollout)
        print(
            f'{name} {which}: median {np.median(gap):.1e}, max {gap.max():.1e}, scale {scale:.1f}'
        )
        assert np.median(gap) <= 2e-6 * scale and gap.max() <= 2e-5 * scale
    # Without the support the ratio is the kept mass.
    rollout = jax.device_get(rollouts['decode'])
    _, full = first_ratio(model, params, rollout, replay_support=False)
    chosen = rollout.mask > 0
    np.testing.assert_allclose(full.logp_new, rollout.logp_full, atol=2e-5 * scale)
    mass = np.exp(full.logp_new - rollout.logp_behavior)
    for row, t in np.argwhere(chosen):
        p = scipy.special.softmax(logits[row, t - 1])
        kept = rollout.support[row, t]
        np.testing.assert_allclose(mass[row, t], p[kept[kept >= 0]].sum(), rtol=1e-4)
    assert mass[chosen].min() < 0.9  # truncation was at work


@functools.cache
def tiny():
    config = models.ModelConfig(
        vocab_size=24, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_dim=16
    )
    model = models.build(config)
    return model, jax.jit(model.init)(key(7))


@pytest.mark.slow
@pytest.mark.parametrize('kwargs', [{}, dict(top_p=0.8), dict(allowed_ids=tuple(range(3, 15)))])
def test_first_ratio_of_padded_and_single_rows(draw, kwargs):
    # Case: same weights, rows padded by 0 or 7, alone or batched: log-ratio 0.
    model, params = tiny()
    config = SamplingConfig(max_new_tokens=10, temperature=0.7, **kwargs)
    prompts = [[5, 6, 7], [3], [9, 8, 7, 6, 5, 4, 3]]
    allowed = allowed_mask(config, 24)
    for rows in (prompts, prompts[:1]):
        rollout = draw(model, params, rows, key(2), config)
        for pad in (0, 7):
            wide = jax.tree.map(
                lambda x, pad=pad: (
                    jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) if x.ndim > 1 else x
                ),
                rollout,
            )
            gap, _ = first_ratio(model, params, wide, allowed=allowed)
            assert np.median(gap) <= 2e-6 and gap.max() <= 2e-5


def test_temperature_of_sampler_and_scorer():
    # Case: logits [2, 0], T = 2, token 0: -.3133 in both (see test_sampling_logits for the number).
    model, params = tiny()
    config = SamplingConfig(max_new_tokens=10, temperature=2.0)
    rollout = sample(model, params, [[5, 6]], key(), config)
    assert first_ratio(model, params, rollout, temperature=2.0)[0].max() <= 2e-5
    assert first_ratio(model, params, rollout, temperature=1.0)[0].max() > 1e-2
