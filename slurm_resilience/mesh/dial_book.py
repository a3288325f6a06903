"""Addresses that are tried again, and when. Pure."""

from __future__ import annotations

from typing import NamedTuple

REDIAL_SECONDS = 0.2
"""Until an address that did not answer is tried again (fixed addresses, and peers that closed
before they had proven themselves)."""
LOOKED_UP_SECONDS = 0.05
"""The same while a host's name is being looked up."""
RESET_SECONDS = 0.05
"""The same after a connection was reset before a named peer had proven itself: a process that is
being ended may take more connections before its machine refuses them. Twice as long each time."""
LONGEST_RESET_SECONDS = 1.0
"""The longest of these pauses."""
REFUSED_SECONDS = 10.0
"""The same after the other side did not know the secret."""
TRIES = 10
"""Attempts at a peer that hung up before it had proven itself."""


class DialAddress(NamedTuple):
    """A place at which a peer may listen."""

    peer_id: str
    """Empty: unknown."""
    host: str
    port: int


class DialBook:
    """When to dial which address again."""

    def __init__(self) -> None:
        self._due: dict[DialAddress, float] = {}
        self._tries: dict[str, int] = {}

    def looked_up(self, address: DialAddress, now: float) -> None:
        """Try again soon: its name is being resolved."""
        self._due[address] = now + LOOKED_UP_SECONDS

    def unreachable(self, address: DialAddress, now: float) -> None:
        """There is no way to it. A fixed address is tried until there is; a named peer is there or
        it is not."""
        if not address.peer_id:
            self._due[address] = now + REDIAL_SECONDS

    def unproven(
        self, address: DialAddress, asked: bool, now: float, *, was_reset: bool = False
    ) -> None:
        """Note that a connection to it ended before the other side had proven itself.

        Args:
            address: as it was dialed.
            asked: something of ours listens there: it asked for a proof. At the address of a named
                peer that did not, another program may be by now.
            now: the time.
            was_reset: the process there may be ending: the next try tells.
        """
        pause = REDIAL_SECONDS
        if address.peer_id:
            tries = self._tries[address.peer_id] = self._tries.get(address.peer_id, 0) + 1
            if not (asked or was_reset) or tries > TRIES:
                return
            if was_reset:
                pause = min(RESET_SECONDS * 2 ** (tries - 1), LONGEST_RESET_SECONDS)
        self._due[address] = now + pause

    def refused(self, host: str, port: int, now: float) -> None:
        """Note that it does not know the secret: it is not tried often."""
        for address in self._due:
            if (address.host, address.port) == (host, port):
                self._due[address] = now + REFUSED_SECONDS

    def take_due(self, now: float) -> list[DialAddress]:
        """Return the addresses whose time has come; they are forgotten here."""
        due = [address for address, at in self._due.items() if at <= now]
        for address in due:
            del self._due[address]
        return due

    def next_at(self) -> float | None:
        """When the next one is due."""
        return min(self._due.values(), default=None)
