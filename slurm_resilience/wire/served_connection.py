"""One connection of sresctld's: bytes to frames and back, bounded in memory.

Nothing is read ahead: what a user sends too early waits in the kernel's buffer, and then in his own
program's.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Protocol

from slurm_resilience.errors import SresError, WireError
from slurm_resilience.wire.limits import Sender
from slurm_resilience.wire.messages import (
    FRAMES,
    MAX_FRAME_BYTES_OF,
    MAX_UNPROVEN_FRAME_BYTES,
    Beat,
    Message,
    Refused,
)
from slurm_resilience.wire.seal import (
    FROM_CLIENT,
    FROM_SERVER,
    LIGHT_BEAT_BYTES,
    MARK_BYTES,
    FrameSeal,
)

USERS_CHUNK_BYTES = 4 << 10
"""Bytes read at once from a user's connection: no more than that of small messages waits here."""
NODES_CHUNK_BYTES = 64 << 10
HEAD_BYTES = 4
BEATS_CHUNK_BYTES = 16 * LIGHT_BEAT_BYTES + 1
"""Read first of a node's connection: light beats do not fill it, and so were all that came."""
MAX_BACKLOG_BYTES = 4 << 20
"""Bytes queued for one client that does not read; past it the connection is cut."""


class Hold(enum.Flag):
    """The causes for which nothing is read of a connection."""

    NONE = 0
    HANDSHAKE = enum.auto()
    """Its credential is being looked at."""
    TURN = enum.auto()
    """Its user's messages are taken one after the other."""
    UNREAD = enum.auto()
    """It has not read its last answer."""
    CLOSED = enum.auto()


class ConnectionOwner(Protocol):
    """The server's side of a session. Each call is made in the server's thread."""

    def received(self, session: ServedConnection, body: bytes) -> None: ...

    def begins(self, session: ServedConnection, size: int) -> None:
        """Count a message that has begun; raises an SresError when there is no room for it."""
        ...

    def ended(self, session: ServedConnection, size: int) -> None: ...

    def unread(self, session: ServedConnection, waits: bool) -> None:
        """Note that the other side does not read what was sent, or does again."""
        ...

    def failed(self, session: ServedConnection, error: Exception) -> None: ...

    def lost(self, session: ServedConnection) -> None: ...


class ServedConnection(asyncio.BufferedProtocol):
    """A connection, from its first byte to its last."""

    # There is one for each node: without a dictionary each takes a third of the memory.
    __slots__ = (
        "_expected",
        "_filled",
        "_in",
        "_limit",
        "_out",
        "_owner",
        "_rest",
        "_scratch",
        "address",
        "frames",
        "hold",
        "is_counted",
        "is_roots",
        "sender",
        "transport",
    )

    def __init__(
        self, owner: ConnectionOwner, scratch: memoryview, address: str, is_roots: bool
    ) -> None:
        """
        Args:
            owner: the server.
            scratch: bytes of all its connections arrive here first, at most
                `NODES_CHUNK_BYTES`: asyncio fills it and hands it over in one go.
            address: of the other side.
            is_roots: it comes from a port that no user can have.
        """
        self._owner = owner
        self._scratch = scratch
        self.address = address
        self.is_roots = is_roots
        self.sender: Sender | None = None
        """None: it has proven nothing yet."""
        self.is_counted = False
        """It is a user's, and bounded."""
        self.transport: asyncio.Transport | None = None
        self.hold = Hold.NONE
        self.frames = 0
        """Whole ones that have come."""
        self._limit = MAX_UNPROVEN_FRAME_BYTES
        self._rest = bytearray()
        """The beginning of a frame; of a large one, all of its place."""
        self._filled = 0
        self._expected = 0
        """Bytes of the frame that has begun, as the owner counts them."""
        self._in: FrameSeal | None = None
        self._out: FrameSeal | None = None

    def proven(self, sender: Sender, key: bytes, is_counted: bool) -> None:
        """Take sealed frames of a known sender from now on."""
        self.sender, self.is_counted = sender, is_counted
        self._limit = MAX_FRAME_BYTES_OF[sender.role]
        self._in, self._out = FrameSeal(key, FROM_CLIENT), FrameSeal(key, FROM_SERVER)

    # -- what asyncio calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._expected:
            return memoryview(self._rest)[self._filled :]
        trusted = self.sender is not None and not self.is_counted
        return self._scratch if trusted else self._scratch[:USERS_CHUNK_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._expected:
            self._filled += nbytes
            if self._filled == self._expected:
                body = bytes(self._rest[HEAD_BYTES:])
                self._forget()
                self._hand_over(body)
            return
        self._rest += self._scratch[:nbytes]
        self._take()

    def take_beats(self, arrived: bytes) -> bool:
        """Take what has arrived, if it is nothing but light beats; else put it where the rest will
        be put.

        That is what nearly every node sends nearly every time, so it is told first of all.

        Args:
            arrived: at most `BEATS_CHUNK_BYTES`, read while `is_between_frames`.
        """
        assert self._in is not None
        if self._in.are_beats(arrived):
            return True
        # Whatever is wrong with it, the slow path tells.
        self._scratch[: len(arrived)] = arrived
        self.buffer_updated(len(arrived))
        return False

    def pause_writing(self) -> None:
        self._owner.unread(self, True)
        if self.is_counted:
            self.pause(Hold.UNREAD)

    def resume_writing(self) -> None:
        self._owner.unread(self, False)
        self.resume(Hold.UNREAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self.hold |= Hold.CLOSED
        self._forget()
        self._owner.lost(self)

    # -- what the server calls, in its thread -------------------------------------------------

    def pause(self, cause: Hold) -> None:
        """Read nothing more for now."""
        if not self.hold and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        self.hold |= cause

    def resume(self, cause: Hold) -> None:
        """Go on reading, if nothing else is in the way."""
        if not self.hold & cause:
            return
        self.hold &= ~cause
        self._take()
        if not self.hold and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    @property
    def is_between_frames(self) -> bool:
        """A sealed frame may begin with the next byte, and none has begun."""
        is_empty = not (self._rest or self._expected)
        return is_empty and self._in is not None and self.hold is Hold.NONE

    @property
    def is_unfinished(self) -> bool:
        """A message has begun, and its end is not there."""
        return not self.hold and (bool(self._rest) or self._expected > 0)

    @property
    def unread_bytes(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def write(self, body: bytes) -> None:
        """Send a frame, sealed once the other side is proven."""
        if self.transport is None or self.transport.is_closing():
            return
        if self.unread_bytes > MAX_BACKLOG_BYTES:
            self.abort()
            return
        self.transport.write(FRAMES.frame(self._out.close(body) if self._out else body))

    def refuse(self, error: SresError) -> None:
        """Tell why, and end the connection."""
        self.write(FRAMES.encode(Refused(str(error)[:1000], error.exit_code)))
        self.close()

    def close(self) -> None:
        """End the connection when what was sent has left."""
        self.hold |= Hold.CLOSED
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self.hold |= Hold.CLOSED
        if self.transport is not None:
            self.transport.abort()

    def fail(self, error: SresError) -> None:
        """End the connection for something that came over it."""
        self._owner.failed(self, error)

    # -- frames -------------------------------------------------------------------------------

    def _take(self) -> None:
        """Hand over the frames that are there, one by one, until something is in the way."""
        try:
            while not self.hold and not self._expected and len(self._rest) >= HEAD_BYTES:
                end = HEAD_BYTES + FRAMES.unpack_length(self._rest, self._limit)
                if len(self._rest) < end:
                    if end > USERS_CHUNK_BYTES:
                        self._make_room(end)
                    return
                body = bytes(self._rest[HEAD_BYTES:end])
                del self._rest[:end]
                self._hand_over(body)
        except SresError as error:
            self._owner.failed(self, error)

    def _make_room(self, size: int) -> None:
        """Let the rest of a large frame arrive in its own place."""
        self._owner.begins(self, size)
        begun, self._rest = self._rest, bytearray(size)  # untouched pages take no memory yet
        self._rest[: len(begun)] = begun
        self._filled, self._expected = len(begun), size

    def _forget(self) -> None:
        """Forget the frame that has begun."""
        if self._expected:
            self._owner.ended(self, self._expected)
        self._rest, self._filled, self._expected = bytearray(), 0, 0

    def _hand_over(self, body: bytes) -> None:
        self.frames += 1
        try:
            self._owner.received(self, self._opened(body))
        except Exception as error:  # the owner tells a refusal from a fault of ours
            self._owner.failed(self, error)

    def _opened(self, body: bytes) -> bytes:
        """Return a frame's body without its seal; for a light beat, that of a `Beat` with its place
        among the frames for a number."""
        if self._in is None:
            return body
        if len(body) != MARK_BYTES:
            return self._in.open(body)
        if not self._in.are_beats(FRAMES.frame(body)):
            raise WireError("a beat was changed on its way, or comes from another program")
        return FRAMES.encode(Beat(self.frames))


class Client:
    """A proven connection: who it is, and a way to send to it from any thread."""

    # Handlers keep what they know of a client as long as it is there, and no longer.
    __slots__ = ("__weakref__", "_loop", "_session", "address", "kept", "role", "subject", "uid")

    def __init__(
        self,
        sender: Sender,
        address: str,
        session: ServedConnection,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.role, self.subject, self.uid = sender
        self.address = address
        self.kept: object = None
        """The handler's own: what it knows of this client."""
        self._session = session
        self._loop = loop

    def send(self, message: Message) -> None:
        """Queue a message; who is gone or does not read is cut off, never waited for."""
        body = FRAMES.encode(message)
        self._soon(lambda: self._session.write(body))

    def close(self) -> None:
        """End the connection."""
        self._soon(self._session.close)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Have something called in the server's thread after a while."""
        self._soon(lambda: self._loop.call_later(seconds, call))

    def _soon(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return  # the loop has ended already
