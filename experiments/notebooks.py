"""Write the .ipynb of each notebook beside its .py, without outputs.

    python -m experiments.notebooks

The .py is what one edits and reviews; Jupyter with jupytext saves both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext
from absl import app

FOLDER = Path(__file__).parents[1] / 'notebooks'


def build(path: Path) -> Any:
    """The notebook of a .py in the percent format, the same each time."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.id = f'{path.stem.replace("_", "-")}-{number}'
    return notebook


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    for path in sorted(FOLDER.glob('*.py')):
        jupytext.write(build(path), path.with_suffix('.ipynb'))
        print(path.with_suffix('.ipynb'))


if __name__ == '__main__':
    app.run(main)
