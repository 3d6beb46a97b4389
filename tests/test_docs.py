"""The docs say what is so: links, blocks, commands, fields, names, metrics, generated pages."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import io
import re
import sys
import types
import typing
from collections.abc import Mapping

import jax
import numpy as np
import pytest

from experiments import algorithm_pages
from policyopt import (
    algorithms,
    dashboard,
    losses,
    metrics,
    recipe,
    report,
    rewards,
    staleness,
    turns,
    updates,
)
from policyopt import rollout as rollout_lib
from policyopt.data.published import DATASETS
from policyopt.models.hf import FAMILIES
from policyopt.rewards import spec
from tests import batches, pages
from tests.pages import PAGES, ROOT

by_page = pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)


@by_page
def test_links_and_anchors_resolve(page):
    assert not pages.broken(page)


def test_links_are_looked_at(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(
        '# A `b`: c_d!\n\n# Twice\n\n# Twice\n\n[x](#a-b-c_d) [x](#twice-1) [x](page.md#twice)\n'
        '[y](#a-b) [y](other.md) `[z](code.md)`\n\n```\n# no heading\n[z](code.md)\n```\n'
    )
    assert pages.broken(page) == ['#a-b', 'other.md']


def test_named_files_exist():
    for page in PAGES:
        for name in re.findall(
            r'`((?:docs|tests|configs|policyopt|experiments|notebooks)/[\w/.]+\.\w+)`',
            pages.read(page),
        ):
            made_up = 'mine' in name or 'newpo' in name  # what a reader is told to write
            assert made_up or (ROOT / name).exists(), (page.name, name)


def test_every_page_is_linked_from_the_readme():
    linked = {link.partition('#')[0] for link in pages.links(PAGES[0])}
    text = pages.read(PAGES[0])
    missing = [
        p.name for p in PAGES[1:] if not {str(p.relative_to(ROOT))} & linked
        and f'`{p.relative_to(ROOT)}`' not in text
    ]  # fmt: skip
    assert not missing


# ============================================================================ blocks

ELSEWHERE = {'README.md', 'data.md'}  # run by test_readme and test_data_files
RUN = [
    page
    for page in PAGES
    if page.name not in ELSEWHERE and any(info == 'python' for info, _ in pages.blocks(page))
]


@pytest.mark.parametrize('page', RUN, ids=lambda p: p.name)
def test_python_blocks_run_and_print_what_follows(page):
    """Blocks of a page share one scope; a `text` block right after one is what it prints."""
    scope: dict = {}
    found = pages.blocks(page)
    for (info, body), (after, output) in zip(found, [*found[1:], ('', '')], strict=True):
        if info != 'python':
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, page.name, 'exec'), scope)
        if after == 'text':
            assert printed.getvalue() == output, body


def test_fragments_say_why():
    """Python that does not run says so behind its language: `python fragment: REASON`."""
    for page in PAGES:
        for info, _ in pages.blocks(page):
            if info.startswith('python'):
                assert re.fullmatch(r'python( fragment: .{10,})?', info), (page.name, info)


# ============================================================================ commands


def _file(module: str):
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f'python -m {module}'
    if spec.origin.endswith('__init__.py'):
        spec = importlib.util.find_spec(f'{module}.__main__')
        assert spec is not None, f'python -m {module} is a package'
    return spec.origin


@functools.cache
def flags_of(module: str) -> set[str]:
    """Flags that the source of a command defines, by argparse or absl; of what it imports, too."""
    with open(_file(module), encoding='utf-8') as file:
        source = file.read()
    found = set(re.findall(r"add_argument\(\s*'--(\w+)'", source))
    found |= set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source))
    for shared in ('evaluate_plan', 'policy'):  # they add flags to several commands
        if re.search(rf'\b{shared}\b', source) and module != f'policyopt.{shared}':
            found |= flags_of(f'policyopt.{shared}')
    return found


@functools.cache
def config_of(value: str) -> Mapping:
    """What a file of configs/ makes of the argument behind the colon."""
    path, _, argument = value.partition(':')
    spec = importlib.util.spec_from_file_location('config_of_docs', ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.get_config(argument or None).to_dict()
    except FileNotFoundError as error:  # SmolLM2's weights, which `make smollm2` installs
        assert 'make smollm2' in str(error)
        return {}


def has_field(path: str, hint=recipe.RunConfig) -> bool:
    """Whether a dotted path is a field of a run's config; free mappings have every field."""
    name, _, rest = path.partition('.')
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(has_field(path, a) for a in typing.get_args(hint) if a is not types.NoneType)
    if hint is typing.Any or typing.get_origin(hint) is Mapping:
        return True
    if not dataclasses.is_dataclass(hint) or name not in {f.name for f in dataclasses.fields(hint)}:
        return False
    return not rest or has_field(rest, typing.get_type_hints(hint)[name])


def check_command(command: str) -> None:
    module, *words = command.removeprefix('python -m ').split(maxsplit=1)
    known, line = flags_of(module), ' '.join(words)
    for flag, value in re.findall(r"""(?<!\S)['"]?--([\w.]+)(?:=(\S+))?""", line):
        if flag.startswith('config.'):
            assert has_field(flag.removeprefix('config.')), flag
        else:
            assert flag in known, f'{module} has no --{flag}'
        if flag == 'config' and value.startswith('configs/'):
            config_of(value.strip('\'"'))


@by_page
def test_commands_have_modules_flags_and_fields(page):
    for command in pages.commands(page):
        if command.startswith('python'):
            check_command(command)


def test_make_targets_exist():
    targets = set(re.findall(r'^([a-z0-9-]+):', (ROOT / 'Makefile').read_text(), re.M))
    for page in PAGES:
        for command in pages.commands(page):
            if command.startswith('make '):
                assert command.split()[1] in targets, (page.name, command)


@pytest.mark.parametrize(
    'command',
    [
        'python -m policyopt.trian --workdir=a',
        'python -m policyopt.train --work=a',
        'python -m policyopt.train --config=configs/gspo.py:tinny=true',
        'python -m policyopt.train --config=configs/nothing.py',
        'python -m policyopt.train --config=configs/gspo.py:tiny=true --config.rollout.promts=2',
        'python -m policyopt.losses',
    ],
)
def test_wrong_commands_are_seen(command):
    with pytest.raises((AssertionError, ValueError, OSError)):
        check_command(command)


# ============================================================================ names

DOTTED = re.compile(r'(?<![\w.`/])`((?:[a-zA-Z_]\w*\.)+[a-zA-Z_]\w*)(?:\([^`]*\))?`')
FILES = ('md', 'json', 'jsonl', 'png', 'py', 'yaml', 'npz', 'toml')
FOREIGN = {'jax', 'os', 'sys', 'np', 'numpy', 'optax'}
# Fields of things that are neither code nor config: tensors, adapters' targets, problems.
SAID = {'score.weight', 'experts.gate', 'shared.gate', 'metadata.language'}


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or attribute of the package, or of a class in it.

    It may begin below the package: with a module's own name, or a class's.
    """
    head, *path = name.removeprefix('policyopt.').removeprefix('po.').split('.')
    package = ROOT / 'policyopt'
    for file in [*package.glob('**/*.py')]:
        if head in (file.stem, file.parent.name if file.stem == '__init__' else ''):
            parts = file.relative_to(ROOT).with_suffix('').parts
            module = '.'.join(part for part in parts if part != '__init__')
            if follow(importlib.import_module(module), path):
                return True
    loaded = [v for k, v in [*sys.modules.items()] if k.startswith('policyopt')]
    classes = [vars(m).get(head) for m in loaded]
    if any(inspect.isclass(c) and follow(c, path) for c in classes):
        return True
    return follow(importlib.import_module('policyopt'), [head, *path])


def follow(value, path: list[str]) -> bool:
    """Whether attributes, or submodules, lead along a path."""
    for part in path:
        fields = {*getattr(value, '__dataclass_fields__', ()), *getattr(value, '_fields', ())}
        if inspect.ismodule(value) and not hasattr(value, part):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f'{value.__name__}.{part}')
        if not hasattr(value, part) and part not in fields:
            return False
        value = getattr(value, part, None)
    return True


@by_page
def test_dotted_names_exist(page):
    """Each is of the package, or a field of a run's config."""
    heads = {f.name for f in dataclasses.fields(recipe.RunConfig)} | {'config'}
    wrong = []
    for name in DOTTED.findall(pages.prose(page)):
        head, last = name.split('.')[0], name.rpartition('.')[2]
        if last in FILES or head in FOREIGN or name in SAID or 'mine' in name or 'mymodule' in name:
            continue
        if head == 'experiments':
            importlib.import_module(name)
        elif not (resolves(name) or head in heads and has_field(name.removeprefix('config.'))):
            wrong.append(name)
    assert not wrong


def test_wrong_names_are_seen():
    assert resolves('policyopt.losses.ratios.token_ratio') and resolves('types.Algorithm.prepare')
    assert not resolves('losses.gspo') and not resolves('policyopt.nothing')
    assert has_field('rollout.engine.slots') and not has_field('rollout.engin')


# ============================================================================ metrics


def shapes(name: str):
    """Metrics of a named algorithm's loss and of the diagnostics, by abstract evaluation."""
    algorithm, arrays = batches.algorithm(name), batches.random_arrays(0, rows=2, width=3)
    inputs, batch = batches.loss_inputs(arrays, algorithm), batches.token_batch(arrays)

    def run(inputs, batch):
        return algorithm.loss.apply(inputs, algorithm.loss.weigh(batch)).metrics

    return jax.eval_shape(run, inputs, batch)


def flat(found) -> set[str]:
    """Names under which `metrics.numbers` writes metrics down."""
    names = set()
    for name, metric in found.items():
        if hasattr(metric, 'quantile'):
            names |= {f'{name}/p{q}' for q in (1, 50, 99)}
        else:
            size = getattr(getattr(metric, 'count', None), 'shape', ())
            names |= {f'{name}/{i}' for i in range(size[0])} if size else {name}
    return names


def test_metrics_of_losses_and_updates_are_in_the_dashboard_page():
    names = set().union(*(flat(shapes(name)) for name in algorithms.names()))
    assert {'policy/frozen', 'value/error', 'nll/logp', 'policy/penalty'} <= names
    inputs = batches.loss_inputs(batches.random_arrays(0), batches.algorithm('ppo_clip'))
    names |= flat(jax.eval_shape(losses.diagnostics.diagnose, inputs))
    names |= flat(
        jax.eval_shape(updates.explained, inputs.values, inputs.returns, np.asarray(inputs.mask))
    )
    names |= flat(jax.eval_shape(updates.load_metrics, np.ones((2, 4))))
    tree = dict(embed=np.ones(2), dense=dict(attention=np.ones(2), mlp=np.ones(2)))
    norms = functools.partial(updates.norm_metrics, 'grad_norm')
    names |= flat(jax.eval_shape(norms, tree)) | {'value/clipped'}
    assert {'ratio/token_log/p99', 'value/explained_at/9', 'moe/unused/1'} <= names
    assert not pages.undocumented(names)


def test_metrics_of_rollouts_are_in_the_dashboard_page():
    rolled = jax.tree.map(np.asarray, batches.rollout(0)).replace(finish=np.zeros(12, int))
    part = (rewards.Part('answer', 1.0, 'right'),)
    said = [rewards.Verdict(1.0, 'right', steps=(1.0, 0.5)), rewards.Verdict(1.0, '', True, part)]
    names = {*rollout_lib.describe(rolled), *rewards.describe(said)}
    age = staleness.ages(np.array([[0, 1]]), np.ones((1, 2)), 1)
    names |= {*staleness.describe(age, 2)}
    assert {'reward', 'rewards/right', 'rewards/steps', 'staleness/2'} <= names
    source = inspect.getsource(turns) + inspect.getsource(rollout_lib)
    names |= set(re.findall(r"'((?:turns|rollout)/[a-z_]+)'", source))
    assert not pages.undocumented(names)


def test_what_is_shown_and_drawn_is_in_the_dashboard_page():
    asked = set()

    class Asked:
        """A run that has nothing, and remembers what it was asked for."""

        def series(self, name, stage='rl'):
            asked.add(name)
            return report.Series(np.array([]), np.array([]))

        times = series

        def group(self, prefix, stage='rl'):
            asked.add(f'{prefix}/NAME')
            return {}

    for panel in dashboard.PANELS:
        panel.lines(Asked())  # pyright: ignore[reportArgumentType]
    asked |= {name for name, *_ in metrics.SHOWN} | {row.metric for row in report.ROWS}
    assert len(asked) > 50 and not pages.undocumented(asked)
    titles = {panel.title for panel in dashboard.PANELS}
    table = pages.read(pages.DASHBOARD).split('## Panels')[1].split('\n## ')[0]
    assert set(re.findall(r'^\| ([^|`]+) \|', table, re.M)) - {'panel', '---'} == titles


def test_a_metric_that_no_table_has_is_seen():
    assert pages.undocumented(['entropy', 'entropi', 'moe/unused/3', 'moe/usd/3']) == [
        'entropi',
        'moe/usd/3',
    ]


# ============================================================================ tables


def test_every_reward_has_a_row():
    table = pages.read(ROOT / 'docs' / 'rewards.md').split('| reward | value |')[1].split('\n\n')[0]
    assert set(re.findall(r'^\| `(\w+)\(', table, re.M)) == set(spec.names())


def test_every_dataset_and_family_is_named():
    assert set(DATASETS) <= set(re.findall(r'`(\w+)`', pages.read(ROOT / 'docs' / 'data.md')))
    said = re.sub(r'[-_]', '', pages.read(ROOT / 'docs' / 'models.md').lower())
    assert all(family.replace('_', '') in said for family in FAMILIES)


# ============================================================================ generated


def test_verdicts_that_pages_quote_are_those_of_the_claims():
    """[NAME: VERDICT](claims.md#NAME), as the table of docs/claims.md has it."""
    claims = pages.read(ROOT / 'docs' / 'claims.md')
    verdicts = {name: verdict for verdict, name in re.findall(r'\[([\w ]+)\]\(#(\w+)\) \|', claims)}
    quoted = [
        found
        for page in PAGES
        for found in re.findall(
            r'\[(\w+): ([\w ]+)\]\((?:\w+/)?claims\.md#(\w+)\)', pages.prose(page)
        )
    ]
    assert len(quoted) > 5
    for name, verdict, anchor in quoted:
        assert name == anchor and verdicts[name] == verdict, name


def test_algorithms_page_is_what_the_code_says():
    """Else: make docs."""
    assert algorithm_pages.page() == pages.read(ROOT / 'docs' / 'algorithms.md')
    pictures = {p.stem for p in (ROOT / 'docs' / 'figures' / 'algorithms').glob('*.png')}
    assert pictures == set(algorithms.names())


def test_compositions_and_defaults_are_read_from_the_code():
    found = algorithm_pages.composition('deepseek_v32')
    assert found['gates'] == 'off_policy_sequence(delta)'
    assert found['penalties'] == 'kl_to_reference(beta, unbiased=True)'
    assert list(algorithm_pages.defaults('gspo')) == ['low=3e-4', 'high=4e-4']
    assert list(algorithm_pages.defaults('dr_grpo'))[0] == 'length (required)'
    vapo = algorithm_pages.composition('vapo')
    assert 'positive_nll' in vapo['also'] and 'length_adaptive_gae' in vapo['advantages']
    assert algorithm_pages.composition('rloo')['surrogate'] == 'reinforce()'


def test_pictures_show_the_losses():
    """The published slopes at ratio 2 and .5, by hand."""
    x = np.log([0.5, 1.0, 2.0])
    grpo = algorithm_pages.curves('grpo', x, 1.0)
    np.testing.assert_allclose(grpo.slope, [0.5, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(grpo.objective, [0.5, 1, 1.2], rtol=1e-6)
    # The penalty's part, -beta (1 - q/p), with q = old.
    np.testing.assert_allclose(grpo.whole - grpo.slope, -0.04 * (1 - 1 / np.exp(x)), atol=1e-6)
    down = algorithm_pages.curves('grpo', x, -1.0)
    np.testing.assert_allclose(down.slope, [0, -1, -2], rtol=1e-6)
    sapo = algorithm_pages.curves('sapo', x, 1.0)
    np.testing.assert_allclose(sapo.slope[2], 2 / np.cosh(0.5) ** 2, rtol=1e-5)
