"""The site's list of services that must run on a node, as systemd sees them.

Watched, never acted on: a service that does not run is configuration, or has its own way back.
"""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity

SYSTEMD = "/run/systemd/system"
"""Exists where systemd runs the machine (sd_booted(3))."""
TOOL_SECONDS = 10.0
RUNNING = frozenset({"active", "reloading", "activating"})
PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState")


class ServiceState(NamedTuple):
    """One unit, in systemd's words; ``name`` is as the site wrote it."""

    name: str
    load: str
    active: str
    sub: str


def absent(context: CheckContext) -> str:
    if not context.settings.services:
        return "checks.services names none"
    if not context.path(SYSTEMD).is_dir():
        raise Unjudged("systemd does not run this machine")
    return ""


def probe(context: CheckContext) -> tuple[ServiceState, ...]:
    wanted = context.settings.services
    words = ["systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", *wanted]
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=TOOL_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise Unjudged("systemctl is not installed") from None
    except subprocess.TimeoutExpired:
        raise Unjudged(f"no answer of systemd within {TOOL_SECONDS:g} s") from None
    return read_states(wanted, done.stdout.decode("utf-8", "replace"))


def read_states(wanted: tuple[str, ...], text: str) -> tuple[ServiceState, ...]:
    """Return the units that `systemctl show` tells of: a paragraph each, in the order asked for.

    Raises:
        Unjudged: it told of another number of units.
    """
    paragraphs = [
        dict(line.split("=", 1) for line in part.splitlines() if "=" in line)
        for part in text.strip().split("\n\n")
        if part.strip()
    ]
    if len(paragraphs) != len(wanted):
        raise Unjudged(f"systemd told of {len(paragraphs)} of {len(wanted)} services")
    return tuple(
        ServiceState(name, *(facts.get(key, "") for key in PROPERTIES[1:]))
        for name, facts in zip(wanted, paragraphs, strict=True)
    )


def judge(seen: tuple[ServiceState, ...], context: CheckContext) -> Judgement:
    findings = tuple(
        Finding(
            CHECK.name,
            Severity.MONITOR,
            _words(one),
            context.now,
            subject=one.name,
            evidence=f"{one.load} {one.active} {one.sub}",
        )
        for one in seen
        if one.active not in RUNNING
    )
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen)} services run", findings)


def _words(one: ServiceState) -> str:
    if one.load != "loaded":
        return f"service {one.name} cannot run: {one.load or 'unknown'}"
    return f"service {one.name} does not run: {one.active or 'unknown'} ({one.sub})"


CHECK = Check(
    "services",
    probe,
    judge,
    timeout=30.0,
    in_child=True,
    absent=absent,
    source="systemctl show, checks.services",
    threshold="not active",
    asks_for=(Severity.MONITOR,),
)
