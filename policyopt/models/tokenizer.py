"""Tokenizers that come with checkpoints."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from policyopt.models.chat import Chat

FILE, SETTINGS = 'tokenizer.json', 'tokenizer_config.json'


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer: text to ids and back.

    Attributes:
      inner: a `tokenizers.Tokenizer`.
      bos_id, eos_id, pad_id: special ids, None where the checkpoint names none. The id to write at
        the end of a text; a model may stop at others too, see `ModelConfig.eos_ids`.
      chat_template: the checkpoint's Jinja template, or a list of them by name; None where it has
        none.
      chat: how prompts are rendered; None gives them to the model as they are.
    """

    inner: Any
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    chat_template: Any = None
    chat: Chat | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: special tokens written in it count, none are added."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """Ids of a problem as the model is asked it; ValueError as `Chat.prompt`."""
        return self.encode(text) if self.chat is None else self.chat.prompt(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens become nothing."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: str | pathlib.Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into the folder."""
        folder = pathlib.Path(folder)
        self.inner.save(str(folder / FILE))
        names = {'bos_token': self.bos_id, 'eos_token': self.eos_id, 'pad_token': self.pad_id}
        settings: dict[str, Any] = {
            name: self.inner.id_to_token(i) for name, i in names.items() if i is not None
        }
        if self.chat_template is not None:
            settings['chat_template'] = self.chat_template
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + '\n')


def read_tokenizer(folder: pathlib.Path) -> Tokenizer | None:
    """Tokenizer of a Hugging Face folder, None where it has no tokenizer.json."""
    if not (folder / FILE).exists():
        return None
    # Only checkpoints with a tokenizer need the package.
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(str(folder / FILE))
    settings: dict[str, Any] = {}
    if (folder / SETTINGS).exists():
        settings = json.loads((folder / SETTINGS).read_text())

    def special(name: str) -> int | None:
        token = settings.get(name)
        token = token.get('content') if isinstance(token, dict) else token
        found = None if token is None else inner.token_to_id(token)
        if token is not None and found is None and name != 'pad_token':  # padding carries nothing
            raise ValueError(f'{folder / SETTINGS} names the {name} {token!r}, which {FILE} lacks')
        return found

    template = settings.get('chat_template')
    if template is None and (folder / 'chat_template.jinja').exists():
        template = (folder / 'chat_template.jinja').read_text()
    return Tokenizer(
        inner, special('bos_token'), special('eos_token'), special('pad_token'), template
    )
