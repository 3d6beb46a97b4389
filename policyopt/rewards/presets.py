"""Rewards of published recipes, as compositions."""

from __future__ import annotations

from typing import Any, Literal

from policyopt import checks
from policyopt.rewards.combine import all_of, gated, graded, weighted_sum
from policyopt.rewards.formats import after_thought, boxed, boxes, code_fence, overlong, think_block
from policyopt.rewards.language import language_consistency
from policyopt.rewards.verdict import Reward, Score


@checks.factory('reward')
def dapo(score: Score, full: float = 1.0) -> Reward:
    """1 for a right answer, -1 for a wrong one (2503.14476).

    The paper's soft overlong penalty comes with `algorithms.dapo`.

    Args:
      score, full: as of `graded`.
    """
    return graded(score, full, right=1.0, wrong=-1.0)


@checks.factory('reward')
def magistral(
    score: Score | None = None,
    correct: Reward | None = None,
    form: Literal['math', 'code'] = 'math',
    language: bool = True,
    opened: bool = False,
    max_length: int | None = None,
    cache: int | None = None,
) -> Reward:
    r"""Format .1, then correctness .9 and language .1; a tenth of the length penalty (2506.10910).

    An answer in the wrong form (no single block of thought at its beginning, or no \boxed{...} or
    code block after it) earns 0, whatever it says. The length penalty, up to -.1, is for any
    answer; `algorithms.magistral` shapes rewards by it, so it is left out here unless asked for.

    Args:
      score: judges what the last \boxed{...} holds, or the answer after the thought where `form` is
        'code'; in a config, the task's own.
      correct: a reward of 1 for a right answer, such as `math_equivalence`, in place of `score`.
      form: what must follow the thought.
      language: give .1 for thought and answer in the language of the prompt.
      opened: the prompt ends with <think>; see `think_block`.
      max_length, cache: tokens, of the length penalty; see `overlong`.
    """
    checks.one_of('form', form, ('math', 'code'))
    if (max_length is None) != (cache is None):
        raise ValueError(f'max_length={max_length} and cache={cache}; legal is both, or None twice')
    if correct is None:
        if score is None:
            raise ValueError('score and correct are None; legal is one of them')
        correct = graded(_final(score, form))
    shape = all_of({'think': think_block(opened=opened), 'answer': _FORMS[form]()})
    parts = {'format': shape, 'correct': correct}
    weights = {'format': 0.1, 'correct': 0.9}
    if language:
        parts['language'], weights['language'] = language_consistency(), 0.1
    reward = gated(shape, weighted_sum(parts, weights))
    if max_length is None or cache is None:
        return reward
    penalty = overlong(max_length, cache, weight=0.1)
    return weighted_sum({'answer': reward, 'length': penalty}, {'answer': 1.0, 'length': 1.0})


_FORMS = {'math': boxed, 'code': code_fence}


def _final(score: Score, form: str) -> Score:
    """The scorer, of what an answer comes to."""

    def final(text: str, example: Any) -> float:
        answer = after_thought(text)
        found = boxes(answer) if form == 'math' else []
        return score(found[-1] if found else answer, example)

    return final
