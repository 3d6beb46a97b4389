"""CISPO: the ratio is a capped weight, and every token keeps its gradient (arXiv:2506.13585).

Published: no lower bound on the ratio, no KL, the token mean. The cap is not: 5 is commonly used.

Not taken from the paper, chosen here: 128 prompts with 16 answers, eight minibatches, answers of
40,000 tokens (the smaller of the paper's two budgets), learning rate 1e-6, the warm-up, the number
of steps. The paper retunes AdamW for very small gradients; here it has its defaults.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of cispo on problems with checkable answers.

        python -m policyopt.train --config=configs/cispo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/cispo
        python -m policyopt.train --config=configs/cispo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 2,048 answers of up to 40,000 tokens (at most 82 million tokens) and takes
    them forward and backward once.

    Expected: the paper's models reach 83.3 and 86.0 on AIME 2024 with budgets of 40,000 and 80,000
    tokens. `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that it
    learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.cispo'
    c.algorithm_kw = dict(cap=5.0)
    c.rollout = dict(prompts=128, group_size=16)
    c.sampling = dict(max_new_tokens=40000, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 8
    presets.long_answers(c)
    if tiny:
        presets.toy(c)
    return c
