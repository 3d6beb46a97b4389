"""Solve rates from samples, two stages of filtering, and problems asked in other languages."""

import json
import math
import re

import pytest

from policyopt import data, rewards
from policyopt.data import difficulty, languages
from policyopt.data.rows import in_held_out


def samples(prompt, marks, votes=None, answer='1'):
    votes = votes or range(len(marks))
    return [
        dict(prompt=prompt, correct=mark, vote=vote, right_answer=answer)
        for mark, vote in zip(marks, votes, strict=True)
    ]


LINES = [
    *samples('sometimes?', [True, False, False, True], [0, 1, 2, 0]),
    *samples('always?', [True] * 4, [0] * 4),
    *samples('never?', [False] * 4),
    *samples('agree?', [False, False, False, True], [1, 1, 1, 0]),
    *samples('half agree?', [False, False, True, True], [1, 1, 0, 0]),
    *samples('hard?', [True, False, False, False, False, False, False, False]),
    *samples('unjudged?', [None, None, True, False], [0, 1, 2, 3]),
    *samples('lost?', [None]),
]
ROWS = [dict(prompt=p, answer=1, level=i) for i, p in enumerate(['new?', 'always?', 'hard?'])]


def test_rates():
    rates = difficulty.solve_rates(LINES)
    expected = {
        'sometimes?': (2, 4, 0.25),
        'always?': (4, 4, 0),
        'never?': (0, 4, 0.25),
        'agree?': (1, 4, 0.75),
        'half agree?': (2, 4, 0.5),
        'hard?': (1, 8, 1 / 8),
        'unjudged?': (1, 2, 0.5),
        'lost?': (0, 0, 0),
    }
    assert {p: (r.right, r.samples, r.doubtful) for p, r in rates.items()} == expected
    assert rates['hard?'].rate == 1 / 8 and math.isnan(rates['lost?'].rate)


def test_votes_of_several_files_are_not_one():
    # Class 0 is another answer in each file; together they are no majority.
    one = samples('p', [False, False, False, True], [0, 0, 1, 2])
    other = samples('p', [False, False, True, True], [1, 0, 2, 2])
    (rate,) = difficulty.solve_rates(one, other).values()
    assert (rate.right, rate.samples, rate.doubtful) == (3, 8, 3 / 8)


@pytest.mark.parametrize(
    ('given', 'kept', 'counts'),
    [
        (
            dict(),
            {'sometimes?', 'half agree?', 'hard?', 'unjudged?'},
            dict(kept=4, easy=1, unsolved=1, doubtful=1, few=0, unknown=1),
        ),
        (
            dict(low=0.125, high=0.5, least=3),
            set(),
            dict(kept=0, easy=3, unsolved=2, doubtful=1, few=1, unknown=1),
        ),
        (
            dict(low=0.1, high=0.51, least=4),
            {'sometimes?', 'half agree?', 'hard?'},
            dict(kept=3, easy=1, unsolved=1, doubtful=1, few=1, unknown=1),
        ),
    ],
)
def test_what_is_kept(given, kept, counts):
    rates = difficulty.solve_rates(LINES)
    rows = [dict(prompt=p) for p in rates]
    found, told = difficulty.filtered(rows, rates, stage='one', **given)
    assert {r['prompt'] for r in found} == kept
    assert list(told.values()) == list(counts.values()) and sum(told.values()) == len(rows)
    for row in found:
        rate = rates[row['prompt']]
        said = dict(rate=rate.rate, right=rate.right, samples=rate.samples)
        assert row['difficulty'] == {'one': said}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


def test_two_stages(tmp_path, capsys):
    whole = [dict(prompt=p, answer='1') for p in difficulty.solve_rates(LINES)] + ROWS[:1]
    file = write(tmp_path / 'all.jsonl', whole)
    first = write(tmp_path / 'samples1.jsonl', LINES)
    out, rated = str(tmp_path / 'first.jsonl'), str(tmp_path / 'rated.jsonl')
    assert not difficulty.main([first, '--data', file, '--out', out, '--rated', rated])
    assert '      4 kept' in capsys.readouterr().out
    assert len(lines(tmp_path / 'rated.jsonl')) == len(whole)
    # The second model solves what the first never did, and the others always.
    better = [s | dict(correct=True) for s in LINES if s['prompt'] != 'never?']
    better += samples('never?', [True, False])
    second = write(tmp_path / 'samples2.jsonl', better)
    args = [second, '--data', rated, '--out', str(tmp_path / 'second.jsonl'), '--stage', 'second']
    assert not difficulty.main(args)
    (row,) = lines(tmp_path / 'second.jsonl')
    assert row['prompt'] == 'never?' and set(row['difficulty']) == {'first', 'second'}
    assert row['difficulty']['second'] == dict(rate=0.5, right=1, samples=2)
    config = data.TaskConfig(file=out, held_out=0, prompt_width=20, data_dir=str(tmp_path / 'd'))
    task = data.make_task(config, data.ascii_tokenizer())
    assert task.train[0].entry['metadata']['difficulty']['first']['samples'] >= 2
    assert not difficulty.main([first, second, '--out', str(tmp_path / 'own.jsonl')])
    assert {r['answer'] for r in lines(tmp_path / 'own.jsonl')} == {'1'}


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['no.jsonl', '--out', 'new'], 'no.jsonl cannot be read: No such file'),
        (['bad.jsonl', '--out', 'new'], 'bad.jsonl:2: invalid JSON'),
        (['other.jsonl', '--out', 'new'], 'line 1 has `correct` null; legal are lines of samples'),
        (['good.jsonl', '--out', 'good.jsonl'], 'is there already; nothing is overwritten'),
        (['good.jsonl', '--out', 'new', '--low', '0.9'], 'no problem is left of 8 .*widen'),
        (['good.jsonl', '--out', 'new', '--low', '1'], 'low is 1.0; legal is below high'),
        (['good.jsonl', '--out', 'new', '--data', 'other.jsonl'], 'row 1 has no text `prompt`'),
        (
            ['good.jsonl', '--out', 'new', '--data', 'hard.jsonl'],
            '`difficulty` "hard", where rates',
        ),
        (['good.jsonl', '--out', 'new', '--rated', 'new'], 'are both new; name two files'),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / 'good.jsonl', LINES)
    (tmp_path / 'bad.jsonl').write_text(json.dumps(LINES[0]) + '\n{\n')
    write(tmp_path / 'other.jsonl', [dict(prompts='x', correct=1)])
    write(tmp_path / 'hard.jsonl', [dict(prompt='hard?', answer='1', difficulty='hard')])
    if 'other' in args[0]:
        write(tmp_path / 'other.jsonl', [dict(prompt='x', correc=True)])
    assert difficulty.main(args) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count('\n') == 1
    assert not (tmp_path / 'new').exists()


# ----------------------------------------------------------------------------------- languages


def test_a_share_is_asked_in_other_languages():
    rows = [dict(prompt=f'What is {i} plus {i}?', answer=str(2 * i)) for i in range(600)]
    found = languages.mixed(rows, share=0.25)
    changed = [r for r in found if 'language' in r]
    assert len(found) == 600 and 110 < len(changed) < 190
    counts = {code: sum(r['language'] == code for r in changed) for code in languages.FRAMES}
    assert min(counts.values()) > 10
    for row, before in zip(found, rows, strict=True):
        if 'language' in row:
            assert row['original'] == before['prompt'] and before['prompt'] in row['prompt']
            assert row['answer'] == before['answer']
        else:
            assert row == before
    assert languages.mixed(rows, share=0.25) == found
    assert languages.mixed(rows, share=0.25, seed=1) != found
    assert languages.mixed(rows, share=0) == rows


def test_the_share_is_spread_over_both_sides_of_a_split():
    # Prompts of one length, as of sums.
    rows = [dict(prompt=f'{i}+{j}=') for i in range(10, 60) for j in range(10, 90)]
    found = [r for r in languages.mixed(rows, 0.25, ['fr']) if 'language' in r]
    held_out = sum(in_held_out(r['prompt'], 0.1) for r in found)
    assert 900 < len(found) < 1100 and 70 < held_out < 130


def test_translations():
    rows = [dict(prompt=p, answer='1') for p in ('one', 'two', 'three')]
    known = {('one', 'fr'): 'un', ('one', 'de'): 'eins', ('two', 'de'): 'zwei'}
    found = languages.mixed(rows, 1.0, ['fr', 'de'], known)
    assert found[0]['prompt'] == known['one', found[0]['language']]
    assert (found[1]['prompt'], found[1]['language']) == ('zwei', 'de')
    assert found[2] == rows[2]
    with pytest.raises(ValueError, match='Did you mean `fr`'):
        languages.mixed(rows, 1.0, ['frr'])


def test_the_language_reward_knows_what_was_asked(tmp_path):
    write(tmp_path / 'all.jsonl', [dict(prompt='What is the sum of 3 and 4?', answer='7')])
    args = [str(tmp_path / 'all.jsonl'), '--share=1', '--languages=fr']
    assert not languages.main([*args, f'--out={tmp_path / "mixed.jsonl"}'])
    assert languages.main([*args, f'--out={tmp_path / "mixed.jsonl"}']) == 2
    config = data.TaskConfig(
        file=str(tmp_path / 'mixed.jsonl'), held_out=0, prompt_width=400, data_dir=str(tmp_path)
    )

    class AnyText:
        def encode(self, text):
            return list(text.encode())

    (item,) = data.make_task(config, AnyText()).train
    reward = rewards.language_consistency()
    french = 'La somme de trois et de quatre est sept, comme on le voit facilement.'
    english = 'The sum of three and four is seven, as one can easily see from here.'
    assert item.entry['metadata']['language'] == 'fr'
    assert [reward(t, (), item.entry).value for t in (french, english)] == [1, 0]


def test_the_sentences_are_in_their_languages():
    reward = rewards.language_consistency
    for code, frame in languages.FRAMES.items():
        assert reward(code)(frame.replace('{question}', ''), (), {}).reason == 'ok', code
