"""Answers and votes; a run's own evaluation done again; what is refused before any compile."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyopt import answers, data, evaluate, metrics, policy, recipe, rewards, settings
from policyopt.checkpoint import CheckpointError
from policyopt.rewards.scorers import exact_match
from policyopt.sampling import EngineConfig, Finish, RowErrors, SamplingConfig
from tests.bigram import Bigram, Config, noise
from tests.runs import CONFIG, finished_run  # noqa: F401, a fixture
from tests.test_quickstart import run as train_run

TOKENIZER = data.arithmetic_tokenizer()


def items(count):
    made = []
    for i in range(count):
        prompt, answer = f'{i}+1=', str(i + 1)
        entry = dict(answer=answer, task='sums')
        made.append(data.Item(prompt, tuple(TOKENIZER.encode(prompt)), answer, entry, 'sums'))
    return made


def model():
    return Bigram(Config(TOKENIZER.vocab_size), TOKENIZER), jnp.asarray(noise(16, scale=2.0))


def draw(count=5, samples=3, seed=0, temperature=1.0, judge=None, **how):
    policy_model, params = model()
    return answers.draw(
        policy_model,
        params,
        items(count),
        judge or rewards.Local(rewards.graded(exact_match)),
        jax.random.key(seed),
        SamplingConfig(max_new_tokens=5, temperature=temperature),
        samples=samples,
        prompt_width=6,
        **(how or dict(batch=8)),
    )


def test_both_samplers_draw_the_same_answers():
    lock_step = draw()
    slots = draw(engine=EngineConfig(slots=4))
    assert slots.texts == lock_step.texts
    for name in ('tokens', 'finish', 'marks'):
        np.testing.assert_array_equal(getattr(slots, name), getattr(lock_step, name))
    assert len({text for row in slots.texts for text in row}) > 5  # they differ
    assert set(np.unique(slots.finish)) == {Finish.EOS, Finish.LENGTH}
    assert slots.tokens.shape == (5, 3) and slots.tokens.max() == 5
    with pytest.raises(ValueError, match='one of batch and engine'):
        draw(batch=3, engine=EngineConfig())


def test_answers_depend_on_their_own_numbers_alone():
    whole = draw(count=5, samples=3)
    assert draw(count=5, samples=3).texts == whole.texts
    assert draw(count=5, samples=3, seed=1).texts != whole.texts
    assert draw(count=2, samples=3).texts == whole.texts[:2]
    assert draw(count=5, samples=2).texts == [row[:2] for row in whole.texts]
    assert draw(count=0).tokens.shape == (0, 3)


def test_answers_without_marks_are_not_right():
    def reward(text, tokens, example):
        return np.nan if example['answer'] == '2' else 1.0

    found = draw(count=3, samples=2, judge=rewards.Local(reward))
    assert np.isnan(found.marks[1]).all() and found.correct.tolist() == [[1, 1], [0, 0], [1, 1]]


def test_logits_that_are_not_finite_end_the_evaluation():
    policy_model, params = model()
    judge = rewards.Local(rewards.graded(exact_match))
    with pytest.raises(RowErrors, match='row 0'):
        answers.draw(
            policy_model,
            params * jnp.nan,
            items(2),
            judge,
            jax.random.key(0),
            SamplingConfig(max_new_tokens=5),
            prompt_width=6,
            engine=EngineConfig(slots=4),
        )


def test_answers_that_can_not_be_drawn_count_as_wrong(finished_run, monkeypatch, capsys):  # noqa: F811
    """As in the evaluations of a run, which would otherwise have a number that can't be had."""
    load = policy.load

    def broken(*arguments, **settings):
        found = load(*arguments, **settings)
        return found._replace(params=jax.tree.map(lambda x: x * jnp.nan, found.params))

    monkeypatch.setattr(policy, 'load', broken)
    job = evaluate.plan(options(finished_run, '--slots=16'))
    done = evaluate.run(job)
    said = evaluate.describe(job, done)
    assert done.found['all']['avg@1'].value == 0 and (done.answers.finish == Finish.ERROR).all()
    assert (said['not_sampled'], said['not_judged']) == (1, 0)
    evaluate.show(job, done)
    assert '100.0% not drawn' in capsys.readouterr().out


def test_a_folder_that_can_not_be_made_is_refused_at_once(finished_run, tmp_path, capsys):  # noqa: F811
    (tmp_path / 'file').write_text('')
    with metrics.Compiles() as compiles:
        assert evaluate.main([str(finished_run), f'--out={tmp_path}/file/out']) == 2
    assert compiles.take() == 0 and 'Not a directory' in capsys.readouterr().err


def votes(reward, *rows, entry=None):
    """Classes of answers (text, mark) to as many problems as there are rows."""
    made = [data.Item('', (), '7', entry or dict(answer='7')) for _ in rows]
    texts = [[text for text, _ in row] for row in rows]
    marks = np.array([[mark for _, mark in row] for row in rows], np.float32)
    found = answers.Answers(texts, marks, marks, marks, 0.0)
    return answers.vote_classes(made, found, rewards.Local(reward))


def test_votes_are_equal_by_the_judge():
    texts = ['7', ' 7\n', '7.0', '8', '8.00', 'x', 'x ']
    sums = list(zip(texts, [1, 1, 1, 0, 0, 0, 0], strict=True))
    other = [('', 0), ('a', 0), ('', 0), ('A', 0), ('7', 1), ('7', 0), ('7.0', np.nan)]
    found = votes(rewards.graded(exact_match), sums, other)
    assert found == [[0, 0, 0, 1, 1, 2, 2], [0, 1, 0, 2, 3, 4, 5]]


def test_votes_of_scorers_that_check_the_answer_itself():
    def even(answer, entry):
        return float(int(answer) % 2 == 0)

    texts, marks = ['2', '4', '3', '5', 'x', '3'], [1, 1, 0, 0, 0, 0]
    found = votes(rewards.graded(even), list(zip(texts, marks, strict=True)))
    assert found == [[0, 0, 1, 2, 3, 1]]


def test_votes_of_answers_that_hang_the_judge_end():
    row = [(r'\boxed{1/2}', 1), (r'so \boxed{0.5}', 1), (r'\boxed{9^{9^9}}', np.nan)]
    row += [(r'\boxed{9^{9^{9^9}}}', 0), (r'\boxed{3}', 0)]
    judge = rewards.Workers(rewards.Spec('math_equivalence'), 1, deadline=1.0)
    texts, marks = zip(*row, strict=True)
    found = answers.Answers([list(texts)], *[np.array([marks])] * 3, 0.0)
    made = [data.Item('', (), '1/2', dict(answer='1/2'))]
    with judge:
        assert answers.vote_classes(made, found, judge) == [[0, 0, 1, 2, 3]]


def test_samples_as_lines(tmp_path):
    found = draw(count=2, samples=2)
    found = found._replace(marks=np.array([[1, 0], [np.nan, 0]], np.float32))
    answers.write_samples(tmp_path / 'samples.jsonl', items(2), found, [[0, 1], [0, 0]], TOKENIZER)
    lines = [json.loads(line) for line in (tmp_path / 'samples.jsonl').open()]
    assert [(x['problem'], x['sample'], x['correct'], x['vote']) for x in lines] == [
        (0, 0, True, 0),
        (0, 1, False, 1),
        (1, 0, None, 0),
        (1, 1, False, 0),
    ]
    assert lines[0]['answer'] == found.texts[0][0] and lines[2]['prompt'] == '1+1='
    assert {x['finish'] for x in lines} <= {'eos', 'length'}


# ------------------------------------------------------------------------------------------- a run


def run(*flags):
    return evaluate.run(evaluate.plan(options(*flags)))


def options(*flags):
    given = evaluate.parser().parse_args([str(flag) for flag in flags])
    given.what = given.what or given.workdir
    return given


def check_records(workdir):
    """Every checkpoint gives the greedy accuracy, and interval, that the run wrote down."""
    records = [r for r in metrics.read(workdir / 'metrics.jsonl') if r['stage'] == 'evaluation']
    assert [r['step'] for r in records] == [0, 1, 2] and records[0]['held_out'] > 0
    for record in records:
        done = run(f'--workdir={workdir}', '--step', record['step'], '--slots=16')
        assert done.found['all']['avg@1'] == (record['held_out'], record['low'], record['high'])
        assert done.policy.origin['params'] == 'ema'
        assert done.policy.origin['step'] == record['step']


@pytest.mark.slow
def test_records_of_a_trained_run_again(tmp_path):
    train_run(CONFIG, tmp_path / 'run')
    check_records(tmp_path / 'run')


def test_a_runs_own_records_again(finished_run, tmp_path, capsys):  # noqa: F811
    check_records(finished_run)
    flags = [finished_run, '--k=1,2,4', '--slots=16', '--seed=3']
    assert evaluate.main([*map(str, flags), f'--out={tmp_path / "a"}']) == 0
    printed = capsys.readouterr().out
    assert 'moving average after RL step 2: 16 problems, 4 answers to each' in printed
    assert 'pass@4' in printed and 'tokens/s' in printed and str(tmp_path / 'a') in printed
    again = run(*flags)
    said = json.loads((tmp_path / 'a' / 'evaluation.json').read_text())
    assert said['results']['all'] == {k: v._asdict() for k, v in again.found['all'].items()}
    assert list(said['results']['all']) == ['avg@4', 'pass@1', 'pass@2', 'pass@4', 'maj@2', 'maj@4']
    assert said['sampling']['temperature'] == CONFIG['sampling']['temperature']
    lines = [json.loads(line) for line in (tmp_path / 'a' / 'samples.jsonl').open()]
    marks = np.array([line['correct'] for line in lines]).reshape(16, 4)
    assert said['results']['all']['avg@4']['value'] == marks.mean()
    assert said['results']['all']['pass@4']['value'] == marks.any(axis=1).mean()
    cut = [line['finish'] == 'length' for line in lines]
    assert said['truncated'] == np.mean(cut)
    assert (tmp_path / 'a' / 'pass_at_k.png').read_bytes()[:4] == b'\x89PNG'
    assert not any(path.name == 'damaged' for path in finished_run.iterdir())


def test_other_problems_and_each_task_by_itself(finished_run, tmp_path):  # noqa: F811
    path = tmp_path / 'sums.jsonl'
    path.write_text(''.join(f'{{"q": "{i}+1=", "answer": {i + 1}}}\n' for i in range(8)))
    done = run(finished_run, f'--data={path}', '--prompt_field=q', '--slots=16', '--params=params')
    assert [item.prompt for item in done.items] == [f'{i}+1=' for i in range(8)]
    assert done.policy.origin['params'] == 'params'
    assert list(done.found) == ['all']
    reward = ['--reward=tests.reward_functions.acting', '--deadline=30']
    judged = run(finished_run, f'--data={path}', '--prompt_field=q', '--slots=16', *reward)
    assert (judged.answers.marks == 1).all() and len(judged.items) == 8
    job = evaluate.plan(options(finished_run, '--slots=16', '--split=train'))
    config = json.loads((finished_run / 'config.json').read_text())
    config['tasks'] = dict(a=config['task'], b=config.pop('task') | dict(seed=5, held_out=8))
    config['tasks']['b']['kw'] = config['tasks']['b']['kw'] | dict(operators=['+', '-'])
    done = evaluate.run(job._replace(source=job.source._replace(config=config), limit=4))
    assert list(done.found) == ['all', 'a', 'b'] and len(done.items) == 8
    means = [done.found[name]['avg@1'].value for name in ('a', 'b')]
    assert done.found['all']['avg@1'].value == np.mean(means)


def test_damaged_checkpoints_are_passed_over_and_left_alone(finished_run, tmp_path, capsys):  # noqa: F811
    shutil.copytree(finished_run, tmp_path / 'run')
    saved = tmp_path / 'run' / 'checkpoints'
    for file in (saved / '2').rglob('*'):
        if file.is_file():
            file.write_bytes(b'x' * 9)
    source = policy.find(tmp_path / 'run')
    assert source.steps == (0, 1, 2)
    assert policy.load(source).origin['step'] == 1
    assert 'the checkpoint of step 2 is not usable' in capsys.readouterr().out
    assert sorted(p.name for p in saved.iterdir() if p.is_dir()) == ['0', '1', '2']
    with pytest.raises(CheckpointError, match='no checkpoint of .* is usable'):
        policy.load(source, step=2)


def test_a_written_config_is_the_config():
    """What a run wrote builds the same run, tuples and all."""
    config = json.loads(json.dumps(CONFIG, default=str))
    assert settings.read(recipe.RunConfig, config) == settings.read(recipe.RunConfig, CONFIG)


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--k=1,8', '--samples=4'], 'k is 8; legal is 1 to the 4 answers'),
        (['--k=0'], 'k is 0; legal is 1'),
        (['--k=two'], "k is 'two'; legal are whole numbers"),
        (['--samples=0'], 'samples must lie in [1, inf], got 0'),
        (['--samples=2', '--temperature=0'], 'temperature is 0, at which all 2 answers'),
        (['--top_p=0.9'], 'top_p is 0.9 and has no effect at temperature 0'),
        (['--temperature=-1'], 'temperature is -1.0; legal is 0'),
        (['--limit=0'], 'limit must lie in'),
        (['--step=7'], 'step is 7; RUN has checkpoints of 0, 1, 2'),
        (['--params=emma'], "params='emma' is not known. Did you mean `ema`"),
        (['--data=chain_summ'], 'Did you mean `chain_sum`'),
        (['--data=nowhere/x.jsonl'], 'nowhere/x.jsonl is no file'),
        (['--data=chain_sum', '--data_kw={"min_term": 2}'], 'Did you mean `min_terms`'),
        (['--data=chain_sum', '--data_kw=min_terms'], 'which is no JSON'),
        (['--data=chain_sum', '--data_form=compct'], 'Did you mean `compact`'),
        (['--data=SUMS', '--data_size=500'], 'size is 500, which has no effect'),
        (['--data=chain_sum', '--prompt_field=prompt'], "'prompt', which has no effect"),
        (['--data=SUMS', '--reward=grded'], 'Did you mean `graded`'),
        (['--data=SUMS', '--reward=boxed', '--reward_kw={"singel": 1}'], 'Did you mean `single`'),
        (['--data=SUMS', '--reward_kw=[]'], 'legal is a JSON object'),
        (['--data=SUMS', '--deadline=0'], 'judge.deadline must lie in'),
        (['--deadline=3'], '--deadline has no effect'),
        (['--data_size=9'], '--data_size has no effect'),
        (['--split=heldout'], 'Did you mean `held_out`'),
        (['--out=OUT'], '--out OUT is there already'),
    ],
)
def test_refused_before_any_compile(flags, message, finished_run, tmp_path, capsys):  # noqa: F811
    (tmp_path / 'mine.txt').write_text('')
    (tmp_path / 'sums.jsonl').write_text('{"prompt": "1+1=", "answer": "2"}\n')
    places = {'OUT': str(tmp_path), 'SUMS': str(tmp_path / 'sums.jsonl')}
    flags = [functools.reduce(lambda f, k: f.replace(k, places[k]), places, f) for f in flags]
    with metrics.Compiles() as compiles:
        assert evaluate.main([str(finished_run), *flags]) == 2
    assert compiles.take() == 0
    said = capsys.readouterr().err
    expected = message.replace('RUN', str(finished_run)).replace('OUT', str(tmp_path))
    assert expected in said and said.startswith('error: ') and 'Traceback' not in said


def test_what_is_no_policy_is_named(tmp_path, capsys):
    (tmp_path / 'runs').mkdir()
    (tmp_path / 'runs' / 'config.json').write_text('{"a": 1}')
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'early').mkdir()
    (tmp_path / 'early' / 'config.json').write_text('{"algorithm": "x"}')
    for what, message in (
        ('run', 'does not exist. Did you mean `runs`'),
        ('runs', 'is of no run and of no model'),
        ('empty', 'is no run and no model'),
        ('early', 'holds no checkpoint'),
    ):
        assert evaluate.main([str(tmp_path / what)]) == 2
        assert message in capsys.readouterr().err


def test_model_without_problems_or_a_run_is_refused(tmp_path, capsys):
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    for flags, message in (
        ([], 'is a model, which has no problems of its own: give --data'),
        (['--step=3'], 'step is 3, but'),
        (['--params=ema'], "params is 'ema', but"),
    ):
        assert evaluate.main([str(tmp_path), *flags]) == 2
        assert message in capsys.readouterr().err
