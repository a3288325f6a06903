"""One process of a node: a rank, or a standby that may become one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.launcher.exit_codes import of_status

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_NICEST = 19


class ProcessSpec(msgspec.Struct, frozen=True):
    """The program that a process shall become; see bootstrap.py."""

    kind: str
    argv: tuple[str, ...]
    env: dict[str, str]
    stdout: str | None = None
    """File that takes the output; None: what it was born with."""
    stderr: str | None = None


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


class Process:
    """A child in its own process group, which dies with this process.

    Args:
        environment: its environment.
        modules: what it imports before it waits for its order; none: a cold start.
        piped: give it pipes for stdout and stderr, whose ends are `outputs`.
        nice: added to its niceness.

    Raises:
        OSError: the system refuses another process.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str] = (),
        piped: bool = False,
        nice: int = 0,
    ) -> None:
        self.link, theirs = socket.socketpair()
        output = subprocess.PIPE if piped else None
        with theirs:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    _BOOTSTRAP,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    *modules,
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.warm = False
        """Its modules are imported."""
        self.silent = False
        """It will say nothing more."""
        self._heard = b""
        self._nice = 0
        self._renice(nice)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Read ends of its stdout and stderr; empty when they are the launcher's own."""
        pipes = (self._popen.stdout, self._popen.stderr)
        return tuple(pipe.fileno() for pipe in pipes if pipe is not None)

    def give(self, order: ProcessSpec) -> None:
        """Let it become the user's program.

        Raises:
            OSError: it is dead.
        """
        self._renice(0)
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
            self.warm = True
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
        if info is None or info.si_code != os.CLD_EXITED or info.si_status != 0:
            self.signal(signal.SIGKILL)
        code = of_status(self._popen.wait())
        os.close(self.pidfd)
        return code

    def close(self) -> None:
        """Let go of its pipes."""
        self.link.close()
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
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
