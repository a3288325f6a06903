"""The launcher's processes in its event loop: born, heard, read, buried."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurm_resilience.launcher.flags import STDERR, STDOUT
from slurm_resilience.launcher.processes.output import Sink
from slurm_resilience.launcher.processes.process import FORK_SERVER, Process
from slurm_resilience.launcher.processes.reaper import Reaper


class Children:
    """Every process that the launcher has started.

    Args:
        loop: the event loop.
        guard: told of each process group.
        on_word: called with a process and each message of its.
        on_end: called with a process that has ended, and its exit code; it is gone by then.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        guard: Reaper,
        on_word: Callable[[Process, dict[str, Any]], None],
        on_end: Callable[[Process, int], None],
    ) -> None:
        self._loop = loop
        self._guard = guard
        self._on_word = on_word
        self._on_end = on_end
        self._sinks: dict[Process, list[Sink]] = {}

    def start(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str] = (),
        piped: bool = False,
        nice: int = 0,
    ) -> Process:
        """Start a new child; see `Process`.

        Raises:
            OSError: the system refuses another process.
        """
        return self._raise(Process.start(environment, modules, piped, nice))

    def start_server(
        self, environment: Mapping[str, str], modules: Sequence[str], nice: int = 0
    ) -> Process:
        """Start a warm interpreter; see fork_server.py.

        Raises:
            OSError: the system refuses another process.
        """
        return self._raise(Process.start(environment, modules, nice=nice, program=FORK_SERVER))

    def fork(self, server: Process, piped: bool = False) -> Process:
        """Let a warm interpreter make a new child; see `Process.fork`.

        Raises:
            OSError: it was not made.
        """
        return self._raise(Process.fork(server, piped))

    def _raise(self, process: Process) -> Process:
        """Look after a new child."""
        self._guard.mind(process.pid)
        self._loop.add_reader(process.pidfd, self._ended, process)
        self._loop.add_reader(process.link.fileno(), self._hear, process)
        self._sinks[process] = [
            Sink(fd, bit) for fd, bit in zip(process.outputs, (STDOUT, STDERR), strict=False)
        ]
        for sink in self._sinks[process]:
            self._loop.add_reader(sink.fd, self._pump, sink)
        return process

    def sinks(self, process: Process) -> list[Sink]:
        """Its stdout and stderr; empty when they are the launcher's own."""
        return self._sinks[process]

    def bury(self, process: Process) -> int:
        """Take leave of an ended process, or wait for the end of a killed one: its exit code."""
        self._loop.remove_reader(process.pidfd)
        self._hear(process)
        self._loop.remove_reader(process.link.fileno())
        self._guard.forget(process.pid)
        code = process.reap()
        for sink in self._sinks.pop(process):
            sink.pump()
            self._loop.remove_reader(sink.fd)
            sink.close()
        process.close()
        self._reap_strays()
        return code

    def _reap_strays(self) -> None:
        """Reap orphans that came to this process while it waited for a fork."""
        known = {self._guard.pid, *(process.pid for process in self._sinks)}
        with suppress(OSError):  # a kernel without this file: they are reaped at the end
            listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
            for pid in {int(word) for word in listed.split()} - known:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _ended(self, process: Process) -> None:
        self._on_end(process, self.bury(process))

    def _hear(self, process: Process) -> None:
        messages = process.hear()
        if process.silent:
            self._loop.remove_reader(process.link.fileno())
        for message in messages:
            self._on_word(process, message)

    def _pump(self, sink: Sink) -> None:
        if not sink.pump():
            self._loop.remove_reader(sink.fd)
