"""The simulation of schedules: by hand, and against the real engines."""

import numpy as np
import pytest

from policyopt import staleness
from policyopt.simulation import Plan, lock_step, simulate
from tests.test_asynchronous import ENGINE, GROUP, PROMPTS, make, problems, take

ROWS = [[3], [9], [2], [4], [5], [1]]  # one row a group


def test_by_hand():
    """Two slots, groups of one row, two of them a take; the first token of a row costs no step."""
    plan = Plan(prompts=2, group_size=1, slots=2, steps=100)
    found = simulate(plan, lambda i: ROWS[i], 3)
    # 3 and 9: 8 steps; 2 and 4: 3 steps; 5 and 1: 4 steps.
    assert (found.time, found.slots, found.tokens) == (15, 30, 2 + 8 + 1 + 3 + 4)
    assert found.ages.tolist() == [24] and found.slot_idle == pytest.approx(12 / 30)
    # One version ahead, the third row goes on in the slot of the first.
    ahead = simulate(
        Plan(prompts=2, group_size=1, slots=2, steps=100, staleness=1, recompute=False),
        lambda i: (ROWS + [[1]] * 4)[i],
        2,
    )
    # Rows 0 to 3 are asked for. 2 steps: 3 ends; 2 comes and ends after 1 more: a take, of the
    # groups 0 and 2. Then 9 has 5 left and 4 begins with 3: both end within 5 steps.
    assert ahead.groups == [[0, 2], [1, 3]] and ahead.time == 3 + 5
    assert ahead.ages.tolist() == [3 + 2 + 5 + 4, 4] and ahead.dropped == 0


def test_lock_step_waits_for_the_longest():
    plan = Plan(prompts=2, group_size=1, slots=2, update=5.0)
    found = lock_step(plan, lambda i: ROWS[i], 3)
    assert found.time == 9 + 4 + 5 + 3 * 5 and found.slots == 2 * 18 and found.tokens == 24
    assert found.generator_idle == pytest.approx(1 - (24 + 2 * 15) / (2 * 33))


def test_idle_shares_of_devices_apart():
    """An update of 4 steps hides calls of 4; the trainer waits for the rest."""
    plan = Plan(
        prompts=1, group_size=1, slots=1, steps=4, staleness=1, ahead=1, apart=True, update=4
    )
    found = simulate(plan, lambda i: [9], 3)
    # 8 decode steps of each row, of which an update hides 4; recomputed rows draw one more token.
    assert found.tokens == 8 + 4 + 3 + 4 + 3 + 4 and found.time == 8 + 4 + 3 + 4 + 3 + 4
    assert found.trainer_idle == pytest.approx(1 - 12 / found.time)
    assert found.generator_idle == 0


@pytest.mark.parametrize(
    'settings',
    [
        dict(staleness=0),
        dict(staleness=2),
        dict(staleness=3, generators=2, late='drop', cache='keep', ahead=2),
        dict(staleness=1, ahead=1),
    ],
)
def test_slots_tokens_and_ages_are_those_of_the_real_engines(settings):
    """For the lengths that the engines' rows came to, every count is the same."""
    one, source, count = make(**settings), problems(), 5
    lengths, groups, ages = {}, [], 0
    dropped = [0]
    ended, close = one._ended, one._close

    def end(group, member, row):
        lengths.setdefault(group.number, {})[member] = row.length - row.prompt_length
        ended(group, member, row)

    def closed(gone, taken=0):
        groups.append([group.number for group in gone]) if taken else None
        dropped[0] += len(gone) - taken
        close(gone, taken)

    one._ended, one._close = end, closed
    for version in range(count):
        rollout = take(one, source, version).rollout
        found = staleness.ages(rollout.version, rollout.mask, version)
        ages = ages + np.array([(found == n).sum() for n in range(one.bound + 1)])
        one.run_ahead()
    made = one._generators

    settings = dict(settings)
    plan = Plan(
        prompts=PROMPTS,
        group_size=GROUP,
        slots=ENGINE.slots,
        steps=ENGINE.steps,
        recompute=settings.pop('cache', 'recompute') == 'recompute',
        **settings,
    )
    unfinished = 10**6
    found = simulate(
        plan,
        lambda i: [lengths.get(i, {}).get(member, unfinished) for member in range(GROUP)],
        count,
    )
    assert (found.groups, found.dropped) == (groups, dropped[0])
    assert found.ages.tolist() == ages.tolist()
    assert (found.slots, found.tokens) == (made.slots, made.tokens)
