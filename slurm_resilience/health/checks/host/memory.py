"""Memory that is missing: a module that the firmware mapped out after errors.

MemTotal against Slurm's RealMemory for this node; default tolerance 5 % (NHC's check_hw_physmem),
because the kernel keeps some for itself. slurmd checks this too, but only when it registers.
"""

from __future__ import annotations

import re

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity


def probe(context: CheckContext) -> int:
    """MemTotal in MiB."""
    text = context.path("/proc/meminfo").read_text("utf-8")
    total = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    if not total:
        raise Unjudged("/proc/meminfo has no MemTotal")
    return int(total[1]) // 1024


def judge(have: int, context: CheckContext) -> Judgement:
    wanted = context.expected.memory
    if not wanted:
        raise Unjudged(f"{have} MiB; what Slurm expects is unknown")
    least = wanted * (1 - context.settings.memory_tolerance_percent / 100)
    text = f"{have} MiB of memory, Slurm expects {wanted} MiB"
    if have >= least:
        return Judgement(text)
    finding = Finding(
        check=CHECK.name,
        severity=Severity.REPLACE,
        text=f"{text} (tolerance {context.settings.memory_tolerance_percent:g} %)",
        at=context.now,
        evidence=f"MemTotal {have} MiB",
    )
    return Judgement(finding.text, (finding,))


CHECK = Check(
    "memory",
    probe,
    judge,
    source="/proc/meminfo, Slurm's RealMemory",
    threshold="memory_tolerance_percent (5) missing",
    asks_for=(Severity.REPLACE,),
)
