"""What every sampler promises: one suite over the lock-step sampler and the slot engine."""

import functools
import inspect

import jax
import numpy as np
import pytest

from policyopt.sampling import (
    EngineConfig,
    Finish,
    PerRow,
    RowErrors,
    SamplingConfig,
    allowed_mask,
    automaton,
    pad_prompts,
    sample,
    sample_continuous,
)
from policyopt.sampling import decode as decode_lib
from policyopt.sampling import slots as slots_lib
from tests.bigram import Bigram, Config, chain, noise

V, EOS = 12, 2
MODEL = Bigram(Config(V, (EOS,)))
ENDLESS = Bigram(Config(V))
SAMPLERS = {
    'decode': sample,
    'engine': functools.partial(sample_continuous, engine=EngineConfig(slots=3, steps=4)),
}


@pytest.fixture(params=SAMPLERS)
def draw(request):
    return SAMPLERS[request.param]


def key(seed=0):
    return jax.random.key(seed)


def host(rollout):
    return jax.device_get(rollout)


def answers(rollout):
    rows = zip(rollout.tokens, rollout.prompt_length, rollout.length, strict=True)
    return [np.asarray(t)[int(a) : int(b)].tolist() for t, a, b in rows]


PROMPTS = [[5], [3, 4, 7], [9, 9], [10, 3, 5, 6], [3]]


def test_the_record_is_whole(draw):
    table = noise(V)
    config = SamplingConfig(max_new_tokens=9, temperature=0.8, top_k=7, top_p=0.9)
    got = host(draw(MODEL, table, PROMPTS, key(), config, version=3))
    at = np.arange(13)
    inside = (at >= got.prompt_length[:, None]) & (at < got.length[:, None])
    assert got.tokens.shape == (5, 13) and got.support.shape == (5, 13, 7)
    for row, prompt in enumerate(PROMPTS):
        assert got.tokens[row, : len(prompt)].tolist() == prompt
        assert got.prompt_length[row] == len(prompt)
    np.testing.assert_array_equal(got.mask, inside)
    np.testing.assert_array_equal(got.version, np.where(inside, 3, -1))
    np.testing.assert_array_equal(got.segment, inside)
    assert np.all(got.tokens[at >= got.length[:, None]] == 0)
    for x in (got.logp_behavior, got.logp_full):
        assert np.all(x[~inside] == 0) and np.all(x[inside] < 0)
    assert np.all(got.support[~inside] == -1)
    # Every number again, from the table.
    for row, t in np.argwhere(inside):
        logits = table[got.tokens[row, t - 1]].astype(np.float64) / 0.8
        full = logits - np.log(np.exp(logits).sum())
        kept = [i for i in got.support[row, t] if i >= 0]
        assert got.tokens[row, t] in kept and len(set(kept)) == len(kept) <= 7
        mass = np.log(np.exp(full[kept]).sum())
        token = got.tokens[row, t]
        np.testing.assert_allclose(got.logp_full[row, t], full[token], atol=2e-6)
        np.testing.assert_allclose(got.logp_behavior[row, t], full[token] - mass, atol=2e-6)
    for row, answer in enumerate(answers(got)):
        assert (EOS in answer) == (got.finish[row] == Finish.EOS)
        assert EOS not in answer[:-1]
        assert got.truncated[row] == (got.finish[row] == Finish.LENGTH) == (EOS not in answer)
    assert set(got.finish) == {Finish.EOS, Finish.LENGTH}  # both happen here


def test_eos_is_in_the_mask_even_where_it_is_the_pad_id(draw):
    # Case: [5, 6, eos] with pad id == eos id: mask [1, 1, 1], from lengths and never from ids.
    model = Bigram(Config(8, (0,)))
    table = chain(8)
    table[6] = 0
    table[6, 0] = 80
    got = host(draw(model, table, [[4]], key(), SamplingConfig(max_new_tokens=6)))
    assert answers(got) == [[5, 6, 0]]
    assert got.mask.tolist() == [[0, 1, 1, 1, 0, 0, 0]] and got.length.tolist() == [4]


def test_all_eos(draw):
    # Case: the first token drawn is EOS: one trained token, length 1.
    got = host(draw(MODEL, chain(V), [[1], [0, 1]], key(), SamplingConfig(max_new_tokens=4)))
    assert answers(got) == [[EOS], [EOS]]
    assert got.mask.sum(axis=1).tolist() == [1, 1] and not got.truncated.any()


def test_finish_reasons(draw):
    config = SamplingConfig(max_new_tokens=4, stop_ids=(6,))
    got = host(draw(MODEL, chain(V), [[11], [4], [6], [7]], key(), config))
    assert answers(got) == [[0, 1, 2], [5, 6], [7, 8, 9, 10], [8, 9, 10, 11]]
    assert got.finish.tolist() == [Finish.EOS, Finish.STOP, Finish.LENGTH, Finish.LENGTH]
    assert got.truncated.tolist() == [False, False, True, True]


def test_limits_and_stops_of_single_rows(draw):
    per_row = PerRow(max_new_tokens=[1, 3, 5], stop_ids=[[-1], [-1], [6]])
    config = SamplingConfig(max_new_tokens=5)
    got = host(draw(ENDLESS, chain(V), [[3], [3], [3]], key(), config, per_row=per_row))
    assert answers(got) == [[4], [4, 5, 6], [4, 5, 6]]
    assert got.finish.tolist() == [Finish.LENGTH, Finish.LENGTH, Finish.STOP]


def test_forced_eos_at_the_limit(draw):
    config = SamplingConfig(max_new_tokens=3, force_eos=True)
    got = host(draw(MODEL, chain(V), [[4], [0]], key(), config))
    assert answers(got) == [[5, 6, EOS], [1, EOS]]
    assert got.finish.tolist() == [Finish.LENGTH, Finish.EOS]
    assert got.truncated.tolist() == [True, False]
    assert got.logp_behavior[0, 3] == 0 and got.support[0, 3, :2].tolist() == [EOS, -1]


def test_eos_id_can_be_chosen_or_switched_off(draw):
    for eos_id, expected in ((-1, [1, 2, 3, 4]), (3, [1, 2, 3]), (None, [1, 2])):
        config = SamplingConfig(max_new_tokens=4, eos_id=eos_id)
        assert answers(draw(MODEL, chain(V), [[0]], key(), config)) == [expected]


def test_greedy_records_the_argmax_and_logp_0(draw):
    table = noise(V)
    config = SamplingConfig(max_new_tokens=5, temperature=0.0)
    got = host(draw(ENDLESS, table, PROMPTS, key(), config))
    drawn = got.mask > 0
    assert np.all(got.logp_behavior == 0) and got.support.shape[2] == 1
    np.testing.assert_array_equal(got.support[drawn][:, 0], got.tokens[drawn])
    before = np.roll(got.tokens, 1, axis=1)[drawn]
    np.testing.assert_array_equal(got.tokens[drawn], table[before].argmax(axis=1))


def test_each_token_has_a_number_of_its_own(draw):
    # Flat logits over 512 tokens: the token is the number, times 512, cut.
    keys = jax.random.split(key(6), 5)
    model, table = Bigram(Config(512)), np.zeros((512, 512), np.float32)
    got = host(draw(model, table, PROMPTS, keys, SamplingConfig(max_new_tokens=30)))
    numbers = np.array(
        [[jax.random.uniform(jax.random.fold_in(k, t)) for t in range(30)] for k in keys]
    )
    assert answers(got) == np.floor(512 * (numbers + 2.0**-24)).astype(int).tolist()
    assert len(np.unique(numbers)) == 150


OF_THE_ENGINE = ('engine', 'environments', 'done', 'ended')


def test_samplers_take_the_same_arguments():
    lock_step, engine = (inspect.signature(f).parameters for f in (sample, sample_continuous))
    own = {name: p for name, p in engine.items() if name not in OF_THE_ENGINE}
    assert list(own) == list(lock_step)
    for name, parameter in lock_step.items():
        assert (own[name].kind, own[name].default) == (parameter.kind, parameter.default)


def test_samplers_compile_nothing_from_step_to_step():
    counts = []
    engine = EngineConfig(slots=3, steps=4, refill=2, prefill_rows=2)
    for step in range(3):
        table, prompts = noise(V, step), pad_prompts([[3 + step], [4, 5], [6] * (step + 1)] * 3, 3)
        config = SamplingConfig(max_new_tokens=6, top_p=0.9 - step / 10, temperature=1 + step)
        rollouts = [
            sample(MODEL, table, prompts, key(step), config, version=step),
            sample_continuous(
                MODEL, table, prompts, key(step), config, version=step, engine=engine
            ),
        ]
        np.testing.assert_array_equal(*(r.tokens for r in rollouts))
        jitted = (decode_lib._decode, slots_lib.prefill, slots_lib.admit, slots_lib.decode)
        counts.append([f._cache_size() for f in jitted])
    assert counts[0] == counts[1] == counts[2]


def test_seeds(draw):
    # Case: two calls with different keys see different noise, the same key the same.
    config = SamplingConfig(max_new_tokens=8)
    table = noise(V)
    first, second, again = (draw(ENDLESS, table, PROMPTS, key(k), config) for k in (0, 1, 0))
    assert answers(first) != answers(second)
    assert answers(first) == answers(again)


def test_greedy_by_accident(draw):
    # Case: top_k unset is the full distribution.
    config = SamplingConfig(max_new_tokens=400)
    got = host(draw(ENDLESS, np.zeros((V, V), np.float32), [[1]] * 3, key(), config))
    assert got.support is None
    counts = np.bincount(got.tokens[got.mask > 0], minlength=V)
    assert np.all(counts > 50)
    np.testing.assert_allclose(got.logp_behavior[got.mask > 0], -np.log(V), atol=1e-6)


@pytest.mark.parametrize(
    'kwargs', [dict(temperature=0.1), dict(top_k=2), dict(top_p=0.4), dict(min_p=0.5)]
)
def test_every_knob_acts_alone(draw, kwargs):
    # Case: ignored knob.
    table = noise(V)
    plain = draw(ENDLESS, table, PROMPTS, key(), SamplingConfig(max_new_tokens=8))
    other = draw(ENDLESS, table, PROMPTS, key(), SamplingConfig(max_new_tokens=8, **kwargs))
    assert answers(plain) != answers(other)


def test_allowed_and_banned_tokens(draw):
    config = SamplingConfig(max_new_tokens=60, allowed_ids=(3, 4, 5, 9), banned_ids=(5,))
    table = noise(V)
    got = host(draw(MODEL, table, PROMPTS, key(), config))
    assert set(got.tokens[got.mask > 0]) == {3, 4, 9} and got.support is None
    allowed = allowed_mask(config, V)
    assert np.flatnonzero(allowed).tolist() == [3, 4, 9]
    row = np.flatnonzero(got.mask[0])[3]
    logits = np.where(allowed, table[got.tokens[0, row - 1]], -np.inf)
    expected = logits[got.tokens[0, row]] - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(got.logp_behavior[0, row], expected, atol=2e-6)


def test_tokens_of_single_rows_force_a_support(draw):
    allowed = np.zeros((3, V), bool)
    allowed[0, [3, 4]] = allowed[1, [5]] = allowed[2, [6, 7, 8]] = True
    config = SamplingConfig(max_new_tokens=30)
    got = host(draw(ENDLESS, noise(V), [[3]] * 3, key(), config, per_row=PerRow(allowed=allowed)))
    for row in range(3):
        assert set(answers(got)[row]) == set(np.flatnonzero(allowed[row]))
        kept = got.support[row, 5]
        assert set(kept[kept >= 0]) == set(np.flatnonzero(allowed[row]))


def test_a_constraint_sees_what_was_drawn(draw):
    # A digit (3 to 9), then 10, then a digit, ...; after the second 10 only EOS.
    table = np.full((4, V), -1)
    table[0, 3:10], table[1, 10], table[2, 3:10] = 1, 2, 3
    table[3, 10] = 0
    constraint = automaton(table)
    config = SamplingConfig(max_new_tokens=10, top_p=0.95)
    got = host(draw(ENDLESS, noise(V), PROMPTS, key(), config, constraint=constraint))
    for answer in answers(got):
        assert all(3 <= t <= 9 for t in answer[::2]) and set(answer[1::2]) == {10}
    assert got.support.max() < V


def test_a_dead_end_of_a_constraint_ends_its_own_row(draw):
    table = np.full((2, V), -1)
    table[0, 4:] = 0
    table[0, 7] = 1  # after token 7 nothing may follow
    config = SamplingConfig(max_new_tokens=6)
    with pytest.raises(RowErrors, match='row 0: no token may be drawn') as error:
        draw(ENDLESS, chain(V), [[5], [7]], key(), config, constraint=automaton(table))
    assert set(error.value.errors) == {0}
    got = host(error.value.rollout)
    assert answers(got) == [[6, 7], [8, 9, 10, 11] + answers(got)[1][4:]]
    assert got.finish[0] == Finish.ERROR and got.finish[1] == Finish.LENGTH


@pytest.mark.slow
def test_rows_do_not_know_each_other(draw):
    config = SamplingConfig(max_new_tokens=8, top_p=0.9)
    table, keys = noise(V), jax.random.split(key(4), 5)
    together = host(draw(MODEL, table, PROMPTS, keys, config))
    for row, prompt in enumerate(PROMPTS):
        alone = host(draw(MODEL, table, [prompt], keys[row : row + 1], config))
        n = int(alone.length[0])
        assert alone.tokens[0, :n].tolist() == together.tokens[row, :n].tolist()
        assert n == together.length[row]
        np.testing.assert_array_equal(alone.logp_behavior[0, :n], together.logp_behavior[row, :n])


def test_values_of_single_rows_compile_nothing():
    table = noise(V)
    config = SamplingConfig(max_new_tokens=3, top_p=0.9)
    sizes = []
    for top_p, heat in ((0.9, 1.0), (0.4, 0.3), (1.0, 0.0)):
        per_row = PerRow(top_p=[top_p, 0.7], temperature=[heat, 2.0])
        sample(ENDLESS, table, [[3], [4]], key(), config, per_row=per_row)
        sample(ENDLESS, table, [[3], [4]], key(), SamplingConfig(max_new_tokens=3, top_p=top_p / 2))
        sizes.append(decode_lib._decode._cache_size())
    assert len(set(sizes)) == 1


def test_no_forward_pass_is_run_whose_logits_nobody_reads():
    passes = []

    class Counted(Bigram):
        def extend(self, params, cache, tokens, count, **kwargs):
            jax.debug.callback(lambda n: passes.append(n), tokens.shape[1])
            return super().extend(params, cache, tokens, count, **kwargs)

    for limit, expected in ((1, 0), (4, 3)):
        passes.clear()
        got = sample(
            Counted(Config(V)), chain(V), [[3, 4]], key(), SamplingConfig(max_new_tokens=limit)
        )
        jax.block_until_ready(got)
        jax.effects_barrier()
        assert [int(n) for n in passes] == [2] + [1] * expected


# Errors by row.


def test_nan_logits_name_their_row(draw):
    table = chain(V)
    table[7, 3] = np.nan
    config = SamplingConfig(max_new_tokens=4)
    with pytest.raises(RowErrors, match='row 1: the logits are not finite') as error:
        draw(ENDLESS, table, [[3], [5], [8]], key(), config)
    got = host(error.value.rollout)
    assert answers(got) == [[4, 5, 6, 7], [6, 7], [9, 10, 11, 0]]
    assert got.finish.tolist() == [Finish.LENGTH, Finish.ERROR, Finish.LENGTH]
    assert np.isfinite(got.logp_behavior).all()
    recorded = host(draw(ENDLESS, table, [[3], [5], [8]], key(), config, on_error='record'))
    assert answers(recorded) == answers(got)


def test_all_tokens_banned(draw):
    allowed = np.ones((3, V), bool)
    allowed[1] = False
    with pytest.raises(RowErrors, match='row 1: no token may be drawn') as error:
        draw(
            ENDLESS,
            chain(V),
            [[3], [4], [5]],
            key(),
            SamplingConfig(max_new_tokens=2),
            per_row=PerRow(allowed=allowed),
        )
    assert answers(error.value.rollout) == [[4, 5], [], [6, 7]]
    with pytest.raises(ValueError, match='leave no token'):
        draw(ENDLESS, chain(V), [[3]], key(), SamplingConfig(2, allowed_ids=(3,), banned_ids=(3,)))


def test_empty_and_unknown_prompts_name_their_row(draw):
    config = SamplingConfig(max_new_tokens=2)
    with pytest.raises(RowErrors) as error:
        draw(ENDLESS, chain(V), [[3], [], [4, V]], key(), config)
    assert set(error.value.errors) == {1, 2}
    assert 'row 1: prompt has 0 tokens' in str(error.value)
    assert f'row 2: prompt has token {V}; legal is 0 to {V - 1}' in str(error.value)
    assert answers(error.value.rollout) == [[4, 5], [], []]
    with pytest.raises(ValueError, match='row 1: prompt has 3 tokens; legal is 1 to 2'):
        pad_prompts([[1], [1, 2, 3]], width=2)


def test_unknown_stop_token(draw):
    with pytest.raises(ValueError, match=f'stop_ids has {V}, which is no token; legal is 0 to 11'):
        draw(ENDLESS, chain(V), [[3]], key(), SamplingConfig(max_new_tokens=2, stop_ids=(V,)))
    per_row = PerRow(stop_ids=[[3], [99]])
    with pytest.raises(ValueError, match='row 1: stop_ids has 99'):
        draw(ENDLESS, chain(V), [[3]] * 2, key(), SamplingConfig(2), per_row=per_row)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(max_new_tokens=0), 'max_new_tokens is 0'),
        (dict(temperature=-1.0), 'temperature is -1.0'),
        (dict(temperature=1e-9), r'temperature is 1e-09; legal is 0 \(greedy\), or 1e-06 to 1e'),
        (dict(temperature=float('nan')), 'temperature is nan'),
        (dict(top_p=0.0), 'top_p is 0.0'),
        (dict(top_k=0), 'top_k is 0'),
        (dict(top_k=2.5), 'top_k is 2.5; legal is a whole number'),
        (dict(min_p=1.5), 'min_p is 1.5'),
        (dict(top_k=8, support_size=4), 'top_k is 8; legal is up to support_size, 4'),
        (dict(temperature=0.0, top_p=0.9), 'top_p is 0.9 and has no effect'),
    ],
)
def test_settings_that_cannot_act_are_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**(dict(max_new_tokens=4) | kwargs))


@pytest.mark.parametrize(
    ('config', 'per_row', 'message'),
    [
        (SamplingConfig(2, top_k=99), None, 'top_k is 99; legal is up to the 12'),
        (SamplingConfig(2, force_eos=True), None, 'force_eos is on, but there is no end'),
        (SamplingConfig(2, force_eos=True, eos_id=3, banned_ids=(3,)), None, 'may not be drawn'),
        (SamplingConfig(2), PerRow(temperature=[1.0, -2.0]), 'row 1: temperature is -2.0'),
        (SamplingConfig(2), PerRow(temperature=[1.0, 1e-9]), 'row 1: temperature is 1e-09; legal'),
        (SamplingConfig(2, temperature=0.0), PerRow(temperature=[0.0, 1.0]), 'has no effect'),
        (SamplingConfig(2), PerRow(top_p=[0.5]), r'top_p has shape \(1,\); legal is \(2,\)'),
        (SamplingConfig(2), PerRow(max_new_tokens=[1, 3]), 'row 1: max_new_tokens is 3'),
        (SamplingConfig(2, top_k=4), PerRow(top_k=[4, 5]), 'row 1: top_k is 5; legal is 0 to 4'),
    ],
)
def test_settings_are_checked_before_anything_runs(draw, config, per_row, message):
    with pytest.raises(ValueError, match=message):
        draw(ENDLESS, chain(V), [[3], [4]], key(), config, per_row=per_row)


def test_no_prompts(draw):
    with pytest.raises(ValueError, match='there are no prompts; legal is 1 row or more'):
        draw(ENDLESS, chain(V), [], key(), SamplingConfig(2))


def test_lengths_of_padded_prompts_name_their_row(draw):
    prompts = np.full((5, 2), 3), np.array([2, 3, 0, -1, 1])
    with pytest.raises(RowErrors) as error:
        draw(ENDLESS, chain(V), prompts, key(), SamplingConfig(max_new_tokens=2))
    assert set(error.value.errors) == {1, 2, 3}
    assert error.value.errors[1] == 'prompt has 3 tokens; legal is 1 to 2'
    assert answers(error.value.rollout) == [[4, 5], [], [], [], [4, 5]]


def test_raw_keys_are_errors(draw):
    with pytest.raises(TypeError, match='jax.random.key'):
        draw(ENDLESS, chain(V), [[3]], jax.random.PRNGKey(0), SamplingConfig(2))


def test_at_temperature_drops_what_has_no_effect():
    config = SamplingConfig(3, temperature=0.7, top_p=0.9, top_k=5, stop_ids=(3,))
    assert config.at_temperature(0.0) == SamplingConfig(3, temperature=0.0, stop_ids=(3,))
    assert config.at_temperature(1.0).top_p == 0.9
