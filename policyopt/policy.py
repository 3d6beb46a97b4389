"""A policy to be used: of a run's checkpoint, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import orbax.checkpoint as ocp

from policyopt import base, checkpoint, checks, models, recipe, state
from policyopt.checkpoint import CheckpointError, Checkpoints
from policyopt.recipe import Setup
from policyopt.reference import make_reference
from policyopt.state import TrainState
from policyopt.workdir import SETTINGS

Which = Literal['auto', 'ema', 'params']


class Source(NamedTuple):
    """What was named, looked at and not loaded.

    Attributes:
      path: as given.
      kind: what it is.
      config: of a run, as written; None of a model.
      steps: of a run, those that have a checkpoint, oldest first.
    """

    path: Path
    kind: Literal['run', 'folder', 'gguf']
    config: dict[str, Any] | None = None
    steps: tuple[int, ...] = ()


class Policy(NamedTuple):
    """A model, its parameters, and where they are from.

    Attributes:
      model: with a tokenizer.
      params: on the default device.
      origin: JSON: path, kind, and of a run step and which parameters.
      setup: of the run, with problems where they were asked for; None of a model.
    """

    model: Any
    params: Any
    origin: dict[str, Any]
    setup: Setup | None = None

    def __str__(self) -> str:
        shown = {'ema': 'moving average', 'params': 'parameters'}
        more = ''
        if self.setup is not None:
            more = f', {shown[self.origin["params"]]} after RL step {self.origin["step"]}'
        return f'{self.origin["path"]}{more}'


# ============================================================================ what is there


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --step and --params, which say what is taken of a run; see `find`."""
    parser.add_argument('--step', type=int, help='of the checkpoint of a run (default: the newest)')
    parser.add_argument(
        '--params',
        default='auto',
        help="of a run: its moving average, 'ema', or 'params' (default: the average where there "
        'is one)',
    )


def find(path: str | Path, step: int | None = None, which: Which = 'auto') -> Source:
    """Look at what a path names; nothing is loaded.

    Args:
      path: folder of a run or of a Hugging Face model, or a GGUF file.
      step: of a checkpoint; None takes the newest.
      which: parameters of a run: its moving 'ema', its 'params', or 'auto', the average where the
        run keeps one, which is what its own evaluations measure.

    Raises ValueError or FileNotFoundError for a path that is none of these, a step without a
    checkpoint, and a `step` or `which` that has no effect.
    """
    path = Path(path)
    checks.one_of('params', which, ('auto', 'ema', 'params'))
    if not path.exists():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FileNotFoundError(f'{path} does not exist.{checks.hint(path.name, near)}')
    source = _look(path)
    if source.config is None:
        for name, value in (('step', step), ('params', None if which == 'auto' else which)):
            if value is not None:
                raise ValueError(
                    f'{name} is {value!r}, but {path} is no run: it has no checkpoints'
                )
        return source
    if not source.steps:
        raise ValueError(f'{path} holds no checkpoint (checkpoint.every may be off)')
    if step is not None and step not in source.steps:
        known = ', '.join(map(str, source.steps))
        raise ValueError(f'step is {step}; {path} has checkpoints of {known}')
    if which == 'ema' and source.config.get('ema') is None:
        raise ValueError(f"params is 'ema', but {path} keeps no moving average (config.ema)")
    return source


def _look(path: Path) -> Source:
    if path.suffix == '.gguf' and path.is_file():
        return Source(path, 'gguf')
    file = path / SETTINGS  # a run's, and a model's
    if not file.is_file():
        raise ValueError(
            f'{path} is no run and no model; legal is the folder of a run, a Hugging Face folder '
            'or a .gguf file'
        )
    try:
        config = json.loads(file.read_text())
        if 'model_type' in config:
            return Source(path, 'folder')
        if 'algorithm' not in config:
            raise ValueError('neither `algorithm` nor `model_type` is there')
    except (TypeError, ValueError) as error:
        raise ValueError(f'{file} is of no run and of no model: {error}') from error
    return Source(path, 'run', config, steps_of(path))


def steps_of(workdir: Path) -> tuple[int, ...]:
    """RL steps of a run that have a checkpoint, oldest first."""
    folder = workdir / checkpoint.FOLDER
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return tuple(sorted(int(name) for name in names if name.isdigit()))


# ============================================================================ loading


def load(
    source: Source, step: int | None = None, which: Which = 'auto', problems: bool = False
) -> Policy:
    """Load what `find` found; with `problems`, a run's own, too (`Policy.setup.task`).

    Of a run, every array of the checkpoint is read and compared with its digest, in host memory;
    nothing in the folder is changed, so the run may go on meanwhile. Where no `step` is asked for
    and the newest checkpoint is not usable, the one before it is taken, with a message.

    Raises CheckpointError where no checkpoint is usable, and ValueError as `recipe.prepare` and
    `models.load` do, or where the model has no tokenizer.
    """
    origin: dict[str, Any] = {'path': str(source.path), 'kind': source.kind}
    if source.config is None:
        model, params = models.load(source.path)
        if model.tokenizer is None:
            raise ValueError(f'{source.path} has no tokenizer')
        return Policy(model, params, origin)
    setup = recipe.prepare({**source.config, 'mesh': ()}, problems)  # on one device, here
    found, train, notes = _restore(source, setup, step)
    average = which != 'params' and train.ema is not None
    origin |= {'step': found, 'params': 'ema' if average else 'params'}
    params = jax.device_put(train.ema if average else train.params, jax.local_devices()[0])
    if setup.model.adapters is not None:
        start = recipe.first_params(setup)
        belongs = base.base_of(setup.model, setup.config.model.get('path'), start)
        base.check_base(source.path, notes, belongs)
        params = state.merged(start, params)
    return Policy(setup.model, params, origin, setup)


def _restore(source: Source, setup: Setup, step: int | None) -> tuple[int, TrainState, Any]:
    """Step, state and notes of the checkpoint asked for, or of the newest that is usable."""
    for number in [step] if step is not None else reversed(source.steps):
        try:
            return number, *read(source.path, setup, number)
        except CheckpointError as error:
            print(f'the checkpoint of step {number} is not usable: {error}', flush=True)
    raise CheckpointError(f'no checkpoint of {source.path} is usable')


def read(workdir: Path, setup: Setup, step: int) -> tuple[TrainState, Any]:
    """Train state and notes of one checkpoint of a run that may be going on, in host memory.

    With adapters, the state's params are `adapters.trained` alone. Raises CheckpointError where it
    can't be read, or isn't what was saved.
    """
    reader = _Reader(workdir)
    try:
        return reader.read(step, _shapes(setup))
    finally:
        reader.close()


def _shapes(setup: Setup) -> Any:
    """What a checkpoint of the run holds, as arrays of the host would be, without any of them."""
    learner = recipe.make_learner(setup)

    def make(params: Any) -> Any:
        train = learner.init(params, jax.random.key(0), recipe.critic_params(setup, params))
        c, needed = setup.config, 'logp_ref' in setup.needed
        reference = make_reference(params, c.reference_every, needed, fresh=c.warm_start is None)
        anchor = reference and reference.params
        return checkpoint.plain({'train': state.kept(train), 'reference': anchor})

    given = setup.model.shapes() if setup.params is None else setup.params
    try:
        device = jax.local_devices(backend='cpu')[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        device = jax.local_devices()[0]
    host = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host), jax.eval_shape(make, given)
    )


class _Reader(Checkpoints):
    """The checkpoints of a run that may be going on: nothing is written, moved or removed."""

    def __init__(self, workdir: Path):
        self.folder = (workdir / checkpoint.FOLDER).resolve()
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=('state', 'meta'),
            options=ocp.CheckpointManagerOptions(
                read_only=True, create=False, save_interval_steps=0
            ),
        )

    def read(self, step: int, wanted: Any) -> tuple[TrainState, Any]:
        """Train state and notes of a checkpoint; CheckpointError where it isn't what was saved."""
        meta = self._meta(step)
        return self._read(step, meta, wanted)['train'], meta['progress']['notes']

    def close(self) -> None:
        """Let go of the folder."""
        self._manager.close()
