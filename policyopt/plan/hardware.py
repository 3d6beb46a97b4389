"""What TPU chips can do, and the topologies that programs are compiled for.

Numbers are the vendor's published peaks of one chip. `python -m policyopt.plan` compares with them
and with nothing that was measured.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

from policyopt import checks

MISSING = (
    'compiling for TPUs needs the package libtpu, which is not installed: pip install '
    "'policyopt[tpu-plan]', or pip install libtpu. It needs no TPU"
)


class Chip(NamedTuple):
    """One chip, which jax sees as one device.

    Attributes:
      flops: bfloat16 operations a second.
      hbm: bytes of memory.
      bandwidth: HBM bytes a second.
      link: bytes a second that a chip sends over one axis of its torus, both directions together.
      clock: cycles a second of the compiler's estimates.
    """

    flops: float
    hbm: float
    bandwidth: float
    link: float
    clock: float


GIB = 2.0**30
CHIPS = {
    'v4': Chip(275e12, 32 * GIB, 1.228e12, 0.9e11, 1.05e9),
    'v5e': Chip(197e12, 16 * GIB, 0.819e12, 0.9e11, 1.5e9),
    'v5p': Chip(459e12, 95 * GIB, 2.765e12, 1.8e11, 1.75e9),
    'v6e': Chip(918e12, 32 * GIB, 1.64e12, 1.8e11, 1.75e9),
}


def installed() -> bool:
    """Whether programs can be compiled for TPUs here."""
    return importlib.util.find_spec('libtpu') is not None


def chip_of(topology: str) -> Chip:
    """The chip of a topology, 'v5p:4x4x4'.

    Raises ValueError for a text of another form, and for a chip that is not in CHIPS.
    """
    name, colon, shape = topology.partition(':')
    checks.one_of('the chip of --topology', name, CHIPS)
    if not colon or not all(part.isdigit() and int(part) for part in shape.split('x')):
        raise ValueError(
            f'--topology is {topology!r}; legal is CHIP:SHAPE, such as v5e:4x4 or v5p:4x4x4'
        )
    return CHIPS[name]


def devices(topology: str) -> list[Any]:
    """Devices of a topology, to compile for; there need be no TPU.

    Raises ValueError for a topology that does not exist, and RuntimeError where libtpu is missing.
    """
    chip_of(topology)
    if not installed():
        raise RuntimeError(MISSING)
    # libtpu would ask the machine's metadata server, which only TPU machines have, for minutes.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
    # No chip is asked for, so a process that has one, or that plans too, is in nobody's way.
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology, platform='tpu').devices)
    except Exception as error:  # whatever the library raises for a shape that no slice has
        text = ' '.join(str(error).split())
        raise ValueError(
            f'--topology is {topology!r}, which libtpu does not know: {text}'
        ) from error
