"""GSPO with one ratio for each turn, after arXiv:2507.18071; no paper has this one.

Published: GSPO's clip 3e-4 and 4e-4 and its four minibatches.

Not published, chosen here: the ratio of a turn, the weight 1 of turn rewards, and every other
number. This trainer's answers are one turn with one reward, so that outcome and turn reward are the
same and count twice; environments with turns are in policyopt.sampling.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of gspo_turn on problems with checkable answers.

        python -m policyopt.train --config=configs/gspo_turn.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/gspo_turn
        python -m policyopt.train --config=configs/gspo_turn.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 1,024 answers of up to 16,384 tokens (at most 17 million tokens) and takes
    them forward and backward once.

    Expected: nothing is published to be matched. `tiny=true` takes two steps on sums up to 20: it
    shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.gspo_turn'
    c.algorithm_kw = dict(low=3e-4, high=4e-4, coefficient=1.0)
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
