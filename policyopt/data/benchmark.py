"""Problems to be answered, not trained on: of a reasoning-gym dataset, a file, or a tfds folder."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from policyopt import checks, settings
from policyopt.data import gym, jsonl
from policyopt.data.rows import BadRow, Row, in_held_out, loads, report
from policyopt.data.tasks import Encoder, Item, TaskConfig, prompt_ids
from policyopt.rewards.spec import Spec

EXACT = Spec('policyopt.rewards.scorers.exact')
HELD_OUT_SHARE = TaskConfig.held_out_share
OF_GYM = ('kw', 'size', 'seed', 'form')  # fields that say nothing of files and folders
OF_FIELDS = ('prompt_field', 'answer_field')


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Which problems to answer.

    Attributes:
      source: a JSONL file, a folder that a tfds builder prepared, or a reasoning-gym dataset.
      split: 'all'; of a file or dataset also 'train' or 'held_out', by the hash of the prompt that
        training goes by, with held_out_share .1; of a folder one of its own splits.
      kw, size, seed, form: of a reasoning-gym dataset, as in TaskConfig.
      prompt_field, answer_field: names in a file or a folder. A folder that policyopt prepared has
        a field `row` beside the prompt, from which the answer comes.
      on_bad_row: 'error', or 'skip' with a warning.
    """

    source: str
    split: str = 'all'
    kw: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 500
    seed: int = 0
    form: Literal['compact', 'full'] = 'full'
    prompt_field: str = 'prompt'
    answer_field: str = 'answer'
    on_bad_row: Literal['error', 'skip'] = 'error'

    def __post_init__(self):
        checks.number('size', self.size, 1)
        checks.one_of('form', self.form, ('compact', 'full'))
        checks.one_of('on_bad_row', self.on_bad_row, ('error', 'skip'))
        changed = [f.name for f in dataclasses.fields(self) if not self._is_default(f)]
        self.check_effect(changed)
        if self.kind != 'folder':
            checks.one_of('split', self.split, ('all', 'train', 'held_out'))

    def _is_default(self, field: dataclasses.Field) -> bool:
        return getattr(self, field.name) in (field.default, {})

    def check_effect(self, names: Iterable[str]) -> None:
        """Raise ValueError for the first field among the names that says nothing of the source."""
        for name in names:
            if name in (OF_FIELDS if self.kind == 'gym' else OF_GYM):
                raise ValueError(
                    f'{name} is {getattr(self, name)!r}, which has no effect: {self.source} is a '
                    f'{"reasoning-gym dataset" if self.kind == "gym" else self.kind}'
                )

    @property
    def kind(self) -> Literal['file', 'folder', 'gym']:
        """What the source is."""
        path = pathlib.Path(self.source).expanduser()
        if path.is_dir():
            return 'folder'
        return 'file' if path.is_file() or path.suffix or len(path.parts) > 1 else 'gym'

    @property
    def title(self) -> str:
        """What the problems are called."""
        path = pathlib.Path(self.source)
        return {'gym': self.source, 'file': path.stem, 'folder': path.resolve().name}[self.kind]


class Problems(NamedTuple):
    """Problems as read, before any tokenizer has seen them.

    Attributes:
      title: what they are called.
      rows: distinct prompts, in order.
      bad: rows that are no problem.
      where: place in the source by number.
      scorer: what judges answers where nothing else is asked for.
    """

    title: str
    rows: list[Row]
    bad: list[BadRow]
    where: Callable[[int], str]
    scorer: Spec


def read(config: BenchmarkConfig) -> Problems:
    """The problems of a source. Nothing is written.

    Raises ValueError for an unknown dataset, setting, split or field, with the nearest spelling, a
    source that can't be read, and a source without a problem in the split.
    """
    path = pathlib.Path(config.source).expanduser()
    scorer = EXACT
    found: Iterable[Row | BadRow]
    if config.kind == 'gym':
        dataset = gym.create(config.source, config.kw, config.size, config.seed, 'data')
        found = gym.rows(dataset, config.size, config.form)
        made_with = {'kw': config.kw, 'size': config.size, 'seed': config.seed}
        scorer = Spec('policyopt.rewards.scorers.gym', {'name': config.source, **made_with})
    elif config.kind == 'file':
        if not path.is_file():
            near = path.parent.iterdir() if path.parent.is_dir() else ()
            hint = checks.hint(path.name, (entry.name for entry in near))
            raise ValueError(f'{path} is no file, no folder and no dataset.{hint}')
        names = (config.prompt_field, config.answer_field)
        found = jsonl.read(path, jsonl.digest(path), names)
    else:
        found, scorer = _folder(path, config)
    rows: dict[str, Row] = {}
    bad: list[BadRow] = []
    for row in found:
        if isinstance(row, BadRow):
            bad.append(row)
        elif _on_side(row.prompt, config):
            rows.setdefault(row.prompt, row)

    def where(line: int) -> str:
        return f'{path}:{line}' if config.kind == 'file' else f'{config.title}, problem {line}'

    if not rows and not bad:
        raise ValueError(f'{config.source} holds no problem in split {config.split!r}')
    return Problems(config.title, list(rows.values()), bad, where, scorer)


def _on_side(prompt: str, config: BenchmarkConfig) -> bool:
    if config.kind == 'folder' or config.split == 'all':
        return True
    return in_held_out(prompt, HELD_OUT_SHARE) == (config.split == 'held_out')


def items(
    problems: Problems, tokenizer: Encoder, width: int, on_bad_row: Literal['error', 'skip']
) -> list[Item]:
    """Problems with token ids; `width` is the longest prompt there is room for.

    Raises ValueError for bad rows, among them prompts that are too long or have characters that the
    tokenizer lacks, where they are fatal or all there is; else warns.
    """
    found, bad = [], list(problems.bad)
    for row in problems.rows:
        try:
            ids = prompt_ids(tokenizer, row.prompt)
            if not 1 <= len(ids) <= width:
                raise ValueError(
                    f'{row.prompt[:40]!r} has {len(ids)} tokens; there is room for {width}'
                )
        except ValueError as error:
            bad.append(BadRow(row.line, str(error)))
            continue
        entry = {**row.entry, 'task': problems.title}
        found.append(Item(row.prompt, ids, entry['answer'], entry, problems.title))
    if bad:
        shown = report(bad, len(bad), problems.where)
        if on_bad_row == 'error' or not found:
            raise ValueError(f'{problems.title}, bad rows: {shown}')
        total = len(bad) + len(found)
        warnings.warn(
            f'{problems.title}: {len(bad)} bad rows of {total} skipped: {shown}', stacklevel=2
        )
    return found


# ============================================================================ folders


def _folder(path: pathlib.Path, config: BenchmarkConfig) -> tuple[list[Row | BadRow], Spec]:
    """Rows of a prepared folder, and what judges answers to them."""
    import tensorflow_datasets as tfds

    infos = sorted(path.rglob('dataset_info.json'))
    if len(infos) != 1:
        shown = ', '.join(str(info.parent.relative_to(path)) for info in infos[:5])
        raise ValueError(
            f'{path} holds {len(infos)} prepared datasets; legal is 1'
            + (f': name one of {shown}' if infos else '')
        )
    builder: Any = tfds.builder_from_directory(str(infos[0].parent))
    splits = sorted(builder.info.splits)
    checks.one_of('split', config.split, ('all', *splits))
    own = set(builder.info.features) == {'prompt', 'row'}
    names = ('prompt', 'row') if own else (config.prompt_field, config.answer_field)
    settings.check_names(f'{path}, among its fields,', names, builder.info.features)
    records: list[Any] = []
    for split in splits if config.split == 'all' else [config.split]:
        try:
            source = builder.as_data_source(split=split)
            records += source.__getitems__(range(len(source)))
        except Exception as error:  # array_record, protobuf, other formats: each has its own
            raise ValueError(f'{path} cannot be read: {error}') from error
    if own:
        of_gym = builder.info.name == 'reasoning_gym'
        scorer = Spec('policyopt.rewards.scorers.gym_entry') if of_gym else EXACT
        rows = [(record['prompt'].decode(), *loads(record['row'])) for record in records]
        found = sorted(Row(line, prompt, entry) for prompt, line, entry in rows)
        return list(found), scorer
    return [_parse(i, record, names) for i, record in enumerate(records)], EXACT


def _parse(index: int, record: Mapping[str, Any], names: Sequence[str]) -> Row | BadRow:
    """A record of any tfds dataset, read as a line of a file would be."""
    plain = {}
    for name, value in record.items():
        value = value.tolist() if hasattr(value, 'tolist') else value
        try:
            plain[name] = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            if name in names:
                return BadRow(index, f'`{name}` is no UTF-8')
    plain = {k: v for k, v in plain.items() if isinstance(v, (str, int, float, bool))}
    return jsonl.parse(index, json.dumps(plain).encode(), (names[0], names[1]))
