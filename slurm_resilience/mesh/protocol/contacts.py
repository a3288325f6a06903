"""The peers that a process is connected to, and which connection to each one counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from enum import Enum

import msgspec

from slurm_resilience.mesh.messages import Heartbeat
from slurm_resilience.mesh.model import Member, Peer, PeerStatus

NO_BEAT = Heartbeat()


class ConnectionState(Enum):
    """The life of a connection after both sides have shown the secret."""

    CURRENT = "current"
    """The one that counts: its end is the peer's."""
    SUPERSEDED = "superseded"
    """Another one to the same peer counts; what still arrives here is read."""
    FINISHING = "finishing"
    """Superseded, and this side sends nothing more on it."""
    CLOSED = "closed"


CONNECTION_MOVES: dict[ConnectionState, frozenset[ConnectionState]] = {
    ConnectionState.CURRENT: frozenset(
        {ConnectionState.SUPERSEDED, ConnectionState.FINISHING, ConnectionState.CLOSED}
    ),
    ConnectionState.SUPERSEDED: frozenset({ConnectionState.CURRENT, ConnectionState.CLOSED}),
    ConnectionState.FINISHING: frozenset({ConnectionState.CLOSED}),
    ConnectionState.CLOSED: frozenset(),
}


class Contact(msgspec.Struct, eq=False):
    """A connected peer, and what it last said."""

    peer: Peer
    connection: int
    status: PeerStatus
    heard: float
    met_at: float
    """When it was met, or could be heard again: what is known of it by then may be old."""
    number: int = -1
    """Number of its newest status update; -1: only the handshake's status is known."""
    beat: Heartbeat = NO_BEAT


class Contacts:
    """All connected peers."""

    def __init__(self) -> None:
        self._by_id: dict[str, Contact] = {}
        self._running: dict[str, Contact] = {}
        """Those that are in their block."""
        self._connections: tuple[int, ...] | None = None
        """As last returned; None: one has come or gone since."""
        self._on_seat: dict[int, list[str]] = {}
        self._numbers: dict[str, list[int]] = {}
        """All connections to each peer."""
        self._states: dict[int, ConnectionState] = {}
        self._owners: dict[int, str] = {}
        self._ended_on_purpose: set[int] = set()
        """Connections of which the other side has said that their end is no death."""

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._by_id

    def __iter__(self) -> Iterator[Contact]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, peer_id: str) -> Contact | None:
        """Return the contact to a peer; None: it is not connected."""
        return self._by_id.get(peer_id)

    def of(self, peer_ids: Iterable[str]) -> list[Contact]:
        """Return the contacts to those of several peers that are connected."""
        by_id = self._by_id
        return [by_id[peer_id] for peer_id in peer_ids if peer_id in by_id]

    def seated(self) -> list[Contact]:
        """Those that take part in the training; observers have no seat."""
        return [contact for contact in self._by_id.values() if contact.peer.seat >= 0]

    def note_status(self, contact: Contact, status: PeerStatus) -> None:
        """Note what a peer has said of itself."""
        contact.status = status
        if status.phase == "running":
            self._running[contact.peer.id] = contact
        else:
            self._running.pop(contact.peer.id, None)

    def inside(self) -> list[Contact]:
        """Return those that take part in the training and are in their block."""
        return [contact for contact in self._running.values() if contact.peer.seat >= 0]

    def besides(self, peer_ids: Set[str]) -> Set[str]:
        """Return the ids of the connected peers that are not among these."""
        return self._by_id.keys() - peer_ids

    @property
    def seats(self) -> Set[int]:
        """Return the seats on which any sits."""
        return self._on_seat.keys()

    def on_seat(self, seat: int) -> list[Contact]:
        """Return those that sit on one seat."""
        return [self._by_id[peer_id] for peer_id in sorted(self._on_seat.get(seat, ()))]

    def members(self) -> list[Member]:
        """Return the same as members of a world."""
        return [Member(contact.peer, contact.status) for contact in self.seated()]

    def connections(self) -> tuple[int, ...]:
        """Return the connection of each peer."""
        if self._connections is None:
            self._connections = tuple(contact.connection for contact in self._by_id.values())
        return self._connections

    def state(self, connection: int) -> ConnectionState | None:
        """None: unknown, or closed before."""
        return self._states.get(connection)

    def open_of(self, connections: Iterable[int]) -> tuple[int, ...]:
        """Return those of several connections that are known, and not closed."""
        states = self._states
        return tuple([number for number in connections if number in states])

    def owner(self, connection: int) -> Contact | None:
        """Return the contact to which a superseded or counting connection belongs."""
        return self._by_id.get(self._owners.get(connection, ""))

    def add(self, contacts: Sequence[Contact]) -> None:
        """Add peers that are connected for the first time."""
        on_seat, numbers = self._on_seat, self._numbers
        for contact in contacts:
            peer = contact.peer
            on_seat.setdefault(peer.seat, []).append(peer.id)
            # An older connection may not have come to its end yet.
            numbers.setdefault(peer.id, []).append(contact.connection)
        added = {contact.peer.id: contact for contact in contacts}
        self._by_id |= added
        self._running |= {i: c for i, c in added.items() if c.status.phase == "running"}
        owners = {contact.connection: peer_id for peer_id, contact in added.items()}
        self._owners |= owners
        self._states |= dict.fromkeys(owners, ConnectionState.CURRENT)
        self._connections = None

    def supersede(self, contact: Contact, kept: int, dropped: int, finish: bool) -> None:
        """Have one of two connections to a peer count from now on.

        Args:
            contact: the peer's.
            kept: the connection that counts.
            dropped: the other one.
            finish: this process ends the other one.
        """
        for connection in (kept, dropped):
            self._own(connection, contact.peer.id)
        contact.connection = kept
        self._move(dropped, ConnectionState.FINISHING if finish else ConnectionState.SUPERSEDED)

    def expect_end(self, connection: int) -> None:
        """Note that the other side ends a connection on purpose."""
        if connection in self._states:
            self._ended_on_purpose.add(connection)

    def ends_on_purpose(self, connection: int) -> bool:
        """Tell whether the end of a connection says nothing of its peer's life."""
        return connection in self._ended_on_purpose

    def close(self, connection: int) -> Contact | None:
        """Forget a connection; return the contact that is lost with it, if it was the last one."""
        state = self._states.get(connection)
        if state is None:
            return None
        self._move(connection, ConnectionState.CLOSED)
        owner = self._disown(connection)
        if state is not ConnectionState.CURRENT or self._promote(owner):
            return None
        return self._forget(owner)

    def _promote(self, peer_id: str) -> bool:
        """Have a superseded connection count again: the one that was chosen may have been dead at
        its other end already."""
        for number in self._numbers.get(peer_id, ()):
            if self._states[number] is ConnectionState.SUPERSEDED:
                self._move(number, ConnectionState.CURRENT)
                self._by_id[peer_id].connection = number
                return True
        return False

    def drop(self, peer_id: str) -> list[int]:
        """Forget a peer, and return its connections."""
        numbers = list(self._numbers.get(peer_id, ()))
        for number in numbers:
            self._move(number, ConnectionState.CLOSED)
            self._disown(number)
        self._forget(peer_id)
        return numbers

    def _own(self, connection: int, peer_id: str) -> None:
        self._connections = None
        self._states.setdefault(connection, ConnectionState.CURRENT)
        if connection not in self._owners:
            self._numbers.setdefault(peer_id, []).append(connection)
        self._owners[connection] = peer_id

    def _disown(self, connection: int) -> str:
        """Forget a connection; return the peer's id."""
        owner = self._owners.pop(connection)
        del self._states[connection]
        self._ended_on_purpose.discard(connection)
        self._numbers[owner].remove(connection)
        if not self._numbers[owner]:
            del self._numbers[owner]
        return owner

    def _forget(self, peer_id: str) -> Contact | None:
        self._running.pop(peer_id, None)
        contact = self._by_id.pop(peer_id, None)
        if contact is not None:
            on_seat = self._on_seat[contact.peer.seat]
            on_seat.remove(peer_id)
            if not on_seat:
                del self._on_seat[contact.peer.seat]
        return contact

    def _move(self, connection: int, state: ConnectionState) -> None:
        if state not in CONNECTION_MOVES[self._states[connection]]:
            raise ValueError(f"a connection does not go from {self._states[connection]} to {state}")
        self._states[connection] = state
        self._connections = None
