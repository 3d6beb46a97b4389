"""Write docs/algorithms.md, a section for each named algorithm, and its pictures.

    python -m experiments.algorithm_pages [--text]

Everything comes from the code: docstrings, signatures and compositions of `policyopt.algorithms`,
curves from the losses themselves. `--text` leaves the pictures as they are.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from policyopt import algorithms
from policyopt.losses import controllers
from policyopt.types import Algorithm, LossInputs, TokenBatch

TEXT = flags.DEFINE_bool('text', False, 'Write the page alone, without its pictures.')
PAGE = Path('docs/algorithms.md')
FIGURES = Path('docs/figures/algorithms')
REQUIRED = {'dr_grpo': {'length': 1}}  # arguments without a default: a picture has one token
OTHER_LOSSES = ('value_loss', 'positive_nll')
HEAD = """# Algorithms

Written by `python -m experiments.algorithm_pages` (`make docs`) from the docstrings, signatures and
compositions of [`policyopt/algorithms.py`](../policyopt/algorithms.py). [choosing.md](choosing.md)
says which one is for what, [concepts.md](concepts.md) what the words mean.

```text
NOTATION
```

**Pictures.** Left what is maximised, the surrogate times its gates, less its value at ratio 1;
right what multiplies the gradient of a log-prob; both against the ratio, for A = 1 and A = -1.
Dashed, where there are penalties: with them, the reference being the old policy. A token whose
coefficient is 0 counts in [`policy/stopped`](dashboard.md#policy). Where the ratio is that of a
row or a segment, all its tokens share the coefficient. Sampler and old policy are the same here, so
that importance corrections show as 1.
"""


class Curves(NamedTuple):
    """What a token contributes at some ratios [n], each array [n] for one advantage.

    Attributes:
      objective: gated surrogate.
      slope: of the policy term in the token's log-prob, without penalties.
      whole: the same with penalties; None where the loss has none.
    """

    objective: np.ndarray
    slope: np.ndarray
    whole: np.ndarray | None


def make(name: str) -> Algorithm:
    """A named algorithm with its defaults."""
    return algorithms.resolve(name, **REQUIRED.get(name, {}))


def curves(name: str, log_ratio: np.ndarray, advantage: float) -> Curves:
    """Rows of one token each: what its loss says of ratios exp(log_ratio), [n]."""
    rows = jnp.asarray(log_ratio, jnp.float32)[:, None]
    objective, slope, whole = jax.device_get(_curves(name)(rows, advantage))
    return Curves(objective[:, 0], slope[:, 0], None if whole is None else whole[:, 0])


@functools.cache
def _curves(name: str) -> Any:
    """Jitted (log_ratio [n,1], advantage) -> objective, slope, whole, each [n,1]."""
    algorithm = make(name)

    def terms(logp_new: jax.Array, advantage: jax.Array) -> Any:
        zero, one = jnp.zeros_like(logp_new), jnp.ones_like(logp_new)
        rows = jnp.zeros(len(logp_new), int)
        fixed = dict(logp_old=zero, mask=one, advantages=advantage * one, logp_behavior=zero)
        ids = zero.astype(int)
        weights = algorithm.loss.weigh(TokenBatch(tokens=ids, group=rows, positive=rows, **fixed))
        inputs = LossInputs(
            logp_new=logp_new,
            logp_ref=zero,
            entropy=one,
            values=zero,
            values_old=zero,
            returns=zero,
            segment=ids,
            coefficients=controllers.init(algorithm.controllers),
            **fixed,
        )
        assert algorithm.loss.explain is not None
        return algorithm.loss.explain(inputs, weights)['policy']

    def gated(logp_new: jax.Array, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = terms(logp_new, advantage)
        gate = functools.reduce(jnp.multiply, found.gates.values(), jnp.ones_like(logp_new))
        objective = jax.lax.stop_gradient(gate) * found.objective
        return jnp.sum(objective), objective

    def penalty(logp_new: jax.Array, advantage: jax.Array) -> tuple[jax.Array, bool]:
        found = terms(logp_new, advantage).penalties
        return jnp.sum(sum(found.values(), jnp.zeros_like(logp_new))), bool(found)

    @jax.jit
    def run(log_ratio: jax.Array, advantage: jax.Array) -> tuple[Any, ...]:
        slope, objective = jax.grad(gated, has_aux=True)(log_ratio, advantage)
        added, some = jax.grad(penalty, has_aux=True)(log_ratio, advantage)
        return objective, slope, slope - added if some else None

    return run


# ============================================================================ the pictures


def ratios(name: str) -> np.ndarray:
    """Ratios [n] about 1 that show where the algorithm's defaults let go."""
    defaults = inspect.signature(vars(algorithms)[name]).parameters
    high = defaults['high'].default if 'high' in defaults else 1.0
    if high < 0.01:
        return np.linspace(1 - 4 * high, 1 + 4 * high, 401)
    top = 1.3 * defaults['cap'].default if 'cap' in defaults else 2.4
    return np.linspace(0.05, top, 401)


def draw(name: str, path: Path) -> None:
    """Draw objective and coefficient of one algorithm."""
    from matplotlib.figure import Figure

    x = ratios(name)
    figure = Figure(figsize=(6.4, 2.1), dpi=80)
    axes = figure.subplots(1, 2)
    for advantage, colour in ((1.0, '#0072B2'), (-1.0, '#D55E00')):
        found = curves(name, np.log(x), advantage)
        start = np.interp(1, x, found.objective)
        axes[0].plot(x, found.objective - start, color=colour, label=f'A = {advantage:+.0f}')
        axes[1].plot(x, found.slope, color=colour)
        if found.whole is not None:
            axes[1].plot(x, found.whole, '--', color=colour, lw=1)
    for axis, title in zip(
        axes, ('objective, less that at 1', 'coefficient of grad log-prob'), strict=True
    ):
        axis.set_title(title, fontsize=9)
        axis.axvline(1, color='0.85', zorder=0)
        axis.axhline(0, color='0.85', zorder=0)
        axis.set_xlabel('ratio', fontsize=8)
        axis.tick_params(labelsize=7)
        axis.ticklabel_format(useOffset=False)
        axis.spines[['top', 'right']].set_visible(False)
    axes[0].legend(fontsize=7, frameon=False)
    figure.set_layout_engine('constrained')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={'Software': None})


# ============================================================================ the text


@functools.cache
def _module() -> ast.Module:
    return ast.parse(inspect.getsource(algorithms))


def _function(name: str) -> ast.FunctionDef:
    found = [n for n in _module().body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found[0]


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name
    ]


class _Inline(ast.NodeTransformer):
    """Puts what local names are assigned, once or more often, in their place."""

    def __init__(self, function: ast.FunctionDef):
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned.setdefault(node.targets[0].id, []).append(node.value)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = [self.visit(copy.deepcopy(value)) for value in self.assigned.get(node.id, ())]
        if len(values) > 1:
            return ast.BoolOp(ast.Or(), values)
        return values[0] if values else node


def _said(node: ast.AST, function: ast.FunctionDef, gates: bool = False) -> str:
    """Source of an argument, with local names replaced by what they are assigned.

    Parts that the module imports under another name have their own; `gates`, the argument of every
    algorithm, is left out.
    """
    node = _Inline(function).visit(copy.deepcopy(node))
    text = ast.unparse(node)
    if gates:
        text = re.sub(r'^\[|\]$|(, )?\*?\bgates\b', '', text)
    elif isinstance(node, ast.List):
        text = text[1:-1]
    for alias in ('leave_one_out', 'score_function'):
        text = re.sub(rf'\b{alias}\b', vars(algorithms)[alias].__name__, text)
    return text.replace('shaping.', '')


def composition(name: str) -> dict[str, str]:
    """Slot -> source of the part, of one algorithm, from the code that composes it."""
    function = _function(name)
    found: dict[str, str] = {}
    (policy,) = _calls(function, 'policy_loss')
    for keyword in policy.keywords:
        if text := _said(keyword.value, function, gates=keyword.arg == 'gates'):
            found[str(keyword.arg)] = text
    for loss in OTHER_LOSSES:
        if calls := _calls(function, loss):
            scaled = [c for c in _calls(function, 'scale') if calls[0] in ast.walk(c)]
            found['also'] = '; '.join(filter(None, [found.get('also'), ast.unparse(scaled[0])]))
    (whole,) = _calls(function, 'Algorithm')
    for keyword in whole.keywords:
        if keyword.arg != 'loss':
            found[str(keyword.arg)] = _said(keyword.value, function)
    order = ('ratio', 'surrogate', 'gates', 'penalties', 'aggregate', 'also', 'advantages')
    return {k: found[k] for k in (*order, *found) if k in found}


def defaults(name: str) -> Iterator[str]:
    """`ARGUMENT=VALUE` of the signature as it is written, without gates."""
    source = inspect.getsource(algorithms)
    arguments = _function(name).args
    missing = len(arguments.args) - len(arguments.defaults)
    for number, argument in enumerate(arguments.args):
        if argument.arg == 'gates':
            continue
        if number < missing:
            yield f'{argument.arg} (required)'
        else:
            value = ast.get_source_segment(source, arguments.defaults[number - missing])
            yield f'{argument.arg}={value}'


def linked(text: str) -> str:
    """A text whose arXiv numbers are links."""
    return re.sub(r'\b(\d{4}\.\d{5})\b', r'[\1](https://arxiv.org/abs/\1)', text)


def section(name: str) -> str:
    """One algorithm in Markdown."""
    doc = inspect.getdoc(vars(algorithms)[name]) or ''
    summary, equation, *rest = doc.split('\n\n')
    if not equation.startswith('    '):
        raise ValueError(f'{name}: the second paragraph of its docstring is to be its equation')
    lines = [line.removeprefix('    ') for line in equation.split('\n')]
    parts = [f'## {name}', linked(summary), '\n'.join(['```text', *lines, '```'])]
    parts.append(f'![Surrogate and gradient of {name}](figures/algorithms/{name}.png)')
    parts += [linked(paragraph) for paragraph in rest]
    rows = [f'| {slot} | `{part}` |' for slot, part in composition(name).items()]
    parts.append('\n'.join(['| slot | part |', '| --- | --- |', *rows]))
    values = ', '.join(f'`{value}`' for value in defaults(name)) or 'none'
    parts.append(f'Arguments: {values}. Recipe: [configs/{name}.py](../configs/{name}.py).')
    command = f'python -m policyopt.train --config=configs/{name}.py:'
    commands = [
        f'{command}model=PATH,data=FILE.jsonl --workdir=runs/{name}',
        f'{command}tiny=true --workdir=runs/tiny    # a toy, in seconds',
    ]
    parts.append('\n'.join(['```bash', *commands, '```']))
    return '\n\n'.join(parts)


def page() -> str:
    """The whole page."""
    notation = (inspect.getdoc(algorithms) or '').split('\n\n')[1]
    index = ', '.join(f'[{name}](#{name})' for name in algorithms.names())
    head = HEAD.replace('NOTATION', notation.split(' A default marked')[0].strip())
    return '\n\n'.join([head.strip(), index + '.', *map(section, algorithms.names())]) + '\n'


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f'unknown arguments: {argv[1:]}')
    PAGE.write_text(page())
    print(PAGE)
    for name in () if TEXT.value else algorithms.names():
        draw(name, FIGURES / f'{name}.png')
    if not TEXT.value:
        print(f'{FIGURES}: {len(algorithms.names())} pictures')


if __name__ == '__main__':
    app.run(main)
