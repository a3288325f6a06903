"""Bring a fault about on this machine, or on a node of a lab."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

from slurm_resilience.errors import LabError, SresError, UsageError
from slurm_resilience.inject.fault_catalogue import InjectedFault
from slurm_resilience.inject.sysfs_overlay import OverlayOrder, order_words
from slurm_resilience.lab import Lab, LabSpec, state_file

SYSRQ = Path("/proc/sysrq-trigger")
OVERLAY_SECONDS = 60.0


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
    elif fault.way == "sysfs":
        _lay_over(lab, node, fault)


def end_in_lab(fault: InjectedFault, lab: Lab, node: str) -> None:
    """Let a fault of a lab's node end, of those that do not end by themselves.

    Raises:
        UsageError: it is not one of them, or is not injected.
        SresError: the lab cannot do it.
    """
    if fault.way == "cable":
        lab.mend(node)
    elif fault.way == "sysfs":
        _lay_over(lab, node, fault, undo=True)
    else:
        raise UsageError(f"{fault.name} is over when it has happened: there is nothing to undo")


def _lay_over(lab: Lab, node: str, fault: InjectedFault, undo: bool = False) -> None:
    order = OverlayOrder(str(lab.directory / "keeper.sock"), node, fault.name, undo)
    done = subprocess.run(
        order_words(order),
        env=lab.environment(),
        capture_output=True,
        text=True,
        timeout=OVERLAY_SECONDS,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise (UsageError if done.returncode == UsageError.exit_code else SresError)(said)
