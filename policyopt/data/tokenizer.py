"""A character-level tokenizer for tasks whose text uses a handful of symbols."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable

PAD, EOS = '⟨pad⟩', '⟨eos⟩'  # what stands for them in files


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id per character, after the padding and end-of-sequence ids; hashable.

    Attributes:
      characters: the alphabet, each character once; the id of `characters[i]` is `i + 2`.
      pad_id: fills rows past their length. It carries no meaning: masks come from lengths.
      eos_id: ends an answer.
    """

    characters: str
    pad_id: int = 0
    eos_id: int = 1

    def __post_init__(self):
        if len(set(self.characters)) != len(self.characters):
            raise ValueError(f'characters repeat in {self.characters!r}')

    @property
    def vocab_size(self) -> int:
        """Number of ids: the alphabet, padding and end of sequence."""
        return len(self.characters) + 2

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without end of sequence; ValueError on a character not in the alphabet."""
        ids = [self.characters.find(c) + 2 for c in text]
        if 1 in ids:
            at = ids.index(1)
            raise ValueError(
                f'character {text[at]!r} at {at} of {text!r} is not in {self.characters!r}'
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; padding and end of sequence become nothing."""
        return ''.join(self.characters[i - 2] for i in map(int, ids) if i >= 2)

    def save(self, folder: str | pathlib.Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as the `tokenizers` package reads them.

        There, texts have the same ids, and a character outside the alphabet is an error, too.
        Raises ValueError where the alphabet could spell the names of the special ids.
        """
        vocab = {PAD: self.pad_id, EOS: self.eos_id}
        for name in vocab:
            if set(name) <= set(self.characters):
                raise ValueError(f'{name!r} is the name of a special id; the alphabet can spell it')
        special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
        added = [{'id': i, 'content': t, **special, 'special': True} for t, i in vocab.items()]
        vocab |= {c: i + 2 for i, c in enumerate(self.characters)}
        split = {'type': 'Split', 'pattern': {'Regex': r'[\s\S]'}, 'behavior': 'Isolated'}
        whole = {
            'version': '1.0',
            'truncation': None,
            'padding': None,
            'added_tokens': added,
            'normalizer': None,
            'pre_tokenizer': {**split, 'invert': False},
            'post_processor': None,
            'decoder': {'type': 'Fuse'},
            # The unknown token is in no vocabulary: an unknown character raises.
            'model': {'type': 'WordLevel', 'vocab': vocab, 'unk_token': '⟨unknown⟩'},
        }
        named = {'tokenizer_class': 'PreTrainedTokenizerFast', 'pad_token': PAD, 'eos_token': EOS}
        for name, content in (('tokenizer.json', whole), ('tokenizer_config.json', named)):
            text = json.dumps(content, indent=2, ensure_ascii=False) + '\n'
            (pathlib.Path(folder) / name).write_text(text, encoding='utf-8')


def arithmetic_tokenizer() -> CharTokenizer:
    """Digits and the signs of compact arithmetic: 16 ids."""
    return CharTokenizer('0123456789+-*=')


def ascii_tokenizer() -> CharTokenizer:
    """Printable ASCII and the line break, for questions in full: 98 ids."""
    return CharTokenizer('\n' + ''.join(map(chr, range(32, 127))))
