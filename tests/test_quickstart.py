"""The main job end to end, its configuration, and what it leaves behind."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import typing

import numpy as np
import pytest

import policyopt as po
from policyopt import (
    batches,
    calibrate,
    commands,
    data,
    evaluate,
    metrics,
    recipe,
    reinforce,
    train,
)
from policyopt import workdir as workdir_lib
from tests import pages

ROOT = pathlib.Path(__file__).parent.parent
QUICKSTART = ROOT / 'configs' / 'quickstart.py'


def get_config(argument, **changes):
    spec = importlib.util.spec_from_file_location('quickstart_config', QUICKSTART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(argument).to_dict()
    for path, value in changes.items():
        node = config
        *sections, name = path.split('__')
        for section in sections:
            node = node[section]
        node[name] = value
    return config


def run(config, workdir):
    return train.run(train.start(config, workdir), workdir)


def check_run(result, workdir, config):
    """Everything that a run promises to leave behind is there and consistent."""
    records = metrics.read(workdir / 'metrics.jsonl')
    stages = [r['stage'] for r in records]
    assert stages.count('rl') == config['steps'] and stages[-1] == 'result'
    held_out = [r for r in records if r['stage'] == 'evaluation']
    assert held_out[0]['step'] == 0 and held_out[0]['held_out'] == result.before.value
    assert (
        held_out[-1]['step'] == config['steps'] and held_out[-1]['held_out'] == result.after.value
    )
    step = next(r for r in records if r['stage'] == 'rl')
    assert {'reward', 'accuracy', 'length', 'loss', 'entropy', 'moe/load_max'} <= set(step)
    assert all(v is not None for v in step.values())
    assert not pages.undocumented_of(workdir)
    assert abs(step['kl_behavior/k3']) < 1  # sampler and learner agree on what was drawn
    assert result.curves.read_bytes()[:4] == b'\x89PNG'
    saved = batches.load_batch(workdir / 'batches' / f'batch_{config["steps"]:06d}.npz')
    rows = config['rollout']['prompts'] * config['rollout']['group_size']
    assert saved['mask'].shape[0] == rows
    size = rows // config['minibatches']
    assert (
        saved['minibatch'].tolist()
        == np.repeat(1 + np.arange(config['minibatches']), size).tolist()
    )
    gap = np.abs(saved['logp_new'] - saved['logp_old'])[saved['mask'] > 0]
    first = np.broadcast_to(saved['minibatch'][:, None] == 1, saved['mask'].shape)[
        saved['mask'] > 0
    ]
    assert gap[first].max() <= 2e-5  # on-policy
    assert json.loads((workdir / 'config.json').read_text())['steps'] == config['steps']


def test_tiny_run(tmp_path, capsys):
    config = get_config('tiny=true', steps=4)
    result = run(config, tmp_path / 'run')
    check_run(result, tmp_path / 'run', config)
    times = [r for r in metrics.read(tmp_path / 'run' / 'timings.jsonl') if r['stage'] == 'rl']
    assert times[0]['compiles'] > 0 and [t['compiles'] for t in times[2:]] == [0, 0]
    parts = [
        t[f'{name}_seconds'] for t in times for name in ('sample', 'reward', 'score', 'update')
    ]
    assert min(parts) >= 0 and sum(parts) <= sum(t['seconds'] for t in times)
    step = next(r for r in metrics.read(tmp_path / 'run' / 'metrics.jsonl') if r['stage'] == 'rl')
    assert step['replay/support'] == 1 and step['moe/replayed'] > 0.5
    assert {'moe/load_over_mean/0', 'moe/unused/0', 'grad_norm/router', 'reward_std'} <= set(step)
    samples = metrics.read(tmp_path / 'run' / 'samples.jsonl')
    assert [s['step'] for s in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for sample in samples[-2:]:  # sums, whose right answer is the only one
        assert sample['right'] == (sample['answer'] == sample['expected'])
    printed = capsys.readouterr().out
    page = (tmp_path / 'run' / 'report.md').read_text()
    assert page.startswith('# GSPO on basic arithmetic') and '(dashboard.png)' in page
    assert f'held-out accuracy before RL: {result.before}' in printed
    assert f'held-out accuracy after RL:  {result.after}' in printed
    assert str(result.curves) in printed
    saved = batches.load_batch(tmp_path / 'run' / 'batches' / 'batch_000004.npz')
    second = (saved['mask'] > 0) & (saved['minibatch'][:, None] == 2)
    assert np.abs(saved['logp_new'] - saved['logp_old'])[second].max() > 2e-5  # it trained
    assert calibrate.main([str(tmp_path / 'run')]) == 0
    printed = capsys.readouterr().out
    assert 'not judged: entropy collapse' in printed and '4 steps; start and end need 10' in printed
    assert 'fine: replay share: kept ids of 100.0% of tokens, experts of' in printed
    drawn = {path.stem for path in (tmp_path / 'run' / 'calibration').iterdir()}
    assert {'clip_range', 'length', 'clip_share', 'expert_drift'} <= drawn


@pytest.mark.slow
@pytest.mark.parametrize('name', ['dapo', 'vapo'])
def test_tiny_run_of_other_algorithms(name, tmp_path):
    config = get_config(f'tiny=true,algorithm={name}')
    result = run(config, tmp_path / 'run')
    check_run(result, tmp_path / 'run', config)


SMALL = dict(
    task__held_out=256,
    model__embed_dim=64,
    model__expert_dim=64,
    warm_start__optimizer__learning_rate=3e-3,
    steps=150,
    optimizer__decay_steps=150 * 8,
    evaluation__every=50,
    checkpoint__every=150,
)


@pytest.mark.slow
def test_a_small_quickstart_gains_ten_points(tmp_path):
    """The main job with a tenth of the parameters; 22 points when it was written."""
    config = tmp_path / 'config.json'
    config.write_text(json.dumps(get_config(None, **SMALL)))
    script = (
        'import json, pathlib, sys; from policyopt import train; work = pathlib.Path(sys.argv[2]);'
        'train.run(train.start(json.loads(pathlib.Path(sys.argv[1]).read_text()), work), work)'
    )
    # One device, with the compiler's optimisations, as a user's run has them.
    environment = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
    command = [sys.executable, '-c', script, str(config), str(tmp_path / 'run')]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    result = metrics.read(tmp_path / 'run' / 'metrics.jsonl')[-1]
    assert 0.4 <= result['before'] <= 0.55
    assert result['after'] - result['before'] >= 0.1


@pytest.mark.parametrize(
    ('argument', 'changes', 'message'),
    [
        ('tiny,algorithm=gspoo', {}, 'Did you mean `gspo`'),
        ('tiny', dict(algorithm_kw=dict(lows=0.1)), 'has no argument `lows`. Did you mean `low`'),
        ('tiny', dict(stepz=3), 'config has no `stepz`. Did you mean `steps`'),
        ('tiny', dict(steps=0), r'config.steps must lie in \[1, inf\], got 0'),
        (
            '',
            dict(steps=0, optimizer__decay_steps=0),
            r'config.steps must lie in \[1, inf\], got 0',
        ),
        ('tiny', dict(steps=2.5), 'config.steps is 2.5; legal is int'),
        ('tiny', dict(minibatches=5), 'legal are divisors of the 32 rows'),
        ('tiny', dict(sampling__temprature=1.0), 'Did you mean `temperature`'),
        (
            'tiny',
            dict(sampling=dict(max_new_tokens=5, temperature=0.0)),
            'sampling.temperature is 0',
        ),
        ('tiny', dict(sampling__max_new_tokens=2), 'longest answer .* has 3 tokens'),
        ('tiny', dict(model__embed_dims=3), 'Did you mean `embed_dim`'),
        ('tiny', dict(model__vocab_size=3), 'config.model.vocab_size is 3'),
        ('tiny', dict(task__name='chain_sums'), 'Did you mean `chain_sum`'),
        ('tiny', dict(warm_start__accuracy=(0.5, 0.2)), 'warm_start.accuracy is'),
        ('tiny', dict(rollout__group_size=0), 'group_size is 0'),
        ('tiny', dict(rollout__group_size=1), 'group_size is 1, from which .*gspo learns nothing'),
        (
            'tiny,algorithm=reinforce',
            dict(rollout__group_size=1, dynamic_sampling=True),
            'group_size is 1, from which .*reinforce learns nothing',
        ),
        ('tiny', dict(optimizer__lr=0.1), 'config.optimizer has no `lr`'),
        ('tiny', dict(rollout__chunks=3), 'chunks is 3; legal are divisors of prompts, 8'),
        ('tiny', dict(tasks=dict(a=dict(size=9))), 'has both task and tasks'),
        ('tiny', dict(tokenizer='bytes'), "tokenizer is 'bytes'; legal is 'arithmetic', 'ascii'"),
        ('tiny', dict(replay__routing='recompute'), "needs config.logp_old='recomputed'"),
        (
            'tiny',
            dict(replay=dict(support=False), sampling=dict(max_new_tokens=5)),
            'truncates nothing',
        ),
        ('tiny', dict(reference_every=5), 'no term of policyopt.algorithms.gspo reads a reference'),
        ('tiny', dict(critic=dict(optimizer={}, own=True)), 'estimates no values'),
        (
            'tiny,algorithm=ppo_clip',
            dict(critic=dict(optimizer={})),
            'critic has no effect without',
        ),
        ('tiny', dict(model=dict(path='no/such/folder')), 'no/such/folder'),
        ('tiny,algorithm=dapo', dict(dynamic_sampling=True), 'has a keep rule of its own'),
        (
            'tiny',
            dict(length_buckets=dict(token_budget=64, widths=(8,))),
            'the widest must hold a whole row, 10 tokens',
        ),
        ('tiny,algorithm=grpo', dict(reference_every=0), r'reference_every must lie in \[1, inf\]'),
        ('tiny', dict(rollout__prompts=800), 'config.rollout.prompts is 800: a batch of 800 needs'),
        ('tiny', dict(warm_start__batch=800), 'config.warm_start.batch is 800: a batch of 800'),
        ('tiny', dict(task__held_out=0), 'held_out of config.task is 0, but config.warm_start'),
        (
            'tiny,algorithm=trpo',
            dict(optimizer=dict(learning_rate=0.1)),
            'config.optimizer has no effect: policyopt.algorithms.trpo takes natural-gradient',
        ),
        ('tiny', dict(tokenizer='ascii', model=dict(path='x')), 'config.model.path brings its own'),
    ],
)
def test_wrong_config_fails_before_any_compile(argument, changes, message):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        recipe.prepare(get_config(argument, **changes))


def test_unknown_argument_of_the_config():
    with pytest.raises(ValueError, match='Did you mean `algorithm`'):
        get_config('algoritm=gspo')


@pytest.mark.parametrize('name', po.algorithms.names())
def test_every_algorithm_has_a_config(name):
    setup = recipe.prepare(get_config(f'tiny,algorithm={name}'))
    assert setup.config.algorithm == f'policyopt.algorithms.{name}'
    critic = {'ppo_clip', 'ppo_penalty', 'vc_ppo', 'vapo'}
    assert setup.model.config.value_head == (name in critic)


def test_full_config_is_legal_and_its_splits_are_disjoint():
    setup = recipe.prepare(get_config(None))
    assert len(setup.task.held_out) == 512
    assert {i.prompt for i in setup.task.train}.isdisjoint(i.prompt for i in setup.task.held_out)
    assert max(len(i.ids) for i in setup.task.train) <= 20


def test_every_field_of_the_config_has_a_reader():
    """Each field of each section is read, as `.field`, beyond the check that it is legal."""
    text = ''
    for path in (ROOT / 'policyopt').rglob('*.py'):
        code = re.sub(r'""".*?"""', '', path.read_text(), flags=re.S)
        text += re.sub(r'def __post_init__.*?(?=\n\n)', '', code, flags=re.S)
    sections = [recipe.RunConfig]
    for section in sections:
        hints = {f.name: f for f in dataclasses.fields(section)}
        for name in hints:
            assert re.search(rf'\.{name}\b', text), f'{section.__name__}.{name} is read nowhere'
        for hint in typing.get_type_hints(section).values():
            kinds = [hint, *typing.get_args(hint)]
            sections.extend(t for t in kinds if dataclasses.is_dataclass(t) and t not in sections)
    assert len(sections) > 12


def test_earlier_run_is_moved_aside_and_nothing_else_is_touched(tmp_path, capsys):
    workdir = tmp_path / 'run'
    for count in range(3):
        workdir_lib.move_aside(workdir, workdir_lib.claim(workdir)).close()
        (workdir / 'config.json').write_text(str(count))
    assert (tmp_path / 'run-1' / 'config.json').read_text() == '0'
    assert (tmp_path / 'run-2' / 'config.json').read_text() == '1'
    assert f'moved to {tmp_path / "run-2"}' in capsys.readouterr().out
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'thesis.tex').write_text('')
    with pytest.raises(ValueError, match='holds files that are no run'):
        workdir_lib.claim(tmp_path / 'mine')


def test_warm_start_that_does_not_arrive_says_what_to_change(tmp_path):
    config = get_config('tiny', warm_start__max_steps=2, warm_start__every=10)
    config['warm_start']['accuracy'] = (0.9, 1.0)
    with pytest.raises(ValueError, match='after 2 steps of warm start, not 90%: raise'):
        run(config, tmp_path / 'run')


@pytest.mark.parametrize(
    ('correct', 'total', 'low', 'high'),
    [(0, 10, 0, 0.2775), (8, 10, 0.4902, 0.9433), (10, 10, 0.7225, 1), (150, 512, 0.2553, 0.3339)],
)
def test_wilson_interval(correct, total, low, high):
    """The ends solve |p - k/n| = z sqrt(p (1-p) / n)."""
    found = evaluate.wilson(correct, total)
    np.testing.assert_allclose(found, (low, high), atol=1e-4)
    for p in found:
        if 0 < p < 1:
            gap = abs(p - correct / total)
            np.testing.assert_allclose(gap, 1.959964 * np.sqrt(p * (1 - p) / total), atol=1e-7)
    assert evaluate.wilson(0, 0) == (0, 1)


def test_display_in_a_terminal_and_out_of_it(capsys):
    from rich.console import Console

    values = {'reward': 0.5, 'policy/frozen': 0.25, 'unknown': 3.0}
    with metrics.Display('RL', 40, Console(force_terminal=False)) as display:
        for step in range(1, 41):
            display.update(step, values)
    start, *lines = capsys.readouterr().out.splitlines()
    assert start == 'RL 0/40  compiling ...'
    assert len(lines) == 21 and lines[0] == 'RL 1/40  reward 0.500  frozen 25.0%'
    assert lines[-1].endswith('  0:00 left') and 'unknown' not in lines[0]
    with metrics.Display('RL', 2, Console(force_terminal=True, width=120)) as display:
        display.update(1, values)
        display.update(2, values)
    assert 'reward 0.500' in capsys.readouterr().out


def test_display_of_a_stage_that_goes_on_or_may_end_early(capsys):
    from rich.console import Console

    plain = Console(force_terminal=False)
    with metrics.Display('warm start', 100, plain, start=40, at_most=True) as display:
        for step in (50, 60):
            display.update(step, {'rollout/kept': 1.0, 'skipped': 0.0})
            display.note('why')
        display.update(70, {'rollout/kept': 0.5, 'accuracy': 0.25, 'held_out': 0.5})
    start, first, note, second, third = capsys.readouterr().out.splitlines()
    assert start == 'warm start 40/100  compiling ...' and note == 'why'
    assert first.strip() == 'warm start 50/100' and 'kept' not in second
    assert 'sampled accuracy 25.0%  held-out accuracy 50.0%  kept 50%' in third
    assert 'at most 0:00 left' in third
    with metrics.Display('RL', 50, Console(force_terminal=True, width=120), start=40):
        pass
    assert '40/50' in capsys.readouterr().out


def test_what_is_explained_once():
    setup = recipe.prepare(get_config('tiny', ema=0.9))
    assert 'greedy, by the moving average' in reinforce.explanation(setup)
    usual = {'rollout/kept': 1.0, 'rollout/not_judged': 0.0, 'skipped': 0.0}
    assert not list(reinforce.remarks(setup, usual))
    kept, judged, skipped = reinforce.remarks(setup, dict.fromkeys(usual, 0.5))
    assert 'fewer than its 32 rows in rollout.max_rounds=30 rounds' in kept
    assert 'no reward' in judged and 'skipped' in skipped


def test_changes_in_words():
    assert metrics.change(0.4609) == 'a gain of 46.1 points'
    assert metrics.change(-0.125) == 'a loss of 12.5 points'
    assert metrics.change(0.0) == 'no change'


def test_records_round_trip(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    metrics.append(path, 'rl', 1, {'loss': 0.5, 'bad': float('nan')})
    metrics.append(path, 'rl', 2, {'loss': float('inf')})
    assert metrics.read(path) == [
        {'stage': 'rl', 'step': 1, 'loss': 0.5, 'bad': None},
        {'stage': 'rl', 'step': 2, 'loss': None},
    ]


def test_command_line_reports_a_misspelling_and_exits(tmp_path):
    command = [
        sys.executable,
        '-m',
        'policyopt.train',
        f'--config={QUICKSTART}:tiny',
        f'--workdir={tmp_path / "run"}',
        '--config.algorithm=policyopt.algorithms.grpoo',
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode != 0 and not (tmp_path / 'run').exists()
    assert 'Did you mean `grpo`' in done.stderr and 'Traceback' not in done.stderr


def test_a_config_file_that_is_not_there():
    """Named in one line, with the file that is meant."""
    for argv in (['--config=configs/quikstart.py:tiny'], ['--config', 'configs/quikstart.py']):
        found = commands.missing_config(['train', *argv, '--config.steps=3'])
        assert found == (
            '--config: there is no file configs/quikstart.py. Did you mean `configs/quickstart.py`?'
        )
    assert commands.missing_config(['train', '--config=configs/quickstart.py:tiny']) == ''


def test_watch_is_checked_before_the_folder_is_touched(tmp_path):
    with pytest.raises(ValueError, match='--profile is 3:5; config.steps is 2'):
        train.start(get_config('tiny'), tmp_path / 'run', train.Watch(profile=(3, 5)))
    assert not (tmp_path / 'run').exists()


def test_accuracy_of_each_task():
    items = [data.Item('', (), '', {}, task) for task in 'aabba']
    found = evaluate.Accuracy(3, 5, (), (True, False, True, True, False))
    parts = evaluate.by_task(found, items)
    assert {name: (p.correct, p.total) for name, p in parts.items()} == {'a': (1, 3), 'b': (2, 2)}
    assert evaluate.by_task(found._replace(right=(True, True)), items[:2]) == {}
