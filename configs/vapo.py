"""VAPO: VC-PPO with clip-higher, token mean, adaptive lambda, NLL (arXiv:2504.05118).

Published: clip .2 and .28; lambda 1 for the critic and 1 - 1 / (.05 n) for the policy on answers of
n tokens; .1 times the NLL of right answers; 512 prompts with 16 answers in minibatches of 512; 50
steps of value pretraining; learning rates 1e-6 and 2e-6, a warm-up and then a constant rate.

Not published, chosen here: how long the warm-up is, weight decay 0, answers of 20,480 tokens,
rewards 1 and 0. The paper's critic starts from a reward model; here it starts from the policy.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of vapo on problems with checkable answers.

        python -m policyopt.train --config=configs/vapo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/vapo
        python -m policyopt.train --config=configs/vapo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 8,192 answers of up to 20,480 tokens (at most 168 million tokens) and takes
    them through policy and critic forward and backward once; pretraining is as dear, for the critic
    alone.

    Expected: the paper's Qwen-32B reaches 60.4 on AIME 2024 (average of 32) within 5,000 updates,
    312 steps. `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that
    it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.vapo'
    c.algorithm_kw = dict(low=0.2, high=0.28, alpha=0.05, nll=0.1)
    c.rollout = dict(prompts=512, group_size=16)
    c.sampling = dict(max_new_tokens=20480, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=320)
    c.critic = dict(own=True, pretrain=dict(max_steps=50), optimizer=dict(learning_rate=2e-6))
    c.steps = 312
    c.epochs = 1
    c.minibatches = 16
    presets.long_answers(c)
    if tiny:
        presets.toy(c)
    return c
