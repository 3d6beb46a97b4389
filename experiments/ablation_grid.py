"""The 2x2 grid of ratio and clip granularity, with its controls, as compositions.

Gradient form of a cell: -1/G sum_i 1/n_i sum_t sg[M rho] A grad logp_t, where rho is the weight and
M the trust mask, each per token (T), per sequence (S: geometric mean) or the unnormalised product
(U). TT has GRPO's gradient, SS has GSPO's. Clip ranges: .2 where M looks at tokens, 3e-4/4e-4
(GSPO's) where it looks at sequences; both can be set, to match the share of clipped tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from policyopt import advantages, checks, losses
from policyopt.types import Algorithm

TOKEN_CLIP = (0.2, 0.2)
SEQUENCE_CLIP = (3e-4, 4e-4)


def cell(weight, mask=None, clip=TOKEN_CLIP, aggregate=None) -> Algorithm:
    """One cell: weight and mask are members of the ratio slot; no mask leaves M = 1."""
    gates = [losses.detached_weight(weight)]
    if mask is not None:
        gates.append(losses.trust_mask(clip[0], clip[1], mask))
    return Algorithm(
        advantages=advantages.group_zscore(),
        loss=losses.policy_loss(
            ratio=losses.token_ratio(),
            surrogate=losses.reinforce(),
            gates=gates,
            aggregate=aggregate or losses.sequence_mean(),
        ),
    )


def cells(token_clip=TOKEN_CLIP, sequence_clip=SEQUENCE_CLIP) -> dict[str, Algorithm]:
    """All eight cells by name; the first letter is the weight's, the second the mask's."""
    token, sequence = losses.token_ratio(), losses.sequence_ratio()
    product = losses.unnormalised_sequence_ratio()
    return {
        'TT': cell(token, token, token_clip),
        'TS': cell(token, sequence, sequence_clip),
        'ST': cell(sequence, token, token_clip),
        'SS': cell(sequence, sequence, sequence_clip),
        'US': cell(product, product, token_clip),
        'US_sum': cell(product, product, token_clip, losses.sequence_sum()),
        'T_unclipped': cell(token),
        'S_unclipped': cell(sequence),
    }


def named(
    cell: str,
    token_clip: Sequence[float] = TOKEN_CLIP,
    sequence_clip: Sequence[float] = SEQUENCE_CLIP,
) -> Algorithm:
    """One of the cells by its name, for configs; ValueError for a name that is none."""
    found = cells(tuple(token_clip), tuple(sequence_clip))
    if cell not in found:
        raise ValueError(f'{cell!r} is no cell of the grid.{checks.nearest(cell, found)}')
    return found[cell]
