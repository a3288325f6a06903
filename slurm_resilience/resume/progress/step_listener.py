"""Receive the steps that tasks report: one socket for one supervisor, a token for each attempt."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence

from slurm_resilience.resume.facing_socket import open_facing
from slurm_resilience.resume.progress.step_report import LINE_BYTES, StepLine, parse_line

BUFFER_BYTES = 1024 * 1024


class StepListener:
    """The supervisor's socket for steps. Lines are handed on in its own thread."""

    def __init__(self, ports: Sequence[int] = ()) -> None:
        """
        Args:
            ports: those that the site allows for srun (SrunPortRange); empty: any.
        """
        self._ports = ports
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._token = ""
        self._take: Callable[[StepLine], None] = lambda _: None

    def expect(self, node_address: str, take: Callable[[StepLine], None]) -> str:
        """Hand an attempt's lines on from now on, and no other's.

        Args:
            node_address: of one of its nodes, best of another machine than this one.
            take: called (in a thread) with each line.

        Returns:
            What the tasks are to have as `$SRES_PROGRESS`; empty: no socket can be opened.
        """
        with self._lock:
            if self._socket is None:
                with contextlib.suppress(OSError):
                    self._socket = open_facing(
                        node_address, self._ports, BUFFER_BYTES, self._receive, "steps"
                    )
            if self._socket is None:
                return ""
            self._token, self._take = os.urandom(8).hex(), take
            address, port = self._socket.getsockname()[:2]
            return f"{address} {port} {self._token}"

    def _receive(self, listening: socket.socket) -> None:
        while True:
            datagram = listening.recv(LINE_BYTES + 1)
            with self._lock:
                token, take = self._token, self._take
            line = parse_line(datagram, token) if token else None
            if line is not None:
                take(line)
