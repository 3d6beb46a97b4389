"""DAPO: clip-higher, dynamic sampling, token mean, soft overlong penalty (arXiv:2503.14476).

Published: clip .2 and .28; 512 prompts with 16 answers, 16 updates on minibatches of 512 rows;
learning rate 1e-6 after a warm-up of 20 steps (320 updates); answers of 20,480 tokens at most, the
last 4,096 of them penalised; rewards 1 and -1; no KL; prompts that are all right or all wrong are
drawn again.

Not published, chosen here: weight decay 0, the norm that gradients are clipped to, ten rounds of
drawing at most, the number of steps. Masking truncated answers is optional:
algorithm_kw.filter_overlong.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of dapo on problems with checkable answers.

        python -m policyopt.train --config=configs/dapo.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/dapo
        python -m policyopt.train --config=configs/dapo.py:tiny=true --workdir=runs/tiny

    Cost: a step learns from 8,192 answers of up to 20,480 tokens (at most 168 million tokens), each
    taken forward and backward once; dynamic sampling draws more than it keeps.

    Expected: the paper's Qwen2.5-32B reaches 50 on AIME 2024 (average of 32). `tiny=true` takes two
    steps on sums up to 20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.dapo'
    c.algorithm_kw = dict(low=0.2, high=0.28, max_length=20480, cache=4096)
    c.rollout = dict(prompts=512, group_size=16, max_rounds=10)
    c.reward_kw = dict(right=1.0, wrong=-1.0)
    c.sampling = dict(max_new_tokens=20480, temperature=1.0)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=320)
    c.steps = 500
    c.epochs = 1
    c.minibatches = 16
    presets.long_answers(c)
    if tiny:
        c.algorithm_kw.update(max_length=presets.TOY_TOKENS, cache=1)
        presets.toy(c)
    return c
