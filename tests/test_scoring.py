"""Scoring of batches: the real models and stand-ins, against logits at every position."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt import models, scoring, scoring_kernels, sharding
from policyopt.models.router import MoEConfig
from policyopt.types import Rollout

B, T, V = 4, 9, 24


@functools.cache
def model_and_params(moe: bool = False):
    kwargs = dict(moe=MoEConfig(experts=4, top_k=2), expert_dim=8) if moe else dict(mlp_dim=16)
    config = models.ModelConfig(
        vocab_size=V,
        embed_dim=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        tied=False,
        value_head=True,
        **kwargs,
    )
    model = models.build(config)
    return model, random_params(model, 0)


def random_params(model, seed: int):
    """Parameters drawn by numpy, the value head and the norms included."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(x.dtype), shapes)


def rows(seed: int = 0, height: int = B, width: int = T, k: int | None = None) -> Rollout:
    """Prompts, answers with gaps, padding; the last row is full, and its first token is masked."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (height, width)).astype(np.int32)
    length = rng.integers(3, width + 1, height).astype(np.int32)
    length[-1] = width
    at = np.arange(width)
    mask = (at >= 2) & (at < length[:, None]) & (rng.random((height, width)) < 0.8)
    mask[-1] = True
    support = None
    if k is not None:
        support = np.argsort(rng.random((height, width, V)), axis=-1)[..., :k].astype(np.int32)
        missing = ~np.any(support == tokens[..., None], axis=-1)
        support[missing, 0] = tokens[missing]
        spare = (support != tokens[..., None]) & (np.arange(k) == k - 1)
        support = jnp.where(spare & (at % 2 == 0)[:, None], -1, support)
    return Rollout(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask.astype(np.float32)),
        length=jnp.asarray(length),
        support=support,
    )


def naive(model, params, batch, temperature):
    """logp, entropy, values at every position by full logits, zero off the mask; the routing."""
    valid = None
    if batch.length is not None:
        valid = jnp.arange(batch.tokens.shape[1]) < batch.length[:, None]
    out = model.hidden(params, batch.tokens, valid=valid, routing=batch.routing)
    heat = jnp.reshape(jnp.asarray(temperature), (-1, 1, 1))
    logits = jnp.einsum('btd,vd->btv', out.hidden, model.head(params), precision='highest')
    logits = (logits / heat)[:, :-1]
    if batch.support is not None:
        keep = jnp.any(batch.support[:, 1:, :, None] == jnp.arange(V), axis=2)
        logits = jnp.where(keep, logits, -1e30)
    logp = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    values = model.value(params, out.hidden)[:, :-1]
    keep = batch.mask[:, 1:] > 0
    parts = [jnp.pad(jnp.where(keep, x, 0), ((0, 0), (1, 0))) for x in (taken, entropy, values)]
    return tuple(parts), out.routing


def total(parts):
    logp, entropy, values = parts
    weight = jnp.cos(jnp.arange(logp.size).reshape(logp.shape))
    return jnp.sum(weight * logp) + 0.3 * jnp.sum(entropy) + jnp.sum(weight**2 * values)


def results(scores):
    return scores.logp_new, scores.entropy, scores.values


def assert_tree_close(got, want, rtol=1e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale)


@pytest.mark.parametrize('k', [None, 5])
def test_scores_and_parameter_gradients_equal_the_naive_ones(k):
    model, params = model_and_params()
    batch = rows(k=k)
    heat = jnp.linspace(0.6, 1.4, B)

    def loss(params, f):
        out = f(params)
        return total(out), out

    def ours(params):
        return results(scoring.score(model, params, batch, temperature=heat, chunk=5))

    def theirs(params):
        return naive(model, params, batch, heat)[0]

    got = jax.jit(jax.grad(functools.partial(loss, f=ours), has_aux=True))(params)
    want = jax.jit(jax.grad(functools.partial(loss, f=theirs), has_aux=True))(params)
    assert_tree_close(got, want)
    for x in got[1]:
        assert x.shape == (B, T) and x.dtype == jnp.float32
        assert np.all(np.asarray(x)[np.asarray(batch.mask) == 0] == 0)
        assert np.all(np.asarray(x)[:, 0] == 0)  # although the last row's mask says 1 there


def test_width_and_row_order_change_nothing():
    model, params = model_and_params()
    batch = rows(k=5)
    score = jax.jit(lambda params, batch: results(scoring.score(model, params, batch, chunk=7)))
    base = score(params, batch)
    order = np.array([2, 0, 3, 1])

    def move(x):
        pad = [(0, 0), (0, 4), (0, 0)][: x.ndim]
        return jnp.pad(x[order], pad) if x.ndim > 1 else x[order]

    moved = score(params, jax.tree.map(move, batch))
    assert_tree_close([x[:, :T] for x in moved], [x[order] for x in base])
    assert all(np.all(np.asarray(x)[:, T:] == 0) for x in moved)


def test_routing_is_replayed():
    model, params = model_and_params(moe=True)
    batch = rows()
    moved = random_params(model, 1)
    theirs = jax.jit(lambda params, batch: naive(model, params, batch, 1.0))
    ours = jax.jit(lambda params, batch: results(scoring.score(model, params, batch)))
    native = batch.replace(routing=jnp.full((B, T, 1, 2), -1, jnp.int8))  # nothing to replay
    before, recorded = theirs(params, native)
    replay = batch.replace(routing=recorded)
    assert_tree_close(ours(params, replay), before)
    got = [ours(moved, x) for x in (replay, native)]
    assert_tree_close(got, [theirs(moved, x)[0] for x in (replay, native)])
    assert np.max(np.abs(got[0][0] - got[1][0])) > 1e-2


def test_one_forward_gives_scores_routing_and_router_losses():
    model, params = model_and_params(moe=True)
    batch, moved = rows(), random_params(model, 1)
    record = jnp.ones((B, T, 1, 2), jnp.int8).at[..., 1].set(3)

    @jax.jit
    def both(params, batch):
        return scoring.score_and_hidden(model, params, batch, replay_routing=False, chunk=5)

    scores, hidden = both(params, batch.replace(routing=record))
    valid = jnp.arange(T) < batch.length[:, None]
    trunk = jax.jit(model.hidden)(params, batch.tokens, valid=valid)
    np.testing.assert_array_equal(hidden.routing, trunk.routing)
    assert int(hidden.aux['load'].sum()) == 2 * int(batch.length.sum())
    np.testing.assert_allclose(hidden.aux['router_z'].value, trunk.aux['router_z'].value, rtol=1e-6)
    # The routing of this forward, replayed under other parameters, is the one that is used.
    score = jax.jit(functools.partial(scoring.score_and_hidden, model))
    again, replayed = score(moved, batch.replace(routing=hidden.routing))
    np.testing.assert_array_equal(replayed.routing, hidden.routing)
    native, live = both(moved, batch)
    assert (np.asarray(live.routing) != np.asarray(hidden.routing)).any()
    assert np.max(np.abs(again.logp_new - native.logp_new)) > 1e-2
    assert_tree_close(score(params, batch.replace(routing=hidden.routing))[0], scores)

    @jax.jit
    @jax.grad
    def balance(params):
        return scoring.score_and_hidden(model, params, batch)[1].aux['load_balance'].value

    assert np.any(balance(params)['moe']['mlp']['router'])


class StandIn:
    """A model whose params are its states, recording what it is asked."""

    def __init__(self, value_head=True):
        self.asked = {}
        self.config = types.SimpleNamespace(
            value_head=value_head, lax_precision=jax.lax.Precision.HIGHEST
        )

    def hidden(self, params, tokens, *, valid, routing):
        self.asked = dict(valid=valid, routing=routing)
        return types.SimpleNamespace(hidden=params['hidden'], routing=None)

    def head(self, params):
        return params['head']

    def value(self, params, hidden):
        return hidden @ params['value']


def stand_in(seed: int = 0, width: int = 6, **kwargs):
    rng = np.random.default_rng(seed)
    params = {
        'hidden': rng.standard_normal((B, T, width)).astype(np.float32),
        'head': rng.standard_normal((V, width)).astype(np.float32),
        'value': rng.standard_normal(width).astype(np.float32),
    }
    return StandIn(**kwargs), params


def test_what_the_model_is_given():
    model, params = stand_in(value_head=False)
    batch = rows().replace(routing=jnp.arange(B * T * 4).reshape(B, T, 2, 2))

    @jax.jit
    def run(params, batch):
        bare = types.SimpleNamespace(tokens=batch.tokens, mask=batch.mask)
        out = []
        for x, kwargs in ((batch, {}), (batch, {'replay_routing': False}), (bare, {})):
            scores = scoring.score(model, params, x, **kwargs)
            out.append((scores, model.asked))
        return out

    (replayed, first), (native, second), (bare, third) = run(params, batch)
    np.testing.assert_array_equal(first['routing'], batch.routing)
    np.testing.assert_array_equal(first['valid'], np.arange(T) < np.asarray(batch.length)[:, None])
    assert second['routing'] is None and third == dict(valid=None, routing=None)
    assert replayed.values is None
    np.testing.assert_array_equal(bare.logp_new, replayed.logp_new)
    np.testing.assert_array_equal(native.logp_new, replayed.logp_new)


def test_options():
    model, params = stand_in()
    batch = rows(k=5)
    full = batch.replace(support=None)
    on = np.array(batch.mask) > 0
    on[:, 0] = False
    allowed = np.ones(V, bool)
    allowed[[3, 4]] = False

    @jax.jit
    def run(params):
        score = functools.partial(scoring.score, model, params)
        return (
            score(batch),
            score(batch, replay_support=False, entropy=False),
            score(full, allowed=allowed),
            score(batch.replace(length=None, support=None)),
        )

    replayed, ignored, fewer, whole = run(params)
    want, _ = jax.jit(lambda params: naive(model, params, full, 1.0))(params)
    assert ignored.entropy is None
    for got in (ignored, whole):
        assert_tree_close(got.logp_new, want[0])
    assert np.all(np.asarray(replayed.logp_new)[on] > np.asarray(want[0])[on])
    hit = on & np.isin(np.asarray(full.tokens), [3, 4])
    assert hit.any()
    np.testing.assert_array_equal(np.isnan(fewer.logp_new), hit)
    assert np.all(np.asarray(fewer.logp_new)[on & ~hit] > np.asarray(want[0])[on & ~hit])


def test_temperature_zero_is_an_error_and_a_new_one_compiles_nothing():
    model, params = stand_in()
    batch = rows()
    with pytest.raises(ValueError, match='temperature=0.*greedy'):
        scoring.score(model, params, batch, temperature=0.0)
    traces = []

    @jax.jit
    def score(params, batch, temperature):
        traces.append(1)
        return results(scoring.score(model, params, batch, temperature=temperature))

    for heat in (0.5, 1.0, 2.0):
        assert_tree_close(
            score(params, batch, jnp.float32(heat)), naive(model, params, batch, heat)[0]
        )
    assert len(traces) == 1


@pytest.mark.parametrize('k', [None, 5])
def test_nothing_off_the_mask_can_matter(k):
    model, params = stand_in()
    batch = rows(k=k)
    used = np.roll(np.asarray(batch.mask) > 0, -1, axis=1)
    used[:, -1] = False
    spoiled = params | {'hidden': np.where(used[..., None], params['hidden'], np.nan)}
    on = np.asarray(batch.mask) > 0
    other = batch.replace(tokens=jnp.where(on, batch.tokens, V + 7))
    if k is not None:
        other = other.replace(support=jnp.where(on[..., None], batch.support, V + 9))

    @jax.jit
    def run(params, batch):
        f = lambda p: total(results(scoring.score_hidden(model, p, p['hidden'], batch)))  # noqa: E731
        return jax.value_and_grad(f)(params)

    got, want = run(spoiled, other), run(params, batch)
    assert_tree_close(got, want, rtol=1e-6)
    assert np.all(np.asarray(got[1]['hidden'])[~used] == 0)


def test_empty_mask():
    model, params = stand_in()
    batch = rows().replace(mask=jnp.zeros((B, T), jnp.int32))
    f = lambda p: total(results(scoring.score_hidden(model, p, p['hidden'], batch)))  # noqa: E731
    loss, grads = jax.jit(jax.value_and_grad(f))(params)
    assert loss == 0
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(grads))


# A chunk's 20 rows are 5 on each of 4 devices and its 24 ids 12 on each of 2, or they are 2 on each
# of 8 and the ids come in blocks of 8.
@pytest.mark.parametrize(
    'axes, local, absent',
    [((2, 2, 2), '5,12', ('20,24', '20,12', '5,24', '5,8')), ((4, 2, 1), '2,8', ('20,24', '2,24'))],
)
def test_rows_on_a_mesh_score_as_on_one_device(monkeypatch, axes, local, absent):
    model, params = stand_in()
    batch = rows(height=8, k=5)
    states = np.random.default_rng(0).standard_normal((8, T, 6), np.float32)
    params = params | {'hidden': states}

    def run(params, batch):
        def loss(params, batch):
            scores = scoring.score_hidden(model, params, params['hidden'], batch, chunk=20)
            return total(results(scores))

        full = batch.replace(support=None)
        return [jax.value_and_grad(loss)(params, x) for x in (batch, full)]

    want = jax.jit(run)(params, batch)
    monkeypatch.setattr(scoring_kernels, 'CPU_BLOCK', 9)
    monkeypatch.setattr(scoring_kernels, 'LANES', 1)
    names = 'data', 'fsdp', 'tensor'
    with jax.set_mesh(sharding.make_mesh(list(zip(names, axes, strict=True)))):
        split = jax.P(('data', 'fsdp'))
        params = {
            'hidden': jax.device_put(states, split),
            'head': jax.device_put(params['head'], jax.P('tensor', 'fsdp')),
            'value': jax.device_put(params['value'], jax.P('fsdp')),
        }
        batch = jax.tree.map(lambda x: jax.device_put(x, split), batch)
        compiled = jax.jit(run).lower(params, batch).compile()
        assert_tree_close(compiled(params, batch), want)
    text = compiled.as_text()
    assert f'f32[{local}]' in text
    assert not any(f'f32[{shape}]' in text for shape in absent)


def test_a_fifth_of_the_naive_memory():
    shape = dict(b=8, t=512, v=151_936, d=256)
    width, model = shape['d'], StandIn(value_head=False)
    struct = jax.ShapeDtypeStruct
    params = {
        'hidden': struct((shape['b'], shape['t'], width), jnp.float32),
        'head': struct((shape['v'], width), jnp.float32),
    }
    ids = struct((shape['b'], shape['t']), jnp.int32)

    def ours(params, tokens, mask):
        batch = types.SimpleNamespace(tokens=tokens, mask=mask)
        scores = scoring.score_hidden(model, params, params['hidden'], batch)
        return jnp.sum(scores.logp_new) + jnp.sum(scores.entropy)

    def theirs(params, tokens, mask):
        logits = jnp.einsum('btd,vd->btv', params['hidden'], params['head'])
        logp = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
        return jnp.sum(mask * (taken - jnp.sum(jnp.exp(logp) * logp, axis=-1)))

    def temporary(f):
        compiled = jax.jit(jax.value_and_grad(f)).lower(params, ids, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    small, large = temporary(ours), temporary(theirs)
    print(f'peak temporary memory: {small:.0f} MiB against {large:.0f} MiB')
    assert small < large / 5
