"""Chunked log-softmax kernels against float64 computations that materialise everything."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt import scoring
from policyopt.scoring_loops import Rows, _used

N, D, V, K = 29, 12, 101, 7


def problem(seed: int = 0, n: int = N, d: int = D, v: int = V, k: int = K):
    """hidden, head, tokens, support (taken token anywhere in it, odd rows padded), heat [N]."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((n, d)).astype(np.float32)
    head = rng.standard_normal((v, d)).astype(np.float32)
    tokens = rng.integers(0, v, n).astype(np.int32)
    support = np.full((n, k), -1, np.int32)
    for i, token in enumerate(tokens):
        size = k - 2 * (i % 2)
        others = rng.permutation(np.delete(np.arange(v), token))[: size - 1]
        ids = rng.permutation(np.append(others, token))
        support[i, rng.permutation(k)[:size]] = ids
    heat = rng.uniform(0.5, 1.5, n).astype(np.float32)
    return hidden, head, tokens, support, heat


def dense(hidden, head, tokens, keep, heat):
    """(logp, entropy) by a log-softmax over all of V, excluded ids at -inf; keep [N,V] bool."""
    logits = jnp.where(keep, hidden @ head.T / heat[:, None], -jnp.inf)
    logp = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.where(keep, jnp.exp(logp) * jnp.where(keep, logp, 0), 0), axis=1)
    return logp[jnp.arange(len(tokens)), tokens], entropy


def kept(support, v: int = V):
    keep = np.zeros((len(support), v), bool)
    for row, ids in zip(keep, support, strict=True):
        row[ids[ids >= 0]] = True
    return keep


def mix(result):
    """A scalar that weighs every output differently."""
    logp, entropy = result
    weight = jnp.cos(jnp.arange(len(logp)) + 1.0)
    return jnp.sum(weight * logp) + jnp.sum((2 + weight) * entropy)


def values_and_gradients(f, hidden, head):
    """Results, and gradients of `mix` with respect to hidden and head."""

    def loss(hidden, head):
        result = f(hidden, head)
        return mix(result), result

    gradient, result = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(hidden, head)
    return (*result, *gradient)


def in_float64(hidden, head, tokens, keep, heat):
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (hidden, head, heat)]
        out = values_and_gradients(
            lambda h, w: dense(h, w, tokens, keep, wide[2]), wide[0], wide[1]
        )
        return [np.asarray(x) for x in out]


def assert_close(got, want, rtol=1e-5):
    """Largest deviation within rtol of the largest entry."""
    for x, y in zip(got, want, strict=True):
        scale = np.max(np.abs(y))
        assert np.max(np.abs(np.asarray(x, np.float64) - y)) <= rtol * scale


@pytest.mark.parametrize(
    'chunk, block, v', [(8, None, V), (None, None, V), (8, 16, V), (None, V - 1, V), (8, 16, 96)]
)
def test_full_equals_float64(chunk, block, v):
    hidden, head, tokens, _, heat = problem(v=v)
    tokens[:3] = 0, v - 1, v - 6  # both ends, and an id that two blocks of 16 hold where V is 101
    got = values_and_gradients(
        lambda h, w: scoring.token_logp_entropy(
            h, w, tokens, temperature=heat, chunk=chunk, block=block
        ),
        hidden,
        head,
    )
    assert_close(got, in_float64(hidden, head, tokens, np.ones((N, v), bool), heat))


@pytest.mark.parametrize('chunk', [8, None])
def test_support_equals_float64(chunk):
    hidden, head, tokens, support, heat = problem()
    assert (support == -1).any()
    got = values_and_gradients(
        lambda h, w: scoring.support_logp_entropy(
            h, w, tokens, support, temperature=heat, chunk=chunk
        ),
        hidden,
        head,
    )
    assert_close(got, in_float64(hidden, head, tokens, kept(support), heat))


@pytest.mark.parametrize('block, v', [(None, V), (16, V), (16, 96)])
def test_allowed_tokens_only(block, v):
    hidden, head, tokens, _, heat = problem(1, v=v)
    tokens = np.where(tokens < 16, tokens + 16, tokens)
    allowed = np.random.default_rng(0).random(v) < 0.5
    allowed[tokens] = True
    allowed[:16] = False  # a whole block of 16
    got = values_and_gradients(
        lambda h, w: scoring.token_logp_entropy(
            h, w, tokens, temperature=heat, allowed=allowed, block=block
        ),
        hidden,
        head,
    )
    keep = np.broadcast_to(allowed, (N, v))
    assert_close(got, in_float64(hidden, head, tokens, keep, heat))
    assert np.all(np.asarray(got[3])[~allowed] == 0)
    tokens[3] = np.flatnonzero(~allowed)[0]
    logp, entropy = scoring.token_logp_entropy(hidden, head, tokens, allowed=allowed, block=block)
    assert np.flatnonzero(np.isnan(logp)).tolist() == [3] and np.all(np.isfinite(entropy))


def test_finite_differences_in_float64():
    hidden, head, tokens, support, heat = problem(2, n=5, d=3, v=11, k=4)
    with jax.enable_x64(True):
        h, w, heat = (jnp.asarray(x, jnp.float64) for x in (hidden, head, heat))
        scored = dict(temperature=heat, chunk=2)

        def f(h, w):
            full = scoring.token_logp_entropy(h, w, tokens, **scored)
            replayed = scoring.support_logp_entropy(h, w, tokens, support, **scored)
            assert full[0].dtype == replayed[1].dtype == jnp.float64
            return mix(full) + 0.7 * mix(replayed)

        jax.test_util.check_grads(jax.jit(f), (h, w), 1, modes='rev', rtol=1e-6)


def test_support_of_one_token_is_certain():
    hidden, head, tokens, _, _ = problem()
    for pads in (0, 3):
        support = np.concatenate([np.full((N, pads), -1), tokens[:, None]], axis=1)
        logp, entropy, d_hidden, d_head = values_and_gradients(
            lambda h, w, s=support: scoring.support_logp_entropy(h, w, tokens, s, temperature=0.3),
            hidden,
            head,
        )
        for x in (logp, entropy, d_hidden, d_head):
            assert np.all(np.asarray(x) == 0)


def test_support_with_all_ids_is_the_full_computation():
    hidden, head, tokens, _, heat = problem()
    rng = np.random.default_rng(0)
    support = np.stack([rng.permutation(V) for _ in range(N)])
    got = values_and_gradients(
        lambda h, w: scoring.support_logp_entropy(h, w, tokens, support, temperature=heat),
        hidden,
        head,
    )
    assert_close(got, in_float64(hidden, head, tokens, np.ones((N, V), bool), heat))


def test_without_support_the_ratio_is_the_kept_mass():
    hidden, head, tokens, support, heat = problem(3)
    full, _ = scoring.token_logp_entropy(hidden, head, tokens, temperature=heat)
    truncated, _ = scoring.support_logp_entropy(hidden, head, tokens, support, temperature=heat)
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64) / heat[:, None]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    mass = np.sum(p * kept(support), axis=1)
    np.testing.assert_allclose(np.exp(np.asarray(full - truncated, np.float64)), mass, rtol=1e-5)


def test_truncation_case():
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    head = np.eye(3, dtype=np.float32)
    support = np.array([[0, 1, -1]])
    token = np.array([0])
    kept_only, entropy = scoring.support_logp_entropy(logits, head, token, support)
    full, _ = scoring.token_logp_entropy(logits, head, token)
    np.testing.assert_allclose(kept_only, np.log(0.5 / 0.8), rtol=1e-6)
    np.testing.assert_allclose(np.exp(full - kept_only), 0.8, rtol=1e-6)
    p = np.array([0.625, 0.375])
    np.testing.assert_allclose(entropy, -np.sum(p * np.log(p)), rtol=1e-6)


def test_hessian_vector_products():
    hidden, head, tokens, support, heat = problem(4)
    along = np.random.default_rng(1).standard_normal(head.shape).astype(np.float32)

    def product(f, head, along):
        return jax.jvp(jax.grad(lambda w: mix(f(hidden.astype(w.dtype), w))), (head,), (along,))[1]

    full = functools.partial(scoring.token_logp_entropy, tokens=tokens, chunk=8)
    for f, keep in (
        (full, np.ones((N, V))),
        (functools.partial(full, block=16), np.ones((N, V))),
        (
            functools.partial(
                scoring.support_logp_entropy, tokens=tokens, support=support, chunk=8
            ),
            kept(support),
        ),
    ):
        scored = functools.partial(f, temperature=heat)
        got = jax.jit(functools.partial(product, scored))(head, along)
        with jax.enable_x64(True):
            want = jax.jit(
                functools.partial(
                    product, lambda h, w, keep=keep: dense(h, w, tokens, keep != 0, heat)
                )
            )(jnp.asarray(head, jnp.float64), jnp.asarray(along, jnp.float64))
        assert_close([got], [np.asarray(want)])


def test_bfloat16_states_give_float32_sums():
    hidden, head, tokens, support, _ = problem(5)
    heat = np.ones(N, np.float32)
    states = jnp.asarray(hidden, jnp.bfloat16)
    rounded = np.asarray(jnp.asarray(head, jnp.bfloat16), np.float64)
    for keep, f in (
        (np.ones((N, V), bool), lambda h, w: scoring.token_logp_entropy(h, w, tokens)),
        (np.ones((N, V), bool), lambda h, w: scoring.token_logp_entropy(h, w, tokens, block=16)),
        (kept(support), lambda h, w: scoring.support_logp_entropy(h, w, tokens, support)),
    ):
        got = values_and_gradients(f, states, head)
        assert [x.dtype for x in got] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32]
        want = in_float64(np.asarray(states, np.float64), rounded, tokens, keep, heat)
        assert_close(got[:2], want[:2])
        assert_close(got[2:], want[2:], rtol=1e-2)


def test_inactive_tokens_cannot_matter():
    hidden, head, tokens, support, heat = problem(6)
    active = np.random.default_rng(2).random(N) < 0.5
    active[-9:] = False
    bad_hidden = np.where(active[:, None], hidden, np.nan)
    bad_tokens = np.where(active, tokens, V + 5)
    bad_support = np.where(active[:, None], support, -1)
    bad_heat = np.where(active, heat, np.nan)
    weight = np.where(active, 1.0, np.nan)  # a cotangent that is NaN off the active tokens
    full = functools.partial(scoring.token_logp_entropy, tokens=bad_tokens, active=active, chunk=4)

    def heated(f):
        return lambda h, w: f(h, w, temperature=jnp.asarray(bad_heat))

    for keep, f in (
        (np.ones((active.sum(), V), bool), heated(full)),
        (np.ones((active.sum(), V), bool), heated(functools.partial(full, block=16))),
        (
            kept(support[active]),
            lambda h, w: scoring.support_logp_entropy(
                h,
                w,
                bad_tokens,
                bad_support,
                temperature=jnp.asarray(bad_heat),
                active=active,
                chunk=4,
            ),
        ),
    ):
        # A traced temperature: the check of known values would refuse the NaN.
        logp, entropy = jax.jit(f)(bad_hidden, head)
        assert np.all(np.asarray(logp)[~active] == 0) and np.all(np.asarray(entropy)[~active] == 0)
        grads = jax.jit(
            jax.grad(lambda h, w, f=f: jnp.sum(weight * f(h, w)[0]) + jnp.sum(f(h, w)[1]), (0, 1))
        )(bad_hidden, head)
        assert np.all(np.asarray(grads[0])[~active] == 0)
        with jax.enable_x64(True):
            want = jax.jit(
                jax.grad(
                    lambda h, w, keep=keep: sum(
                        jnp.sum(x) for x in dense(h, w, tokens[active], keep, heat[active])
                    ),
                    (0, 1),
                )
            )(jnp.asarray(hidden[active], jnp.float64), jnp.asarray(head, jnp.float64))
        assert_close([grads[0][active], grads[1]], [np.asarray(x) for x in want])


def test_work_follows_the_active_tokens():
    active = np.zeros((6, 4), bool)
    rows = Rows(np.zeros((6, 4, 2)), np.zeros((6, 4)), np.ones((6, 4)), active)
    for last in range(-1, 6):
        active[:] = False
        if last >= 0:
            active[last, 2] = True
        assert int(_used(rows)) == last + 1


def test_impossible_tokens_give_nan_and_leave_the_others_alone():
    hidden, head, tokens, support, _ = problem(7)
    want, _ = scoring.support_logp_entropy(hidden, head, tokens, support)
    whole, _ = scoring.token_logp_entropy(hidden, head, tokens)
    for broken, row in ((-1, 2), (V + 3, 5), (V + 50, 6)):
        taken = tokens.copy()
        taken[row] = broken
        for block in (None, 16):
            logp, _ = scoring.token_logp_entropy(hidden, head, taken, block=block)
            assert np.flatnonzero(np.isnan(logp)).tolist() == [row]
            others = np.delete(np.arange(N), row)
            np.testing.assert_allclose(logp[others], whole[others], rtol=1e-6)
        logp, _ = scoring.support_logp_entropy(hidden, head, taken, support)
        assert np.flatnonzero(np.isnan(logp)).tolist() == [row]
    outside = support.copy()
    outside[4] = np.where(outside[4] == tokens[4], -1, outside[4])  # the taken token is missing
    outside[6, 0] = V  # an id that no head row stands for
    outside[8] = -1  # nothing recorded
    logp, _ = scoring.support_logp_entropy(hidden, head, tokens, outside)
    assert np.flatnonzero(np.isnan(logp)).tolist() == [4, 6, 8]
    good = np.delete(np.arange(N), [4, 6, 8])
    np.testing.assert_array_equal(np.asarray(logp)[good], np.asarray(want)[good])


def test_temperature():
    logits, head, token = np.array([[2.0, 0.0]], np.float32), np.eye(2, dtype=np.float32), [0]
    logp, _ = scoring.token_logp_entropy(logits, head, np.array(token), temperature=2.0)
    np.testing.assert_allclose(logp, -0.3133, atol=5e-5)
    replayed, _ = scoring.support_logp_entropy(
        logits, head, np.array(token), np.array([[1, 0]]), temperature=2.0
    )
    np.testing.assert_allclose(replayed, -0.3133, atol=5e-5)
    traces = []

    @jax.jit
    def f(temperature):
        traces.append(1)
        return scoring.token_logp_entropy(logits, head, np.array(token), temperature=temperature)

    for heat in (0.5, 1.0, 3.0):
        want = -np.log1p(np.exp(-2.0 / heat))
        np.testing.assert_allclose(f(jnp.asarray(heat))[0], want, rtol=1e-5)
    assert len(traces) == 1
    for heat in (0.0, -1.0):
        assert np.isnan(f(jnp.asarray(heat))[0])
    for heat in (0.0, -1.0, np.nan, np.inf, np.array([0.0])):
        with pytest.raises(ValueError, match='temperature=.*greedy'):
            scoring.token_logp_entropy(logits, head, np.array(token), temperature=heat)
    slope = jax.grad(
        lambda t: scoring.token_logp_entropy(logits, head, np.array(token), temperature=t)[0][0]
    )(1.0)
    assert slope == 0


def test_arguments_are_checked():
    hidden, head, tokens, support, _ = problem()
    for chunk in (0, -3):
        with pytest.raises(ValueError, match=f'chunk={chunk}'):
            scoring.token_logp_entropy(hidden, head, tokens, chunk=chunk)
        with pytest.raises(ValueError, match=f'block={chunk}'):
            scoring.token_logp_entropy(hidden, head, tokens, block=chunk)
    with pytest.raises(AssertionError):
        scoring.token_logp_entropy(hidden, head[:, :-1], tokens)
    with pytest.raises(AssertionError):
        scoring.token_logp_entropy(hidden, head, tokens[:-1])
    with pytest.raises(AssertionError):
        scoring.support_logp_entropy(hidden, head, tokens, support[:-1])
    with pytest.raises(AssertionError):
        scoring.token_logp_entropy(hidden, head, tokens, allowed=np.ones(V - 1, bool))


def test_no_entropy_on_request():
    hidden, head, tokens, support, _ = problem()
    for block in (None, 16):
        full = functools.partial(scoring.token_logp_entropy, hidden, head, tokens, block=block)
        assert full(entropy=False)[1] is None
        np.testing.assert_array_equal(full(entropy=False)[0], full()[0])
    logp, none = scoring.support_logp_entropy(hidden, head, tokens, support, entropy=False)
    assert none is None
    want, _ = scoring.support_logp_entropy(hidden, head, tokens, support)
    np.testing.assert_array_equal(logp, want)


def test_support_scoring_has_no_matmul_over_the_vocabulary():
    v = 1009
    hidden, head, tokens, support, _ = problem(v=v)

    def matmuls(f):
        """Of value and gradient, the matmuls with a dimension of V."""
        lowered = jax.jit(jax.value_and_grad(lambda h, w: mix(f(h, w)), (0, 1)))
        lines = lowered.lower(hidden, head).as_text().splitlines()
        return [x for x in lines if 'dot_general' in x and re.search(rf'\b{v}x|x{v}x', x)]

    assert len(matmuls(lambda h, w: scoring.token_logp_entropy(h, w, tokens))) == 4
    assert not matmuls(lambda h, w: scoring.support_logp_entropy(h, w, tokens, support))
