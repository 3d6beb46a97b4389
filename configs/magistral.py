"""Magistral: DAPO's loss, advantages z-scored over the minibatch (arXiv:2506.10910).

Published: upper clip .26 to .28, no KL, groups of equal rewards dropped; rewards of .1 for the form
(a single block of thought, then a \\boxed answer), without which all is 0, .9 for a right answer,
.1 for the language of the prompt, and a tenth of DAPO's length penalty.

Not taken from the paper, chosen here: lower clip .2, rows and minibatches, answers of 32,768 tokens
with the penalty on the last 4,096, learning rate, warm-up, steps. The toy's answers, of two digits,
are judged alone.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of magistral on problems with checkable answers.

        python -m policyopt.train --config=configs/magistral.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/magistral
        python -m policyopt.train --config=configs/magistral.py:tiny=true --workdir=runs/tiny

    Cost: a step learns from 4,096 answers of up to 32,768 tokens (at most 134 million tokens), each
    taken forward and backward once; dropped groups are drawn besides.

    Expected: the paper's Medium model gains nearly 50 points on AIME 2024 (pass at 1), without
    reasoning traces. `tiny=true` takes two steps on sums up to 20: it shows that the recipe runs,
    not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.magistral'
    c.algorithm_kw = dict(low=0.2, high=0.28, max_length=32768, cache=4096)
    c.rollout = dict(prompts=256, group_size=16, max_rounds=10)
    c.reward, c.reward_kw = 'magistral', dict(correct='math_equivalence')
    c.sampling = dict(max_new_tokens=32768, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 4
    presets.long_answers(c)
    if tiny:
        c.algorithm_kw.update(max_length=presets.TOY_TOKENS, cache=1)
        presets.toy(c)
    return c
