"""The layer table of docs/design.md is what the imports are; dependencies are declared and used."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'policyopt'
DESIGN = (ROOT / 'docs' / 'design.md').read_text()


def rows(heading: str) -> list[list[str]]:
    section = DESIGN.split(f'## {heading}')[1].split('\n## ')[0]
    lines = [line for line in section.splitlines() if line.startswith('|')][2:]
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]


LAYERS = {
    row[1].strip('`'): (int(row[0]), [t.strip() for t in row[3].split(',') if t.strip() != '-'])
    for row in rows('Layers')
}


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    name = '.'.join(p for p in parts if p != '__init__')
    return name or 'policyopt'


def row_of(module: str) -> str | None:
    """The longest row that is the module or a package around it."""
    while module and module not in LAYERS:
        module = module.rpartition('.')[0]
    return module or None


def imports(path: pathlib.Path) -> set[str]:
    """Every dotted name that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{path}: relative import'
            found |= {f'{node.module}.{alias.name}' for alias in node.names}
    return found


def policyopt_imports(path: pathlib.Path) -> set[str]:
    modules = {module_of(p) for p in PACKAGE.rglob('*.py')}
    found = set()
    for name in imports(path):
        if name.split('.')[0] == 'policyopt':
            name = name.removeprefix('policyopt').lstrip('.')
            while name and name not in modules:
                name = name.rpartition('.')[0]
            found.add(name or 'policyopt')
    return found


def test_every_module_has_a_row_and_every_row_a_module():
    modules = {module_of(p) for p in PACKAGE.rglob('*.py')}
    assert not {m for m in modules if row_of(m) is None}
    assert not {row for row in LAYERS if row not in modules}


def test_imports_follow_the_table():
    wrong = []
    for path in PACKAGE.rglob('*.py'):
        module = module_of(path)
        own = row_of(module)
        layer, allowed = LAYERS[own]
        for target in policyopt_imports(path):
            row = row_of(target)
            if row == own:
                continue
            target_layer = LAYERS[row][0]
            named = any(
                str(target_layer) == token or row == token or row.startswith(token + '.')
                for token in allowed
            )
            if not named or target_layer > layer:
                wrong.append(f'{module} imports {target}')
    assert not wrong


def test_flax_and_optax_have_one_home():
    for path in PACKAGE.rglob('*.py'):
        tops = {name.split('.')[0] for name in imports(path)}
        assert 'flax' not in tops or 'models' in path.parts, path
        assert 'optax' not in tops or path.name == 'optimizer.py', path
        assert not tops & {'experiments', 'configs', 'tests', 'notebooks'}, path


def declared() -> set[str]:
    text = (ROOT / 'setup.py').read_text()
    return set(re.findall(r"'([A-Za-z][A-Za-z0-9_-]*)(?:\[[a-z0-9]+\])?>=", text))


def test_every_dependency_has_its_line_and_every_line_a_dependency():
    listed = {n for row in rows('Dependencies') for n in re.findall('`([^`]+)`', row[0])}
    extras = {'figures', 'tasks', 'models', 'smollm2', 'math', 'language', 'code', 'published'}
    extras |= {'tensorboard', 'cuda', 'tpu-plan', 'test', 'notebooks', 'lint'}
    assert listed - extras == declared()


def test_every_import_is_declared():
    own = {'policyopt', 'experiments', 'configs', 'tests', 'notebooks'}
    names = {
        'absl': 'absl-py',
        'array_record': 'array-record',
        'math_verify': 'math-verify',
        'pydantic_monty': 'pydantic-monty',
        'reasoning_gym': 'reasoning-gym',
        'tensorflow_datasets': 'tensorflow-datasets',
        'ml_collections': 'ml-collections',
        'orbax': 'orbax-checkpoint',
    }
    import sys

    for folder in ('policyopt', 'experiments', 'configs', 'tests'):
        for path in (ROOT / folder).rglob('*.py'):
            if path.match('experiments/peers/*_side.py'):
                continue  # they run in environments of the peers, which `make peers` installs
            tops = {name.split('.')[0] for name in imports(path)} - own
            tops = {names.get(t, t) for t in tops - set(sys.stdlib_module_names)}
            assert tops <= declared(), (path, tops - declared())


def test_long_files_are_few():
    # algorithms.py is the page one reads to know the field: splitting it would hide it.
    reasons = {'algorithms.py'}
    long = {p.name for p in PACKAGE.rglob('*.py') if len(p.read_text().splitlines()) > 420}
    assert long <= reasons
