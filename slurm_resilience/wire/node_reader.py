"""Read the connections of nodes together, in turns.

10,000 nodes beat 13,000 times a second. One by one, asyncio's own work for each would take several
times as long as what the beat itself needs.

What comes when a beat is due is a sign of life by its arrival alone, which the kernel tells for all
connections in one call. It rests on its connection, and some are read together: only then the marks
are compared, which takes less than to read them one by one. What comes at any other time is read at
once.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence

from slurm_resilience.wire.served_connection import (
    BEATS_CHUNK_BYTES,
    Client,
    Hold,
    ServedConnection,
)

TURN_SECONDS = 0.04
"""Between two turns: a message waits no longer than that."""
RESTING = 15
"""So many arrivals may rest on a connection: with the next one, all of them are read. A wrong mark
is found no later, and a program in between that makes it can do no more than one that holds beats
back."""
DUE_AFTER, DUE_UNTIL = 0.8, 1.25
"""From so many beats' time after the last arrival, up to so many, the next one is a beat."""


class _Source:
    """A node's connection."""

    __slots__ = ("client", "due", "may_rest", "session", "sock")

    def __init__(self, sock: socket.socket, session: ServedConnection, client: Client) -> None:
        self.sock = sock
        self.session = session
        self.client = client
        self.may_rest = 0
        """So many arrivals may be left unread: all that was read last were light beats."""
        self.due = 0.0
        """When the next beat is due."""


class NodeReader:
    """Reads what has come from nodes. Used in the server's thread alone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        beats: Callable[[Sequence[Client]], None] | None,
        beat_seconds: float = 0.0,
    ) -> None:
        """
        Args:
            loop: the server's.
            beats: takes the nodes from which beats have come, once a turn; None: beats are messages
                like any other.
            beat_seconds: between two beats of a node; 0: not known, and everything is read when it
                comes.
        """
        self._loop = loop
        self._beats = beats
        self._due_after = DUE_AFTER * beat_seconds
        self._due_for = (DUE_UNTIL - DUE_AFTER) * beat_seconds
        self._resting = RESTING if beat_seconds else 0
        self._epoll = select.epoll()
        self._sources: dict[int, _Source] = {}
        self._numbers: dict[ServedConnection, int] = {}
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Take turns from now on.

        By time, and not when something has come: to wait for that would have the kernel look at
        all connections anew in each turn, which took as long as all that came.
        """
        self._next = self._loop.call_later(TURN_SECONDS, self._turn)

    def add(self, session: ServedConnection, sock: socket.socket, client: Client) -> None:
        """Read this connection from now on, in the place of its transport.

        Args:
            session: of a node that is proven.
            sock: its socket.
            client: the node.
        """
        if session.transport is None or session.is_closing:
            return
        session.transport.pause_reading()
        number = sock.fileno()
        self._sources[number] = _Source(sock, session, client)
        self._numbers[session] = number
        # Once for each arrival: the kernel need not look again whether all was read.
        self._epoll.register(number, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def remove(self, session: ServedConnection) -> None:
        """Forget a connection, before its socket is closed."""
        number = self._numbers.pop(session, None)
        if number is not None:
            del self._sources[number]
            self._epoll.unregister(number)

    def close(self) -> None:
        """End all turns."""
        if self._next is not None:
            self._next.cancel()
        self._epoll.close()

    def _turn(self) -> None:
        beaten: list[Client] = []
        # One moment for all: a turn that was late makes the next arrival early, and so read.
        now = self._loop.time()
        due, due_for = now + self._due_after, self._due_for
        sources, only_in = self._sources, select.EPOLLIN
        for number, events in self._epoll.poll(0, max(1, len(sources))):
            # The message of one may have ended the connection of another.
            source = sources.get(number)
            if source is None:
                continue
            is_at_its_end = events != only_in
            # Nothing but a beat in time: nearly all that comes.
            if source.may_rest and not is_at_its_end and 0.0 <= now - source.due < due_for:
                source.may_rest -= 1
                source.due = due
                beaten.append(source.client)
                continue
            source.due, source.may_rest = due, 0
            is_first = not is_at_its_end and source.session.is_between_frames
            if self._beats is not None and is_first:
                try:
                    arrived = source.sock.recv(BEATS_CHUNK_BYTES)
                except OSError:
                    arrived = b""  # the next read tells
                if arrived and source.session.take_beats(arrived):
                    source.may_rest = self._resting
                    beaten.append(source.client)
                    continue
                if 0 < len(arrived) < BEATS_CHUNK_BYTES:
                    continue
            self._read(source, is_at_its_end)
        if beaten and self._beats is not None:
            self._beats(beaten)
        self.begin()

    def _read(self, source: _Source, is_at_its_end: bool) -> None:
        """Take all that has come on a connection.

        Args:
            source: the connection.
            is_at_its_end: nothing more will come on it.
        """
        sock, session = source.sock, source.session
        while True:
            buffer = session.get_buffer(-1)
            try:
                size = sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                size = 0
            if session.hold is not Hold.NONE:
                self.remove(session)  # it is at its end: nothing more is taken from it
                return
            if not size:
                self.remove(session)
                session.abort()
                return
            # What did not fill the buffer was all of it.
            is_all = size < len(buffer) and not is_at_its_end
            session.buffer_updated(size)
            if is_all:
                return
