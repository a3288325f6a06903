"""Choose the samples of batch number k, and each rank's share of them. Pure.

Nothing is kept between two calls, so a process that starts at batch 1,000,000 knows its samples at
once. The permutation of an epoch is never laid out in memory: an index is computed where it is
asked for, in the same time for a thousand samples and for a trillion. It does not depend on a
library's random streams either, so an upgrade in the middle of a long run changes no order.
"""

from __future__ import annotations

from math import isqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Bounds = NDArray[np.float64]

ROUNDS = 12
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, as splitmix64 adds it."""


class SampleOrder(msgspec.Struct, frozen=True):
    """The order of a map-style dataset.

    An epoch is one permutation of the samples, drawn from ``(seed, epoch)``. Batch k of the run is
    slice ``k % per_epoch`` of epoch ``k // per_epoch``.

    With ``bounds`` each place of an epoch draws a sample by weight instead, and puts it back.
    """

    length: int
    """Samples in the dataset."""
    global_batch: int
    """Samples in one batch of all data-parallel ranks together."""
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    """Leave out the samples of an epoch that fill no whole batch; else its last batch is short."""
    bounds: Bounds | None = None
    """(length,) from `bounds_of`."""

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        whole, rest = divmod(self.length, self.global_batch)
        return whole if self.drop_last or not rest else whole + 1

    def epoch(self, number: int) -> int:
        """Return the epoch that batch ``number`` belongs to."""
        return number // self.per_epoch

    def size(self, number: int) -> int:
        """Count the samples in batch ``number``: ``global_batch``, or fewer at an epoch's end."""
        first = number % self.per_epoch * self.global_batch
        return min(self.global_batch, self.length - first)

    def samples_before(self, number: int) -> int:
        """Count the samples of all batches before ``number``."""
        if not self.length:  # a stream: its batches are taken to be full
            return number * self.global_batch
        epochs, rest = divmod(number, self.per_epoch)
        whole = self.length if not self.drop_last else self.per_epoch * self.global_batch
        return epochs * whole + rest * self.global_batch

    def share(self, number: int, rank: int, world: int) -> tuple[int, int]:
        """Return begin and end of rank ``rank`` of ``world`` in batch ``number``."""
        return share(self.size(number), rank, world)

    def indices(self, number: int, begin: int = 0, end: int | None = None) -> Indices:
        """Sample indices ``begin … end`` of batch ``number``.

        Returns:
            (end - begin,) int64, each in [0, length).
        """
        epoch, at = divmod(number, self.per_epoch)
        stop = self.size(number) if end is None else end
        first = at * self.global_batch
        places = np.arange(first + begin, first + stop, dtype=np.int64)
        if self.bounds is not None:
            return draw(places, self.bounds, self.seed, epoch)
        return permute(places, self.length, self.seed, epoch) if self.shuffle else places


def share(size: int, rank: int, world: int) -> tuple[int, int]:
    """Return the contiguous part of ``size`` samples that is rank ``rank``'s of ``world``.

    The parts of all ranks join without gap or overlap, and differ by at most one sample.
    """
    return rank * size // world, (rank + 1) * size // world


def last(per_epoch: int | None, epochs: int | None, steps: int | None) -> int | None:
    """Return the number of batches in the whole run; None: it never ends, or is not known yet.

    Args:
        per_epoch: batches in an epoch; None: unknown.
        epochs: epochs in the run; None: no limit.
        steps: batches in the run; None: no limit.
    """
    limits = [] if steps is None else [steps]
    if per_epoch is not None and epochs is not None:
        limits.append(per_epoch * epochs)
    return min(limits, default=None)


def bounds_of(weights: NDArray[np.float64]) -> Bounds:
    """Return where each sample's part of [0, 1) ends.

    Args:
        weights: (length,), not negative, and not all zero.
    """
    sums: Bounds = np.cumsum(weights)
    found: Bounds = sums / sums[-1]
    return found


def draw(places: Indices, bounds: Bounds, seed: int, epoch: int) -> Indices:
    """Draw a sample by weight for each place of an epoch: its number by lot is number ``place`` of
    the splitmix64 stream that begins with ``(seed, epoch)``.

    Args:
        places: (n,) int64.
        bounds: (length,).

    Returns:
        (n,) int64 in [0, length). One of weight zero never comes.
    """
    begin = np.uint64(mix(mix(seed & _MASK) ^ (epoch & _MASK)))
    lots = _scatter(places.astype(np.uint64) * np.uint64(_GOLDEN) + begin)
    # 53 bits: as many as a float64 has.
    found: Indices = np.searchsorted(bounds, (lots >> np.uint64(11)) * 2.0**-53, side="right")
    return found


def permute(places: Indices, length: int, seed: int, epoch: int) -> Indices:
    """Permute ``places`` by the permutation of ``range(length)`` that ``(seed, epoch)`` draws.

    A generalised Feistel network over a grid a x b that just holds ``length``, with cycle walking:
    a result outside of the range goes through the network again until it falls inside (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The grid has fewer than a
    places too many, so this is rare.

    Args:
        places: (n,) int64 in [0, length).

    Returns:
        (n,) int64 in [0, length). Costs O(n) time and memory, whatever ``length`` is.
    """
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)
    base = mix(mix(seed & _MASK) ^ (epoch & _MASK))
    keys = [mix(base + turn) for turn in range(ROUNDS)]
    found = _through(places.astype(np.uint64), rows, columns, keys)
    while (outside := found >= length).any():
        found[outside] = _through(found[outside], rows, columns, keys)
    return found.astype(np.int64)


def _through(
    places: NDArray[np.uint64], rows: int, columns: int, keys: list[int]
) -> NDArray[np.uint64]:
    a, b = np.uint64(rows), np.uint64(columns)
    left, right = places // b, places % b
    for turn, key in enumerate(keys):
        if turn % 2:
            right = (right + _scatter(left ^ np.uint64(key)) % b) % b
        else:
            left = (left + _scatter(right ^ np.uint64(key)) % a) % a
    return left * b + right


def mix(value: int) -> int:
    """Return a 64-bit number that looks drawn by lot (splitmix64; Steele, Lea, Flood, OOPSLA
    2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _scatter(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``mix`` without its first addition, for an array; overflow wraps, as it should."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
