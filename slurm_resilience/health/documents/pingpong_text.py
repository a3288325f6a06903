"""Read the rows of fi_pingpong. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_ROW = re.compile(
    r"^\s*(?P<size>\d+(?:\.\d+)?[kmg]?)\s+\S+\s+\S+\s+\S+\s+\d+(?:\.\d+)?s"
    r"\s+(?P<rate>\d+(?:\.\d+)?)\s+(?P<latency>\d+(?:\.\d+)?)\s+\d+(?:\.\d+)?\s*$",
    re.M | re.I,
)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class PingpongRow(NamedTuple):
    """One size of messages: `bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec`."""

    size_bytes: int
    megabytes_per_second: float
    microseconds: float
    """For one transfer."""


def pingpong_rows(text: str) -> tuple[PingpongRow, ...]:
    """Return the rows that a run printed; none when it measured nothing."""
    return tuple(
        PingpongRow(_size(match["size"]), float(match["rate"]), float(match["latency"]))
        for match in _ROW.finditer(text)
    )


def _size(text: str) -> int:
    unit = _UNITS.get(text[-1].lower())
    return int(float(text[:-1]) * unit) if unit else int(float(text))
