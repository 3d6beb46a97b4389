"""GSPO-token: GSPO's ratio with a gradient of its own for each token (arXiv:2507.18071).

Published: as for GSPO, clip 3e-4 and 4e-4, four minibatches a rollout, no KL. With one advantage
for an answer, as here, its gradient is GSPO's.

Not published, chosen here: 64 prompts with 16 answers, answers of 16,384 tokens, learning rate
1e-6, the warm-up, weight decay 0, the number of steps.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of gspo_token on problems with checkable answers.

        python -m policyopt.train --config=configs/gspo_token.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/gspo_token
        python -m policyopt.train --config=configs/gspo_token.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 16,384 tokens (at most 17 million tokens) and takes
    them forward and backward once.

    Expected: what configs/gspo.py does, to rounding; no figure is published. `tiny=true` takes two
    steps on sums up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.gspo_token'
    c.algorithm_kw = dict(low=3e-4, high=4e-4)
    c.rollout = dict(prompts=64, group_size=16)
    c.sampling = dict(max_new_tokens=16384, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 4
    presets.long_answers(c)
    if tiny:
        c.algorithm_kw.update(low=0.1, high=0.1)
        presets.toy(c)
    return c
