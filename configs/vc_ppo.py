"""VC-PPO: PPO whose critic is pretrained, with a lambda of its own (arXiv:2503.01491).

Published: lambda 1 for the critic and .95 for the policy, gamma 1, value pretraining with the
policy fixed until value loss and explained variance settle.

Not taken from the paper, chosen here: clip .2, 8,192 prompts with one answer in minibatches of 512,
learning rates 1e-6 and 2e-6 (those of the PPO baseline in arXiv:2504.05118), the warm-up, at most
100 steps of pretraining, answers of 16,384 tokens, the number of steps. The paper's critic starts
from a reward model; here it starts from the policy.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of vc_ppo on problems with checkable answers.

        python -m policyopt.train --config=configs/vc_ppo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/vc_ppo
        python -m policyopt.train --config=configs/vc_ppo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 8,192 answers of up to 16,384 tokens (at most 134 million tokens) and takes
    them through policy and critic forward and backward once; pretraining is as dear, for the critic
    alone.

    Expected: the paper's 32B model reaches 48.8 on AIME 2024, where plain PPO collapses.
    `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.vc_ppo'
    c.algorithm_kw = dict(eps=0.2, lam=0.95, critic_lam=1.0)
    c.rollout = dict(prompts=8192, group_size=1)
    c.sampling = dict(max_new_tokens=16384, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=320)
    c.critic = dict(own=True, pretrain=dict(max_steps=100), optimizer=dict(learning_rate=2e-6))
    c.steps = 300
    c.epochs = 1
    c.minibatches = 16
    presets.long_answers(c)
    if tiny:
        presets.toy(c)
    return c
