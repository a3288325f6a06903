"""The program hook: any executable replaces or reboots a node, called as ``PROGRAM ACTION NODE``.

A run is a directory. To make the directory is to start the run, so no run is started twice; its
files tell the state of the run, also after a restart of sresctld.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import psutil

from slurm_resilience.errors import SresError


class Run(msgspec.Struct, frozen=True):
    """The facts about one run of the program."""

    state: Literal["running", "ended", "lost"]
    """``lost``: it is gone without an exit code (the machine was rebooted, or a user killed it)."""
    rc: int = -1
    output: str = ""
    """The last lines it printed."""
    ended_at: float = 0.0


class RunHost(Protocol):
    """The machine on which runs are started. The simulator has one of its own."""

    def make(self, directory: Path) -> None:
        """Make a run's directory, which must not exist."""
        ...

    def spawn(self, argv: Sequence[str]) -> int:
        """Start a process that outlives this one; its id."""
        ...

    def started(self, pid: int) -> str:
        """Return a process's start time: with the pid it names one process for good."""
        ...

    def terminate(self, pid: int) -> None:
        """Send SIGTERM to a process."""
        ...

    def reap(self) -> None:
        """Take note of children that have ended."""
        ...


class ThisHost:
    """The machine that sresctld runs on."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def make(self, directory: Path) -> None:
        directory.mkdir(parents=True)

    def spawn(self, argv: Sequence[str]) -> int:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,
        )
        self._children.append(child)
        return child.pid

    def started(self, pid: int) -> str:
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return "zombie"
            return f"{process.create_time():.2f}"
        except psutil.Error:
            return "gone"

    def terminate(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)

    def reap(self) -> None:
        for child in list(self._children):
            if child.poll() is not None:
                self._children.remove(child)


THIS_HOST: RunHost = ThisHost()

RUNNER_START_SECONDS = 20.0
"""A run may take this long until its runner has written down its process id."""


class RunExists(SresError):
    """This run was started before."""


def start(
    directory: Path,
    program: Sequence[str],
    action: str,
    node: str,
    seconds: float,
    host: RunHost = THIS_HOST,
) -> None:
    """Start ``program ACTION NODE`` detached.

    Args:
        directory: names the run; must not exist.
        program: executable and first arguments.
        action: ``replace`` or ``reboot``.
        node: the node's name.
        seconds: time limit.
        host: where it runs.

    Raises:
        RunExists: the run was started before.
        SresError: this machine cannot start it.
    """
    argv = [
        sys.executable,
        "-m",
        "slurm_resilience.replace.program_runner",
        str(directory),
        str(seconds),
    ]
    try:
        host.make(directory)
        pid = host.spawn([*argv, "--", *program, action, node])
        note_runner(directory, pid, host)
    except FileExistsError:
        raise RunExists(f"{directory} was started before") from None
    except OSError as error:
        # A full disk, or no process left. `status` tells whether it runs all the same.
        raise SresError(f"the run {directory} cannot be started: {error}") from None


def note_runner(directory: Path, pid: int, host: RunHost = THIS_HOST) -> None:
    """Write down the runner's process. It does so itself as well: sresctld may be killed first."""
    text = f"{pid} {host.started(pid)}\n"
    temporary = directory / f"runner.{os.getpid()}"
    temporary.write_text(text)
    temporary.replace(directory / "runner")


def status(directory: Path, now: float, host: RunHost = THIS_HOST) -> Run:
    """Return the present state of the run.

    Args:
        directory: names the run.
        now: seconds since the epoch.
        host: where it runs.
    """
    host.reap()
    ended = _ended(directory)
    if ended is not None:
        return ended
    try:
        pid, started = (directory / "runner").read_text().split()
    except (FileNotFoundError, ValueError):
        # Between mkdir and the note of the pid: sresctld died there, or is there right now.
        is_young = directory.exists() and now - directory.stat().st_mtime < RUNNER_START_SECONDS
        return Run("running" if is_young else "lost")
    if host.started(int(pid)) == started:
        return Run("running", output=_tail(directory / "output"))
    # It may have ended since we looked for its exit code.
    lost = Run("lost", output=_tail(directory / "output"), ended_at=now)
    return _ended(directory) or lost


def _ended(directory: Path) -> Run | None:
    try:
        rc = directory / "rc"
        code = int(rc.read_text())
        return Run("ended", code, _tail(directory / "output"), rc.stat().st_mtime)
    except (FileNotFoundError, ValueError):
        return None


def stop(directory: Path, host: RunHost = THIS_HOST) -> None:
    """Ask a running program to end (SIGTERM to its process group)."""
    try:
        pid, started = (directory / "runner").read_text().split()
        if host.started(int(pid)) == started:
            host.terminate(int(pid))
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return


def _tail(path: Path, limit: int = 2000) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
