"""Arithmetic from reasoning-gym in a compact digit-level form, split, shuffled and batched."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from policyopt import settings
from policyopt.data.tokenizer import CharTokenizer
from policyopt.types import TokenBatch

# Not after a digit or an operator: `5 + 6` ends `4 + 5 + 6`, but isn't the problem.
_TWO_OPERANDS = re.compile(r'(?:^|[^\d\s+*/=-])\s*(-?\d+) *([-+*]) *(-?\d+)(?= *[=.?]?\s*$)')


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Which problems there are.

    Attributes:
      name: a reasoning-gym dataset with two-operand arithmetic questions, such as chain_sum.
      kw: its settings (number of terms, digits, ...).
      size: how many problems are generated; repeated ones are dropped.
      held_out: how many problems are kept apart for evaluation.
      held_out_share: share of all problem texts that training never sees, by a hash of the text.
      prompt_width: longest prompt allowed, in tokens; every prompt is padded to it.
      seed: seed of the generator.
    """

    name: str = 'chain_sum'
    kw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 20_000
    held_out: int = 512
    held_out_share: float = 0.1
    prompt_width: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """One problem: prompt text and ids, the right answer, and the entry its scorer reads."""

    prompt: str
    ids: tuple[int, ...]
    answer: str
    entry: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Problems of a task, disjoint by text between the splits, and the task's own scorer.

    Attributes:
      train: problems to train on, no two alike.
      held_out: problems to evaluate on, no two alike, none of them in `train`.
      score: (answer text, entry) -> score in [0, 1].
    """

    train: Sequence[Item]
    held_out: Sequence[Item]
    score: Callable[[str, Any], float]


def compact(question: str) -> str:
    """`a+b=` for a question that ends in a two-operand expression: digits and signs only.

    Raises ValueError where the question ends in anything else (three operands, a division).
    """
    match = _TWO_OPERANDS.search(question)
    if match is None:
        raise ValueError(f'no expression of two operands with +, - or * ends {question!r}')
    return ''.join(match.groups()) + '='


def in_held_out(prompt: str, share: float) -> bool:
    """Whether a problem belongs to the held-out split: a hash of its text, the same everywhere."""
    return zlib.crc32(prompt.encode()) < share * 2**32


def make_task(config: TaskConfig, tokenizer: CharTokenizer) -> Task:
    """Generate the task's problems and split them by content.

    Raises ValueError for an unknown dataset or setting (with the nearest spelling), for a prompt
    over `prompt_width` tokens and where too few problems fall on the held-out side.
    """
    import reasoning_gym  # imported here: only tasks need it
    from reasoning_gym import factory

    settings.check_names('task.name', [config.name], factory.DATASETS)
    legal = [f.name for f in dataclasses.fields(factory.DATASETS[config.name][1])]
    settings.check_names('task.kw', config.kw, set(legal) - {'seed', 'size'})
    dataset = reasoning_gym.create_dataset(
        config.name, seed=config.seed, size=config.size, **config.kw
    )
    splits: dict[bool, list[Item]] = {False: [], True: []}
    seen = set()
    for index in range(config.size):
        entry = dataset[index]
        prompt = compact(entry['question'])
        if prompt in seen:
            continue
        seen.add(prompt)
        ids = tuple(tokenizer.encode(prompt))
        if len(ids) > config.prompt_width:
            raise ValueError(
                f'problem {index}, {prompt!r}, has {len(ids)} tokens; task.prompt_width is '
                f'{config.prompt_width}'
            )
        item = Item(prompt=prompt, ids=ids, answer=entry['answer'], entry=entry)
        splits[in_held_out(prompt, config.held_out_share)].append(item)
    if len(splits[True]) < config.held_out or not splits[False]:
        raise ValueError(
            f'task.held_out is {config.held_out}, but of {len(seen)} distinct problems only '
            f'{len(splits[True])} are on the held-out side and {len(splits[False])} on the other; '
            'raise task.size or task.held_out_share'
        )
    return Task(
        train=tuple(splits[False]),
        held_out=tuple(splits[True][: config.held_out]),
        score=dataset.score_answer,
    )


def batches(items: Sequence[Item], size: int, seed: int) -> Iterator[list[Item]]:
    """Endless batches of `size` items in an order shuffled anew each epoch; a grain iterator.

    The order is a function of the seed, and `get_state` / `set_state` resume it exactly.
    """
    if size > len(items):
        raise ValueError(f'a batch of {size} needs as many items; there are {len(items)}')
    # Endless in practice; grain's own endless length does not fit an index at batch size 1.
    dataset = grain.MapDataset.source(items).seed(seed).shuffle().repeat(10**9)
    dataset = dataset.batch(size, batch_fn=list)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def supervised(items: Sequence[Item], tokenizer: CharTokenizer, width: int) -> TokenBatch:
    """Prompts with their right answers and end of sequence, as rows of a batch to imitate.

    Returns a TokenBatch of numpy arrays [B, width] with mask 1 on the answer and its end of
    sequence and every row positive; advantages and old log-probs are zero and unused. Raises
    ValueError where a row is longer than `width`.
    """
    tokens = np.full((len(items), width), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(items), width), np.float32)
    length = np.zeros(len(items), np.int32)
    for i, item in enumerate(items):
        row = [*item.ids, *tokenizer.encode(item.answer), tokenizer.eos_id]
        if len(row) > width:
            raise ValueError(f'{item.prompt}{item.answer} has {len(row)} tokens of {width} at most')
        tokens[i, : len(row)] = row
        mask[i, len(item.ids) : len(row)] = 1
        length[i] = len(row)
    zeros = np.zeros(mask.shape, np.float32)
    arrays: dict[str, Any] = dict(
        tokens=tokens,
        mask=mask,
        advantages=zeros,
        logp_old=zeros,
        length=length,
        prompt_length=np.array([len(item.ids) for item in items], np.int32),
        group=np.arange(len(items), dtype=np.int32),
        positive=np.ones(len(items), bool),
    )
    return TokenBatch(**arrays)
