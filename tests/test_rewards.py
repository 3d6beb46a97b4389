"""What rewards say: values, reasons, compositions, forms, counts; how they are named and kept."""

import json
import math
import threading

import numpy as np
import pytest

from policyopt import rewards, shaping
from policyopt.rewards import Case, Local, Part, Round, Spec, Verdict
from policyopt.rewards.ledger import Ledger
from policyopt.rewards.verdict import from_json, kind_of, to_json

NAN = float('nan')


def say(reward, text='', tokens=(), **example):
    return reward(text, tokens, example)


def fixed(value, reason='', right=None):
    return lambda text, tokens, example: Verdict(value, reason, right)


def exact(text, example):
    return float(text == example['answer'])


# ============================================================================ verdicts


@pytest.mark.parametrize(
    'found', [None, 'full', [1.0], np.ones(2), np.inf, -math.inf, 1j, (1.0, 'ok'), True]
    + [Verdict('1'), Verdict(1.0, None), Verdict(1.0, 'ok', 2)],
)  # fmt: skip
def test_nonsense_leaves_the_row_without_a_reward(found):
    verdict = rewards.judged(lambda *case: found, Case('', (), {}))
    assert math.isnan(verdict.value) and verdict.kind == 'nonsense' and not verdict.positive


@pytest.mark.parametrize(
    ('error', 'kind'),
    [(KeyError('x'), 'raised'), (MemoryError(), 'out_of_memory'), (SystemExit(0), 'raised')],
)
def test_what_is_raised_is_a_reason(error, kind):
    def reward(text, tokens, example):
        raise error

    verdict = rewards.judged(reward, Case('', (), {}))
    assert math.isnan(verdict.value) and verdict.kind == kind
    assert len(rewards.judged(reward, Case('', (), {})).reason) <= 200


def test_numbers_stand_for_verdicts():
    for legal in (1, 1.0, np.float32(1), np.int64(1)):
        assert rewards.judged(lambda *c, x=legal: x, Case('', (), {})) == Verdict(1.0)
    verdict = rewards.judged(
        lambda *c: Verdict(np.float32(0.5), 'x' * 500, np.bool_(True)), ('',) * 3
    )
    assert verdict == Verdict(0.5, 'x' * 200, True)


@pytest.mark.parametrize(
    ('verdict', 'positive'),
    [
        (Verdict(1.0), True),
        (Verdict(0.0), False),
        (Verdict(-1.0, '', True), True),
        (Verdict(0.1, '', False), False),
        (Verdict(NAN, '', True), False),
        (Verdict(NAN), False),
    ],
)
def test_what_counts_as_right(verdict, positive):
    assert verdict.positive is positive
    assert repr(from_json(json.loads(json.dumps(to_json(verdict))))) == repr(verdict)


def test_verdicts_as_json_keep_every_bit():
    verdict = Verdict(0.1 + 0.2, 'ok: x', True, (Part('a', 1 / 3, 'why'),))
    assert from_json(json.loads(json.dumps(to_json(verdict)))) == verdict
    for values in ([1, 'a', None], ['1', '', None, []], [1, 2, None, []], 3, [1, '', None, [[1]]]):
        with pytest.raises((ValueError, TypeError)):
            from_json(values)


def test_reasons_are_counted():
    part = (Part('form', 0.1, 'ok'), Part('answer', 0.9, 'right'))
    other = (Part('form', 0.1, 'ok'), Part('answer', 0.0, 'wrong: 3'))
    found = rewards.describe(
        [Verdict(1.0, 'right')] * 3
        + [Verdict(NAN, 'timed_out: after 5 s')] * 2
        + [Verdict(1.0, '', True, part), Verdict(0.1, '', False, other)]
    )
    assert found == {
        'rewards/timed_out': 2.0,
        'rewards/raised': 0.0,
        'rewards/crashed': 0.0,
        'rewards/out_of_memory': 0.0,
        'rewards/nonsense': 0.0,
        'rewards/right': 3.0,
        'rewards/form': pytest.approx(0.1),
        'rewards/form/ok': 2.0,
        'rewards/answer': pytest.approx(0.45),
        'rewards/answer/right': 1.0,
        'rewards/answer/wrong': 1.0,
    }
    many = rewards.describe([Verdict(0.0, f'r{i:02d}') for i in range(30)])
    assert many['rewards/other'] == 10 and many['rewards/r00'] == 1 and 'rewards/r29' not in many
    assert kind_of('') == kind_of('?!') == 'other' and kind_of('no_box: 3') == 'no_box'


# ============================================================================ compositions


def test_graded_is_full_marks_or_nothing():
    reward = rewards.graded(exact, right=2.0, wrong=-1.0)
    assert say(reward, 'a', answer='a') == Verdict(2.0, 'right', True)
    assert say(reward, 'b', answer='a') == Verdict(-1.0, 'wrong', False)
    partial = rewards.graded(lambda text, example: 0.99)
    assert say(partial) == Verdict(0.0, 'wrong', False)
    assert say(rewards.graded(lambda t, e: 0.5, full=0.5)).value == 1
    for mark in (None, NAN, 'full', [1.0], 1j):
        verdict = say(rewards.graded(lambda t, e, m=mark: m))
        assert math.isnan(verdict.value) and verdict.kind == 'nonsense'
    with pytest.raises(ValueError, match='right is 0.0; legal is above wrong, 1.0'):
        rewards.graded(exact, right=0.0, wrong=1.0)


def test_weighted_sum_keeps_reasons():
    parts = {'a': fixed(1.0, 'ok'), 'b': fixed(0.5, 'half: way', True), 'c': fixed(-2.0, 'c')}
    reward = rewards.weighted_sum(parts, {'a': 0.1, 'b': 0.9, 'c': 1.0})
    verdict = say(reward)
    assert verdict.value == pytest.approx(0.1 + 0.45 - 2) and verdict.right is True
    want = (Part('a', 0.1, 'ok'), Part('b', 0.45, 'half: way'), Part('c', -2.0, 'c'))
    assert verdict.parts == want
    outer = say(rewards.weighted_sum({'x': reward, 'y': fixed(1, 'y', False)}, {'x': 2, 'y': 1}))
    assert outer.value == pytest.approx(2 * verdict.value + 1) and outer.right is False
    assert [p.name for p in outer.parts] == ['a', 'b', 'c', 'y']
    assert [p.value for p in outer.parts] == pytest.approx([0.2, 0.9, -4, 1])
    assert say(rewards.weighted_sum({'a': fixed(1.0)}, {'a': 1.0})).right is None


def test_a_part_that_fails_leaves_the_row_without_a_reward():
    def raises(text, tokens, example):
        raise KeyError(text)

    reward = rewards.weighted_sum({'a': fixed(1.0), 'b': raises}, {'a': 1, 'b': 1})
    verdict = say(reward, 'x')
    assert math.isnan(verdict.value) and verdict.reason == "raised: in b: KeyError: 'x'"
    assert verdict.kind == 'raised'
    undecided = rewards.weighted_sum({'a': fixed(NAN, 'no_gold')}, {'a': 1})
    assert say(undecided).reason == 'no_gold: in a'
    assert say(rewards.gated(raises, fixed(1.0)), 'x').reason == "raised: in gate: KeyError: 'x'"
    assert math.isnan(say(rewards.gated(fixed(1.0), raises)).value)
    assert math.isnan(say(rewards.all_of({'a': fixed(1.0), 'b': raises})).value)


def test_gates():
    reward = rewards.gated(fixed(1.0, 'ok'), fixed(0.7, 'fine', True))
    assert say(reward) == Verdict(0.7, 'fine', True)
    closed = rewards.gated(fixed(0.0, 'no_box'), lambda *c: pytest.fail('judged'), otherwise=-0.5)
    assert say(closed) == Verdict(-0.5, 'no_box', False)
    both = rewards.all_of({'a': fixed(1.0, 'ok'), 'b': fixed(0.0, 'no_box'), 'c': fixed(0.0, 'c')})
    assert say(both) == Verdict(0.0, 'no_box')
    assert say(rewards.all_of({'a': fixed(2.0, 'x'), 'b': fixed(3.0, 'y')})) == Verdict(1.0, 'y')


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: rewards.weighted_sum({}, {}), 'parts is empty'),
        (lambda: rewards.weighted_sum({'a': fixed(1)}, {'b': 1}), 'has no `'),
        (lambda: rewards.weighted_sum({'a': fixed(1)}, {'a': '1'}), 'must be a number'),
        (lambda: rewards.weighted_sum(part={}), 'Did you mean `parts`'),
        (lambda: rewards.all_of({}), 'parts is empty'),
        (lambda: rewards.overlong(10, 11), r'cache must lie in \[1, 10\]'),
    ],
)
def test_what_can_not_be_composed(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


# ============================================================================ forms

GOOD = '<think>so</think> 4'


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        (GOOD, 'ok'),
        (f'\n {GOOD}', 'ok'),
        ('4', 'no_think'),
        ('', 'no_think'),
        ('<think>so', 'open_think'),
        ('so</think>4', 'open_think'),
        ('</think>so<think>4', 'open_think'),
        (GOOD * 2, 'many_think'),
        ('<think><think>so</think>4', 'many_think'),
        ('well <think>so</think>4', 'text_before_think'),
        ('<think> \n</think>4', 'nothing_thought'),
        ('<think>so</think> \n', 'nothing_after_think'),
    ],
)
def test_think_block(text, reason):
    assert say(rewards.think_block(), text) == Verdict(float(reason == 'ok'), reason)


def test_think_block_that_the_prompt_opens():
    reward = rewards.think_block(opened=True)
    assert say(reward, 'so</think>4').reason == 'ok'
    assert say(reward, '<think>so</think>4').reason == 'many_think'
    assert say(rewards.think_block('[T]', '[/T]'), '[T]so[/T]4').value == 1


@pytest.mark.parametrize(
    ('text', 'reason', 'content'),
    [
        (r'so \boxed{4}', 'ok', ['4']),
        (r'\boxed{\frac{1}{2}} or \boxed {x^{2}}', 'ok', [r'\frac{1}{2}', 'x^{2}']),
        (r'\boxed{\boxed{3}}', 'ok', [r'\boxed{3}']),
        (r'\boxed{\{1, 2\}}', 'ok', [r'\{1, 2\}']),
        (r'\boxed{4', 'open_box', []),
        (r'\boxed{\boxed{4}', 'ok', ['4']),
        (r'\boxed{a\}', 'open_box', []),
        (r'\boxed 4', 'open_box', []),
        (r'\boxed{ }', 'empty_box', [' ']),
        ('4', 'no_box', []),
        (r'}}{\boxed{5}}', 'ok', ['5']),
    ],
)
def test_boxed(text, reason, content):
    assert say(rewards.boxed(), text) == Verdict(float(reason == 'ok'), reason)
    assert rewards.formats.boxes(text) == content


def test_boxes_count_after_the_thought():
    text = r'<think>\boxed{1} \boxed{2}</think> \boxed{3}'
    assert say(rewards.boxed(single=True), text).reason == 'ok'
    assert say(rewards.boxed(single=True), text + r'\boxed{4}').reason == 'many_boxes'
    assert say(rewards.boxed(), r'<think>\boxed{1}</think> 1').reason == 'no_box'
    assert rewards.formats.boxes(r'\boxed{' * 20_000) == []  # in no time


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('```python\nx\n```', 'ok'),
        ('so\n```C++ \nx\n```\nand\n```python\ny\n```\ndone', 'ok'),
        ('```\nx\n```', 'no_language'),
        ('```python\n \n```', 'empty_fence'),
        ('```python\nx', 'open_fence'),
        ('```python\nx\n```\n```python', 'open_fence'),
        ('x ``` y ``` z', 'no_fence'),
        ('<think>\n```python\nx\n```\n</think>\nx', 'no_fence'),
        ('```python\r\nx\r\n```', 'ok'),
    ],
)
def test_code_fence(text, reason):
    assert say(rewards.code_fence(), text) == Verdict(float(reason == 'ok'), reason)


def test_code_fence_of_a_language():
    assert say(rewards.code_fence('Python'), '```python\nx\n```').reason == 'ok'
    assert say(rewards.code_fence('python'), '```ruby\nx\n```').reason == 'other_language'


def test_overlong_is_the_ramp_of_shaping():
    """L 20, c 4: lengths 16, 18, 20, 21 give 0, -.5, -1, -1; in tokens, whatever the text."""
    reward = rewards.overlong(20, 4, weight=0.1)
    for length in range(30):
        verdict = say(reward, 'x' * 100, range(length))
        want = 0.1 * float(shaping.overlong_penalty(np.float32(length), 20, 4))
        assert verdict.value == pytest.approx(want, abs=1e-7)
    found = [say(rewards.overlong(20, 4), tokens=range(n)) for n in (16, 18, 20, 21)]
    assert [v.value for v in found] == [0, -0.5, -1, -1]
    assert [v.reason for v in found] == ['short', 'long', 'too_long', 'too_long']


# ============================================================================ by name


def test_rewards_are_read_from_configs():
    scorer = Spec('policyopt.rewards.scorers.exact')
    spec = rewards.read('graded', dict(wrong=-1.0), scorer)
    assert say(rewards.build(spec), '4.0', answer='4') == Verdict(1.0, 'right', True)
    assert say(rewards.build(spec), '5', answer='4').value == -1
    parts = {'answer': 'graded', 'form': {'reward': 'think_block', 'opened': True}}
    kw = dict(parts=parts, weights={'answer': 0.9, 'form': 0.1})
    spec = rewards.read('policyopt.rewards.weighted_sum', kw, scorer)
    verdict = say(rewards.build(spec), 'x</think>y', answer='z')
    assert verdict.parts == (Part('answer', 0.0, 'wrong'), Part('form', 0.1, 'ok'))
    gate = rewards.read('gated', dict(gate='boxed', reward='graded'), scorer)
    assert say(rewards.build(gate), '4', answer='4') == Verdict(0.0, 'no_box', False)
    acting = rewards.read('tests.reward_functions.acting', {}, scorer)
    assert say(rewards.build(acting), 'good').value == 1


@pytest.mark.parametrize(
    ('path', 'kw', 'message'),
    [
        ('gradedd', {}, "config.reward is 'gradedd': not there. Did you mean `graded`"),
        ('policyopt.rewards.box', {}, 'Did you mean `boxed`'),
        ('policyopt.reward.boxed', {}, 'Is its folder on PYTHONPATH'),
        ('tests.reward_functions.actin', {}, 'Did you mean `acting`'),
        ('tests.reward_functions.ACTS', {}, 'dict, not a function'),
        ('tests.reward_functions.not_a_reward', {}, 'made 3; legal is a Reward'),
        ('__main__.mine', {}, 'legal is a function of a module'),
        ('graded', dict(rigth=1), 'has no argument `rigth`. Did you mean `right`'),
        ('graded', dict(right=-1.0), 'right is -1.0; legal is above wrong'),
        ('gated', dict(gate='boxedd', reward='graded'), 'config.reward_kw.gate is .* mean `boxed`'),
        ('gated', dict(gate=3, reward='graded'), 'config.reward_kw.gate is 3; legal is the name'),
        ('gated', dict(gate='boxed'), 'missing a required argument'),
        ('weighted_sum', dict(parts=['graded'], weights={}), 'reward_kw.parts is .*NAME: REWARD'),
    ],
)
def test_wrong_names_fail_at_the_start(path, kw, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rewards.read(path, kw, Spec('policyopt.rewards.scorers.exact'))


def test_limits_without_workers_are_no_settings():
    assert rewards.JudgeConfig(workers=0).workers == 0
    with pytest.raises(ValueError, match='judge.deadline is 3.0, but judge.workers is 0'):
        rewards.JudgeConfig(workers=0, deadline=3.0)
    with pytest.raises(ValueError, match='judge.deadline must lie in'):
        rewards.JudgeConfig(deadline=0.0)


# ============================================================================ in rounds, on disk


def cases(*texts):
    return [Case(text, [ord(c) for c in text], {}) for text in texts]


def test_a_round_gives_verdicts_in_order_of_its_rows():
    with Local(lambda text, tokens, example: Verdict(float(len(tokens)), text)) as judge:
        judging = Round(judge)
        judging.add([3, 2], cases('dd', 'ccc'))
        judging.add([0, 1], cases('a', 'bb'))
        found = judging.verdicts(5)
        assert [v.reason for v in found] == ['a', 'bb', 'ccc', 'dd', 'not_sampled']
        assert math.isnan(found[4].value)
        assert Round(judge).verdicts(0) == []


def test_the_caller_does_not_wait_for_verdicts():
    event = threading.Event()
    with Local(lambda *case: float(event.wait(60))) as judge:
        judging = Round(judge)
        judging.add([0], cases('a'))
        event.set()
        assert judging.verdicts(1) == [Verdict(1.0)]


def test_written_verdicts_are_found_again(tmp_path):
    """By step, round, row and tokens; a line that was cut short is judged anew."""
    ledger, drawn = Ledger(tmp_path), []

    def reward(text, tokens, example):
        drawn.append(text)
        return Verdict(len(drawn) / 3, f'number {len(drawn)}')

    with Local(reward) as judge:

        def judge_all(texts, number=0, step=3):
            judging = Round(judge, ledger.page('rl', step, step), number)
            judging.add(range(len(texts)), cases(*texts))
            return judging.verdicts(len(texts))

        first = judge_all(['a', 'b', 'c'])
        assert judge_all(['a', 'b', 'c']) == first and drawn == ['a', 'b', 'c']
        second = judge_all(['a', 'x'])  # other tokens in row 1
        assert second[0] == first[0] and drawn.pop() == 'x'
        assert judge_all(['a'], number=1) != first[:1] and drawn.pop() == 'a'
        assert judge_all(['a'], step=4) != first[:1] and drawn.pop() == 'a'
        path = tmp_path / 'verdicts' / '000003_rl_000003.jsonl'
        path.write_bytes(path.read_bytes()[: -len('\n')] + b'x')
        text = path.read_bytes().splitlines()
        path.write_bytes(b'\n'.join(text[:2]) + b'\n' + text[2][:9])
        again = judge_all(['a', 'b', 'c'])
        assert again[:2] == first[:2] and drawn == ['a', 'b', 'c', 'c']
        assert judge_all(['a', 'b', 'c']) == again and len(drawn) == 4
        assert all(json.loads(line) for line in path.read_text().splitlines())


def test_verdicts_are_on_disk_before_they_are_given_out(tmp_path):
    page = Ledger(tmp_path).page('rl', 1, 1)
    with Local(fixed(NAN, 'timed_out: after 5 s')) as judge:
        judging = Round(judge, page, 2)
        judging.add([5], cases('a'))
        verdict = judging.verdicts(6)[5]
    (line,) = (tmp_path / 'verdicts' / '000001_rl_000001.jsonl').read_text().splitlines()
    assert json.loads(line)[:2] == [2, 5] and json.loads(line)[3:] == [
        None,
        verdict.reason,
        None,
        [],
    ]


def test_pages_of_steps_before_the_oldest_checkpoint_go(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.prune(3)  # no folder yet
    for stage, number, step in (('rl', 1, 1), ('value_pretraining', 7, 1), ('rl', 3, 3)):
        ledger.page(stage, number, step).write({(0, 0): (1, Verdict(1.0))})
    ledger.page('evaluation', 2, 2).write({(0, 0): (1, Verdict(1.0))})
    ledger.prune(2)
    left = sorted(p.name for p in (tmp_path / 'verdicts').iterdir())
    assert left == ['000002_evaluation_000002.jsonl', '000003_rl_000003.jsonl']


def test_faults_are_told_of_once(capsys):
    remark = rewards.Remarks()
    slow = Verdict(NAN, 'timed_out: after 5 s')
    remark([Verdict(1.0), slow, slow])
    remark([slow])
    told = capsys.readouterr().err
    assert told.count('\n') == 1
    assert told.startswith('2 of 3 answers have no reward (timed_out: after 5 s); metric rewards/')
