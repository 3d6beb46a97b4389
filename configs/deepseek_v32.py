"""DeepSeek-V3.2's GRPO: unbiased KL, off-policy masking, replay (arXiv:2512.02556).

Published: the terms. Advantages are not divided by the deviation, rows that drifted off are masked,
the sampler's experts (Keep Routing) and its truncated support (Keep Sampling Mask) are replayed.

Not published, chosen here: clip .2, delta .5, top-p .95 within 64 ids, a reference that is synced
every 100 steps, learning rate, warm-up, steps. beta .001, 512 prompts with 16 answers, 16
minibatches and answers of 32,768 tokens are those of DeepSeek-R1 (arXiv:2501.12948). Left out:
rewards other than a right answer.
"""

from policyopt import presets


def get_config(argument=None):
    r"""A run of deepseek_v32 on problems with checkable answers.

        python -m policyopt.train --config=configs/deepseek_v32.py:model=PATH,data=FILE.jsonl \
            --workdir=runs/deepseek_v32
        python -m policyopt.train --config=configs/deepseek_v32.py:tiny=true --workdir=runs/tiny

    Cost: a step draws 8,192 answers of up to 32,768 tokens (at most 268 million tokens), scores
    them under the reference and takes them forward and backward once.

    Expected: no figure is published for this stage alone. `tiny=true` takes two steps on sums up to
    20: it shows that the recipe runs, not that it learns.
    """
    c, tiny = presets.begin(argument)
    c.algorithm = 'policyopt.algorithms.deepseek_v32'
    c.algorithm_kw = dict(eps=0.2, beta=1e-3, delta=0.5)
    c.replay = dict(support=True, routing='rollout')
    c.rollout = dict(prompts=512, group_size=16)
    c.sampling = dict(max_new_tokens=32768, temperature=1.0, top_p=0.95, support_size=64)
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=320)
    c.reference_every = 100
    c.steps = 500
    c.epochs = 1
    c.minibatches = 16
    presets.long_answers(c)
    if tiny:
        presets.toy(c, experts=4)
    return c
