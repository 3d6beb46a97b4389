"""Published shapes on TPU slices, without their weights: what `policyopt.plan` compiles."""

from ml_collections import ConfigDict

from policyopt import settings

# Fields of each model's public config.json, as models.ModelConfig names them.
SHAPES = {
    'qwen3-0.6b': dict(
        embed_dim=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=3072,
        tied=True,
    ),
    'qwen3-8b': dict(
        embed_dim=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=12288,
        tied=False,
    ),
    'qwen3-30b-a3b': dict(
        embed_dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        expert_dim=768,
        moe=dict(experts=128, top_k=8, precision='default'),
        tied=False,
    ),
}
SHARED = dict(vocab_size=151936, qk_norm=True, rope_theta=1e6, max_length=40960)
HALF = dict(dtype='bfloat16', param_dtype='bfloat16', precision='default')


def get_config(argument=None):
    r"""A run of GSPO, or of GRPO with routing replay, of a published shape with random weights.

        python -m policyopt.plan --config=configs/pods.py:model=qwen3-8b,length=8192 \
            --topology=v5p:4x4x4

    Arguments: model (qwen3-0.6b, qwen3-8b, qwen3-30b-a3b), algorithm (gspo, grpo), length (tokens
    of a row, a sixteenth of them the prompt), rows (of a step, in two minibatches), microbatches
    (of a minibatch), slots (rows that decode together), fsdp, expert and tensor (sizes of these
    mesh axes; data takes the devices that are left), remat, gather (weights that fsdp splits are
    gathered once for each call of the decoder, not for each token). Experts are split over expert
    and tensor: over the first, devices hold tokens of their own, over the second the same.

    Cost: nothing is trained; a compile takes a minute of a CPU core. Expected: docs/scale.md.
    """
    given = settings.parse_argument(
        argument,
        model='qwen3-0.6b',
        algorithm='gspo',
        length=8192,
        rows=256,
        microbatches=2,
        slots=256,
        fsdp=8,
        tensor=1,
        expert=1,
        remat='full',
        gather=True,
    )
    for name, legal in (('model', SHAPES), ('algorithm', ('gspo', 'grpo'))):
        settings.check_names(f'the {name} of the config', [given[name]], legal)
    c = ConfigDict()
    c.model = dict(**SHAPES[given['model']], **SHARED, **HALF, remat=given['remat'])
    c.tokenizer = 'arithmetic'
    prompt = given['length'] // 16
    c.task = dict(prompt_width=prompt)
    mixture = given['model'].endswith('a3b')
    c.algorithm = f'policyopt.algorithms.{given["algorithm"]}'
    if given['algorithm'] == 'gspo':
        c.algorithm_kw = dict(low=3e-4, high=4e-4)
        c.replay = dict(support=True, routing=None)
    else:
        c.algorithm_kw = dict(eps=0.2, beta=0.0)
        c.replay = dict(support=True, routing='rollout' if mixture else None)
    c.rollout = dict(prompts=given['rows'] // 8, group_size=8)
    c.rollout.engine = dict(slots=given['slots'], steps=64, prefill_width=256, prefill_rows=64)
    c.rollout.engine.gather = given['gather']
    c.sampling = dict(max_new_tokens=given['length'] - prompt, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.evaluation = dict(every=25, batch=64)
    c.minibatches = 2
    c.microbatches = given['microbatches']
    sizes = {name: given[name] for name in ('fsdp', 'expert', 'tensor')}
    c.mesh = (('data', -1), *sizes.items())
    if mixture:
        c.rules = dict(batch=('data', 'fsdp', 'expert'), experts=('expert', 'tensor'))
    return c
