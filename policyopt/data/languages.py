"""A dataset some of whose problems are asked in other languages, for the language reward.

    python -m policyopt.data.languages FILE.jsonl --out=MIXED.jsonl --share=0.1 --languages=fr,de

Magistral (2506.10910) has a tenth of its problems translated into six languages, so that a model
keeps to the language of the user. Translations are read from a file, where there are any; without
them a problem is put into a sentence of the language that asks for an answer in it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policyopt import checks
from policyopt.data.difficulty import read_lines, read_problems, write_lines

# What asks for an answer in a language, by its ISO 639-1 code.
FRAMES = {
    'de': 'Löse die folgende Aufgabe. Denke und antworte auf Deutsch.\n\n{question}',
    'es': 'Resuelve el siguiente problema. Piensa y responde en español.\n\n{question}',
    'fr': 'Résous le problème suivant. Réfléchis et réponds en français.\n\n{question}',
    'it': 'Risolvi il seguente problema. Pensa e rispondi in italiano.\n\n{question}',
    'ru': 'Реши следующую задачу. Рассуждай и отвечай на русском языке.\n\n{question}',
    'zh': '请解答下面的问题，并用中文思考和回答。\n\n{question}',
}


def mixed(
    rows: Iterable[Mapping[str, Any]],
    share: float = 0.1,
    languages: Sequence[str] = tuple(FRAMES),
    translations: Mapping[tuple[str, str], str] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The rows, a share of which is asked in another language, with `row['language']` its code.

    Which ones, and in which language, is a function of prompt and seed. Such a row takes the place
    of the original, so that no problem is on both sides of a split.

    Args:
      rows: each with `prompt`.
      share: of the rows, on average.
      languages: codes, used equally often on average; without translations, keys of `FRAMES`.
      translations: by (prompt, language); where they are given, a problem without any stays as it
        is, and one that lacks its language takes the next one it has.
      seed: of the choice.

    Raises ValueError for a language that has no sentence, with the nearest.
    """
    checks.number('share', share, 0, 1)
    if not languages:
        raise ValueError('languages is empty; legal is one or more')
    if translations is None:
        for code in languages:
            checks.one_of('languages', code, FRAMES)
    found = []
    for row in rows:
        prompt = row['prompt']
        drawn = _hash(f'{seed} share {prompt}') < share * 2**32
        first = _hash(f'{seed} language {prompt}') % len(languages)
        asked = None
        for code in (*languages[first:], *languages[:first]) if drawn else ():
            if translations is None:
                asked = FRAMES[code].replace('{question}', prompt)
            else:
                asked = translations.get((prompt, code))
            if asked is not None:
                found.append({**row, 'prompt': asked, 'language': code, 'original': prompt})
                break
        if asked is None:
            found.append(dict(row))
    return found


def _hash(text: str) -> int:
    # Not the checksum that splits rows: of texts of one length, two of it tell the same.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


def read_translations(path: str) -> dict[tuple[str, str], str]:
    """Lines {"prompt": ..., "language": ..., "translation": ...} by prompt and language."""
    found = {}
    for number, line in enumerate(read_lines(path), 1):
        for name in ('prompt', 'language', 'translation'):
            if not isinstance(line, dict) or not isinstance(line.get(name), str):
                raise ValueError(f'{path}: row {number} has no text `{name}`')
        found[line['prompt'], line['language']] = line['translation']
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    parser = argparse.ArgumentParser(
        prog='python -m policyopt.data.languages',
        description='Ask a share of the problems of a dataset in other languages.',
    )
    parser.add_argument('data', help='a JSONL file of {"prompt": ..., "answer": ...}')
    parser.add_argument('--out', required=True, help='file to write')
    parser.add_argument('--share', type=float, default=0.1, help='of the problems (default: .1)')
    parser.add_argument(
        '--languages', default=','.join(FRAMES), help=f'codes (default: {",".join(FRAMES)})'
    )
    parser.add_argument(
        '--translations', help='JSONL of {"prompt": ..., "language": ..., "translation": ...}'
    )
    parser.add_argument('--seed', type=int, default=0, help='of the choice (default: 0)')
    options = parser.parse_args(argv)
    try:
        known = read_translations(options.translations) if options.translations else None
        codes = [code.strip() for code in options.languages.split(',') if code.strip()]
        rows = mixed(read_problems(options.data), options.share, codes, known, options.seed)
        write_lines(options.out, rows)
    except ValueError as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return 2
    counts: dict[str, int] = {}
    for row in rows:
        code = row.get('language', 'as it was')
        counts[code] = counts.get(code, 0) + 1
    for code, count in sorted(counts.items()):
        print(f'{count:7d} {code}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
