"""Several lines, one trouble: findings of the kernel log grouped into incidents. Pure.

A failing GPU says it in several ways: 48, 63 and 94 within 30 ms are one memory error, 79 is
followed by errors of every switch the GPU hung on, and a faulting program repeats its line for each
warp. An incident is reported when it begins and when it gets graver, not for every line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from slurm_resilience.health.line_rules.line_judge import ALL_RULES
from slurm_resilience.model import FAULTY, SEVERITIES, Finding, Severity

WINDOW_SECONDS = 60.0
"""Quiet time that ends an incident. Seen: 48→94 30 ms, 13→109 5 s, 79→switch errors 12 s."""

CANCELS = {("xid", "162"): "163"} | {
    (rule.check, rule.code): rule.clears for rule in ALL_RULES if rule.clears
}
"""Check and code of a line → the code whose trouble it ends: Xid 162 says that power smoothing is
on again, a file server that it answers."""

_REACH_SWITCHES = frozenset({"74", "79", *map(str, range(144, 151))})
"""GPU errors that make the NVSwitches behind it report errors of their own."""


class FindingGroup(NamedTuple):
    """One trouble. ``lead`` is its gravest finding, the first of equals."""

    lead: Finding
    codes: tuple[str, ...]
    """Each code once, in the order of appearance."""
    last: float
    lines: int = 1
    first: float = 0.0


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
    if cancelled := CANCELS.get((finding.check, finding.code)):
        rest = tuple(
            one for one in still_open if one.lead.key != (finding.check, finding.subject, cancelled)
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
    new = FindingGroup(finding, (finding.code,), finding.at, first=finding.at)
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
    lead = incident.lead
    if finding.subject == lead.subject and (finding.subject or finding.check == lead.check):
        return True
    if finding.check == lead.check and not (finding.subject and lead.subject):
        return True  # one of the two lines of a trouble does not name the part
    after_gpu = incident.lead.check == "gpu_lost" or bool(_REACH_SWITCHES & {*incident.codes})
    return finding.check == "sxid" and after_gpu


def _grow(incident: FindingGroup, finding: Finding) -> FindingGroup:
    codes = incident.codes if finding.code in incident.codes else (*incident.codes, finding.code)
    return incident._replace(
        lead=finding if _takes_the_lead(finding, incident.lead) else incident.lead,
        codes=codes,
        last=max(incident.last, finding.at),
        lines=incident.lines + 1,
    )


def _takes_the_lead(finding: Finding, lead: Finding) -> bool:
    """Tell whether a new line decides for its incident: the graver one does, but the driver's own
    word (Xid 154) comes before the table. It knows no replacement, so that stays."""
    if finding.severity is lead.severity:
        return False
    if _is_drivers_word(finding) and lead.severity is not Severity.REPLACE:
        return True
    return SEVERITIES.index(finding.severity) > SEVERITIES.index(lead.severity)


def _is_drivers_word(finding: Finding) -> bool:
    return (finding.check, finding.code) == ("xid", "154") and finding.severity in FAULTY


def _told(incident: FindingGroup) -> Finding:
    """Return the lead, naming the codes that came before it."""
    others = ", ".join(code for code in incident.codes if code not in ("", incident.lead.code))
    lead = incident.lead
    return msgspec.structs.replace(lead, text=f"{lead.text} (after {others})") if others else lead
