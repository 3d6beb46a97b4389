"""Tasks of several turns: a calculator to ask, or a number to guess, by two algorithms.

`gspo_token` is GSPO-token (arXiv:2507.18071) with an advantage for each turn: that of the outcome,
and that of the turn's own reward. `grpo` (arXiv:2402.03300) knows the outcome alone, and has no
KL term here. All numbers are chosen here.
"""

from ml_collections import ConfigDict

from policyopt import data, settings

TASKS = {
    # settings, prompt, longest row, tokens drawn of it, end of the warm start, learning rate
    'calculator': dict(
        kw=dict(digits=1), prompt=6, size=32, drawn=20, accuracy=(0.7, 0.9), rate=3e-4
    ),
    'guessing': dict(
        kw=dict(smallest=12, largest=15),
        prompt=8,
        size=56,
        drawn=20,
        accuracy=(0.3, 0.6),
        rate=1e-3,
    ),
}
ALGORITHMS = ('gspo_token', 'grpo')


def get_config(argument=None):
    """A policy learns to use a calculator, or to halve a range.

        python -m policyopt.train --config=configs/turns.py:task=guessing --workdir=runs/guessing
        python -m policyopt.train --config=configs/turns.py:task=calculator,algorithm=grpo \\
            --workdir=runs/calculator

    The argument is `task=calculator` or `task=guessing`, `algorithm=gspo_token` (a reward and an
    advantage for each turn) or `algorithm=grpo` (the outcome alone), and `tiny=true` (two RL steps
    of a toy, in seconds, for tests), separated by commas.
    """
    chosen = settings.parse_argument(argument, task='guessing', algorithm='gspo_token', tiny=False)
    for name, legal in (('task', TASKS), ('algorithm', ALGORITHMS)):
        settings.check_names(f'the {name} of the config', [chosen[name]], legal)
    task, name = TASKS[chosen['task']], chosen['algorithm']

    c = ConfigDict()
    c.seed = 0
    c.tokenizer = 'ascii'
    c.task = dict(
        environment=chosen['task'],
        kw=task['kw'],
        size=30_000,
        held_out=192,
        held_out_share=0.15,
        prompt_width=task['prompt'],
        seed=0,
    )
    c.model = dict(embed_dim=48, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=128)
    c.warm_start = dict(
        batch=128,
        max_steps=3000,
        every=20,
        accuracy=task['accuracy'],
        optimizer=dict(learning_rate=3e-3, warmup_steps=20),
    )

    c.algorithm = f'policyopt.algorithms.{name}'
    c.algorithm_kw = dict(beta=0.0)
    if name == 'gspo_token':
        turns = dict(advantages='turn_rewards', coefficient=1.0, by_turn=True)
        c.algorithm_kw = dict(low=0.1, high=0.1, advantages=turns)
    c.judge = dict(workers=0)  # a comparison of numbers, which needs no limits
    stops = data.ascii_tokenizer().encode('>') if chosen['task'] == 'calculator' else ()
    c.sampling = dict(max_new_tokens=task['drawn'], temperature=1.0, stop_ids=tuple(stops))
    c.rollout = dict(prompts=32, group_size=8)
    # A quarter of the slots at the end of a turn stop decoding: their environments are quick.
    c.rollout.engine = dict(slots=128, refill=32, size=task['size'], chunk=8, workers=32)
    c.steps = 60
    c.minibatches = 4
    c.optimizer = dict(learning_rate=task['rate'], warmup_steps=10)
    c.ema = 0.9
    c.evaluation = dict(every=10, batch=96, temperature=0.0, samples=6)
    c.checkpoint = dict(every=20, keep=2)

    if chosen['tiny']:
        if chosen['task'] == 'guessing':
            c.task.kw = dict(digits=2, smallest=3, largest=6)
        c.task.update(size=600, held_out=16, held_out_share=0.3)
        c.model = dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, mlp_dim=32)
        c.warm_start = None
        c.rollout.update(prompts=4, group_size=4)
        c.rollout.engine.update(slots=8, refill=2, steps=4, chunk=4)
        c.steps, c.minibatches = 2, 2
        c.evaluation = dict(every=1, batch=8, temperature=0.0, samples=2)
        c.checkpoint = dict(every=1, keep=9)
    return c
