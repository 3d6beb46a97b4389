"""Programs lowered for a TPU slice that is not here, where the TPU compiler is installed."""

import functools

import jax
import jax.numpy as jnp
import pytest

from policyopt import recipe
from policyopt.plan import costs, hardware, hlo, measure, planning, steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hardware.installed(), reason='libtpu is not installed'),
]
TOPOLOGY, CHIPS = 'v5p:2x2x1', 4
COPIES = ('copy', 'copy-start', 'transpose')
LENGTH, HEADS, VOCAB, LAYERS, EXPERTS, SLOTS = 4096, 4, 151936, 3, 4, 8
CONFIG = dict(
    model=dict(
        vocab_size=VOCAB,
        embed_dim=256,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=2,
        head_dim=128,
        expert_dim=128,
        moe=dict(experts=EXPERTS, top_k=2, precision='default'),
        dtype='bfloat16',
        param_dtype='bfloat16',
        precision='default',
        remat='full',
        tied=False,
    ),
    task=dict(prompt_width=256),
    algorithm='policyopt.algorithms.grpo',
    algorithm_kw=dict(eps=0.2, beta=0.0),
    rollout=dict(
        prompts=2, group_size=8, engine=dict(slots=SLOTS, steps=4, prefill_rows=4, bucket=512)
    ),
    sampling=dict(max_new_tokens=LENGTH - 256),
    optimizer=dict(learning_rate=1e-6),
    evaluation=dict(),
    microbatches=2,
    mesh=(('data', -1), ('fsdp', 2), ('expert', 2)),
    rules=dict(batch=('data', 'fsdp', 'expert')),
)


SUPPORT = 32
TRUNCATED = CONFIG | dict(sampling=dict(max_new_tokens=LENGTH - 256, top_k=SUPPORT, top_p=0.95))


@functools.cache
def setup(truncated=False):
    return planning.prepare(TRUNCATED if truncated else CONFIG, TOPOLOGY)


@functools.cache
def built(step, truncated=False):
    """A program compiled for the slice, its module, and what is counted in it."""
    own = setup(truncated)
    made = measure.make(steps.programs(own)[step], own.mesh)
    module = hlo.parse(made.text)
    return made, module, costs.count(module, list(made.mesh.items()), made.loops)


def arrays(module):
    return {s for where in module.computations.values() for i in where for s in i.shapes}


@pytest.mark.parametrize('step', steps.STEPS)
def test_no_program_holds_what_it_should_not(step):
    made, module, found = built(step)
    rows = {'train': 2, 'score': 2, 'prefill': 1, 'decode': 2}[step]  # of a device
    # No logits of whole rows [B,T,V], and no scores of all pairs of tokens [B,H,T,T].
    length = 256 if step == 'prefill' else LENGTH
    wide = [s for s in arrays(module) if VOCAB in s.dims[1:]]  # the head itself is [V,D]
    assert not [s for s in wide if s.size >= rows * length * VOCAB]
    assert not [s for s in arrays(module) if s.dims.count(LENGTH) > 1 and s.size >= LENGTH**2]
    # Large parameters come in parts, never whole; of those of layers, no more than one is gathered.
    shapes = jax.tree.leaves(setup().model.shapes())
    large = [x for x in shapes if x.size > 2**18]
    given = module.computations[module.entry].parameters.values()
    assert not [i for i in given for s in i.shapes if s.size in [x.size for x in large]]
    stacked = [x.shape for x in large if x.shape[0] == LAYERS]
    assert len(stacked) >= 3
    assert not [s for s in arrays(module) if s.dims in stacked]
    # Nothing goes to the host or comes from it, and each loop says how often it runs.
    assert found.host == [] and found.unknown == []
    # The cache is read where it lies: no layer of it is copied into another order.
    moved = [i for where in module.computations.values() for i in where if i.opcode in COPIES]
    layer = rows * 2 * LENGTH * 128
    assert step != 'decode' or not [
        i for i in moved for s in i.shapes if LENGTH in s.dims and s.size % layer == 0
    ]


@pytest.mark.parametrize('step', steps.STEPS)
def test_programs_take_the_forms_for_tpu(step):
    made, module, found = built(step)
    kernels = ' '.join(found.kernels)
    # Attention over whole rows is the splash kernel, forward and backward; experts' products work
    # on their own rows: three of a layer forward, twice for full remat, and six backward.
    assert ('splash_mha_fwd' in kernels) == (step in ('train', 'score'))
    assert ('splash_mha_dkv' in kernels) == (step == 'train')
    runs = dict(train=2 * 12, score=2 * 3, prefill=3, decode=4 * 3)[step]  # microbatches, steps
    assert found.kernels['ragged-dot-none'] == runs * LAYERS
    record = measure.describe(made, hardware.CHIPS['v5p'])
    assert record['fits'] and record['tokens_per_second'] > 0
    inputs = LAYERS * 2 * LENGTH * 256 * 2  # bytes of what full remat keeps of two rows
    kept = record['memory']['activations']
    assert kept >= inputs if step == 'train' else kept == 0
    # What a step changes is given away and written in place: the state, and the cache.
    owned = {'train': ('parameters', 'optimizer'), 'decode': ('cache',)}.get(step, ())
    assert made.stats['alias'] >= sum(made.held[name] for name in owned)
    if step == 'decode':
        half = made.held['cache'] / 2  # keys or values
        moved = [i for where in module.computations.values() for i in where if 'copy' in i.opcode]
        assert not [i for i in moved if max((s.bytes for s in i.shapes), default=0) >= half]


def test_a_recorded_support_is_scored_without_logits():
    """Of the head, the rows that are named are gathered: no array is wider than tokens by kept."""
    made, module, found = built('score', truncated=True)
    head = VOCAB * 256
    assert not [s for s in arrays(module) if VOCAB in s.dims and s.size > head]
    assert any(s.dims[-1:] == (SUPPORT,) for s in arrays(module))
    assert found.host == [] and found.unknown == []
    # Operations: of the trunk, and of SUPPORT rows of the head for a token in place of all.
    whole = built('score')[2]
    tokens = 4 * (LENGTH - 256)  # of a device's four rows, those that are scored
    apart = 2 * tokens * 256 * (VOCAB - SUPPORT)
    assert whole.flops - found.flops == pytest.approx(apart, rel=0.1)


@pytest.mark.parametrize('topology', ['v5p:2x2x1', 'v5e:2x2', 'v6e:2x2'])
def test_experts_meet_their_own_rows_alone_on_every_chip(topology):
    """A product of each row with each expert would be eight times as much."""
    mesh = jax.sharding.Mesh(hardware.devices(topology)[:1], ('data',))
    placed = jax.NamedSharding(mesh, jax.P())
    rows, experts, sizes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
        for shape, dtype in (
            ((4096, 512), jnp.bfloat16),
            ((8, 512, 256), jnp.bfloat16),
            ((8,), jnp.int32),
        )
    )
    lowered = jax.jit(jax.lax.ragged_dot).lower(rows, experts, sizes)
    found = costs.count(hlo.parse(measure.compile_text(lowered)[1]))
    assert found.kernels['ragged-dot-none'] == 1 and found.flops == 0
    assert found.kernel_flops == 2 * 4096 * 512 * 256


def test_a_tensor_axis_smaller_than_the_torus_splits_it():
    config = CONFIG | dict(mesh=(('fsdp', 32), ('tensor', 2)), rules={})
    mesh = planning.prepare(config, 'v5p:4x4x4').mesh
    assert dict(mesh.shape) == dict(fsdp=32, tensor=2)
    assert isinstance(setup(), recipe.Setup)
