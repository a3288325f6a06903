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


RATES = {"rnr_nak_retry_err": 0.0, "roce_slow_restart": 10.0}
"""Growth of a counter of `hw_counters` a second, between two runs, beyond which it is worth
watching (NVSentinel's). The first one means that a connection was given up."""


class FabricPort(NamedTuple):
    name: str
    """`device/port`."""
    state: str
    physical: str
    rate: str
    counters: dict[str, int]
    at: float = 0.0
    """When it was looked at, seconds since the epoch."""

    @property
    def is_up(self) -> bool:
        return "ACTIVE" in self.state and "LinkUp" in self.physical


def probe(context: CheckContext) -> tuple[FabricPort, ...]:
    ports = []
    for folder in sorted(context.path(ROOT).glob("*/ports/*")):
        name = f"{folder.parent.parent.name}/{folder.name}"
        counters = {
            counter: int(text)
            for place, names in (("counters", LIMITS), ("hw_counters", RATES))
            for counter in names
            if (text := _text(folder / place / counter)).isdecimal()
        }
        state, physical = _text(folder / "state"), _text(folder / "phys_state")
        rate = _text(folder / "rate")
        ports.append(FabricPort(name, state, physical, rate, counters, context.now))
    return tuple(ports)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def judge(seen: tuple[FabricPort, ...], context: CheckContext) -> Judgement:
    first: dict[str, FabricPort] = {one.name: one for one in (context.first or seen)}
    latest: tuple[FabricPort, ...] = context.earlier[-1] if context.earlier else seen
    earlier = {one.name: one for one in latest}
    wanted = context.expected.profile.infiniband_rate
    findings = []
    for one in seen:
        before = first.get(one.name, one)
        grown = {
            counter: value - before.counters.get(counter, value)
            for counter, value in one.counters.items()
        }
        troubles = [f"{n} {c}" for c, n in grown.items() if c in LIMITS and n >= LIMITS[c]]
        troubles += _fast(one, earlier.get(one.name, one))
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


def _fast(port: FabricPort, before: FabricPort) -> list[str]:
    """Name the counters that have grown too fast since the run before."""
    seconds = max(0.0, port.at - before.at)
    grown = {
        name: port.counters[name] - before.counters[name]
        for name in RATES
        if name in port.counters and name in before.counters
    }
    return [
        f"{count} {name} in {seconds:.0f} s"
        for name, count in grown.items()
        if count > RATES[name] * seconds
    ]


CHECK = Check(
    "infiniband_ports",
    probe,
    judge,
    remembers=1,
    source=f"{ROOT}/*/ports/*/{{state,phys_state,rate,counters,hw_counters}}",
    threshold="was up and is down; a lower rate; "
    + ", ".join(f"{limit} {counter}" for counter, limit in LIMITS.items())
    + "; between two runs any rnr_nak_retry_err, more than 10/s roce_slow_restart",
    asks_for=(Severity.MONITOR,),
)
