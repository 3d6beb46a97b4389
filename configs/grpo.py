"""GRPO as in DeepSeekMath: group z-score, KL to the reference in the loss (arXiv:2402.03300).

Published: 64 answers a prompt, batch 1,024 with a single update, answers of 1,024 tokens at most,
learning rate 1e-6, beta .04.

Not published, chosen here: clip .2 (without effect in a single update), the warm-up, weight decay
0, a reference that stays, the number of steps. The paper's rewards come from a learned reward
model, which is left out: here they are 1 and 0.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of grpo on problems with checkable answers.

        python -m policyopt.train --config=configs/grpo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/grpo
        python -m policyopt.train --config=configs/grpo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 1,024 tokens (at most a million tokens), scores them
    under the reference and takes them forward and backward once.

    Expected: the paper's 7B model went from 82.9 to 88.2 on GSM8K and from 46.8 to 51.7 on MATH.
    `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.grpo'
    c.algorithm_kw = dict(eps=0.2, beta=0.04)
    c.rollout = dict(prompts=16, group_size=64)
    c.sampling = dict(max_new_tokens=1024, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 1000
    c.epochs = 1
    c.minibatches = 1
    c.microbatches = 128  # of 8 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
