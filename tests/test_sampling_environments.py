"""Turns with an environment: observations, rewards, failures, time limits, parking."""

import functools
import threading
import time

import jax
import numpy as np
import pytest

from policyopt import scoring
from policyopt.sampling import (
    Engine,
    EngineConfig,
    Finish,
    Reply,
    RowErrors,
    SamplingConfig,
    sample_continuous,
)
from tests.bigram import Bigram, Config, chain
from tests.engines import answers, run, tiny

V = 12
ENDLESS = Bigram(Config(V))
SIZES = EngineConfig(slots=3, size=24, steps=4)


def key(seed=0):
    return jax.random.key(seed)


class Scripted:
    """Answers its n-th turn with the n-th reply; a callable is called, an exception raised."""

    def __init__(self, prompt, *replies):
        self.prompt, self.replies, self.turns = prompt, list(replies), []

    def reset(self):
        return self.prompt() if callable(self.prompt) else self.prompt

    def step(self, tokens):
        self.turns.append(tokens)
        reply = self.replies.pop(0)
        return reply() if callable(reply) else reply


def test_observations_are_no_tokens_of_the_policy():
    # Case: token drift: the ids of observation and turn stay what they were, text has no part.
    env = Scripted([3], Reply([7, 7, 9], reward=0.25), Reply([]), Reply(done=True, reward=0.5))
    engine = EngineConfig(slots=2, size=24, steps=4, chunk=2)
    config = SamplingConfig(max_new_tokens=20, stop_ids=(5, 11))
    got = sample_continuous(
        ENDLESS, chain(V), None, key(), config, engine=engine, environments=[env]
    )
    assert env.turns == [[4, 5], [10, 11], [0, 1, 2, 3, 4, 5]]
    assert got.tokens[0, :14].tolist() == [3, 4, 5, 7, 7, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    assert got.mask[0, :14].tolist() == [0, 1, 1, 0, 0, 0] + [1] * 8
    assert got.segment[0, :14].tolist() == [0, 1, 1, 2, 2, 2, 3, 3] + [4] * 6
    assert got.finish.tolist() == [Finish.DONE] and got.rewards.tolist() == [0.75]
    rewarded = np.asarray(got.segment_rewards[0])
    assert np.flatnonzero(~np.isnan(rewarded)).tolist() == [2, 13]
    assert rewarded[[2, 13]].tolist() == [0.25, 0.5]


def test_first_ratio_is_one_over_turns():
    model, params = tiny()

    def environments():
        replies = ([9, 8, 7, 6, 5], [4], [])
        return [Scripted([5, 6 + i], *map(Reply, replies), Reply(done=True)) for i in range(4)]

    engine = EngineConfig(slots=3, size=48, steps=3, chunk=2, min_slots=1)
    config = SamplingConfig(
        max_new_tokens=24, temperature=0.7, top_k=12, top_p=0.9, stop_ids=(1, 2, 3, 4, 5)
    )
    got = sample_continuous(
        model, params, None, key(2), config, engine=engine, environments=environments()
    )
    scores = scoring.score(model, params, got, temperature=0.7)
    gap = np.abs(np.asarray(scores.logp_new - got.logp_behavior))[np.asarray(got.mask) > 0]
    assert int(got.segment.max()) >= 3  # turns really happened
    assert np.median(gap) <= 2e-6 and gap.max() <= 2e-5
    inside = np.arange(48) < np.asarray(got.length)[:, None] - 1
    assert np.all(np.asarray(got.routing)[inside] >= 0)  # observations have their experts too


def test_failures_of_an_environment_end_its_own_row():
    def hang():
        time.sleep(30)

    def fail():
        raise KeyError('no such tool')

    stop = SamplingConfig(max_new_tokens=12, stop_ids=(6,))
    good = Scripted([4], Reply([9]), Reply(done=True, reward=1.0))
    environments = [
        Scripted([3], fail),
        Scripted([4], hang),
        good,
        Scripted(fail),
        Scripted([5], lambda: 'text'),
        Scripted([5], Reply([V])),
        Scripted('text'),
        Scripted(hang),
        Scripted([5], Reply(reward='much')),  # type: ignore[arg-type]
        Scripted([5], Reply(reward=np.inf)),
        Scripted([5], Reply(done=np.ones(2))),  # type: ignore[arg-type]
        Scripted([5], Reply(None)),  # type: ignore[arg-type]
        Scripted([5], Reply([3] * 9)),
        Scripted([5], lambda: Reply(range(10**12))),
    ]
    engine = Engine(
        ENDLESS, stop, EngineConfig(slots=3, size=24, steps=4, time_limit=1.0, observation=8)
    )
    engine.submit(None, key(), environments=environments)
    started = time.monotonic()
    rows = run(engine, chain(V))
    assert time.monotonic() - started < 29
    errors = [row.error for row in rows]
    assert errors[0] == "environment raised KeyError: 'no such tool'" == errors[3]
    assert errors[1] == 'environment took longer than 1 s' == errors[7]
    assert errors[2] is None and rows[2].finish == Finish.DONE and rows[2].reward == 1
    assert errors[4] == 'environment returned str; legal is a Reply'
    assert errors[5] == 'environment gave a token outside 0 to 11'
    assert errors[6] == "environment gave 'text'; legal are token ids"
    assert errors[8] == "environment gave reward 'much'; legal is a number, NaN for none"
    assert errors[9] == 'environment gave reward inf; legal is a number, NaN for none'
    assert errors[10].startswith('environment gave done array')
    assert errors[11] == 'environment gave None; legal are token ids'
    assert errors[12] == 'environment gave 9 tokens; legal is up to 8'
    assert errors[13] == 'environment gave 1000000000000 tokens; legal is up to 8'
    finish = {Finish.ENV_LATE: (1, 7), Finish.DONE: (2,), Finish.ENV_OVERFLOW: (12, 13)}
    for i, row in enumerate(rows):
        assert row.finish == next((f for f, at in finish.items() if i in at), Finish.ENV_FAILED)
        if row.turns:
            last = row.turns[-1]
            assert (last.finish, last.error, last.asked) == (row.finish, row.error, True)
    assert answers(rows)[0] == [4, 5, 6]  # what it drew before is kept
    assert [t[:4] for t in rows[2].turns] == [
        ((5, 6), (9,), pytest.approx(np.nan, nan_ok=True), Finish.RUNNING),
        ((10, 11, 0, 1, 2, 3, 4, 5, 6), (), 1.0, Finish.DONE),
    ]
    stats = engine.stats
    assert (stats.failures, stats.timeouts, stats.overflows, stats.errors) == (9, 2, 2, 13)
    assert stats.calls == 14 + 14 - 3 + 1


def test_environments_run_in_parallel():
    def slow():
        time.sleep(0.4)
        return Reply(done=True)

    config = SamplingConfig(max_new_tokens=8, stop_ids=(6,))
    environments = [Scripted([3], slow) for _ in range(6)]
    engine = Engine(ENDLESS, config, EngineConfig(slots=6, size=16, workers=6))
    engine.submit(None, key(), environments=environments)
    engine.step(chain(V))  # compiles
    started = time.monotonic()
    rows = run(engine, chain(V))
    assert time.monotonic() - started < 6 * 0.4
    assert all(row.finish == Finish.DONE for row in rows)


@pytest.mark.parametrize(
    ('tokens', 'finish'), [(12, Finish.LENGTH), (16, Finish.LENGTH), (17, Finish.ENV_OVERFLOW)]
)
def test_an_observation_without_room_ends_the_row(tokens, finish):
    env = Scripted([3], Reply([9] * tokens))
    config = SamplingConfig(max_new_tokens=8, stop_ids=(6,))
    engine = Engine(ENDLESS, config, EngineConfig(slots=1, size=16))
    engine.submit(None, key(), environments=[env])
    (row,) = run(engine, chain(V))
    assert row.finish == finish and row.length == 4


def drawn(held, rows=14, **sizes):
    """Rows of two turns, of which the first `held` get answers when the others are over."""
    model, params = tiny()
    gate, over = threading.Event(), 0

    def wait():
        assert gate.wait(timeout=100)
        return Reply([9, 8])

    environments = [
        Scripted([5, 6 + i], wait if i < held else Reply([9, 8]), Reply(done=True, reward=float(i)))
        for i in range(rows)
    ]
    config = SamplingConfig(
        max_new_tokens=12, temperature=0.7, top_k=12, stop_ids=(1, 2, 3, 4, 5, 6, 7, 8)
    )
    size = EngineConfig(slots=2, size=48, steps=3, chunk=2, time_limit=200, grace=0.1, **sizes)
    engine = Engine(model, config, size)
    engine.submit([env.prompt for env in environments], key(2), environments=environments)
    found = []
    while engine.busy:
        found += engine.step(params)
        over = sum(row.id >= held for row in found)
        if over == rows - held:
            gate.set()
    return engine.stats, sorted(found, key=lambda row: row.id)


def test_rows_that_wait_leave_their_slots_and_keep_their_bits():
    """Slow rows have both slots; the others end before these have their answers."""
    quick, expected = drawn(held=0, parked=0)
    slow, rows = drawn(held=2)
    kept, same = drawn(held=1, parked=0)  # with two, it would stand still
    assert quick.parked == kept.parked == 0 and slow.parked >= 2
    assert slow.useful > 1.3 * kept.useful
    assert kept.waiting_slots > 0.4 * kept.decode_slots > 2 * slow.waiting_slots
    for others in (rows, same):
        for row, want in zip(others, expected, strict=True):
            assert row.place is None and row.finish == want.finish
            assert repr([t[:5] for t in row.turns]) == repr([t[:5] for t in want.turns])
            for name, x in want.data.items():
                np.testing.assert_array_equal(row.data[name], x, err_msg=name)
    assert sum(len(row.turns) == 2 for row in rows) > 6


def test_abort_keeps_what_environments_answer():
    config = SamplingConfig(max_new_tokens=12, stop_ids=(6,))
    env = Scripted([4], Reply([9]), Reply(done=True, reward=1.0))
    engine = Engine(ENDLESS, config, EngineConfig(slots=1, size=24, steps=2))
    engine.submit(None, key(), environments=[env])
    while not env.turns:
        engine.step(chain(V))
    engine.resume(engine.abort())
    (row,) = run(engine, chain(V))
    assert row.data['tokens'].tolist() == [4, 5, 6, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6]
    assert row.data['segment'].tolist() == [0, 1, 1, 2] + [3] * 9
    assert row.reward == 1 and env.turns[1] == [10, 11, 0, 1, 2, 3, 4, 5, 6]


def test_errors_of_environments_can_be_recorded():
    def fail():
        raise ValueError('broken')

    environments = [Scripted([3], fail), Scripted([3], Reply(done=True, reward=2.0))]
    config = SamplingConfig(max_new_tokens=12, stop_ids=(6,))
    draw = functools.partial(
        sample_continuous, ENDLESS, chain(V), None, key(), config, engine=SIZES
    )
    with pytest.raises(RowErrors, match='row 0: environment raised ValueError: broken'):
        draw(environments=environments)
    environments = [Scripted([3], fail), Scripted([3], Reply(done=True, reward=2.0))]
    got = draw(environments=environments, on_error='record')
    assert got.finish.tolist() == [Finish.ENV_FAILED, Finish.DONE]
    assert np.isnan(got.rewards[0]) and got.rewards[1] == 2
