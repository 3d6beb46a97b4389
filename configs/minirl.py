"""MiniRL: token REINFORCE, weighted against the sampler, routing replayed (arXiv:2512.01374).

Published: clip .2 and .27 on the ratio to the policy of the rollout, a detached weight against the
sampler, advantages not divided by the deviation, no division by length; with more than one update a
rollout, routing replay: here its R2, the experts that the trainer itself chose before the first
update.

Not taken from the paper, chosen here: 64 prompts with 16 answers, two minibatches, answers of
32,768 tokens, learning rate 1e-6, the warm-up, the number of steps. R3, the sampler's experts, is
--config.replay.routing=rollout; a model without experts needs --config.replay="{'routing': None}".
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of minirl on problems with checkable answers.

        python -m policyopt.train --config=configs/minirl.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/minirl
        python -m policyopt.train --config=configs/minirl.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 32,768 tokens (at most 34 million tokens), scores them
    once more before the first update, and takes them forward and backward once.

    Expected: the paper shows curves of a 30B mixture of experts, and no table to be matched.
    `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.minirl'
    c.algorithm_kw = dict(low=0.2, high=0.27)
    c.logp_old = 'recomputed'
    c.replay = dict(support=True, routing='recompute')
    c.rollout = dict(prompts=64, group_size=16)
    c.sampling = dict(max_new_tokens=32768, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 2
    presets.long_answers(c)
    if tiny:
        presets.toy(c, experts=4)
    return c
