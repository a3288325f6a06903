"""Read the connections of nodes together, in turns.

10,000 nodes beat 20,000 times a second. One by one, asyncio's own work for each would take several
times as long as what the beat itself needs.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence

from slurm_resilience.errors import WireError
from slurm_resilience.wire.served_connection import ServedConnection

TURN_SECONDS = 0.02
"""Between two turns: a message waits no longer than that."""


class NodeReader:
    """Reads what has come from nodes. Used in the server's thread alone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        beats: Callable[[Sequence[ServedConnection]], None] | None,
    ) -> None:
        """
        Args:
            loop: the server's.
            beats: takes the connections on which beats have come, once a turn; None: beats are
                messages like any other.
        """
        self._loop = loop
        self._beats = beats
        self._epoll = select.epoll()
        self._sockets: dict[int, tuple[socket.socket, ServedConnection]] = {}
        self._numbers: dict[ServedConnection, int] = {}

    def begin(self) -> None:
        """Take turns from now on: one begins when something has come."""
        self._loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, session: ServedConnection, sock: socket.socket) -> None:
        """Read this connection from now on, in the place of its transport.

        Args:
            session: of a node that is proven.
            sock: its socket.
        """
        if session.transport is None or session.is_closing:
            return
        session.transport.pause_reading()
        number = sock.fileno()
        self._sockets[number] = (sock, session)
        self._numbers[session] = number
        self._epoll.register(number, select.EPOLLIN)

    def remove(self, session: ServedConnection) -> None:
        """Forget a connection, before its socket is closed."""
        number = self._numbers.pop(session, None)
        if number is not None:
            del self._sockets[number]
            self._epoll.unregister(number)

    def close(self) -> None:
        """End all turns."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _turn(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        beaten: list[ServedConnection] = []
        for number, _ in self._epoll.poll(0, max(1, len(self._sockets))):
            # The message of one may have ended the connection of another.
            known = self._sockets.get(number)
            if known is not None and self._read(*known):
                beaten.append(known[1])
        if beaten and self._beats is not None:
            self._beats(beaten)
        self._loop.call_later(TURN_SECONDS, self.begin)

    def _read(self, sock: socket.socket, session: ServedConnection) -> bool:
        """Take what has come on a connection; tell whether it was one beat, left to be told of."""
        if session.hold:
            self.remove(session)  # it is at its end: nothing more is taken from it
            return False
        try:
            size = sock.recv_into(session.get_buffer(-1))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            size = 0
        if not size:
            self.remove(session)
            session.abort()
            return False
        try:
            if self._beats is not None and session.take_beat(size):
                return True
        except WireError as error:
            session.fail(error)
            return False
        session.buffer_updated(size)
        return False
