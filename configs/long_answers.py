"""Answers of 106 tokens, by VAPO or VC-PPO, each part of which can be left out.

Published (VAPO, arXiv:2504.05118; VC-PPO, arXiv:2503.01491): the algorithms' own numbers, lambda 1
for the critic, rewards for the outcome alone, value pretraining until loss and explained variance
settle, and for VAPO several answers to each problem.

Not published, chosen here: the task, all sizes and learning rates, when pretraining has settled.
"""

from ml_collections import ConfigDict

from policyopt import settings

BLOCKS = 21  # of an answer, of a letter and four signs each; the problem has two before them
# The parts of each algorithm that `without` may name.
PARTS = {
    'vapo': (
        'pretraining',
        'decoupled_gae',
        'adaptive_lambda',
        'clip_higher',
        'token_loss',
        'nll',
        'group_sampling',
    ),
    'vc_ppo': ('pretraining', 'decoupled_gae'),
}
LAMBDA = 0.95  # where it does not depend on the length


def get_config(argument=None):
    """Walks of plus and minus, `+12:a+-++b++--c-++-...`, to end at a number or above it.

        python -m policyopt.train --config=configs/long_answers.py --workdir=runs/vapo
        python -m policyopt.train --config=configs/long_answers.py:algorithm=vc_ppo \\
            --workdir=runs/vc_ppo
        python -m policyopt.train --config=configs/long_answers.py:without=pretraining+nll \\
            --workdir=runs/plain

    A small decoder imitates walks until nearly half of its own end well. The critic, a trunk of its
    own, is fitted to the outcomes of the policy's answers until that has settled; then both learn.
    Cost: minutes on one core. `python -m experiments.value_based` draws the figure of
    docs/value_based.md.

    The argument is `algorithm=vapo` or `algorithm=vc_ppo`, `without=PART`, or several parts with a
    `+` between them, and `tiny=true` (two RL steps of a toy, in seconds, for tests), separated by
    commas. Without its part, VAPO has:

      pretraining      a critic that starts from a fresh value head
      decoupled_gae    the policy's lambda for the critic, too
      adaptive_lambda  lambda .95 for answers of any length
      clip_higher      a clip of .2 on both sides
      token_loss       the mean over answers, each of which counts the same
      nll              no likelihood term of right answers
      group_sampling   one answer to each of eight times as many problems

    VC-PPO has the first two, and no others.
    """
    chosen = settings.parse_argument(argument, algorithm='vapo', without='', tiny=False)
    name, tiny = chosen['algorithm'], chosen['tiny']
    settings.check_names('the algorithm of the config', [name], PARTS)
    without = left_out(name, chosen['without'])

    c = ConfigDict()
    c.seed = 0
    c.tokenizer = 'ascii'
    c.task = dict(
        environment='walk',
        kw=dict(blocks=BLOCKS + 2, steps=4, begun=2, reach=30),
        size=6000,
        held_out=256,
        held_out_share=0.2,
        prompt_width=14,
        seed=0,
    )
    c.model = dict(embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=192)
    c.warm_start = dict(
        batch=32,
        max_steps=2000,
        every=50,
        accuracy=(0.45, 0.7),
        optimizer=dict(learning_rate=3e-3, warmup_steps=20),
    )

    c.algorithm = f'policyopt.algorithms.{name}'
    c.algorithm_kw = dict(critic_lam=None if 'decoupled_gae' in without else 1.0)
    if name == 'vc_ppo':
        c.algorithm_kw.update(eps=0.2, lam=LAMBDA)
    else:
        fixed = 'adaptive_lambda' in without
        c.algorithm_kw.update(
            low=0.2,
            high=0.2 if 'clip_higher' in without else 0.28,
            alpha=None if fixed else 0.05,
            lam=LAMBDA if fixed else None,
            nll=0.0 if 'nll' in without else 0.1,
            per_token='token_loss' not in without,
        )
    c.judge = dict(workers=0)  # a comparison of numbers, which needs no limits
    c.sampling = dict(max_new_tokens=5 * BLOCKS + 1, temperature=1.0)
    grouped = name == 'vapo' and 'group_sampling' not in without
    c.rollout = dict(prompts=16, group_size=8) if grouped else dict(prompts=128, group_size=1)
    c.steps = 30
    c.minibatches = 8
    c.optimizer = dict(learning_rate=3e-4, warmup_steps=10)
    c.critic = dict(own=True, optimizer=dict(learning_rate=1e-3, warmup_steps=10))
    if 'pretraining' not in without:
        c.critic.pretrain = dict(min_steps=60, max_steps=100, window=20, looks=10, tolerance=0.01)
    c.evaluation = dict(every=30, batch=128, temperature=1.0, samples=2)
    c.checkpoint = dict(every=10, keep=2)

    if tiny:
        c.task.update(size=400, held_out=16)
        c.model = dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32)
        c.warm_start = None
        c.rollout = dict(prompts=2, group_size=4) if grouped else dict(prompts=8, group_size=1)
        c.steps, c.minibatches = 2, 2
        if 'pretraining' not in without:
            c.critic.pretrain = dict(max_steps=4, window=1, looks=1, tolerance=0.5)
        c.evaluation = dict(every=1, batch=16, temperature=1.0, samples=2)
        c.checkpoint = dict(every=1, keep=9)
    return c


def left_out(algorithm: str, text: str) -> set[str]:
    """The parts that `without` names, `nll+pretraining`.

    Raises ValueError for a part that does not exist, that the algorithm does not have, or that is
    named twice.
    """
    names = [part.strip() for part in text.split('+') if part.strip()]
    settings.check_names('the `without` of the config', names, PARTS['vapo'])
    for part in names:
        if part not in PARTS[algorithm]:
            raise ValueError(
                f'without={part} has no effect: {algorithm} has no such part; legal are '
                f'{", ".join(PARTS[algorithm])}'
            )
        if names.count(part) > 1:
            raise ValueError(f'without names {part} twice; legal is once')
    return set(names)
