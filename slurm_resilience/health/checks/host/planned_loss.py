"""A notice that this machine goes at a given time: a spot instance that is taken back, say.

`agent.loss_notice` names a file that is there while the notice stands, or an executable that
prints it. What is empty, or not there, is no notice, and neither is FALSE or NONE. A notice asks
for a replacement, so that jobs leave the node before it goes; one that is taken back gives the node
back.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.programs.program_checks import run_program
from slurm_resilience.model import Finding, Severity
from slurm_resilience.trusted_paths import untrusted

NAME = "planned_loss"
PERIOD_SECONDS = 5.0
"""Clouds tell of it two minutes ahead, or half a minute, and want to be asked so often."""
TIMEOUT_SECONDS = 4.0
MAX_BYTES = 4096
MAX_CHARACTERS = 200
_NO_NOTICE = frozenset({"", "false", "none", "null", "no", "0", "[]", "{}"})
"""Clouds that always answer say so, as Google's `preempted` and `maintenance-event` do. Taken for a
notice, it would have each node of the cluster replaced."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?")


def probe(path: Path) -> str:
    """Return the notice; empty: there is none."""
    try:
        # A user must be able neither to run something as root nor to have a node replaced.
        fault = untrusted(path)
        if not fault and not path.is_file():
            fault = f"{path} is no file"  # a FIFO would hold up this check for ever
        if not fault and not os.access(path, os.X_OK):
            with path.open("rb") as file:
                return " ".join(file.read(MAX_BYTES).decode("utf-8", "replace").split())
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise Unjudged(f"{path} cannot be read: {error.strerror}") from None
    if fault:
        raise Unjudged(fault)
    end = run_program(path, TIMEOUT_SECONDS)
    if end.code != 0:
        raise Unjudged(f"{path.name} ended with {end.code}: {end.line}")
    return end.line


def judge(notice: str, context: CheckContext) -> Judgement:
    if notice.lower() in _NO_NOTICE:
        return Judgement("no notice")
    time = _TIME.search(notice)
    text = f"this node goes at {time[0]}" if time else f"this node goes: {notice}"
    text = text[:MAX_CHARACTERS]
    finding = Finding(NAME, Severity.REPLACE, text, context.now, evidence=notice)
    return Judgement(text, (finding,))


def notice_check(file: str) -> Check:
    """Return the check of a file or an executable."""
    return Check(
        NAME,
        lambda context: probe(context.path(file)),
        judge,
        timeout=TIMEOUT_SECONDS + 1.0,
        period=PERIOD_SECONDS,
        source="agent.loss_notice: a file, or what an executable prints",
        threshold="there is a notice",
        asks_for=(Severity.REPLACE,),
    )
