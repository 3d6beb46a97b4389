"""GSM8K (2110.14168): downloaded and read by tfds's own builder, or read from a copy."""

from __future__ import annotations

import pathlib
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow_datasets.text.gsm8k.gsm8k as tfds_gsm8k

from policyopt.data import published
from policyopt.data.builders import Problems
from policyopt.data.rows import BadRow, Row

PATIENCE = 8.0  # seconds until a server that does not answer is out of reach


class Gsm8k(Problems, skip_registration=True):
    """Problems of GSM8K's train or test file; `entry['answer']` is the final number.

    The worked solution is in `entry['metadata']`. Raises ValueError where there is no file and the
    server is out of reach, within seconds: tfds would go on trying for minutes.
    """

    url_infos = None  # no sums of this file are published

    def __init__(self, *, file: pathlib.Path | None, split: str, template: str, **kw: Any):
        self.file = file
        self.split = split
        self.template = template
        super().__init__(**kw)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        if self.file is None:
            url = tfds_gsm8k._URLS[self.split]
            check_reachable(url)
            self.file = pathlib.Path(dl_manager.download(url))
        return super()._split_generators(dl_manager)

    def rows(self) -> Iterable[Row | BadRow]:
        """Read them."""
        assert self.file is not None
        line = 0
        examples: Any = tfds_gsm8k.Gsm8k._generate_examples(self, self.file)  # pyright: ignore
        try:
            for at, found in examples:
                line = at + 1
                answer = found['short_answer'].strip().replace(',', '')
                metadata = {'solution': found['answer']}
                yield published.row(
                    line, self.template, found['question'], answer, metadata=metadata
                )
        except (ValueError, KeyError) as error:  # after which nothing more can be read
            yield BadRow(line + 1, f'no problem of GSM8K: {error}')

    def where(self, line: int) -> str:
        """File and line; line 0 is the file."""
        return f'{self.file}:{line}' if line else str(self.file)


def check_reachable(url: str, patience: float = PATIENCE) -> None:
    """Raise ValueError, with what to do, where the URL does not answer in `patience` seconds."""
    said: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=patience):
                said.append('')
        except Exception as error:  # whatever it is, tfds would meet it, too
            said.append(str(getattr(error, 'reason', error)))

    # Looking up a name has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    why = said[0] if said else f'no answer within {patience:g} s'
    if why:
        raise ValueError(
            f'gsm8k can not be downloaded ({why}). Where there is a network, download {url}, copy '
            'the file here, and name it in task.file'
        )
