"""The bandwidth of collectives, by the formulas of nccl-tests. Pure.

nccl-tests, doc/PERFORMANCE.md: the algorithm bandwidth is size / time; the bus bandwidth corrects
it by the share of the data that has to cross each link, so that it can be held against the hardware
and does not depend on the number of ranks: 2(n-1)/n for all-reduce, (n-1)/n for all-gather, whose
size is that of the gathered whole.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from slurm_resilience.errors import UsageError


class Collective(enum.StrEnum):
    """A collective that is measured."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"


class SweepRow(msgspec.Struct, frozen=True):
    """One size of a sweep."""

    size_bytes: int
    elements: int
    seconds: float
    """The mean time of one call."""
    wrong: int = 0
    """Elements of the result, on all ranks together, that have another value than they should."""


class Sweep(msgspec.Struct, frozen=True):
    """A collective over rising sizes, within one group of ranks."""

    collective: Collective
    ranks: int
    rows: tuple[SweepRow, ...] = ()


def algorithm_bandwidth(row: SweepRow) -> float:
    """Return GB/s: size / time."""
    return row.size_bytes / row.seconds / 1e9 if row.seconds > 0 else math.inf


def bus_bandwidth(collective: Collective, ranks: int, row: SweepRow) -> float:
    """Return GB/s: what each link has to carry."""
    if ranks < 2:
        return algorithm_bandwidth(row)
    share = (ranks - 1) / ranks
    factor = 2 * share if collective is Collective.ALL_REDUCE else share
    return algorithm_bandwidth(row) * factor


def best_bus_bandwidth(sweep: Sweep) -> float:
    """Return the highest of all sizes, GB/s; 0 for none."""
    rates = (bus_bandwidth(sweep.collective, sweep.ranks, row) for row in sweep.rows)
    return max(rates, default=0.0)


def average_bus_bandwidth(sweep: Sweep) -> float:
    """Return the mean of all sizes, GB/s, as nccl-tests prints it at its end; 0 for none."""
    rates = [bus_bandwidth(sweep.collective, sweep.ranks, row) for row in sweep.rows]
    return fmean(rates) if rates else 0.0


def wrong_elements(sweep: Sweep) -> int:
    """Return the elements of all sizes that have another value than they should."""
    return sum(row.wrong for row in sweep.rows)


def sweep_sizes(smallest_bytes: int, largest_bytes: int, factor: int) -> tuple[int, ...]:
    """Return rising sizes, whole numbers of four-byte elements, the largest included.

    Raises:
        UsageError: they do not rise.
    """
    if not 4 <= smallest_bytes <= largest_bytes or factor < 2:
        raise UsageError(
            f"sizes from {smallest_bytes} to {largest_bytes} bytes by a factor of {factor} do not "
            "rise; the smallest is 4 bytes, the factor 2 or more"
        )
    sizes = []
    size = smallest_bytes
    while size < largest_bytes:
        sizes.append(size - size % 4)
        size *= factor
    return (*sizes, largest_bytes - largest_bytes % 4)


THRESHOLDS_GB_PER_SECOND: dict[str, float] = {
    "p4d.24xlarge": 80.0,
    "p4de.24xlarge": 80.0,
    "Standard_ND96isr_H100_v5": 460.0,
}
"""Bus bandwidth that an all-reduce over several nodes reaches at least, by node type. p4d: the
threshold that HyperPod's deep checks log for it; ND H100 v5: Azure's azurehpc-health-checks, 16 GiB
messages. For other types the nodes are compared with each other, or the caller says a number."""


def threshold_of(node_type: str, asked: float | None = None) -> float | None:
    """Return the threshold for a node type, GB/s; None when none is known."""
    return asked if asked is not None else THRESHOLDS_GB_PER_SECOND.get(node_type)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies, between neighbours in a line."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
