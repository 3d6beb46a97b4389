"""From problems to batches: groups, rewards, dynamic sampling, empty rows, what is scored."""

import dataclasses
import threading
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyopt as po
from policyopt import data, drawing, models, rewards, rollout, scoring
from policyopt.rewards import Local, Verdict
from policyopt.rollout import RolloutConfig, check_groups, make_collector, required_fields
from policyopt.sampling import EngineConfig, SamplingConfig
from tests.bigram import Bigram, Config

TOKENIZER = data.arithmetic_tokenizer()
ITEMS = [
    data.Item(prompt=f'{i}+1=', ids=tuple(TOKENIZER.encode(f'{i}+1=')), answer='', entry={'i': i})
    for i in range(8)
]


# Gives every token the same probability.
UNIFORM = Bigram(Config(TOKENIZER.vocab_size), TOKENIZER)
PARAMS = jnp.zeros((TOKENIZER.vocab_size,) * 2)


def collector(algorithm, judge, prompts=2, group_size=4, max_rounds=3, **config):
    return make_collector(
        UNIFORM,
        algorithm,
        judge,
        RolloutConfig(prompts=prompts, group_size=group_size, max_rounds=max_rounds, **config),
        SamplingConfig(max_new_tokens=3),
        prompt_width=5,
    )


def state_of(params):
    return types.SimpleNamespace(params=params)


def collect(algorithm, judge, **kw):
    source = data.batches(ITEMS, kw.get('prompts', 2), seed=0)
    return collector(algorithm, judge, **kw)(state_of(PARAMS), None, source, jax.random.key(0), 3)


class Judge(Local):
    """Judges in order; `drawn` are the answers it was given."""

    def __init__(self, mark: Callable[[int, str], float], right=1.0, wrong=0.0):
        self.drawn: list[str] = []

        def reward(text, tokens, example):
            self.drawn.append(text)
            given = mark(len(self.drawn) - 1, text)
            value = {1: right, 0: wrong}.get(given, np.nan)
            return Verdict(value, 'unknown' if np.isnan(value) else 'marked', given == 1)

        super().__init__(reward)


def cycling(*marks, **values):
    """A judge that gives these marks row after row, whatever the answers."""
    return Judge(lambda i, text: marks[i % len(marks)], **values)


NO_KL = po.algorithms.grpo(beta=0.0)


@pytest.mark.parametrize(
    ('algorithm', 'fields'),
    [
        (NO_KL, set()),
        (po.algorithms.grpo(), {'logp_ref'}),
        (po.algorithms.reinforce_pp(), {'logp_ref'}),  # in its reward, not in its loss
        (po.algorithms.dapo(), set()),
        (po.algorithms.ppo_clip(), {'values', 'returns'}),
        (po.algorithms.ppo_clip(value_clip=0.2), {'values', 'returns', 'values_old'}),
        (po.algorithms.minirl(), {'logp_behavior'}),
        (po.algorithms.gspo_turn(), {'segment', 'segment_rewards'}),
    ],
)
def test_required_fields(algorithm, fields):
    assert required_fields(algorithm) == fields


def test_rows_of_a_prompt_are_a_group_with_its_rewards():
    judge = cycling(1, 0, 0, 0, 1, 1, 0, 0, right=2.0, wrong=-1.0)
    found = collect(NO_KL, judge)
    batch, marks = found.batch, np.array([1, 0, 0, 0, 1, 1, 0, 0])
    assert batch.group.tolist() == [0] * 4 + [1] * 4
    assert batch.rewards.tolist() == np.where(marks, 2.0, -1.0).tolist()
    assert batch.positive.tolist() == (marks == 1).tolist()
    rows = np.where(marks, 2.0, -1.0).reshape(2, 4)
    want = (rows - rows.mean(1, keepdims=True)) / (rows.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(
        batch.advantages, want.reshape(-1, 1) * np.asarray(batch.mask), atol=1e-5
    )
    assert np.array_equal(batch.logp_old, batch.logp_behavior)
    np.testing.assert_allclose(batch.logp_old, -np.log(16) * np.asarray(batch.mask), rtol=1e-6)
    assert set(np.unique(batch.version)) == {-1, 3}
    # Rows of one prompt share it, and their answers are what the judge was given.
    texts = [
        TOKENIZER.decode(t[:n]) for t, n in zip(batch.tokens, batch.prompt_length, strict=True)
    ]
    assert len(set(texts[:4])) == len(set(texts[4:])) == 1 and texts[0] != texts[4]
    assert drawing.answers_of(found.rollout, TOKENIZER) == judge.drawn
    lengths = np.asarray(batch.mask).sum(axis=1)
    assert found.metrics['accuracy'] == 3 / 8 and found.metrics['reward'] == 1 / 8
    assert found.metrics['rewards/marked'] == 8 and found.metrics['rewards/raised'] == 0
    assert found.metrics['rollout/tokens'] == lengths.sum()
    assert found.metrics['length'] == pytest.approx(lengths.mean())


def test_row_without_a_reward_leaves_the_statistics():
    """Rewards [1, None, 0]: advantages proportional to [.5, 0, -.5]; counted, not trained on."""
    algorithm = po.algorithms.dr_grpo(length=3)
    found = collect(algorithm, cycling(1, np.nan, 0), prompts=1, group_size=3)
    first = np.asarray(found.batch.mask).argmax(axis=1)
    assert found.batch.advantages[np.arange(3), first].tolist() == [0.5, 0, -0.5]
    assert found.metrics['rollout/not_judged'] == pytest.approx(1 / 3)
    assert found.metrics['rewards/unknown'] == 1
    assert found.metrics['accuracy'] == 0.5
    assert np.asarray(found.batch.mask).any(axis=1).tolist() == [True, False, True]


SEVEN = TOKENIZER.encode('7')[0]


@pytest.mark.parametrize('engine', [None, EngineConfig(slots=4)])
def test_rows_whose_logits_are_not_finite_cost_themselves_only(engine):
    """What follows a 7 is NaN: rows that draw one before their last token are emptied."""

    def judge():
        return Judge(lambda i, text: len(text) % 2)

    clean = collect(NO_KL, judge(), group_size=16, engine=engine)
    source = data.batches(ITEMS, 2, seed=0)
    params = PARAMS.at[SEVEN].set(jnp.nan)
    run = collector(NO_KL, judge(), group_size=16, engine=engine)
    found = run(state_of(params), None, source, jax.random.key(0), 3)
    drawn = np.asarray(clean.batch.mask) != 0
    drawn[:, -1] = False
    at = np.arange(drawn.shape[1]) == np.asarray(clean.batch.length)[:, None] - 1
    lost = ((np.asarray(clean.batch.tokens) == SEVEN) & drawn & ~at).any(axis=1)
    assert 0 < lost.sum() < 32
    assert found.metrics['rollout/not_sampled'] == pytest.approx(lost.mean())
    assert found.metrics['rollout/not_judged'] == 0
    assert found.metrics['rewards/not_sampled'] == lost.sum()
    batch = found.batch
    assert (np.asarray(batch.finish) == 5).tolist() == lost.tolist()
    assert np.isnan(batch.rewards).tolist() == lost.tolist()
    assert not batch.tokens[lost].any() and not np.asarray(batch.mask)[lost].any()
    assert batch.length[lost].tolist() == [1] * lost.sum()
    assert np.array_equal(batch.group, clean.batch.group)
    for name in ('tokens', 'mask', 'rewards', 'logp_old', 'positive', 'version', 'length'):
        np.testing.assert_array_equal(
            getattr(batch, name)[~lost], getattr(clean.batch, name)[~lost], name
        )
    assert np.isfinite(np.asarray(batch.advantages)).all()


def test_where_no_row_can_be_sampled_the_rows_are_handed_over():
    """Not an error of the judge, nor of the keep rule."""
    equals = TOKENIZER.encode('=')[0]
    for algorithm in (NO_KL, po.algorithms.dapo(max_length=3, cache=1)):
        run = collector(algorithm, cycling(1, 0))
        source = data.batches(ITEMS, 2, seed=0)
        params = PARAMS.at[equals].set(jnp.inf)
        with pytest.raises(rollout.NotSampled, match='100% of the rows could not') as error:
            run(state_of(params), None, source, jax.random.key(0), 3)
        batch = error.value.batch
        assert (np.asarray(batch.finish) == 5).all() and np.isnan(batch.rewards).all()
        assert batch.tokens[:, 3].tolist() == [equals] * 8  # as they were
        assert not batch.advantages.any()
        assert error.value.metrics['rollout/not_sampled'] == 1


def test_nothing_to_learn_from_is_an_error_that_says_why():
    for algorithm, rows in ((NO_KL, 8), (po.algorithms.dapo(max_length=3, cache=1), 24)):
        with pytest.raises(
            ValueError, match=f'none of {rows} answers got a reward: .*first: unknown'
        ):
            collect(algorithm, cycling(np.nan))

    def nothing(rollout):
        return dataclasses.replace(rollout, mask=jnp.zeros_like(rollout.mask))

    with pytest.raises(ValueError, match='none of 8 answers has a token to learn from'):
        collect(NO_KL._replace(shape=nothing), cycling(1, 0))


def test_missing_values_are_an_error():
    with pytest.raises(ValueError, match='reads values, but `values` is None'):
        collector(po.algorithms.ppo_clip(), cycling(1, 0))


@pytest.mark.parametrize('mark', [0, 1])
def test_equal_rewards_stop_after_the_stated_rounds(mark):
    """Every group has equal rewards: a message that says what to change, never an endless loop."""
    judge = cycling(mark)
    with pytest.raises(ValueError, match='none of 24 answers in 3 rounds .* warm start'):
        collect(po.algorithms.dapo(max_length=3, cache=1), judge)
    assert len(judge.drawn) == 3 * 8


def test_dropped_groups_are_refilled():
    """Of every two groups one is mixed: two rounds fill the batch, with mixed groups only."""
    found = collect(po.algorithms.dapo(max_length=3, cache=1), cycling(1, 0, 0, 0, 1, 1, 1, 1))
    batch = found.batch
    assert found.metrics['rollout/rounds'] == 2 and found.metrics['rollout/kept'] == 1
    assert batch.positive.tolist() == [True, False, False, False] * 2
    assert len(set(batch.group.tolist())) == 2
    assert found.metrics['accuracy'] == 5 / 8  # of every row drawn


def test_batch_that_stays_short_is_filled_with_rows_that_count_nowhere():
    found = collect(
        po.algorithms.dapo(max_length=3, cache=1), cycling(1, 0, 0, 0, 1, 1, 1, 1), max_rounds=1
    )
    batch = found.batch
    assert batch.tokens.shape == (8, 8) and found.metrics['rollout/kept'] == 0.5
    assert not np.asarray(batch.mask)[4:].any() and np.isnan(batch.rewards[4:]).all()
    assert not np.asarray(batch.advantages)[4:].any()
    weights = po.algorithms.dapo().loss.weigh(batch)
    np.testing.assert_allclose(np.sum(weights * batch.mask), 1, rtol=1e-6)
    parts = rollout.minibatches(batch, 2)
    assert len(parts) == 1 and parts[0].group.tolist() == [0] * 4


def test_batch_that_stays_short_is_an_error_where_the_config_says_so():
    judge = cycling(1, 0, 0, 0, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="only 4 of 8 rows were kept in 1 rounds, .* is 'error'"):
        collect(po.algorithms.dapo(max_length=3, cache=1), judge, max_rounds=1, shortage='error')


def test_chunks_and_the_engine_change_no_token():
    def judge():
        return Judge(lambda i, text: len(text) % 2)

    want = collect(NO_KL, judge(), prompts=4).batch
    for changes in (dict(chunks=2), dict(chunks=4), dict(engine=EngineConfig(slots=3, steps=2))):
        found = collect(NO_KL, judge(), prompts=4, **changes).batch
        for name in ('tokens', 'mask', 'group', 'rewards', 'length', 'version'):
            np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)


def test_answers_are_judged_while_the_next_chunk_is_decoded(monkeypatch):
    """The first answer's verdict comes only after the second chunk is asked for."""
    asked, calls = threading.Event(), []

    def sample(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            asked.set()
        return decode(*args, **kwargs)

    decode = drawing.sample
    monkeypatch.setattr(drawing, 'sample', sample)
    found = collect(NO_KL, Judge(lambda i, text: asked.wait(timeout=60)), prompts=2, chunks=2)
    assert found.batch.rewards.tolist() == [1] * 8


def test_the_engine_has_rows_judged_as_they_end(monkeypatch):
    """The first answer's verdict comes before the last token is drawn."""
    judged, early = threading.Event(), []
    step = drawing.sample_continuous.__globals__['Engine'].step

    def late(engine, *args, **kwargs):
        rows = step(engine, *args, **kwargs)
        if judge.drawn:
            early.append(judged.wait(timeout=60))
        return rows

    judge = Judge(lambda i, text: judged.set() or i % 2)
    monkeypatch.setattr(drawing.sample_continuous.__globals__['Engine'], 'step', late)
    found = collect(NO_KL, judge, prompts=2, engine=EngineConfig(slots=1, steps=1))
    assert all(early) and len(early) > 2 and np.isfinite(found.batch.rewards).all()


def test_verdicts_are_used_again(tmp_path):
    """A step done again has the rewards it had, whatever the judge says now."""
    page = rewards.Ledger(tmp_path)
    first, second = cycling(1, 0), cycling(0, 1)
    found = [
        collector(NO_KL, judge)(
            state_of(PARAMS),
            None,
            data.batches(ITEMS, 2, seed=0),
            jax.random.key(0),
            page=page.page('rl', 1, 1),
        )
        for judge in (first, second)
    ]
    assert found[0].batch.rewards.tolist() == found[1].batch.rewards.tolist() == [1, 0] * 4
    assert found[0].metrics == found[1].metrics and not second.drawn


def test_minibatches_are_slices_of_equal_size():
    found = collect(NO_KL, cycling(1, 0))
    parts = rollout.minibatches(found.batch, 4)
    assert [len(p.mask) for p in parts] == [2] * 4
    assert np.array_equal(np.concatenate([p.tokens for p in parts]), found.batch.tokens)
    with pytest.raises(ValueError, match='3 minibatches do not divide 8 rows'):
        rollout.minibatches(found.batch, 3)


def test_next_steps_differ_and_repeat_with_the_key():
    step = collector(NO_KL, cycling(1, 0))

    def tokens(key):
        return step(
            state_of(PARAMS), None, data.batches(ITEMS, 2, seed=0), jax.random.key(key), 0
        ).batch.tokens

    assert np.array_equal(tokens(1), tokens(1)) and not np.array_equal(tokens(1), tokens(2))


def test_reference_and_critic_are_scored_on_the_taken_tokens():
    config = models.ModelConfig(
        vocab_size=16, embed_dim=8, num_layers=1, num_heads=1, num_kv_heads=1, mlp_dim=8
    )
    model = models.build(dataclasses.replace(config, value_head=True), TOKENIZER)
    params = jax.jit(model.init)(jax.random.key(0)) | {'value': jnp.linspace(-1, 1, 8)}
    reference = jax.tree.map(lambda x: 1.5 * x, params)
    parts = po.losses.policy_loss(
        ratio=po.losses.token_ratio(),
        surrogate=po.losses.clipped(0.2),
        aggregate=po.losses.token_mean(),
        penalties=[po.losses.kl_to_reference(0.1)],
    )
    algorithm = po.algorithms.ppo_clip()
    algorithm = algorithm._replace(
        loss=po.losses.add(
            parts, po.losses.scale(0.5, po.losses.value_loss(aggregate=po.losses.token_mean()))
        )
    )
    step = make_collector(
        model,
        algorithm,
        cycling(1, 0),
        RolloutConfig(prompts=2, group_size=2),
        SamplingConfig(max_new_tokens=3, temperature=0.8),
        prompt_width=5,
        values=lambda state, batch: scoring.score(model, state.params, batch).values,
    )
    found = step(state_of(params), reference, data.batches(ITEMS, 2, seed=0), jax.random.key(0))
    score = jax.jit(lambda p, b: scoring.score(model, p, b, temperature=0.8))
    np.testing.assert_allclose(
        found.batch.logp_ref, score(reference, found.batch).logp_new, atol=1e-6
    )
    np.testing.assert_allclose(found.batch.values_old, score(params, found.batch).values, atol=1e-6)
    # Reward at the last token, lambda .95: the last token's target is the reward.
    last = np.asarray(found.batch.length) - 1
    # R = A + V with the last advantage r - V
    np.testing.assert_allclose(
        np.asarray(found.batch.returns)[np.arange(4), last], found.batch.rewards, atol=1e-6
    )
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), reference)
    with pytest.raises(ValueError, match='row 0, position .*: the reference policy gives'):
        step(state_of(params), broken, data.batches(ITEMS, 2, seed=0), jax.random.key(0))


def test_config_errors():
    with pytest.raises(ValueError, match='group_size is 0'):
        RolloutConfig(group_size=0)
    with pytest.raises(ValueError, match='chunks is 3; legal are divisors of prompts, 4'):
        RolloutConfig(prompts=4, chunks=3)


@pytest.mark.parametrize(
    ('name', 'alone'),
    [
        ('reinforce_pp', True),
        ('ppo_clip', True),
        ('gspo_step', True),
        ('grpo', False),
        ('dapo', False),
    ],
)
def test_groups_of_one_are_for_algorithms_that_learn_from_them(name, alone):
    algorithm = getattr(po.algorithms, name)()
    needed = required_fields(algorithm)
    check_groups(algorithm, needed, RolloutConfig(group_size=2), name)
    if alone:
        check_groups(algorithm, needed, RolloutConfig(group_size=1), name)
    else:
        with pytest.raises(ValueError, match=f'group_size is 1, from which {name} learns nothing'):
            check_groups(algorithm, needed, RolloutConfig(group_size=1), name)
