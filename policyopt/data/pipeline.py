"""From problems to batches: seeded order, mixtures with exact shares, state that can be saved."""

from __future__ import annotations

import bisect
import dataclasses
import fractions
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import grain
import numpy as np

T = TypeVar('T')

_ENDLESS = 10**9  # epochs; grain's own endless length does not fit an index at batch size 1


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Sequence[T]):
    """Several sequences one after another, which `batches` mixes by weight.

    Attributes:
      parts: none of them empty.
      weights: of each part, above 0; its share of the rows is its weight over their sum.
    """

    parts: tuple[Sequence[T], ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        if len(self.parts) != len(self.weights) or not self.parts:
            raise ValueError(f'{len(self.parts)} parts with {len(self.weights)} weights')
        if not all(self.parts):
            raise ValueError(f'parts have {[len(p) for p in self.parts]} items; none may be empty')
        if not all(0 < w < float('inf') for w in self.weights):
            raise ValueError(f'weights are {self.weights}; legal are finite ones above 0')

    @property
    def shares(self) -> tuple[fractions.Fraction, ...]:
        """Share of each part, by the weights as they are written in decimals."""
        exact = [fractions.Fraction(repr(float(w))) for w in self.weights]
        return tuple(w / sum(exact) for w in exact)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        ends = list(itertools.accumulate(map(len, self.parts)))
        part = bisect.bisect_right(ends, index)
        return self.parts[part][index - ends[part]]


class Interleave(Sequence):
    """Which part gives the k-th row, and which of its rows: (part, index).

    Of the first k rows, part i gave within one row of its share, the last two parts within the
    number of parts; over a period of the shares all are exact. A selection map of grain, whose own
    rounds the shares.
    """

    def __init__(self, shares: Sequence[fractions.Fraction], length: int):
        left = [sum(shares[i:]) for i in range(len(shares))]
        self._of_rest = [share / rest for share, rest in zip(shares, left, strict=True)]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        # Part 0 gives row k where floor((k + 1) s) > floor(k s); what is left is the k' -th row of
        # the other parts.
        for part, share in enumerate(self._of_rest):
            before = index * share.numerator // share.denominator
            if (index + 1) * share.numerator // share.denominator > before:
                return part, before
            index -= before
        raise AssertionError('the last part takes all that is left')


def batches(
    items: Sequence[T], size: int, seed: int, *, shard: int = 0, shards: int = 1
) -> Iterator[list[T]]:
    """Endless batches of `size` items in an order shuffled anew each epoch; a grain iterator.

    The order is a function of the seed, and `get_state` / `set_state` resume it exactly; the state
    is JSON, and the same on every host. It knows neither items nor size nor seed: resume with the
    same ones.

    Of a `Mixture`, each part is shuffled by itself and repeated as often as its share needs; the
    shares are exact in the long run, whatever the lengths of the parts.

    With `shards` hosts, the one with number `shard` gets size / shards consecutive rows of each
    batch, so that all of them, in order, hold what one host alone would; rows of other hosts are
    not read.

    Raises ValueError where a batch would hold an item twice, or does not divide into shards.
    """
    if shards < 1 or not 0 <= shard < shards:
        raise ValueError(f'shard is {shard} of {shards}; legal is 0 to shards - 1')
    if size < 1 or size % shards:
        raise ValueError(f'a batch of {size} does not divide into {shards} shards')
    if size > len(items):
        raise ValueError(f'a batch of {size} needs as many items; there are {len(items)}')
    if isinstance(items, Mixture):
        for part, share in zip(items.parts, items.shares, strict=True):
            if share * size > len(part):
                raise ValueError(
                    f'a batch of {size} needs {float(share * size):g} items of a part that has '
                    f'{len(part)}; lower its weight'
                )
        seeds = np.random.SeedSequence(seed).generate_state(len(items.parts))
        parts = [_shuffled(part, int(s)) for part, s in zip(items.parts, seeds, strict=True)]
        length = min(int(len(d) / share) for d, share in zip(parts, items.shares, strict=True))
        selection: Any = Interleave(items.shares, length)
        dataset = grain.MapDataset.select_from_datasets(parts, selection)
    else:
        dataset = _shuffled(items, seed)
    dataset = dataset.batch(size // shards, batch_fn=list)[shard::shards]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def _shuffled(items: Sequence[T], seed: int) -> grain.MapDataset[T]:
    """Items in an order that is drawn anew for each of many epochs."""
    source: Any = items
    return grain.MapDataset.source(source).seed(seed).shuffle().repeat(_ENDLESS)
