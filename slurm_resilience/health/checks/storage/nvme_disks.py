"""The health of NVMe disks: their state in /sys, and their own log by smartctl or nvme-cli.

Unjudged where neither tool is installed. A disk that is gone asks for a reboot, as its line in the
kernel log does; one that wears out or lost data asks for a replacement.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.documents.smart_log import judge_smart_log, recognises_smart_log
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/class/nvme"
TOOL_SECONDS = 10.0
MAX_DISKS = 64
GONE = frozenset({"dead", "deleting", "deleting (no IO)"})


class NvmeDisk(NamedTuple):
    name: str
    state: str
    """In the kernel's words: `live`, `dead`, `resetting`."""
    log: dict[str, Any] | None = None
    why: str = ""
    """The reason why there is no log."""


def _controllers(context: CheckContext) -> list[Path]:
    """Return the controllers of disks in this machine, not those behind a network."""
    found = sorted(context.path(ROOT).glob("nvme[0-9]*"))
    return [one for one in found if _text(one / "transport") in ("", "pcie")][:MAX_DISKS]


def absent(context: CheckContext) -> str:
    return "" if _controllers(context) else "no NVMe disk"


def probe(context: CheckContext) -> tuple[NvmeDisk, ...]:
    return tuple(_look(folder) for folder in _controllers(context))


def _look(folder: Path) -> NvmeDisk:
    name, state = folder.name, _text(folder / "state")
    if state in GONE:
        return NvmeDisk(name, state)
    device = f"/dev/{name}"
    if smartctl := shutil.which("smartctl"):
        return _read(name, state, [smartctl, "-j", "-H", "-A", device])
    if nvme := shutil.which("nvme"):
        return _read(name, state, [nvme, "smart-log", device, "-o", "json"])
    return NvmeDisk(name, state, None, "neither smartctl nor nvme is installed")


def _read(name: str, state: str, words: list[str]) -> NvmeDisk:
    """Ask a tool; its exit code says no more than what it prints."""
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=TOOL_SECONDS, stdin=subprocess.DEVNULL
        )
        log = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return NvmeDisk(name, state, None, f"no answer within {TOOL_SECONDS:g} s")
    except (OSError, ValueError):
        return NvmeDisk(name, state, None, f"{Path(words[0]).name} printed no log")
    if not recognises_smart_log(log):
        return NvmeDisk(name, state, None, f"{Path(words[0]).name} printed another document")
    return NvmeDisk(name, state, log)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def judge(seen: tuple[NvmeDisk, ...], context: CheckContext) -> Judgement:
    findings: list[Finding] = []
    unjudged: list[str] = []
    for disk in seen:
        if disk.state in GONE:
            text = f"{disk.name} is gone: its state is {disk.state}"
            findings.append(
                Finding(CHECK.name, Severity.REBOOT, text, context.now, disk.name, "gone")
            )
        elif disk.log is None:
            unjudged.append(f"{disk.name}: {disk.why}")
        else:
            reading = judge_smart_log(disk.log)
            findings += [
                msgspec.structs.replace(
                    one,
                    check=CHECK.name,
                    at=context.now,
                    subject=disk.name,
                    text=f"{disk.name}: {one.text.partition(': ')[2]}",
                )
                for one in reading.findings
            ]
            unjudged += [f"{disk.name}: {why}" for why in reading.unjudged]
    if unjudged and not findings:
        raise Unjudged("; ".join(unjudged))
    text = "; ".join([*(one.text for one in findings), *unjudged])
    return Judgement(text or f"{len(seen)} NVMe disks without a fault", tuple(findings))


CHECK = Check(
    "nvme_disks",
    probe,
    judge,
    timeout=120.0,
    period=1800.0,
    in_child=True,
    absent=absent,
    source=f"{ROOT}/*/state; smartctl -j or nvme smart-log",
    threshold="gone; spare blocks below its own threshold; a critical warning; life used: 80 % "
    "watched, 100 % replaced",
    asks_for=(Severity.REPLACE, Severity.REBOOT, Severity.MONITOR),
)
