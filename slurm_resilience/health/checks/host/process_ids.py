"""Process numbers of the whole node, against the kernel's limit.

Every thread takes one. Watched, never acted on: a program makes them. Default 80 % (gpud; AWS's
agent warns at 70).
"""

from __future__ import annotations

from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity

FILE = "/proc/loadavg"
LIMITS = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")
PERCENT = 80.0


class ProcessIds(NamedTuple):
    in_use: int
    limit: int
    """The lower one of the kernel's two limits."""


def probe(context: CheckContext) -> ProcessIds:
    # The fourth field: threads that run, and all threads.
    fields = context.path(FILE).read_text("utf-8").split()
    threads = fields[3].partition("/")[2] if len(fields) > 3 else ""
    limits = [context.path(name).read_text("utf-8").strip() for name in LIMITS]
    if not all(number.isdecimal() for number in (threads, *limits)):
        raise Unjudged(f"{FILE} or {' or '.join(LIMITS)} is not understood")
    return ProcessIds(int(threads), min(map(int, limits)))


def judge(seen: ProcessIds, context: CheckContext) -> Judgement:
    percent = 100 * seen.in_use / seen.limit if seen.limit else 0.0
    text = f"{seen.in_use} of {seen.limit} process numbers are taken"
    if percent <= PERCENT:
        return Judgement(text)
    text = f"{text} (limit {PERCENT:g} %)"
    return Judgement(text, (Finding(CHECK.name, Severity.MONITOR, text, context.now),))


CHECK = Check(
    "process_ids",
    probe,
    judge,
    source=f"{FILE}, {', '.join(LIMITS)}",
    threshold=f"{PERCENT:g} % of pid_max or of threads-max",
    asks_for=(Severity.MONITOR,),
)
