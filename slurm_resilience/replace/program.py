"""The program hook: any executable replaces or reboots a node, called as ``PROGRAM ACTION NODE``.

A run is a directory. To make the directory is to start the run, so no run is started twice. It is
known to run by a lock that its runner and its program hold: the kernel gives it back when both have
ended, whatever the time of day is and whatever number a process has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.replace.disk_room import lack_of_room
from slurm_resilience.replace.repair_order import RepairOrder, Run, RunExists

RUNNER_MODULE = "slurm_resilience.replace.program_runner"
CANNOT_START_RC = 127
"""The exit code of a program that cannot be started, as a shell has it."""
LOCK, RESULT, OUTPUT, RUNNER = "lock", "rc", "output", "runner"
"""A run's files. All are written before the program starts, so that a disk which is full later
keeps neither the exit code nor the runner's process id from being written down."""
NEVER_BEGAN_RC = 256
"""Stands in the place of an exit code, and no program has it: the program was not started."""
RESERVED_BYTES = 64
"""The size of the files that are written once more, in place."""
RESERVED_OUTPUT_BYTES = 64 << 10
"""Room for what the program prints. On a disk that fills meanwhile its print would fail, and so
would the program, in the middle or when the machine is replaced already: it would be done twice."""

_libc = ctypes.CDLL(None, use_errno=True)
_REMOVED = " (deleted)"
"""The kernel's note on the name of an open file that was removed (proc_pid_fd(5))."""
_BEHIND_THE_END = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2)."""


class RunHost(Protocol):
    """The machine on which runs are started. The simulator has one of its own."""

    def lack_of_room(self, directory: Path) -> str:
        """Return what the disk of a directory lacks for a new run; empty: nothing is known."""
        ...

    def make(self, directory: Path) -> None:
        """Make a run's directory, which must not exist, with room for all that is written later."""
        ...

    def spawn(self, directory: Path, argv: Sequence[str]) -> None:
        """Start a process that outlives this one and holds the run's lock. The lock's descriptor is
        the last word of its command line before ``--``."""
        ...

    def is_held(self, directory: Path) -> bool:
        """Tell whether a process holds the run's lock, though its directory may be removed, moved
        or copied."""
        ...

    def terminate(self, directory: Path) -> None:
        """Send SIGTERM to the runner, if it lives."""
        ...

    def reap(self) -> None:
        """Take note of children that have ended."""
        ...


class ThisHost:
    """The machine that sresctld runs on."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._let_go: set[Path] = set()
        """Runs without a directory that no process holds: so it stays, and is not looked for."""

    def lack_of_room(self, directory: Path) -> str:
        return lack_of_room(directory)

    def make(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        for name in (RESULT, RUNNER):
            write_in_place(directory / name, "")
        for name in (LOCK, OUTPUT):
            (directory / name).touch(mode=0o600)
        reserve(directory / OUTPUT, RESERVED_OUTPUT_BYTES)

    def spawn(self, directory: Path, argv: Sequence[str]) -> None:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Held by every process that inherits it, from before the first of them exists.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = argv.index("--")
            child = subprocess.Popen(
                [*argv[:end], str(lock), *argv[end:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock,),
            )
        finally:
            os.close(lock)
        self._children.append(child)

    def is_held(self, directory: Path) -> bool:
        try:
            lock = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return bool(self._holders(directory))
        except OSError:
            return True  # it cannot be looked at, so it is not given up
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        # The lock of a run that was copied to another disk meanwhile is held on the old one.
        number = _text(directory / RUNNER)
        return bool(number) and _is_runner_of(int(number), directory)

    def terminate(self, directory: Path) -> None:
        number = _text(directory / RUNNER)
        numbers = (int(number),) if number else self._holders(directory)
        for candidate in numbers:
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(candidate)
                try:
                    # Looked at after it was opened: it is this very process that gets the signal.
                    if _is_runner_of(candidate, directory):
                        signal.pidfd_send_signal(process, signal.SIGTERM)
                finally:
                    os.close(process)

    def reap(self) -> None:
        for child in list(self._children):
            if child.poll() is not None:
                self._children.remove(child)

    def _holders(self, directory: Path) -> Collection[int]:
        """Return the processes that hold the lock of a run whose directory is not there."""
        if directory in self._let_go:
            return ()
        holders = _holders_of_absent(directory)
        if not holders:
            self._let_go.add(directory)
        return holders


THIS_HOST: RunHost = ThisHost()


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
        SresError: this machine cannot start it, and nothing runs.
    """
    runner = [sys.executable, "-P", "-m", RUNNER_MODULE]
    try:
        host.make(directory)
        host.spawn(directory, [*runner, str(directory), str(seconds), "--", *program, action, node])
    except FileExistsError:
        raise RunExists(f"{directory} was started before") from None
    except OSError as error:
        # A full disk, or no process left: the runner was not started.
        raise SresError(f"the run {directory} cannot be started: {error}") from None


def write_in_place(path: Path, text: str) -> None:
    """Write a short text over what was reserved for it: that needs no room on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(file, text.ljust(RESERVED_BYTES).encode(), 0)
    finally:
        os.close(file)


def reserve(path: Path, size: int) -> None:
    """Reserve room for what is appended to an empty file, where its file system can do that.

    Raises:
        OSError: there is no such room.
    """
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        length = ctypes.c_int64(size)
        if _libc.fallocate(file, _BEHIND_THE_END, ctypes.c_int64(0), length) != 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(file)


def status(
    directory: Path, now: float, host: RunHost = THIS_HOST, *, was_begun: bool = False
) -> Run:
    """Return the present state of the run.

    Args:
        directory: names the run.
        now: seconds since the epoch.
        host: where it runs.
        was_begun: it has had its directory, which is nowhere else written down.
    """
    host.reap()
    # The lock first: a run that ends between the two looks has written its exit code by then.
    is_running = host.is_held(directory)
    output = _tail(directory / OUTPUT)
    code = _text(directory / RESULT)
    if code == f"{NEVER_BEGAN_RC}":
        return Run("unbegun", CANNOT_START_RC, output, now)
    if code:
        return Run("ended", int(code), output, now)
    if is_running:
        return Run("running", output=output)
    # A runner's first act is to write down its process id.
    if _text(directory / RUNNER):
        return Run("lost", output=output, ended_at=now)
    if was_begun and not (directory / RUNNER).exists():
        return Run("lost", output=f"{directory} was removed", ended_at=now)
    return Run("unbegun", output=output, ended_at=now)


def is_unfinished(directory: Path, host: RunHost = THIS_HOST) -> bool:
    """Tell whether a run has been started and has not ended."""
    return host.is_held(directory) and not is_ended(directory)


def is_ended(directory: Path) -> bool:
    """Tell whether a run has left its exit code."""
    return bool(_text(directory / RESULT))


def prune(
    runs: Path, before: float, is_kept: Callable[[int], bool], host: RunHost = THIS_HOST
) -> None:
    """Remove the directories of old runs whose incident is gone.

    Args:
        runs: the directory of the runs.
        before: those that were last changed before this moment (epoch).
        is_kept: tells whether the journal has an incident.
        host: where they ran.
    """
    for directory in runs.glob("*-*"):
        number = directory.name.partition("-")[0]
        with contextlib.suppress(OSError):
            is_old = number.isdecimal() and directory.stat().st_mtime < before
            if is_old and not is_kept(int(number)) and not host.is_held(directory):
                shutil.rmtree(directory)


def stop(directory: Path, host: RunHost = THIS_HOST) -> None:
    """Ask a running program to end (SIGTERM to its runner, which passes it on)."""
    host.terminate(directory)


class ProgramReplacer:
    """The replacement program of the configuration."""

    def __init__(self, program: Sequence[str], host: RunHost = THIS_HOST) -> None:
        """
        Args:
            program: executable and first arguments.
            host: the machine that it runs on.
        """
        self._program = program
        self._host = host

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        start(order.directory, self._program, order.verb, order.node, order.seconds, self._host)

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        return status(order.directory, now, self._host, was_begun=order.was_begun)

    def stop(self, order: RepairOrder) -> None:
        stop(order.directory, self._host)


def _is_runner_of(pid: int, directory: Path) -> bool:
    """Tell whether a process is the runner of this run, which may have been begun elsewhere: a
    person may have moved the state directory."""
    begun_in = _runs_in(pid)
    return begun_in is not None and begun_in.name == directory.name


def _runs_in(pid: int) -> Path | None:
    """Return the directory that a runner was given; None: it is no runner, or has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return Path(os.fsdecode(words[words.index(os.fsencode(RUNNER_MODULE)) + 1]))
    except (OSError, ValueError, IndexError):
        return None


def _holders_of_absent(directory: Path) -> list[int]:
    """Return a run's processes: its runner, whose directory may have been moved away, and those
    that have its lock open, where it was removed."""
    # The kernel names an open file without symbolic links.
    removed = os.path.realpath(directory / LOCK) + _REMOVED
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _runs_in(int(process.name)) == directory or removed in _open_files(process / "fd")
    ]


def _open_files(directory: Path) -> set[str]:
    """Return the names of a process's open files; none: it has ended, or is another user's."""
    names = set()
    with contextlib.suppress(OSError):
        for number in directory.iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                names.add(str(number.readlink()))
    return names


def _text(path: Path) -> str:
    """Return what was written in place; empty: nothing yet."""
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    return text if text.isascii() and text.isdecimal() else ""


def _tail(path: Path, limit: int = 2000) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
