"""Answers in steps and their rewards; rewards beside their truth; what is written of them."""

import math

import numpy as np
import pytest

from policyopt import drawing, rewards
from policyopt.data.tokenizer import CharTokenizer, ascii_tokenizer
from policyopt.rewards import Case, Ledger, Local, Part, Round, Step, StepsConfig, Verdict
from policyopt.rewards.steps import divide, make_case, total_of
from policyopt.rewards.verdict import from_json, to_json
from policyopt.types import Rollout

NAN = math.nan
ASCII = ascii_tokenizer()


def fixed(value, reason='', right=None):
    return lambda text, tokens, example: Verdict(value, reason, right)


LINES = StepsConfig()


def steps(text, config=LINES, eos=False):
    ids = ASCII.encode(text) + [ASCII.eos_id] * eos
    return divide(config, ids, ASCII.decode)


def test_a_marker_ends_a_step_with_the_token_that_completes_it():
    assert steps('ab\nc\nd') == [Step('ab\n', 2), Step('c\n', 4), Step('d', 5)]
    assert steps('ab\nc\n', eos=True) == [Step('ab\n', 2), Step('c\n', 5)]
    assert steps('ab\n\n\nc') == [Step('ab\n\n\n', 4), Step('c', 5)]
    assert steps('\n\nab') == [Step('\n\n', 1), Step('ab', 3)]
    assert steps('ab', eos=True) == [Step('ab', 2)]
    assert steps('') == []
    assert steps('', eos=True) == [Step('', 0)]
    # Of two characters, and of two tokens.
    assert steps('a\nb\n\nc', StepsConfig('\n\n')) == [Step('a\nb\n\n', 4), Step('c', 5)]


def test_ids_may_end_a_step_too():
    semicolon = ASCII.encode(';')[0]
    both = StepsConfig('\n', (semicolon,))
    assert steps('a;b\nc', both) == [Step('a;', 1), Step('b\n', 3), Step('c', 4)]
    assert steps('a;b\nc', StepsConfig(None, (semicolon,))) == [Step('a;', 1), Step('b\nc', 4)]


def test_a_marker_inside_of_wide_tokens():
    """Tokens of several characters: two markers in one, and a marker in two."""
    pieces = {1: 'x. ', 2: 'y\n', 3: '\nz\n\nw', 4: 'v'}

    def decode(ids):
        return ''.join(pieces[i] for i in ids)

    found = divide(StepsConfig('\n\n'), [1, 2, 3, 4, 4], decode)
    assert found == [Step('x. y\n\nz\n\nw', 2), Step('vv', 4)]


def test_steps_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match='steps.marker is empty'):
        StepsConfig('')
    with pytest.raises(ValueError, match='neither marker nor tokens'):
        StepsConfig(None)
    with pytest.raises(ValueError, match="total='first' is not known"):
        rewards.by_step(fixed(1.0), total='first')


class Item:
    entry, prompt, ids = {'answer': '3'}, 'q', (5, 6)


def case(text):
    return make_case(StepsConfig(), ASCII.decode)(Item, ASCII.encode(text))


def counting(text, tokens, example):
    """What a step is told: its own text and ids, and the text before it."""
    assert ASCII.decode(tokens) == text and 'steps' not in example and example['answer'] == '3'
    return Verdict(len(text) + 100 * len(example['before']), 'counted')


def test_each_step_is_judged_as_an_answer_of_its_own():
    made = case('ab\nc\nd')
    assert made.prompt == 'q' and made.prompt_ids == (5, 6)
    found = rewards.judged(rewards.by_step(counting), made)
    assert found == Verdict(3 + 302 + 501, 'stepped', steps=(3.0, 302.0, 501.0))
    found = rewards.judged(rewards.by_step(counting, fixed(0.5, 'fine', True)), made)
    assert found == Verdict(0.5, 'fine', True, (), (3.0, 302.0, 501.0))
    for total, value in (('mean', 806 / 3), ('min', 3.0), ('last', 501.0)):
        assert rewards.judged(rewards.by_step(counting, total=total), made).value == value
    assert math.isnan(total_of([NAN], 'sum')) and total_of([1, NAN, 4], 'mean') == 2.5


def test_a_step_without_a_reward_has_none_and_one_that_fails_costs_the_answer():
    def silent(text, tokens, example):
        return Verdict(NAN, 'none') if text == 'c\n' else Verdict(1.0)

    found = rewards.judged(rewards.by_step(silent), case('ab\nc\nd'))
    assert found.value == 2 and found.steps[0] == 1 and math.isnan(found.steps[1])

    def failing(text, tokens, example):
        return 1 / (text != 'c\n')

    found = rewards.judged(rewards.by_step(failing), case('ab\nc\nd'))
    assert found.reason.startswith('raised: in step 1: ZeroDivisionError') and found.steps == ()
    found = rewards.judged(rewards.by_step(counting), Case('ab', (), {}))
    assert 'answers are not divided: set rollout.steps' in found.reason


def test_rewards_of_steps_add_up_in_a_sum():
    parts = {
        'a': lambda *case: Verdict(1.0, 'a', steps=(1.0, NAN, NAN)),
        'b': lambda *case: Verdict(2.0, 'b', steps=(10.0, 20.0, NAN)),
        'c': fixed(4.0, 'c'),
    }
    reward = rewards.weighted_sum(parts, {'a': 2.0, 'b': 0.5, 'c': 1.0})
    found = rewards.judged(reward, case('x'))
    assert found.value == 7 and found.steps[:2] == (7.0, 10.0) and math.isnan(found.steps[2])
    numbers = rewards.describe([found, Verdict(1.0), Verdict(NAN, 'none', steps=(9.0,))])
    assert numbers['rewards/steps'] == 3 and numbers['rewards/step_reward'] == 8.5


def test_what_a_reward_stands_for_is_written_beside_it():
    reward = rewards.audited(fixed(2.5, 'scored'), fixed(1.0, 'wrong', False))
    found = rewards.judged(reward, case('x'))
    parts = (Part('proxy', 2.5, 'scored'), Part('truth', 1.0, 'wrong'), Part('gap', 1.5, ''))
    assert found == Verdict(2.5, 'scored', False, parts)
    numbers = rewards.describe([found, found])
    assert numbers['rewards/gap'] == 1.5 and numbers['rewards/truth'] == 1
    assert numbers['rewards/truth/wrong'] == 2 and 'rewards/gap/other' not in numbers
    failed = rewards.audited(fixed(1.0), fixed(NAN, 'timed_out: 5 s'))
    assert rewards.judged(failed, case('x')).reason == 'timed_out: in truth: 5 s'


def test_rewards_of_steps_are_found_again(tmp_path):
    reward = rewards.by_step(lambda text, *rest: Verdict(NAN if text == 'c\n' else 1 / 3))
    page = Ledger(tmp_path).page('rl', 1, 1)
    with Local(reward) as judge:
        judging = Round(judge, page)
        judging.add([0], [case('ab\nc\nd')])
        first = judging.verdicts(1)
    with Local(fixed(9.0)) as judge:
        judging = Round(judge, Ledger(tmp_path).page('rl', 1, 1))
        judging.add([0], [case('ab\nc\nd')])
        assert repr(judging.verdicts(1)) == repr(first)
    assert len(first[0].steps) == 3
    plain = Verdict(1.0, 'right', True)
    assert len(to_json(plain)) == 4 and from_json(to_json(plain)) == plain
    assert rewards.judged(lambda *c: Verdict(1.0, steps=(math.inf,)), case('x')).kind == 'nonsense'


def test_rows_get_their_segments_and_the_rewards_at_their_ends():
    zeros = np.zeros((4, 7), np.int32)
    start = np.array([2, 1, 1, 1], np.int32)
    rolled = Rollout(tokens=zeros, mask=zeros, prompt_length=start)
    verdicts = [
        Verdict(3.0, steps=(1.0, 2.0)),
        Verdict(0.5, 'no reward of steps'),
        Verdict(NAN, 'raised'),
        Verdict(NAN, 'not_sampled'),
    ]
    got = drawing.in_steps(rolled, [[1, 3], [0, 2, 4], [0], []], verdicts)
    expected = np.full((4, 7), NAN, np.float32)
    expected[0, 3], expected[0, 5], expected[1, 5] = 1, 2, 0.5
    np.testing.assert_array_equal(got.segment_rewards, expected)
    assert got.segment[0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert got.segment[1].tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_single_characters_are_enough_for_a_tokenizer():
    tokenizer = CharTokenizer('ab;')
    made = make_case(StepsConfig(';'), tokenizer.decode)(Item, [2, 4, 3, 1])
    assert made.example['steps'] == [Step('a;', 1), Step('b', 3)] and made.text == 'a;b'
