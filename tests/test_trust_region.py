"""Natural-gradient step: against dense Fisher solves, hand-computed lines, and its guarantees."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from policyopt import trust_region
from policyopt.types import UpdateRule

STATES, ACTIONS, FEATURES, WIDTH = 6, 4, 5, 7


def _tabular(rng, dtype):
    return rng.normal(size=(STATES, ACTIONS)).astype(dtype)


def _tabular_logits(params, features):
    del features
    return params


def _nested(rng, dtype):
    return {
        'body': {
            'w': rng.normal(size=(FEATURES, WIDTH)).astype(dtype) / 2,
            'b': rng.normal(size=WIDTH).astype(dtype) / 2,
        },
        'head': {'w': rng.normal(size=(WIDTH, ACTIONS)).astype(dtype) / 2},
    }


def _nested_logits(params, features):
    hidden = jnp.tanh(_matmul(features, params['body']['w']) + params['body']['b'])
    return _matmul(hidden, params['head']['w'])


def _sequence(rng, dtype):
    return [
        (rng.normal(size=(FEATURES, 2)).astype(dtype), rng.normal(size=(2, ACTIONS)).astype(dtype)),
        rng.normal(size=ACTIONS).astype(dtype),
    ]


def _sequence_logits(params, features):
    (down, up), bias = params
    return _matmul(_matmul(features, down), up) + bias


def _matmul(a, b):
    return jnp.matmul(a, b, precision='highest')


LAYOUTS = {
    'tabular': (_tabular, _tabular_logits),
    'nested': (_nested, _nested_logits),
    'sequence': (_sequence, _sequence_logits),
}


def _case(layout, seed, dtype=np.float32):
    """Random policy parameters, state features and advantages of every action."""
    rng = np.random.default_rng(seed)
    params = LAYOUTS[layout][0](rng, dtype)
    features = rng.normal(size=(STATES, FEATURES)).astype(dtype)
    advantages = (rng.normal(size=(STATES, ACTIONS)) * 10 ** rng.uniform(-2, 2)).astype(dtype)
    return params, features, advantages


def _functions(layout, old, features, advantages):
    """Exact (enumerated) negated surrogate and mean KL(old||.) of a categorical policy."""

    def log_probs(params):
        return jax.nn.log_softmax(LAYOUTS[layout][1](params, features))

    base = log_probs(old)

    def loss(params):
        return -jnp.mean(jnp.sum(jnp.exp(log_probs(params)) * advantages, -1))

    def kl(params):
        return jnp.mean(jnp.sum(jnp.exp(base) * (base - log_probs(params)), -1))

    return loss, kl


def _update(layout, rule, params, features, advantages):
    loss, kl = _functions(layout, params, features, advantages)
    return rule.step(params, loss, kl, kl)


def _numpy_logits(layout, params, features):
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    if layout == 'tabular':
        return p
    if layout == 'nested':
        return np.tanh(features @ p['body']['w'] + p['body']['b']) @ p['head']['w']
    return features @ p[0][0] @ p[0][1] + p[1]


def _numpy_policy(layout, params, features):
    logits = _numpy_logits(layout, params, features)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def _unflat(flat, like):
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(flat, np.cumsum([x.size for x in leaves])[:-1])
    shaped = [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_kl_is_bounded_and_the_surrogate_improves_on_random_cases(layout):
    delta, cases = 0.01, [_case(layout, seed) for seed in range(100)]
    rule = trust_region.natural_gradient(delta=delta)
    stacked = jax.tree.map(lambda *x: np.stack(x), *cases)
    updated = jax.jit(jax.vmap(lambda *x: _update(layout, rule, *x)))(*stacked)
    moved, metrics = jax.tree.map(np.asarray, updated)
    for i, (params, features, advantages) in enumerate(cases):
        old = _numpy_policy(layout, params, features)
        new = _numpy_policy(layout, jax.tree.map(lambda x, i=i: x[i], moved), features)
        kl = np.mean(np.sum(old * np.log(old / new), -1))
        gain = np.mean(np.sum((new - old) * advantages, -1))
        assert 0 < kl <= delta + 1e-6
        assert kl > delta / 50  # the step is no timid one
        assert gain > 0
        np.testing.assert_allclose(metrics['trust_region/kl'].total[i], kl, atol=1e-6)
        np.testing.assert_allclose(
            metrics['trust_region/improvement'].total[i], gain, atol=1e-5 * np.abs(advantages).max()
        )
        assert metrics['trust_region/accepted'].total[i] == 1
        assert metrics['trust_region/nonfinite'].total[i] == 0
    chex.assert_tree_all_finite((moved, metrics))


def _jacobian(function, params, step=1e-5):
    """Central differences in float64, output shape x parameters: good to about 1e-9."""
    flat, columns = _flat(params), []
    for i in range(flat.size):
        shift = np.zeros(flat.size)
        shift[i] = step
        up, down = function(_unflat(flat + shift, params)), function(_unflat(flat - shift, params))
        columns.append((up - down) / (2 * step))
    return np.stack(columns, -1)


def _dense(layout, params, features, advantages):
    """Fisher matrix, the mean over states of J'(diag(p) - pp')J, and the surrogate's gradient."""
    jacobian = _jacobian(lambda p: _numpy_logits(layout, p, features), params)
    probs = _numpy_policy(layout, params, features)
    inner = np.stack([np.diag(p) - np.outer(p, p) for p in probs])
    fisher = np.einsum('sai,sab,sbj->ij', jacobian, inner, jacobian) / STATES
    return fisher, np.einsum('sai,sab,sb->i', jacobian, inner, advantages) / STATES


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize(('dtype', 'tolerance'), [(np.float64, 1e-7), (np.float32, 1e-4)])
def test_the_step_is_the_dense_fisher_solve_scaled_to_delta(layout, dtype, tolerance):
    # float64 resolves the solve to 1e-7; float32 to 1e-4 while the damped condition number is
    # below about 1e3, here by damping .01 under a largest eigenvalue near 1.
    damping, delta = 1e-2, 1e-4
    rule = trust_region.natural_gradient(
        delta=delta, cg_iterations=100, damping=damping, cg_tolerance=1e-12
    )

    def solve_and_step(params, features, advantages):
        loss, kl = _functions(layout, params, features, advantages)
        direction = trust_region.conjugate_gradient(
            lambda v: trust_region.fisher_vector_product(kl, params, v, damping),
            jax.tree.map(jnp.negative, jax.grad(loss)(params)),
            100,
            1e-12,
        )
        return direction, rule.step(params, loss, kl, kl)

    params, features, advantages = _case(layout, 3, dtype)
    with jax.enable_x64(dtype == np.float64):
        direction, (moved, metrics) = jax.jit(solve_and_step)(params, features, advantages)
        assert jax.tree.leaves(moved)[0].dtype == dtype
    fisher, slope = _dense(layout, params, features, np.asarray(advantages, np.float64))
    damped = fisher + damping * np.eye(slope.size)
    assert np.linalg.cond(damped) < 1e3
    want = np.linalg.solve(damped, slope)
    assert np.linalg.norm(_flat(direction) - want) < tolerance * np.linalg.norm(want)
    assert metrics['trust_region/cg_residual'].value < 1e-5
    # The quadratic model of the KL is delta, times .25 per backtrack.
    shrink = 0.5 ** float(metrics['trust_region/backtracks'].value)
    want = want * shrink * np.sqrt(2 * delta / (want @ fisher @ want))
    change = _flat(moved) - _flat(params)
    assert np.linalg.norm(change - want) < tolerance * np.linalg.norm(want)
    np.testing.assert_allclose(change @ fisher @ change / 2, delta * shrink**2, rtol=10 * tolerance)


def test_fisher_vector_product_is_a_row_of_the_dense_matrix():
    params, features, advantages = _case('nested', 0)
    _, kl = _functions('nested', params, features, advantages)
    fisher, _ = _dense('nested', params, features, advantages)
    product = jax.jit(lambda v: trust_region.fisher_vector_product(kl, params, v, 0.5))
    for i in (0, 17, len(fisher) - 1):
        unit = np.eye(len(fisher), dtype=np.float32)[i]
        np.testing.assert_allclose(
            _flat(product(_unflat(unit, params))), fisher[i] + 0.5 * unit, atol=2e-6
        )


def test_sample_estimate_centred_at_the_policy_has_the_empirical_fisher():
    params, features, _ = _case('nested', 1)
    taken = np.random.default_rng(0).integers(ACTIONS, size=STATES)

    def log_prob(p):
        return jax.nn.log_softmax(_nested_logits(p, features))[np.arange(STATES), taken]

    def estimate(p):
        l = log_prob(p) - jax.lax.stop_gradient(log_prob(params))
        return jnp.mean(jnp.exp(l) - 1 - l)

    def numpy_log_prob(p):
        return np.log(_numpy_policy('nested', p, features)[np.arange(STATES), taken])

    scores = _jacobian(numpy_log_prob, params)
    v = np.random.default_rng(1).normal(size=scores.shape[1]).astype(np.float32)
    product = jax.jit(lambda v: trust_region.fisher_vector_product(estimate, params, v))
    got = _flat(product(_unflat(v, params)))
    np.testing.assert_allclose(got, scores.T @ (scores @ v) / STATES, atol=1e-6)


class VariantsTest(chex.TestCase):
    """The solver and the step, jitted and not."""

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(1, 3, 12)
    def test_conjugate_gradient_solves_dense_systems(self, size):
        rng = np.random.default_rng(size)
        root = rng.normal(size=(size, size))
        matrix = (root @ root.T + size * np.eye(size)).astype(np.float32)
        right = {'a': rng.normal(size=size).astype(np.float32)}

        def solve(matrix, b):
            product = lambda v: {'a': _matmul(matrix, v['a'])}  # noqa: E731
            return trust_region.conjugate_gradient(product, b, 2 * size, 1e-7)

        got = self.variant(solve)(matrix, right)['a']
        want = np.linalg.solve(matrix.astype(np.float64), right['a'])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_step_moves_and_stays_inside(self):
        params, features, advantages = _case('tabular', 5)
        rule = trust_region.natural_gradient(delta=0.02)
        step = self.variant(lambda *x: _update('tabular', rule, *x))
        moved, metrics = step(params, features, advantages)
        chex.assert_trees_all_equal_shapes_and_dtypes(moved, params)
        assert 0 < metrics['trust_region/kl'].value <= 0.02
        assert metrics['trust_region/improvement'].value > 0
        assert metrics['trust_region/accepted'].value == 1

    @chex.variants(with_jit=True, without_jit=True)
    def test_zero_gradient_does_not_move(self):
        params, features, advantages = _case('tabular', 6)
        rule = trust_region.natural_gradient()
        step = self.variant(lambda *x: _update('tabular', rule, *x))
        moved, metrics = step(params, features, np.zeros_like(advantages))
        chex.assert_trees_all_equal(moved, params)
        chex.assert_tree_all_finite(metrics)
        assert metrics['trust_region/accepted'].value == 0
        assert metrics['trust_region/backtracks'].value == 0
        assert metrics['trust_region/nonfinite'].value == 0


def test_conjugate_gradient_by_hand():
    matrix, b = np.diag([1.0, 4.0]).astype(np.float32), np.float32([1, 1])
    got = trust_region.conjugate_gradient(lambda v: matrix @ v, jnp.asarray(b), 1, 0.0)
    np.testing.assert_allclose(got, [2 / 5, 2 / 5], rtol=1e-6)  # b'b / b'Ab = 2 / 5
    got = trust_region.conjugate_gradient(lambda v: matrix @ v, jnp.asarray(b), 2, 0.0)
    np.testing.assert_allclose(got, [1, 1 / 4], rtol=1e-5)  # exact after two products


def test_conjugate_gradient_stops_on_no_curvature_and_on_nan():
    b = jnp.ones(3)
    for matvec in (lambda v: -v, lambda v: 0 * v, lambda v: jnp.nan * v):
        got = trust_region.conjugate_gradient(matvec, b, 5, 1e-6)
        np.testing.assert_array_equal(got, np.zeros(3))


def _parabola(bound_scale, loss=lambda x: -x, **options):
    """One parameter at 0, Fisher 1, delta .5: the full step is 1; the bounded KL is scaled."""
    rule = trust_region.natural_gradient(delta=0.5, damping=0.0, **options)
    fisher = lambda x: x**2 / 2  # noqa: E731
    kl = lambda x: bound_scale * x**2 / 2  # noqa: E731
    with jax.disable_jit():  # a scalar: stepping through is quicker than compiling
        x, metrics = rule.step(jnp.zeros(()), loss, kl, fisher)
    return float(x), {k.split('/')[1]: float(v.value) for k, v in metrics.items()}


def test_line_search_by_hand():
    x, metrics = _parabola(1.0)
    assert (x, metrics['backtracks'], metrics['accepted'], metrics['kl']) == (1, 0, 1, 0.5)
    # 10 x^2 / 2 <= .5 needs x <= .316: two halvings.
    x, metrics = _parabola(10.0)
    assert (x, metrics['backtracks'], metrics['improvement']) == (0.25, 2, 0.25)
    np.testing.assert_allclose(metrics['kl'], 10 * 0.25**2 / 2)
    # The loss -x + 3 x^2 improves below x = 1/3 only: the surrogate also decides.
    x, metrics = _parabola(1.0, loss=lambda x: -x + 3 * x**2)
    assert (x, metrics['backtracks'], metrics['accepted']) == (0.25, 2, 1)
    x, metrics = _parabola(10.0, backtrack=0.3)
    np.testing.assert_allclose(x, 0.3)


def test_nothing_moves_when_no_step_is_accepted():
    x, metrics = _parabola(1e9, max_backtracks=3)
    assert (x, metrics['accepted'], metrics['backtracks'], metrics['kl']) == (0, 0, 3, 0)
    assert (metrics['improvement'], metrics['nonfinite']) == (0, 0)
    x, metrics = _parabola(10.0, max_backtracks=2)
    assert (x, metrics['accepted'], metrics['backtracks']) == (0.25, 1, 2)
    x, metrics = _parabola(10.0, max_backtracks=1)
    assert (x, metrics['accepted'], metrics['backtracks']) == (0, 0, 1)


@pytest.mark.parametrize(
    'loss',
    [
        lambda x: x * jnp.nan,
        lambda x: x + jnp.inf,
        lambda x: jnp.sqrt(x),  # value 0, slope inf
    ],
)
def test_a_start_that_is_not_finite_does_not_move(loss):
    x, metrics = _parabola(1.0, loss=loss)
    assert x == 0
    assert (metrics['accepted'], metrics['nonfinite']) == (0, 1)
    assert np.isfinite(list(metrics.values())).all()


def test_candidates_that_are_not_finite_are_stepped_back_from():
    x, metrics = _parabola(1.0, loss=lambda x: jnp.where(x > 0.3, jnp.nan, -x))
    assert (x, metrics['accepted'], metrics['backtracks']) == (0.25, 1, 2)
    x, metrics = _parabola(1.0, loss=lambda x: jnp.where(x > 0.3, -jnp.inf, -x))
    assert (x, metrics['accepted'], metrics['nonfinite']) == (0.25, 1, 0)


def test_budget_already_spent_does_not_move():
    rule = trust_region.natural_gradient(delta=0.5, damping=0.0)
    x, metrics = rule.step(jnp.zeros(()), lambda x: -x, lambda x: 0.6 + x**2, lambda x: x**2 / 2)
    assert (float(x), metrics['trust_region/accepted'].value) == (0, 0)
    np.testing.assert_allclose(metrics['trust_region/kl'].value, 0.6, rtol=1e-6)


def test_other_dtypes_keep_theirs_and_inner_products_are_float32():
    params = {'w': jnp.ones(3000, jnp.bfloat16), 'steps': jnp.asarray(7), 'none': None}
    target = jnp.linspace(1, 2, 3000)

    def loss(p):
        return jnp.sum(p['w'].astype(jnp.float32) * target)

    def kl(p):
        return jnp.sum((p['w'].astype(jnp.float32) - 1) ** 2) / 2

    rule = trust_region.natural_gradient(delta=4.0, damping=0.0)
    moved, metrics = jax.jit(lambda p: rule.step(p, loss, kl, kl))(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, params)
    assert moved['steps'] == 7
    # The whole step -target sqrt(8 / |target|^2), rounded to bfloat16: judged after rounding.
    length = np.sqrt(8 / np.sum(np.asarray(target, np.float64) ** 2))
    scale = length * 0.5 ** float(metrics['trust_region/backtracks'].value)
    want = jnp.asarray(1 - np.asarray(target, np.float64) * scale, jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(moved['w'], np.float32), np.asarray(want, np.float32), atol=2**-8
    )
    np.testing.assert_allclose(metrics['trust_region/kl'].value, kl(moved), rtol=1e-6)
    assert metrics['trust_region/kl'].value <= 4.0


def test_one_trace_per_shape():
    rule = trust_region.natural_gradient()
    traced = chex.assert_max_traces(lambda *x: _update('tabular', rule, *x), n=1)
    step = jax.jit(traced)
    for seed in range(3):
        step(*_case('tabular', seed))
    with pytest.raises(AssertionError):
        step(*_case('tabular', 0, np.float16))


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('delta', 0.0),
        ('cg_iterations', 0),
        ('damping', -1.0),
        ('backtrack', 1.0),
        ('max_backtracks', -1),
        ('cg_tolerance', -1e-3),
    ],
)
def test_arguments_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f'{name}={value}.*legal is'):
        trust_region.natural_gradient(**{name: value})


def test_params_without_floats_and_losses_that_are_not_scalars():
    rule = trust_region.natural_gradient()
    with pytest.raises(ValueError, match='no floating array'):
        rule.step({'a': jnp.arange(3)}, jnp.sum, jnp.sum, jnp.sum)
    with pytest.raises(AssertionError):
        rule.step(jnp.ones(3), lambda x: x, jnp.sum, jnp.sum)


def test_gradient_leaves_the_step_to_the_optimizer():
    assert trust_region.gradient() == UpdateRule(step=None)
