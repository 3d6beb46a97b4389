"""REINFORCE++: PPO's clip without a critic, advantages of the whole batch (arXiv:2501.03262).

Published: clip .2, k1 KL to the reference inside the reward with beta .001, z-score over the batch.

Not taken from the paper, chosen here: rows and minibatches, one answer a prompt, learning rate,
warm-up, lengths, steps. The paper charges each token the KL that follows it; here the whole
answer's KL is charged to its reward.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of reinforce_pp on problems with checkable answers.

        python -m policyopt.train --config=configs/reinforce_pp.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/reinforce_pp
        python -m policyopt.train --config=configs/reinforce_pp.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 1,024 tokens (at most a million tokens), scores them
    under the reference and takes them forward and backward once.

    Expected: no figure that carries over: the paper compares reward models and benchmarks of its
    own. `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that it
    learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.reinforce_pp'
    c.algorithm_kw = dict(eps=0.2, beta=1e-3)
    c.rollout = dict(prompts=1024, group_size=1)
    c.sampling = dict(max_new_tokens=1024, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 4
    c.microbatches = 32  # of 8 rows, for memory alone
    if tiny:
        presets.toy(c)
    return c
