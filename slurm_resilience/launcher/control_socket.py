"""Let a rank ask its node's launcher to replace a process of this node.

``$SRES_KEEPER`` names a unix datagram socket that only the user can reach. A message is a msgpack
map:

- ``{"evict": PID, "reason": TEXT}``: kill that rank (a stopped one too) and fill its seat.
- ``{"ready": PID}``: that rank is up and running; a new standby may use the processor now.
- ``{"enters": PID}``, ``{"leaves": PID}``: that rank is in the training from now on, or no longer.
  A rank that ends in between is replaced, with exit code 0 too.

A launcher that is held up reads late, and its socket takes few messages (ten, as Linux is set up).
One more waits for room: without ``leaves`` a rank that is done is taken for one that was lost in
the middle of the training, and started again.

A process that is no rank of this launcher is never touched. Without torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

VARIABLE = "SRES_KEEPER"
_LARGEST = 8192
ROOM_SECONDS = 30.0
"""So long a message waits for room in the launcher's socket. One that is stopped for longer starts
a rank again that had nothing left to do."""


class ControlMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message; one of the numbers is set."""

    evict: int = 0
    """Process id."""
    reason: str = ""
    ready: int = 0
    """Process id."""
    enters: int = 0
    """Process id."""
    leaves: int = 0
    """Process id."""


def evict(pid: int, reason: str, environment: Mapping[str, str] | None = None) -> bool:
    """Ask for the replacement of a rank of this node. May wait (`ROOM_SECONDS`).

    Args:
        pid: its process id, as the launcher sees it.
        reason: for the log, and for the exit message if the seat's budget is spent.
        environment: where `SRES_KEEPER` is looked up; default: `os.environ`.

    Returns:
        Whether a keeper was told. False: there is none, or it is gone.
    """
    return _tell(ControlMessage(evict=pid, reason=reason[:1000]), environment, ROOM_SECONDS)


def ready(environment: Mapping[str, str] | None = None) -> bool:
    """Say that this process is up. Returns whether a keeper was told; it is not where that would
    take time."""
    return _tell(ControlMessage(ready=os.getpid()), environment, 0.0)


def enters() -> bool:
    """Say that this process trains from now on. Returns whether a keeper was told."""
    return _tell(ControlMessage(enters=os.getpid()), None, ROOM_SECONDS)


def leaves() -> bool:
    """Say that it trains no longer, and may end. Returns whether a keeper was told."""
    return _tell(ControlMessage(leaves=os.getpid()), None, ROOM_SECONDS)


def _tell(note: ControlMessage, environment: Mapping[str, str] | None, seconds: float) -> bool:
    path = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not path:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.settimeout(seconds)
            # Only a connected one is told of room at the other end.
            line.connect(path)
            line.send(msgspec.msgpack.encode(note))
    except OSError:
        return False
    return True


class ControlSocket:
    """The launcher's end.

    Args:
        path: where the socket is made.
    """

    def __init__(self, path: Path) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.setblocking(False)
        before = os.umask(0o177)
        try:
            self._line.bind(str(path))
        finally:
            os.umask(before)

    def fileno(self) -> int:
        return self._line.fileno()

    def hear(self) -> list[ControlMessage]:
        """All messages that are there; nonsense is left out."""
        notes: list[ControlMessage] = []
        while True:
            try:
                data = self._line.recv(_LARGEST)
            except OSError:
                return notes
            try:
                notes.append(msgspec.msgpack.decode(data, type=ControlMessage))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue

    def close(self) -> None:
        self._line.close()
