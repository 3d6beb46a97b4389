"""Masks, truncation and draws, against numpy and exact distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from policyopt.sampling import logits as lib

DRAWS = 200_000
draw = jax.jit(lib.draw, static_argnames='size')


def params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    full = lambda x, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), (rows,))  # noqa: E731
    return lib.Params(
        temperature=full(temperature, jnp.float32),
        top_k=full(top_k, jnp.int32),
        top_p=full(top_p, jnp.float32),
        min_p=full(min_p, jnp.float32),
    )


def brute_force(logits, temperature, top_k, top_p, min_p, size):
    """Kept ids of one row, the most probable first, by the documented order."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if logits[i] > -np.inf][:size]
    if temperature == 0:
        return order[:1]
    order = order[: top_k or None]
    p = np.exp([float(logits[i] - logits[order[0]]) / temperature for i in order])
    p = p / p.sum()
    kept, mass = [], 0.0
    for i, share in zip(order, p, strict=True):
        if mass >= top_p:
            break
        kept.append(i)
        mass += share
    return [i for i, share in zip(kept, p, strict=False) if share >= min_p * p[0]]


def test_support_equals_a_brute_force_nucleus_with_ties():
    rng = np.random.default_rng(0)
    rows, width, size = 400, 40, 24
    logits = np.round(rng.normal(0, 2, (rows, width)) * 2) / 2  # many ties
    logits[rng.random((rows, width)) < 0.1] = -np.inf
    settings = dict(
        temperature=rng.choice([0.0, 0.5, 0.7, 1.3], rows),
        top_k=rng.choice([0, 1, 5, 24], rows),
        top_p=rng.uniform(0.05, 1, rows) ** 0.5,
        min_p=rng.choice([0, 0.03, 0.11], rows),
    )
    settings['top_p'][::5] = 1
    drawn = draw(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(rng.random(rows), jnp.float32),
        params(rows, **settings),
        size=size,
    )
    for row in range(rows):
        one = {name: value[row] for name, value in settings.items()}
        expected = brute_force(logits[row], **one, size=size)
        got = np.asarray(drawn.support[row])
        assert got[: len(expected)].tolist() == expected
        assert np.all(got[len(expected) :] == -1)
        assert int(drawn.token[row]) in expected
        heat = one['temperature'] or 1
        kept = scipy.special.log_softmax(logits[row, expected] / heat)
        full = scipy.special.log_softmax(logits[row] / heat)
        at = expected.index(int(drawn.token[row]))
        np.testing.assert_allclose(drawn.logp[row], kept[at], atol=2e-6)
        np.testing.assert_allclose(drawn.logp_full[row], full[expected[at]], atol=3e-6)
    assert not np.any(drawn.fault)


def test_the_most_probable_of_a_large_vocabulary_with_ties():
    rng = np.random.default_rng(4)
    logits = np.round(rng.normal(0, 1, (50, 3005)) * 3) / 3 + 0.0  # no -0
    logits[0] = -np.inf
    logits[1, 5:] = -np.inf
    kept = jax.jit(lib.most_probable, static_argnums=1)(jnp.asarray(logits, jnp.float32), 16)
    for row in range(50):
        order = sorted(range(3005), key=lambda i: (-logits[row, i], i))[:16]
        expected = [i if logits[row, i] > -np.inf else -1 for i in order]
        assert kept.ids[row].tolist() == expected


def test_ties_at_the_last_place_of_the_most_probable():
    # 100 equal logits for 64 places, strewn over a vocabulary that is searched in groups.
    rng = np.random.default_rng(6)
    logits = rng.normal(-9, 1, (3, 33_000)).astype(np.float32)
    for row in logits:
        row[rng.choice(33_000, 100, replace=False)] = 1.0
        row[rng.choice(33_000, 5, replace=False)] = 2.0
    kept = jax.jit(lib.most_probable, static_argnums=1)(jnp.asarray(logits), 64)
    order = np.argsort(-logits, axis=1, kind='stable')[:, :64]
    np.testing.assert_array_equal(kept.ids, order)
    np.testing.assert_array_equal(kept.logits, np.take_along_axis(logits, order, axis=1))


def test_what_top_p_drops_is_a_suffix():
    rng = np.random.default_rng(7)
    logits = jnp.asarray(-np.sort(rng.gamma(1, 1e-3, (200, 1024)), axis=1), jnp.float32)
    kept = lib.Kept(jnp.broadcast_to(jnp.arange(1024), (200, 1024)), logits)
    ids = np.asarray(jax.jit(lib.keep_top_p)(kept, jnp.asarray(rng.random(200), jnp.float32)).ids)
    count = (ids >= 0).sum(axis=1)
    np.testing.assert_array_equal(ids >= 0, np.arange(1024) < count[:, None])
    assert len(set(count)) > 100


def test_settings_that_keep_all_are_no_ops():
    rng = np.random.default_rng(8)
    logits = jnp.asarray(np.round(rng.normal(0, 2, (50, 20))), jnp.float32)
    uniform = jnp.asarray(rng.random(50), jnp.float32)
    plain = draw(logits, uniform, params(50), size=20)
    for settings in (dict(top_p=1.0, min_p=0.0), dict(top_k=20), dict(top_k=20, top_p=1.0)):
        jax.tree.map(
            np.testing.assert_array_equal,
            plain,
            draw(logits, uniform, params(50, **settings), size=20),
        )
    np.testing.assert_array_equal(np.sort(plain.support, axis=1), [np.arange(20)] * 50)
    np.testing.assert_allclose(plain.logp, plain.logp_full, atol=1e-6)


@pytest.mark.parametrize('temperature', [1e-6, 100.0])
def test_extreme_temperatures(temperature):
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 5, (40, 300)).astype(np.float32)
    uniform = jnp.asarray(rng.random(40), jnp.float32)
    exact = scipy.special.log_softmax(logits.astype(np.float64) / temperature, axis=1)
    for size in (None, 8):
        got = jax.device_get(
            draw(jnp.asarray(logits), uniform, params(40, temperature=temperature), size=size)
        )
        assert not got.fault.any()
        taken = exact[np.arange(40), got.token]
        np.testing.assert_allclose(got.logp_full, taken, atol=2e-6)
        if temperature < 1:
            np.testing.assert_array_equal(got.token, logits.argmax(axis=1))
            assert np.all(got.logp == 0)
        else:
            assert np.mean(got.token == logits.argmax(axis=1)) < 0.5


@pytest.mark.parametrize('size', [None, 4])
def test_all_mass_on_one_token(size):
    at = np.array([0, 1, 127, 128, 511, 699])
    logits = np.full((6, 700), -np.inf, np.float32)
    logits[np.arange(6), at] = 3.0
    for u in (0.0, 2**-24, 0.5, 1 - 2**-24):
        got = draw(jnp.asarray(logits), jnp.full(6, u, jnp.float32), params(6), size=size)
        np.testing.assert_array_equal(got.token, at)
        assert not np.any(got.logp) and not np.any(got.logp_full) and not np.any(got.fault)


def test_uniforms_are_middles_of_equal_intervals():
    keys = jax.random.split(jax.random.key(5), 20_000)
    found = np.asarray(jax.jit(lib.uniforms)(keys), np.float64)
    bits = np.asarray(jax.vmap(lambda k: jax.random.bits(k, dtype=jnp.uint32))(keys))
    np.testing.assert_array_equal(found, ((bits >> 9) + 0.5) / 2**23)
    # The smallest of them does not reach an improbable token at the start.
    logits = jnp.zeros((1, 300)).at[0, :3].set(-80.0)
    assert int(draw(logits, jnp.full(1, 2**-24, jnp.float32), params(1)).token[0]) == 3
    assert int(draw(logits, jnp.full(1, 1 - 2**-24, jnp.float32), params(1)).token[0]) == 299


def test_ties_go_to_the_lower_id_everywhere():
    logits = jnp.zeros((1, 6)).at[0, 1].set(-1.0)
    for settings, expected in (
        (dict(top_k=3), [0, 2, 3]),
        (dict(top_p=0.35), [0, 2]),
        (dict(temperature=0.0), [0]),
        (dict(min_p=1.0), [0, 2, 3, 4, 5]),
    ):
        support = draw(logits, jnp.zeros(1), params(1, **settings), size=6).support[0]
        assert [i for i in support.tolist() if i >= 0] == expected
    greedy = draw(logits, jnp.full(1, 0.99), params(1, temperature=0.0))
    assert int(greedy.token[0]) == 0 and float(greedy.logp[0]) == 0


WIDE = np.random.default_rng(3).normal(0, 1.5, 160)  # more than one block
NARROW = np.array([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, -1.0, 0.9])
LOW = np.arange(8) < 5


@pytest.mark.parametrize(
    ('logits', 'settings', 'options', 'keep'),
    [
        (WIDE, {}, {}, None),
        (WIDE, dict(temperature=1.7), {}, None),
        (WIDE, {}, dict(allowed=np.arange(160) % 3 == 0), np.arange(160) % 3 == 0),
        (NARROW, dict(top_k=3), dict(size=8), [0, 1, 2]),
        (NARROW, dict(temperature=0.7, top_p=0.9), dict(size=8), [0, 1, 2, 7]),
        (NARROW, dict(min_p=0.2), dict(size=8), [0, 1, 2, 7]),
        (NARROW, {}, dict(size=4), [0, 1, 2, 7]),
        (NARROW, {}, dict(size=8, masks=(LOW,)), LOW),
        (NARROW, dict(top_k=5, top_p=0.95), dict(size=8, allowed=LOW), [0, 1, 2, 3]),
    ],
    ids='full heat allowed top_k top_p min_p most_probable row_mask all'.split(),
)
def test_200k_draws_follow_the_exact_distribution(logits, settings, options, keep):
    heat = settings.get('temperature', 1.0)
    weight = np.exp(logits / heat)
    if keep is not None:
        only = np.zeros(len(logits), bool)
        only[np.asarray(keep)] = True
        weight = np.where(only, weight, 0)
    expected = weight / weight.sum()
    masks = tuple(np.tile(m, (DRAWS, 1)) for m in options.get('masks', ()))
    rows = np.tile(np.float32(logits), (DRAWS, 1))
    uniform = jax.random.uniform(jax.random.key(11), (DRAWS,))
    drawn = draw(rows, uniform, params(DRAWS, **settings), **(options | dict(masks=masks)))
    counts = np.bincount(np.asarray(drawn.token), minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    assert scipy.stats.chisquare(counts[inside], DRAWS * expected[inside]).pvalue > 1e-4
    np.testing.assert_allclose(drawn.logp, np.log(expected[np.asarray(drawn.token)]), atol=2e-6)


def test_two_levels_draw_what_one_does():
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (64, 1000)).astype(np.float32)
    uniform = rng.random(64).astype(np.float32)
    got = draw(jnp.asarray(logits), jnp.asarray(uniform), params(64)).token
    p = scipy.special.softmax(logits.astype(np.float64), axis=1)
    edges = np.cumsum(p, axis=1)
    for row in range(64):
        token = int(got[row])
        low = edges[row, token] - p[row, token]
        assert low - 1e-6 <= uniform[row] <= edges[row, token] + 1e-6


def test_a_token_of_no_mass_is_never_drawn():
    weight = np.zeros((200, 700), np.float32)
    rng = np.random.default_rng(1)
    for row in range(200):
        weight[row, rng.choice(700, 3, replace=False)] = rng.random(3) ** 8 + 1e-30
    logits = jnp.log(jnp.asarray(weight))
    for u in (0.0, 0.5, 1 - 2**-24):
        uniform = jnp.full(200, u, jnp.float32)
        index = np.asarray(lib.inverse_cdf(jnp.asarray(weight), uniform))
        assert np.all(weight[np.arange(200), index] > 0)
        token = np.asarray(draw(logits, uniform, params(200)).token)
        assert np.all(weight[np.arange(200), token] > 0)


def test_faults_name_their_row_and_leave_the_others():
    logits = np.random.default_rng(2).normal(size=(5, 9)).astype(np.float32)
    uniform = jnp.linspace(0.1, 0.9, 5)
    spoiled = logits.copy()
    spoiled[1, 4] = np.nan
    spoiled[2] = -np.inf
    spoiled[3, 0] = np.inf
    for options in ({}, dict(size=4)):
        clean = draw(jnp.asarray(logits), uniform, params(5), **options)
        got = draw(jnp.asarray(spoiled), uniform, params(5), **options)
        assert got.fault.tolist() == [0, lib.NOT_FINITE, lib.NONE_ALLOWED, lib.NOT_FINITE, 0]
        for row in (0, 4):
            assert jax.tree.all(
                jax.tree.map(lambda a, b, r=row: bool(np.all(a[r] == b[r])), clean, got)
            )
    # A NaN with its sign bit set sorts last, not first, and is one all the same.
    wide = np.zeros((2, 600), np.float32)
    wide[1, 300] = -np.float32(np.nan)
    assert np.signbit(wide[1, 300])
    for options in ({}, dict(size=4)):
        got = draw(jnp.asarray(wide), uniform[:2], params(2), **options)
        assert got.fault.tolist() == [0, lib.NOT_FINITE]
    mask = jnp.ones((5, 9), bool).at[2].set(False)
    got = draw(jnp.asarray(logits), uniform, params(5), size=4, masks=(mask,))
    assert got.fault.tolist() == [0, 0, lib.NONE_ALLOWED, 0, 0]


def test_masks_over_the_vocabulary_compose():
    logits = jnp.arange(12.0).reshape(2, 6)
    allowed = jnp.array([True, True, True, True, False, True])
    got = lib.ban(lib.allow(logits, allowed), jnp.array([5, -1]))
    np.testing.assert_array_equal(got[0], [0, 1, 2, 3, -np.inf, -np.inf])
    got = lib.ban(logits, jnp.array([[0, 1], [5, -1]]))
    assert np.isinf(got).tolist() == [[True, True] + [False] * 4, [False] * 5 + [True]]
    forced = lib.force(lib.ban(logits, jnp.array([3])), 3, jnp.array([True, False]))
    np.testing.assert_array_equal(jax.nn.softmax(forced[0]), [0, 0, 0, 1, 0, 0])
    assert forced[1, 3] == -np.inf and forced[1, 0] == 6
    with pytest.raises(ValueError, match='set size'):
        lib.draw(logits, jnp.zeros(2), params(2), masks=(jnp.ones((2, 6), bool),))


def test_truncation_case():
    # p = [.5,.3,.2], top_p .7: kept {0,1}, the log-prob is that of the renormalised distribution.
    logits = jnp.log(jnp.float32([[0.5, 0.3, 0.2]] * 2))
    got = draw(logits, jnp.float32([0.1, 0.9]), params(2, top_p=0.7), size=3)
    assert got.token.tolist() == [0, 1] and got.support.tolist() == [[0, 1, -1]] * 2
    np.testing.assert_allclose(np.exp(got.logp), [0.625, 0.375], rtol=1e-6)
    np.testing.assert_allclose(np.exp(got.logp_full - got.logp), 0.8, rtol=1e-6)  # the kept mass


def test_temperature_case():
    got = draw(jnp.float32([[2, 0]]), jnp.zeros(1), params(1, temperature=2.0))
    np.testing.assert_allclose(got.logp, -0.3133, atol=1e-4)
    np.testing.assert_allclose(got.logp_full, -0.3133, atol=1e-4)


def test_other_values_trace_nothing():
    traces = []

    @jax.jit
    def run(logits, uniform, p):
        traces.append(1)
        return lib.draw(logits, uniform, p, size=4).token

    logits = jnp.zeros((3, 8))
    for settings in (dict(), dict(temperature=0.0), dict(top_p=0.5), dict(top_k=2, min_p=0.1)):
        run(logits, jnp.zeros(3), params(3, **settings))
    assert len(traces) == 1
