"""The frequency that the processors may reach: a cap below it, and the governor of the profile.

Watched, never acted on: it is configuration, or the firmware's answer to heat or a lost power
supply.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/devices/system/cpu/cpufreq"


class CpuPolicy(NamedTuple):
    """Some processors that share a frequency; in kHz, 0 where it is not known."""

    name: str
    governor: str
    allowed: int
    highest: int


def absent(context: CheckContext) -> str:
    return "" if any(context.path(ROOT).glob("policy[0-9]*")) else "the kernel sets no frequency"


def probe(context: CheckContext) -> tuple[CpuPolicy, ...]:
    return tuple(
        CpuPolicy(
            folder.name,
            _text(folder / "scaling_governor"),
            _number(folder / "scaling_max_freq"),
            _number(folder / "cpuinfo_max_freq"),
        )
        for folder in sorted(context.path(ROOT).glob("policy[0-9]*"))
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def judge(seen: tuple[CpuPolicy, ...], context: CheckContext) -> Judgement:
    wanted = context.expected.profile.cpu_governor
    capped = [one for one in seen if 0 < one.allowed < one.highest]
    others = [one for one in seen if wanted and one.governor and one.governor != wanted]
    findings = []
    if capped:
        least = min(capped, key=lambda one: one.allowed / one.highest)
        text = (
            f"{len(capped)} of {len(seen)} processors are capped: {least.name} at "
            f"{least.allowed // 1000} of {least.highest // 1000} MHz"
        )
        findings.append(Finding(CHECK.name, Severity.MONITOR, text, context.now, code="capped"))
    if others:
        text = (
            f"{len(others)} of {len(seen)} processors have the governor {others[0].governor}, "
            f"the profile expects {wanted}"
        )
        findings.append(Finding(CHECK.name, Severity.MONITOR, text, context.now, code="governor"))
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen)} processors may run at full speed", tuple(findings))


CHECK = Check(
    "cpu_frequency",
    probe,
    judge,
    period=600.0,
    absent=absent,
    source=f"{ROOT}/policy*/{{scaling_governor,scaling_max_freq,cpuinfo_max_freq}}",
    threshold="a cap below the highest frequency; another governor than the profile's cpu_governor",
    asks_for=(Severity.MONITOR,),
)
