"""DCGM's background watches, where its host engine runs: what it saw in the last minutes.

DCGM that is not installed, or whose host engine is away, says nothing of the node: unjudged. Its
watches are switched on where they are off; they read, and disturb no job.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.checks.gpu.nvml_session import no_nvidia_gpu
from slurm_resilience.health.dcgm_tool import ALL_GPUS, ask_dcgmi, has_dcgmi
from slurm_resilience.health.documents.dcgm_watches import (
    judge_dcgm_health,
    recognises_dcgm_health,
)
from slurm_resilience.model import Severity

MAX_SAID_CHARACTERS = 200
NOT_INSTALLED = "DCGM is not installed (dcgmi)"
_OFF = "watches not enabled"


class DcgmSaid(NamedTuple):
    """The document of `dcgmi health -c -j`."""

    document: dict[str, Any]


def absent(context: CheckContext) -> str:
    why = no_nvidia_gpu(context)
    if not why and not has_dcgmi():
        raise Unjudged(NOT_INSTALLED)  # before a process is started for it
    return why


def probe(context: CheckContext) -> DcgmSaid:
    said = _ask("-c", "-j")
    if _OFF in said:
        _ask("-s", "a")
        raise Unjudged("DCGM's watches were off, and are switched on now")
    try:
        document, _ = json.JSONDecoder().raw_decode(said, said.index("{"))
    except (ValueError, RecursionError):
        document = None
    if not recognises_dcgm_health(document):
        plain = " ".join(said.split())[:MAX_SAID_CHARACTERS] or "nothing"
        raise Unjudged(f"dcgmi printed no document; it said: {plain}")
    return DcgmSaid(document)


def _ask(*words: str) -> str:
    try:
        return ask_dcgmi("health", "-g", ALL_GPUS, *words)
    except SresError as error:
        raise Unjudged(str(error)) from None


def judge(seen: DcgmSaid, context: CheckContext) -> Judgement:
    reading = judge_dcgm_health(seen.document)
    if reading.unjudged:
        raise Unjudged("; ".join(reading.unjudged))
    findings = tuple(
        msgspec.structs.replace(
            one,
            check=CHECK.name,
            at=context.now,
            severity=_of_a_number(one.severity),
            injected=context.is_drill,
        )
        for one in reading.findings
    )
    text = "; ".join(one.text for one in findings)
    return Judgement(text or "DCGM's watches see no fault", findings)


def _of_a_number(severity: Severity) -> Severity:
    """Return what a finding asks for whose GPU is only a number of DCGM's: a reset needs its
    address, and one finding without it would keep the others from being reset. Nor would it ever
    end, since DCGM keeps an Xid until its host engine is started anew. NVML, the kernel log and
    DCGM's policies tell the same when it comes."""
    return Severity.MONITOR if severity is Severity.RESET else severity


CHECK = Check(
    "dcgm_health",
    probe,
    judge,
    timeout=60.0,
    period=300.0,
    in_child=True,
    absent=absent,
    source="dcgmi health -c -j",
    threshold="an incident of DCGM's watches; an Xid as in the kernel log; a text that no rule "
    "knows is watched, and so is what asks for a reset, since no address is named",
    asks_for=(
        Severity.REPLACE,
        Severity.REBOOT,
        Severity.JOB,
        Severity.MONITOR,
    ),
)
