"""The launcher's processes in its event loop: born, heard, read, buried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_resilience.launcher.flags import STDERR, STDOUT
from slurm_resilience.launcher.processes.output import Sink
from slurm_resilience.launcher.processes.process import Process
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
        process = Process(environment, modules, piped, nice)
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
        return code

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
