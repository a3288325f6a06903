"""Judge what DCGM's background watches saw (`dcgmi health -c -j`). Pure.

DCGM says Failure of much that is no broken node: Xids of programs, an idle IMEX service. So the
text decides, and a text that no rule knows is only watched. An Xid is judged as the kernel's line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from slurm_resilience.health import xid
from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.model import Severity

_HEALTH = "Overall Health"
_WELL, _WARNING, _FAILURE = "Healthy", "Warning", "Failure"
_XID = re.compile(r"\bXID (\d+)", re.I)
_RULES: tuple[tuple[re.Pattern[str], Severity], ...] = tuple(
    (re.compile(words, re.I), severity)
    for words, severity in (
        (r"NODE_REBOOT|fallen off the bus", Severity.REBOOT),
        (r"GPU_RESET|DRAIN_AND_RESET|DRAIN_P2P", Severity.RESET),
        (r"remapping failed|row remap limit|retired pages have been", Severity.REPLACE),
        (r"SRAM threshold", Severity.REPLACE),
        # Rows that were remapped stay so: asking for a reset would have no end.
        (r"rows were remapped", Severity.MONITOR),
        (r"pending", Severity.RESET),
        (r"double-bit|\bDBE\b", Severity.RESET),
        (r"non-?fatal|single-bit|replay", Severity.MONITOR),
        (r"fatal NvSwitch|fatal errors on NvSwitch", Severity.RESET),
        (r"NvLink link \d+ is currently down|Only \d+ NvLinks are up", Severity.RESET),
        (r"read the power usage", Severity.REBOOT),
    )
)
"""Texts of DCGM's watches, the first that fits. What follows is that of NVML's facts."""


class WatchIncident(NamedTuple):
    """One system of one device, and what DCGM says of it."""

    subject: str
    """`GPU 0`."""
    system: str
    health: str
    text: str


def recognises_dcgm_health(data: object) -> bool:
    """Tell whether a JSON document is of `dcgmi health -c -j`."""
    if not isinstance(data, dict) or not isinstance(data.get("body"), dict):
        return False
    return isinstance(data["body"].get(_HEALTH), dict)


def judge_dcgm_health(data: dict[str, Any]) -> DocumentReading:
    """Return a finding for each incident of the watches."""
    overall = str(data["body"][_HEALTH].get("value", ""))
    if overall == _WELL:
        return DocumentReading()
    if overall not in (_WARNING, _FAILURE):
        return DocumentReading(unjudged=(f"DCGM says '{overall}' of its watches",))
    incidents = list(_incidents(data["body"])) or [WatchIncident("", "", overall, "")]
    return DocumentReading(tuple(_finding(one) for one in incidents))


def _finding(incident: WatchIncident) -> Any:
    said = incident.text or f"DCGM's watches: {incident.health}"
    where = " ".join(word for word in (incident.subject, incident.system) if word)
    severity = _severity(said) if incident.health == _FAILURE else Severity.MONITOR
    text = f"{where}: {said}" if where else said
    code = incident.system.lower() or "health"
    return document_finding("dcgm", severity, text, incident.subject.lower(), code, said)


def _severity(text: str) -> Severity:
    if match := _XID.search(text):
        return xid.judge(int(match[1]), text).action
    return next((severity for rule, severity in _RULES if rule.search(text)), Severity.MONITOR)


def _incidents(body: dict[str, Any]) -> Iterator[WatchIncident]:
    for group, devices in body.items():
        if group == _HEALTH:
            continue
        for device, of_device in _children(devices):
            systems = dict(_children(of_device))
            # Between a device and its systems stands `Errors` in the newer versions.
            systems = dict(_children(systems["Errors"])) if "Errors" in systems else systems
            for system, said in systems.items():
                yield _incident(f"{group} {device}", system, said)


def _incident(subject: str, system: str, said: dict[str, Any]) -> WatchIncident:
    value = str(said.get("value", ""))
    health, _, rest = value.partition(" - ")
    if health not in (_WELL, _WARNING, _FAILURE):
        health, rest = _FAILURE, value  # an older form: the text alone
    # A long text is broken into pieces, at its blanks.
    overflow = said.get("overflow")
    pieces = [rest, *map(str, overflow if isinstance(overflow, list) else ())]
    return WatchIncident(subject, system, health, " ".join(" ".join(pieces).split()))


def _children(value: object) -> list[tuple[str, dict[str, Any]]]:
    children = value.get("children") if isinstance(value, dict) else None
    found = children.items() if isinstance(children, dict) else ()
    return [(str(name), one) for name, one in found if isinstance(one, dict)]
