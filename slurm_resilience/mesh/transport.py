"""Connections to other processes, and the one thread that serves them.

`Mesh` and `Observer` own one each. It knows nothing of seats and generations: it dials, accepts,
shakes hands, and carries messages.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import selectors
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import AuthError, WireError
from slurm_resilience.mesh import messages
from slurm_resilience.mesh.connection import (
    HANDSHAKE_SECONDS,
    UNACKED_SECONDS,
    ContactLost,
    OtherRelease,
    PeerConnection,
    part,
)
from slurm_resilience.mesh.dial_book import REFUSED_SECONDS, DialAddress, DialBook
from slurm_resilience.mesh.fair_lock import FairLock
from slurm_resilience.mesh.messages import Message
from slurm_resilience.mesh.model import CloseCause, Peer, PeerStatus
from slurm_resilience.mesh.resolver import NotYet

log = logging.getLogger("sres.mesh")

STRANGERS = 64
"""Accepted connections that have not shown the secret yet, at most."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted before the others are served again: a program that connects without a pause
would keep this process from its beats, and the others would take it for hung."""
FORKED, ENDED = -1, -2
"""In place of a file descriptor: in a child of a fork, and after the end of the thread."""
TEND_SECONDS = 0.5
"""Between two looks for handshakes that take too long."""


class _Limits(NamedTuple):
    strangers: int
    """Accepted connections that may be unproven at a time."""
    seconds: float
    """After which an unproven connection is closed."""
    unacked: float
    """Seconds without an acknowledgement after which a connection is lost."""


class TransportOwner(Protocol):
    """The owner of a transport. Its thread calls all but `on_turn` with the lock."""

    def introduction(self) -> tuple[PeerStatus, Callable[[], tuple[Peer, ...]]]:
        """Return the status, and a function for the known peers, that are said at a handshake."""
        ...

    def on_proven(self, connection: PeerConnection) -> None:
        """Take note that the other side has shown the secret."""
        ...

    def on_message(self, connection: PeerConnection, message: Message) -> None:
        """Take a message that has arrived on a proven connection."""
        ...

    def on_bytes(self, connection: PeerConnection) -> None:
        """Part of a message has arrived on a proven connection."""
        ...

    def on_closed(self, connection: PeerConnection, reason: str, cause: CloseCause) -> None:
        """Take note of the end of a proven connection."""
        ...

    def on_absent(self, peer_id: str) -> None:
        """No process listens where a peer did."""
        ...

    def on_refused(self, now: float) -> None:
        """Take note of a dialer that does not know the secret."""
        ...

    def on_hung_up(self, now: float) -> None:
        """Take note that the other side, which was dialed, has ended a handshake."""
        ...

    def on_turn(self, now: float) -> float:
        """Do what is due; the time of the next call, if nothing happens before."""
        ...

    def on_failure(self, error: Exception) -> None:
        """Take note that the thread ends by an error."""
        ...


class Refusals:
    """Connections that were refused: said once in a while, however many there are."""

    def __init__(self) -> None:
        self._count = 0
        self._told_at = -REFUSED_SECONDS

    def add(self, address: DialAddress | None, reason: str, now: float) -> None:
        """Count one."""
        self._count += 1
        if now - self._told_at >= REFUSED_SECONDS:
            where = f"{address.host}:{address.port}" if address else "a dialer"
            log.warning("%d connection(s) refused, last of %s: %s", self._count, where, reason)
            self._count, self._told_at = 0, now


class Transport:
    """The sockets of one process.

    A child of a fork (a DataLoader's worker, say) closes its copies at once: one that outlives this
    process would keep the connections open, and its death from the others.
    """

    _all: ClassVar[weakref.WeakSet[Transport]] = weakref.WeakSet()

    def __init__(
        self,
        owner: TransportOwner,
        me: Peer,
        secret: bytes,
        *,
        listen: bool = True,
        strangers: int = STRANGERS,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        unacked_seconds: float = UNACKED_SECONDS,
    ) -> None:
        """
        Args:
            owner: is told what happens.
            me: this process; ``port`` 0 lets the kernel choose one.
            secret: the training's.
            listen: others may dial this process.
            strangers: accepted connections that may be unproven at a time.
            handshake_seconds: after which an unproven connection is closed.
            unacked_seconds: after which a connection whose data is not acknowledged is lost.

        Raises:
            OSError: the port cannot be listened on.
        """
        self.lock = FairLock()
        """Held while the owner is called; while it is held, no socket is opened or closed."""
        self.connections: dict[int, PeerConnection] = {}
        self._owner = owner
        self._secrets: tuple[bytes, ...] = (secret,)
        """The newest first."""
        self._limits = _Limits(strangers, handshake_seconds, unacked_seconds)
        self._names: Counter[str] = Counter()
        """Connections to each peer, proven or not."""
        self._dials = DialBook()
        self._refusals = Refusals()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self.me = me
        if listen:
            family = socket.AF_INET6 if ":" in me.host else socket.AF_INET
            where = (me.host, me.port)
            self._listener = socket.create_server(where, family=family, backlog=1024)
            self._listener.setblocking(False)
            self.me = msgspec.structs.replace(me, port=self._listener.getsockname()[1])
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._is_unsettled = False
        """There may be something for `_tend` to do."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sres-mesh", daemon=True)
        Transport._all.add(self)

    # -- for the owner, from any thread -------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Close all connections, and wait for the thread so long."""
        self._closing = True
        if self.is_forked:
            return
        self.ring()
        self._thread.join(seconds)

    @property
    def is_forked(self) -> bool:
        """Tell whether this is a child of a fork: it has no such thread, and a lock that another
        one held stays so."""
        return self._wake == FORKED

    def refuse_fork(self) -> None:
        """Check that this is the process that the thread runs in.

        Raises:
            RuntimeError: this is a child of a fork.
        """
        if self.is_forked:
            raise RuntimeError(
                "this process was forked from a rank and takes no part in its training: end it "
                "with os._exit(), before it leaves the function that forked it"
            )

    def ring(self) -> None:
        """Have the thread take a turn now.

        Raises:
            RuntimeError: as `refuse_fork`.
        """
        self.refuse_fork()
        if self._wake != ENDED:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def is_serving(self) -> bool:
        """Tell whether this is called by its own thread, whose turn is not over."""
        return threading.current_thread() is self._thread

    def own_fds(self) -> set[int]:
        """Its file descriptors, which the rest of the program must not close."""
        with self.lock:
            fds = {connection.fileno() for connection in self.connections.values()} | {self._wake}
            fds |= {self._listener.fileno()} if self._listener else set()
            return {fd for fd in fds if fd >= 0}

    def unproven(self) -> list[PeerConnection]:
        """Return the connections in the middle of their handshake."""
        return [connection for connection in self.connections.values() if not connection.proven]

    def dial(self, address: DialAddress) -> None:
        """Connect, if there is no such connection yet."""
        if self._closing or self._is_known(address):
            return
        try:
            connection = PeerConnection.dial(address, self._secrets)
        except NotYet:
            self._dials.looked_up(address, SYSTEM_CLOCK.monotonic())
            return
        except OSError as error:
            log.debug("%s:%s: %s", address.host, address.port, error)
            self._dials.unreachable(address, SYSTEM_CLOCK.monotonic())
            self._note_refusal(address, error.errno)
            return
        self._add(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def take_secret(self, secret: bytes) -> None:
        """Take another secret for the connections that begin from now on: this process shows the
        newest, and takes each that it has had for a proof. Others may not know of the newest yet.
        """
        self._secrets = (secret, *(known for known in self._secrets if known != secret))

    def send(self, numbers: Iterable[int], message: Message) -> None:
        """Send a message on connections, as far as they still exist."""
        frame = messages.framed(message)
        for number in numbers:
            connection = self.connections.get(number)
            if connection is None:
                continue
            try:
                connection.send(frame)
            except WireError as error:
                self._end(connection, error)
                continue
            if connection.wants_to_write:
                self._watch(connection)
                self.ring()

    def finish(self, number: int) -> None:
        """Send nothing more on a connection; it is read until the other side closes it."""
        connection = self.connections.get(number)
        if connection is not None:
            connection.born = SYSTEM_CLOCK.monotonic()
            connection.finish()
            self._is_unsettled = True

    def close(self, number: int) -> None:
        """Close a connection; the owner is not told."""
        connection = self.connections.get(number)
        if connection is not None:
            self._drop(connection)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.exception("the mesh failed")
            self._owner.on_failure(error)
        finally:
            with self.lock:
                self._closing = True
                connections = list(self.connections.values())
                self.connections.clear()
                if self._listener is not None:
                    self._listener.close()
                self._selector.close()
                # Its number may soon be another file's: no child of a fork closes that, and no
                # thread writes there.
                Transport._all.discard(self)
                wake, self._wake = self._wake, ENDED
                os.close(wake)
            part(connections)

    def _serve(self) -> None:
        wake_at = tended_at = SYSTEM_CLOCK.monotonic()
        while not self._closing:
            redial_at = self._dials.next_at()
            due = wake_at if redial_at is None else min(wake_at, redial_at)
            if self._is_unsettled:
                due = min(due, tended_at + TEND_SECONDS)
            for key, events in self._selector.select(max(0.0, due - SYSTEM_CLOCK.monotonic())):
                with self.lock:
                    key.data(events)
            now = SYSTEM_CLOCK.monotonic()
            with self.lock:
                for address in self._dials.take_due(now):
                    self.dial(address)
                if self._is_unsettled and now >= tended_at + TEND_SECONDS:
                    tended_at = now
                    self._tend(now)
            wake_at = self._owner.on_turn(now)

    def _tend(self, now: float) -> None:
        """Close connections whose handshake takes too long, and listen again after a shortage of
        file descriptors."""
        self._is_unsettled = False
        for connection in list(self.connections.values()):
            if connection.proven and not connection.finishing:
                continue
            self._is_unsettled = True
            if now - connection.born > self._limits.seconds:
                self._end(connection, WireError("the handshake took too long"))
        if self._listener is not None and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    @classmethod
    def forked(cls) -> None:
        """Close this child's copies of its parent's sockets. The lock may be held by a thread that
        is not here."""
        for transport in list(cls._all):
            transport._closing = True
            for connection in list(transport.connections.values()):
                connection.close()
            if transport._listener is not None:
                transport._listener.close()
            # Taken out of it, they would be so in the parent as well.
            transport._selector.close()
            wake, transport._wake = transport._wake, FORKED
            with contextlib.suppress(OSError):
                os.close(wake)

    # -- connections --------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _turn in range(ACCEPTED_AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._make_room(0):
                        continue
                    # It would be called again at once, and again.
                    self._selector.unregister(self._listener)
                    self._is_unsettled = True
                return
            self._make_room(self._limits.strangers)
            connection = PeerConnection(sock, self._secrets)
            self._add(connection, selectors.EVENT_READ)
            self._try(connection, connection.challenge)

    def _make_room(self, most: int) -> bool:
        """Close the oldest of more than so many that have not shown the secret: a peer needs a
        moment for that, and is dialed again if it was dropped; a silent stranger stays longest."""
        strangers = [c for c in self.connections.values() if c.address is None and not c.proven]
        if len(strangers) <= most:
            return False
        self._drop(min(strangers, key=lambda connection: connection.born))
        return True

    def _note_refusal(self, address: DialAddress, code: int | None) -> None:
        if code == errno.ECONNREFUSED and address.peer_id:
            self._owner.on_absent(address.peer_id)

    def _add(self, connection: PeerConnection, events: int) -> None:
        self.connections[connection.number] = connection
        self._is_unsettled = True
        self._names[connection.name] += 1
        connection.watched = events
        connection.wait_for_acknowledgements(self._limits.unacked)
        self._selector.register(connection, events, lambda e: self._serve_one(connection, e))

    def _is_known(self, address: DialAddress) -> bool:
        where = (address.host, address.port)
        if address.peer_id == self.me.id or where == (self.me.host, self.me.port):
            return True
        if address.peer_id:
            return self._names[address.peer_id] > 0
        return any(
            connection.address == address
            or (connection.peer and (connection.peer.host, connection.peer.port) == where)
            for connection in self.connections.values()
        )

    def _serve_one(self, connection: PeerConnection, events: int) -> None:
        if connection.fileno() < 0:
            return
        if events & selectors.EVENT_WRITE:
            if connection.address and not connection.proven:
                code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    self._drop(connection, was_reset=code == errno.ECONNRESET)
                    self._note_refusal(connection.address, code)
                    return
            if connection.wants_to_write:
                self._try(connection, connection.flush)
            self._watch(connection)
        if events & selectors.EVENT_READ and connection.fileno() >= 0:
            self._try(connection, lambda: self._read(connection))

    def _watch(self, connection: PeerConnection) -> None:
        waits = selectors.EVENT_WRITE if connection.wants_to_write else 0
        events = selectors.EVENT_READ | waits
        if events == connection.watched or connection.fileno() < 0:
            return
        with contextlib.suppress(KeyError):
            self._selector.modify(connection, events, self._selector.get_key(connection).data)
            connection.watched = events

    def _try(self, connection: PeerConnection, act: Callable[[], None]) -> None:
        try:
            act()
        except AuthError as error:
            self._drop(connection)
            now, address = SYSTEM_CLOCK.monotonic(), connection.address
            self._refusals.add(address, str(error), now)
            if address is not None:
                self._dials.refused(address.host, address.port, now)
            else:
                self._owner.on_refused(now)
        except WireError as error:
            if isinstance(error, OtherRelease):
                now, address = SYSTEM_CLOCK.monotonic(), connection.address
                self._refusals.add(address, str(error), now)
            self._end(connection, error)
            if connection.reached and not connection.proven:
                self._owner.on_hung_up(SYSTEM_CLOCK.monotonic())

    def take_quiet(self) -> None:
        """Read what has arrived without waking the thread. Called by the thread, with the lock."""
        for connection in list(self.connections.values()):
            if connection.proven:
                self._try(connection, functools.partial(self._read, connection, late=True))

    def _read(self, connection: PeerConnection, *, late: bool = False) -> None:
        if not connection.take(late=late):
            return
        whole = False
        for message in connection.received():
            whole = True
            if connection.proven:
                self._owner.on_message(connection, message)
            elif connection.handshake(message, self.me, *self._owner.introduction()):
                self._prove(connection)
        if connection.proven and not whole:
            self._owner.on_bytes(connection)
        self._watch(connection)

    def _prove(self, connection: PeerConnection) -> None:
        if not (connection.address and connection.address.peer_id):
            self._names[""] -= 1
            self._names[connection.name] += 1
        self._owner.on_proven(connection)

    def _end(self, connection: PeerConnection, error: WireError) -> None:
        if connection.number not in self.connections:
            return
        cause = error.cause if isinstance(error, ContactLost) else "closed"
        self._drop(connection, was_reset=cause == "reset")
        if connection.proven:
            self._owner.on_closed(connection, str(error), cause)

    def _drop(self, connection: PeerConnection, *, was_reset: bool = False) -> None:
        if self.connections.pop(connection.number, None) is None:
            return
        if connection.address and not connection.proven:
            connection.abort()
        connection.close(self._selector)
        self._names[connection.name] -= 1
        if connection.address and not connection.proven and not self._closing:
            now = SYSTEM_CLOCK.monotonic()
            self._dials.unproven(connection.address, connection.reached, now, was_reset=was_reset)


os.register_at_fork(after_in_child=Transport.forked)
