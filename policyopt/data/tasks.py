"""Tasks: problems with their right answers and a scorer, alone or mixed."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from policyopt import checks, environments
from policyopt.data import gym, jsonl, published
from policyopt.data.pipeline import Mixture
from policyopt.data.rows import BadRow, Row, report
from policyopt.rewards.scorers import by_task, exact_match
from policyopt.rewards.spec import Spec, build
from policyopt.types import TokenBatch


class Encoder(Protocol):
    """What tasks ask of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without end of sequence; ValueError where it has none."""
        ...


def prompt_ids(tokenizer: Encoder, text: str) -> tuple[int, ...]:
    """Ids of a problem as the model is asked it: as a chat, where the tokenizer renders one."""
    return tuple(getattr(tokenizer, 'prompt', tokenizer.encode)(text))


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Which problems there are: of a dataset, of a file, or of an environment.

    Attributes:
      name: a reasoning-gym dataset, such as chain_sum.
      kw: its settings (number of terms, digits, ...).
      size: how many problems are generated; repeated ones are dropped.
      held_out: how many problems are kept apart for evaluation.
      held_out_share: share of all problem texts that training never sees, by a hash of the text.
      prompt_width: longest prompt allowed, in tokens; every prompt is padded to it.
      seed: seed of the generator.
      form: of the prompt; `compact` is `a+b=`, for two-operand arithmetic alone, and `full` is the
        question itself.
      dataset: a published dataset to read instead, human_eval, champ or gsm8k; then name, size,
        seed and form say nothing and must be left alone, and kw may have `template`, a text around
        {question}, for gsm8k `split` (train or test), and for human_eval `sandbox`, `timeout` and
        `memory` of `rewards.code_tests`.
      file: a JSONL file of {"prompt": ..., "answer": ...} to read instead; then name, kw, size,
        seed and form say nothing and must be left alone. Beside `dataset`, a copy of its own file.
      environment: a task of several turns to play instead, or of problems that a function makes, by
        name in `policyopt.environments` or by the import path of a factory of `Scenario`, with its
        arguments in kw; size and seed are of its problems; name and form say nothing and must be
        left alone.
      on_bad_row: `error` for a row that is no problem (a field missing or of a wrong type, an empty
        or too long prompt, invalid UTF-8 or JSON, characters that the tokenizer lacks), or `skip`,
        with a warning that counts them and shows the first.
      weight: share of the rows in a mixture, relative to the other tasks.
      data_dir: folder for prepared data; by default $POLICYOPT_DATA_DIR, else policyopt/data in the
        user's cache folder ($XDG_CACHE_HOME or ~/.cache).
    """

    name: str = 'chain_sum'
    kw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 20_000
    held_out: int = 512
    held_out_share: float = 0.1
    prompt_width: int = 8
    seed: int = 0
    form: Literal['compact', 'full'] = 'compact'
    dataset: str = ''
    file: str = ''
    environment: str = ''
    on_bad_row: Literal['error', 'skip'] = 'error'
    weight: float = 1.0
    data_dir: str = ''

    def __post_init__(self):
        for name, low in (('size', 1), ('held_out', 0), ('prompt_width', 1)):
            checks.number(f'task.{name}', getattr(self, name), low)
        checks.number('task.held_out_share', self.held_out_share, 0, 1)
        if not 0 < self.weight < float('inf'):
            raise ValueError(f'task.weight is {self.weight}; legal is a finite number above 0')
        checks.one_of('task.form', self.form, ('compact', 'full'))
        checks.one_of('task.on_bad_row', self.on_bad_row, ('error', 'skip'))
        if self.dataset:
            published.check(self.dataset, self.kw)
        if self.environment:
            for field in ('name', 'form', 'dataset', 'file'):
                value = getattr(self, field)
                if value != TaskConfig.__dataclass_fields__[field].default:
                    raise ValueError(f'task.{field} is {value!r} beside task.environment')
            environments.resolve(self.environment, self.kw)
        if self.file or self.dataset:
            other = 'dataset' if self.dataset else 'file'
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if field.name in ('name', 'size', 'seed', 'form') and value != field.default:
                    raise ValueError(
                        f'task.{field.name} is {value!r} beside task.{other}; a {other} has none'
                    )
            if self.kw and not self.dataset:
                raise ValueError(f'task.kw is {dict(self.kw)} beside task.file; a file has none')

    @property
    def title(self) -> str:
        """What the task is called where no name is given: the dataset, or the file's stem."""
        if self.dataset:
            return self.dataset
        if self.environment:
            return self.environment.rpartition('.')[2]
        return pathlib.Path(self.file).stem if self.file else self.name


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """One problem: prompt text and ids, right answer, the entry its scorer reads, its task.

    `play` makes its environment, None where an answer is one turn.
    """

    prompt: str
    ids: tuple[int, ...]
    answer: str
    entry: Mapping[str, Any]
    task: str = ''
    play: environments.Play | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Problems of a task, disjoint by text between the splits, and the task's own scorer.

    Attributes:
      train: problems to train on, no two of a task alike; a `Mixture` where tasks are mixed.
      held_out: problems to evaluate on, no two of a task alike, none of them in `train`.
      score: (answer text, entry) -> score in [0, 1]; entries know their task (`entry['task']`).
      scorer: what makes `score`, in any process.
      prompt_width: longest prompt allowed, in tokens.
      longest_answer: most tokens of an answer, its end of sequence included.
      skipped: rows that were bad and left out.
      origins: what the problems come from -> SHA-256 of a file, version of a generator. The same
        config with other ones is another task.
      played: whether some items have an environment.
      stops: ids that end their turns, besides end of sequence.
    """

    train: Sequence[Item]
    held_out: Sequence[Item]
    score: Callable[[str, Any], float]
    scorer: Spec
    prompt_width: int
    longest_answer: int
    skipped: int = 0
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    played: bool = False
    stops: tuple[int, ...] = ()


def make_task(config: TaskConfig | Mapping[str, TaskConfig], tokenizer: Encoder) -> Task:
    """The task that the config describes, or the mixture of several, by name.

    Problems are prepared on disk the first time and read from there later (see
    `builders.prepare`). Splits are by content: a prompt that is held out in one task is not trained
    on in another.

    Raises ValueError for an unknown dataset or setting (with the nearest spelling), a file that
    cannot be read, bad rows where they are fatal or all there is, too few problems on the held-out
    side, and mixed tasks whose held_out_share differ.
    """
    if isinstance(config, TaskConfig):
        return _make_one('task', config.title, config, tokenizer)
    if not config:
        raise ValueError('tasks is empty; legal is one task or more')
    shares = {name: c.held_out_share for name, c in config.items()}
    if len(set(shares.values())) > 1:
        raise ValueError(
            f'held_out_share differs between the tasks, {shares}; one value keeps every prompt on '
            'one side in all of them'
        )
    made = {name: _make_one(f'tasks.{name}', name, c, tokenizer) for name, c in config.items()}
    scores = {name: task.score for name, task in made.items()}
    scorers = {name: task.scorer for name, task in made.items()}
    tasks = list(made.values())
    return Task(
        train=Mixture(tuple(t.train for t in tasks), tuple(c.weight for c in config.values())),
        held_out=tuple(item for task in tasks for item in task.held_out),
        score=by_task(scores),
        scorer=Spec('policyopt.rewards.scorers.by_task', {'scores': scorers}),
        prompt_width=max(task.prompt_width for task in tasks),
        longest_answer=max(task.longest_answer for task in tasks),
        skipped=sum(task.skipped for task in tasks),
        origins={name: x for task in tasks for name, x in task.origins.items()},
        played=any(task.played for task in tasks),
        stops=tuple(dict.fromkeys(stop for task in tasks for stop in task.stops)),
    )


class _Source(NamedTuple):
    """Rows of a source by split, bad ones, and what judges answers."""

    splits: dict[str, list[Row]]
    bad: list[BadRow]  # the first of them
    count: int  # of bad ones
    where: Callable[[int], str]
    score: Callable[[str, Any], float]
    scorer: Spec
    origins: dict[str, str]
    scenario: environments.Scenario | None = None


def _open(field: str, name: str, config: TaskConfig) -> _Source:
    """Prepare the rows, or find them prepared."""
    from policyopt.data import builders  # tfds takes half a second to import

    key: dict[str, Any] = dict(
        held_out_share=config.held_out_share, strict=config.on_bad_row == 'error'
    )
    common = dict(title=name, **key)
    scenario = None
    if config.environment:
        scenario = environments.resolve(config.environment, config.kw, field)
        key |= {f: getattr(config, f) for f in ('environment', 'kw', 'size', 'seed')}
        key |= dict(version=scenario.version)
        origins = {f'{field}.environment {config.environment}': f'version {scenario.version}'}
        problems = scenario.problems(config.size, config.seed)
        make: Any = functools.partial(builders.Played, problems=problems, **common)
        scorer = scenario.scorer
        score: Any = build(scorer)
    elif config.dataset:
        make, score, scorer = _open_published(field, config, common, key)
        origins = {f'{field}.dataset {config.dataset}': key.get('digest', 'as downloaded')}
    elif config.file:
        path = pathlib.Path(config.file).expanduser()
        digest = jsonl.digest(path)
        key |= dict(digest=digest)
        origins = {f'{field}.file {path}': digest}
        make = functools.partial(builders.JsonLines, file=path, digest=digest, **common)
        score = exact_match
        scorer = Spec('policyopt.rewards.scorers.exact')
    else:
        dataset = gym.create(config.name, config.kw, config.size, config.seed, field)
        key |= {f: getattr(config, f) for f in ('name', 'kw', 'size', 'seed', 'form')}
        key |= dict(version=builders.gym_version())
        origins = {f'{field}.name {config.name} of reasoning-gym': builders.gym_version()}
        make = functools.partial(
            builders.ReasoningGym, dataset=dataset, size=config.size, form=config.form, **common
        )
        score = dataset.score_answer
        made_with = {f: getattr(config, f) for f in ('name', 'kw', 'size', 'seed')}
        scorer = Spec('policyopt.rewards.scorers.gym', made_with)
    builder = builders.prepare(make, config.title, key, config.data_dir)
    found: Any = builder.info.metadata
    return _Source(
        splits={name: builders.read(builder, name) for name in ('train', 'held_out')},
        bad=[BadRow(*row) for row in found['first']],
        count=found['bad'],
        where=builder.where,
        score=score,
        scorer=scorer,
        origins=origins,
        scenario=scenario,
    )


def _open_published(
    field: str, config: TaskConfig, common: Mapping[str, Any], key: dict[str, Any]
) -> tuple[Any, Any, Spec]:
    """What makes the problems of a published dataset, and what judges answers to them."""
    from policyopt.data import builders

    path = published.file_of(config.dataset, config.file, field)
    scorer = published.scorer(config.dataset, config.kw)
    template = config.kw.get('template', '{question}')
    key |= dict(dataset=config.dataset, template=template)
    if path is not None:
        key |= dict(digest=jsonl.digest(path))
    if config.dataset == 'gsm8k':
        from policyopt.data import gsm8k  # another half second

        split = config.kw.get('split', 'train')
        key |= dict(split=split)
        make: Any = functools.partial(
            gsm8k.Gsm8k, file=path, split=split, template=template, **common
        )
    else:
        make = functools.partial(
            builders.Published, dataset=config.dataset, file=path, kw=config.kw, **common
        )
    return make, build(scorer), scorer


def _make_one(field: str, name: str, config: TaskConfig, tokenizer: Encoder) -> Task:
    source = _open(field, name, config)
    play = None
    if source.scenario is not None and source.scenario.environment is not None:
        play = environments.Play.of(source.scenario, tokenizer)
    splits: dict[str, list[Item]] = {}
    bad, count, longest = list(source.bad), source.count, 0
    for split, rows in source.splits.items():
        splits[split] = []
        for row in rows:
            try:
                ids = prompt_ids(tokenizer, row.prompt)
                answer = len(tokenizer.encode(row.entry['answer'])) + 1
                if len(ids) > config.prompt_width:
                    raise ValueError(
                        f'{row.prompt[:40]!r} has {len(ids)} tokens; {field}.prompt_width is '
                        f'{config.prompt_width}'
                    )
            except ValueError as error:
                bad.append(BadRow(row.line, str(error)))
                count += 1
                continue
            entry = {**row.entry, 'task': name}
            splits[split].append(Item(row.prompt, ids, entry['answer'], entry, name, play))
            longest = max(longest, answer)
    total = len(splits['train']) + len(splits['held_out'])
    if count and (config.on_bad_row == 'error' or not total):
        raise ValueError(f'{name}, bad rows: {report(bad, count, source.where)}')
    if count:
        shown = report(bad, count, source.where)
        warnings.warn(f'{name}: {count} bad rows of {count + total} skipped: {shown}', stacklevel=3)
    if len(splits['held_out']) < config.held_out or not splits['train']:
        fixed = config.file or config.dataset
        more = 'lower it, add rows' if fixed else f'raise {field}.size'
        raise ValueError(
            f'{field}.held_out is {config.held_out}, but of {total} distinct problems only '
            f'{len(splits["held_out"])} are on the held-out side and {len(splits["train"])} on the '
            f'other; {more} or change {field}.held_out_share'
        )
    return Task(
        train=tuple(splits['train']),
        held_out=tuple(splits['held_out'][: config.held_out]),
        score=source.score,
        scorer=source.scorer,
        prompt_width=config.prompt_width,
        longest_answer=longest,
        skipped=count,
        origins=source.origins,
        played=play is not None,
        stops=() if play is None else play.stops,
    )


def supervised(items: Sequence[Item], tokenizer: Any, width: int) -> TokenBatch:
    """Prompts with their right answers and end of sequence, as rows of a batch to imitate.

    Of an item with an environment, what its expert and the environment say to each other.

    Returns a TokenBatch of numpy arrays [B, width] with mask 1 on the answer and its end of
    sequence (on the turns of the expert) and every row positive; advantages and old log-probs are
    zero and unused. Raises ValueError where a row is longer than `width`.
    """
    tokens = np.full((len(items), width), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(items), width), np.float32)
    length = np.zeros(len(items), np.int32)
    for i, item in enumerate(items):
        if item.play is None:
            answer = [*tokenizer.encode(item.answer), tokenizer.eos_id]
            chosen = [1] * len(answer)
        else:
            answer, chosen = item.play.demonstration(item.entry)
        row = [*item.ids, *answer]
        if len(row) > width:
            raise ValueError(f'{item.prompt}{item.answer} has {len(row)} tokens of {width} at most')
        tokens[i, : len(row)] = row
        mask[i, len(item.ids) : len(row)] = chosen
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
