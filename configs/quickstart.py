"""The main job: a tiny transformer learns two-operand arithmetic, at first by imitation."""

from ml_collections import ConfigDict

from policyopt import settings

MAX_NEW_TOKENS = 5

# What published defaults assume (answers of thousands of tokens) and answers of five do not give.
SHORT_ANSWERS = {
    'dr_grpo': dict(length=MAX_NEW_TOKENS),
    'dapo': dict(max_length=MAX_NEW_TOKENS, cache=1),
    'gspo': dict(low=0.03, high=0.04),
    'gspo_token': dict(low=0.03, high=0.04),
    'gspo_turn': dict(low=0.03, high=0.04),
    'gspo_step': dict(low=0.03, high=0.04),
}


def get_config(argument=None):
    """Sums and differences of numbers with one or two digits, as in `47-85=` -> `-38`.

        make quickstart
        python -m policyopt.train --config=configs/quickstart.py:algorithm=gspo --workdir=runs/gspo

    GRPO, two cores: about three and a half CPU minutes after set-up. Held-out accuracy (greedy, 512
    problems) measured before and after RL: seed 0 from 40.4 % to 70.3 %, seed 1 from 42.4 % to
    58.2 %; how much a run gains depends on its warm start, which took 450 and 750 steps there.

    The argument is `algorithm=NAME` (any of policyopt.algorithms, or an import path) and
    `tiny=true` (two RL steps of a toy, in seconds, for tests), separated by commas.
    """
    chosen = settings.parse_argument(argument, algorithm='grpo', tiny=False)
    name, tiny = chosen['algorithm'], chosen['tiny']

    c = ConfigDict()
    c.seed = 0
    c.task = dict(
        name='chain_sum',
        kw=dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2),
        size=60_000,
        held_out=512,
        held_out_share=0.1,
        prompt_width=6,
        seed=0,
    )
    c.model = dict(embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=256)

    c.warm_start = dict(
        batch=128,
        max_steps=2000,
        every=10,
        accuracy=(0.4, 0.5),
        optimizer=dict(learning_rate=2e-3, warmup_steps=20),
    )

    c.algorithm = name if '.' in name else f'policyopt.algorithms.{name}'
    c.algorithm_kw = SHORT_ANSWERS.get(name, {})
    c.sampling = dict(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    c.rollout = dict(prompts=128, group_size=8, max_rounds=10)
    if name == 'dapo':
        c.rollout.wrong = -1.0
    c.optimizer = dict(learning_rate=4e-4, warmup_steps=20)
    c.steps = 250
    c.epochs = 1
    c.minibatches = 4
    c.microbatches = 1
    if name == 'trpo':
        c.minibatches = (
            1  # one natural step on all rows; its line search spends the whole KL budget
        )
    c.evaluation = dict(every=25, batch=512, temperature=0.0, samples=8)

    if tiny:
        c.task.update(size=1000, held_out=16, prompt_width=4)
        c.task.kw.max_digits = 1
        c.model.update(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=16)
        c.warm_start.update(batch=32, accuracy=(0.1, 1.0))
        c.warm_start.optimizer.learning_rate = 1e-2
        c.rollout.update(prompts=8, group_size=4, max_rounds=30)
        c.optimizer.update(learning_rate=1e-3, warmup_steps=0)
        c.steps, c.minibatches = 2, min(c.minibatches, 2)
        c.evaluation.update(batch=16, samples=2)
    return c
