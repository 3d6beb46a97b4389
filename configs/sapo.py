"""SAPO: a soft gate on the ratio in place of the clip (arXiv:2511.20347).

Published: temperatures 1.0 for positive and 1.05 for negative advantages.

Not taken from the paper, chosen here: 64 prompts with 16 answers, four minibatches, answers of
16,384 tokens, learning rate 1e-6, the warm-up, weight decay 0, no KL, the number of steps.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of sapo on problems with checkable answers.

        python -m policyopt.train --config=configs/sapo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/sapo
        python -m policyopt.train --config=configs/sapo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 16,384 tokens (at most 17 million tokens) and takes
    them forward and backward once.

    Expected: the paper shows curves against GSPO and GRPO, and no table to be matched. `tiny=true`
    takes two steps on sums up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.sapo'
    c.algorithm_kw = dict(tau_positive=1.0, tau_negative=1.05)
    c.rollout = dict(prompts=64, group_size=16)
    c.sampling = dict(max_new_tokens=16384, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 4
    presets.long_answers(c)
    if tiny:
        presets.toy(c)
    return c
