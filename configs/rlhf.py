"""RLHF with four models: actor, critic, reward and reference (arXiv:2203.02155).

Published: rewards from a model that was trained on preferences by the loss of Bradley and Terry, a
KL to the reference of .02 in the reward of each token, PPO's clip of .2 and lambda .95, gamma 1.

Not published, chosen here: all sizes and learning rates; a task whose truth is known, sums, so that
the gap between the reward model and what it stands for is seen (arXiv:2210.10760).
"""

from ml_collections import ConfigDict

from policyopt import presets, settings

MAX_NEW_TOKENS = 4
ALGORITHMS = ('ppo_clip', 'ppo_penalty', 'trpo')


def get_config(argument=None):
    """Sums of two numbers from 0 to 100, judged by a reward model that learnt from preferences.

        python -m policyopt.train --config=configs/rlhf.py --workdir=runs/rlhf
        python -m policyopt.train --config=configs/rlhf.py:algorithm=trpo --workdir=runs/rlhf_trpo

    A small decoder imitates right answers until it gives a quarter of those it never saw. Pairs of
    its own answers, told apart by the task's scorer, train the reward model; then the actor learns
    from that model alone. What its answers are worth is recorded and teaches nobody.

    Cost: minutes on one core. `python -m experiments.over_optimisation` draws the figure of
    docs/rlhf.md, for all three algorithms.

    The argument is `algorithm=NAME` (ppo_clip, ppo_penalty with its adaptive KL, or trpo),
    `beta=NUMBER` (KL to the reference, nats to reward) and `tiny=true` (two RL steps of a toy, in
    seconds, for tests), separated by commas.
    """
    chosen = settings.parse_argument(argument, algorithm='ppo_clip', beta=0.02, tiny=False)
    name, beta, tiny = chosen['algorithm'], chosen['beta'], chosen['tiny']
    if name not in ALGORITHMS:
        raise ValueError(f'algorithm is {name!r}; legal are {", ".join(ALGORITHMS)}')

    c = ConfigDict()
    c.seed = 0
    c.task = dict(
        name='basic_arithmetic',
        kw=dict(
            min_terms=2,
            max_terms=2,
            min_digits=2,
            max_digits=2,
            operators=['+'],
            allow_parentheses=False,
            allow_negation=False,
        ),
        size=20_000,
        held_out=256,
        held_out_share=0.1,
        prompt_width=8,
        seed=0,
    )
    c.model = dict(embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=256)
    c.warm_start = dict(
        batch=128,
        max_steps=3000,
        every=20,
        accuracy=(0.25, 0.5),
        optimizer=dict(learning_rate=3e-3, warmup_steps=20),
    )

    c.preferences = dict(
        problems=3000,
        answers=8,
        pairs=4,
        batch=64,
        epochs=3,
        optimizer=dict(learning_rate=1e-3, warmup_steps=20),
    )
    c.reward = 'audited'
    c.reward_kw = dict(reward=dict(reward='reward_model', scale='standard'), truth='graded')
    c.judge = dict(workers=0, batch=64)  # what is left is a comparison of numbers
    c.critic = dict(own=True, optimizer=dict(learning_rate=1e-3))

    c.algorithm = f'policyopt.algorithms.{name}'
    c.algorithm_kw = dict(lam=0.95, gamma=1.0, reference_beta=beta)
    c.sampling = dict(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    c.rollout = dict(prompts=64, group_size=2)
    c.steps = 150
    c.epochs = 2
    c.minibatches = 2
    c.microbatches = 1
    c.optimizer = dict(learning_rate=5e-4, warmup_steps=20)
    if name == 'trpo':
        c.algorithm_kw = dict(delta=0.01, advantages=dict(advantages='gae', reference_beta=beta))
        c.epochs = c.minibatches = 1
        c.optimizer = dict()
        c.critic.fits = 8
    c.evaluation = dict(every=50, batch=256, temperature=0.0, samples=4)
    c.checkpoint = dict(every=50, keep=2)

    if tiny:
        reward = dict(reward=c.reward, reward_kw=c.reward_kw)
        presets.toy(c)
        c.update(reward)
        c.preferences.update(problems=64, answers=4, batch=16, epochs=1)
        c.judge.batch = 32
    return c
