"""EFA devices, their ports and their counters, against the profile of the node's type.

A missing device asks for a reboot, as a missing GPU does; recurring, it becomes a replacement. The
driver shows a port that is not active only where the device itself has failed: a switch that fails
does not show in it, as it does with InfiniBand. Counters are history, so only their growth between
two runs is judged; the driver tells a command without an answer in the kernel log as well, and both
ask for the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/class/infiniband"
AMAZON = "0x1d0f"
NO_COMPLETION = "no_completion_cmds"


class GrowthLimit(NamedTuple):
    """The growth of a counter between two runs beyond which it is worth watching."""

    burst: float
    per_second: float


LIMITS = {
    "rx_drops": GrowthLimit(100, 100),
    "rdma_read_wr_err": GrowthLimit(100, 1),
    "rdma_write_wr_err": GrowthLimit(100, 1),
    "unresponsive_remote_events": GrowthLimit(100, 1),
    "impaired_remote_conn_events": GrowthLimit(100, 1),
    "retrans_timeout_events": GrowthLimit(100, 1),
    "retrans_pkts": GrowthLimit(1000, 10),
    "retrans_bytes": GrowthLimit(1e6, 1e4),
    "cmds_err": GrowthLimit(10, 10 / 60),
}
"""Those of the agents of AWS (bursts) and of NVSentinel (rates)."""


class EfaSeen(NamedTuple):
    """The EFA devices that the kernel shows."""

    devices: int
    down: tuple[str, ...] = ()
    """Ports that are not active, and interfaces without a carrier: `device/port (state)`."""
    at: float = 0.0
    """When they were looked at, seconds since the epoch."""
    counters: Mapping[str, dict[str, int]] = MappingProxyType({})
    """By device and counter, over its ports."""


def probe(context: CheckContext) -> EfaSeen:
    devices = 0
    down: list[str] = []
    counters: dict[str, dict[str, int]] = {}
    for device in sorted(context.path(ROOT).glob("*")):
        vendor, kind = _text(device / "device" / "vendor"), _text(device / "device" / "device")
        if vendor == AMAZON and kind.startswith("0xefa"):
            devices += 1
            down += _down(device)
            if counted := _counters(device):
                counters[device.name] = counted
    return EfaSeen(devices, tuple(down), context.now, counters)


def _down(device: Path) -> Iterator[str]:
    for port in sorted(device.glob("ports/*")):
        state = _text(port / "state")
        if state and "ACTIVE" not in state:
            yield f"{device.name}/{port.name} ({state})"
    for interface in sorted(device.glob("device/net/*")):
        if _text(interface / "carrier") == "0":
            yield f"{device.name}/{interface.name} (no carrier)"


def _counters(device: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for folder in (device / "hw_counters", *sorted(device.glob("ports/*/hw_counters"))):
        for name in (NO_COMPLETION, *LIMITS):
            text = _text(folder / name)
            if text.isdecimal():
                found[name] = found.get(name, 0) + int(text)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def judge(seen: EfaSeen, context: CheckContext) -> Judgement:
    wanted = context.expected.profile.efa_devices
    # A port that never was active is not used.
    first = context.first.down if isinstance(context.first, EfaSeen) else seen.down
    before = {name.partition(" ")[0] for name in first}
    lost = [name for name in seen.down if name.partition(" ")[0] not in before]
    troubles = []
    if wanted is not None and seen.devices < wanted:
        troubles.append(f"{seen.devices} EFA devices, the profile expects {wanted}")
    if lost:
        troubles.append(f"EFA ports that were active are down: {', '.join(lost)}")
    findings = []
    if troubles:
        text = "; ".join(troubles)
        findings.append(Finding(CHECK.name, Severity.REBOOT, text, context.now))
    findings += _grown(seen, context)
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{seen.devices} EFA devices", tuple(findings))


def _grown(seen: EfaSeen, context: CheckContext) -> Iterator[Finding]:
    earlier: EfaSeen | None = context.earlier[-1] if context.earlier else None
    first: EfaSeen = context.first or seen
    for device, counters in seen.counters.items():
        # An unanswered command stays one, until the driver is loaded anew and counts from 0.
        unanswered = counters.get(NO_COMPLETION, 0)
        if unanswered > first.counters.get(device, counters).get(NO_COMPLETION, unanswered):
            text = f"{device}: it did not answer a command of its driver ({NO_COMPLETION})"
            yield Finding(CHECK.name, Severity.REPLACE, text, context.now, device, NO_COMPLETION)
        before = earlier.counters.get(device) if earlier else None
        if earlier is None or before is None:
            continue
        seconds = max(0.0, seen.at - earlier.at)
        grown = {
            name: counters[name] - before[name]
            for name, limit in LIMITS.items()
            if name in counters
            and name in before
            and counters[name] - before[name] > limit.burst + limit.per_second * seconds
        }
        if grown:
            counts = ", ".join(f"{count} {name}" for name, count in grown.items())
            text = f"{device}: {counts} in {seconds:.0f} s"
            yield Finding(CHECK.name, Severity.MONITOR, text, context.now, device, "counters")


def _short(number: float) -> str:
    return f"{number:,.2f}".rstrip("0").rstrip(".")


CHECK = Check(
    "efa_devices",
    probe,
    judge,
    remembers=1,
    source=f"{ROOT}/*/{{device/{{vendor,device,net/*/carrier}},ports/*/{{state,hw_counters}},"
    "hw_counters}",
    threshold="fewer than the profile's efa_devices; a port was active, or had a carrier, and is "
    f"down; any new {NO_COMPLETION}; between two runs more than "
    + ", ".join(
        f"{_short(limit.burst)} + {_short(limit.per_second)}/s {name}"
        for name, limit in LIMITS.items()
    ),
    asks_for=(Severity.REPLACE, Severity.REBOOT, Severity.MONITOR),
)
