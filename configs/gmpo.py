"""GMPO: the geometric mean of an answer's clipped token ratios (arXiv:2507.20673).

Published: log-ratios cut at .4 on either side.

Not taken from the paper, chosen here: 128 prompts with 8 answers, answers of 3,000 tokens, four
minibatches, learning rate 1e-6, the warm-up, weight decay 0, no KL, the number of steps.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of gmpo on problems with checkable answers.

        python -m policyopt.train --config=configs/gmpo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/gmpo
        python -m policyopt.train --config=configs/gmpo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 3,000 tokens (at most 3 million tokens) and takes them
    forward and backward once.

    Expected: the paper's 7B model gains 4.1 points over GRPO, on average over five mathematical
    benchmarks. `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not
    that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.gmpo'
    c.algorithm_kw = dict(clip=0.4)
    c.rollout = dict(prompts=128, group_size=8)
    c.sampling = dict(max_new_tokens=3000, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 4
    c.microbatches = 64  # of 4 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
