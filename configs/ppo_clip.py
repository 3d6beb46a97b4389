"""PPO with the clipped ratio and a critic of its own trunk (arXiv:1707.06347).

Published: clip .2 and lambda .95, for control tasks. The numbers for language models are those of
the PPO baseline in the VAPO paper (arXiv:2504.05118): 8,192 prompts with one answer each in
minibatches of 512, gamma 1, learning rates 1e-6 and 2e-6, a warm-up and then a constant rate.

Not published, chosen here: how long the warm-up is, answers of 2,048 tokens, the number of steps.
The baseline averages over answers first and starts its critic from a reward model; here tokens are
averaged and the critic starts from the policy.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of ppo_clip on problems with checkable answers.

        python -m policyopt.train --config=configs/ppo_clip.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/ppo_clip
        python -m policyopt.train --config=configs/ppo_clip.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 8,192 answers of up to 2,048 tokens (at most 17 million tokens) and takes
    them through policy and critic forward and backward once.

    Expected: the VAPO paper reports 5 on AIME 2024 (average of 32) for plain PPO with long answers:
    a critic without pretraining is what VC-PPO and VAPO mend. `tiny=true` takes two steps on sums
    up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.ppo_clip'
    c.algorithm_kw = dict(eps=0.2, lam=0.95, gamma=1.0)
    c.rollout = dict(prompts=8192, group_size=1)
    c.sampling = dict(max_new_tokens=2048, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=320)
    c.critic = dict(own=True, optimizer=dict(learning_rate=2e-6))
    c.steps = 300
    c.epochs = 1
    c.minibatches = 16
    c.microbatches = 64  # of 8 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
