"""Sockets of the mesh: who is dialed, who is accepted, what is sent."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable

from slurm_resilience.errors import AuthError, WireError
from slurm_resilience.mesh import messages
from slurm_resilience.mesh.connection import PeerConnection
from slurm_resilience.mesh.core import REFUSED_SECONDS, Core, log
from slurm_resilience.mesh.messages import Message
from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.resolver import NotYet

REDIAL = 0.2
"""Seconds until an address that did not answer is tried again (fixed addresses, and peers that
closed before they had proven themselves)."""
LOOKED_UP = 0.05
"""The same while a host's name is being looked up."""
TRIES = 10
"""How often such a peer is tried again."""
STRANGERS = 64
"""Accepted connections that have not shown the secret yet, at most (or twice the seats)."""
AT_ONCE = 16
"""Connections accepted before the others are served again: who connects without a pause would keep
this process from its beats, and the others would take it for hung."""


class Dialing(Core):
    """Links come and go. Whether that means anything, the layers above decide."""

    def _accept(self, _: int) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._make_room(0):
                        continue
                    # It would be called again at once, and again.
                    self._deaf = True
                    self._selector.unregister(self._listener)
                return
            self._make_room(max(STRANGERS, 2 * self._rules.seats))
            link = PeerConnection(sock, self._secret, dialed=False)
            self._raw.add(link)
            self._watch(link)
            self._try(link, link.challenge)

    def _make_room(self, most: int) -> bool:
        """Drop the oldest of more than so many that have not shown the secret: a peer needs a
        moment for that, and is dialed again if it was dropped; who says nothing stays longest."""
        strangers = [raw for raw in self._raw if not raw.dialed and not raw.proven]
        if len(strangers) <= most:
            return False
        self._drop(min(strangers, key=lambda raw: raw.born))
        return True

    def _watch(self, link: PeerConnection, events: int = selectors.EVENT_READ) -> None:
        link.watched = events
        self._selector.register(link, events, lambda e, link=link: self._event(link, e))

    def _event(self, link: PeerConnection, events: int) -> None:
        if link.fileno() < 0:
            return
        if events & selectors.EVENT_WRITE:
            if link.dialed and not link.proven:
                code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    self._drop(link)
                    return
            if link.wants_to_write:
                self._try(link, link.flush)
            self._interest(link)
        if events & selectors.EVENT_READ and link.fileno() >= 0:
            self._try(link, lambda: self._read(link))

    def _interest(self, link: PeerConnection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
        if events == link.watched or link.fileno() < 0:
            return
        with contextlib.suppress(KeyError):
            self._selector.modify(link, events, self._selector.get_key(link).data)
            link.watched = events

    def _try(self, link: PeerConnection, act: Callable[[], None]) -> None:
        try:
            act()
        except AuthError as error:
            self._drop(link)
            self._refuse(link, str(error))
        except WireError as error:
            self._gone(link, str(error))

    def _refuse(self, link: PeerConnection, why: str) -> None:
        """Once in a while in the log, however often somebody tries."""
        now = time.monotonic()
        self._refused += 1
        if now - self._refused_at >= REFUSED_SECONDS:
            where = link.address or "somebody"
            log.warning("%d connection(s) refused, last of %s: %s", self._refused, where, why)
            self._refused, self._refused_at = 0, now
        for key in [key for key in self._redial if key[1:] == link.address]:
            self._redial[key] = now + REFUSED_SECONDS

    def _read(self, link: PeerConnection) -> None:
        for message in link.receive():
            if link.proven:
                self._hear(link, message)
            elif link.handshake(message, self.me, self.status, self._roster):
                self._proven(link)
        self._interest(link)

    def _dial_known(self) -> None:
        # Starting behind oneself, so that two newcomers seldom dial each other at the same time.
        known = sorted(self._meeting.others())
        own = (self.me.id, self.me.host, self.me.port)
        for name, host, port in [k for k in known if k > own] + [k for k in known if k < own]:
            self._dial(name, host, port)

    def _dial(self, name: str, host: str, port: int) -> None:
        if name == self.me.id or (host, port) == (self.me.host, self.me.port):
            return
        if name in self._links or any(raw.expected == name != "" for raw in self._raw):
            return
        if not name and any(
            link.peer and (link.peer.host, link.peer.port) == (host, port)
            for link in self._links.values()
        ):
            return
        try:
            link = PeerConnection.dial(host, port, self._secret)
        except NotYet:
            self._redial[(name, host, port)] = time.monotonic() + LOOKED_UP
            return
        except OSError as error:
            log.debug("%s:%s: %s", host, port, error)
            if not name:
                self._redial[(name, host, port)] = time.monotonic() + REDIAL
            return
        link.expected = name
        self._raw.add(link)
        self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _roster(self) -> tuple[Peer, ...]:
        return tuple(link.peer for link in self._links.values() if link.peer)

    def _drop(self, link: PeerConnection) -> None:
        """Close a connection that means nothing."""
        self._raw.discard(link)
        link.close(self._selector)
        name = link.expected
        if not link.address or link.proven or self._closing:
            return
        if name:
            # It is there or it is not. Where it was, somebody else may be by now.
            self._tries[name] = self._tries.get(name, 0) + 1
            if not link.reached or self._tries[name] > TRIES:
                return
        self._redial[(name, *link.address)] = time.monotonic() + REDIAL

    def _send(self, link: PeerConnection, message: Message) -> None:
        self._post(link, messages.pack(message))

    def _broadcast(self, message: Message) -> None:
        frame = messages.pack(message)
        for link in list(self._links.values()):
            self._post(link, frame)

    def _send_members(self, generation: int, message: Message) -> None:
        view = self._view
        if view is None or view.generation != generation:
            return
        frame = messages.pack(message)
        for member in view.members:
            link = self._links.get(member.peer.id)
            if link is not None:
                self._post(link, frame)

    def _post(self, link: PeerConnection, frame: bytes) -> None:
        try:
            link.send(frame)
        except WireError as error:
            self._gone(link, str(error))
            return
        if link.wants_to_write:
            self._interest(link)
            self._ring()
