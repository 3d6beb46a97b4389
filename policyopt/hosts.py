"""Several processes that train as one: each runs the same program on devices of its own.

On the host all of them see the same rows and take the same decisions, so that programs over all
devices are dispatched in the same order everywhere. What may differ (an answer's verdict, a signal,
what a folder holds) is exchanged before it is used. The first process alone writes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

AUTO = 'auto'
LOST = 30  # seconds without a sign of life after which a process counts as lost
_PATIENCE: dict[str, Any] = {'heartbeat_timeout_seconds': LOST, 'shutdown_timeout_seconds': LOST}


class HostError(RuntimeError):
    """The first process could not go on, or processes differ; the message says why."""


def join(where: str) -> None:
    """Join this process to the others; afterwards `jax.devices()` are those of all.

    Call it before anything else touches jax. On CPU, processes talk through gloo.

    Args:
      where: 'auto' where jax finds the others by itself (TPU pods, Slurm, Open MPI, Kubernetes),
        or 'HOST:PORT,COUNT,INDEX': address of process 0, number of processes, that of this one.

    Raises ValueError for anything else, and where 'auto' finds no cluster.
    """
    if where == AUTO:
        try:
            jax.distributed.initialize(**_PATIENCE)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"--multihost is 'auto', but jax finds no cluster here, or not all of it "
                f'({error}); legal is HOST:PORT,COUNT,INDEX, or no --multihost for one process'
            ) from error
        return
    address, *numbers = where.split(',')
    try:
        count, index = map(int, numbers)
        name, _, port = address.rpartition(':')
        if not name or not port.isdigit():
            raise ValueError(address)
    except ValueError:
        raise ValueError(
            f"--multihost is {where!r}; legal is 'auto' or HOST:PORT,COUNT,INDEX, such as "
            '10.0.0.1:8476,4,0'
        ) from None
    start(address, count, index)


def start(address: str, count: int, index: int) -> None:
    """Join this process, number `index` of `count`, to the others at 'host:port' of process 0.

    Raises ValueError for an index out of range.
    """
    if not 0 <= index < count:
        raise ValueError(
            f'index={index} must be from 0 to {count - 1}, for count={count} processes'
        )
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    # On CPU programs in flight together need more threads than devices, or wait for each other.
    os.environ.setdefault('PJRT_NPROC', '32')
    jax.distributed.initialize(address, num_processes=count, process_id=index, **_PATIENCE)


def words() -> str:
    """Which process this is, and what follows when another is lost."""
    return (
        f'process {jax.process_index()} of {jax.process_count()}; when one is lost, the others end '
        f'within {2 * LOST} s, and the same command on all hosts goes on from the last checkpoint'
    )


def several() -> bool:
    """Whether there is more than one process."""
    return jax.process_count() > 1


def first() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def own(row: int) -> bool:
    """Whether what the host does for this row is this process's to do."""
    return row % jax.process_count() == jax.process_index()


def fetch(tree: Any) -> Any:
    """`jax.device_get` of arrays that may lie on devices of other processes, too: whole in each."""
    if not several():
        return jax.device_get(tree)

    def whole(x: Any) -> Any:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            from jax.experimental import multihost_utils

            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x) if isinstance(x, jax.Array) else x

    return jax.tree.map(whole, tree)


def exchange(value: Any) -> list[Any]:
    """What each process gave, in order of their numbers; of anything that pickles."""
    if not several():
        return [value]
    from jax.experimental import multihost_utils

    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data), np.int32))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [
        pickle.loads(row[:size].tobytes())
        for row, size in zip(np.asarray(rows), sizes.tolist(), strict=True)
    ]


def any_of(flag: bool) -> bool:
    """Whether it is so in any process."""
    return any(exchange(bool(flag)))


def by_first(action: Callable[[], Any]) -> Any:
    """What `action` gives in the first process, the only one that calls it; it has to pickle.

    What it raises there is raised there, and elsewhere HostError with its message.
    """
    value, error = None, None
    if first():
        try:
            value = action()
        except Exception as raised:
            error = raised
    value, text = exchange((value, error and f'{type(error).__name__}: {error}'))[0]
    if error is not None:
        try:
            raise error
        finally:
            del error  # else it holds what it met until garbage is collected
    if text is not None:
        raise HostError(f'process 0: {text}')
    return value


def leave(why: str) -> NoReturn:
    """End this process with status 1, and without waiting for the others as jax would."""
    print(why, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def check_alike(values: Mapping[str, Any]) -> None:
    """Raise HostError, naming the field, where processes have not been started alike."""
    for index, other in enumerate(exchange({name: str(value) for name, value in values.items()})):
        for name, value in values.items():
            if other.get(name) != str(value):
                raise HostError(
                    f'{name} is {value} in process {jax.process_index()} and {other.get(name)} in '
                    f'process {index}; all have to run the same command on the same files'
                )


@contextlib.contextmanager
def folder(workdir: Path) -> Iterator[Path]:
    """Where this process writes: the first into `workdir`; what others write and print is lost."""
    if first():
        yield workdir
        return
    with (
        tempfile.TemporaryDirectory(prefix='policyopt-') as scratch,
        open(os.devnull, 'w', encoding='utf-8') as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        yield Path(scratch)
