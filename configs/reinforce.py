"""REINFORCE with the batch's mean reward as its baseline (Williams 1992).

Published: the gradient, one update for each rollout, no clipping and no critic.

Not published for language models, chosen here: every number.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of reinforce on problems with checkable answers.

        python -m policyopt.train --config=configs/reinforce.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/reinforce
        python -m policyopt.train --config=configs/reinforce.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 1,024 tokens (at most a million tokens) and takes them
    through the model forward and backward once.

    Expected: no published figure for language models; it is the plain baseline of the others.
    `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.reinforce'
    c.algorithm_kw = dict()
    c.rollout = dict(prompts=128, group_size=8)
    c.sampling = dict(max_new_tokens=1024, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 1
    c.microbatches = 128  # of 8 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
