"""The wire's handlers where there are two controllers: the active one's, and the standby's."""

from __future__ import annotations

import socket
import sqlite3
from collections import deque
from collections.abc import Collection
from pathlib import Path

from slurm_resilience.controller.standby.follower import is_newer
from slurm_resilience.controller.standby.recorded_connection import history_of, position_of
from slurm_resilience.controller.standby.shipper import Shipper, copy_of, parts_of
from slurm_resilience.errors import NotPermitted, WireError
from slurm_resilience.slurm.controllers import ControllerHost
from slurm_resilience.wire.messages import (
    Goodbye,
    Hello,
    JournalAck,
    JournalHead,
    Message,
    StandbyHello,
)
from slurm_resilience.wire.server import Client, Handler, NotServedHere


class StandbyPermit:
    """Lets root and SlurmUser of the other controllers' machines speak as a standby, and no other:
    root of a node has munge's key too."""

    def __init__(self, others: Collection[ControllerHost], trusted_uids: Collection[int]) -> None:
        """
        Args:
            others: the machines of slurmctld besides this one.
            trusted_uids: root and SlurmUser.
        """
        self._others = {host.name: host for host in others}
        self._trusted_uids = trusted_uids

    def check(self, hello: Hello, uid: int, address: str) -> None:
        """Check a connection.

        Raises:
            NotPermitted: it may not speak as a standby.
        """
        host = self._others.get(hello.subject)
        if uid not in self._trusted_uids:
            raise NotPermitted(f"uid {uid} may not be a standby")
        if host is None or address not in addresses_of(host.address):
            raise NotPermitted(f"{address} is not another SlurmctldHost ({hello.subject[:100]})")


class ActiveDesk:
    """The active sresctld's: nodes, jobs and people go to the inbox, the standby to the shipper."""

    def __init__(self, inbox: Handler, shipper: Shipper, permit: StandbyPermit) -> None:
        self._inbox = inbox
        self._shipper = shipper
        self._permit = permit

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        if hello.role != "standby":
            return self._inbox.authorize(hello, uid, address)
        self._permit.check(hello, uid, address)
        return ()

    def look_up(self, hello: Hello, uid: int) -> None:
        self._inbox.look_up(hello, uid)

    def opened(self, client: Client) -> None:
        if client.role != "standby":
            self._inbox.opened(client)

    def received(self, client: Client, message: Message) -> None:
        if client.role != "standby":
            self._inbox.received(client, message)
        elif isinstance(message, StandbyHello):
            self._shipper.attach(client, message)
        elif isinstance(message, JournalAck):
            self._shipper.acknowledged(client, message)
        elif isinstance(message, Goodbye):
            self._shipper.detach(client)
        else:
            raise NotPermitted(f"a standby may not send a {type(message).__name__}")

    def closed(self, client: Client) -> None:
        if client.role == "standby":
            self._shipper.detach(client)
        else:
            self._inbox.closed(client)


class StandbyDesk:
    """The standby's: it sends all but the other controllers away, and gives those its journal."""

    def __init__(self, host: str, journal: Path, permit: StandbyPermit) -> None:
        self._host = host
        self._journal = journal
        self._permit = permit

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        if hello.role != "standby":
            raise NotServedHere(f"{self._host} is the standby; another SlurmctldHost is active")
        self._permit.check(hello, uid, address)
        return ()

    def look_up(self, hello: Hello, uid: int) -> None:
        """Never called: no job is let in."""

    def opened(self, client: Client) -> None:
        client.kept = deque[Message]()

    def received(self, client: Client, message: Message) -> None:
        parts = client.kept
        assert isinstance(parts, deque)
        if isinstance(message, StandbyHello):
            try:
                self._begin(client, message, parts)
            except sqlite3.Error as error:
                raise WireError(f"the journal cannot be copied: {error}") from None
        elif not isinstance(message, JournalAck):
            raise NotPermitted(f"a standby may not send a {type(message).__name__}")
        if parts:
            client.send(parts.popleft())

    def closed(self, client: Client) -> None:
        client.kept = None

    def _begin(self, client: Client, hello: StandbyHello, parts: deque[Message]) -> None:
        db = sqlite3.connect(self._journal, isolation_level=None)
        try:
            history, position = history_of(db), position_of(db)
        finally:
            db.close()
        if is_newer(history, position, hello.history, hello.position):
            history, position, content = copy_of(self._journal)
            parts.extend(parts_of(history, position, content))
        client.send(JournalHead(self._host, history, position, is_active=False))


def is_this_machine(name: str) -> bool:
    """Tell whether a name or an address is this machine's: its own name, or an address here."""
    if name.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    return any(_is_here(address) for address in addresses_of(name))


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def addresses_of(name: str) -> set[str]:
    """Return the addresses of a machine; empty: its name cannot be resolved now."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(info[4][0]) for info in found}
