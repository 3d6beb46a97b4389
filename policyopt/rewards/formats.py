"""Rewards for the form of an answer, and for its length: each 1 or 0, except the length's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from policyopt import checks
from policyopt.rewards.verdict import Reward, Verdict

_BRACES = re.compile(r'\\boxed *\{|\\.|[{}]', re.DOTALL)
_FENCE = re.compile(r'^```([^\n`]*)$', re.MULTILINE)


def _verdict(reason: str) -> Verdict:
    return Verdict(float(reason == 'ok'), reason)


@checks.factory('reward')
def think_block(start: str = '<think>', end: str = '</think>', opened: bool = False) -> Reward:
    """1 for an answer that begins with its only block of thought, and goes on after it; else 0.

    Reasons: `ok`, `no_think`, `open_think`, `many_think`, `text_before_think`, `nothing_thought`,
    `nothing_after_think`. White space does not count. Marks that the tokenizer knows as special
    tokens are not in the text, so they can't be asked for.

    Args:
      start, end: marks around the thought.
      opened: the prompt ends with `start`, so that answers have `end` alone.
    """

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        text = start + text if opened else text
        counts = text.count(start), text.count(end)
        if counts == (0, 0):
            return _verdict('no_think')
        if counts[0] > 1 or counts[1] > 1:
            return _verdict('many_think')
        if counts != (1, 1) or text.index(end) < text.index(start):
            return _verdict('open_think')
        before, _, rest = text.partition(start)
        thought, _, after = rest.partition(end)
        if before.strip():
            return _verdict('text_before_think')
        if not thought.strip():
            return _verdict('nothing_thought')
        return _verdict('ok' if after.strip() else 'nothing_after_think')

    return reward


def after_thought(text: str, end: str = '</think>') -> str:
    """What follows the last block of thought; all of it where there is none."""
    return text.rpartition(end)[2]


def boxes(text: str) -> list[str]:
    r"""Contents of the outermost \boxed{...} that close, in order; backslashes escape braces."""
    opened: list[tuple[bool, int]] = []  # whether of a box, and where its content begins
    closed: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text):
        if match[0] == '}':
            if opened:
                is_box, begin = opened.pop()
                closed += [(begin, match.start())] if is_box else []
        elif match[0].endswith('{') and match[0] != r'\{':
            opened.append((match[0] != '{', match.end()))
    found: list[tuple[int, int]] = []
    for begin, end in sorted(closed):
        if not found or begin > found[-1][1]:
            found.append((begin, end))
    return [text[begin:end] for begin, end in found]


@checks.factory('reward')
def boxed(single: bool = False) -> Reward:
    r"""1 for an answer with a \boxed{...} that holds something, after any thought; else 0.

    Reasons: `ok`, `no_box`, `open_box`, `empty_box`, `many_boxes`.

    Args:
      single: more than one box is not right either.
    """

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        answer = after_thought(text)
        found = boxes(answer)
        if not found:
            return _verdict('open_box' if r'\boxed' in answer else 'no_box')
        if single and len(found) > 1:
            return _verdict('many_boxes')
        return _verdict('ok' if found[-1].strip() else 'empty_box')

    return reward


@checks.factory('reward')
def code_fence(language: str | None = None) -> Reward:
    """1 for an answer with a closed, non-empty ``` block that names a language, after any thought.

    Reasons: `ok`, `no_fence`, `open_fence`, `no_language`, `other_language`, `empty_fence`. The
    last block counts.

    Args:
      language: that it must name; None for any.
    """

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        answer = after_thought(text).replace('\r\n', '\n')
        marks = list(_FENCE.finditer(answer))
        if len(marks) < 2:
            return _verdict('open_fence' if marks else 'no_fence')
        if len(marks) % 2:
            return _verdict('open_fence')
        begin, end = marks[-2:]
        named = begin[1].strip().lower()
        if not named:
            return _verdict('no_language')
        if language is not None and named != language.lower():
            return _verdict('other_language')
        return _verdict('ok' if answer[begin.end() : end.start()].strip() else 'empty_fence')

    return reward


@checks.factory('reward')
def overlong(max_length: int, cache: int, weight: float = 1.0) -> Reward:
    """weight * clip((max_length - cache - n) / cache, -1, 0) for n tokens (DAPO 2503.14476).

    The penalty of `shaping.soft_overlong`, for algorithms that do not shape rewards by it
    themselves, as `dapo` and `magistral` do: an answer would pay twice. Reasons: `short`, `long`
    (inside the cache), `too_long`.

    Args:
      max_length: tokens that the policy chose; answers of this length get the whole penalty.
      cache: tokens before max_length over which it grows; in [1, max_length].
      weight: DAPO 1, Magistral (2506.10910) .1.
    """
    checks.number('max_length', max_length, 1)
    checks.number('cache', cache, 1, max_length)
    checks.number('weight', weight, 0)

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        ramp = min(max((max_length - cache - len(tokens)) / cache, -1.0), 0.0)
        reason = 'short' if ramp == 0 else 'long' if ramp > -1 else 'too_long'
        return Verdict(weight * ramp + 0.0, reason)

    return reward
