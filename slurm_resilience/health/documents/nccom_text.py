"""Read the last line of nccom-test, the collectives test of AWS Neuron. Pure."""

from __future__ import annotations

import re

_AVERAGE = re.compile(r"^\s*Avg bus bandwidth:\s*(\d+(?:\.\d+)?)\s*GB/s", re.M)


def nccom_bandwidth(text: str) -> float | None:
    """Return the average bus bandwidth, GB/s; None when the test came to no result."""
    match = _AVERAGE.search(text)
    return float(match[1]) if match else None
