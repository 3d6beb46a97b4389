"""Claims that nothing here checks: comparisons of final rewards that need hours for each seed."""

from __future__ import annotations

from typing import NamedTuple


class Beyond(NamedTuple):
    """A claim, and the nearest thing that was measured."""

    text: str
    source: str
    published: str
    nearest: str


BEYOND = (
    Beyond(
        'Each part of DAPO adds accuracy.',
        '2503.14476',
        '30, 36, 38, 41, 42, 50',
        'parts by measures of their own: [dynamic_sampling](#dynamic_sampling)',
    ),
    Beyond(
        'Each part of VAPO adds accuracy, value pretraining most.',
        '2504.05118',
        '60 with all; without one part 11 to 54',
        'one seed of two lines: [value-based training](value_based.md#what-it-came-to)',
    ),
    Beyond(
        "VC-PPO's policy wants a lambda of .95 to 1, but not 1, and can be pretrained too long.",
        '2503.01491',
        'an inverted U',
        '-',
    ),
    Beyond(
        'On-policy length normalisation hurts; recomputed routing is better at two minibatches, '
        "the sampler's at four.",
        '2512.01374',
        '-',
        'variances alone: [replay_variance](#replay_variance)',
    ),
    Beyond('At equal compute PPO, GRPO and GSPO differ.', 'unpublished', '-', '-'),
    Beyond(
        'RL on one kind of problem lifts another.',
        '2506.10910',
        '+15.6 on code from mathematics, +17.5 the other way',
        '-',
    ),
    Beyond('RL on a small model matches distillation from a larger one.', '2506.10910', '-', '-'),
)
