"""InfiniBand and RoCE ports that were up when sresd started and are not any more, and their errors.

A port that never was up is not used. Counters are history, so only their growth is judged. Watched,
never acted on: a switch that fails takes the ports of many sound nodes down.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/class/infiniband"
LIMITS = {
    "link_downed": 3,
    "symbol_error": 1000,
    "link_error_recovery": 10,
    "excessive_buffer_overrun_errors": 10,
    "local_link_integrity_errors": 10,
}
"""Growth of a counter since sresd started that is worth watching."""


class FabricPort(NamedTuple):
    name: str
    """`device/port`."""
    state: str
    physical: str
    rate: str
    counters: dict[str, int]

    @property
    def is_up(self) -> bool:
        return "ACTIVE" in self.state and "LinkUp" in self.physical


def probe(context: CheckContext) -> tuple[FabricPort, ...]:
    ports = []
    for folder in sorted(context.path(ROOT).glob("*/ports/*")):
        name = f"{folder.parent.parent.name}/{folder.name}"
        counters = {
            counter: int(text)
            for counter in LIMITS
            if (text := _text(folder / "counters" / counter)).isdecimal()
        }
        state, physical = _text(folder / "state"), _text(folder / "phys_state")
        ports.append(FabricPort(name, state, physical, _text(folder / "rate"), counters))
    return tuple(ports)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def judge(seen: tuple[FabricPort, ...], context: CheckContext) -> Judgement:
    first: dict[str, FabricPort] = {one.name: one for one in (context.first or seen)}
    wanted = context.expected.profile.infiniband_rate
    findings = []
    for one in seen:
        before = first.get(one.name, one)
        grown = {
            counter: value - before.counters.get(counter, value)
            for counter, value in one.counters.items()
        }
        troubles = [f"{n} {c}" for c, n in grown.items() if n >= LIMITS[c]]
        if before.is_up and not one.is_up:
            troubles.insert(0, f"it is down ({one.state}, {one.physical})")
        if wanted and one.is_up and not one.rate.startswith(wanted):
            troubles.append(f"it runs at {one.rate}, the profile expects {wanted}")
        elif one.is_up and before.is_up and one.rate != before.rate:
            troubles.append(f"it runs at {one.rate}, earlier at {before.rate}")
        if troubles:
            text = f"{one.name}: {', '.join(troubles)}"
            findings.append(
                Finding(CHECK.name, Severity.MONITOR, text, context.now, subject=one.name)
            )
    up = sum(one.is_up for one in seen)
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{up} of {len(seen)} ports are up", tuple(findings))


CHECK = Check(
    "infiniband_ports",
    probe,
    judge,
    source=f"{ROOT}/*/ports/*/{{state,phys_state,rate,counters}}",
    threshold="was up and is down; a lower rate; "
    + ", ".join(f"{limit} {counter}" for counter, limit in LIMITS.items()),
    asks_for=(Severity.MONITOR,),
)
