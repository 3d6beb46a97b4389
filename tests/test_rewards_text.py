"""Rewards that read what was written: mathematics, languages, and recipes made of them."""

import math

import pytest

from policyopt import rewards
from policyopt.rewards import Case, Part, Spec, Verdict, Workers

# ============================================================================ mathematics


@pytest.fixture(scope='module')
def equal():
    return rewards.math_equivalence(wrong=-1.0)


@pytest.mark.parametrize(
    ('answer', 'right', 'reason'),
    [
        (r'so \boxed{0.5}', '1/2', 'right'),
        ('0.5', r'\frac{1}{2}', 'right'),
        (r'the answer is $\frac{2}{4}$', '1/2', 'right'),
        (r'\boxed{(x+1)^2}', 'x^2+2x+1', 'right'),
        (r'\boxed{x^2+2x}', 'x^2+2x+1', 'wrong'),
        (r'\boxed{\{2,1\}}', r'\{1,2\}', 'right'),
        (r'\boxed{(2, 1)}', '(1,2)', 'wrong'),
        ('<think>3</think> 4', '3', 'wrong'),
        (r'<think>\boxed{4}</think> \boxed{3}', '3', 'right'),
        (r'\boxed{4} no, \boxed{3}', '3', 'right'),
        (r'\boxed{2\sqrt{2}}', r'$\sqrt{8}$', 'right'),
        (r'\boxed{1000}', '1,000', 'right'),
        (r'\boxed{B}', 'B', 'right'),
        (r'\boxed{C}', 'B', 'wrong'),
        (r'\boxed{\dfrac{2}{4}}', '1/2', 'right'),
        (r'\boxed{-\frac{1}{2}}', '1/2', 'wrong'),
        (r'\boxed{1/0}', '0', 'wrong'),
        (r'\boxed{7}', '$7$', 'right'),
        (r'\boxed{1{,}800}', r'\$1,800', 'right'),
        (r'\boxed{12\,345\,678}', '12345678', 'right'),
        (r'\boxed{2\,345}', '690', 'wrong'),
        (r'\boxed{50\%}', '0.5', 'right'),
        (r'\boxed{-1\frac{1}{2}}', '-1.5', 'right'),
        (r'\boxed{(0,1)}', '(0,1]', 'wrong'),
        (r'\boxed{x \le 2}', r'(-\infty,2]', 'right'),
        (r'\boxed{x < 2}', r'(-\infty,2]', 'wrong'),
        (r'\boxed{0 < x \le 1}', '(0,1]', 'right'),
        (r'\boxed{4} so \boxed{}', '4', 'no_answer'),
        # Numbers that rounding, or a limit on their digits, would make 0.
        (r'\boxed{0.00000012}', '0.00000034', 'wrong'),
        (r'\boxed{1.6 \times 10^{-19}}', r'9.1 \times 10^{-31}', 'wrong'),
        (r'\boxed{1.6 \times 10^{-19}}', r'0.00000000000000000016', 'right'),
        (r'\boxed{\{10^{-19}, 1\}}', r'\{10^{-31}, 1\}', 'wrong'),
        (r'\boxed{e^{-100}}', 'e^{-101}', 'wrong'),
        (r'\boxed{0.033333}', r'\frac{1}{30}', 'right'),
        ('no idea', '2', 'no_answer'),
        (r'\boxed{}', '5', 'no_answer'),
        ('', '7', 'no_answer'),
    ],
)
def test_math_equivalence(equal, answer, right, reason):
    verdict = equal(answer, (), dict(answer=right))
    assert verdict == Verdict(1.0 if reason == 'right' else -1.0, reason, reason == 'right')


@pytest.mark.parametrize('gold', ['', '$'])
def test_a_right_answer_that_can_not_be_read_is_no_reward(equal, gold):
    verdict = equal(r'\boxed{3}', (), dict(answer=gold))
    assert math.isnan(verdict.value) and verdict.reason == 'no_gold'


def test_digits():
    for digits, value in ((6, 0), (3, 1)):
        found = rewards.math_equivalence(digits=digits)(
            r'\boxed{1.5709}', (), dict(answer='1.5708')
        )
        assert found.value == value


HOSTILE = [
    r'9^{9^{9}}',
    r'2^{2^{2^{2^{2^{2}}}}}',
    r'10^{10^{10}}',
    '(' * 300 + '1' + ')' * 300,
    r'\{' * 200 + '1' + r'\}' * 200,
    r'(10^8)!',
    r'\binom{10^{8}}{5 \cdot 10^{7}}',
    r'\sum_{i=1}^{10^{9}} i^{i}',
    r'\prod_{i=1}^{10^{8}} i',
    r'(x+y+z+w+1)^{400}',
]


def test_ten_hostile_answers_are_late_and_others_are_not():
    """Each is counted as a time-out, never as wrong; every other row is a good one."""
    deadline = 1.0
    with Workers(Spec('policyopt.rewards.math_equivalence'), 2, deadline) as judge:
        (first,) = judge.submit([Case(r'\boxed{2/4}', (), dict(answer='1/2'))])
        assert first.result(timeout=60).value == 1
        answers = [x for bad in HOSTILE for x in (rf'\boxed{{{bad}}}', r'\boxed{\frac{2}{4}}')]
        futures = judge.submit([Case(x, (), dict(answer='1/2')) for x in answers])
        found = [f.result(timeout=len(HOSTILE) * (deadline + 1)) for f in futures]
    assert [v.kind for v in found] == ['timed_out', 'right'] * len(HOSTILE)
    assert all(math.isnan(v.value) for v in found[::2])
    assert rewards.describe(found)['rewards/timed_out'] == len(HOSTILE)


# ============================================================================ languages

ENGLISH = 'We add the two numbers together, and then we look at what remains of the sum.'
FRENCH = 'On additionne les deux nombres, et ensuite on regarde ce qui reste de la somme.'
CHINESE = '我们先把这两个数字加在一起，然后再看看总和里还剩下什么东西，最后得到答案。'
CODE = '```python\nfor index, value in enumerate(values):\n    print(value)\n```'


@pytest.mark.parametrize(
    ('prompt', 'text', 'reason'),
    [
        (ENGLISH, f'<think>{ENGLISH}</think>\n\n{ENGLISH}', 'ok'),
        (FRENCH, f'<think>{FRENCH}</think>\n\n{FRENCH}', 'ok'),
        (CHINESE, CHINESE, 'ok'),
        (FRENCH, ENGLISH, 'other_language'),
        (ENGLISH, f'<think>{CHINESE}</think>\n\n{ENGLISH}', 'mixed'),
        (FRENCH, f'<think>{ENGLISH}\n\n{FRENCH}</think>\n\n{FRENCH}', 'mixed'),
        ('1+1=', FRENCH, 'ok'),
        ('1+1=', f'{FRENCH}\n\n{ENGLISH}', 'mixed'),
        (FRENCH, '42', 'undecided'),
        (FRENCH, '', 'undecided'),
        (FRENCH, rf'{FRENCH} $x + y = z$ \boxed{{\frac{{\text{{whatever}}}}{{2}}}}', 'ok'),
        (FRENCH, f'{FRENCH}\n\n{CODE}\n\n{FRENCH}', 'ok'),
    ],
)
def test_language_consistency(prompt, text, reason):
    verdict = rewards.language_consistency()(text, (), dict(prompt=prompt))
    assert verdict == Verdict(float(reason in ('ok', 'undecided')), reason)


def test_language_asked_for():
    reward = rewards.language_consistency(to='fr')
    assert reward(FRENCH, (), dict(question=ENGLISH)).reason == 'ok'
    assert reward(ENGLISH, (), dict(question=ENGLISH)).reason == 'other_language'
    assert rewards.language_consistency()(FRENCH, (), dict(question=ENGLISH)).value == 0
    with pytest.raises(ValueError, match="to='french' is not known"):
        rewards.language_consistency(to='french')


# ============================================================================ recipes


EXACT = Spec('policyopt.rewards.scorers.exact')


def exact(text, example):
    return float(text == example['answer'])


def test_dapo_is_plus_or_minus_one():
    reward = rewards.dapo(exact)
    assert reward('4', (), dict(answer='4')) == Verdict(1.0, 'right', True)
    assert reward('5', (), dict(answer='4')) == Verdict(-1.0, 'wrong', False)


@pytest.mark.parametrize(
    ('text', 'value', 'right'),
    [
        (rf'<think>{ENGLISH}</think> {ENGLISH} \boxed{{4}}', 1.1, True),
        (rf'<think>{ENGLISH}</think> {ENGLISH} \boxed{{5}}', 0.2, False),
        (f'<think>{FRENCH}</think>\n\n{ENGLISH} \\boxed{{4}}', 1.0, True),
        (f'<think>{FRENCH}</think>\n\n{ENGLISH} \\boxed{{5}}', 0.1, False),
        (f'<think>{ENGLISH}</think> {ENGLISH} 4', 0.0, False),
        (rf'{ENGLISH} \boxed{{4}}', 0.0, False),
        (r'<think>a</think><think>b</think>\boxed{4}', 0.0, False),
    ],
)
def test_magistral_is_a_tenth_nine_tenths_and_a_tenth(text, value, right):
    example = dict(prompt=ENGLISH, answer='4')
    verdict = rewards.magistral(exact)(text, (), example)
    assert verdict.value == pytest.approx(value) and verdict.right is right
    names = ['format', 'correct', 'language'] if value else []
    assert [part.name for part in verdict.parts] == names
    alone = rewards.magistral(exact, language=False)(text, (), example)
    assert alone.value == pytest.approx(0 if not value else 1.0 if right else 0.1)


def test_magistral_has_a_tenth_of_the_length_penalty():
    text, example = rf'<think>{ENGLISH}</think> \boxed{{4}}', dict(prompt=ENGLISH, answer='4')
    reward = rewards.magistral(exact, max_length=20, cache=4)
    for length, penalty in ((16, 0), (18, -0.05), (20, -0.1), (21, -0.1)):
        verdict = reward(text, range(length), example)
        assert verdict.value == pytest.approx(1.1 + penalty) and verdict.right is True
        assert verdict.parts[-1] == Part('length', pytest.approx(penalty), verdict.parts[-1].reason)
    assert reward('4', range(20), example).value == pytest.approx(-0.1)


def test_magistral_of_other_kinds():
    correct = rewards.magistral(correct=rewards.math_equivalence(), language=False)
    assert correct(r'<think>a</think>\boxed{2/4}', (), dict(answer='1/2')).value == pytest.approx(1)
    code = rewards.magistral(lambda text, e: float('x' in text), form='code', language=False)
    assert code('<think>a</think>\n```python\nx\n```', (), {}).value == pytest.approx(1)
    assert code('<think>a</think>\n```\nx\n```', (), {}) == Verdict(0.0, 'no_language', False)
    for wrong, message in (
        (dict(form='prose'), "form='prose' is not known"),
        (dict(max_length=3), 'max_length=3 and cache=None'),
        (dict(), 'score and correct are None'),
    ):
        with pytest.raises(ValueError, match=message):
            rewards.magistral(**wrong)
    spec = rewards.read('magistral', dict(correct='math_equivalence'), EXACT)
    assert spec.kwargs['correct'].path == 'math_equivalence'
