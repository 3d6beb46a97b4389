"""Dr. GRPO: no division by an answer's length or a group's deviation (arXiv:2503.20783).

Published: 8 answers a prompt, clip .2, no KL, answers of 3,000 tokens at most, over which the loss
is divided for every row.

Not taken from the paper, chosen here: 128 prompts a step, a single update, learning rate 1e-6, the
warm-up, weight decay 0, the number of steps.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of dr_grpo on problems with checkable answers.

        python -m policyopt.train --config=configs/dr_grpo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/dr_grpo
        python -m policyopt.train --config=configs/dr_grpo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 3,000 tokens (at most 3 million tokens) and takes them
    forward and backward once.

    Expected: the paper's 7B model reaches 43.3 % on AIME 2024. `tiny=true` takes two steps on sums
    up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.dr_grpo'
    c.algorithm_kw = dict(length=3000, eps=0.2)
    c.rollout = dict(prompts=128, group_size=8)
    c.sampling = dict(max_new_tokens=3000, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 1
    c.microbatches = 256  # of 4 rows, for memory alone
    if tiny:
        c.algorithm_kw.length = presets.TOY_TOKENS
        presets.toy(c)
    return c
