"""Counts of compiled programs: loops, products, traffic, collectives; and what is made of them."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import scale
from policyopt import models, scoring, sharding
from policyopt.plan import (
    costs,
    hardware,
    hlo,
    measure,
    planning,
    report,
    roofline,
    steps,
    store,
    suggest,
)

LAYERS, ROWS, WIDTH = 5, 16, 32
CHIP = hardware.CHIPS['v5p']


def compiled(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*args).compile()


def scanned(weights, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()


def unrolled(weights, x):
    for i in range(LAYERS):
        x = jnp.tanh(x @ weights[i])
    return x.sum()


def test_a_scan_costs_what_its_unrolled_form_does():
    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    found = {}
    for name, function in dict(scan=scanned, flat=unrolled).items():
        program = compiled(jax.grad(function), *shapes)
        module = hlo.parse(program.as_text())
        found[name] = costs.count(module), costs.count(module, once=True), program.cost_analysis()
    # Forward one product a layer; backward two, but none for the first layer's input.
    product = 2 * ROWS * WIDTH * WIDTH
    assert found['flat'][0].flops == (3 * LAYERS - 1) * product
    assert found['scan'][0].flops == 3 * LAYERS * product
    assert found['scan'][0].unknown == []
    # The compiler counts bodies once, as `once` does, and more than products.
    assert found['scan'][1].flops == 3 * product
    assert 3 * product <= found['scan'][2]['flops'] < 3 * product * 1.3
    assert found['scan'][0].bytes > 3 * found['scan'][1].bytes / 2


def test_loops_in_loops_multiply_and_loops_on_data_are_asked_for():
    def nested(w, x):
        def inner(_, x):
            return x @ w

        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.fori_loop(2, 9, inner, x), x)

    def data(w, x):
        going = lambda s: (s[0] < 8) & (s[1][0, 0] > 0)  # noqa: E731
        return jax.lax.while_loop(going, lambda s: (s[0] + 1, s[1] @ w), (0, x))[1]

    shapes = (WIDTH, WIDTH), (ROWS, WIDTH)
    product = 2 * ROWS * WIDTH * WIDTH
    assert costs.count(hlo.parse(compiled(nested, *shapes).as_text())).flops == 21 * product
    module = hlo.parse(compiled(data, *shapes).as_text())
    once, told = costs.count(module), costs.count(module, loops={'while': 8})
    assert once.flops == product and len(once.unknown) == 1
    assert told.flops == 8 * product and told.unknown == []


def test_collectives_by_kind_and_axis():
    mesh = sharding.make_mesh([('data', 4), ('tensor', 2)])
    split = jax.NamedSharding(mesh, jax.P('data', 'tensor'))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=split)

    def total(x):
        def local(x):
            return jax.lax.psum(x, 'data'), jax.lax.all_gather(x, 'tensor', axis=1, tiled=True)

        specs = jax.P(None, 'tensor'), jax.P('data')
        step = jax.shard_map(local, mesh=mesh, in_specs=jax.P('data', 'tensor'), out_specs=specs,
                             check_vma=False)  # fmt: skip
        return jax.lax.fori_loop(0, 3, lambda i, s: (s[0] + step(s[1])[0], step(s[1])[1]),
                                 (jnp.zeros((2, 64)), x))  # fmt: skip

    module = hlo.parse(jax.jit(total).lower(x).compile().as_text())
    found = costs.count(module, [('data', 4), ('tensor', 2)]).collectives
    part = 2 * 32 * 4  # a device's bytes of x
    assert found['all-reduce', ('data',)] == 3 * 2 * part * 3 / 4
    assert found['all-gather', ('tensor',)] == 3 * part


@pytest.mark.parametrize(
    ('tail', 'group', 'axes'),
    [
        ('replica_groups={{0,1},{2,3}}', (0, 1), ('tensor',)),
        ('replica_groups=[2,4]<=[8]', (0, 1, 2, 3), ('fsdp', 'tensor')),
        ('replica_groups=[4,2]<=[2,4]T(1,0)', (0, 4), ('data',)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", (0, 2, 4, 6), ('data', 'fsdp')),
        ('source_target_pairs={{0,2},{2,0}}', (0, 2), ('fsdp',)),
        ('replica_groups={}', tuple(range(8)), ('data', 'fsdp', 'tensor')),
    ],
)
def test_replica_groups(tail, group, axes):
    mesh = [('data', 2), ('fsdp', 2), ('tensor', 2)]
    found = hlo.first_group(f', channel_id=1, {tail}, dimensions={{0}}', 8)
    assert tuple(sorted(found)) == group
    assert costs.crossed(found, mesh) == axes


TEXT = """HloModule m

%fused (a: bf16[6,8,16], b: bf16[6,16,4]) -> f32[6,8,4] {
  %a = bf16[6,8,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[6,16,4]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = f32[6,8,4]{2,1,0} convolution(%a, %b), window={size=6 stride=5 pad=0_0 lhs_dilate=6}, \
dim_labels=0bf_0io->0bf, metadata={op_name="jit(f)/dot_general"}
}

ENTRY %main (x: bf16[6,8,16], y: bf16[6,16,4]) -> f32[6,8,4] {
  %x = bf16[6,8,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[6,16,4]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %my_kernel.3 = bf16[6,8,16]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"block": 1
}}, metadata={op_name="jit(f)/pallas_call"}
  %splash_mha_fwd.1 = bf16[6,8,16]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %o = (bf16[6,8,16]{2,1,0}, u32[]) outfeed(%my_kernel.3, %x)
  ROOT %f = f32[6,8,4]{2,1,0:T(8,128)} fusion(%x, %y), kind=kOutput, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"1750"}}
}
"""


def test_products_written_as_convolutions_and_what_is_not_seen_into():
    found = costs.count(hlo.parse(TEXT))
    assert found.flops == 2 * 6 * 8 * 16 * 4  # a product for each of 6, not for 6 x 6
    assert found.cycles == 1750 and found.silent == {'my_kernel': 1}
    assert found.kernels == {'my_kernel': 1, 'splash_mha_fwd': 1}
    assert found.kernel_flops == 2 * (2 * 6 * 8 * 8 * 16 / 2)  # two products, half of the pairs
    assert found.kernel_bytes == 2 * 6 * 8 * 16 * 2
    assert found.host == ['outfeed o']
    fusion = 6 * 8 * 16 * 2 + 6 * 8 * 4 * 4  # y is not in HBM
    kernel = 2 * 6 * 8 * 16 * 2
    assert found.bytes - fusion - kernel == 3 * 6 * 8 * 16 * 2 + 4  # the outfeed
    with pytest.raises(ValueError, match='ENTRY'):
        hlo.parse('nothing')


MOVES = """HloModule m

%sliced (p: bf16[8,64], i: s32[]) -> bf16[2,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %d = bf16[2,64]{1,0:T(8,128)S(1)} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={2,64}
}

ENTRY %main (x: bf16[8,64], v: f32[16,8], i: s32[]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %v = f32[16,8]{1,0:T(8,128)S(1)} parameter(1)
  %i = s32[] parameter(2)
  %LINE
  ROOT %r = bf16[8,64]{1,0} bitcast(%x)
}
"""
X, V, TWO = 8 * 64 * 2, 16 * 8 * 4, 2 * 64 * 2  # bytes of x, of v, and of two rows of x


@pytest.mark.parametrize(
    ('line', 'moved'),
    [
        # Copies begun early: (destination, source, what the end waits for).
        ('c = (bf16[8,64]{1,0:S(1)}, bf16[8,64]{1,0}, u32[]{:S(2)}) copy-start(%x)', X),
        ('c = (f32[16,8]{1,0}, f32[16,8]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%v)', V),
        ('c = (bf16[8,64]{1,0}, bf16[8,64]{1,0}, u32[]{:S(2)}) copy-start(%x)', 2 * X),
        ('c = bf16[8,64]{1,0:S(1)} copy(%x)', X),
        ('c = bf16[8,64]{1,0} copy-done(%x)', 0),
        # Slices into faster memory read what they take, those of faster memory nothing.
        ('s = bf16[2,64]{1,0:S(1)} slice(%x), slice={[0:2], [0:64]}', TWO),
        ('s = bf16[2,64]{1,0} slice(%x), slice={[0:2], [0:64]}', 2 * TWO),
        ('s = f32[2,8]{1,0:S(1)} slice(%v), slice={[0:2], [0:8]}', 0),
        ('s = f32[2,8]{1,0} slice(%v), slice={[0:2], [0:8]}', 2 * 8 * 4),
        ('s = ((bf16[8,64]{1,0}), bf16[2,64]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%x)', TWO),
        ('s = ((bf16[8,64]{1,0}, s32[]), bf16[2,64]{1,0:S(1)}, s32[]{:S(2)}) '
         'async-start(%x, %i), calls=%sliced', TWO),
        ('s = bf16[2,64]{1,0:S(1)} fusion(%x, %i), kind=kLoop, calls=%sliced', TWO + 4),
        # Written in place: the update is read and written, and the rest stays as it is.
        ('w = bf16[8,64]{1,0} dynamic-update-slice(%x, %x, %i, %i)', 2 * X),
        # Collectives begun early: (given, result, ...), but a sum has its result alone.
        ('g = (bf16[8,64]{1,0}, bf16[32,64]{1,0}) all-gather-start(%x), dimensions={0}', 5 * X),
        ('g = bf16[32,64]{1,0} all-gather-done(%x)', 0),
        ('p = (bf16[8,64]{1,0}, bf16[8,64]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) '
         'collective-permute-start(%x), source_target_pairs={{0,1}}', 2 * X),
        ('a = bf16[8,64]{1,0} all-reduce-start(%x), to_apply=%sliced', 2 * X),
        ('o = ((bf16[8,64]{1,0}), bf16[2,64]{1,0}, u32[]{:S(2)}) reduce-scatter-start(%x)',
         X + TWO),
    ],
)  # fmt: skip
def test_traffic_of_copies_slices_and_what_is_begun_early(line, moved):
    assert costs.count(hlo.parse(MOVES.replace('LINE', line))).bytes == moved


RAGGED = """HloModule m

ENTRY %main (x: bf16[1024,256], w: bf16[2,256,128], n: s32[2]) -> f32[1024,128] {
  %x = bf16[1024,256]{1,0} parameter(0)
  %w = bf16[2,256,128]{2,1,0} parameter(1)
  %n = s32[2]{0} parameter(2)
  ROOT %ragged-dot-none.1 = f32[1024,128]{1,0} custom-call(%n, %x, %w), \
custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":\
{"bytes_accessed":"1179656","flops":"67108864","transcendentals":"0"}}}
}
"""


def test_products_of_experts_count_the_rows_that_are_expected():
    module = hlo.parse(RAGGED)
    full, half = costs.count(module), costs.count(module, filled={'ragged-dot': 0.5})
    rows, weights = 1024 * (256 * 2 + 128 * 4), 2 * 256 * 128 * 2
    assert full.kernel_flops == 2 * 1024 * 256 * 128 and full.kernel_bytes == rows + weights + 8
    assert half.kernel_flops == 1024 * 256 * 128 and half.kernel_bytes == rows / 2 + weights + 8
    assert costs.count(module, filled={'splash': 0.5}) == full


def test_times_and_the_side_that_binds():
    found = costs.Costs(flops=459e10, bytes=2.765e9, cycles=35e6, kernel_flops=459e9)
    found.collectives['all-gather', ('fsdp',)] = 1.8e9
    times = roofline.times(found, CHIP)
    assert (times.memory, times.network, times.compiler, times.kernels) == pytest.approx(
        (1e-3, 1e-2, 2e-2, 1e-3)
    )
    assert times.compute == pytest.approx(1.1e-2) and times.bound == 'compute'
    assert times.roofline == times.compute and times.expected == pytest.approx(3.1e-2)


RUN = dict(remat='full', rows=128, micro=128, slots=256, batch_shards=64, kv_heads=8)
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
        rollout=dict(engine=dict(slots=256)),
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
    assert scoring.tokens_at_once(None, head, None, sharding.DEFAULT_RULES) == 192


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
