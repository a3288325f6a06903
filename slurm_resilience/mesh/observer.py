"""Looking at a training from outside, and telling it what is known of a node.

The supervisor does so: it takes no seat and never forms a generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
import uuid

import msgspec

from slurm_resilience.errors import SresError, WireError
from slurm_resilience.mesh import messages
from slurm_resilience.mesh.connection import HANDSHAKE_SECONDS, PeerConnection
from slurm_resilience.mesh.messages import Heartbeat, Leaving, Message, NodeLost, StatusUpdate
from slurm_resilience.mesh.model import Peer, PeerStatus
from slurm_resilience.mesh.rendezvous import TrainingOutcome, meeting

log = logging.getLogger("sres.observer")

LOOK = 0.5
"""Seconds between two looks for peers that are not connected yet."""


class Picture(msgspec.Struct, frozen=True):
    """A training at one moment, as its peers tell it."""

    generation: int = 0
    """The newest generation that somebody is in."""
    running: tuple[int, ...] = ()
    """Seats whose process is inside its block in that generation."""
    waiting: tuple[int, ...] = ()
    """Seats whose process waits outside."""
    step: int = -1
    """The newest committed step that was told."""
    peers: tuple[Peer, ...] = ()
    """Everybody who is connected."""
    outcome: TrainingOutcome | None = None
    """How it ended; None: it goes on."""

    @property
    def done(self) -> bool:
        """It has ended well."""
        return self.outcome is not None and self.outcome.code == 0

    def missing(self, seats: int) -> tuple[int, ...]:
        """Seats without a live process, of so many."""
        taken = {peer.seat for peer in self.peers}
        return tuple(seat for seat in range(seats) if seat not in taken)


class Observer:
    """Connections to all peers that the meeting place lists. A context manager."""

    def __init__(self, meet: str, secret: str = "") -> None:
        """
        Args:
            meet: as SRES_MEET.
            secret: hex; empty: the one in the directory.

        Raises:
            UsageError: the meeting place cannot be used.
        """
        self._meeting = meeting(meet, secret)
        self._secret = self._meeting.secret()
        self._me = Peer(id=f"observer-{uuid.uuid4().hex[:12]}", seat=-1, pid=os.getpid())
        self._links: dict[str, PeerConnection] = {}
        self._raw: set[PeerConnection] = set()
        self._findings: list[NodeLost] = []
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._next_look = 0.0
        self._outcome: TrainingOutcome | None = None
        self.news = threading.Event()
        """Set on every change; whoever waits for it clears it."""
        self._thread = threading.Thread(target=self._run, name="sres-observer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave; nobody minds."""
        self._closing = True
        self._ring()
        self._thread.join(2.0)

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
            for link in list(self._links.values()):
                self._send(link, finding)
        self._ring()

    def forget(self, node: str) -> None:
        """A node is good again: do not tell newcomers about it any more."""
        with self._lock:
            self._findings = [finding for finding in self._findings if finding.node != node]

    def picture(self) -> Picture:
        """What is known now."""
        with self._lock:
            links = [link for link in self._links.values() if link.peer and link.peer.seat >= 0]
            newest = max((link.status.generation for link in links), default=0)
            running: list[int] = []
            waiting: list[int] = []
            for link in links:
                assert link.peer is not None
                inside = link.status.phase == "running" and link.status.generation == newest
                (running if inside else waiting).append(link.peer.seat)
            return Picture(
                generation=newest,
                running=tuple(sorted(running)),
                waiting=tuple(sorted(waiting)),
                step=max((max(x.status.step, x.beat.step) for x in links), default=-1),
                peers=tuple(link.peer for link in links if link.peer),
                outcome=self._outcome,
            )

    # -- the thread ---------------------------------------------------------------------------

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            log.exception("the observer failed")
        finally:
            with self._lock:
                for link in (*self._links.values(), *self._raw):
                    with contextlib.suppress(WireError):
                        link.send(messages.pack(Leaving()))
                    link.close()
                self._links.clear()
                self._raw.clear()
                self._selector.close()
                os.close(self._wake)

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK
            self._look(now)
        for key, _ in self._selector.select(max(0.0, self._next_look - time.monotonic())):
            if key.fileobj == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                continue
            link = key.fileobj
            assert isinstance(link, PeerConnection)
            with self._lock:
                try:
                    if link.wants_to_write:
                        link.flush()
                    self._read(link)
                except (WireError, SresError) as error:
                    log.debug("%s", error)
                    self._drop(link)

    def _look(self, now: float) -> None:
        with self._lock:
            outcome = self._meeting.ended()
            if outcome != self._outcome:
                self._outcome = outcome
                self.news.set()
            for link in [raw for raw in self._raw if now - raw.born > HANDSHAKE_SECONDS]:
                self._drop(link)
            pending = {raw.address for raw in self._raw}
            known = {(x.peer.host, x.peer.port) for x in self._links.values() if x.peer}
            for name, host, port in self._meeting.others():
                taken = name in self._links or (host, port) in known or (host, port) in pending
                if not taken:
                    self._dial(name, host, port)

    def _dial(self, name: str, host: str, port: int) -> None:
        try:
            link = PeerConnection.dial(host, port, self._secret)
        except OSError as error:
            log.debug("%s:%s: %s", host, port, error)
            return
        link.expected = name
        self._raw.add(link)
        self._selector.register(link, selectors.EVENT_READ)

    def _read(self, link: PeerConnection) -> None:
        for message in link.receive():
            if link.proven:
                self._hear(link, message)
            elif link.handshake(message, self._me, PeerStatus(), tuple):
                self._raw.discard(link)
                assert link.peer is not None
                if link.peer.id in self._links:
                    self._drop(link)
                    return
                self._links[link.peer.id] = link
                for finding in self._findings:
                    self._send(link, finding)
                self.news.set()

    def _hear(self, link: PeerConnection, message: Message) -> None:
        match message:
            case StatusUpdate(number=number, status=status):
                if number > link.said:
                    link.said, link.status = number, status
                    self.news.set()
            case Heartbeat():
                link.beat = message
            case _:
                return

    def _send(self, link: PeerConnection, message: Message) -> None:
        try:
            link.send(messages.pack(message))
        except WireError as error:
            log.debug("%s", error)
            self._drop(link)

    def _drop(self, link: PeerConnection) -> None:
        self._raw.discard(link)
        link.close(self._selector)
        if link.peer is not None and self._links.get(link.peer.id) is link:
            del self._links[link.peer.id]
            self.news.set()
