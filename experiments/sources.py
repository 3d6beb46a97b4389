"""What numbers depend on, of the code here: a digest of modules and of those that they import."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ('experiments', 'configs')
# Judging and drawing, which change no number.
LEFT_OUT = ('experiments.claim', 'experiments.curves', 'experiments.sources')


def digest(name: str, without: Sequence[str] = ()) -> str:
    """Digest of a module's code, and of what it imports from `PACKAGES`, and so on.

    Comments, docstrings and layout do not count, nor do the module's own top-level names in
    `without`. policyopt itself is left out, too: a change there that moves numbers is for whoever
    makes it to know.
    """
    found = {name: _code(name, without)}
    waiting = list(_imported(found[name]))
    while waiting:
        other = waiting.pop()
        if other not in found and other not in LEFT_OUT:
            found[other] = _code(other)
            waiting += _imported(found[other])
    text = '\n'.join(f'{other}\n{ast.unparse(found[other])}' for other in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code(name: str, without: Sequence[str] = ()) -> ast.Module:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    tree = ast.parse(Path(spec.origin).read_text(encoding='utf-8'))
    tree.body = [node for node in tree.body if not set(_defined(node)) & set(without)]
    for node in ast.walk(tree):
        body = getattr(node, 'body', None)
        if isinstance(body, list) and body and _is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _imported(tree: ast.Module) -> Iterator[str]:
    """Modules of `PACKAGES` that a module imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
        for name in names:
            if name.partition('.')[0] in PACKAGES and _is_module(name):
                yield name


def _is_module(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name in a module
        return False
    return spec is not None and spec.submodule_search_locations is None
