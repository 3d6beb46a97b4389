"""The reward that a model gives, from scores that come with the answer.

Models run in the process that trains (`policyopt.reward_model`); rewards run where there is no jax.
So scores are made first, and reach this reward in its example. That makes it a reward like any
other, to be composed and judged beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from policyopt import checks
from policyopt.rewards.steps import TOTALS, steps_of, total_of
from policyopt.rewards.verdict import NONSENSE, SCORES, Reward, Verdict, fault

CALIBRATION = 'calibration.json'
TEMPLATE = '{prompt}{answer}'
SCALES = ('raw', 'standard', 'truth')


class Calibration(NamedTuple):
    """What a reward model's scores are like on answers that it was not trained on.

    Attributes:
      rows: answers.
      mean, std: of their scores.
      slope, intercept: of the line that predicts the true reward from the score (least squares);
        None where that was not known.
    """

    rows: int
    mean: float
    std: float
    slope: float | None = None
    intercept: float | None = None

    def __call__(self, score: float, scale: str) -> float:
        """A score on a scale; see `reward_model`. ValueError where the scale is not known."""
        if scale == 'standard':
            return (score - self.mean) / self.std
        if self.slope is None or self.intercept is None:
            raise ValueError(f'scale={scale!r}, but the calibration knows no true rewards')
        return self.intercept + self.slope * score


class Scored(NamedTuple):
    """What a model said of an answer.

    Attributes:
      score: at its last token; None where the row was too long.
      steps: at the last token of each step; empty where that was not asked for.
      length: tokens of the row, prompt included.
      calibration: of the model, as a tuple; None where it has none.
    """

    score: float | None
    steps: tuple[float, ...]
    length: int
    calibration: tuple[Any, ...] | None = None


def read_calibration(folder: str | Path) -> Calibration | None:
    """Calibration of the model in a folder; None where there is none, ValueError for no such."""
    path = Path(folder) / CALIBRATION
    if not path.exists():
        return None
    try:
        found = Calibration(**json.loads(path.read_text()))
        numbers = [x for x in found if x is not None]
        if not all(math.isfinite(x) for x in numbers) or not found.std > 0:
            raise ValueError('its numbers are not finite, or its std is not above 0')
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path} is no calibration of a reward model: {error}') from None
    return found


def key(path: str, template: str) -> str:
    """What scores of a model, given rows in one form, go by."""
    return f'{path} {template}'


@checks.factory('reward')
def reward_model(
    path: str = '',
    scale: Literal['raw', 'standard', 'truth'] = 'raw',
    per: Literal['answer', 'step'] = 'answer',
    total: Literal['sum', 'mean', 'min', 'last'] = 'last',
    template: str = TEMPLATE,
) -> Reward:
    """The score that a model with a scalar head gives to prompt and answer, at their last token.

    It scores batches while other answers are drawn. Reasons: `scored`; `too_long` (no reward) for a
    row longer than the model's `max_length`.

    Args:
      path: a Hugging Face folder with a reward head (`score.weight`), as
        `python -m policyopt.train_reward` and *ForSequenceClassification models of one label have
        it; '' for the model that the run trains (`config.preferences`).
      scale: 'raw'; 'standard', (score - mean) / std over the answers that the model was calibrated
        on; 'truth', the true reward that the score predicts on these. The last two need
        calibration.json beside the model.
      per: 'answer', or 'step' for rewards of the answer's steps (`rollout.steps`): the score at the
        last token of each, of which the value is the `total`.
      total: of rewards of steps.
      template: form of the text for a model whose tokenizer is not the policy's, with {prompt} and
        {answer}; a model with the policy's tokenizer gets the very ids.
    """
    checks.one_of('scale', scale, SCALES)
    checks.one_of('per', per, ('answer', 'step'))
    checks.one_of('total', total, TOTALS)
    if per == 'answer' and total != 'last':
        raise ValueError(f"total={total!r} has no effect with per='answer'; legal is 'last'")
    if '{prompt}' not in template or '{answer}' not in template:
        raise ValueError(f'template={template!r}; legal is a text with {{prompt}} and {{answer}}')
    name = key(path, template)

    def reward(text: str, tokens: Sequence[int], example: Mapping[str, Any]) -> Verdict:
        del text, tokens
        if name not in example.get(SCORES, {}):
            raise ValueError(
                f'no score of {path or "the reward model of the run"} came with the answer; a step '
                "has none: per='step' scores these"
            )
        found = Scored(*example[SCORES][name])
        if found.score is None:
            return Verdict(math.nan, f'too_long: {found.length} tokens')
        values = found.steps if per == 'step' else (found.score,)
        if not all(math.isfinite(x) for x in values):
            return fault(NONSENSE, f'the reward model gave {values}')
        if scale != 'raw':
            if found.calibration is None:
                raise ValueError(f'scale={scale!r}, but the reward model is not calibrated')
            known = Calibration(*found.calibration)
            values = tuple(known(x, scale) for x in values)
        if per == 'answer':
            return Verdict(values[0], 'scored')
        steps_of(example, 'reward_model')
        return Verdict(total_of(values, total), 'scored', steps=values)

    return reward
