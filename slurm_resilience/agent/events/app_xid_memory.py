"""Remember which jobs faulted on which GPU, over days and restarts, and name a suspect GPU."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import psutil

from slurm_resilience.agent.processes.steps import LocalStep
from slurm_resilience.clock import Clock
from slurm_resilience.health.app_xids import (
    APPLICATION_CODES,
    AppXid,
    SuspectGpu,
    remembered,
    suspect_gpus,
)
from slurm_resilience.model import Finding, Severity

log = logging.getLogger("sresd.app_xids")

CHECK_NAME = "suspect_gpu"
FILE_NAME = "app-xids.json"
SAME_SECONDS = 60.0
"""A program repeats its line for each warp: one Xid of a GPU is looked into once in this time."""
_PID = re.compile(r"\bpid=(\d+)")
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", re.MULTILINE)
GPU_INFORMATION = "/proc/driver/nvidia/gpus"


class AppXidMemory:
    """Takes Xids as they come; `note` is called under the caller's lock."""

    def __init__(
        self, folder: Path, sysroot: Path, steps: Callable[[], Iterable[LocalStep]], clock: Clock
    ) -> None:
        """
        Args:
            folder: on the node's disk; where it cannot be written, a restart forgets.
            sysroot: the driver's description of the GPUs is read below it.
            steps: finds the job steps that run on this node.
            clock: of this machine.
        """
        self._path = folder / FILE_NAME
        self._sysroot = sysroot
        self._steps = steps
        self._clock = clock
        self._looked: dict[tuple[str, str], float] = {}
        self._events = _read(self._path)
        self._named: set[str] = set()

    def note(self, finding: Finding) -> Finding | None:
        """Take an Xid; return the finding of a GPU that has become suspect by it.

        Args:
            finding: of the kernel log or of the driver.
        """
        if finding.check != "xid" or finding.code not in APPLICATION_CODES or finding.injected:
            return None
        now, key = self._clock.now(), (finding.subject, finding.code)
        if 0 <= now - self._looked.get(key, float("-inf")) < SAME_SECONDS:
            return None
        self._looked[key] = now
        owner = _owner(finding, tuple(self._steps()))
        if owner is None:
            return None
        job, user = owner
        gpu = self._identity(finding.subject)
        event = AppXid(gpu, finding.code, job, user, now)
        self._events = remembered((*self._events, event), now)
        self._write()
        for suspect in suspect_gpus(self._events, now):
            if suspect.gpu == gpu and gpu not in self._named:
                self._named.add(gpu)
                return _finding(suspect, finding.subject)
        return None

    def _identity(self, address: str) -> str:
        """Return the GPU's UUID, which goes with the board when it is put into another slot."""
        for folder in (self._sysroot / GPU_INFORMATION.lstrip("/")).glob("*"):
            if folder.name.lower().startswith(address.lower()):
                with contextlib.suppress(OSError):
                    match = _UUID.search((folder / "information").read_text("utf-8", "replace"))
                    if match:
                        return match[1]
        return address

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(self._events))
            new.replace(self._path)


def _owner(finding: Finding, steps: tuple[LocalStep, ...]) -> tuple[int, int] | None:
    """Return the job and the user of an Xid; None: they cannot be told for certain."""
    match = _PID.search(finding.evidence)
    if match is not None:
        pid = int(match[1])
        for step in steps:
            if any(member.pid == pid for member in step.members):
                return _with_user(step)
    # The process may be gone already.
    jobs = {step.job for step in steps}
    if len(jobs) != 1:
        return None
    return next((owner for step in steps if (owner := _with_user(step)) is not None), None)


def _with_user(step: LocalStep) -> tuple[int, int] | None:
    for member in step.members:
        with contextlib.suppress(psutil.Error):
            return step.job, member.uids().real
    return None


def _finding(suspect: SuspectGpu, address: str) -> Finding:
    text = suspect.text
    log.warning("%s", text)
    jobs = ", ".join(map(str, suspect.jobs))
    return Finding(
        CHECK_NAME, Severity.MONITOR, text, suspect.at, subject=address, evidence=f"jobs {jobs}"
    )


def _read(path: Path) -> tuple[AppXid, ...]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[AppXid, ...])
    except (OSError, msgspec.MsgspecError):
        return ()
