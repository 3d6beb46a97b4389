"""RLOO: REINFORCE, each answer against the mean of the prompt's others (arXiv:2402.14740).

Published: 2 or 4 answers a prompt, learning rate 1e-6, 512 rows a rollout in two batches, KL to the
reference in the reward with beta .03 (summaries).

Not published, chosen here: answers of 512 tokens, the warm-up, the number of steps. The paper's
rewards come from a learned reward model, which is left out: here they are 1 and 0, against which
.03 is the same number and not the same strength.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of rloo on problems with checkable answers.

        python -m policyopt.train --config=configs/rloo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/rloo
        python -m policyopt.train --config=configs/rloo.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 512 answers of up to 512 tokens (at most a quarter of a million tokens),
    scores them under the reference and takes them forward and backward once.

    Expected: the paper's figures are win rates under a reward model; none carries over to checkable
    answers. `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that
    it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.rloo'
    c.algorithm_kw = dict(beta=0.03)
    c.rollout = dict(prompts=256, group_size=2)
    c.sampling = dict(max_new_tokens=512, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 2
    c.microbatches = 32  # of 8 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
