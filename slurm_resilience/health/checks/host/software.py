"""Versions of the kernel, of drivers and of firmware, against those of the last deep check.

Watched, never acted on: a new driver is no fault, but makes another deep check due. A machine that
has had none has nothing to compare with.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

RECORD = "software.json"
"""In checks.state_dir, on the node's own disk: that of another machine has none."""
SOURCES = {
    "kernel": "/proc/sys/kernel/osrelease",
    "NVIDIA driver": "/proc/driver/nvidia/version",
    "EFA driver": "/sys/module/efa/version",
    "Neuron driver": "/sys/module/neuron/version",
    "BIOS": "/sys/class/dmi/id/bios_version",
}
DRIVERS = ("NVIDIA driver", "EFA driver", "Neuron driver")
_VERSION = re.compile(r"\d+(?:\.\d+)+\w*")
FABRIC_FIRMWARE = "/sys/class/infiniband"
MAX_CHARACTERS = 100


class SoftwareSeen(NamedTuple):
    """Versions by what they are of."""

    now: dict[str, str]
    checked: dict[str, str] | None = None
    """Those of the last deep check that passed; None: there was none."""


def versions(context: CheckContext) -> dict[str, str]:
    """Return the versions of what this machine has."""
    found = {}
    for name, path in SOURCES.items():
        with contextlib.suppress(OSError):
            text = context.path(path).read_text("utf-8", "replace").strip()
            found[name] = text.splitlines()[0][:MAX_CHARACTERS] if text else ""
    firmware = set()
    for device in context.path(FABRIC_FIRMWARE).glob("*"):
        with contextlib.suppress(OSError):
            firmware.add((device / "fw_ver").read_text("utf-8", "replace").strip())
    if firmware:
        found["fabric firmware"] = ", ".join(sorted(firmware))[:MAX_CHARACTERS]
    return found


def drivers(context: CheckContext) -> tuple[str, ...]:
    """Return the drivers that this machine has, each with its version."""
    texts = versions(context)
    found = {name: _VERSION.search(texts.get(name, "")) for name in DRIVERS}
    return tuple(f"{name} {version[0]}" for name, version in found.items() if version)


def _record(context: CheckContext) -> Path:
    return context.path(context.settings.state_dir) / RECORD


def remember(context: CheckContext) -> None:
    """Write down that this machine has passed a deep check with what it has now. Where that cannot
    be written, the next check stays due."""
    path = _record(context)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(versions(context)))
        new.replace(path)


def probe(context: CheckContext) -> SoftwareSeen:
    checked = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        checked = msgspec.json.decode(_record(context).read_bytes(), type=dict[str, str])
    return SoftwareSeen(versions(context), checked)


def judge(seen: SoftwareSeen, context: CheckContext) -> Judgement:
    if seen.checked is None:
        return Judgement("no deep check has passed on this machine")
    changes = [
        f"{name} {seen.checked.get(name, 'none')} → {seen.now.get(name, 'none')}"
        for name in sorted({*seen.now, *seen.checked})
        if seen.now.get(name) != seen.checked.get(name)
    ]
    if not changes:
        return Judgement("as at the last deep check")
    text = f"since its last deep check: {'; '.join(changes)}"
    return Judgement(text, (Finding(CHECK.name, Severity.MONITOR, text, context.now),))


CHECK = Check(
    "software",
    probe,
    judge,
    period=300.0,
    source="/proc/sys/kernel/osrelease, versions of drivers and firmware",
    threshold="another one than at the last deep check that passed",
    asks_for=(Severity.MONITOR,),
)
