"""EFA devices, against the profile of the node's type.

A missing device asks for a reboot, as a missing GPU does; recurring, it becomes a replacement.
"""

from __future__ import annotations

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/class/infiniband"
AMAZON = "0x1d0f"


def probe(context: CheckContext) -> int:
    count = 0
    for device in context.path(ROOT).glob("*"):
        try:
            vendor = (device / "device" / "vendor").read_text("utf-8").strip()
            kind = (device / "device" / "device").read_text("utf-8").strip()
        except OSError:
            continue
        count += vendor == AMAZON and kind.startswith("0xefa")
    return count


def judge(seen: int, context: CheckContext) -> Judgement:
    wanted = context.expected.profile.efa_devices
    if wanted is None or seen >= wanted:
        return Judgement(f"{seen} EFA devices")
    text = f"{seen} EFA devices, the profile expects {wanted}"
    return Judgement(text, (Finding(CHECK.name, Severity.REBOOT, text, context.now),))


CHECK = Check(
    "efa_devices",
    probe,
    judge,
    source=f"{ROOT}/*/device/{{vendor,device}}",
    threshold="fewer than the profile's efa_devices",
    asks_for=(Severity.REBOOT,),
)
