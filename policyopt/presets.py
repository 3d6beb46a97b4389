"""What the configs of published recipes share: their arguments, long answers, and the toy.

A recipe is run on a model and a file of problems, or as a toy that shows in seconds that all of its
parts work together. Sizes here that change memory and speed alone are choices, not measured ones.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from policyopt import settings

TOY_ROWS, TOY_TOKENS = 32, 4  # of a step; of an answer, which has two digits and an end at most
TOY_PROMPT = 6  # as `10+10=`
VALUES = ('right', 'wrong')  # arguments of rewards


def begin(argument: str | None) -> tuple[Any, bool]:
    """Read a recipe's argument: a ConfigDict with model and problems, and whether it is for a toy.

    Args:
      argument: behind the colon of --config: `model=PATH,data=FILE.jsonl`, a Hugging Face folder or
        GGUF file and lines of {"prompt": ..., "answer": ...}; or `tiny=true`.

    Raises ValueError where model or data is missing, or has no effect beside `tiny`.
    """
    chosen = settings.parse_argument(argument, model='', data='', tiny=False)
    model, file, tiny = chosen['model'], chosen['data'], chosen['tiny']
    if tiny and (model or file):
        raise ValueError('tiny=true brings its own model and problems; leave out model and data')
    if not tiny and not (model and file):
        missing = [name for name in ('model', 'data') if not chosen[name]]
        raise ValueError(
            f'the config has no {" and no ".join(missing)}; give --config=FILE.py:model=PATH,'
            'data=FILE.jsonl (a Hugging Face folder or GGUF file, and lines of {"prompt": ..., '
            '"answer": ...}), or --config=FILE.py:tiny=true for a toy'
        )
    c: Any = ConfigDict()
    c.seed = 0
    c.model = dict(path=model, remat='full')
    c.task = dict(file=file, prompt_width=1024, held_out=64, on_bad_row='skip')
    c.evaluation = dict(every=25, batch=64, temperature=0.0, samples=4)
    c.reward, c.reward_kw = 'math_equivalence', {}
    c.microbatches = 1
    return c, tiny


def long_answers(config: Any) -> None:
    """Set, in place, how answers of thousands of tokens are drawn and learnt from.

    The slot engine spends no step on ended rows, and microbatches by length none on padding. They
    change neither tokens nor losses.
    """
    c = config
    width = c.task.prompt_width + c.sampling.max_new_tokens
    c.rollout.engine = dict(slots=64, steps=64, prefill_width=256, bucket=1024)
    c.rollout.chunks = 4
    c.length_buckets = dict(token_budget=width, widths=(width // 4, width // 2, width))


def toy(config: Any, experts: int = 0) -> None:
    """Turn any recipe, in place, into two steps on sums up to 20 with a toy of a model.

    Algorithm, epochs, replay, critic, reference, kind of sampler and of microbatches stay; sizes,
    learning rates and pretraining shrink. Rewards come from the task's own scorer, for values that
    `reward_kw` may name. `algorithm_kw` that assume long answers are the caller's to change.

    Args:
      config: a recipe's.
      experts: of a mixture-of-experts layer; 0 for a dense one.
    """
    c = config
    _toy_task(c)
    kept = {name: value for name, value in c.get('reward_kw', {}).items() if name in VALUES}
    c.reward, c.reward_kw = 'graded', kept
    sizes: dict[str, Any] = dict(mlp_dim=32)
    if experts:
        sizes = dict(expert_dim=16, moe=dict(experts=experts, top_k=2))
    c.model = dict(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, **sizes)
    c.steps = 2
    c.minibatches = min(c.minibatches, 2)
    c.microbatches = min(c.microbatches, 2)
    group = min(c.rollout.group_size, 4)
    c.rollout.update(prompts=TOY_ROWS // group, group_size=group, max_rounds=30)
    c.sampling.max_new_tokens = TOY_TOKENS
    if c.sampling.get('support_size'):
        c.sampling.support_size = 8
    if c.optimizer:
        c.optimizer.update(learning_rate=1e-3, warmup_steps=0)
    if c.rollout.get('engine'):
        c.rollout.engine = dict(slots=16, steps=4, prefill_width=8, prefill_rows=8, bucket=16)
        c.rollout.chunks = 2
    if c.get('length_buckets'):
        width = TOY_PROMPT + TOY_TOKENS
        c.length_buckets = dict(token_budget=8 * width, widths=(width - 2, width))
    if c.get('reference_every'):
        c.reference_every = 1
    if c.get('critic'):
        c.critic.optimizer.update(learning_rate=1e-3, warmup_steps=0)
        if c.critic.get('pretrain'):
            c.critic.pretrain = dict(max_steps=2)


def _toy_task(c: Any) -> None:
    """Problems, a warm start to some right answers, and a look at the accuracy each step."""
    c.task = dict(
        name='basic_arithmetic',
        kw=dict(
            min_terms=2,
            max_terms=2,
            min_digits=1,
            max_digits=1,
            operators=['+'],
            allow_parentheses=False,
            allow_negation=False,
        ),
        size=1000,
        held_out=16,
        held_out_share=0.3,
        prompt_width=TOY_PROMPT,
    )
    c.warm_start = dict(batch=32, every=10, accuracy=(0.1, 1.0), optimizer=dict(learning_rate=1e-2))
    c.evaluation = dict(every=1, batch=16, temperature=0.0, samples=2)
    c.judge = dict(workers=0)  # a comparison of numbers, which needs no limits
