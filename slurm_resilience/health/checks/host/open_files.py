"""Open files of the whole node, against the kernel's limit.

Watched, never acted on: a program holds them. Default 80 % (gpud; AWS's agent warns at 70).
"""

from __future__ import annotations

from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity

FILE = "/proc/sys/fs/file-nr"


class OpenFiles(NamedTuple):
    in_use: int
    limit: int


def probe(context: CheckContext) -> OpenFiles:
    fields = context.path(FILE).read_text("utf-8").split()
    if len(fields) != 3 or not all(field.isdecimal() for field in fields):
        raise Unjudged(f"{FILE} is not understood")
    return OpenFiles(int(fields[0]), int(fields[2]))


def judge(seen: OpenFiles, context: CheckContext) -> Judgement:
    percent = 100 * seen.in_use / seen.limit if seen.limit else 0.0
    limit = context.settings.open_files_percent
    text = f"{seen.in_use} of {seen.limit} files are open"
    if percent <= limit:
        return Judgement(text)
    text = f"{text} (limit {limit:g} %)"
    return Judgement(text, (Finding(CHECK.name, Severity.MONITOR, text, context.now),))


CHECK = Check(
    "open_files",
    probe,
    judge,
    source=FILE,
    threshold="open_files_percent (80)",
    asks_for=(Severity.MONITOR,),
)
