"""One connection to one other process: its bytes and its handshake."""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import select
import selectors
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from secrets import token_bytes

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import AuthError, WireError
from slurm_resilience.mesh import messages, resolver
from slurm_resilience.mesh.dial_book import DialAddress
from slurm_resilience.mesh.messages import (
    PROTOCOL,
    QUIET_BYTES,
    Filler,
    Message,
    PeerChallenge,
    PeerHello,
    PeerWelcome,
    Roster,
)
from slurm_resilience.mesh.model import CloseCause, Peer, PeerStatus

UNACKED_SECONDS = 4.0
"""A connection ends whose data is not acknowledged for this long: a pulled cable says nothing."""
HANDSHAKE_SECONDS = 5.0
RECEIVE_BYTES = 64 << 10
"""Taken at once. Python makes room for all of it first, which takes long for a megabyte."""
MAX_QUEUED_BYTES = 256 << 20
"""Bytes that wait for a peer that does not read; then it is given up."""
PART_SECONDS = 1.0
"""So long the others have to close as well, at most: one may be stopped, or its cable pulled."""
_READS, _WRITES = select.POLLIN, select.POLLIN | select.POLLOUT

_SINCE_DATA = struct.Struct("=52xI")
"""In Linux's struct tcp_info: milliseconds since data arrived."""
_numbers = itertools.count(1)
_MAY_LIVE = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)
"""Errors that say something of the way, and nothing of the process at its other end."""


class ContactLost(WireError):
    """The connection has ended without the other side's closing it."""

    def __init__(self, message: str, cause: CloseCause) -> None:
        super().__init__(message)
        self.cause: CloseCause = cause


class OtherRelease(WireError):
    """The other side is a rank of another release of this package."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"it speaks version {theirs} of the mesh's protocol, this process {PROTOCOL}: a rank "
            "of another release of slurm-resilience takes no part; start it with the one that the "
            "training was begun with"
        )


def _lost(error: OSError) -> ContactLost:
    cause: CloseCause = "lost" if error.errno in _MAY_LIVE else "reset"
    return ContactLost(f"connection lost: {error.strerror}", cause)


class PeerConnection:
    """A socket that becomes a peer once both sides have shown the secret."""

    def __init__(
        self, sock: socket.socket, secrets: Sequence[bytes], address: DialAddress | None = None
    ) -> None:
        """
        Args:
            sock: connected, or about to be.
            secrets: the training's, as this process knows them; it shows the first.
            address: as it was dialed; None: the other side dialed.
        """
        self.number = next(_numbers)
        """Unique in this process."""
        self.sock = sock
        self.address = address
        self.peer: Peer | None = None
        self.status = PeerStatus()
        """As it was at the handshake."""
        self.born = SYSTEM_CLOCK.monotonic()
        self.finishing = False
        """Nothing more is sent here; what the other side sent before it knew is still read."""
        self.watched = 0
        """For which events the selector looks at it."""
        self.age = 0.0
        """Seconds since the arrival of what is being read."""
        self._wakes_from = 1
        """So many unread bytes wake this process."""
        self._secrets = secrets
        self._nonce = token_bytes(32)
        self._theirs: bytes | None = None
        """The other side's nonce, once it has asked for a proof."""
        self._inbox = bytearray()
        self._outbox = bytearray()
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def dial(cls, address: DialAddress, secrets: Sequence[bytes]) -> PeerConnection:
        """Return a connection that is under way.

        Raises:
            OSError: there is no way to that address.
            NotYet: its name is being looked up.
        """
        family, where = resolver.address(address.host, address.port)
        connection = cls(socket.socket(family, socket.SOCK_STREAM), secrets, address)
        with contextlib.suppress(BlockingIOError):
            connection.sock.connect(where)
        return connection

    def wait_for_acknowledgements(self, seconds: float) -> None:
        """End when what was sent is not acknowledged for so long."""
        with contextlib.suppress(OSError):
            limit = round(1000 * seconds)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)

    @property
    def name(self) -> str:
        """Id of the peer at its other end, or of the one that should be there; empty: unknown."""
        if self.peer is not None:
            return self.peer.id
        return self.address.peer_id if self.address is not None else ""

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def proven(self) -> bool:
        return self.peer is not None

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outbox)

    @property
    def reached(self) -> bool:
        """Something of ours listens there: it has asked for a proof."""
        return self._theirs is not None

    def close(self, watched: selectors.BaseSelector | None = None) -> None:
        """Close it; ``watched`` looks at it no more."""
        if watched is not None and self.fileno() >= 0:
            with contextlib.suppress(KeyError, ValueError):
                watched.unregister(self)
        self.sock.close()

    def abort(self) -> None:
        """Have the other side find it reset: closed in the regular way, in the middle of a
        handshake, it would be taken for the death of this process."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def finish(self) -> None:
        """Send nothing more, as soon as all that waits is sent."""
        self.finishing = True
        if not self._outbox:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def challenge(self) -> None:
        """Send the challenge: the accepting side speaks first."""
        self.send(messages.FRAMES.pack(PeerChallenge(self._nonce)))

    def send(self, frame: bytes) -> None:
        """Send a frame, or as much of it as the socket takes now; the rest follows by `flush`.

        Raises:
            WireError: the connection is gone, or the other side reads nothing.
        """
        if self._outbox:
            if len(self._outbox) + len(frame) > MAX_QUEUED_BYTES:
                raise WireError("it does not read what it is sent")
            self._outbox += frame
            return
        try:
            sent = self.sock.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise _lost(error) from None
        if sent < len(frame):
            self._outbox += frame[sent:]

    def flush(self) -> None:
        """Send what is waiting.

        Raises:
            WireError: the connection is gone.
        """
        try:
            sent = self.sock.send(self._outbox)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise _lost(error) from None
        del self._outbox[:sent]
        if self.finishing:
            self.finish()

    def take(self, *, late: bool = False) -> bool:
        """Take what has arrived from the kernel; tell whether that was anything.

        Args:
            late: it may have arrived some time ago, since it woke no thread.

        Raises:
            WireError: the connection is closed (the reason is then ``closed``).
        """
        self.age = self._since_data() if late else 0.0
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise _lost(error) from None
        if not data:
            raise WireError("connection closed")
        self._inbox += data
        return True

    def received(self) -> Iterator[Message]:
        """Whole messages of what was taken, each when the one before has been handled: the
        handshake decides how long the next may be.

        Raises:
            WireError: it speaks nonsense.
        """
        while self.fileno() >= 0:
            limit = messages.MAX_FRAME_BYTES if self.proven else messages.MAX_UNPROVEN_BYTES
            message = messages.FRAMES.take(self._inbox, limit)
            if message is None:
                break
            if not isinstance(message, Filler):
                yield message
        self._choose_what_wakes()

    def _choose_what_wakes(self) -> None:
        """Have heartbeats not wake this process, but the rest of a message that has begun."""
        least = QUIET_BYTES if self.proven and not self._inbox else 1
        if least != self._wakes_from:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
                self._wakes_from = least

    def _since_data(self) -> float:
        """Return the seconds since data arrived last."""
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SINCE_DATA.size)
        except OSError:
            return 0.0
        return float(_SINCE_DATA.unpack(info)[0]) / 1000

    def handshake(
        self, message: Message, me: Peer, status: PeerStatus, roster: Callable[[], tuple[Peer, ...]]
    ) -> bool:
        """Handle a message of an unproven connection; True when it has just been proven.

        Raises:
            AuthError: the other side does not know the secret.
            OtherRelease: it speaks another version of the protocol.
            WireError: it speaks out of turn.
        """
        if isinstance(message, PeerChallenge | PeerHello) and message.protocol != PROTOCOL:
            raise OtherRelease(message.protocol)
        if isinstance(message, PeerChallenge) and self.address and self._theirs is None:
            self._theirs = message.nonce
            to = self.address.peer_id or f":{self.address.port}"
            shown = self._secrets[0]
            proof = messages.proof(shown, "dial", message.nonce, self._nonce, me.id, to)
            self.send(messages.FRAMES.pack(PeerHello(me, status, self._nonce, proof, to)))
            return False
        if isinstance(message, PeerHello) and not self.address:
            shown = self._shown_by(message)
            if message.to not in (me.id, f":{me.port}"):
                raise WireError(f"it looks for {message.to}")
            proof = messages.proof(shown, "accept", message.nonce, self._nonce, me.id)
            self.send(messages.FRAMES.pack(PeerWelcome(me, status, proof)))
            if message.peer.seat >= 0:
                self.send(messages.framed(Roster(roster())))
            self.peer, self.status = message.peer, message.status
            return True
        if isinstance(message, PeerWelcome) and self._theirs is not None:
            expected = messages.proof(
                self._secrets[0], "accept", self._nonce, self._theirs, message.peer.id
            )
            if not hmac.compare_digest(expected, message.proof):
                raise AuthError("it does not know this training's secret")
            self.peer, self.status = message.peer, message.status
            return True
        raise WireError("it speaks out of turn")

    def _shown_by(self, hello: PeerHello) -> bytes:
        """Return the secret of this process that a dialer has shown.

        Raises:
            AuthError: none.
        """
        for secret in self._secrets:
            said = (self._nonce, hello.nonce, hello.peer.id, hello.to)
            expected = messages.proof(secret, "dial", *said)
            if hmac.compare_digest(expected, hello.proof):
                return secret
        raise AuthError("it does not know this training's secret")


def part(connections: Collection[PeerConnection], seconds: float = PART_SECONDS) -> None:
    """Close connections that nothing else uses any more, so that what was said last arrives.

    A socket that is closed while the other side still says something is reset. A process that finds
    so that it can send nothing any more ends the connection, with words unread that had arrived
    before: one rank had ended the training for all, say, and another one went on alone. So the side
    that closes says that nothing more comes, and takes what the other one says until that one,
    which has read all, has closed too.

    Args:
        connections: those in the middle of their handshake are closed at once.
        seconds: that it may take.
    """
    left = {one.fileno(): one for one in connections if one.proven and one.fileno() >= 0}
    for one in connections:
        if one.fileno() not in left:
            one.close()
    looks = select.poll()
    for descriptor, one in list(left.items()):
        one.finish()
        looks.register(descriptor, _WRITES if one.wants_to_write else _READS)
    until = SYSTEM_CLOCK.monotonic() + seconds
    while left and (rest := until - SYSTEM_CLOCK.monotonic()) > 0:
        for descriptor, events in looks.poll(1000 * rest):
            if not _goes_on(left[descriptor], events):
                looks.unregister(descriptor)
                left.pop(descriptor).close()
            elif not left[descriptor].wants_to_write:
                looks.modify(descriptor, _READS)
    for one in left.values():
        one.close()


def _goes_on(connection: PeerConnection, events: int) -> bool:
    """Send what waits, drop what comes; tell whether the other side has not closed yet."""
    with contextlib.suppress(WireError):
        if connection.wants_to_write and events & select.POLLOUT:
            connection.flush()
        if events & ~select.POLLOUT:
            connection.take()
            for _ in connection.received():
                pass
        return True
    return False
