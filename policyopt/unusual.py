"""What is unusual about the tokens and rows of a minibatch. Numpy, on the host.

Arrays are [B,T] unless said otherwise; only tokens of the mask can be marked.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from policyopt import masked, scoring
from policyopt.sampling import Finish
from policyopt.types import Scores, Terms

HEAVY = 10.0  # times the uniform share, above which a token's gradient share is marked
GAPS = {'float32': 1e-4, 'float64': 1e-4}  # nats between sampler and scorer, by the model's dtype
GAP = 0.05  # in other dtypes

# What is marked, and what the mark says; of tokens, then of rows.
TOKEN_MARKS = {
    'not finite': 'some number of the token is NaN or infinite: the table above says which',
    'frozen': 'the surrogate has no slope here (a ratio outside the clip range), though A is not 0',
    'gate closed': 'a gate is 0, so that the policy term is dropped',
    'extreme': f'|log-ratio| is {masked.EXTREME:g} nats or more: the policies no longer agree',
    'heavy': f'gradient share above {HEAVY:g} times the uniform share, 1 / tokens',
    'support': 'the recorded support lacks the token, or has an id twice or outside the vocabulary',
    'mismatch': 'logp_new is off logp_behavior, though the same parameters drew the token',
}
ROW_MARKS = {
    'not sampled': 'its logits were not finite numbers: no reward',
    'environment failed': 'it raised, was late, or answered too much: no reward',
    'no reward': 'the judge failed on it: it counts in nothing',
    'empty': 'no token to learn from: filled up, not judged, or filtered out',
    'truncated': 'it hit the limit of tokens',
    'flat group': 'all rewards of its group in this minibatch are equal',
}


class NonFinite(NamedTuple):
    """Numbers of a field that are NaN or infinite: how many, and the first one's place."""

    field: str
    count: int
    row: int
    token: int


def log_ratio(batch: Any, logp_new: np.ndarray, terms: Mapping[str, Terms]) -> np.ndarray:
    """The algorithm's own log-ratio; logp_new - logp_old where its loss does not say."""
    found = [x.log_ratio for x in terms.values() if x.log_ratio is not None]
    return np.asarray(found[0] if found else logp_new - batch.logp_old)


def not_finite(
    batch: Any, scores: Scores, terms: Mapping[str, Terms], slope: np.ndarray
) -> tuple[list[NonFinite], np.ndarray]:
    """Fields with numbers that are not finite, in the order of computation, and where any is."""
    mask = np.asarray(batch.mask) != 0
    names = ('logp_behavior', 'logp_old', 'logp_ref', 'advantages', 'values_old', 'returns')
    fields: dict[str, Any] = {name: getattr(batch, name) for name in names}
    fields |= {name: getattr(scores, name) for name in ('logp_new', 'entropy', 'values')}
    for name, term in terms.items():
        fields |= {f'{name} log-ratio': term.log_ratio, f'{name} objective': term.objective}
        fields |= {f'gate {key}': x for key, x in (term.gates or {}).items()}
        fields |= {f'penalty {key}': x for key, x in (term.penalties or {}).items()}
        fields |= {f'{name} weight': term.weights, f'{name} loss': term.loss}
    fields['gradient'] = slope
    listed, anywhere = [], np.zeros(mask.shape, bool)
    for name, x in fields.items():
        bad = mask & ~np.isfinite(0.0 if x is None else x)
        if bad.any():
            row, token = np.argwhere(bad)[0].tolist()
            listed.append(NonFinite(name, int(bad.sum()), row, token))
            anywhere |= bad
    return listed, anywhere


def token_marks(
    batch: Any,
    scores: Scores,
    terms: Mapping[str, Terms],
    log_ratio: np.ndarray,
    share: np.ndarray,
    *,
    vocab_size: int,
    version: int,
    gap: float,
) -> dict[str, np.ndarray]:
    """Bool arrays by the names of TOKEN_MARKS, all but 'not finite'.

    Args:
      batch, scores, terms: of the minibatch.
      log_ratio: the algorithm's own.
      share: of the gradient.
      vocab_size: of the model.
      version: of the parameters that the update saw; tokens that others drew do not mismatch.
      gap: nats between logp_new and logp_behavior above which they do; infinity where they may.
    """
    mask = np.asarray(batch.mask) != 0
    active = mask & (np.asarray(batch.advantages) != 0)
    none = np.zeros(mask.shape, bool)
    some = functools.partial(functools.reduce, np.logical_or)
    gates = [gate == 0 for term in terms.values() for gate in (term.gates or {}).values()]
    frozen = [term.frozen for term in terms.values() if term.frozen is not None]
    support = [fault for fault, _ in scoring.support_faults(batch, vocab_size)]
    logp_new = np.asarray(scores.logp_new)
    apart = none
    if batch.logp_behavior is not None:
        apart = np.abs(logp_new - batch.logp_behavior) > gap
    if batch.version is not None:
        apart = apart & (np.asarray(batch.version) == version)
    return {
        'frozen': active & some(frozen, none),
        'gate closed': mask & some(gates, none),
        'extreme': mask & (np.abs(log_ratio) >= masked.EXTREME),
        'heavy': mask & (share * max(mask.sum(), 1) > HEAVY),
        'support': some(support, none),
        'mismatch': mask & apart,
    }


def row_marks(batch: Any) -> dict[str, np.ndarray]:
    """[B] bool arrays by the names of ROW_MARKS."""
    mask = np.asarray(batch.mask) != 0
    rows = len(mask)
    rewards = np.zeros(rows) if batch.rewards is None else np.asarray(batch.rewards)
    finish = np.full(rows, Finish.RUNNING) if batch.finish is None else np.asarray(batch.finish)
    flat = np.zeros(rows, bool)
    if batch.group is not None and batch.rewards is not None:
        for group in np.unique(batch.group[np.isfinite(rewards)]):
            index = np.flatnonzero((batch.group == group) & np.isfinite(rewards))
            flat[index] = len(index) > 1 and np.ptp(rewards[index]) == 0
    ended = (finish < Finish.ERROR) & (finish != Finish.RUNNING)
    return {
        'not sampled': finish == Finish.ERROR,
        'environment failed': finish > Finish.ERROR,
        'no reward': np.isnan(rewards) & ended,
        'empty': ~mask.any(axis=1),
        'truncated': finish == Finish.LENGTH,
        'flat group': flat,
    }
