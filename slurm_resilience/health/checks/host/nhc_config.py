"""The lines of a configuration of NHC, for a site that has one.

`checks.nhc_config` names the file. A line that fails asks for what `checks.nhc_asks_for` says; one
that is not understood is named, and neither passes nor fails.
"""

from __future__ import annotations

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.nhc.nhc_facts import read_facts_for
from slurm_resilience.health.nhc.nhc_lines import parse_nhc
from slurm_resilience.health.nhc.nhc_rules import KNOWN_CHECKS, NhcOutcome, judge_line
from slurm_resilience.model import Finding, Severity
from slurm_resilience.trusted_paths import untrusted

HOST = "/proc/sys/kernel/hostname"
NAMED = 3
"""Lines that the text names."""


def absent(context: CheckContext) -> str:
    return "" if context.settings.nhc_config else "checks.nhc_config names no file"


def probe(context: CheckContext) -> tuple[NhcOutcome, ...]:
    """Return the outcome of each line: judged here, in a process that can be killed, since a site's
    regular expressions meet the names of users' processes."""
    file = context.settings.nhc_config
    try:
        # A user must not be able to have a node replaced.
        if fault := untrusted(context.path(file)):
            raise Unjudged(fault)
        text = context.path(file).read_text("utf-8", "replace")
        host = context.path(HOST).read_text("utf-8").strip()
    except OSError as error:
        raise Unjudged(f"{error.filename} cannot be read: {error.strerror}") from None
    lines = parse_nhc(text, host)
    facts = read_facts_for(lines, context)
    return tuple(judge_line(line, facts) for line in lines)


def judge(seen: tuple[NhcOutcome, ...], context: CheckContext) -> Judgement:
    severity = Severity(context.settings.nhc_asks_for)
    findings = tuple(
        Finding(
            CHECK.name,
            severity if one.fatal else Severity.MONITOR,
            one.trouble,
            context.now,
            subject=one.line,
            evidence=f"line {one.number}: {one.line}",
        )
        for one in seen
        if one.trouble
    )
    unknown = [f"line {one.number}: {one.not_judged}" for one in seen if one.not_judged]
    more = f"; and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
    not_judged = "; ".join(unknown[:NAMED]) + more
    if unknown and not findings:
        raise Unjudged(f"{len(seen) - len(unknown)} of {len(seen)} lines hold; {not_judged}")
    text = "; ".join([*(one.text for one in findings[:NAMED]), *filter(None, [not_judged])])
    return Judgement(text or f"{len(seen)} lines of NHC hold", findings)


CHECK = Check(
    "nhc_config",
    probe,
    judge,
    timeout=60.0,
    period=300.0,
    in_child=True,
    absent=absent,
    source=f"checks.nhc_config: {', '.join(KNOWN_CHECKS)}",
    threshold="a line does not hold",
    asks_for=(Severity.MONITOR, Severity.RESET, Severity.REBOOT, Severity.REPLACE),
)
