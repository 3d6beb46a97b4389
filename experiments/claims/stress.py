"""Token ratios on a mixture whose sampler differs from its trainer, until training collapses."""

from __future__ import annotations

from typing import Any

from experiments import arms, curves, learning
from experiments.claim import Claim, Place, Verdict, interval, spread
from experiments.claims import grid

# Chosen on seed 100, which is not among those measured: with ratios that are not clipped accuracy
# fell below half there, while GRPO's, with a clip and without a mismatch, learned.
SAMPLER = dict(router=1.0, bits=4)
TOP_P, STEPS = 0.9, 50
MASK = dict(gates=[dict(gate='off_policy_sequence', delta=0.5)])
UNCLIPPED = learning.Arm('experiments.variants.unclipped')


def _arm(arm: learning.Arm, support: bool = False, routing: bool = False, **kw: Any) -> Any:
    changes = dict(
        sampling=dict(top_p=TOP_P, support_size=8),
        replay=dict(support=support, routing='rollout' if routing else None),
    )
    return learning.Arm(arm.algorithm, {**arm.kw, **kw}, changes, SAMPLER)


ARMS = {
    'none': _arm(UNCLIPPED),
    'routing replay': _arm(UNCLIPPED, routing=True),
    'support replay': _arm(UNCLIPPED, support=True),
    'off-policy mask': _arm(UNCLIPPED, **MASK),
    'sequence ratio': _arm(grid.cell('S_unclipped')),
    'soft gate': _arm(arms.sapo()),
    'clip': _arm(arms.grpo()),
    'all together': _arm(arms.gspo(), support=True, routing=True, **MASK),
}


def measure(place: Place) -> dict[str, Any]:
    """Learning curves of token ratios under the stress, and with each remedy."""
    out = {name: learning.curves(place, arm, STEPS) for name, arm in ARMS.items()}
    # That of a claim which shares it; a constant learning rate lets it be cut.
    same = learning.curves(place, grid.ARMS['T unclipped'])
    count = len(out['none']['step'])
    cut = {n: x[: count if n in ('step', 'accuracy') else count - 1] for n, x in same.items()}
    return out | {'same sampler': cut}


def judge(seeds: list[Any]) -> Verdict:
    base, *remedies = ARMS
    names = [*ARMS, 'same sampler']
    value, ends = interval(curves.last(seeds, 'all together') - curves.last(seeds, base))
    fallen = {name: curves.rate(seeds, name) for name in names}
    helps = [name for name in remedies if not fallen[name]]
    word = 'inconclusive'
    if fallen[base] == 0 or min(fallen.values()) == 1:
        word = 'not reproduced'
    elif fallen[base] == 1 and helps and not fallen['same sampler']:
        word = 'reproduced'
    parts = ', '.join(
        f'{name} {curves.last(seeds, name).mean():.1%} ({curves.how_many(seeds, name)}, variance '
        f'{curves.means(seeds, name, "variance").mean():.2f})'
        for name in names
    )
    start = spread(seeds, base, 'accuracy')[:, 0].mean()
    return Verdict(
        word,
        'gain in accuracy at the end, all remedies together over none',
        value,
        ends,
        f'Token ratios without a clip, {learning.MINIBATCHES} minibatches at a learning rate of '
        f'{learning.RATE:g}, from an accuracy of {start:.1%}. The sampler has {SAMPLER["bits"]} '
        f'bits of weights, noise of {SAMPLER["router"]:g} times their deviation on the router, and '
        f'a nucleus of {TOP_P:g}. Held-out accuracy at the end, mean of three, with the seeds that '
        'collapsed (below half of their peak) and the variance of token log-ratios, by remedy: '
        f'{parts}. The last has the sampler that the trainer has, no nucleus, and routing replay. '
        'What counts, without an interval, is that all seeds collapse without a remedy, none with '
        'one of them and none with the same sampler. At '
        'twice the rate and twice the minibatches one other seed fell to about 1 % within 30 '
        "steps, with GRPO's clip and the same sampler, too, and with all remedies together: that "
        'is a matter of the rate.',
    )


def draw(figure: Any, seeds: list[Any]) -> None:
    figure.set_size_inches(8.4, 3.8)
    axes = figure.subplots(1, 2, sharey=True)
    parts = (list(ARMS)[:4], ['none', *list(ARMS)[4:]])
    for axis, part in zip(axes, parts, strict=True):
        same = spread(seeds, 'same sampler', 'accuracy').mean(0)
        axis.plot(seeds[0]['none']['step'], same, color='0.6', lw=1, label='none, same sampler')
        curves.draw(axis, seeds, {name: name for name in part}, ranges=False)
        axis.legend(frameon=False, fontsize=8, loc='upper center', ncols=2, title='remedy')
        axis.set(ylim=(0, 0.45))
    axes[0].set(ylabel='held-out accuracy, mean of seeds')


CLAIM = Claim(
    text='On a mixture whose sampler differs, token ratios collapse, and remedies prevent it.',
    source='2510.11370, 2512.01374, 2512.02556',
    published='-',
    minutes=5,
    measure=measure,
    judge=judge,
    draw=draw,
)
