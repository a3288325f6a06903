"""One process of a node: a rank, or a standby that may become one."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from os import waitstatus_to_exitcode
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from slurm_resilience.launcher.exit_codes import of_status

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
FORK_SERVER = Path(__file__).with_name("fork_server.py")
_NICEST = 19
_FORK_SECONDS = 5.0
"""Seconds in which a warm interpreter has to have made a process."""
_PR_SET_CHILD_SUBREAPER = 36


class ProcessSpec(msgspec.Struct, frozen=True):
    """The program that a process shall become; see bootstrap.py."""

    kind: str
    argv: tuple[str, ...]
    env: dict[str, str]
    stdout: str | None = None
    """File that takes the output; None: what it was born with."""
    stderr: str | None = None


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Be the parent of what is left by processes below this one that end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "orphans cannot be adopted")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _born(link: socket.socket) -> int:
    """Wait until a fork says that it is there. Returns its process id."""
    line = b""
    while not line.endswith(b"\n"):
        part = link.recv(256)
        if not part:
            raise OSError(errno.ECHILD, "the warm interpreter made no process")
        line += part
    return int(json.loads(line)["born"])


def may_renice() -> bool:
    """Tell whether this process may take back a niceness: only root and RLIMIT_NICE allow it."""
    allowed = []

    def attempt() -> None:  # in a thread of its own, which takes its niceness with it
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        try:
            os.setpriority(os.PRIO_PROCESS, thread, own + 1)
            os.setpriority(os.PRIO_PROCESS, thread, own)
        except OSError:
            return
        allowed.append(own < _NICEST)

    tried = threading.Thread(target=attempt)
    tried.start()
    tried.join()
    return bool(allowed and allowed[0])


class ProcessOrigin(Enum):
    """The way in which a process was made; STANDBY → WARM_STANDBY when its imports are over."""

    NEW = "a new process"
    STANDBY = "a standby"
    WARM_STANDBY = "a warm standby"
    FORK = "a fork of the warm interpreter"


class Process:
    """A child in its own process group, which dies with this process.

    Args:
        pid: its process id.
        link: our end of its socket.
        pipes: read ends of its stdout and stderr; none when they are the launcher's own.
        wait: waits for its end; the return code, as `subprocess` has it.
    """

    def __init__(
        self,
        pid: int,
        link: socket.socket,
        pipes: Sequence[IO[bytes]],
        wait: Callable[[], int],
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.link = link
        self.origin = ProcessOrigin.NEW
        self.silent = False
        """It will say nothing more."""
        self.exited = False
        """It has ended by itself, and not by a signal."""
        self._pipes = tuple(pipes)
        self._wait = wait
        self._heard = b""
        self._nice = 0

    @classmethod
    def start(
        cls,
        environment: Mapping[str, str],
        modules: Sequence[str] = (),
        piped: bool = False,
        nice: int = 0,
        program: Path = _BOOTSTRAP,
    ) -> Self:
        """Start one anew.

        Args:
            environment: its environment.
            modules: what it imports before it waits for its order; none: a cold start.
            piped: give it pipes for stdout and stderr.
            nice: added to its niceness.
            program: what it runs.

        Raises:
            OSError: the system refuses another process.
        """
        link, theirs = socket.socketpair()
        output = subprocess.PIPE if piped else None
        words = [str(program), str(theirs.fileno()), str(os.getpid()), *modules]
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-u", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        pipes = [pipe for pipe in (popen.stdout, popen.stderr) if pipe is not None]
        process = cls(popen.pid, link, pipes, popen.wait)
        if modules:
            process.origin = ProcessOrigin.STANDBY
        process._renice(nice)
        return process

    @classmethod
    def fork(cls, server: Process, piped: bool = False, limit: float = _FORK_SECONDS) -> Self:
        """Let a warm interpreter fork one, which becomes a child of this process.

        Args:
            server: it runs fork_server.py, and has reported.
            piped: give the new process pipes for stdout and stderr.
            limit: seconds in which it has to be there.

        Raises:
            OSError: it was not made.
        """
        link, theirs = socket.socketpair()
        pipes, ends = [], [1, 2]
        if piped:
            pairs = [os.pipe(), os.pipe()]
            pipes = [os.fdopen(reader, "rb", buffering=0) for reader, _ in pairs]
            ends = [writer for _, writer in pairs]
        try:
            with theirs, _adopting_orphans():
                socket.send_fds(server.link, [b"fork\n"], [theirs.fileno(), *ends])
                theirs.close()
                link.settimeout(limit)
                pid = _born(link)
                link.settimeout(None)
            process = cls(pid, link, pipes, lambda: waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        except OSError:
            link.close()
            for pipe in pipes:
                pipe.close()
            raise
        finally:
            for writer in ends if piped else ():
                os.close(writer)
        process.origin = ProcessOrigin.FORK
        return process

    @property
    def warm(self) -> bool:
        """True: its modules are imported."""
        return self.origin in (ProcessOrigin.WARM_STANDBY, ProcessOrigin.FORK)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Read ends of its stdout and stderr; empty when they are the launcher's own."""
        return tuple(pipe.fileno() for pipe in self._pipes)

    def give(self, order: ProcessSpec) -> None:
        """Let it become the user's program. One that was stopped meanwhile goes on: as a rank it
        would be waited for, and given up.

        Raises:
            OSError: it is dead.
        """
        self._renice(0)
        self.signal(signal.SIGCONT)
        self.link.sendall(json.dumps(msgspec.to_builtins(order)).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        """Return what it has said since the last call, without waiting."""
        with suppress(OSError):
            while part := self.link.recv(65536, socket.MSG_DONTWAIT):
                self._heard += part
            self.silent = True
        *lines, self._heard = self._heard.split(b"\n")
        words = [json.loads(line) for line in lines]
        if any("warm" in word for word in words):
            self.origin = ProcessOrigin.WARM_STANDBY
            self._renice(0)
        return words

    def signal(self, number: int) -> None:
        """Signal its whole process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> int:
        """Its exit code, 128+N for signal N, after `pidfd` has become readable.

        What it started goes too, unless it ended well: data loaders would hold the GPU's memory.
        Only while it is not yet reaped does the group's number belong to it for certain.
        """
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        self.exited = info is not None and info.si_code == os.CLD_EXITED
        if info is None or not self.exited or info.si_status != 0:
            self.signal(signal.SIGKILL)
        code = of_status(self._wait())
        os.close(self.pidfd)
        return code

    def close(self) -> None:
        """Let go of its pipes."""
        self.link.close()
        for pipe in self._pipes:
            pipe.close()

    def _renice(self, added: int) -> None:
        if added == self._nice:
            return
        self._nice = added
        with suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            # Threads have a niceness each, and libraries start some while they are imported.
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), min(_NICEST, own + added))
