"""Bring a fault about on this machine, or on a node of a lab."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from slurm_resilience.errors import LabError, SresError
from slurm_resilience.inject.fault_catalogue import InjectedFault
from slurm_resilience.lab import Lab, LabSpec, state_file

SYSRQ = Path("/proc/sysrq-trigger")


def write_lines(kernel_log: Path, lines: Iterable[str]) -> None:
    """Write lines into a kernel log, each as one record.

    Raises:
        SresError: they could not be written.
    """
    try:
        if not _is_kernel_log(kernel_log):
            raise SresError(f"{kernel_log} is neither a kernel log device nor a FIFO")
        log = os.open(kernel_log, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for line in lines:
                os.write(log, f"{line}\n".encode())
        finally:
            os.close(log)
    except OSError as error:
        reason = "nothing reads it" if error.errno == errno.ENXIO else error.strerror
        raise SresError(f"{kernel_log} cannot be written: {reason}") from None


def _is_kernel_log(path: Path) -> bool:
    mode = path.stat().st_mode
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def crash(sysrq: Path = SYSRQ) -> None:
    """Crash this machine's kernel. There is no return where it works.

    Raises:
        SresError: the kernel did not take it.
    """
    try:
        sysrq.write_text("c", encoding="ascii")
    except OSError as error:
        raise SresError(f"{sysrq} cannot be written: {error.strerror}") from None


def lab_of(name_or_directory: str) -> Lab:
    """Return a lab, from outside as from inside of it, where its keeper cannot be seen.

    Raises:
        LabError: there is none.
    """
    directory = state_file.locate(name_or_directory)
    try:
        spec = LabSpec.from_json((directory / state_file.MARK).read_text())
    except (OSError, ValueError):
        raise LabError(f"no lab in {directory}; {state_file.HINT}") from None
    return Lab(directory.name, directory, spec)


def happen_in_lab(fault: InjectedFault, lab: Lab, node: str) -> None:
    """Let a fault that is more than a line happen to a node of a lab.

    Raises:
        SresError: the lab cannot do it.
    """
    if fault.way == "crash":
        lab.power_off(node)
    elif fault.way == "cable":
        lab.cut(node)
