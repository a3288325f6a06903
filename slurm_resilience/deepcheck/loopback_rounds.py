"""The five figures of a loopback test, from repeated rounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from slurm_resilience.deepcheck.collective_math import percentile
from slurm_resilience.health.documents.pingpong_text import PingpongRow

TYPICAL_FROM_SHARE, TYPICAL_TO_SHARE = 0.05, 0.95
"""A typical latency lies between these percentiles of all rounds."""
LAGGING_SHARE = 0.5
"""A device with less than this share of its siblings' median bandwidth has failed."""


class LoopbackFigures(NamedTuple):
    """Bandwidths in MB/s, latencies in µs."""

    max_bw: float
    avg_bw: float
    max_typical_lat: float
    min_typical_lat: float
    avg_lat: float


def loopback_figures(rounds: Sequence[Sequence[PingpongRow]]) -> LoopbackFigures | None:
    """Return the figures of one device; None when no round measured anything.

    The bandwidth of a round is that of its fastest size, its latency that of its smallest size.
    """
    measured = [rows for rows in rounds if rows]
    if not measured:
        return None
    bandwidths = [max(row.megabytes_per_second for row in rows) for rows in measured]
    latencies = [min(rows, key=lambda row: row.size_bytes).microseconds for rows in measured]
    low, high = (percentile(latencies, at) for at in (TYPICAL_FROM_SHARE, TYPICAL_TO_SHARE))
    typical = [value for value in latencies if low <= value <= high] or latencies
    return LoopbackFigures(
        max(bandwidths), fmean(bandwidths), max(typical), min(typical), fmean(latencies)
    )


def lagging_devices(figures: Mapping[str, LoopbackFigures]) -> tuple[str, ...]:
    """Return the devices that are far slower than their siblings; none among fewer than three."""
    if len(figures) < 3:
        return ()
    middle = median(one.avg_bw for one in figures.values())
    return tuple(name for name, one in figures.items() if one.avg_bw < LAGGING_SHARE * middle)
