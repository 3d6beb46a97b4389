"""How old the tokens are that a policy learns from, in versions; on the host, in numpy.

Version n is the policy after n RL steps. A token's age is the version of the policy that learns
from it less the version that drew it.
"""

from __future__ import annotations

import numpy as np


class FutureVersion(ValueError):
    """Rows of a version that the policy has not reached."""


def ages(version: np.ndarray, mask: np.ndarray, now: int) -> np.ndarray:
    """Age of each token that the policy chose: now - version [B,T] int, -1 elsewhere.

    Args:
      version: [B,T] int, version of the parameters that drew each token.
      mask: [B,T], nonzero on tokens that the policy chose.
      now: version of the policy that learns from them.

    Raises FutureVersion, naming row, token and versions, where a token is from a later version: a
    policy can't be behind its own answers, so one of the two is another run's, or was set back.
    """
    version, chosen = np.asarray(version), np.asarray(mask) != 0
    if version.shape != chosen.shape:
        raise ValueError(f'versions are {version.shape}, the mask {chosen.shape}; legal is equal')
    later = np.argwhere(chosen & (version > now))
    if len(later):
        row, place = later[0].tolist()
        raise FutureVersion(
            f'token {place} of row {row} was drawn by version {int(version[row, place])}, but the '
            f'policy that would learn from it is version {now}: rollouts of a future version are '
            'refused. They are of another run, or the policy was set back without them'
        )
    return np.where(chosen, now - version, -1)


def describe(found: np.ndarray, bound: int) -> dict[str, float]:
    """Numbers for the log of ages [B,T]: over tokens, and over rows.

    `staleness`: mean age of a token; `staleness/max`: the greatest; `staleness/N`: share of tokens
    of age N, for N up to `bound`; `staleness/mixed`: share of rows that more than one version drew.
    All are 0 where there is no token.
    """
    chosen = found >= 0
    tokens = max(int(chosen.sum()), 1)
    rows = max(int(chosen.any(axis=1).sum()), 1)
    oldest = found.max(axis=1, initial=-1)
    youngest = np.where(chosen, found, np.iinfo(found.dtype).max).min(axis=1, initial=2**31 - 1)
    mixed = chosen.any(axis=1) & (oldest != youngest)
    numbers = {
        'staleness': float(np.where(chosen, found, 0).sum() / tokens),
        'staleness/max': float(max(oldest.max(initial=-1), 0)),
        'staleness/mixed': float(mixed.sum() / rows),
    }
    return numbers | {
        f'staleness/{n}': float((found == n).sum() / tokens) for n in range(bound + 1)
    }
