"""Length buckets under a token budget: which rows go together, and that nothing changes."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import policyopt as po
from policyopt import learner, losses, microbatches
from policyopt.microbatches import LengthBuckets, plan
from tests import learning
from tests.learning import Config, Running, close, fresh, none, random_batch

HEADED = Running(Config(value_head=True))
BUCKETS = LengthBuckets(token_budget=16, widths=(4, 6, 9))
TWO = LengthBuckets(token_budget=18, widths=(4, 9))

# Every kind of part that reads more than its own token: groups, segments, rows, the minibatch.
EVERYTHING = po.Algorithm(
    advantages=po.advantages.group_zscore(),
    loss=losses.add(
        losses.policy_loss(
            ratio=losses.segment_ratio(),
            surrogate=losses.clipped(0.2),
            aggregate=losses.prompt_mean(),
            gates=[losses.off_policy_sequence(0.1), losses.truncated_importance(1.1)],
            penalties=[losses.kl_to_reference(0.1, unbiased=True), losses.entropy(0.01)],
        ),
        losses.policy_loss(
            ratio=losses.sequence_ratio(),
            surrogate=losses.clipped(0.1),
            aggregate=losses.sequence_mean(),
            name='sequence',
        ),
        losses.value_loss(aggregate=losses.token_mean(), clip=0.2),
        losses.scale(0.1, losses.positive_nll(aggregate=losses.token_mean())),
    ),
    prepare=po.advantages.normalise_minibatch(),
)


def rows(seed: int = 0):
    """A batch with short rows, so that every bucket is used."""
    batch = random_batch(seed)
    length = np.roll(np.array([9, 4, 3, 2, 4, 3, 6, 3], np.int32), seed)
    mask = batch.mask * (np.arange(9) < length[:, None])
    return dataclasses.replace(batch, length=length, mask=mask)


def test_plan_fills_the_budget_longest_first():
    length = np.array([3, 9, 1, 4, 6, 2, 5, 8])
    groups = plan(length, BUCKETS)
    assert [(list(index), width) for index, width in groups] == [
        ([1], 9),
        ([7], 9),
        ([4, 6], 6),
        ([3, 0, 5, 2], 4),
    ]
    assert [len(i) * w <= 16 for i, w in groups] == [True] * 4
    # Rows of a microbatch are fixed by its width: empty places hold row 8, which is none.
    (index, width), *rest = plan(length[:3], LengthBuckets(40, (4, 9)))
    assert list(index) == [1, 0, 2] and width == 9 and not rest
    (index, width), *rest = plan(np.array([2, 2, 2, 7]), LengthBuckets(20, (4, 9)))
    assert list(index) == [3, 0] and width == 9
    assert [(list(i), w) for i, w in rest] == [([1, 2, 4, 4], 4)]
    # Over four devices eleven rows become eight; three stay three.
    assert len(plan(np.full(40, 3), LengthBuckets(44, (4,)), multiple=4)[0][0]) == 8
    assert len(plan(np.full(40, 3), LengthBuckets(12, (4,)), multiple=4)[0][0]) == 3


def test_what_is_no_bucket_is_an_error():
    with pytest.raises(ValueError, match='row 1 has 10 tokens, the widest bucket 9'):
        plan(np.array([3, 10]), BUCKETS)
    with pytest.raises(ValueError, match='token_budget=8 holds no row of the widest bucket.* 9 or'):
        LengthBuckets(8, (4, 9))
    for widths in ((), (4, 4), (9, 4), (0, 4)):
        with pytest.raises(ValueError, match='widths=.*legal are increasing'):
            LengthBuckets(16, widths)

    def build(algorithm=None, **kwargs):
        return learner.make_learner(
            HEADED, algorithm or po.algorithms.gspo(), optax.sgd(1.0), **kwargs
        )

    with pytest.raises(ValueError, match='microbatches=2 has no effect with length_buckets'):
        build(microbatches=2, length_buckets=BUCKETS)
    with pytest.raises(ValueError, match='with a natural-gradient algorithm; legal is None'):
        build(po.algorithms.trpo(), length_buckets=BUCKETS)
    with pytest.raises(ValueError, match='microbatches=0; legal is 1 or more'):
        build(microbatches=0)
    bound = build(length_buckets=BUCKETS)
    with pytest.raises(po.types.MissingInput, match='length_buckets needs `length`'):
        bound.update(fresh(bound, HEADED.init()), dataclasses.replace(random_batch(), length=None))


class Counted(Running):
    """Counts how often its forward pass is traced, by shape."""

    def hidden(self, params, tokens, **kwargs):
        TRACES.append(tokens.shape)
        return super().hidden(params, tokens, **kwargs)


TRACES: list[tuple[int, ...]] = []


def test_buckets_change_nothing_and_compile_once_each():
    """Loss, gradient (by plain SGD), metrics and log-probs; then other lengths, no new trace."""
    model, params, batch = Counted(HEADED.config), HEADED.init(), rows()
    batch.returns[batch.mask == 0] = np.nan  # what stands there matters to nothing
    results = []
    for split in (dict(microbatches=2), dict(length_buckets=TWO)):
        learn = learner.make_learner(model, EVERYTHING, optax.sgd(1.0), diagnose=none, **split)
        TRACES.clear()
        results.append(learn.update(fresh(learn, params), batch))
    seen = list(TRACES)
    assert sorted(set(seen)) == [(2, 9), (4, 4)] and len(seen) == 2
    whole, (state, metrics, logp) = results
    close(state.params, whole[0].params, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(logp, whole[2], atol=1e-6)
    assert set(metrics) == set(whole[1])
    for name, metric in metrics.items():
        np.testing.assert_allclose(metric.value, whole[1][name].value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(metric.count, whole[1][name].count)
    assert np.any(np.abs(whole[0].params['head'] - params['head']) > 1e-3)
    other = rows(seed=1)
    assert {w for _, w in plan(other.length, TWO)} == {4, 9}
    learn.update(state, other)
    assert seen == TRACES


def test_buckets_in_the_forward_passes_and_value_pretraining():
    batch, params = random_batch(), HEADED.init()
    algorithm, results = po.algorithms.vapo(), []
    for split in (dict(microbatches=2), dict(length_buckets=TWO)):
        learn = learner.make_learner(
            HEADED, algorithm, optax.sgd(1.0), critic=learner.Critic(optax.sgd(0.5)), **split
        )
        state = fresh(learn, params)
        old = learn.recompute(state.params, batch).logp_old
        values = learn.values(state, batch)
        state, metrics = learn.value_update(state, batch)
        results.append((old, values, state.params, metrics['value/loss'].value))
    close(results[0], results[1], rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(results[1][0])[batch.mask > 0] < 0)


def test_split_keeps_every_row_once():
    x = np.arange(24).reshape(12, 2)
    parts = microbatches.split(x, 3, learning.Running().rules)
    assert parts.shape == (3, 4, 2)
    np.testing.assert_array_equal(parts[1], x[1::3])
    np.testing.assert_array_equal(microbatches.join(parts), x)
    taken = jax.jit(lambda i: microbatches.take(x, i, 1, learning.Running().rules))(
        np.array([7, 12, 0])
    )
    np.testing.assert_array_equal(taken, [[14], [0], [0]])
