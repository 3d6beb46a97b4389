"""Token ratios on a mixture whose sampler differs from its trainer, until training collapses."""

from __future__ import annotations

from typing import Any

from experiments import arms, curves, learning
from experiments.claim import Claim, Place, Verdict, interval

# Chosen on seed 100, which is not among those measured: GRPO collapses there.
SAMPLER = dict(router=1.0, bits=4)
MINIBATCHES, RATE, TOP_P, STEPS = 16, 3e-4, 0.9, 60
MASK = dict(gates=[dict(gate='off_policy_sequence', delta=0.5)])


def _arm(make: Any, support: bool = False, routing: bool = False, mask: bool = False) -> Any:
    arm = make(
        minibatches=MINIBATCHES,
        optimizer=dict(learning_rate=RATE),
        sampling=dict(max_new_tokens=4, temperature=1.0, top_p=TOP_P, support_size=8),
        replay=dict(support=support, routing='rollout' if routing else None),
    )
    kw = {**arm.kw, **(MASK if mask else {})}
    return learning.Arm(arm.algorithm, kw, arm.changes, SAMPLER)


ARMS = {
    'none': _arm(arms.grpo),
    'routing replay': _arm(arms.grpo, routing=True),
    'support replay': _arm(arms.grpo, support=True),
    'off-policy mask': _arm(arms.grpo, mask=True),
    'sequence ratio': _arm(arms.gspo),
    'soft gate': _arm(arms.sapo),
    'both replays': _arm(arms.grpo, True, True),
    'all together': _arm(arms.gspo, True, True, True),
}


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of GRPO under the stress, and with each remedy."""
    return {name: learning.curves(place, arm, STEPS) for name, arm in ARMS.items()}


def judge(seeds: list[Any]) -> Verdict:
    base, *remedies = ARMS
    saved = {name: curves.last(seeds, name) - curves.last(seeds, base) for name in remedies}
    value, ends = interval(saved['all together'])
    fallen = {name: curves.rate(seeds, name) for name in ARMS}
    helps = [name for name in remedies if not fallen[name]]
    word = 'inconclusive'
    if fallen[base] == 0:
        word = 'not reproduced'
    elif fallen[base] == 1 and helps:
        word = 'reproduced'
    parts = ', '.join(
        f'{name} {curves.last(seeds, name).mean():.1%} ({curves.how_many(seeds, name)}, variance '
        f'{curves.means(seeds, name, "variance").mean():.2f})'
        for name in ARMS
    )
    start = curves.spread(seeds, base, 'accuracy')[:, 0].mean()
    return Verdict(
        word,
        'gain in accuracy at the end, all remedies together over none',
        value,
        ends,
        f'GRPO with {MINIBATCHES} minibatches at a learning rate of {RATE:g}, from {start:.1%}. '
        f'The sampler has {SAMPLER["bits"]} bits of weights, noise of {SAMPLER["router"]:g} times '
        f'their deviation on the router, and a nucleus of {TOP_P:g}. Held-out accuracy at the end, '
        'with the seeds that collapsed (below half of their peak) and the variance of token '
        f'log-ratios: {parts}. Seeds are {len(seeds)}.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    names = list(ARMS)
    for axis, part in zip(axes, (names[:4], [names[0], *names[4:]]), strict=True):
        curves.draw(axis, seeds, {name: name for name in part})
        axis.legend(frameon=False, fontsize=7)
    axes[0].set(ylabel='held-out accuracy')


CLAIM = Claim(
    text='On a mixture whose sampler differs, token ratios collapse, and remedies prevent it.',
    source='2510.11370, 2512.01374, 2512.02556',
    published='-',
    minutes=6,
    measure=measure,
    judge=judge,
    draw=draw,
)
