"""Event files and Weights & Biases, resumed without a point twice; traces of chosen steps."""

import gzip
import importlib.util
import json
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from policyopt import metrics, profiling, writers
from policyopt.workdir import RECORDS, TIMINGS
from tests.events import events_of


def do_steps(folder, steps, seconds, last=False):
    """What the RL stage writes for some steps."""
    for step in steps:
        values = {'reward': step / 4, 'bad': float('nan'), 'moe/unused/0': 0.5}
        metrics.append(folder / RECORDS, 'rl', step, values)
        times = {'seconds': seconds, 'time': 1000.0 + step}
        metrics.append(folder / TIMINGS, 'rl', step, times)
    if last:
        metrics.append(folder / RECORDS, 'evaluation', steps[-1], {'held_out': 0.75})


def killed_and_resumed(folder, names, before=(1, 2, 3, 4), cut=2):
    """Steps, a kill, and the rest from the checkpoint of step `cut` on; yields in between."""
    with writers.Follower(names, folder, {'steps': 6}):
        metrics.append(folder / RECORDS, 'warm_start', 10, {'loss': 1.5})
        do_steps(folder, before, seconds=1.0)
    lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    (folder / RECORDS).write_bytes(b''.join(lines[: 1 + cut]))
    with writers.Follower(names, folder, {'steps': 6}):
        do_steps(folder, range(cut + 1, 7), seconds=2.0, last=True)


def test_event_files_have_each_step_once(tmp_path):
    killed_and_resumed(tmp_path, ['tensorboard'])
    found = events_of(tmp_path)
    assert found['reward'] == [(step, step / 4) for step in range(1, 7)]
    assert found['time/seconds'] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]
    assert found['warm_start/loss'] == [(10, 1.5)]
    assert found['evaluation/held_out'] == [(6, 0.75)]
    assert found['moe/unused/0'] == [(step, 0.5) for step in range(1, 7)]
    assert set(found) == {
        'reward', 'time/seconds', 'warm_start/loss', 'evaluation/held_out', 'moe/unused/0'
    }  # fmt: skip


def test_a_writer_that_comes_later_gets_all_from_the_start(tmp_path):
    do_steps(tmp_path, [1, 2], seconds=1.0)
    with writers.Follower(['tensorboard'], tmp_path, {}):
        do_steps(tmp_path, [3], seconds=1.0)
    assert [step for step, _ in events_of(tmp_path)['reward']] == [1, 2, 3]


class FakeServer:
    """What Weights & Biases keeps: a history by step, of which a resumed run learns the length."""

    def __init__(self):
        self.runs = {}

    def module(self):
        def init(**settings):
            name = settings['id'] or f'run{len(self.runs)}'
            assert (settings['resume'] == 'allow') == (name in self.runs)
            history = self.runs.setdefault(name, {})

            def log(values, step):
                assert step not in history, 'a point twice'
                history[step] = values

            return types.SimpleNamespace(
                id=name,
                step=max(history, default=-1) + 1,
                log=log,
                define_metric=lambda *args, **kwargs: None,
                finish=lambda: None,
            )

        return types.SimpleNamespace(init=init)


def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch):
    server = FakeServer()
    monkeypatch.setitem(sys.modules, 'wandb', server.module())
    killed_and_resumed(tmp_path, ['wandb'])
    (history,) = server.runs.values()
    assert list(history) == list(range(8))  # a warm-start record, six steps, an evaluation
    assert [history[i]['rl/step'] for i in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert history[0] == {'warm_start/step': 10, 'warm_start/loss': 1.5}
    assert history[3] == {'rl/step': 3, 'rl/reward': 0.75, 'rl/moe/unused/0': 0.5,
                          'rl/time/seconds': 1.0}  # fmt: skip
    assert history[7] == {'evaluation/step': 6, 'evaluation/held_out': 0.75}


def test_names_of_writers(monkeypatch):
    assert writers.check([]) == ()
    with pytest.raises(ValueError, match='no `tensorbord`. Did you mean `tensorboard`'):
        writers.check(['tensorbord'])
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(
        ValueError, match='needs the package wandb, .* pip install .policyopt.wandb'
    ):
        writers.check(['wandb'])


def test_a_writer_that_fails_costs_its_own_points_only(tmp_path, monkeypatch, capsys):
    class Broken:
        def __init__(self, workdir, config):
            pass

        def write(self, record):
            raise OSError('no space')

    monkeypatch.setitem(writers.MAKERS, 'broken', Broken)
    with writers.Follower(['broken', 'tensorboard'], tmp_path, {}):
        do_steps(tmp_path, [1, 2], seconds=1.0)
    assert capsys.readouterr().out.count('--writers=broken stopped: OSError: no space') == 1
    assert len(events_of(tmp_path)['reward']) == 2

    def offline(workdir, config):
        raise RuntimeError('no\naccount')

    monkeypatch.setitem(writers.MAKERS, 'offline', offline)
    with (
        pytest.raises(
            writers.WriterError, match='offline could not begin: RuntimeError: no account'
        ),
        writers.Follower(['offline'], tmp_path, {}),
    ):
        pass


def test_half_a_line_waits_for_its_rest(tmp_path):
    path = tmp_path / 'x.jsonl'
    tail = writers.Tail(path)
    assert tail.take() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.take() == [{'a': 1}]
    with open(path, 'a') as file:
        file.write(': 2}\n')
    assert tail.take() == [{'a': 2}] and tail.take() == []


@pytest.mark.parametrize(('text', 'steps'), [('3:5', (3, 5)), ('4', (4, 4)), (' 2:2 ', (2, 2))])
def test_steps_to_profile(text, steps):
    assert profiling.parse(text) == steps


@pytest.mark.parametrize('text', ['5:3', '3:0', '0:2', 'a', '3:', '', '3-5', '-1'])
def test_steps_that_can_not_be_profiled(text):
    with pytest.raises(ValueError, match='legal is FIRST:LAST'):
        profiling.parse(text)


def test_a_profile_of_some_steps(tmp_path):
    """The trace has the function of the traced steps, and no other."""
    said, square, cube = [], jax.jit(lambda x: x * x), jax.jit(lambda x: x**3)
    x = jnp.ones(3)
    jax.block_until_ready((square(x), cube(x)))
    with profiling.Profile(2, 3, tmp_path / 'profile') as profile:
        for step in range(1, 5):
            profile.before(step, said.append)
            with jax.profiler.TraceAnnotation(f'step_{step}'):
                jax.block_until_ready(square(x))
            profile.after(step, said.append)
    (text,) = said
    assert text.startswith('profile of RL steps 2 to 3: open ') and 'ui.perfetto.dev' in text
    (path,) = (tmp_path / 'profile').rglob('perfetto_trace.json.gz')
    assert str(path) in text
    with gzip.open(path) as file:
        names = {event.get('name') for event in json.load(file)['traceEvents']}
    assert {'step_2', 'step_3'} <= names and not {'step_1', 'step_4'} & names


def test_a_profile_of_steps_that_are_past(tmp_path):
    said = []
    with profiling.Profile(2, 3, tmp_path / 'profile') as profile:
        for step in (7, 8):
            profile.before(step, said.append)
            profile.after(step, said.append)
    assert said == ['RL steps 2 to 3 are past: --profile traced none of them']
