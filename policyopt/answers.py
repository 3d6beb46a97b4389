"""Answers to problems, drawn and judged: one or several to each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyopt import hosts, metrics
from policyopt.data import Item
from policyopt.environments import Recorded, said
from policyopt.rewards import Case, Judge, Page, Round, StepsConfig
from policyopt.rewards.steps import make_case
from policyopt.sampling import (
    Engine,
    EngineConfig,
    Finish,
    RowErrors,
    SamplingConfig,
    Turn,
    pad_prompts,
    sample,
)
from policyopt.sampling.decode import OnError
from policyopt.turns import answered, spelled


class Answers(NamedTuple):
    """n answers to each of P problems.

    Attributes:
      texts: P lists of n texts.
      tokens: [P,n] int, tokens of each answer, its end of sequence included.
      finish: [P,n] int, `sampling.Finish`: why it ended.
      marks: [P,n] float32, 1 right, 0 wrong, NaN where the judge failed.
      seconds: that drawing took, compilation included.
      turns: P lists of n rows of turns; [] for rows without an environment.
      ids: P lists of n lists of ids, end of sequence included.
      rewards: [P,n] float32, NaN where the judge failed.
    """

    texts: list[list[str]]
    tokens: np.ndarray
    finish: np.ndarray
    marks: np.ndarray
    seconds: float
    turns: list[list[list[Turn]]] = []  # noqa: RUF012
    ids: Sequence[Sequence[list[int]]] = ()
    rewards: Any = None

    @property
    def correct(self) -> np.ndarray:
        """[P,n] bool: answers with full marks; one that was not judged has none."""
        return self.marks == 1


class _Row(NamedTuple):
    text: str
    ids: list[int]
    finish: int
    drawn: int
    turns: list[Turn]
    item: Item | None = None  # as the judge sees it, where there were turns


def answer_keys(key: Any, problems: int, samples: int) -> Any:
    """Keys [problems * samples], a function of `key` and the numbers of problem and sample alone.

    So the first samples of more of them are the same, and those of fewer problems.
    """
    fold = jax.random.fold_in
    rows = jax.vmap(fold, (None, 0))(key, jnp.arange(problems))
    each = jax.vmap(lambda k: jax.vmap(fold, (None, 0))(k, jnp.arange(samples)))
    return each(rows).reshape(problems * samples)


def draw(
    model: Any,
    params: Any,
    items: Sequence[Item],
    judge: Judge,
    key: jax.Array,
    config: SamplingConfig,
    *,
    samples: int = 1,
    prompt_width: int,
    batch: int | None = None,
    engine: EngineConfig | None = None,
    title: str = '',
    on_error: OnError = 'raise',
    page: Page | None = None,
    steps: StepsConfig | None = None,
) -> Answers:
    """Answer every item `samples` times and judge the answers.

    In lock-step, `batch` rows at once, the last batch filled up with rows of the first; or by the
    slot engine, which spends no step on rows that ended. They draw the same tokens, up to draws
    within rounding of an edge. Items with an environment need the engine; their answer is the last
    turn, which is not judged where the environment failed.

    Args:
      model: a `policyopt.models` model with a tokenizer.
      params: its parameters.
      items: problems.
      judge: says which answers are right; what it fails on has no marks.
      key: a typed key; each answer's own is `answer_keys`. Unused noise at temperature 0.
      config: how answers are drawn.
      samples: answers to each problem.
      prompt_width: longest prompt; in lock-step, the width that prompts are padded to.
      batch, engine: one of them. An engine without a size gets prompt_width + max_new_tokens.
      title: of a progress display, with the engine; '' for none.
      on_error: 'raise' RowErrors for logits that are not finite, or 'record' such answers as
        finished by ERROR, without marks. A prompt that can't be used raises either way.
      page: where verdicts are written down, and found again; None for nowhere.
      steps: what divides answers for rewards of steps; None for none.
    """
    if (batch is None) == (engine is None):
        raise ValueError('give one of batch and engine')
    began = time.monotonic()
    repeated = [item for item in items for _ in range(samples)]
    prompts = [item.ids for item in repeated]
    keys = answer_keys(key, len(items), samples)
    judging = Round(judge, page)
    if not prompts:
        rows = []
    elif batch is not None and any(item.play for item in items):
        raise ValueError('batch is given, but items have an environment; legal is engine')
    elif batch is not None:
        rows = _lock_step(model, params, prompts, keys, config, prompt_width, batch, on_error)
    else:
        assert engine is not None
        size = engine.size or prompt_width + config.max_new_tokens
        engine = dataclasses.replace(engine, size=size)
        worlds = _worlds(repeated, judging)
        given = (keys, config, engine, title, on_error, worlds, repeated)
        rows = _slots(model, params, prompts, *given)
        if worlds is not None:
            for i, row in enumerate(rows):
                judging.hear(i, said(row.turns))
    seconds = time.monotonic() - began
    texts = [row.text for row in rows]
    finish = np.array([row.finish for row in rows], np.int32)
    drawn = [i for i in range(len(rows)) if finish[i] < Finish.ERROR]
    make = make_case(steps, model.tokenizer.decode)
    judging.add(drawn, [make(rows[i].item or repeated[i], rows[i].ids) for i in drawn])
    verdicts = judging.verdicts(len(rows))
    marks = [math.nan if math.isnan(v.value) else float(v.positive) for v in verdicts]
    shape = (len(items), samples)
    each = [slice(i * samples, (i + 1) * samples) for i in range(len(items))]
    return Answers(
        texts=[texts[part] for part in each],
        ids=[[row.ids for row in rows[part]] for part in each],
        tokens=np.array([row.drawn for row in rows], np.int32).reshape(shape),
        finish=finish.reshape(shape),
        rewards=np.array([v.value for v in verdicts], np.float32).reshape(shape),
        marks=np.array(marks, np.float32).reshape(shape),
        seconds=seconds,
        turns=[[row.turns for row in rows[part]] for part in each],
    )


def _worlds(items: Sequence[Item], judging: Round) -> list[Recorded | None] | None:
    """The environment of each row, None where no row has one."""
    if not any(item.play for item in items):
        return None
    return [
        item.play and Recorded(item.play.environment(item.entry), judging.heard(i))
        for i, item in enumerate(items)
    ]


def _lock_step(
    model: Any,
    params: Any,
    prompts: Any,
    keys: Any,
    config: Any,
    width: int,
    batch: int,
    on_error: OnError,
) -> list[_Row]:
    tokens, length = pad_prompts(prompts, width)
    rows: list[_Row] = []
    for start in range(0, len(prompts), batch):
        index = np.arange(start, start + batch) % len(prompts)
        chosen = tokens[index], length[index]
        rollout = sample(model, params, chosen, keys[index], config, on_error=on_error)
        found = hosts.fetch((rollout.tokens, rollout.prompt_length, rollout.length))
        finish = hosts.fetch(rollout.finish).tolist()
        for row, begin, end, why in zip(*found, finish, strict=True):
            ids = row[begin:end].tolist()
            rows.append(_Row(model.tokenizer.decode(ids), ids, why, len(ids), []))
    return rows[: len(prompts)]


def _slots(
    model: Any,
    params: Any,
    prompts: Any,
    keys: Any,
    config: Any,
    sizes: EngineConfig,
    title: str,
    on_error: OnError,
    worlds: Any,
    items: Sequence[Item],
) -> list[_Row]:
    engine = Engine(model, config, sizes)
    engine.submit(prompts, keys, environments=worlds)
    rows: dict[int, _Row] = {}
    began, drawn = time.monotonic(), 0
    shown = metrics.Display(title, len(prompts)) if title else contextlib.nullcontext()
    with shown as display:
        while engine.busy:
            for row in engine.step(params):
                if row.data is None or (row.finish == Finish.ERROR and on_error == 'raise'):
                    raise RowErrors({row.id: row.error or 'no data'})
                start = row.prompt_length if row.environment is None else row.turn_start
                ids = row.tokens[start:].tolist()
                text = model.tokenizer.decode(ids)
                item = answered(items[row.id], row, model.tokenizer.decode)
                rows[row.id] = _Row(text, ids, int(row.finish), row.drawn, row.turns, item)
                drawn += row.drawn
                if display is not None:
                    speed = drawn / max(time.monotonic() - began, 1e-9)
                    values = {'length': drawn / len(rows), 'tokens_per_second': speed}
                    display.update(len(rows), values)
    return [rows[i] for i in range(len(prompts))]


# ============================================================================ votes


def vote_classes(items: Sequence[Item], answers: Answers, judge: Judge) -> list[list[int]]:
    """Which answers to a problem are the same vote: [P][n], the number of each one's class, from 0.

    Two answers are the same where both are right or both are not, and their texts are equal but for
    white space around them, or the judge calls each right where the other stands as the right
    answer. They are compared with the first of a class; those that were not judged, by text alone.
    A judge that ignores `entry['answer']` and checks the answer itself holds all right ones for the
    same.
    """
    rows = zip(items, answers.texts, answers.marks.tolist(), strict=True)
    groups = [_grouping(texts, marks, item.entry) for item, texts, marks in rows]
    votes: list[list[int]] = [[] for _ in groups]
    replies: dict[int, Any] = dict.fromkeys(range(len(groups)))
    while replies:  # of all problems at once, since each waits for its judge
        asked: dict[int, list[Any]] = {}
        for i, reply in replies.items():
            try:
                asked[i] = judge.submit(groups[i].send(reply))
            except StopIteration as done:
                votes[i] = done.value
        replies = {i: [f.result().positive for f in futures] for i, futures in asked.items()}
    return votes


def _grouping(
    texts: Sequence[str], marks: Sequence[float], entry: Mapping[str, Any]
) -> Generator[list[Case], list[bool], list[int]]:
    """The classes of one problem's answers; yields cases for the judge, is sent what is right."""
    firsts: list[tuple[str, float]] = []  # of each class
    found: dict[tuple[str, float], int] = {}
    known = [-1.0 if math.isnan(mark) else mark for mark in marks]
    keys = list(zip(map(str.strip, texts), known, strict=True))
    for text, key in zip(texts, keys, strict=True):
        if key in found:
            continue
        mark = key[1]
        rivals = [i for i, (_, its) in enumerate(firsts) if mark >= 0 and its == mark]
        pairs = [pair for i in rivals for pair in ((text, firsts[i][0]), (firsts[i][0], text))]
        right = (yield [Case(a, (), {**entry, 'answer': b}) for a, b in pairs]) if pairs else []
        alike = (i for j, i in enumerate(rivals) if all(right[2 * j : 2 * j + 2]))
        found[key] = next(alike, len(firsts))
        if found[key] == len(firsts):
            firsts.append((text, mark))
    return [found[key] for key in keys]


def write_samples(
    path: Path,
    items: Sequence[Item],
    answers: Answers,
    votes: Sequence[Sequence[int]],
    tokenizer: Any,
) -> None:
    """One JSON line an answer, in order of problems."""
    with open(path, 'w', encoding='utf-8') as file:
        for i, item in enumerate(items):
            for j, text in enumerate(answers.texts[i]):
                mark = answers.marks[i, j]
                line = {
                    'problem': i,
                    'sample': j,
                    'task': item.task,
                    'prompt': item.prompt,
                    'right_answer': item.answer,
                    'answer': text,
                    'correct': None if np.isnan(mark) else bool(mark == 1),
                    'vote': votes[i][j],
                    'tokens': int(answers.tokens[i, j]),
                    'finish': Finish(int(answers.finish[i, j])).name.lower(),
                }
                if turns := answers.turns[i][j]:
                    line['turns'] = spelled(turns, tokenizer)
                file.write(json.dumps(line, ensure_ascii=False) + '\n')
