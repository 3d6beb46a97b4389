"""Judges whose rewards read reward models, scoring batches of answers while others are drawn.

Rows wait until a batch of one width is full, or the judge is told to begin with what it has
(`flush`); each width is one compiled program. Batches are made of the rows in the order in which
they come, and dispatched without waiting; a thread waits for the scores and hands the cases on to
the judge that computes rewards from them. So a row's score does not depend on the clock.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import queue
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from policyopt import rewards
from policyopt.reward_model import (
    RewardModel,
    check_folder,
    load,
    make_rows,
    make_score,
    pad,
    same_ids,
    width_of,
)
from policyopt.rewards import Case, Judge, JudgeConfig, Spec, StepsConfig, Verdict
from policyopt.rewards.scored import Scored, key, read_calibration
from policyopt.rewards.spec import arguments, find, walk
from policyopt.rewards.verdict import SCORES, STEPS


class Use(NamedTuple):
    """How rewards use a model: its path, the form of its rows, whether steps are scored."""

    path: str
    template: str
    every: bool


def uses(spec: Spec) -> list[Use]:
    """The reward models that a reward needs, each once, in order."""
    found: dict[tuple[str, str], bool] = {}
    for given in _asked(spec):
        name = given['path'], given['template']
        found[name] = found.get(name, False) or given['per'] == 'step'
    return [Use(*name, every) for name, every in found.items()]


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A case whose scores are being made."""

    case: Case
    future: Future[Verdict]
    missing: int
    scores: dict[str, Scored] = dataclasses.field(default_factory=dict)


class _Batch(NamedTuple):
    """Scores under way: an array of the device, and whose they are."""

    name: str
    found: Any
    rows: list[tuple[_Waiting, int]]  # with their lengths
    limit: int  # of these
    calibration: rewards.Calibration | None = None


class _Scorer:
    """One model: rows that wait for company, by width, and programs that score them."""

    def __init__(self, use: Use, found: RewardModel, policy: Any, batch: int):
        self._name, self._model, self._batch = key(use.path, use.template), found, batch
        self._limit, self._every = found.model.config.max_length, use.every
        self._score = make_score(found.model, use.every)
        tokenizer = found.model.tokenizer
        self._row = make_rows(tokenizer, policy, use.template, use.path)
        if use.every and not same_ids(tokenizer, policy):
            raise ValueError(
                f"per='step' of {use.path}, whose tokenizer is not the policy's: where a step ends "
                "in its ids is not known; legal is per='answer'"
            )
        self._rows: dict[int, list[tuple[_Waiting, list[int]]]] = collections.defaultdict(list)

    def add(self, waiting: _Waiting) -> list[_Batch]:
        """Take a case; returns the batch that it filled."""
        ids = self._row(waiting.case)
        if len(ids) > self._limit:
            return [_Batch(self._name, np.zeros(1), [(waiting, len(ids))], self._limit)]
        width = width_of(len(ids))
        self._rows[width].append((waiting, ids))
        return [self._dispatch(width)] if len(self._rows[width]) == self._batch else []

    def flush(self) -> list[_Batch]:
        """Batches of the rows that wait."""
        return [self._dispatch(width) for width in sorted(self._rows) if self._rows[width]]

    def _dispatch(self, width: int) -> _Batch:
        rows, self._rows[width] = self._rows[width], []
        ids = [ids for _, ids in rows]
        found = self._score(self._model.params, *pad(ids, self._batch, width))
        whose = [(waiting, len(row)) for (waiting, _), row in zip(rows, ids, strict=True)]
        return _Batch(self._name, found, whose, self._limit, self._model.calibration)


def _told(batch: _Batch, row: int, values: np.ndarray) -> Scored:
    """What a batch's scores, [B] or [B,T], say of one of its cases."""
    waiting, length = batch.rows[row]
    known = batch.calibration and tuple(batch.calibration)
    if length > batch.limit:
        return Scored(None, (), length, known)
    own = values[row]
    if own.ndim == 0:
        return Scored(float(own), (), length, known)
    first = length - len(waiting.case.tokens)
    ends = [step[1] for step in waiting.case.example.get(STEPS, ())]
    return Scored(float(own[length - 1]), tuple(float(own[first + e]) for e in ends), length, known)


class ModelJudge:
    """A judge whose rewards read scores of reward models, which are made here first.

    Args:
      inner: computes rewards from cases and the scores in their examples.
      wanted: the models.
      tokenizer: the policy's.
      batch: rows that are scored at once.
      mesh, rules: where the models' parameters go.
    """

    together = True

    def __init__(
        self,
        inner: Judge,
        wanted: Sequence[Use],
        tokenizer: Any,
        batch: int,
        mesh: Any = None,
        rules: Any = None,
    ):
        self._inner, self._wanted, self._tokenizer, self._batch = inner, wanted, tokenizer, batch
        self._load = functools.partial(load, mesh=mesh, rules=rules)
        self._given: dict[str, RewardModel] = {}
        self._scorers: list[_Scorer] | None = None
        self._done: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def own(self) -> bool:
        """Whether it needs a model that the run trains."""
        return any(not use.path for use in self._wanted)

    def give(self, found: RewardModel) -> None:
        """Use this model as the one that the run trains."""
        self._given[''] = found
        self._scorers = None

    def start(self) -> None:
        """Load the models that have a path, and get the inner judge ready."""
        self._inner.start()
        for path in dict.fromkeys(use.path for use in self._wanted if use.path):
            if path not in self._given:
                self._given[path] = self._load(path)

    def submit(self, cases: Sequence[Case]) -> list[Future[Verdict]]:
        """Score the cases with others, and judge them with their scores; does not wait."""
        scorers = self._ready()
        futures: list[Future[Verdict]] = []
        for case in cases:
            waiting = _Waiting(case, Future(), len(scorers))
            futures.append(waiting.future)
            for scorer in scorers:
                self._send(scorer.add(waiting))
        return futures

    def flush(self) -> None:
        """Score the rows that wait for a full batch."""
        for scorer in self._scorers or ():
            self._send(scorer.flush())
        self._inner.flush()

    def close(self) -> None:
        """Free the models, the thread and the inner judge."""
        if self._thread is not None:
            self._done.put(None)
            self._thread.join(timeout=10)
            self._thread = None
        self._given, self._scorers = {}, None
        self._inner.close()

    def __enter__(self) -> ModelJudge:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _ready(self) -> list[_Scorer]:
        self.start()
        if self._scorers is None:
            if self.own and '' not in self._given:
                raise RuntimeError('the reward model of the run is not trained yet')
            self._scorers = [
                _Scorer(use, self._given[use.path], self._tokenizer, self._batch)
                for use in self._wanted
            ]
        if self._thread is None:
            self._thread = threading.Thread(target=self._pass_on, name='scores', daemon=True)
            self._thread.start()
        return self._scorers

    def _send(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            self._done.put(batch)

    def _pass_on(self) -> None:
        """Wait for scores, in a thread of its own; judge the cases that have all of theirs."""
        while (batch := self._done.get()) is not None:
            try:
                values = np.asarray(batch.found)
                whole = []
                for row, (waiting, _) in enumerate(batch.rows):
                    waiting.scores[batch.name] = _told(batch, row, values)
                    waiting.missing -= 1
                    if not waiting.missing:
                        whole.append(waiting)
                self._judge(whole)
            except BaseException as error:  # of the device, or of a judge that is gone
                for waiting, _ in batch.rows:
                    if not waiting.future.done():
                        waiting.future.set_exception(error)

    def _judge(self, whole: Sequence[_Waiting]) -> None:
        cases = [w.case._replace(example={**w.case.example, SCORES: dict(w.scores)}) for w in whole]
        for waiting, found in zip(whole, self._inner.submit(cases), strict=True):
            found.add_done_callback(functools.partial(_copy, waiting.future))


def _copy(into: Future[Verdict], found: Future[Verdict]) -> None:
    if found.cancelled():
        into.set_exception(concurrent.futures.CancelledError())
    elif (error := found.exception()) is not None:
        into.set_exception(error)
    else:
        into.set_result(found.result())


def make_judge(
    spec: Spec, config: JudgeConfig, tokenizer: Any, mesh: Any = None, rules: Any = None
) -> Judge:
    """The judge that a config asks for, with the reward models that its reward needs.

    No parameter is read. Raises ValueError for a model that is not there, has no reward head, or
    lacks the calibration that the reward's scale needs, and for a `judge.batch` without effect.
    """
    wanted, inner = uses(spec), rewards.make_judge(spec, config)
    if not wanted:
        if config.batch != JudgeConfig.batch:
            raise ValueError(
                f'judge.batch is {config.batch}, but no reward model is there to score batches; '
                'leave it out'
            )
        return inner
    for given in _asked(spec):
        if given['path']:
            _check_folder(**given)
    return ModelJudge(inner, wanted, tokenizer, config.batch, mesh, rules)


def make_judges(
    spec: Spec, scorer: Spec, config: JudgeConfig, tokenizer: Any, mesh: Any, rules: Any
) -> tuple[Judge, Judge | None]:
    """The judge of a run, and what judges its measurements where the reward reads a model.

    What the model is to stand for is then measured by the task's own scorer.
    """
    judge = make_judge(spec, config, tokenizer, mesh, rules)
    if not isinstance(judge, ModelJudge):
        return judge, None
    return judge, rewards.make_judge(truth_of(spec, scorer), config)


def truth_of(spec: Spec, scorer: Spec) -> Spec:
    """What measures a run whose reward needs a model: the truth of `audited`, else the scorer."""
    for part in walk(spec):
        if find(part.path) is rewards.audited:
            return part.kwargs['truth']
    return rewards.read('graded', {}, scorer)


def check(spec: Spec, steps: StepsConfig | None, trained: bool, needed: Collection[str]) -> None:
    """Raise ValueError where reward and run do not fit, naming the field.

    Args:
      spec: of the reward.
      steps: how the run divides answers; None where it does not.
      trained: whether the run trains a reward model.
      needed: what the algorithm reads; see `rollout.required_fields`.
    """
    asked = _asked(spec)
    stepped = [p.path for p in walk(spec) if find(p.path) is rewards.by_step]
    stepped += ['reward_model' for given in asked if given['per'] == 'step']
    if stepped and steps is None:
        raise ValueError(
            f'config.reward has {stepped[0]}, a reward of steps, but config.rollout.steps is None: '
            "answers are not divided; legal is a section such as {'marker': '\\n'}"
        )
    home = all(find(p.path).__module__.startswith('policyopt.') for p in walk(spec))
    if (
        steps is not None
        and home
        and not stepped
        and not {'segment', 'segment_rewards'} & set(needed)
    ):
        raise ValueError(
            f'config.rollout.steps is {steps}, but neither algorithm nor reward reads steps; legal '
            'is None'
        )
    own = any(not given['path'] for given in asked)
    if own and not trained:
        raise ValueError(
            'config.reward has a reward_model without a path, and config.preferences is None; '
            'legal is a path, or a section `preferences`, which trains a reward model'
        )
    if trained and not own:
        raise ValueError(
            'config.preferences has no effect: config.reward has no reward_model without a path'
        )


def _asked(spec: Spec) -> list[dict[str, Any]]:
    """Arguments of each `reward_model` of a reward."""
    return [arguments(part) for part in walk(spec) if find(part.path) is rewards.reward_model]


def _check_folder(path: str, scale: str, **others: Any) -> None:
    del others
    check_folder(path)
    known = read_calibration(path)
    if scale != 'raw' and (known is None or (scale == 'truth' and known.slope is None)):
        have = 'no calibration.json' if known is None else 'a calibration without true rewards'
        raise ValueError(
            f"reward_model: scale is {scale!r}, but {path} has {have}; legal is 'raw', or first "
            f'python -m policyopt.train_reward POLICY --calibrate={path}'
        )
