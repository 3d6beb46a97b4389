"""What is made of compiled programs: records, suggestions, tables; with a pretended compiler."""

import json
import math
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import scale
from policyopt import evaluate, models, scoring, sharding, train_reward
from policyopt.plan import (
    costs,
    hardware,
    measure,
    planning,
    report,
    steps,
    store,
    suggest,
)
from tests.test_plan_counts import TEXT

CHIP = hardware.CHIPS['v5p']


RUN = dict(remat='full', rows=128, micro=128, slots=256, gather=True, batch_shards=64, kv_heads=8)
MESH = dict(data=8, fsdp=8, tensor=1)


@pytest.mark.parametrize(
    ('step', 'memory', 'run', 'field', 'value'),
    [
        ('train', dict(parameters=60.0, optimizer=60.0), {}, 'mesh.fsdp', 32),
        ('train', dict(parameters=1.0, temporary=200.0), dict(remat='none'), 'model.remat', 'full'),
        ('train', dict(parameters=1.0, temporary=200.0), {}, 'microbatches', 2),
        ('train', dict(), dict(rows=320, micro=320), 'microbatches', 5),  # 5 rows of a device
        ('train', dict(temporary=300.0), dict(rows=512, micro=512), 'microbatches', 4),
        ('train', dict(), dict(rows=384, micro=192), 'microbatches', 6),
        ('train', dict(parameters=1.0), dict(micro=64), 'mesh.fsdp', 16),
        ('train', dict(), dict(micro=64, mesh=dict(fsdp=64)), 'mesh.tensor', 2),
        ('decode', dict(cache=60.0, temporary=40.0), {}, 'rollout.engine.gather', False),
        ('decode', dict(parameters=1.0, cache=90.0), {}, 'rollout.engine.slots', 128),
        ('decode', dict(parameters=1.0, cache=260.0), {}, 'rollout.engine.slots', 64),
    ],
)
def test_what_is_suggested(step, memory, run, field, value):
    memory = {name: n * 2**30 for name, n in memory.items()} | {'hbm': CHIP.hbm}
    run = dict(RUN, mesh=MESH) | run
    found = suggest.suggest(step, memory, run)
    assert (found.field, found.value) == (field, value)
    config = dict(
        model=dict(remat='none'),
        rollout=dict(engine=dict(slots=256, gather=True)),
        mesh=tuple(run['mesh'].items()),
        microbatches=1,
    )
    changed = suggest.apply(config, found, run['mesh'])
    if field.startswith('mesh.'):
        sizes = dict(changed['mesh'])
        assert sizes[field[5:]] == value
        assert math.prod(sizes.values()) == math.prod(run['mesh'].values())
    else:
        for name in field.split('.'):
            changed = changed[name]
        assert changed == value


def test_nothing_is_left_to_suggest():
    run = dict(RUN, micro=64, mesh=dict(fsdp=1, tensor=8))
    assert suggest.suggest('train', dict(hbm=1.0), run) is None


def test_what_the_compiler_says_of_memory():
    text = 'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 120.50G of 95.74G hbm.'
    assert measure.out_of_memory(text) == {'total': 120.5 * 2**30}
    text = (
        'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory '
        'required for HLO temporaries (27.23G) exceeds available HBM (15.75G). HLO module: jit_f.'
    )
    assert measure.out_of_memory(text) == {'temporary': 27.23 * 2**30}
    assert measure.out_of_memory('INVALID_ARGUMENT: no') is None
    assert measure.out_of_memory('RESOURCE_EXHAUSTED: more') == {'total': math.inf}
    # What it says of temporary memory comes to what the program is given.
    program = steps.Program(lambda: None, 1, {}, {'parameters': 2.0**30}, {})
    memory = measure.refused(program, RuntimeError(text), CHIP)['memory']
    assert memory['total'] == 28.23 * 2**30 and memory['temporary'] == 27.23 * 2**30


def test_models_are_described_without_their_weights(tmp_path):
    sizes = dict(embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=1, mlp_dim=8)
    model = models.build(models.ModelConfig(vocab_size=16, **sizes))
    models.save(model, model.init(jax.random.key(0)), tmp_path)
    loaded, _ = models.load(tmp_path, remat='full')
    for path in tmp_path.glob('*.safetensors'):
        path.unlink()
    assert models.describe(tmp_path, remat='full').config == loaded.config
    with pytest.raises(ValueError, match='num_layers'):
        models.describe(tmp_path, num_layers=2)
    with pytest.raises(FileNotFoundError, match=r'config\.json'):
        models.describe(tmp_path / 'none')


def test_forms_follow_the_platform_of_the_mesh():
    assert sharding.platform() == jax.default_backend() == 'cpu'
    device = jax.sharding.AbstractDevice(device_kind='TPU v5', num_cores=2, platform='tpu')
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ('data',), kinds, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert sharding.platform() == 'tpu'
        head = 151936, 1024
        assert scoring.tokens_at_once(None, head, None, sharding.DEFAULT_RULES) == 4 * 832
        assert scoring.tokens_at_once(7, head, None, sharding.DEFAULT_RULES) == 7
        assert scoring.ids_at_once(head, sharding.DEFAULT_RULES) is None
    sizes = {
        (151936, 576): (512, 2048),
        (151936, 2048): (512, 1024),
        (32000, 10**6): (512, 128),
        (5000, 1024): (512, 1792),
        (2049, 1024): (512, 1152),
        (2048, 1024): (512, None),
        (64, 1024): (16384, None),
    }
    for head, size in sizes.items():
        tokens = scoring.tokens_at_once(None, head, None, sharding.DEFAULT_RULES)
        assert (tokens, scoring.ids_at_once(head, sharding.DEFAULT_RULES)) == size, head


@pytest.mark.parametrize(
    'command, argv', [(evaluate, ['nowhere']), (train_reward, ['nowhere', '--out=none'])]
)
def test_commands_ask_libtpu_before_anything_else(monkeypatch, command, argv):
    monkeypatch.setenv('LIBTPU_INIT_ARGS', '')
    assert command.main(argv) == 2
    assert os.environ['LIBTPU_INIT_ARGS'] == '--xla_tpu_enable_ragged_dot_kernel=true'


def test_libtpu_is_asked_for_the_kernel_of_experts(monkeypatch):
    monkeypatch.setenv('LIBTPU_INIT_ARGS', '')
    sharding.ask_libtpu()
    sharding.ask_libtpu()
    assert os.environ['LIBTPU_INIT_ARGS'] == '--xla_tpu_enable_ragged_dot_kernel=true'
    own = '--xla_tpu_enable_ragged_dot_kernel=false --other=1'
    monkeypatch.setenv('LIBTPU_INIT_ARGS', own)
    sharding.ask_libtpu()
    assert os.environ['LIBTPU_INIT_ARGS'] == own
    # A plan's programs are told the same, and count as others with it than without.
    assert measure.options_for('chlo.ragged_dot') == sharding.TPU_OPTIONS
    assert measure.options_for('dot_general') == {}
    assert planning.hash_of(Lowered('dot')) == store.text_hash('dot')
    assert planning.hash_of(Lowered('ragged_dot')) != store.text_hash('ragged_dot')


def test_records_are_found_again(tmp_path):
    kept = store.Store(tmp_path / 'deep' / 'plan.json')
    keys = [store.key_of(dict(a=a), 'v5p:2x2x1', s) for a in (1, 2) for s in ('train', 'score')]
    assert len(set(keys)) == 4
    for i, key in enumerate(keys):
        kept.put(key, dict(x=i, source=store.source_hash()))
    assert [store.Store(kept.path).get(key)['x'] for key in keys] == [0, 1, 2, 3]
    made = dict(source=store.source_hash(), versions=store.versions())
    assert store.fresh(made) and not store.fresh(dict(made, source='older'))
    kept.path.write_text('{')
    with pytest.raises(ValueError, match='no JSON'):
        kept.get('x')


@pytest.mark.parametrize(
    ('topology', 'error'),
    [('v5q:2x2', 'v5p'), ('v5p', 'CHIP:SHAPE'), ('v5p:2x0', 'CHIP:SHAPE'), ('v5p:2xb', 'CHIP')],
)
def test_topologies_that_are_none(topology, error):
    with pytest.raises(ValueError, match=error):
        hardware.chip_of(topology)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(hardware, 'installed', lambda: False)
    with pytest.raises(RuntimeError, match='pip install'):
        hardware.devices('v5p:2x2x1')


def record(**changes):
    label = dict(model='0.6B', algorithm='gspo', length=8192, topology='v5p:4x4x4', mesh=MESH,
                 step='train', rows=64)  # fmt: skip
    return dict(
        label=label, tokens=1000, fits=True, flops=1e12, bytes=1e9, bound='compute', silent={},
        memory=dict(parameters=2.0**30, total=2.0**31, hbm=CHIP.hbm, temporary=2.0**30),
        collectives=[dict(kind='all-reduce', axes=['data'], bytes=2.0**20)], kernels={'k': 2},
        seconds=dict(compute=1.0, memory=0.5, network=0.1, compiler=1.2, kernels=0.0,
                     roofline=1.0, expected=2.0),
        unknown=[], host=['outfeed o'], tokens_per_second=500.0, source=store.source_hash(),
        versions=store.versions(), counted=store.count_hash(),
    ) | changes  # fmt: skip


def test_reports_say_what_there_is():
    text = report.describe('train', record())
    for part in ('fits', '2.0 GiB  in all, of 95.0 GiB', 'bound by compute', '500 tokens/s',
                 'all-reduce over data', 'kernel k x 2', 'outfeed o'):  # fmt: skip
        assert part in text
    big = record(fits=False, error='Ran out of memory')
    assert 'DOES NOT FIT' in report.describe('train', big)
    lines = report.table([record(), big]).splitlines()
    assert len(lines) == 4 and len({line.count('|') for line in lines}) == 1
    assert '| data 8 x fsdp 8 | train | 64 | 2.0 of 95 | yes | compute | 2.00 s | 500 |' in lines[2]
    assert '| no | - | - | - |' in lines[3]
    older = record(source='older', counted='older')
    lines = report.table([record(), older, record(counted='older')]).splitlines()
    assert [line.split('|')[1].strip() for line in lines[2:5]] == [
        '0.6B',
        '0.6B \\* \\+',
        '0.6B \\+',
    ]
    assert lines[6].startswith('\\* ') and lines[7].startswith('\\+ ')
    assert json.loads(json.dumps(record())) == record()
    assert steps.STEPS == ('train', 'score', 'prefill', 'decode')
    assert np.isclose(report.GIB, hardware.GIB)


def test_the_published_table_is_of_its_records():
    cells = scale.cells()
    assert len({cell.name for cell in cells}) == len(cells) == 30
    keys = {
        store.key_of(scale.config_of(cell), cell.topology, cell.step): cell.model for cell in cells
    }
    kept = store.Store(scale.ROOT / 'docs' / 'scale.json').read()
    assert kept and set(kept) <= set(keys)
    page = scale.PAGE.read_text().replace(' \\*', '').replace(' \\+', '')
    for key, found in kept.items():
        now = dict(source=store.source_hash(), versions=store.versions())
        now |= dict(counted=store.count_hash())
        label = found['label'] | dict(model=keys[key])
        assert report.table([found | now | dict(label=label)]).splitlines()[2] in page


def test_what_is_said_of_programs_that_do_not_fit():
    label = dict(record()['label'], topology='v5e:4x4')
    small = record(fits=False, suggestion=['topology', 'one of 64 chips', 'why'], label=label)
    said = scale.unfit(small, [small, record(), record(fits=False)])
    assert said == (
        '- 0.6B train, 8,192 tokens, v5e:4x4: --topology=one of 64 chips: why. It fits v5p:4x4x4.'
    )
    assert 'nothing is left' in scale.unfit(record(fits=False), [])
    text = scale.described([record(), small], ['a', 'b'])
    assert text.endswith('\nNot compiled yet: 2 programs.\n\n- a\n- b\n') and said in text
    page = 'x\n\n| model | algorithm | old |\n| old |\n\n## y\nz\n'
    assert scale.written(page, text) == f'x\n\n{text}\n## y\nz\n'


# ============================================================================ a pretended compiler


class Lowered:
    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


@pytest.fixture
def compiler(monkeypatch):
    """Plans without libtpu: a program needs GiB by its rows, remat and mesh; what was compiled."""
    done = SimpleNamespace(compiled=[], program='', gib=lambda c: 1.0, held=1.0)

    def programs(setup):
        c = setup.config
        text = json.dumps(c, sort_keys=True) + done.program
        held = {'parameters': done.held * 2**30 / dict(c['mesh'])['fsdp']}
        return {'train': steps.Program(lambda: Lowered(text), 1000, {}, held, {})}

    def make(program, mesh, lowered):
        done.compiled.append(lowered.text)
        need = done.gib(json.loads(lowered.text.removesuffix(done.program)))
        if need * 2**30 > hardware.CHIPS['v6e'].hbm:
            raise RuntimeError(f'RESOURCE_EXHAUSTED: Used {need:.2f}G of 31.25G hbm. Too much.')
        stats = dict.fromkeys(measure.STATS, 0) | {'temp': int(need * 2**30)}
        return measure.Made(TEXT, stats, mesh, **measure.inputs_of(program))

    def run_of(setup):
        c, mesh = setup.config, dict(setup.config['mesh'])
        shards = mesh['data'] * mesh['fsdp']
        return dict(RUN, mesh=mesh, remat=c['model']['remat'], micro=128 // c['microbatches'],
                    batch_shards=shards)  # fmt: skip

    def prepare(config, topology):
        return SimpleNamespace(config=config, mesh=dict(config['mesh']))

    def label(setup, topology, step):
        return dict(step=step, mesh=setup.mesh)

    for name, value in dict(prepare=prepare, run_of=run_of, label=label).items():
        monkeypatch.setattr(planning, name, value)
    monkeypatch.setattr(planning.steps, 'programs', programs)
    monkeypatch.setattr(planning.measure, 'make', make)
    return done


PLANNED = dict(
    model=dict(remat='none'), microbatches=1, mesh=(('data', 8), ('fsdp', 8), ('tensor', 1))
)


def test_suggestions_are_followed_until_a_program_fits(compiler, tmp_path):
    compiler.gib = lambda c: 60 / c['microbatches'] + 100 * (c['model']['remat'] == 'none')
    kept, said = store.Store(tmp_path / 'plan.json'), []
    config, changes, found = planning.fit(PLANNED, 'v6e:8x8', 'train', kept, said.append)
    assert found['fits'] and found['memory']['total'] == 30 * 2**30
    assert [(c.field, c.value) for c in changes] == [('model.remat', 'full'), ('microbatches', 2)]
    assert config == PLANNED | dict(model=dict(remat='full'), microbatches=2)
    assert len(compiler.compiled) == len(said) + 1 == 3
    # Each try is kept, what did not fit as well; a second call compiles nothing.
    assert planning.fit(PLANNED, 'v6e:8x8', 'train', kept)[1:] == (changes, found)
    first = planning.plan(PLANNED, 'v6e:8x8', ['train'], kept)['train']
    assert not first['fits'] and 'Used 160.00G' in first['error']
    assert 'DOES NOT FIT' in report.describe('train', first)
    assert len(compiler.compiled) == 3


def test_following_suggestions_ends(compiler):
    compiler.gib = lambda c: 99.0
    config, changes, found = planning.fit(PLANNED, 'v6e:8x8', 'train')
    assert not found['fits'] and len(changes) == planning.TRIES == len(compiler.compiled) - 1
    assert math.prod(size for _, size in config['mesh']) == 64
    compiler.held, compiler.compiled[:] = 8 * 60.0, []
    whole = PLANNED | dict(mesh=(('data', 1), ('fsdp', 8), ('tensor', 1)))
    config, changes, found = planning.fit(whole, 'v6e:2x4', 'train')
    assert changes == [] and compiler.compiled == []  # arguments alone are too large
    assert found['suggestion'][:2] == ['topology', 'one of 64 chips, or of larger ones']
    assert 'not compiled' in report.describe('train', found)
    assert report.remedy(found).startswith('--topology=one of 64 chips')
    assert report.remedy(dict(suggestion=['microbatches', 2, 'fewer'])) == (
        '--config.microbatches=2: fewer'
    )
    assert report.remedy(dict(suggestion=None)) == ''


def test_other_errors_of_the_compiler_are_not_taken_for_a_lack_of_memory(compiler, monkeypatch):
    def make(program, mesh, lowered):
        raise RuntimeError('INVALID_ARGUMENT: no')

    monkeypatch.setattr(planning.measure, 'make', make)
    with pytest.raises(RuntimeError, match='INVALID_ARGUMENT'):
        planning.plan(PLANNED, 'v6e:8x8', ['train'])


def test_programs_are_counted_anew_without_a_compile(compiler, tmp_path, monkeypatch):
    kept = store.Store(tmp_path / 'plan.json')

    def planned(**options):
        return planning.plan(PLANNED, 'v6e:8x8', ['train'], kept, **options)['train']

    first = planned()
    assert first == planned() and len(compiler.compiled) == 1
    assert [path.suffix for path in (tmp_path / 'plan').iterdir()] == ['.gz']
    # Other counting: the compiled program is there.
    monkeypatch.setattr(store, 'count_hash', lambda: 'newer')
    monkeypatch.setitem(costs.SPLASH, 'splash_mha_fwd', 4)
    again = planned()
    assert again['counted'] == 'newer' and again['flops'] - first['flops'] == 2 * 6 * 8 * 8 * 16
    assert again == planned() and len(compiler.compiled) == 1
    # Other modules: lowered to the same program, it need not be compiled; to another, it must.
    monkeypatch.setattr(store, 'source_hash', lambda: 'newer')
    assert not store.fresh(planned()) and len(compiler.compiled) == 1
    checked = planned(check=True)
    assert store.fresh(checked) and len(compiler.compiled) == 1
    assert checked == again | dict(source='newer')
    monkeypatch.setattr(store, 'source_hash', lambda: 'newest')
    compiler.program = ' '
    assert planned(check=True)['lowered'] != first['lowered'] and len(compiler.compiled) == 2
    # Without the compiled program, counts stay as they were and are marked.
    monkeypatch.setattr(store, 'count_hash', lambda: 'newest')
    for path in (tmp_path / 'plan').iterdir():
        path.write_bytes(b'broken')
    assert report.mark_of(planned()) == '+' and len(compiler.compiled) == 2
