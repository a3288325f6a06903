"""Errors that PCIe devices counted while sresd runs (advanced error reporting).

Nonfatal is not fatal: the driver recovers the device. A fatal error takes the device off its link
until the node boots.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/bus/pci/devices"
CORRECTED_LIMIT = 1000
"""Corrected errors of one device since sresd started that are worth watching."""


class PcieErrors(NamedTuple):
    """The counters of one device."""

    device: str
    fatal: int
    nonfatal: int
    corrected: int


def probe(context: CheckContext) -> tuple[PcieErrors, ...]:
    found = []
    for folder in sorted(context.path(ROOT).glob("*")):
        try:
            texts = [
                (folder / f"aer_dev_{kind}").read_text("utf-8")
                for kind in ("fatal", "nonfatal", "correctable")
            ]
        except OSError:
            continue  # a device without advanced error reporting
        found.append(PcieErrors(folder.name, *map(_total, texts)))
    return tuple(found)


def _total(text: str) -> int:
    match = re.search(r"^TOTAL_ERR_\w+ (\d+)", text, re.M)
    return int(match[1]) if match else 0


def judge(seen: tuple[PcieErrors, ...], context: CheckContext) -> Judgement:
    first = {one.device: one for one in (context.first or seen)}
    findings = []
    for one in seen:
        before = first.get(one.device, one)
        if fatal := one.fatal - before.fatal:
            severity, text = Severity.REBOOT, f"{fatal} fatal PCIe errors"
        elif nonfatal := one.nonfatal - before.nonfatal:
            severity, text = Severity.MONITOR, f"{nonfatal} uncorrected PCIe errors, not fatal"
        elif (corrected := one.corrected - before.corrected) >= CORRECTED_LIMIT:
            text = f"{corrected} corrected PCIe errors (limit {CORRECTED_LIMIT})"
            severity = Severity.MONITOR
        else:
            continue
        said = f"{one.device}: {text} since sresd started"
        findings.append(
            Finding(CHECK.name, severity, said, context.now, subject=one.device, evidence=str(one))
        )
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen)} PCIe devices counted no new error", tuple(findings))


CHECK = Check(
    "pcie_errors",
    probe,
    judge,
    source=f"{ROOT}/*/aer_dev_{{fatal,nonfatal,correctable}}",
    threshold=f"any fatal; any nonfatal; {CORRECTED_LIMIT} corrected, since sresd started",
    asks_for=(Severity.REBOOT, Severity.MONITOR),
)
