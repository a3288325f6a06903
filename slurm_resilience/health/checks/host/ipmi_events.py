"""Events that the machine's management controller has logged since the node booted.

Older ones stay in its log for years, so they say nothing of the machine as it is. The controller's
clock is compared with the node's: it is often set to local time, or wrong.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.documents.tool_text import judge_ipmi_events
from slurm_resilience.model import Finding, Severity

DEVICES = ("/dev/ipmi0", "/dev/ipmi/0", "/dev/ipmidev/0")
TOOL_SECONDS = 60.0
_STAMP = re.compile(r"(\d{2}/\d{2}/(?:\d{4}|\d{2}))\s*(?:\|\s*)?(\d{2}:\d{2}:\d{2})")
_BOOTED = re.compile(r"^btime (\d+)$", re.M)


class ControllerLog(NamedTuple):
    events: str
    """The text of `ipmitool sel elist`."""
    clock: str
    """The text of `ipmitool sel time get`."""
    at: float
    """When ipmitool was asked for it, seconds since the epoch."""
    booted: float
    """When the node booted, seconds since the epoch."""


def absent(context: CheckContext) -> str:
    if any(context.path(device).exists() for device in DEVICES):
        return ""
    return f"no management controller ({DEVICES[0]})"


def probe(context: CheckContext) -> ControllerLog:
    ipmitool = shutil.which("ipmitool")
    if ipmitool is None:
        raise Unjudged("ipmitool is not installed")
    booted = _BOOTED.search(context.path("/proc/stat").read_text("utf-8", "replace"))
    if booted is None:
        raise Unjudged("/proc/stat does not say when the node booted")
    events = _ask(ipmitool, "elist")
    return ControllerLog(events, _ask(ipmitool, "time", "get"), context.now, float(booted[1]))


def _ask(ipmitool: str, *words: str) -> str:
    try:
        done = subprocess.run(
            [ipmitool, "sel", *words],
            capture_output=True,
            timeout=TOOL_SECONDS,
            stdin=subprocess.DEVNULL,
            # Its newer releases write dates as the locale and the time zone say.
            env={"LC_ALL": "C", "TZ": "UTC"},
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise Unjudged(f"ipmitool: no answer within {TOOL_SECONDS:g} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise Unjudged(f"ipmitool: {said[-1]}")
    return done.stdout


def judge(seen: ControllerLog, context: CheckContext) -> Judgement:
    clock = _stamp(seen.clock)
    if clock is None:
        raise Unjudged("the management controller does not tell its time")
    since = seen.booted + clock - seen.at
    lines = [line for line in seen.events.splitlines() if (_stamp(line) or 0.0) > since]
    latest: dict[tuple[str, str], Finding] = {}
    for line in lines:
        for one in judge_ipmi_events(line).findings:
            latest[(one.subject, one.code)] = msgspec.structs.replace(
                one, check=CHECK.name, at=context.now
            )
    findings = tuple(latest.values())
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(lines)} events since the node booted, none a fault", findings)


def _stamp(text: str) -> float | None:
    """Return a time of the controller's clock, in seconds; None where there is none."""
    found = _STAMP.search(text)
    if found is None:
        return None
    year = "%Y" if len(found[1]) == len("12/31/2026") else "%y"
    try:
        stamp = datetime.strptime(f"{found[1]} {found[2]}", f"%m/%d/{year} %H:%M:%S")
    except ValueError:
        return None
    return stamp.replace(tzinfo=UTC).timestamp()


CHECK = Check(
    "ipmi_events",
    probe,
    judge,
    timeout=150.0,
    period=1800.0,
    in_child=True,
    absent=absent,
    is_slow=True,
    source="ipmitool sel elist",
    threshold="an event since the node booted: a fatal bus or processor error, an uncorrectable "
    "memory error; others are watched",
    asks_for=(Severity.REPLACE, Severity.REBOOT, Severity.MONITOR),
)
