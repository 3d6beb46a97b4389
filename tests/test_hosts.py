"""Several processes train as one."""

import re
import shutil
import subprocess
import sys

import pytest

from policyopt import hosts
from tests import processes
from tests.test_meshes import STEPS, agree, arrays_of, records_of


def processes_of(patch, *others):
    """This process is the second, and `exchange` adds what the `others` gave before it."""
    patch.setattr(hosts, 'first', lambda: False)
    patch.setattr(hosts, 'exchange', lambda value: [*others, value])


def test_processes_that_were_started_differently_are_told(monkeypatch):
    processes_of(monkeypatch, {'seed': '0', 'steps': '3'})
    hosts.check_alike({'seed': 0, 'steps': 3})
    with pytest.raises(hosts.HostError, match='steps is 4 in process 0 and 3 in process 0'):
        hosts.check_alike({'seed': 0, 'steps': 4})


def test_what_the_first_process_says_or_raises_reaches_the_others(monkeypatch):
    assert hosts.by_first(lambda: 3) == 3
    with pytest.raises(KeyError, match='mine'):
        hosts.by_first(lambda: {}['mine'])
    processes_of(monkeypatch, (5, None))
    assert hosts.by_first(lambda: pytest.fail('called')) == 5
    processes_of(monkeypatch, (None, 'OSError: no room'))
    with pytest.raises(hosts.HostError, match='process 0: OSError: no room'):
        hosts.by_first(lambda: pytest.fail('called'))


def test_others_write_and_print_nowhere(monkeypatch, tmp_path, capsys):
    with hosts.folder(tmp_path) as own:
        assert own == tmp_path
    monkeypatch.setattr(hosts, 'first', lambda: False)
    with hosts.folder(tmp_path) as own:
        print('lost')
        (own / 'metrics.jsonl').write_text('lost')
        assert own != tmp_path
    assert not own.exists() and not list(tmp_path.iterdir()) and capsys.readouterr().out == ''


@pytest.mark.parametrize('where', ['host', 'host:1,2', '1,2,0', 'host:one,2,0', 'host:1,2,x'])
def test_multihost_that_names_no_process_is_refused(where):
    with pytest.raises(ValueError, match='legal is .auto. or HOST:PORT,COUNT,INDEX'):
        hosts.join(where)


# A whole run on eight devices, whose answers each process judges in part.
RUN = """
import pathlib
import jax
from policyopt import learner, rewards, train
from tests import learning
from tests.test_meshes import config_of, odd

judged = []

def counted(text, tokens, example):
    judged.append(text)
    return odd(text, tokens, example)

rewards.make_judge = lambda spec, config: rewards.Local(counted)
make = learner.make_learner
learner.make_learner = lambda *a, **kw: make(*a, **{**kw, 'diagnose': learning.none})
config = config_of(
    dict(data=2, fsdp=2, expert=2),
    rollout__engine=dict(slots=16),
    evaluation__batch=16,
    checkpoint=dict(every=1, keep=9),
)
folder = pathlib.Path(args[0])
train.run(train.start(config, folder), folder)
print('JUDGED', len(judged), flush=True)
if count > 1:
    jax.distributed.shutdown()
"""


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """The run by one process, and how many answers it judged."""
    folder = tmp_path_factory.mktemp('hosts') / 'run'
    (out,) = processes.run(1, RUN, folder)
    return folder, judged(out)


def judged(out):
    return int(re.findall(r'JUDGED (\d+)', out)[0])


def same(folder, other):
    """Equal tokens and rewards, and parameters to 2e-5."""
    for found, wanted in zip(*map(records_of, (folder, other)), strict=True):
        assert found.keys() == wanted.keys()
        for name in ('reward', 'length', 'held_out', 'rollout/tokens'):
            assert found.get(name) == wanted.get(name)
    agree(arrays_of(folder, STEPS), arrays_of(other, STEPS))


@pytest.mark.slow
def test_several_processes_train_as_one(alone, tmp_path):
    """Two do, each judging answers of its own; four go on from what the two saved."""
    folder = tmp_path / 'run'
    found = processes.run(2, RUN, folder)
    same(folder, alone[0])
    parts = [judged(out) for out in found]
    assert sum(parts) == alone[1] > 0 and parts[0] == parts[1]
    assert 'RL 3/3' in found[0] and 'RL' not in found[1]  # the others are silent

    shutil.rmtree(folder / 'checkpoints' / str(STEPS))
    records = (folder / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
    (folder / 'metrics.jsonl').write_bytes(b''.join(records[:-1]))
    found = processes.run(4, RUN, folder)
    assert f'resumed after RL step {STEPS - 1} of {STEPS}' in found[0]
    same(folder, alone[0])


COMMAND = [
    *('-m', 'policyopt.train', '--config=configs/quickstart.py:algorithm=reinforce,tiny=true'),
    *('--config.steps=400', '--config.checkpoint.every=5', '--config.evaluation.batch=16'),
    *('--config.dynamic_sampling=False', '--config.optimizer.decay_steps=400'),
]


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_a_restart_goes_on(tmp_path):
    workdir, port = tmp_path / 'run', processes.free_port()
    command = [sys.executable, *COMMAND, f'--workdir={workdir}']
    logs = [tmp_path / f'log{i}' for i in range(2)]
    running = []
    for index, log in enumerate(logs):
        with log.open('wb') as file:
            where = f'--multihost=127.0.0.1:{port},2,{index}'
            env = processes.environment(2)
            running.append(subprocess.Popen([*command, where], env=env, stdout=file, stderr=file))
    try:
        processes.wait_for(lambda: (workdir / 'checkpoints' / '5').exists(), running)
        running[1].kill()
        assert running[0].wait(timeout=2 * hosts.LOST + 5) != 0
    finally:
        for process in running:
            process.kill()
    text = logs[0].read_text()
    assert 'process 0 of 2; when one is lost, the others end within' in text
    assert re.search('another (one|task)', text)  # ours, or jax's own words
    done = max(int(p.name) for p in (workdir / 'checkpoints').iterdir() if p.name.isdigit())
    env = processes.environment(1)
    steps = f'--config.steps={done + 1}'
    out = subprocess.run([*command, steps], env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert f'resumed after RL step {done} of {done + 1}' in out.stdout
    assert len(records_of(workdir)) > done
