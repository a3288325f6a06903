"""An Xid as NVML's event set tells it, beside the kernel log. Pure.

The event carries the number alone. So the kernel log's line, which may say whether an error was
fatal, comes before it; with Xid 154 the driver's recovery action is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from slurm_resilience.health import xid
from slurm_resilience.model import Finding

SAME_SECONDS = 1.0
"""The same Xid of the same GPU from both sources within this time is one error."""


_BUS = re.compile(r"(?P<domain>[0-9a-f]+):(?P<rest>[0-9a-f]+:[0-9a-f]+)(?:\.[0-9a-f])?")


class GpuEvent(msgspec.Struct, frozen=True):
    """One Xid of one GPU."""

    gpu: str
    """Its address as NVML writes it: `00000000:3B:00.0`."""
    code: int
    recovery: str = ""
    """The driver's recovery action in words, with Xid 154 alone."""


def event_finding(event: GpuEvent, at: float) -> Finding:
    """Return the finding that the kernel log's line of the same Xid would make.

    Args:
        event: what the driver told.
        at: when, seconds since the epoch.
    """
    row = xid.judge(event.code, f"to 0x0 ({event.recovery})" if event.recovery else "")
    gpu = kernel_address(event.gpu)
    said = f", recovery action: {event.recovery}" if event.recovery else ""
    return Finding(
        check="xid",
        severity=row.action,
        text=f"Xid {row.code} on GPU {gpu}: {row.meaning}",
        at=at,
        subject=gpu,
        code=str(row.code),
        evidence=f"NVML event: Xid {row.code}{said}",
    )


def kernel_address(gpu: str) -> str:
    """Return an address as the kernel log writes it: `0000:3b:00`."""
    match = _BUS.fullmatch(gpu.lower())
    return f"{int(match['domain'], 16):04x}:{match['rest']}" if match else gpu.lower()


def is_told(finding: Finding, logged: Iterable[Finding]) -> bool:
    """Tell whether the kernel log has said this already.

    Args:
        finding: that of an event.
        logged: the last Xids of the kernel log. One that a program wrote does not hide an event.
    """
    return any(
        one.key == finding.key
        and one.injected == finding.injected
        and abs(one.at - finding.at) <= SAME_SECONDS
        for one in logged
    )
