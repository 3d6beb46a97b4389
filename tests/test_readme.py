"""The README says what is so: code blocks run, tables are whole. More in test_docs.py."""

import pathlib
import re

import numpy as np
import pytest

import policyopt as po
from policyopt import losses
from tests import pages

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()


def test_python_blocks_run(capsys):
    scope: dict = {}
    for info, block in pages.blocks(ROOT / 'README.md'):
        if info == 'python':
            exec(compile(block, 'README', 'exec'), scope)
    assert 'policy/frozen' in capsys.readouterr().out
    assert scope['weights'].sum() == pytest.approx(1)
    assert isinstance(scope['mine'](), po.Algorithm)
    inputs = scope['inputs'].replace(logp_new=scope['inputs'].logp_new.at[1, 1].set(np.nan))
    weights = scope['by_hand'].weigh(
        po.TokenBatch(
            tokens=None, logp_old=None, **{k: getattr(inputs, k) for k in ('mask', 'advantages')}
        )
    )
    assert np.isfinite(scope['by_hand'].apply(inputs, weights).loss)


def test_every_algorithm_has_a_row():
    table = README.split('| algorithm |')[1].split('\n\n')[0]
    assert tuple(sorted(re.findall(r'^\| `(\w+)` \|', table, re.M))) == po.algorithms.names()


def test_every_part_is_listed_under_its_slot():
    rows = dict(re.findall(r'^\| `(\w+)` \| .* \| `([\w ]+)`[^|]* \|$', README, re.M))
    slots = {'gates': 'gate', 'penalties': 'penalty'}
    modules = [losses, po.advantages, po.shaping, losses.controllers]
    for column, members in rows.items():
        slot = slots.get(column, column)
        found = {n for m in modules for n, v in vars(m).items() if getattr(v, 'slot', '') == slot}
        assert set(members.split()) == found, slot
    assert len(rows) == 10


def test_the_first_targets_are_named():
    named = set(re.findall(r'make ([a-z0-9-]+)', README))
    assert {'quickstart', 'test', 'test-slow', 'lint', 'help'} <= named


def test_continuous_integration_runs_what_the_readme_knows():
    commands = [
        line for line in (ROOT / '.ci' / 'run').read_text().splitlines() if line.startswith('make')
    ]
    assert commands == ['make lint', 'make test', 'make test-slow']
    readme = (ROOT / 'README.md').read_text()
    assert all(command in readme for command in commands)
