"""Checkpoints: every bit comes back, and no fault injected here loses more than a step."""

import dataclasses
import errno
import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import policyopt as po
from policyopt import checkpoint, learner, settings, sharding
from policyopt.checkpoint import CheckpointConfig, CheckpointError, Checkpoints, Progress
from tests.learning import Running, fresh, none, random_batch

MODEL = Running()

# A read that fails leaves orbax's coroutines unfinished; their garbage collection complains.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


@dataclasses.dataclass(frozen=True)
class Rollout:
    prompts: int = 2
    chunks: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Stands in for recipe.RunConfig."""

    steps: int = 9
    seed: int = 0
    rollout: Rollout = Rollout()
    checkpoint: CheckpointConfig = CheckpointConfig()


def build():
    return learner.make_learner(
        MODEL,
        po.algorithms.grpo(),
        learner.make_optimizer(learner.OptimizerConfig(learning_rate=0.05)),
        ema=0.9,
        diagnose=none,
    )


@pytest.fixture(scope='module')
def learn():
    return build()


@pytest.fixture(scope='module')
def states(learn):
    """State and reference after 0, 1 and 2 updates, on the host."""
    state, found = fresh(learn, MODEL.init()), []
    for seed in range(3):
        found.append(jax.tree.map(jnp.copy, (state, state.params)))
        state, _, _ = learn.update(state, random_batch(seed))
    return found


def same(a, b):
    """Equal trees: structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def saved(folder, states, *, keep=3, config=Config()):  # noqa: B008, it is frozen
    folder.mkdir(exist_ok=True)
    with Checkpoints(folder, keep, config) as checkpoints:
        for step, (state, reference) in enumerate(states):
            checkpoints.save(state, reference, Progress(step, {'at': step}, 10 * step))
    return folder


def reopened(folder, config=Config()):  # noqa: B008
    return Checkpoints(folder, 2, config)


@pytest.fixture(scope='module')
def folder(tmp_path_factory, states):
    """A run saved after steps 0, 1 and 2."""
    return saved(tmp_path_factory.mktemp('checkpoints') / 'run', states)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / 'run')


# ============================================================================ what comes back


def test_every_bit_comes_back_whatever_the_updates_do_meanwhile(learn, tmp_path):
    """Updates give the state away while it is being written."""
    with Checkpoints(tmp_path, 9, Config()) as checkpoints:
        state, wanted = fresh(learn, MODEL.init()), []
        for step in range(4):
            wanted.append(jax.tree.map(jnp.copy, state))
            checkpoints.save(state, state.params, Progress(step, {'at': step}, step, 3, [1, 'x']))
            state, _, _ = learn.update(state, random_batch(step))
        checkpoints.wait()
        assert checkpoints.steps() == [0, 1, 2, 3]
        found = checkpoints.restore(lambda: (state, state.params))
        same(found.train, wanted[3])
        same(found.reference, wanted[3].params)
        assert found.progress == Progress(3, {'at': 3}, 3, 3, [1, 'x'])
        shutil.rmtree(checkpoints.folder / '3')
    with reopened(tmp_path) as checkpoints:
        same(checkpoints.restore(lambda: (state, state.params)).train, wanted[2])


def test_keys_and_narrow_types_come_back(tmp_path):
    rng = np.random.default_rng(0)
    noise = jnp.array(rng.normal(size=(5, 3)).astype(np.float32))
    kinds = (jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint16, jnp.bool_)
    tree = {str(i): noise.astype(kind) for i, kind in enumerate(kinds)}
    tree |= {'key': jax.random.key(7), 'keys': jax.random.split(jax.random.key(8), 3)}
    tree |= {'rbg': jax.random.key(5, impl='rbg'), 'nan': jnp.array([np.nan, -0.0, np.inf])}
    with Checkpoints(tmp_path, 2, Config()) as checkpoints:
        checkpoints.save(tree, None, Progress(0, None, 0))
        checkpoints.wait()
        found = checkpoints.restore(lambda: (tree, None))
        same(found.train, tree)
        assert found.reference is None


def test_the_newest_are_kept(tmp_path, states):
    saved(tmp_path / 'run', states, keep=2)
    with reopened(tmp_path / 'run') as checkpoints:
        assert checkpoints.steps() == [1, 2]


def test_restore_onto_a_mesh_goes_on_to_2e_5(folder, learn, states):
    """One update from the checkpoint on eight devices, against one device."""
    want, _, _ = learn.update(jax.tree.map(jnp.copy, states[2][0]), random_batch(5))
    mesh = sharding.make_mesh([('data', 1), ('fsdp', 2), ('expert', 1), ('tensor', 4)])
    with jax.set_mesh(mesh), reopened(folder) as checkpoints:
        meshed = build()
        found = checkpoints.restore(
            lambda: (fresh(meshed, MODEL.init()), fresh(meshed, MODEL.init()).params)
        )
        same(jax.device_get(found.train.params), jax.device_get(states[2][0].params))
        assert found.train.params['embed'].sharding.num_devices == 8
        assert not found.train.params['embed'].sharding.is_fully_replicated
        got, _, _ = meshed.update(found.train, random_batch(5))
    for name in ('params', 'ema'):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5),
            jax.device_get(getattr(got, name)),
            jax.device_get(getattr(want, name)),
        )


def test_fingerprint_sees_every_bit_and_no_layout():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3)).astype(np.float32)
    tree = {'x': jnp.array(x), 'y': jnp.arange(4, dtype=jnp.int8)}
    seen = {checkpoint.fingerprint(tree)}
    for word in range(24):
        for bit in (0, 13, 31):
            flipped = x.copy()
            flipped.view(np.uint32).flat[word] ^= np.uint32(1 << bit)
            seen.add(checkpoint.fingerprint(tree | {'x': jnp.array(flipped)}))
    seen.add(checkpoint.fingerprint(tree | {'x': jnp.array(x[::-1].copy())}))
    seen.add(checkpoint.fingerprint(tree | {'y': jnp.array([1, 0, 2, 3], jnp.int8)}))
    assert len(seen) == 1 + 24 * 3 + 2
    mesh = jax.make_mesh((8,), ('a',), axis_types=(jax.sharding.AxisType.Auto,))
    there = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P('a')))
    assert checkpoint.fingerprint(tree | {'x': there}) == checkpoint.fingerprint(tree)


# ============================================================================ damage


def damage(path, how):
    data = path.read_bytes()
    if how == 'truncated':
        path.write_bytes(data[: len(data) // 2])
    elif how == 'flipped':
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :])
    else:
        path.unlink()


@pytest.mark.fault
@pytest.mark.parametrize('how', ['truncated', 'flipped', 'missing'])
def test_damage_to_any_file_costs_at_most_its_own_step(how, folder, tmp_path, states, capsys):
    """Each file of the newest checkpoint in turn: the state is that of step 2 or 1, to the bit."""
    newest = folder / 'checkpoints' / '2'
    files = [p.relative_to(newest) for p in newest.rglob('*') if p.is_file() and p.stat().st_size]
    fell_back = 0
    for number, name in enumerate(files):
        run = shutil.copytree(folder, tmp_path / f'{number}')
        damage(run / 'checkpoints' / '2' / name, how)
        with reopened(run) as checkpoints:
            checkpoints.check()
            found = checkpoints.restore(lambda: states[0])
            step = found.progress.step
            assert step in (1, 2), name
            same((found.train, found.reference), states[step])
            fell_back += step == 1
            # the run goes on over the place of the damaged one
            checkpoints.save(*states[2], Progress(2, None, 20))
            checkpoints.wait()
            same(checkpoints.restore(lambda: states[0]).train, states[2][0])
    assert len(files) >= 8 and fell_back >= 4
    if how == 'truncated':
        assert 'the checkpoint of step 2 is not usable' in capsys.readouterr().out
        assert any((tmp_path / f'{i}' / 'damaged' / '2-0').is_dir() for i in range(len(files)))


@pytest.mark.fault
def test_no_usable_checkpoint_is_an_error_that_names_them(copy, states):
    for path in (copy / 'checkpoints').rglob('metadata'):
        path.write_text('{')
    with reopened(copy) as checkpoints:
        checkpoints.check()
        with pytest.raises(CheckpointError, match=r'no checkpoint .*\(step 2: .*Move .* elsewhere'):
            checkpoints.restore(lambda: states[0])
        assert checkpoints.steps() == [0, 1, 2]  # all left where they were


@pytest.mark.fault
def test_foreign_folders_are_passed_over(copy, states):
    (copy / 'checkpoints' / '7').mkdir()
    (copy / 'checkpoints' / '7' / 'model.bin').write_bytes(b'abc')
    (copy / 'checkpoints' / 'notes').mkdir()
    with ocp.CheckpointManager(copy / 'checkpoints') as manager:
        assert manager.save(8, args=ocp.args.StandardSave({'w': jnp.ones(3)}))
    with reopened(copy) as checkpoints:
        checkpoints.check()
        found = checkpoints.restore(lambda: states[0])
        assert found.progress.step == 2
        same(found.train, states[2][0])
    assert (copy / 'damaged' / '7-0' / 'model.bin').read_bytes() == b'abc'
    assert (copy / 'damaged' / '8-0').is_dir()


@pytest.mark.fault
def test_a_checkpoint_of_another_shape_is_passed_over(copy, states):
    wide = {'x': jnp.ones((3, 3))}
    with reopened(copy) as checkpoints:
        checkpoints.save(wide, None, Progress(3, None, 0))
        checkpoints.wait()
        assert checkpoints.restore(lambda: states[0]).progress.step == 2


@pytest.mark.fault
def test_an_unfinished_save_does_not_count(copy, states):
    """What a killed process leaves: a folder that hasn't got its name yet."""
    left = shutil.copytree(
        copy / 'checkpoints' / '2', copy / 'checkpoints' / '3.orbax-checkpoint-tmp'
    )
    (left / 'commit_success.txt').unlink()
    with reopened(copy) as checkpoints:
        assert checkpoints.steps() == [0, 1, 2]
        checkpoints.save(*states[1], Progress(3, None, 30))
        checkpoints.wait()
        same(checkpoints.restore(lambda: states[0]).train, states[1][0])


@pytest.mark.fault
@pytest.mark.parametrize(('schema', 'age'), [(0, 'older'), (2, 'newer')])
def test_another_schema_is_an_error(schema, age, copy, states):
    for path in (copy / 'checkpoints').rglob('metadata'):
        path.write_text(json.dumps({'schema': schema, 'whatever': 'it held'}))
    with reopened(copy) as checkpoints:
        for look in (checkpoints.check, lambda: checkpoints.restore(lambda: states[0])):
            with pytest.raises(CheckpointError, match=f'an? {age} policyopt: its schema is') as e:
                look()
            assert 'Go on with that version' in str(e.value)


# ============================================================================ the config


@pytest.mark.fault
def test_fields_that_break_a_resume_are_all_named(copy):
    other = Config(steps=12, seed=3, rollout=Rollout(prompts=4, chunks=2))
    with reopened(copy, other) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.check()
    text = str(error.value)
    assert 'config.seed: 0 -> 3' in text and 'config.rollout.prompts: 2 -> 4' in text
    assert 'steps' not in text.partition('differ')[2].partition('Put')[0] and 'chunks' not in text
    assert 'name another --workdir' in text


def test_fields_that_do_not_are_remarked_on(copy, capsys):
    other = Config(steps=12, rollout=Rollout(chunks=2), checkpoint=CheckpointConfig(every=3))
    with reopened(copy, other) as checkpoints:
        checkpoints.check()
    out = capsys.readouterr().out
    for line in ('steps: 9 -> 12', 'rollout.chunks: 1 -> 2', 'checkpoint.every: 25 -> 3'):
        assert f'config.{line}' in out


@pytest.mark.fault
def test_fewer_steps_than_done_is_an_error(copy):
    with (
        reopened(copy, Config(steps=1)) as checkpoints,
        pytest.raises(CheckpointError, match='config.steps is 1, but .* has done 2'),
    ):
        checkpoints.check()


def test_a_field_that_is_new_or_gone_is_named():
    old, new = {'a.b': 1, 'gone': 2}, {'a.b': 1, 'new': None}
    found = settings.differences(old, new)
    assert found == ['config.gone: 2 -> not there', 'config.new: not there -> None']


@pytest.mark.parametrize('wrong', [dict(every=-1), dict(keep=0)])
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=f'checkpoint.{next(iter(wrong))} must lie in'):
        CheckpointConfig(**wrong)


# ============================================================================ the disk


@pytest.mark.fault
@pytest.mark.parametrize(
    ('code', 'advice'),
    [
        (errno.ENOSPC, 'no space is left on the disk. Free some'),
        (errno.EDQUOT, 'no space is left on the disk. Free some'),
        (errno.EACCES, 'the folder is not writable'),
        (errno.EROFS, 'the folder is not writable'),
        (errno.EIO, 'OSError: .*When that is mended'),
    ],
)
@pytest.mark.parametrize('when', ['save', 'wait_until_finished'])
def test_a_save_that_fails_says_what_to_do(code, advice, when, copy, states, monkeypatch):
    def fail(*args, **kwargs):
        try:
            raise OSError(code, 'injected')
        except OSError as error:
            raise RuntimeError('wrapped by a library') from error

    with monkeypatch.context() as patch:
        checkpoints = reopened(copy)
        patch.setattr(checkpoints._manager, when, fail)
        with pytest.raises(CheckpointError, match=advice) as error:
            checkpoints.save(*states[2], Progress(3, None, 30))
            checkpoints.wait()
        assert 'what was saved before is whole' in str(error.value)
    checkpoints._manager.close()
    shutil.rmtree(copy / 'checkpoints' / '3', ignore_errors=True)
    with reopened(copy) as checkpoints:
        same(checkpoints.restore(lambda: states[0]).train, states[2][0])


@pytest.mark.fault
def test_a_file_system_that_stops_writing_leaves_earlier_steps_whole(copy, states):
    """Real failures of real writes, in the thread that writes: files have a limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(CheckpointError, match='could not be written to'):  # noqa: SIM117
            with reopened(copy) as checkpoints:
                checkpoints.save(*states[1], Progress(3, None, 30))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with reopened(copy) as checkpoints:
        assert checkpoints.steps() == [0, 1, 2]
        same(checkpoints.restore(lambda: states[0]).train, states[2][0])
        checkpoints.save(*states[1], Progress(3, None, 30))  # and it can be tried again
        checkpoints.wait()
        assert checkpoints.steps()[-1] == 3
