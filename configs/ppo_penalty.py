"""PPO with an adaptive KL penalty in place of the clip (arXiv:1707.06347).

Published: beta doubles where the KL is above 1.5 times its target and halves below two thirds of
it; lambda .95.

Not published for language models, chosen here: the target .01, the first beta 1, gamma 1, a critic
that shares the policy's trunk, four passes over the rows, and every other number.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of ppo_penalty on problems with checkable answers.

        python -m policyopt.train --config=configs/ppo_penalty.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/ppo_penalty
        python -m policyopt.train --config=configs/ppo_penalty.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 1,024 tokens (at most a million tokens) and takes them
    forward and backward four times.

    Expected: no published figure for language models. `tiny=true` takes two steps on sums up to 20:
    it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.ppo_penalty'
    c.algorithm_kw = dict(beta=1.0, target=0.01, lam=0.95, gamma=1.0)
    c.rollout = dict(prompts=1024, group_size=1)
    c.sampling = dict(max_new_tokens=1024, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 300
    c.epochs = 4
    c.minibatches = 4
    c.microbatches = 32  # of 8 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
