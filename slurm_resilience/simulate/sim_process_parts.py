"""The parts of a simulated process: its state, its program, its rendezvous, its handshake."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from slurm_resilience.mesh.model import Peer, PeerStatus, View
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import SharedDirectory
from slurm_resilience.mesh.rendezvous_entry import RendezvousEntry


class ProcessState(Enum):
    """The life of a simulated process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """SIGSTOP: its kernel goes on to take data in."""
    DEAD = "dead"
    """Its machine goes on, and says so."""
    UNPOWERED = "unpowered"
    """Its machine is gone too, and says nothing."""


_GONE = frozenset({ProcessState.DEAD, ProcessState.UNPOWERED})
PROCESS_MOVES: dict[ProcessState, frozenset[ProcessState]] = {
    ProcessState.RUNNING: _GONE | {ProcessState.STOPPED},
    ProcessState.STOPPED: _GONE | {ProcessState.RUNNING},
    ProcessState.DEAD: frozenset(),
    ProcessState.UNPOWERED: frozenset(),
}


class SimHello(msgspec.Struct, frozen=True):
    """The dialer's side of a handshake."""

    peer: Peer
    status: PeerStatus
    secret: bytes = b""


class SimWelcome(msgspec.Struct, frozen=True):
    """The answer."""

    peer: Peer
    status: PeerStatus


class Program:
    """The main thread: outside, on its way in, in its block, on its way out."""

    def __init__(self, last_step: int) -> None:
        self.inside: View | None = None
        """The world whose block it is in."""
        self.invited: View | None = None
        """The world that it is about to enter."""
        self.leaving = False
        self.turn = 0
        """Collectives done in this world; the first forms it."""
        self.step = 0
        """Committed."""
        self.position = -1
        """The part of a model replica that it holds; only in elastic trainings."""
        self.signal = ""
        """By which it was asked to leave; empty: it was not."""
        self.last_step = last_step
        self.done = False
        self.leave_seconds = 0.0
        """Leaving its block takes so much longer than usual."""


class OwnRendezvous:
    """The directory in which a process meets others, where there is one, and its secret."""

    def __init__(
        self,
        directory: SharedDirectory | None,
        me: Peer,
        rules: WorldRules,
        on_secret: Callable[[bytes], None],
    ) -> None:
        self.directory = directory
        self.secrets: tuple[bytes, ...] = (b"",)
        """Those that it takes for a proof; it shows the first."""
        self.has_told = False
        """It was written down that this process speaks for its node."""
        self.is_listed = False
        """The rendezvous tells that this process has the state."""
        self.entry: RendezvousEntry | None = None
        if directory is not None:
            is_lent = 0 < rules.core <= me.seat
            self.entry = RendezvousEntry(directory, me, on_secret, is_lent=is_lent)

    def take_secret(self, secret: bytes) -> None:
        """Do what `Transport.take_secret` does."""
        self.secrets = (secret, *(known for known in self.secrets if known != secret))
