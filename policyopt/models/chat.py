"""Problems as a chat, by the template that comes with a checkpoint.

A prompt is rendered as text and encoded once. What is sampled after it stays the tokens that were
sampled: no answer is ever rendered and encoded again.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from policyopt import checks

# What templates write by hand that should be one token: <|im_start|> and the like.
MARKER = re.compile(r'<[|｜][^<>|｜\s]+[|｜]>')
# A conversation to try a template on.
FIRST, ANSWER, SECOND = 'What is 17 + 25?', 'It is 42.', 'And twice that?'
THOUGHT = '<think>\n17 + 25 = 42\n</think>\n\n' + ANSWER
CLOCK = 'strftime_now'
OWN = ('messages', 'add_generation_prompt', 'tools', 'documents', CLOCK)


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """How problems become chats.

    Attributes:
      system: a system message before the problem; None leaves it to the template.
      prefill: how every answer begins; the model goes on from there, and only what it adds is its
        answer.
      variables: further variables of the template, such as enable_thinking.
      date: the day that a template which asks for it is told, as 2024-07-26; None tells none, so
        that prompts don't depend on the day of the run.

    Raises ValueError for a date that is none.
    """

    system: str | None = None
    prefill: str = ''
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    date: str | None = None

    def __post_init__(self):
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError as error:
                raise ValueError(
                    f'config.chat.date is {self.date!r}; legal is a day, as 2024-07-26'
                ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
    """A template that was tried, and what it is filled with.

    Attributes:
      tokenizer: of the checkpoint.
      template: compiled.
      config: what was asked for.
      turn_end: id that ends an answer; None where the template ends it by no special token.
      rewrites: why turns can't be appended to a conversation; '' where they can.
    """

    tokenizer: Any
    template: Any
    config: ChatConfig
    turn_end: int | None = None
    rewrites: str = ''

    def render(self, texts: Sequence[str], prompt: bool = True) -> str:
        """The conversation of a user and an assistant, who take turns; with `prompt`, up to where
        the assistant's next answer begins.

        Raises ValueError where the template refuses it.
        """
        import jinja2

        roles = ('user', 'assistant') * len(texts)
        messages = [{'role': r, 'content': t} for r, t in zip(roles, texts, strict=False)]
        if self.config.system is not None:
            messages.insert(0, {'role': 'system', 'content': self.config.system})
        try:
            return self.template.render(
                messages=messages,
                add_generation_prompt=prompt,
                **_tokens(self.tokenizer),
                **self._clock(),
                **self.config.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            more = '; give it a day by config.chat.date' if CLOCK in str(error) else ''
            raise ValueError(
                f'the chat template refuses the conversation: {error}{more}'
            ) from error

    def _clock(self) -> dict[str, Any]:
        if self.config.date is None:
            return {}
        return {CLOCK: datetime.date.fromisoformat(self.config.date).strftime}

    def prompt(self, text: str) -> list[int]:
        """Ids of a problem as the first message, up to where the answer begins.

        Raises ValueError for a text that has special tokens written in it: they would count.
        """
        return self.tokenizer.encode(self.render([self._plain(text)]) + self.config.prefill)

    def next_turn(self, text: str) -> list[int]:
        """Ids to append after a sampled answer, its end included: the user's next message, up to
        where the next answer begins.

        Raises ValueError where the template would write what was said before in another way, or
        ends answers by no token of its own.
        """
        if self.rewrites or self.turn_end is None:
            raise ValueError(
                f'a chat of several turns is refused: {self.rewrites or "no token ends an answer"}'
            )
        encode = self.tokenizer.encode
        before = encode(self.render([FIRST, ANSWER], prompt=False))
        count = len(before) - before[::-1].index(self.turn_end)
        whole = self.render([FIRST, ANSWER, self._plain(text)]) + self.config.prefill
        return encode(whole)[count:]

    def _plain(self, text: str) -> str:
        for i in self.tokenizer.encode(text):
            if i in special_ids(self.tokenizer):
                raise ValueError(
                    f'{text[:40]!r} has the special token {self.tokenizer.inner.id_to_token(i)!r} '
                    'written in it'
                )
        return text


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decode to nothing."""
    added = tokenizer.inner.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)


def _tokens(tokenizer: Any) -> dict[str, str]:
    """Special tokens by the names that templates know them by."""
    ids = {'bos_token': tokenizer.bos_id, 'eos_token': tokenizer.eos_id}
    ids['pad_token'] = tokenizer.pad_id
    return {k: tokenizer.inner.id_to_token(i) for k, i in ids.items() if i is not None}


def _compile(source: Any) -> tuple[Any, set[str]]:
    """A template as `transformers` reads it, and the variables that it looks at."""
    # Only chats need the package.
    import jinja2
    import jinja2.ext
    import jinja2.meta
    import jinja2.sandbox

    if isinstance(source, list):  # several, by name
        named = {entry['name']: entry['template'] for entry in source}
        if 'default' not in named:
            raise ValueError(f'there is no default among the chat templates {sorted(named)}')
        source = named['default']

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what an assistant says, and writes nothing."""

        tags = {'generation'}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(('name:endgeneration',), drop_needle=True)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    env.globals['raise_exception'] = refuse
    env.filters['tojson'] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
    try:
        return env.from_string(source), jinja2.meta.find_undeclared_variables(env.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f'the chat template is broken: {error}') from error


# ============================================================================ trying it


def make_chat(
    tokenizer: Any, config: ChatConfig, vocab_size: int, ends: Sequence[int]
) -> tuple[Chat, tuple[int, ...]]:
    """The chat of a checkpoint, tried on a conversation, and the ids that end an answer.

    These are the token that the template ends an answer with, first, and `ends`, those that the
    checkpoint names: sampling stops at any of them.

    Args:
      tokenizer: a `models.Tokenizer`.
      config: what is asked for.
      vocab_size: rows of the model's embedding.
      ends: ids that the checkpoint names, `ModelConfig.eos_ids`.

    Raises ValueError, naming it, for: no template or a broken one; a variable that it never looks
    at, or a system message that it leaves out; a special token that it writes or asks for and the
    tokenizer lacks; an id that the model lacks; no token that ends an answer, or one that would
    show in its text.
    """
    if tokenizer.chat_template is None:
        raise ValueError('config.chat is set, but the model comes without a chat template')
    template, names = _compile(tokenizer.chat_template)
    known = names - {*OWN, *_tokens(tokenizer)}
    for name in config.variables:
        if name not in known:
            raise ValueError(
                f'config.chat.variables has {name!r}, which the template never reads.'
                f'{checks.nearest(name, known)}'
            )
    if config.date is not None and CLOCK not in names:
        raise ValueError(
            f'config.chat.date is {config.date!r}, but the template asks for no day; legal is None'
        )
    for name in ('bos_token', 'eos_token', 'pad_token'):
        if name in names and name not in _tokens(tokenizer):
            raise ValueError(f'the chat template writes {name}, which the tokenizer does not name')
    chat = Chat(tokenizer, template, config)
    whole = chat.render([FIRST, ANSWER], prompt=False)
    for what, text in (('a problem', FIRST), ('an answer', ANSWER), ('system', config.system)):
        if text is not None and text.strip() not in whole:
            raise ValueError(f'the chat template leaves {what} out: {text!r} is not in {whole!r}')
    _check_tokens(tokenizer, chat.render([FIRST]) + whole, vocab_size)
    end = _turn_end(tokenizer, whole)
    all_ends = tuple(dict.fromkeys(([] if end is None else [end]) + list(ends)))
    if not all_ends:
        raise ValueError(
            'no token ends an answer: the checkpoint names no end of sequence, and the chat '
            'template ends answers by no special token; set config.model.eos_ids'
        )
    for i in all_ends:
        if shown := tokenizer.decode([i]):
            raise ValueError(
                f'id {i} ends an answer, but is no special token of the tokenizer: {shown!r} would '
                'be part of its text'
            )
    return dataclasses.replace(chat, turn_end=end, rewrites=_rewrites(chat)), all_ends


def _check_tokens(tokenizer: Any, text: str, vocab_size: int) -> None:
    """Raise ValueError for a marker that is several tokens, or an id that the model lacks."""
    for marker in sorted(set(MARKER.findall(text))):
        if len(tokenizer.encode(marker)) != 1:
            raise ValueError(
                f'the chat template writes {marker!r}, which is no token of the tokenizer'
            )
    if (largest := max(tokenizer.encode(text))) >= vocab_size:
        raise ValueError(
            f'the chat template gives id {largest} ({tokenizer.inner.id_to_token(largest)!r}); the '
            f'model has {vocab_size} ids'
        )


def _turn_end(tokenizer: Any, text: str) -> int | None:
    """The special token that follows an answer, None where none does."""
    after = tokenizer.encode(text[text.rindex(ANSWER) + len(ANSWER) :].lstrip())
    return after[0] if after and after[0] in special_ids(tokenizer) else None


def _rewrites(chat: Chat) -> str:
    """Why the tokens of a conversation are not the beginning of those of a longer one, or ''."""
    encode = chat.tokenizer.encode
    for answer in (ANSWER, THOUGHT):
        turns = [
            encode(chat.render([FIRST])),
            encode(chat.render([FIRST, answer], prompt=False)),
            encode(chat.render([FIRST, answer, SECOND])),
        ]
        for number, (short, long) in enumerate(zip(turns, turns[1:], strict=False), 1):
            pairs = enumerate(zip(short, long, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(short), len(long)))
            if at < len(short):
                shown = chat.tokenizer.inner.decode(short[at : at + 5], skip_special_tokens=False)
                return (
                    f'the chat template writes turn {number} in another way once the conversation '
                    f'goes on, from token {at} ({shown!r})'
                )
    return ''
