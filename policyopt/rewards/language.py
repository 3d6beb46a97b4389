"""Reward for an answer in one language, by a detector that comes with its model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

from policyopt import checks
from policyopt.rewards.verdict import Reward, Verdict

# What has no language of its own: code, formulas, commands, tags of thought, addresses, numbers.
_NOISE = re.compile(
    r'```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)'
    r'|\\begin\{(\w+\*?)\}.*?\\end\{\1\}|\\[A-Za-z]+(?:\{[^{}]*\})*|</?\w+>|https?://\S+|\S*[\d_=^]\S*',
    re.DOTALL,
)
_LEAST = 20  # letters of a part that is judged by itself; fewer say little
_TEXT = 20_000  # characters of a part that are looked at


@checks.factory('reward')
def language_consistency(to: str = '') -> Reward:
    """1 where every part of the answer is in one language, that of the prompt; else 0 (2506.10910).

    Code, formulas and numbers are left out first. What remains is looked at paragraph by paragraph,
    thought and answer alike, as far as a paragraph has letters enough to tell. The detector (eldc,
    60 languages) is wrong on some short texts; where it tells of no paragraph, the answer gets the
    benefit of the doubt.

    Reasons: `ok`, `undecided` (1, too), `mixed`, `other_language`.

    Args:
      to: ISO 639-1 code, such as 'fr', of the language to keep to; '' for the code in
        `example['metadata']['language']`, else that of `example['prompt']`, or
        `example['question']`, and for any single one where that tells none.
    """
    if importlib.util.find_spec('eldc') is None:
        raise ValueError(
            "language_consistency needs eldc, not installed: pip install 'policyopt[language]'"
        )
    import eldc

    eldc.init()
    if to:
        checks.one_of('to', to, eldc.LANGUAGES)

    def languages(text: str) -> set[str]:
        parts = [_NOISE.sub(' ', part[:_TEXT]) for part in re.split(r'\n\s*\n', text)]
        told = [part for part in parts if sum(map(str.isalpha, part)) >= _LEAST] or [
            ' '.join(parts)
        ]
        found = [eldc.detect_details(part) for part in told]
        return {r.language for r in found if r.reliable and r.language != 'und'}

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        stated = to or example.get('metadata', {}).get('language')
        prompt = example.get('prompt', example.get('question', ''))
        wanted = {stated} if isinstance(stated, str) else languages(prompt)
        found = languages(text)
        if not found:
            return Verdict(1.0, 'undecided')
        if len(found) > 1:
            return Verdict(0.0, 'mixed')
        return (
            Verdict(1.0, 'ok') if not wanted or found <= wanted else Verdict(0.0, 'other_language')
        )

    return reward
