"""Tell the supervisor of this process's steps. Python's own library alone: programs import it.

The process that trains only notes its step; a thread sends it, at most once in `PACE_SECONDS`, and
less often where there are many ranks, so that all of them together send a thousand lines a second.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping

PACE_SECONDS = 0.5
LINES_PER_SECOND = 1000
PAUSE = "pause"
VARIABLE = "SRES_PROGRESS"
"""`ADDRESS PORT TOKEN` of the supervisor."""


class StepSender:
    """The steps of one process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """
        Args:
            environment: of this process.
        """
        self.pid = os.getpid()
        address, port, self._token = [*environment.get(VARIABLE, "").split(), "", "", ""][:3]
        self._rank = environment.get("RANK") or environment.get("SLURM_PROCID") or "0"
        ranks = environment.get("WORLD_SIZE") or environment.get("SLURM_NTASKS") or "1"
        self._pace = max(PACE_SECONDS, (int(ranks) if ranks.isdigit() else 1) / LINES_PER_SECOND)
        self._socket: socket.socket | None = None
        if self._token:
            with contextlib.suppress(OSError, ValueError):
                self._socket = _connect(address, int(port))
        self._lock = threading.Lock()
        self._word = ""
        self._count = 0
        """Steps since the line before."""
        self._own_seconds: list[float] = []
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, word: str, own_seconds: float, rank: int | None) -> None:
        """Note a step, or a pause; it is sent soon.

        Args:
            rank: of this process; None: as its environment has it.
            word: the step's number, or `pause`.
            own_seconds: this process's own work since the step before; 0: not known.
        """
        if self._socket is None:
            return
        with self._lock:
            self._word = word
            self._count = 0 if word == PAUSE else self._count + 1
            if rank is not None:
                self._rank = str(rank)
            if own_seconds > 0:
                self._own_seconds.append(own_seconds)
        self._news.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="sres-steps", daemon=True)
            self._thread.start()

    def _send(self) -> None:
        pause = threading.Event()  # it is never set
        while self._news.wait():
            self._news.clear()
            with self._lock:
                rank = self._rank
                word, seconds, self._own_seconds = self._word, self._own_seconds, []
                count, self._count = self._count, 0
            mean = sum(seconds) / len(seconds) if seconds else 0.0
            more = f" {mean:.6f} {count}" if count > 1 else f" {mean:.6f}" if seconds else ""
            # The supervisor may be gone, or start anew: its program goes on.
            with contextlib.suppress(OSError):
                if self._socket is not None:
                    self._socket.send(f"{self._token} {rank} {word}{more}\n".encode())
            pause.wait(self._pace)


def _connect(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    sending = socket.socket(family, kind, protocol)
    try:
        sending.setblocking(False)
        sending.connect(where)
    except OSError:
        sending.close()
        raise
    return sending


_sender: StepSender | None = None


def note(word: str, own_seconds: float = 0.0, rank: int | None = None) -> None:
    """Note a step, or a pause, of this very process: `StepSender.note`."""
    global _sender
    if _sender is None or _sender.pid != os.getpid():
        _sender = StepSender(os.environ)
    _sender.note(word, own_seconds, rank)
