"""Several lines, one trouble: findings of the kernel log grouped into incidents. Pure.

A failing GPU says it in several ways: 48, 63 and 94 within 30 ms are one memory error, 79 is
followed by errors of every switch the GPU hung on, and a faulting program repeats its line for each
warp. An incident is reported when it begins and when it gets graver, not for every line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from slurm_resilience.model import SEVERITIES, Finding, Severity

WINDOW_SECONDS = 60.0
"""Quiet time that ends an incident. Seen: 48→94 30 ms, 13→109 5 s, 79→switch errors 12 s."""

CANCELS = {"162": "163"}
"""Xid → the Xid whose trouble it ends (power smoothing is on again)."""

_REACH_SWITCHES = frozenset({"74", "79", *map(str, range(144, 151))})
"""GPU errors that make the NVSwitches behind it report errors of their own."""


class FindingGroup(NamedTuple):
    """One trouble. ``lead`` is its gravest finding, the first of equals."""

    lead: Finding
    codes: tuple[str, ...]
    """Each code once, in the order of appearance."""
    last: float
    lines: int = 1


class GroupingChange(NamedTuple):
    """The effect of a new line on an incident."""

    incidents: tuple[FindingGroup, ...]
    """The open ones."""
    report: Finding | None = None
    cleared: tuple[tuple[str, str, str], ...] = ()
    recovered: str = ""
    """A GPU that the driver says needs no recovery any more: what a reset heals is healed."""


def absorb(
    incidents: tuple[FindingGroup, ...], finding: Finding, window: float = WINDOW_SECONDS
) -> GroupingChange:
    """Add one finding.

    Args:
        incidents: the open incidents.
        finding: what was seen now; ``at`` is the time.
        window: seconds of quiet after which an incident is over.
    """
    still_open = tuple(one for one in incidents if finding.at - one.last <= window)
    if cancelled := CANCELS.get(finding.code if finding.check == "xid" else ""):
        rest = tuple(
            one
            for one in still_open
            if (one.lead.subject, one.lead.code) != (finding.subject, cancelled)
        )
        return GroupingChange(rest, None, ((finding.check, finding.subject, cancelled),))
    if (finding.check, finding.code, finding.severity) == ("xid", "154", Severity.NONE):
        rest = tuple(one for one in still_open if not heals(one.lead, finding.subject))
        return GroupingChange(rest, recovered=finding.subject)
    for old in still_open:
        if _belongs(finding, old):
            new = _grow(old, finding)
            others = tuple(new if one is old else one for one in still_open)
            if new.lead is old.lead:
                return GroupingChange(others)
            renamed = old.lead.key != new.lead.key
            return GroupingChange(others, _told(new), (old.lead.key,) if renamed else ())
    if finding.severity is Severity.NONE:
        return GroupingChange(still_open)
    new = FindingGroup(finding, (finding.code,), finding.at)
    return GroupingChange((*still_open, new), finding)


def heals(finding: Finding, recovered: str) -> bool:
    """Tell whether the recovery of a GPU (Xid 154 "to None", after its reset) ends this trouble."""
    return finding.subject == recovered and finding.severity is Severity.RESET


def group(findings: Iterable[Finding], window: float = WINDOW_SECONDS) -> tuple[FindingGroup, ...]:
    """All incidents in a sequence of findings, e.g. of a saved log."""
    open_now: tuple[FindingGroup, ...] = ()
    ended: list[FindingGroup] = []
    for finding in findings:
        before = open_now
        open_now = absorb(before, finding, window).incidents
        ended += (one for one in before if finding.at - one.last > window)
    return (*ended, *open_now)


def _belongs(finding: Finding, incident: FindingGroup) -> bool:
    if finding.injected != incident.lead.injected:
        return False  # a line that a user wrote must never hide the kernel's own
    if finding.subject == incident.lead.subject:
        return True
    after_gpu = incident.lead.check == "gpu_lost" or bool(_REACH_SWITCHES & {*incident.codes})
    return finding.check == "sxid" and after_gpu


def _grow(incident: FindingGroup, finding: Finding) -> FindingGroup:
    graver = SEVERITIES.index(finding.severity) > SEVERITIES.index(incident.lead.severity)
    codes = incident.codes if finding.code in incident.codes else (*incident.codes, finding.code)
    return FindingGroup(
        finding if graver else incident.lead,
        codes,
        max(incident.last, finding.at),
        incident.lines + 1,
    )


def _told(incident: FindingGroup) -> Finding:
    """Return the lead, naming the codes that came before it."""
    others = ", ".join(code for code in incident.codes if code not in ("", incident.lead.code))
    lead = incident.lead
    return msgspec.structs.replace(lead, text=f"{lead.text} (after {others})") if others else lead
