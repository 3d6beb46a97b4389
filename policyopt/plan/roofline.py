"""How long a program must take at least, and what it waits for; from counts, not from a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policyopt.plan.costs import Costs
from policyopt.plan.hardware import Chip

SIDES = ('compute', 'memory', 'network')


class Times(NamedTuple):
    """Seconds of one run of a program on one device.

    Attributes:
      compute: its matrix products at the chip's peak.
      memory: its HBM traffic at the peak bandwidth.
      network: what it sends, each collective over one axis of the torus.
      compiler: the compiler's own estimate of its instructions, kernels and collectives apart.
      kernels: kernels at the roofline, which the compiler has no estimate of.
    """

    compute: float
    memory: float
    network: float
    compiler: float
    kernels: float

    @property
    def bound(self) -> str:
        """The longest of compute, memory and network."""
        return max(SIDES, key=lambda side: getattr(self, side))

    @property
    def roofline(self) -> float:
        """The least that it can take: all three overlap."""
        return max(self.compute, self.memory, self.network)

    @property
    def expected(self) -> float:
        """Instructions as the compiler thinks of them, then the kernels, then the network."""
        busy = max(self.compiler + self.kernels, self.compute)
        return busy + self.network


def times(costs: Costs, chip: Chip) -> Times:
    """Times of one run, from its costs on a device."""
    flops, moved = costs.kernel_flops, costs.kernel_bytes
    return Times(
        compute=(costs.flops + flops) / chip.flops,
        memory=(costs.bytes + moved) / chip.bandwidth,
        network=sum(costs.collectives.values()) / chip.link,
        compiler=costs.cycles / chip.clock,
        kernels=max(flops / chip.flops, moved / chip.bandwidth),
    )


def by_kind(collectives: Mapping[tuple[str, tuple[str, ...]], float]) -> list[dict]:
    """Collectives as JSON, the largest first."""
    rows = [
        {'kind': kind, 'axes': list(axes), 'bytes': sent}
        for (kind, axes), sent in collectives.items()
    ]
    return sorted(rows, key=lambda row: -row['bytes'])
