"""Tokenizers stored in GGUF files, rebuilt with the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policyopt.checks import one_of
from policyopt.models.tokenizer import Tokenizer

KINDS = ('gpt2', 'llama')
CONTROL, USER_DEFINED = 3, 4  # token types that are matched whole in text
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}"
    r'| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# How text is cut before byte-pair merges, by the name that the file gives.
SPLITS = {
    'llama-bpe': WORDS.format(r'\p{N}{1,3}'),
    'qwen2': WORDS.format(r'\p{N}'),
}
CUTS = ('default', 'gpt-2', 'smollm', *SPLITS)


def make_tokenizer(get: Callable[..., Any]) -> Tokenizer | None:
    """Tokenizer from a file's fields, None where it has none.

    Args:
      get: (field name, default) -> value.

    Raises ValueError naming a tokenizer model or a pre-tokenizer that is not known, or a part that
    is missing or that the `tokenizers` package refuses.
    """
    kind = get('tokenizer.ggml.model')
    if kind is None:
        return None
    one_of('tokenizer.ggml.model', kind, KINDS)
    import tokenizers

    tokens, ranks = get('tokenizer.ggml.tokens'), 'merges' if kind == 'gpt2' else 'scores'
    for name in ('tokens', ranks):
        if not isinstance(get(f'tokenizer.ggml.{name}'), list):
            raise ValueError(f'tokenizer.ggml.model={kind!r} needs the array tokenizer.ggml.{name}')
    try:
        inner = _byte_level(get, tokens) if kind == 'gpt2' else _sentencepiece(get, tokens)
    except ValueError:
        raise
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f'tokenizer.ggml.tokens and {ranks}: {error}') from None
    types = get('tokenizer.ggml.token_type', [])
    for number, text in zip(types, tokens, strict=False):
        if number in (CONTROL, USER_DEFINED):
            special = number == CONTROL
            added = tokenizers.AddedToken(text, special=special, normalized=False)
            (inner.add_special_tokens if special else inner.add_tokens)([added])
    return Tokenizer(
        inner,
        bos_id=get('tokenizer.ggml.bos_token_id'),
        eos_id=get('tokenizer.ggml.eos_token_id'),
        pad_id=get('tokenizer.ggml.padding_token_id'),
        chat_template=get('tokenizer.chat_template'),
    )


def _byte_level(get: Callable[..., Any], tokens: list[str]) -> Any:
    """Byte-level byte-pair encoding (GPT-2, Llama 3, Qwen)."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    cut = get('tokenizer.ggml.pre', 'default')
    one_of('tokenizer.ggml.pre', cut, CUTS)
    merges = [tuple(merge.split(' ', 1)) for merge in get('tokenizer.ggml.merges')]
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=cut == 'llama-bpe',
        )
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut not in SPLITS)
    before = []
    if cut == 'smollm':
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif cut in SPLITS:
        pattern = tokenizers.Regex(SPLITS[cut])
        before = [pre_tokenizers.Split(pattern, behavior='isolated', invert=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(get: Callable[..., Any], tokens: list[str]) -> Any:
    """SentencePiece byte-pair encoding with byte fallback (Llama 1 and 2, Mistral).

    Files store a score per piece; merging the pair whose piece scores best is byte-pair encoding
    with the merges in the order of scores.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    ids = {token: i for i, token in enumerate(tokens)}
    scores = get('tokenizer.ggml.scores')
    ranked = []
    for token, i in ids.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ids and right in ids:
                ranked.append((-scores[i], ids[left], ids[right], (left, right)))
    unknown = get('tokenizer.ggml.unknown_token_id', 0)
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[merge for *_, merge in sorted(ranked)],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = get('tokenizer.ggml.add_space_prefix', True)
    steps = [normalizers.Prepend('▁')] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(' ', '▁')])
    after = [decoders.Strip(' ', 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return inner
