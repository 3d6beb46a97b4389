"""Counts of compiled programs: loops, products, traffic, collectives."""

import jax
import jax.numpy as jnp
import pytest

from policyopt import sharding
from policyopt.plan import costs, hardware, hlo, roofline

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
    endless = TEXT.replace('"1750"', f'"{2**63 - 1}"')  # as it writes what it can't estimate
    assert costs.count(hlo.parse(endless)).cycles == 0
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


BEGUN = """HloModule m

%start (a: bf16[4,16]) -> (bf16[4,16], bf16[4,64], u32[]) {
  %a = bf16[4,16]{1,0} parameter(0)
  %g = bf16[4,64]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={1}, \
frontend_attributes={chain_id="7"}
  ROOT %s = (bf16[4,16]{1,0}, bf16[4,64]{1,0}, u32[]{:S(2)}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}

%step (a: bf16[4,16], o: bf16[4,64], u: u32[], x: f32[8,8]) -> (f32[8,8], bf16[4,64]) {
  %a = bf16[4,16]{1,0} parameter(0)
  %o = bf16[4,64]{1,0} parameter(1)
  %u = u32[]{:S(2)} parameter(2)
  %x = f32[8,8]{1,0} parameter(3)
  %g = bf16[4,64]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={1}, \
frontend_attributes={chain_id="7"}
  %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (f32[8,8]{1,0}, bf16[4,16]{1,0}, bf16[4,64]{1,0}, u32[]{:S(2)}) tuple(%d, %a, %g, %u)
}

%done (a: bf16[4,16], o: bf16[4,64]) -> bf16[4,64] {
  %a = bf16[4,16]{1,0} parameter(0)
  %o = bf16[4,64]{1,0} parameter(1)
  %g = bf16[4,64]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={1}, \
frontend_attributes={chain_id="7"}
  ROOT %e = bf16[4,64]{1,0} custom-call(%a, %o, %g), custom_call_target="AsyncCollectiveDone"
}

%sums (p: f32[8], q: f32[16]) -> (f32[2], f32[4]) {
  %p = f32[8]{0} parameter(0)
  %q = f32[16]{0} parameter(1)
  %i = s32[] constant(0)
  %r = (f32[8]{0}, f32[16]{0}) all-reduce(%p, %q), replica_groups={{0,1,2,3}}, to_apply=%add
  %y = f32[8]{0} get-tuple-element(%r), index=0
  %z = f32[16]{0} get-tuple-element(%r), index=1
  %v = f32[2]{0} dynamic-slice(%y, %i), dynamic_slice_sizes={2}
  %w = f32[4]{0} dynamic-slice(%z, %i), dynamic_slice_sizes={4}
  ROOT %t = (f32[2]{0}, f32[4]{0}) tuple(%v, %w)
}

ENTRY %main (a: bf16[4,16], x: f32[8,8], p: f32[8], q: f32[16]) -> bf16[4,64] {
  %a = bf16[4,16]{1,0} parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  %p = f32[8]{0} parameter(2)
  %q = f32[16]{0} parameter(3)
  %s = (bf16[4,16]{1,0}, bf16[4,64]{1,0}, u32[]{:S(2)}) fusion(%a), kind=kCustom, calls=%start
  %b = bf16[4,16]{1,0} get-tuple-element(%s), index=0
  %o = bf16[4,64]{1,0} get-tuple-element(%s), index=1
  %u = u32[]{:S(2)} get-tuple-element(%s), index=2
  %t = (f32[8,8]{1,0}, bf16[4,16]{1,0}, bf16[4,64]{1,0}, u32[]{:S(2)}) fusion(%b, %o, %u, %x), \
kind=kOutput, calls=%step
  %c = bf16[4,16]{1,0} get-tuple-element(%t), index=1
  %h = bf16[4,64]{1,0} get-tuple-element(%t), index=2
  %f = (f32[2]{0}, f32[4]{0}) fusion(%p, %q), kind=kCustom, calls=%sums
  ROOT %e = bf16[4,64]{1,0} fusion(%c, %h), kind=kCustom, calls=%done
}
"""


def test_a_collective_beside_other_work_counts_once_and_sums_that_are_cut_as_scatters():
    found = costs.count(hlo.parse(BEGUN), [('fsdp', 4)])
    part, whole, inputs = 4 * 16 * 2, 4 * 64 * 2, (8 + 16) * 4
    assert found.collectives == {
        ('all-gather', ('fsdp',)): 3 * part,
        ('reduce-scatter', ('fsdp',)): inputs * 3 / 4,
    }
    # The gather reads its part and writes the whole; the product reads and writes its own.
    assert found.flops == 2 * 8 * 8 * 8
    assert found.bytes == part + whole + 2 * 8 * 8 * 4 + inputs + inputs / 4
    assert found.silent == {}


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
    # Four rows where a quarter is there: one row, which reads one of the two experts.
    few = hlo.parse(RAGGED.replace('1024', '4'))
    left = (
        costs.count(few).kernel_bytes - costs.count(few, filled={'ragged-dot': 0.25}).kernel_bytes
    )
    assert left == 3 * (256 * 2 + 128 * 4) + weights / 2


def test_times_and_the_side_that_binds():
    found = costs.Costs(flops=459e10, bytes=2.765e9, cycles=35e6, kernel_flops=459e9)
    found.collectives['all-gather', ('fsdp',)] = 1.8e9
    times = roofline.times(found, CHIP)
    assert (times.memory, times.network, times.compiler, times.kernels) == pytest.approx(
        (1e-3, 1e-2, 2e-2, 1e-3)
    )
    assert times.compute == pytest.approx(1.1e-2) and times.bound == 'compute'
    assert times.roofline == times.compute and times.expected == pytest.approx(3.1e-2)
