"""The README and the docs say what is so: code blocks run, tables are whole, links resolve."""

import pathlib
import re
import runpy

import pytest

import policyopt as po
from policyopt import losses

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]


def blocks(language: str) -> list[str]:
    return re.findall(rf'```{language}\n(.*?)```', README, re.S)


def test_python_blocks_run(capsys):
    for block in blocks('python'):
        scope: dict = {}
        exec(compile(block, 'README', 'exec'), scope)
    printed = capsys.readouterr().out
    assert 'policy/frozen' in printed
    assert isinstance(scope['mine'](), po.Algorithm)


def test_every_algorithm_has_a_row():
    assert tuple(sorted(re.findall(r'^\| `(\w+)` \| \w', README, re.M))) == po.algorithms.names()


def test_every_part_is_listed_under_its_slot():
    rows = dict(re.findall(r'^\| `(\w+)` \| .* \| `([\w ]+)` \|$', README, re.M))
    slots = {'gates': 'gate', 'penalties': 'penalty'}
    for column, members in rows.items():
        slot = slots.get(column, column)
        parts = {n for n in losses.__all__ if getattr(getattr(losses, n), 'slot', None) == slot}
        assert set(members.split()) == parts, slot
    assert len(rows) == 5


def test_make_targets_exist():
    targets = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.M))
    named = set(re.findall(r'make ([a-z-]+)', README))
    assert {'quickstart', 'test', 'test-slow'} <= named <= targets
    assert {'lint', 'figures', 'help'} <= targets


def test_continuous_integration_runs_what_the_readme_knows():
    commands = [
        line for line in (ROOT / '.ci' / 'run').read_text().splitlines() if line.startswith('make')
    ]
    assert commands == ['make lint', 'make test']


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_links_resolve(page):
    for target in re.findall(r'\]\(([^)#]+)\)', page.read_text()):
        if '://' not in target:
            assert (page.parent / target).exists(), target


def test_named_files_exist():
    for page in PAGES:
        for name in re.findall(
            r'`((?:docs|tests|configs|policyopt)/[\w/.]+\.\w+)`', page.read_text()
        ):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    'notebook', sorted((ROOT / 'notebooks').glob('*.py')), ids=lambda p: p.name
)
def test_notebooks_run(notebook):
    runpy.run_path(str(notebook))
