"""TRPO: one natural-gradient step a rollout within a KL budget (arXiv:1502.05477).

Published: delta .01, for control tasks.

Not published for language models, chosen here: everything else, the group-mean baseline included.
The optimizer has no say: the step's length comes from delta and a line search.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of trpo on problems with checkable answers.

        python -m policyopt.train --config=configs/trpo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/trpo
        python -m policyopt.train --config=configs/trpo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 1,024 tokens (at most a million tokens) and takes them
    through the model some dozens of times: conjugate gradients and the line search pass over all
    rows each time.

    Expected: no published figure for language models. `tiny=true` takes two steps on sums up to 20:
    it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.trpo'
    c.algorithm_kw = dict(delta=0.01)
    c.rollout = dict(prompts=128, group_size=8)
    c.sampling = dict(max_new_tokens=1024, temperature=1.0)
    c.optimizer = dict()
    c.steps = 200
    c.epochs = 1
    c.minibatches = 1  # its line search spends the whole KL budget on all rows
    c.microbatches = 128  # of 8 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
