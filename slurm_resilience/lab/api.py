"""`Lab`: what tests, the command line and the demo do with a lab."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from slurm_resilience.errors import LabError, UsageError
from slurm_resilience.lab import bring_up, state_file
from slurm_resilience.lab.client import ask
from slurm_resilience.lab.commands import LabCommands
from slurm_resilience.lab.spec import LabSpec

# Longer than any reboot, replacement or lifecycle run of a lab should take.
ORDER_TIMEOUT_SECONDS = 600.0


def _quiet(_: str) -> None:
    """No progress wanted."""


class Lab(LabCommands):
    """A running lab. As a context manager it is torn down at the end."""

    def __init__(self, name: str, directory: Path, spec: LabSpec) -> None:
        super().__init__(name, directory, spec.names)
        self.spec = spec
        self._tie: socket.socket | None = None

    @classmethod
    def up(
        cls,
        spec: LabSpec,
        name: str = "lab",
        directory: str | Path | None = None,
        on_progress: Callable[[str], None] = _quiet,
        tied: bool = False,
    ) -> Lab:
        """Build a lab and return when its nodes are idle.

        A node whose lifecycle scripts fail does not join; `status` says why. If the caller dies
        before this returns, nothing is left. A ``tied`` lab ends with its caller also later.

        Raises:
            UsageError: the order cannot be understood.
            MissingTool: something that the lab needs is not installed.
            LabError: not root, up already, or it did not start.
        """
        place, channel = bring_up.create(spec, name, directory, on_progress, tied)
        lab = cls(name, place, spec)
        if tied:
            lab._tie = channel
        else:
            channel.close()
        return lab

    @classmethod
    def open(cls, name_or_directory: str | Path = "lab") -> Lab:
        """Open a lab that is up.

        Raises:
            LabError: there is none of that name or in that directory.
        """
        directory = state_file.locate(name_or_directory)
        return cls(*state_file.read(directory))

    def down(self) -> None:
        """End it at once and remove every trace of it."""
        bring_up.destroy(self.directory)
        if self._tie is not None:
            self._tie.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(LabError):
            self.down()

    def status(self) -> dict[str, Any]:
        """Power, boots, daemons and cables, as the keeper sees them."""
        return ask(self._socket, {"do": "status"}, 10)

    def power_off(self, nodes: str) -> None:
        """Cut the power of nodes (a hostlist): no goodbye on the network."""
        self._order("power-off", nodes)

    def power_on(self, nodes: str) -> None:
        """Switch nodes on again, with the disk they had; returns when slurmd runs."""
        self._order("power-on", nodes)

    def reboot(self, nodes: str) -> None:
        """Power off, wait 2 s, power on."""
        self._order("reboot", nodes)

    def replace(self, nodes: str) -> None:
        """Exchange nodes for new ones of the same name, with an empty disk."""
        self._order("replace", nodes)

    def cut(self, nodes: str) -> None:
        """Pull the network cables of nodes; they go on running."""
        self._order("cut", nodes)

    def mend(self, nodes: str) -> None:
        """Put the cables back."""
        self._order("mend", nodes)

    def instance(self, node: str) -> str:
        """Return the identity of the machine behind a node name; a replacement changes it."""
        return str(self.status()["nodes"][self._one(node)]["instance"])

    def kmsg(self, nodes: str, line: str) -> None:
        """Write one line to the kernel log of nodes.

        Raises:
            LabError: the log is full, because it has not been read for so long.
        """
        data = line.replace("\n", " ").encode() + b"\n"
        if len(data) > 4096:
            raise UsageError("a kernel log line has at most 4095 bytes")
        for node in self._expand(nodes):
            try:
                pipe = os.open(
                    self.directory / "nodes" / node / "kmsg", os.O_WRONLY | os.O_NONBLOCK
                )
            except OSError as error:
                raise LabError(f"the lab is not up ({error.strerror})") from None
            try:
                os.write(pipe, data)
            except BlockingIOError:
                raise LabError(f"{node}'s kernel log is full: nothing on it reads it") from None
            finally:
                os.close(pipe)

    def start_daemon(self, daemon: str, node: str | None = None) -> None:
        """Start sresctld, slurmctld, slurmdbd, or sresd and slurmd of a node."""
        nodes = self._expand(node) if node else ()
        self._ask({"do": "daemon-start", "daemon": daemon, "nodes": nodes})

    def kill_daemon(
        self, daemon: str, number: int = signal.SIGTERM, node: str | None = None
    ) -> None:
        """Send a signal to a daemon; after TERM and KILL, wait for its end."""
        nodes = self._expand(node) if node else ()
        order = {"do": "daemon-kill", "daemon": daemon, "nodes": nodes, "signal": int(number)}
        self._ask(order)

    def _order(self, verb: str, nodes: str) -> dict[str, Any]:
        return self._ask({"do": verb, "nodes": self._expand(nodes)})

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        return ask(self._socket, order, ORDER_TIMEOUT_SECONDS)
