"""Sockets of the mesh: who is dialed, who is accepted, what is sent."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from slurm_resilience.errors import AuthError, WireError
from slurm_resilience.mesh import messages
from slurm_resilience.mesh.core import Core, log
from slurm_resilience.mesh.link import Link
from slurm_resilience.mesh.messages import Message
from slurm_resilience.mesh.model import Peer

REDIAL = 0.2
"""Seconds until an address that did not answer is tried again (fixed addresses only)."""


class Dialing(Core):
    """Links come and go. Whether that means anything, the layers above decide."""

    def _accept(self, _: int) -> None:
        while True:
            try:
                sock, _address = self._listener.accept()
            except OSError:
                return
            link = Link(sock, self._secret, dialed=False)
            self._raw.add(link)
            self._watch(link)
            self._try(link, link.challenge)

    def _watch(self, link: Link, events: int = selectors.EVENT_READ) -> None:
        self._selector.register(link, events, lambda e, link=link: self._event(link, e))

    def _event(self, link: Link, events: int) -> None:
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

    def _interest(self, link: Link) -> None:
        if link.fileno() < 0:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
        with contextlib.suppress(KeyError):
            if self._selector.get_key(link).events != events:
                data = self._selector.get_key(link).data
                self._selector.modify(link, events, data)

    def _try(self, link: Link, act: Callable[[], None]) -> None:
        try:
            act()
        except AuthError as error:
            log.warning("a connection was refused: %s", error)
            self._drop(link)
        except WireError as error:
            self._gone(link, str(error))

    def _read(self, link: Link) -> None:
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
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
            link = Link(sock, self._secret, dialed=True)
            link.expected = name
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
        except OSError as error:
            log.debug("%s:%s: %s", host, port, error)
            if not name:
                self._redial[(host, port)] = time.monotonic() + REDIAL
            return
        link.address = (host, port)
        self._raw.add(link)
        self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _roster(self) -> tuple[Peer, ...]:
        return tuple(link.peer for link in self._links.values() if link.peer)

    def _drop(self, link: Link) -> None:
        """Close a connection that means nothing."""
        self._raw.discard(link)
        if link.fileno() >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link)
            link.close()
        address = link.address
        if address and not link.expected and not link.proven and not self._closing:
            self._redial[address] = time.monotonic() + REDIAL

    def _send(self, link: Link, message: Message) -> None:
        try:
            link.send(messages.pack(message))
        except WireError as error:
            self._gone(link, str(error))
            return
        if link.wants_to_write:
            self._interest(link)
            self._ring()

    def _broadcast(self, message: Message) -> None:
        frame = messages.pack(message)
        for link in list(self._links.values()):
            try:
                link.send(frame)
            except WireError as error:
                self._gone(link, str(error))
                continue
            if link.wants_to_write:
                self._interest(link)
                self._ring()

    def _send_members(self, generation: int, message: Message) -> None:
        view = self._view
        if view is None or view.generation != generation:
            return
        frame = messages.pack(message)
        for member in view.members:
            link = self._links.get(member.peer.id)
            if link is not None:
                try:
                    link.send(frame)
                except WireError as error:
                    self._gone(link, str(error))
                    continue
                if link.wants_to_write:
                    self._interest(link)
                    self._ring()
