"""The notebooks: both files say the same, nothing is left in them, and what they say is so."""

import jupytext
import nbclient
import pytest

from experiments.notebooks import FOLDER, build

NAMES = sorted(path.stem for path in FOLDER.glob('*.py'))
CONTENT = ('cell_type', 'source')


def test_each_file_has_its_pair():
    assert sorted(path.stem for path in FOLDER.glob('*.ipynb')) == NAMES
    assert len(NAMES) == 6


@pytest.mark.parametrize('name', NAMES)
def test_pairs_say_the_same_and_hold_no_outputs(name):
    """Where this fails, `make notebooks` writes the .ipynb anew from the .py."""
    written = jupytext.read(FOLDER / f'{name}.ipynb')
    built = build(FOLDER / f'{name}.py')
    assert [[cell[k] for k in CONTENT] for cell in written.cells] == [
        [cell[k] for k in CONTENT] for cell in built.cells
    ]
    code = [cell for cell in written.cells if cell.cell_type == 'code']
    assert not any(cell.outputs or cell.execution_count for cell in code)
    for notebook in (written, built):
        assert notebook.metadata.jupytext.formats == 'ipynb,py:percent'
        assert notebook.metadata.kernelspec.name == 'python3'


@pytest.mark.parametrize('name', NAMES)
def test_every_notebook_teaches_checks_and_is_listed(name):
    cells = build(FOLDER / f'{name}.py').cells
    assert cells[0].cell_type == 'markdown' and cells[0].source.startswith('# ')
    assert sum(cell.cell_type == 'markdown' for cell in cells) >= 5
    code = '\n'.join(cell.source for cell in cells if cell.cell_type == 'code')
    assert code.count('assert') >= 5
    readme = (FOLDER.parent / 'README.md').read_text()
    assert f'(notebooks/{name}.ipynb)' in readme


def run(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
    monkeypatch.delenv('MPLBACKEND', raising=False)  # figures into the notebook
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={'metadata': {'path': str(FOLDER.parent)}}
    )
    client.execute()
    return [out for cell in notebook.cells for out in cell.get('outputs', ())]


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_notebooks_run(name, tmp_path, monkeypatch):
    outputs = run(build(FOLDER / f'{name}.py'), tmp_path, monkeypatch)
    assert any('image/png' in out.get('data', {}) for out in outputs)


@pytest.mark.slow
def test_a_wrong_statement_ends_a_notebook(tmp_path, monkeypatch):
    notebook = build(FOLDER / 'four_tokens.py')
    (cell,) = (cell for cell in notebook.cells if 'mask / 4' in cell.source)
    cell.source = cell.source.replace('mask / 4', 'mask / 3')
    with pytest.raises(nbclient.exceptions.CellExecutionError, match='Mismatched elements'):
        run(notebook, tmp_path, monkeypatch)
