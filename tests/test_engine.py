"""The slot engine: refills, shared prefixes, swaps in flight, abort and resume."""

import jax
import numpy as np
import pytest

from policyopt import scoring
from policyopt.sampling import (
    Engine,
    EngineConfig,
    Finish,
    PerRow,
    RowErrors,
    SamplingConfig,
    automaton,
    sample,
    sample_continuous,
    to_rollout,
)
from tests.bigram import Bigram, Config, chain, noise
from tests.engines import answers, run, tiny

V, EOS = 12, 2
MODEL = Bigram(Config(V, (EOS,)))
ENDLESS = Bigram(Config(V))
SIZES = EngineConfig(slots=3, size=24, steps=4)


def key(seed=0):
    return jax.random.key(seed)


@pytest.mark.slow
def test_tokens_do_not_depend_on_slots_order_or_refills():
    model = Bigram(Config(40, (EOS,)))
    table = noise(40)
    prompts = [[5], [3, 4, 7], [9, 9], [10, 3, 5, 6], [3], [9, 9], [11], [4]]
    keys = jax.random.split(key(1), len(prompts))
    config = SamplingConfig(max_new_tokens=12, top_p=0.9)
    expected = jax.device_get(sample(model, table, prompts, keys, config))
    order = np.random.default_rng(0).permutation(len(prompts))
    for slots, steps, rows, more in (
        (1, 5, 1, {}),
        (3, 1, 2, {}),
        (8, 16, 1, {}),
        (5, 3, 2, dict(refill=2, min_slots=1)),
    ):
        sizes = EngineConfig(slots=slots, size=16, steps=steps, prefill_rows=rows, **more)
        engine = Engine(model, config, sizes)
        engine.submit([prompts[i] for i in order], keys[order])
        for row in run(engine, table):
            at, n = order[row.id], row.length
            assert row.data['tokens'].tolist() == expected.tokens[at, :n].tolist()
            assert n == expected.length[at] and row.finish == expected.finish[at]
            np.testing.assert_array_equal(row.data['support'], expected.support[at, :n])
            np.testing.assert_allclose(
                row.data['logp_behavior'], expected.logp_behavior[at, :n], atol=2e-6
            )
        if slots == 1:
            assert engine.stats.useful == 1  # a refill waits for nobody


@pytest.mark.slow
def test_bit_for_bit_under_another_order_of_submission():
    model, params = tiny()
    prompts = [[5, 6], [3, 4, 7], [9], [10, 3, 5, 6], [3]]
    keys = jax.random.split(key(1), len(prompts))
    config = SamplingConfig(max_new_tokens=8, temperature=0.8, top_k=9, eos_id=EOS)
    found = []
    for order in (np.arange(5), np.array([3, 1, 4, 0, 2])):
        engine = Engine(model, config, SIZES)
        engine.submit([prompts[i] for i in order], keys[order])
        found.append({order[row.id]: row.data for row in run(engine, params)})
    for i in range(5):
        for name, x in found[0][i].items():
            np.testing.assert_array_equal(x, found[1][i][name], err_msg=name)


def test_a_group_prefills_its_prompt_once():
    model, params = tiny()
    prompts = [[5, 6, 7]] * 7 + [[3, 4]] * 4
    keys = jax.random.split(key(1), 11)
    config = SamplingConfig(max_new_tokens=5, temperature=0.8)
    engine = Engine(model, config, SIZES)
    engine.submit(prompts, keys)
    rows = run(engine, params)
    assert engine.stats.prefill_tokens == 3 + 2 and engine.stats.prompt_tokens == 7 * 3 + 4 * 2
    expected = sample(model, params, prompts, keys, config)
    got = to_rollout(rows, 8)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.routing, expected.routing)
    np.testing.assert_allclose(got.logp_behavior, expected.logp_behavior, atol=2e-5)
    # Case: replay padding: -1 where nothing was fed, never expert 0.
    fed = np.arange(8) < np.asarray(got.length)[:, None] - 1
    np.testing.assert_array_equal(np.all(np.asarray(got.routing) >= 0, axis=(2, 3)), fed)
    np.testing.assert_array_equal(np.all(np.asarray(got.routing) == -1, axis=(2, 3)), ~fed)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (got, expected))
    assert shapes[0] == shapes[1]  # field for field, None for None


def test_a_queue_that_ends_decodes_in_fewer_slots():
    # State of a constraint, limits and records follow a row into the smaller batch and back.
    table = np.full((5, V), -1)
    for i in range(5):
        table[i, i * 2 : i * 2 + 2] = (i + 1) % 5
    limits = np.array([3, 5, 2, 20, 4, 18, 3, 1, 6, 2, 12])
    prompts = [[3 + i % 5] for i in range(len(limits))]
    config, constraint = SamplingConfig(max_new_tokens=20), automaton(table)
    per_row = PerRow(max_new_tokens=limits)
    expected = sample(
        ENDLESS, noise(V), prompts, key(5), config, per_row=per_row, constraint=constraint
    )
    useful = []
    for more in ({}, dict(min_slots=2, refill=3, prefill_rows=2)):
        sizes = EngineConfig(slots=8, size=24, steps=4, **more)
        engine = Engine(ENDLESS, config, sizes, constraint=constraint)
        engine.submit(prompts, key(5), per_row=per_row)
        got = to_rollout(run(engine, noise(V), 0), 21)
        for name in ('tokens', 'mask', 'length', 'finish', 'support', 'version', 'segment'):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
        np.testing.assert_allclose(got.logp_behavior, expected.logp_behavior, atol=2e-6)
        useful.append(engine.stats.useful)
    assert useful[0] < 0.5 < useful[1]


@pytest.mark.parametrize('rows', [1, 2, 6])
def test_refills_that_wait_reach_every_row(rows):
    sizes = EngineConfig(slots=4, size=24, steps=2, refill=4, prefill_rows=4)
    engine = Engine(ENDLESS, SamplingConfig(max_new_tokens=7), sizes)
    per_row = PerRow(max_new_tokens=[7, 3, 5, 1, 6, 2][:rows])
    engine.submit([[3]] * rows, key(), per_row=per_row)
    assert [len(a) for a in answers(run(engine, chain(V)))] == [7, 3, 5, 1, 6, 2][:rows]


def test_new_parameters_act_between_two_steps():
    engine = Engine(ENDLESS, SamplingConfig(max_new_tokens=9), SIZES)
    engine.submit([[3], [5], [7], [0]], key())
    assert engine.step(chain(V, 1), version=4) == []
    rows = run(engine, chain(V, 2), version=5)
    # One token from the prefill and four steps under version 4, then the other chain.
    assert answers(rows)[0] == [4, 5, 6, 7, 8, 10, 0, 2, 4]
    assert rows[0].data['version'].tolist() == [-1] + [4] * 5 + [5] * 4
    assert answers(rows)[3] == [2, 4, 6, 8, 10, 0, 2, 4, 6]  # started after the swap
    assert rows[3].data['version'].tolist() == [-1] + [5] * 9


def test_new_parameters_compile_nothing_and_drop_old_prefixes():
    from policyopt.sampling import slots

    model, params = tiny()
    engine = Engine(model, SamplingConfig(max_new_tokens=6), SIZES)
    engine.submit([[5, 6, 7]] * 4, key())
    engine.step(params, 0)
    compiled = slots.decode._cache_size(), slots.prefill._cache_size()
    other = jax.tree.map(lambda x: x * 1.5, params)
    rows = run(engine, other, 1)
    assert compiled == (slots.decode._cache_size(), slots.prefill._cache_size())
    assert engine.stats.prefill_tokens == 6  # the fourth row's prompt ran again
    last = to_rollout(rows[3:], 24)
    gap = scoring.score(model, other, last).logp_new - last.logp_behavior
    assert np.abs(np.asarray(gap)).max() <= 2e-5


@pytest.mark.parametrize('when', [1, 2])
def test_abort_and_resume_lose_nothing(when):
    model, params = tiny()
    prompts = [[5, 6], [3, 4, 7], [9], [10, 3, 5, 6], [3]]
    config = SamplingConfig(max_new_tokens=11, temperature=0.8, top_k=9, eos_id=EOS)
    whole = Engine(model, config, SIZES)
    whole.submit(prompts, key(3))
    expected = run(whole, params)
    first = Engine(model, config, SIZES)
    first.submit(prompts, key(3))
    done = [row for _ in range(when) for row in first.step(params)]
    partial = first.abort()
    assert not first.busy and len(done) + len(partial) == 5
    assert any(row.drawn for row in partial) and any(not row.drawn for row in partial)
    second = Engine(model, config, SIZES)
    second.resume(partial)
    rows = sorted(done + run(second, params), key=lambda row: row.id)
    a, b = to_rollout(expected, 24), to_rollout(rows, 24)
    for name in ('tokens', 'mask', 'length', 'finish', 'segment', 'routing', 'support'):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_allclose(a.logp_behavior, b.logp_behavior, atol=2e-5)


def test_rows_that_cannot_be_resumed_here():
    first = Engine(ENDLESS, SamplingConfig(max_new_tokens=9), SIZES)
    first.submit([[3], [5] * 6], key())
    first.step(chain(V))
    partial = first.abort()
    small = Engine(ENDLESS, SamplingConfig(max_new_tokens=9), EngineConfig(slots=1, size=9))
    with pytest.raises(ValueError, match='row 1: it has 11 tokens; legal is 1 to 8'):
        small.resume(partial)
    assert not small.busy
    other = Engine(ENDLESS, SamplingConfig(max_new_tokens=9), SIZES)
    other.submit([[4]], key())
    with pytest.raises(ValueError, match='row 0: this engine has a row of that id'):
        other.resume(partial)
    first.resume(partial)  # none was lost
    assert answers(run(first, chain(V)))[0] == [4, 5, 6, 7, 8, 9, 10, 11, 0]


def test_a_constraint_survives_abort_and_resume():
    table = np.full((5, V), -1)
    for i in range(5):
        table[i, i * 2 : i * 2 + 2] = (i + 1) % 5
    config = SamplingConfig(max_new_tokens=9)
    constraint = automaton(table)
    expected = sample(ENDLESS, noise(V), [[3], [4]], key(5), config, constraint=constraint)
    engine = Engine(ENDLESS, config, SIZES, constraint=constraint)
    engine.submit([[3], [4]], key(5))
    engine.step(noise(V))
    partial = engine.abort()
    assert [row.drawn for row in partial] == [5, 5]
    engine.resume(partial)
    rows = run(engine, noise(V))
    np.testing.assert_array_equal(to_rollout(rows, 10).tokens, expected.tokens)


def test_prompt_longer_than_the_cache_ends_its_own_row():
    engine = EngineConfig(slots=2, size=6)
    config = SamplingConfig(max_new_tokens=3)
    with pytest.raises(RowErrors, match='row 1: prompt has 7 tokens; legal is 1 to 5') as error:
        sample_continuous(ENDLESS, chain(V), [[3], [4] * 7, [5]], key(), config, engine=engine)
    got = jax.device_get(error.value.rollout)
    assert got.tokens[[0, 2], 1:4].tolist() == [[4, 5, 6], [6, 7, 8]]
    assert got.finish.tolist() == [Finish.LENGTH, Finish.ERROR, Finish.LENGTH]
    assert got.mask[1].sum() == 0


def test_a_row_that_fills_the_cache_ends_there():
    engine = EngineConfig(slots=2, size=5, steps=8)
    config = SamplingConfig(max_new_tokens=30)
    got = sample_continuous(ENDLESS, chain(V), [[3], [4, 5, 6]], key(), config, engine=engine)
    assert got.length.tolist() == [5, 5] and got.finish.tolist() == [Finish.LENGTH] * 2


def test_the_first_rows_fix_the_fields():
    engine = Engine(ENDLESS, SamplingConfig(max_new_tokens=3), SIZES)
    engine.submit([[3]], key())
    with pytest.raises(ValueError, match='other fields of PerRow'):
        engine.submit([[3]], key(), per_row=PerRow(top_p=[0.5]))
    with pytest.raises(ValueError, match='an environment for each row'):
        engine.submit(None, key())
    assert answers(run(engine, chain(V))) == [[4, 5, 6]]  # unharmed
    for field in ('slots', 'size', 'steps', 'chunk'):
        with pytest.raises(ValueError, match=f'{field} is 0; legal is 1 or more'):
            EngineConfig(**{field: 0})
    with pytest.raises(ValueError, match='refill is 9; legal is up to slots, 8'):
        EngineConfig(slots=8, refill=9)
