"""From findings to incidents and a verdict, each with the reason for it. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from slurm_resilience.health import xid
from slurm_resilience.health.grouping import FindingGroup
from slurm_resilience.health.line_rules.line_judge import RULES_BY_KEY
from slurm_resilience.health.verdict import VERDICTS, HealthVerdict, gravest, verdict_of
from slurm_resilience.model import Severity

MAX_INCIDENTS = 500
"""Incidents in one answer; the mildest are left out."""

_LOST_GPU = frozenset({("xid", "79"), ("gpu_lost", "")})


class ReplayIncident(msgspec.Struct, frozen=True):
    """One trouble that a file tells of."""

    verdict: HealthVerdict
    check: str
    subject: str
    codes: tuple[str, ...]
    text: str
    why: str
    evidence: str
    lines: int = 1
    first: float = 0.0
    """Seconds on the file's own clock."""
    last: float = 0.0
    injected: bool = False


class ReplayResult(msgspec.Struct, frozen=True):
    """The answer to one file."""

    verdict: HealthVerdict
    kind: str
    why: str
    incidents: tuple[ReplayIncident, ...] = ()
    unjudged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    injected: bool = False
    """A program wrote the lines that the incidents rest on."""


class Grouped(NamedTuple):
    """An incident, and whether the node has booted since."""

    group: FindingGroup
    has_booted_since: bool = False
    has_fatal_switch: bool = False


def incident(grouped: Grouped) -> ReplayIncident:
    """Return one incident with its verdict and the reason for it."""
    group = grouped.group
    lead = group.lead
    verdict, why = _verdict(grouped)
    return ReplayIncident(
        verdict,
        lead.check,
        lead.subject,
        tuple(code for code in group.codes if code),
        lead.text,
        why,
        lead.evidence,
        group.lines,
        round(group.first, 6),
        round(group.last, 6),
        lead.injected,
    )


def conclude(
    kind: str,
    incidents: tuple[ReplayIncident, ...],
    unjudged: tuple[str, ...],
    notes: tuple[str, ...],
) -> ReplayResult:
    """Return the verdict on a file: that of its gravest incident."""
    ordered = sorted(incidents, key=lambda one: -VERDICTS.index(one.verdict))
    if len(ordered) > MAX_INCIDENTS:
        notes = (*notes, f"{len(ordered) - MAX_INCIDENTS} milder incidents are not shown")
        ordered = ordered[:MAX_INCIDENTS]
    doubts = [HealthVerdict.UNJUDGED] if unjudged else []
    verdict = gravest([*(one.verdict for one in ordered), *doubts])
    if ordered and ordered[0].verdict is verdict:
        why = f"{ordered[0].text}: {ordered[0].why}"
    elif unjudged:
        why = unjudged[0]
    else:
        why = f"{kind}: no fault is named"
    injected = bool(ordered) and all(one.injected for one in ordered)
    return ReplayResult(verdict, kind, why, tuple(ordered), unjudged, notes, injected)


def _verdict(grouped: Grouped) -> tuple[HealthVerdict, str]:
    """Return the verdict on an incident, and why."""
    lead = grouped.group.lead
    why = explain(lead.check, lead.code)
    if lead.injected and lead.severity is Severity.MONITOR:
        return HealthVerdict.MONITOR, f"a program wrote this line, not the kernel ({why})"
    if (lead.check, lead.code) in _LOST_GPU and grouped.has_fatal_switch:
        why = (
            "the switches report fatal errors as well: the fabric is reset with all its GPUs "
            "first, and the node boots if the GPU does not come back (alone, a lost GPU asks for "
            f"a reboot: {why})"
        )
        return HealthVerdict.RESET, why
    verdict = verdict_of(lead.severity)
    if grouped.has_booted_since and verdict is not HealthVerdict.REPLACE:
        return HealthVerdict.MONITOR, f"the node has booted since, which ends it ({why})"
    return verdict, why


def explain(check: str, code: str) -> str:
    """Return the reason for what a finding of this kind asks for."""
    if check == "xid" and code.isdecimal():
        row = xid.table().get(int(code))
        if row is None:
            return "an Xid that the table does not know is only watched"
        others = f"; other agents: {row.others}" if row.others else ""
        return f"{row.source}{others}"
    if check == "sxid":
        return "the driver's own word, fatal or not, decides for NVSwitch errors"
    if check == "gpu_lost":
        return f"as Xid 79, which the driver did not print: {explain('xid', '79')}"
    rule = RULES_BY_KEY.get((check, code))
    if rule is not None:
        return f"{rule.source} ({rule.threshold})" if rule.threshold != "any" else rule.source
    return DOCUMENT_REASONS.get(check, "the tool's own word")


DOCUMENT_REASONS = {
    "dcgm": "DCGM's own severity of the error: isolate → replace, reset → reset, triage → reboot",
    "smart": "the disk's own thresholds",
    "nvidia_smi": "the driver's own counters and flags, against NVIDIA's limits",
    "gpu_count": "a GPU that is missing comes back with a reboot, or has to be replaced",
    "nvlink": "a link that is down is trained anew by a reset of the GPU",
    "throttle": "clocks that are held back slow a job down; cooling and power are looked at",
    "network_port": "a port that is down may come back; time shows",
    "ipmi": "the management controller's own word",
    "stress": "a wrong result is no matter of configuration",
    "efa": "a device that is missing comes back with a reboot, or has to be replaced",
    "neuron": "an uncorrected error means lost data",
}
