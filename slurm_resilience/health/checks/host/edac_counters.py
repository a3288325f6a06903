"""Errors that the memory controllers counted since the node booted.

Uncorrected errors lost data: the module has to go. Corrected ones are ordinary in small numbers, so
only their growth while sresd runs is watched (mcelog warns at 10 in a day).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/devices/system/edac/mc"


class MemoryErrors(NamedTuple):
    """The counters of one module, or of a controller that counts no modules."""

    name: str
    uncorrected: int
    corrected: int


def probe(context: CheckContext) -> tuple[MemoryErrors, ...]:
    found = []
    for controller in sorted(context.path(ROOT).glob("mc[0-9]*")):
        modules = sorted([*controller.glob("dimm[0-9]*"), *controller.glob("rank[0-9]*")])
        counted = [_counters(controller.name, module, "dimm_") for module in modules]
        found += counted or [_counters("", controller, "")]
    return tuple(found)


def _counters(controller: str, folder: Path, prefix: str) -> MemoryErrors:
    label = _text(folder / "dimm_label") or folder.name
    name = f"{controller} {label}".strip()
    return MemoryErrors(
        name, _number(folder / f"{prefix}ue_count"), _number(folder / f"{prefix}ce_count")
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def judge(seen: tuple[MemoryErrors, ...], context: CheckContext) -> Judgement:
    first = {one.name: one for one in (context.first or seen)}
    limit = context.settings.corrected_memory_errors
    findings = []
    for one in seen:
        grown = one.corrected - first.get(one.name, one).corrected
        if one.uncorrected:
            text = f"{one.name}: {one.uncorrected} uncorrected memory errors"
            findings.append(_finding(Severity.REPLACE, text, one, context.now))
        elif grown >= limit:
            text = f"{one.name}: {grown} corrected memory errors (limit {limit})"
            findings.append(_finding(Severity.MONITOR, text, one, context.now))
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen)} memory modules counted no error", tuple(findings))


def _finding(severity: Severity, text: str, errors: MemoryErrors, now: float) -> Finding:
    evidence = f"uncorrected {errors.uncorrected}, corrected {errors.corrected}"
    return Finding(CHECK.name, severity, text, now, subject=errors.name, evidence=evidence)


CHECK = Check(
    "edac_counters",
    probe,
    judge,
    source=f"{ROOT}/mc*/dimm*/dimm_{{ue,ce}}_count",
    threshold="any uncorrected; corrected_memory_errors (10) since sresd started",
    asks_for=(Severity.REPLACE, Severity.MONITOR),
)
