"""Receive the steps that tasks report: one socket for one supervisor, a token for each attempt."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence

from slurm_resilience.resume.progress.step_report import LINE_BYTES, StepLine, parse_line

BUFFER_BYTES = 1024 * 1024
PORT_TRIES = 20


class StepListener:
    """The supervisor's socket for steps. Lines are handed on in its own thread."""

    def __init__(self, ports: Sequence[int] = ()) -> None:
        """
        Args:
            ports: those that the site allows for srun (SrunPortRange); empty: any.
        """
        self._ports = ports
        self._socket: socket.socket | None = None
        self._address = ""
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
                    self._open(node_address)
            if self._socket is None:
                return ""
            self._token, self._take = os.urandom(8).hex(), take
            return f"{self._address} {self._socket.getsockname()[1]} {self._token}"

    def _open(self, node_address: str) -> None:
        # As bytes: for text Python loads its tables of foreign scripts, and the step waits.
        found = socket.getaddrinfo(node_address.encode(), 1, type=socket.SOCK_DGRAM)
        family, *_, address = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: this asks which of our addresses faces the node.
            probe.connect(address)
            self._address = probe.getsockname()[0]
        listening = socket.socket(family, socket.SOCK_DGRAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            self._bind(listening)
        except OSError:
            listening.close()
            raise
        self._socket = listening
        threading.Thread(target=self._receive, args=(listening,), name="steps", daemon=True).start()

    def _bind(self, listening: socket.socket) -> None:
        if not self._ports:
            listening.bind((self._address, 0))
            return
        # Late: few sites limit them, and no step waits for what it does not need.
        import random

        for port in random.sample(self._ports, min(PORT_TRIES, len(self._ports))):
            with contextlib.suppress(OSError):
                listening.bind((self._address, port))
                return
        raise OSError("no free port")

    def _receive(self, listening: socket.socket) -> None:
        while True:
            datagram = listening.recv(LINE_BYTES + 1)
            with self._lock:
                token, take = self._token, self._take
            line = parse_line(datagram, token) if token else None
            if line is not None:
                take(line)
