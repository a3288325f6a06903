"""EFA devices and their ports, against the profile of the node's type.

A missing device asks for a reboot, as a missing GPU does; recurring, it becomes a replacement. The
driver shows a port that is not active only where the device itself has failed: a switch that fails
does not show in it, as it does with InfiniBand.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/class/infiniband"
AMAZON = "0x1d0f"


class EfaSeen(NamedTuple):
    """The EFA devices that the kernel shows."""

    devices: int
    down: tuple[str, ...] = ()
    """Ports that are not active: `device/port (state)`."""


def probe(context: CheckContext) -> EfaSeen:
    devices, down = 0, []
    for device in sorted(context.path(ROOT).glob("*")):
        try:
            vendor = (device / "device" / "vendor").read_text("utf-8").strip()
            kind = (device / "device" / "device").read_text("utf-8").strip()
        except OSError:
            continue
        if vendor == AMAZON and kind.startswith("0xefa"):
            devices += 1
            down += _ports_down(device)
    return EfaSeen(devices, tuple(down))


def _ports_down(device: Path) -> list[str]:
    found = []
    for port in sorted(device.glob("ports/*")):
        try:
            state = (port / "state").read_text("utf-8", "replace").strip()
        except OSError:
            continue
        if "ACTIVE" not in state:
            found.append(f"{device.name}/{port.name} ({state})")
    return found


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
    if not troubles:
        return Judgement(f"{seen.devices} EFA devices")
    text = "; ".join(troubles)
    return Judgement(text, (Finding(CHECK.name, Severity.REBOOT, text, context.now),))


CHECK = Check(
    "efa_devices",
    probe,
    judge,
    source=f"{ROOT}/*/{{device/{{vendor,device}},ports/*/state}}",
    threshold="fewer than the profile's efa_devices; a port was active and is down",
    asks_for=(Severity.REBOOT,),
)
