"""Reports: what they read, compute, write and draw, of whole runs, halves, and several."""

import json
import pathlib

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from policyopt import dashboard, metrics, report, runs
from policyopt.workdir import RECORDS, SAMPLES, SETTINGS, TIMINGS

STEPS = 60


def make_run(folder, seed=0, steps=STEPS, experts=True, changes=()):
    """A folder as a run leaves it, of made-up numbers."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = {
        'algorithm': 'policyopt.algorithms.gspo',
        'task': {'name': 'basic_arithmetic'},
        'steps': steps,
        'optimizer': {'learning_rate': 1e-3},
        'seed': seed,
        **dict(changes),
    }
    (folder / SETTINGS).write_text(json.dumps(config))
    start = {'config_file': 'configs/gspo.py', 'overrides': {'steps': steps}}
    metrics.append(folder / TIMINGS, 'start', 0, {'time': 0.0, **start})
    metrics.append(folder / RECORDS, 'warm_start', 40, {'loss': 1.0, 'held_out': 0.25})
    for step in range(steps + 1):
        if step:
            values = {
                'reward': 0.5 + step / 200 + 0.05 * rng.normal(),
                'reward_std': 0.5,
                'accuracy': 0.5,
                'rollout/rows': 100.0,
                'rollout/kept': 0.75 if step in (11, 12) else 1.0,
                'rollout/not_judged': 0.0,
                'rollout/not_sampled': 0.5 if step == 7 else 0.0,
                'skipped': 0.25 if step == 9 else 0.0,
                'length': 3.0 + rng.random(),
                'kl_behavior/k3': 0.01 * rng.random(),
                'entropy': 1 / (step + 1),
                'policy/frozen': 0.1,
                'ratio/token_log/p1': -0.2,
                'ratio/token_log/p50': 0.0,
                'ratio/token_log/p99': 0.3,
                'grad_norm': float('nan') if step == 9 else 1.0 + rng.random(),
                'grad_norm/attention': 0.5,
                'update_norm': 0.01,
            }
            if experts:
                values |= {'moe/load_over_mean/0': 2.0, 'moe/load_over_mean/1': 3.0}
            metrics.append(folder / RECORDS, 'rl', step, values)
            times = {f'{name}_seconds': 1.0 for name in runs.TIMES}
            times |= {'seconds': 5.0, 'compiles': 4 if step in (1, 2, 30) else 0}
            metrics.append(folder / TIMINGS, 'rl', step, times | {'time': float(step)})
        if step % 20 == 0:
            share = 0.25 + step / 100
            values = {'held_out': share, 'low': share - 0.05, 'high': share + 0.05}
            metrics.append(folder / RECORDS, 'evaluation', step, values)
            row = {'problem': '1|2=', 'expected': '3', 'answer': f'{step}', 'right': step > 0}
            metrics.append(folder / SAMPLES, 'evaluation', step, row)
    return folder


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp('runs') / 'whole')


def test_running_means_against_loops():
    values = np.random.default_rng(0).normal(size=23)
    for width in (1, 5, 51):
        want = [values[max(i - width // 2, 0) : i + width // 2 + 1].mean() for i in range(23)]
        np.testing.assert_allclose(runs.smooth(values, width), want, atol=1e-12)
    assert [runs.width_of(n) for n in (1, 49, 50, 350, 10_000)] == [1, 1, 3, 15, 51]


def test_what_is_read(folder):
    run = runs.read(folder)
    assert run.title == 'GSPO on basic arithmetic' and run.steps == STEPS and not run.finished
    steps, values = run.series('entropy')
    np.testing.assert_allclose(values, 1 / (steps + 1))
    assert len(run.series('grad_norm').steps) == STEPS - 1 and not run.series('nothing')
    assert list(run.group('moe/load_over_mean')) == ['0', '1']
    assert report.recompiles(run) == [30]


def test_steps_done_twice_count_once(folder, tmp_path):
    """A resumed run: its timings keep what every process took."""
    again = make_run(tmp_path / 'run', steps=3)
    metrics.append(again / TIMINGS, 'start', 0, {'time': 9.0})
    metrics.append(again / TIMINGS, 'rl', 3, {'seconds': 7.0, 'compiles': 9})
    metrics.append(again / TIMINGS, 'rl', 4, {'seconds': 8.0})  # of which no record is left
    run = runs.read(again)
    assert run.times('seconds').values.tolist() == [5, 5, 7]
    assert report.recompiles(run) == [] and 'resumed 1 time' in report.state(run)


@pytest.mark.parametrize(
    ('config', 'title'),
    [
        ({'algorithm': 'a.dr_grpo', 'task': {'file': 'a/gsm.jsonl'}}, 'Dr. GRPO on gsm'),
        ({'algorithm': 'a.grpo', 'tasks': {'sums': {}, 'moves_2': {}}}, 'GRPO on sums and moves 2'),
        ({'algorithm': 'experiments.mine.my_method'}, 'my method'),
        ({}, 'run'),
    ],
)  # fmt: skip
def test_titles_in_words(config, title):
    run = runs.Run('run', pathlib.Path('run'), config, [], [], [])
    assert run.title == title


def test_bands(folder):
    """Of the reward, its standard error; of the accuracy, Wilson's interval, solved for."""
    run = runs.read(folder)
    (line,) = dashboard._reward(run)
    np.testing.assert_allclose(line.high - line.low, 2 * 1.96 * 0.5 / 10)
    (line,) = dashboard._sampled(run)
    for p in (line.low[0], line.high[0]):
        assert abs(p - 0.5) == pytest.approx(1.959964 * (p * (1 - p) / 100) ** 0.5)


def test_lines_that_are_computed(folder):
    """What is left of a step's time; ratios of their logarithms; medians, mirrored at the ends."""
    run = runs.read(folder)
    lines = {line.label: line.series.values for line in dashboard._seconds(run)}
    assert list(lines) == [*runs.TIMES, 'other']
    np.testing.assert_allclose(lines['other'], 5.0 - 4 * 1.0)
    found = [(line.label, line.series.values[0]) for line in dashboard._ratios(run)]
    named = [('99 % of tokens', 0.3), ('median of tokens', 0.0), ('1 % of tokens', -0.2)]
    assert found == [(label, pytest.approx(np.exp(x))) for label, x in named]
    values = np.random.default_rng(1).normal(size=9)
    mirrored = [*values[2:0:-1], *values, *values[-2:-4:-1]]
    want = [np.median(mirrored[i : i + 5]) for i in range(9)]
    np.testing.assert_array_equal(dashboard.median(values, 5), want)


def test_page_and_figure(folder, tmp_path):
    files = report.write(folder, out=tmp_path / 'out', more=['policy/frozen'])
    text = files.page.read_text()
    assert files.page == tmp_path / 'out' / 'report.md' and '(dashboard.png)' in text
    assert text.startswith('# GSPO on basic arithmetic\n')
    assert f'not finished, {STEPS} of {STEPS} RL steps.' in text
    assert '40 steps, to a held-out accuracy of 25.0%' in text
    held_out = '25.0% (20.0% to 30.0%) | 85.0% (80.0% to 90.0%) | 85.0% (step 60)'
    assert f'| held-out accuracy | {held_out} |' in text
    reward = runs.read(folder).series('reward').values
    means = [np.mean(reward[max(i - 1, 0) : i + 2]) for i in range(STEPS)]
    best = int(np.argmax(means))
    row = f'{means[0]:.3f} | {means[-1]:.3f} | {means[best]:.3f} (step {best + 1})'
    assert f'| reward | {row} |' in text and 'means of 3 steps' in text
    assert '| policy/frozen | 0.1 | 0.1 |  |' in text
    assert 'In 1 of 60 steps updates were skipped' in text and 'up to 25.0% of a step' in text
    assert 'In 2 of 60 steps the batch was not filled (steps 11, 12; at worst 75.0%' in text
    assert 'not finite: `grad_norm`' in text and 'at step 30: a shape changed' in text
    assert 'got no reward' not in text
    assert 'In 1 of 60 steps answers could not be drawn' in text and '(step 7; up to 50.0%' in text
    assert '- `configs/gspo.py`, with `steps = 60`' in text
    assert '| 1\\|2= | 3 | 0 ✗ | 60 ✓ |' in text
    pixels = image.imread(files.figure)
    assert pixels.shape[0] > 600 and pixels.shape[1] > 1200 and pixels.std() > 0.04


def test_a_page_that_can_not_be_written_leaves_the_old_one(folder, tmp_path, monkeypatch):
    (tmp_path / 'report.md').write_text('old')

    def fail(self, text, **settings):
        open(self, 'w').close()
        raise OSError('no space left')

    monkeypatch.setattr(pathlib.Path, 'write_text', fail)
    with pytest.raises(OSError, match='no space'):
        report.write(folder, out=tmp_path)
    assert (tmp_path / 'report.md').read_text() == 'old'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['dashboard.png', 'report.md']


def test_few_steps_are_not_dwarfed_by_the_first():
    """The axis of times ends at what most steps take, however few they are."""
    axis = Figure().subplots()
    assert dashboard._cut(axis, [np.array([117.0, 0.4, 0.5, 0.4, 0.4, 0.2, 0.1])]) != ''
    assert axis.get_ylim() == (0, pytest.approx(0.7))


def test_comparison(folder, tmp_path):
    """A dense run that is not finished, over one with experts."""
    other = make_run(tmp_path / 'dense', seed=1, steps=8, experts=False, changes={'ema': 0.9})
    files = report.write(folder, compare=[other], out=tmp_path / 'out')
    text = files.page.read_text()
    assert files.figure.name == 'comparison.png' and files.figure.is_file()
    assert '| metric at the end | whole | dense |' in text
    assert '| held-out accuracy | 85.0% (80.0% to 90.0%) | 25.0% (20.0% to 30.0%) |' in text
    assert '| `ema` | - | 0.9 |' in text and '| `seed` | 0 | 1 |' in text
    assert 'learning_rate' not in text
    assert '- **whole**: In 2 of 60 steps the batch' in text and '**dense**: Program' not in text


def test_runs_of_one_name_are_told_apart(folder, tmp_path):
    same = make_run(tmp_path / 'b' / 'whole', steps=2)
    names = [run.name for run in runs.read_all([folder, same])]
    assert names[1] == 'b/whole' and names[0].endswith('/whole')
    with pytest.raises(ValueError, match='compared with itself'):
        runs.read_all([same, tmp_path / 'b' / '..' / 'b' / 'whole'])


def test_a_run_without_rl_steps(tmp_path):
    folder = make_run(tmp_path / 'run', steps=0)
    (folder / SAMPLES).unlink()
    text = report.write(folder).page.read_text()
    assert 'There is no RL step yet' in text and 'Nothing.' in text
    (folder / SETTINGS).unlink()
    lines = (folder / RECORDS).read_text()
    (folder / RECORDS).write_text(lines.splitlines()[0] + '\n{"stage": "eval')  # being written
    assert report.write(folder).figure is None


def test_tasks_of_a_mixture():
    records = [
        {'stage': 'evaluation', 'step': s, 'held_out': 0.5, 'held_out/sums': x, 'held_out/games': 0}
        for s, x in ((0, 0.25), (5, 0.75))
    ]
    run = runs.Run('run', pathlib.Path('run'), {}, records, [], [])
    text = report.summary(run)
    assert '| held-out accuracy, sums | 25.0% | 75.0% | 75.0% (step 5) |' in text
    assert [line.label for line in dashboard._held_out(run)] == ['all tasks', 'games', 'sums']


def test_layers_that_are_many():
    """The largest, the median and the smallest of more than four layers."""
    records = [
        {'stage': 'rl', 'step': 1, **{f'moe/unused/{i}': i / 10 for i in range(11)}},
        {'stage': 'rl', 'step': 2, **{f'moe/unused/{i}': 0.0 for i in range(11)}},
    ]
    run = runs.Run('run', pathlib.Path('run'), {}, records, [], [])
    assert list(run.group('moe/unused')) == [str(i) for i in range(11)]
    lines = {x.label: x.series.values.tolist() for x in dashboard._layers('moe/unused')(run)}
    want = {'largest of the layers': [1, 0], 'median layer': [0.5, 0], 'smallest': [0, 0]}
    assert lines == want


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda f: [str(f.parent / 'whol')], 'Did you mean `whole`'),
        (lambda f: [str(f.parent)], 'it has no metrics.jsonl. Runs in it: whole'),
        (lambda f: [str(f), '--metrics=entropi'], 'has a metric `entropi`. Did you mean `entropy`'),
        (lambda f: [str(f), f'--compare={f}'], 'compared with itself'),
        (lambda f: [str(f), f'--compare={f.parent}/x'], 'there is no folder'),
    ],
)
def test_errors_in_one_line(folder, change, message, capsys):
    assert report.main(change(folder)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_line_that_is_no_record(tmp_path, capsys):
    folder = make_run(tmp_path / 'run', steps=1)
    with open(folder / RECORDS, 'a') as file:
        file.write('nonsense\n')
    assert report.main([str(folder)]) == 2
    assert 'line 4: no record of a run' in capsys.readouterr().err
