"""Programs lowered for a TPU slice that is not here, where the TPU compiler is installed."""

import functools

import jax
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


@functools.cache
def setup():
    return planning.prepare(CONFIG, TOPOLOGY)


@pytest.mark.parametrize('step', steps.STEPS)
def test_programs_for_a_slice(step):
    program = steps.programs(setup())[step]
    compiled, text = measure.compile_text(program.lower())
    module = hlo.parse(text)
    arrays = {s for where in module.computations.values() for i in where for s in i.shapes}
    rows = {'train': 2, 'score': 2, 'prefill': 1, 'decode': 2}[step]  # of a device
    # No logits of whole rows, and no scores of all pairs of tokens.
    limit = rows * LENGTH * VOCAB
    assert not [s for s in arrays if s.size >= limit]
    assert not [s for s in arrays if s.dims.count(LENGTH) > 1 and s.size >= LENGTH**2]
    # Large parameters come in parts, never whole.
    shapes = jax.tree.leaves(setup().model.shapes())
    large = [x.size for x in shapes if x.size > 2**18]
    given = module.computations[module.entry].parameters.values()
    assert not [i for i in given for s in i.shapes if s.size in large]
    found = costs.count(module, list(setup().mesh.shape.items()), program.loops)
    assert found.host == [] and found.unknown == []
    # The cache is read where it lies: no layer of it is copied into another order.
    moved = [i for where in module.computations.values() for i in where if i.opcode in COPIES]
    layer = rows * 2 * LENGTH * 128
    assert step != 'decode' or not [
        i for i in moved for s in i.shapes if LENGTH in s.dims and s.size % layer == 0
    ]
    # The forms for TPU: kernels for attention over whole rows; experts' own rows alone.
    kernels = ' '.join(found.kernels)
    assert ('splash' in kernels) == (step in ('train', 'score'))
    record = measure.describe(
        text, compiled.memory_analysis(), program, hardware.CHIPS['v5p'], setup().mesh
    )
    assert record['fits'] and record['tokens_per_second'] > 0
    inputs = LAYERS * 2 * LENGTH * 256 * 2  # bytes of what full remat keeps of two rows
    kept = record['memory']['activations']
    assert kept >= inputs if step == 'train' else kept == 0


def test_a_tensor_axis_smaller_than_the_torus_splits_it():
    config = CONFIG | dict(mesh=(('fsdp', 32), ('tensor', 2)), rules={})
    mesh = planning.prepare(config, 'v5p:4x4x4').mesh
    assert dict(mesh.shape) == dict(fsdp=32, tensor=2)
    assert isinstance(setup(), recipe.Setup)
