"""Look at a training from outside, and tell it what is known of a node.

The supervisor does so: it takes no seat and never forms a generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.connection import PeerConnection
from slurm_resilience.mesh.dial_book import DialAddress
from slurm_resilience.mesh.messages import (
    GenerationEnded,
    Heartbeat,
    Leaving,
    Message,
    NodeLost,
    NodeSuspected,
    StatusUpdate,
)
from slurm_resilience.mesh.model import CloseCause, Peer, PeerStatus
from slurm_resilience.mesh.protocol.contacts import Contact
from slurm_resilience.mesh.rendezvous import TrainingOutcome, rendezvous_at
from slurm_resilience.mesh.transport import Transport

log = logging.getLogger("sres.observer")

LOOK_SECONDS = 0.5
"""Between two looks for peers that are not connected yet."""
CLOSE_SECONDS = 2.0
"""Time that `close` waits for the thread."""


class Picture(msgspec.Struct, frozen=True):
    """A training at one moment, as its peers tell it."""

    generation: int = 0
    """The newest generation that any peer is in."""
    running: tuple[int, ...] = ()
    """Seats whose process is inside its block in that generation."""
    waiting: tuple[int, ...] = ()
    """Seats whose process waits outside."""
    step: int = -1
    """The newest committed step that was told."""
    peers: tuple[Peer, ...] = ()
    """All that are connected."""
    outcome: TrainingOutcome | None = None
    """Its end; None: it goes on."""
    inside: frozenset[str] = frozenset()
    """Ids of the processes of `running`. One on a node that died unseen is among them for minutes,
    also when its seat has another process by then."""

    @property
    def done(self) -> bool:
        """It has ended well."""
        return self.outcome is not None and self.outcome.code == 0

    def missing(self, seats: int) -> tuple[int, ...]:
        """Seats without a live process, of so many."""
        taken = {peer.seat for peer in self.peers}
        return tuple(seat for seat in range(seats) if seat not in taken)


class Observer:
    """Connections to all peers that the rendezvous lists. A context manager."""

    def __init__(self, meet: str, secret: str = "") -> None:
        """
        Args:
            meet: as SRES_MEET.
            secret: hex; empty: the one in the directory.

        Raises:
            UsageError: the rendezvous cannot be used.
        """
        self._rendezvous = rendezvous_at(meet, secret)
        me = Peer(id=f"observer-{uuid.uuid4().hex[:12]}", seat=-1, pid=os.getpid())
        self._transport = Transport(self, me, self._rendezvous.secret(), listen=False)
        self._lock = self._transport.lock
        self._contacts: dict[str, Contact] = {}
        self._findings: list[NodeLost] = []
        self._wrong_nodes: dict[tuple[int, str], str] = {}
        """Generation and node → what was found."""
        self._wrong_taken: set[tuple[int, str]] = set()
        self._next_look = 0.0
        self._has_been_refused = False
        """A peer hung up: it may have another secret."""
        self._outcome: TrainingOutcome | None = None
        self.news = threading.Event()
        """Set on every change; a thread that waits for it clears it."""
        self._transport.start()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            numbers = [contact.connection for contact in self._contacts.values()]
            self._transport.send(numbers, Leaving())
        self._transport.stop(CLOSE_SECONDS)

    def find(self, node: str, reason: str, dead: bool) -> None:
        """Tell every peer, those that are reached later too.

        Args:
            node: the node's name, as its processes call it (SRES_NODE).
            reason: why it must be left; shown in the training's log.
            dead: it is gone, and nothing on it may be waited for.
        """
        finding = NodeLost(node, reason, dead)
        with self._lock:
            self._findings.append(finding)
            numbers = [contact.connection for contact in self._contacts.values()]
            self._transport.send(numbers, finding)

    def suspect(self, node: str, reason: str) -> None:
        """Tell every peer that a node is not heard of: if it is silent for them too, they go on
        without it, sooner than otherwise. Its ranks come back when it does.

        Args:
            node: as in `find`.
            reason: shown in the training's log.
        """
        with self._lock:
            numbers = [contact.connection for contact in self._contacts.values()]
            self._transport.send(numbers, NodeSuspected(node, reason))

    def forget(self, node: str) -> None:
        """Forget a finding: the node is good again, and newcomers are not told about it any
        more."""
        with self._lock:
            self._findings = [finding for finding in self._findings if finding.node != node]

    def take_wrong_nodes(self) -> dict[str, str]:
        """Return the nodes, each with what was found, whose ranks had other parameters than most
        replicas: those that were told of since the last call."""
        with self._lock:
            new = self._wrong_nodes.keys() - self._wrong_taken
            self._wrong_taken |= new
            return {node: self._wrong_nodes[generation, node] for generation, node in sorted(new)}

    def picture(self) -> Picture:
        """Return what is known now."""
        with self._lock:
            contacts = [contact for contact in self._contacts.values() if contact.peer.seat >= 0]
            newest = max((contact.status.generation for contact in contacts), default=0)
            running: list[int] = []
            waiting: list[int] = []
            inside: set[str] = set()
            for contact in contacts:
                status, peer = contact.status, contact.peer
                is_inside = status.phase == "running" and status.generation == newest
                (running if is_inside else waiting).append(peer.seat)
                if is_inside:
                    inside.add(peer.id)
            return Picture(
                generation=newest,
                running=tuple(sorted(running)),
                waiting=tuple(sorted(waiting)),
                step=max((max(c.status.step, c.beat.step) for c in contacts), default=-1),
                peers=tuple(contact.peer for contact in contacts),
                outcome=self._outcome,
                inside=frozenset(inside),
            )

    # -- what the transport calls -------------------------------------------------------------

    def introduction(self) -> tuple[PeerStatus, Callable[[], tuple[Peer, ...]]]:
        """Return what is said at a handshake."""
        return PeerStatus(), tuple

    def on_proven(self, connection: PeerConnection) -> None:
        """Take a peer in, and tell it what was found."""
        peer = connection.peer
        assert peer is not None
        if peer.id in self._contacts:
            self._transport.close(connection.number)
            return
        now = SYSTEM_CLOCK.monotonic()
        self._contacts[peer.id] = Contact(peer, connection.number, connection.status, now, now)
        for finding in self._findings:
            self._transport.send((connection.number,), finding)
        self.news.set()

    def on_message(self, connection: PeerConnection, message: Message) -> None:
        """Note how far a peer is."""
        contact = self._contacts.get(connection.name)
        if contact is None:
            return
        if isinstance(message, StatusUpdate) and message.number > contact.number:
            contact.number, contact.status = message.number, message.status
            self.news.set()
        elif isinstance(message, Heartbeat):
            contact.beat = message
        elif isinstance(message, GenerationEnded) and message.end.wrong_nodes:
            # Each rank tells it.
            end = message.end
            for node in end.wrong_nodes:
                self._wrong_nodes[end.generation, node] = end.reason
            self.news.set()

    def on_bytes(self, connection: PeerConnection) -> None:
        """Nothing is concluded from a peer's silence here."""

    def on_absent(self, peer_id: str) -> None:
        """Nothing is concluded from it here."""

    def on_closed(self, connection: PeerConnection, reason: str, cause: CloseCause) -> None:
        """Note a loss."""
        log.debug("%s: %s", connection.name, reason)
        contact = self._contacts.get(connection.name)
        if contact is not None and contact.connection == connection.number:
            del self._contacts[connection.name]
            self.news.set()

    def on_refused(self, now: float) -> None:
        """Nothing is to be done: an observer is not dialed."""

    def on_hung_up(self, now: float) -> None:
        """Look soon whether there is another secret."""
        self._has_been_refused = True

    def on_turn(self, now: float) -> float:
        """Look for peers that are not connected yet, and for the training's end."""
        if now < self._next_look:
            return self._next_look
        self._next_look = now + LOOK_SECONDS
        # Without the lock: a shared directory may be slow.
        outcome, others = self._rendezvous.ended(), self._rendezvous.others()
        secret = self._look_at_secret()
        with self._lock:
            if secret is not None:
                self._transport.take_secret(secret)
            if outcome != self._outcome:
                self._outcome = outcome
                self.news.set()
            for address in others:
                self._transport.dial(DialAddress(*address))
            self._transport.take_quiet()
        return self._next_look

    def _look_at_secret(self) -> bytes | None:
        """Return a secret that has come to count since this process began; None: there is none."""
        if self._has_been_refused:
            self._has_been_refused = False
            with contextlib.suppress(OSError, UsageError):
                return self._rendezvous.other_secret()
        return None

    def on_failure(self, error: Exception) -> None:
        """Leave the picture as it is."""
        self.news.set()
