"""A run's policy as a Hugging Face folder, for everything that reads one.

python -m policyopt.export runs/quickstart exported
python -m policyopt.export runs/quickstart exported --step=100 --params=params --dtype=bfloat16
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from policyopt import checks, models, policy
from policyopt.models.hf import family_of

DTYPES = ('float32', 'bfloat16', 'float16')
# What a checkpoint that a run started from holds beside config.json and weights, where it is there.
KEPT = (
    'tokenizer.json',
    'tokenizer_config.json',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'tokenizer.model',
    'chat_template.jinja',
    'chat_template.json',
    'generation_config.json',
)


def export(
    what: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    which: policy.Which = 'auto',
    dtype: str | None = None,
) -> policy.Policy:
    """Write a policy as a Hugging Face folder, whole or not at all; returns what is in it.

    `models.load` of the folder gives the parameters bit for bit. They are those that were trained,
    float32, whatever the run computed in; `dtype` rounds them. A critic's value head is left out.

    The files of tokenizer, chat template and generation settings are copies of those that the run
    started from; without such a folder, they are written from what the model knows.

    Args:
      what, step, which: see `policy.find`.
      folder: must not be there yet. It appears under its name when all of it is on disk.
      dtype: of the parameters: float32, bfloat16 or float16; None changes none.

    Raises ValueError or OSError, with nothing left behind.
    """
    folder = Path(folder)
    if dtype is not None:
        checks.one_of('dtype', dtype, DTYPES)
    source = policy.find(what, step, which)
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f'{folder} is there already; nothing is overwritten: name another')
    found = policy.load(source, step, which)
    model, params = portable(found.model, found.params, dtype)
    with _whole(folder) as partial:
        models.save(model, params, partial)
        for name in KEPT:
            if (path := _began(source, found) / name).is_file():
                shutil.copyfile(path, partial / name)
    return found._replace(model=model, params=params)


def portable(model: Any, params: Any, dtype: str | None = None) -> tuple[Any, Any]:
    """The policy alone, with a config that says what its parameters are and which ids end a text.

    Adapters are merged into the kernels that they belong to.

    Raises ValueError for parameters of several types.
    """
    model, params = models.merge(model, params)
    params = {name: part for name, part in params.items() if name != 'value'}
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    kinds = sorted({x.dtype.name for x in jax.tree.leaves(params)})
    if len(kinds) > 1:
        raise ValueError(f'parameters are {" and ".join(kinds)}; give one dtype')
    c, tokenizer = model.config, model.tokenizer
    pad = c.pad_id if c.pad_id is not None else tokenizer.pad_id
    ends = c.eos_ids or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))
    config = dataclasses.replace(
        c, param_dtype=kinds[0], dtype=kinds[0], value_head=False, pad_id=pad, eos_ids=ends
    )
    return models.build(config, tokenizer), params


def _began(source: policy.Source, found: policy.Policy) -> Path:
    """Where the model came from: the folder that a run started from, or the one exported."""
    if found.setup is None:
        return source.path
    return Path(found.setup.config.model.get('path', os.devnull))


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder beside the one wanted, which is renamed to it at the end and removed on errors."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f'.{folder.name}-partial-', dir=folder.parent))
    try:
        partial.chmod(0o777 & ~_umask())
        yield partial
        for path in partial.iterdir():  # on disk before the name says that it is
            with open(path, 'rb') as file:
                os.fsync(file.fileno())
        if folder.exists():
            raise FileExistsError(f'{folder} appeared meanwhile; nothing is overwritten')
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 2 with a message on standard error for bad input."""
    p = argparse.ArgumentParser(
        prog='python -m policyopt.export',
        description='Write the policy of a run as a Hugging Face folder.',
        allow_abbrev=False,
    )
    p.add_argument('what', help='a run (its --workdir); or a model to rewrite, a folder or a GGUF')
    p.add_argument('folder', help='new folder, which appears when all of it is written')
    policy.add_flags(p)
    p.add_argument('--dtype', help=f'{", ".join(DTYPES)} (default: as trained, float32)')
    options = p.parse_args(argv)
    try:
        done = export(
            options.what,
            options.folder,
            step=options.step,
            which=options.params,
            dtype=options.dtype,
        )
    except (ValueError, TypeError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    size = sum(x.size for x in jax.tree.leaves(done.params))
    config = done.model.config
    print(
        f'{done}: {size:,} parameters, {config.param_dtype}, as {family_of(config)} in '
        f'{options.folder}'
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
