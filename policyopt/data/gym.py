"""Problems of reasoning-gym, as they are or in a compact digit-level form."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from policyopt import settings
from policyopt.data.rows import BadRow, Row

# Not after a digit or an operator: `5 + 6` ends `4 + 5 + 6`, but isn't the problem.
_TWO_OPERANDS = re.compile(r'(?:^|[^\d\s+*/=-])\s*(-?\d+) *([-+*]) *(-?\d+)(?= *[=.?]?\s*$)')


def compact(question: str) -> str:
    """`a+b=` for a question that ends in a two-operand expression: digits and signs only.

    Raises ValueError where the question ends in anything else (three operands, a division).
    """
    match = _TWO_OPERANDS.search(question)
    if match is None:
        raise ValueError(f'no expression of two operands with +, - or * ends {question!r}')
    return ''.join(match.groups()) + '='


def create(name: str, kw: Mapping[str, Any], size: int, seed: int, where: str = 'task') -> Any:
    """The reasoning-gym dataset of that name: items by index, and `score_answer(answer, entry)`.

    Raises ValueError for an unknown dataset or setting, with the nearest spelling, and for settings
    that the dataset refuses.
    """
    import reasoning_gym  # imported here: a second of start-up that only its tasks need
    from reasoning_gym import factory

    settings.check_names(f'{where}.name', [name], factory.DATASETS)
    legal = [f.name for f in dataclasses.fields(factory.DATASETS[name][1])]
    settings.check_names(f'{where}.kw', kw, set(legal) - {'seed', 'size'})
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **kw)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f'{where}.kw is {dict(kw)}; {name} refuses it: {error}') from error


def rows(dataset: Any, size: int, form: str) -> Iterator[Row | BadRow]:
    """Problems 0 to size - 1 of the dataset; `form` is compact or full, the question itself."""
    for index in range(size):
        entry = dict(dataset[index])
        if not isinstance(entry['answer'], str):
            yield BadRow(index, 'the dataset gives no right answer, only a scorer')
            continue
        try:
            prompt = compact(entry['question']) if form == 'compact' else entry['question']
        except ValueError as error:
            yield BadRow(index, str(error))
            continue
        yield Row(index, prompt, entry)
