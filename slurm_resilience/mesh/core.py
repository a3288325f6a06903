"""What one process knows of the mesh: the fields that the other parts of it share.

One lock guards all of it. The parts are layers of one class, each of which knows only those below:
`core` · `dialing` (sockets) · `members` (who lives) · `generations` (worlds) · `keys` (the store) ·
`mesh` (the thread, and what the main thread calls).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from slurm_resilience.mesh.connection import PeerConnection
from slurm_resilience.mesh.messages import Heartbeat, KeyPut, Message, NodeLost
from slurm_resilience.mesh.model import GenerationEnd, Member, Peer, PeerStatus, View
from slurm_resilience.mesh.rendezvous import Rendezvous
from slurm_resilience.mesh.world_plan import WorldRules

log = logging.getLogger("sres.mesh")

BEAT = 0.5
"""Seconds between two beats, at least."""
BEATS_A_SECOND = 250
"""That one process sends, at most. A beat costs its two ends 0.1 ms together, so this is about 2 %
of a core in each process, however large the world; beyond 125 peers beats come less often."""
SILENCE = 5.0
"""Seconds without a word after which a peer is taken for hung or gone."""

REFUSED_SECONDS = 10.0
"""Seconds between two lines in the log about strangers."""


def beat_seconds(peers: int) -> float:
    """Seconds between two beats of a process that has so many peers. Pure."""
    return max(BEAT, peers / BEATS_A_SECOND)


class Core(ABC):
    """The fields, and questions about them. Callers hold the lock."""

    def __init__(
        self,
        meeting: Rendezvous,
        me: Peer,
        rules: WorldRules,
        *,
        abort_timeout: float = 5.0,
        silence: float = SILENCE,
        on_end: Callable[[GenerationEnd], None] | None = None,
        on_evict: Callable[[str], None] | None = None,
        on_tick: Callable[[float], Heartbeat | None] | None = None,
        on_given_up: Callable[[Peer, str], None] | None = None,
    ) -> None:
        """
        Args:
            meeting: where the others are found.
            me: this process; ``host`` is what it listens on, ``port`` 0 lets the kernel choose.
            rules: when a generation may be formed.
            abort_timeout: seconds after the end of a generation in which a peer must be out of its
                block; then the others go on without it.
            silence: seconds without a beat after which a peer counts as hung; three beats in worlds
                so large that this is longer.
            on_end: called in the mesh's thread when the current generation ends, and every 10 ms
                again until `ready` or `done` is called.
            on_evict: called in the mesh's thread when the others go on without this process.
            on_tick: called in the mesh's thread before each beat; gives the beat to send.
            on_given_up: called in the mesh's thread with a peer that the others go on without.

        Raises:
            UsageError: the meeting place cannot be used.
            OSError: the port cannot be listened on.
        """
        self._meeting = meeting
        self._secret = meeting.secret()
        self._rules = rules
        self._abort_timeout = abort_timeout
        self._silence = silence
        self._on_end = on_end or (lambda _: None)
        self._on_evict = on_evict or (lambda _: None)
        self._on_tick = on_tick or (lambda _: None)
        self._on_given_up = on_given_up or (lambda _peer, _reason: None)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(
            (me.host, me.port or meeting.port(me.seat)), backlog=1024
        )
        self._listener.setblocking(False)
        self.me = msgspec.structs.replace(me, port=self._listener.getsockname()[1])
        self.status = PeerStatus()
        self._said = 0
        self._links: dict[str, PeerConnection] = {}
        self._raw: set[PeerConnection] = set()
        self._lost: dict[str, bool] = {}
        """Peers that are gone: id → known to be dead."""
        self._given_up: set[str] = set()
        """Peers that did not leave their block in time."""
        self._bad_nodes: dict[str, NodeLost] = {}
        self._redial: dict[tuple[str, str, int], float] = {}
        """When to try (id or empty, host, port) again."""
        self._tries: dict[str, int] = {}
        """How often a peer that hung up on us was tried again."""
        self._deaf = False
        """No file descriptor was left for another connection."""
        self._refused, self._refused_at = 0, -REFUSED_SECONDS
        self._view: View | None = None
        self._worked: View | None = None
        self._highest = 0
        self._end: GenerationEnd | None = None
        self._ended_at = 0.0
        self._adopted_at = 0.0
        self._ask_outcome = 0.0
        self._dial_again = 0.0
        self._strikes: dict[str, int] = {}
        self._last_cut = 0.0
        self._since = time.monotonic()
        self._look_again: float | None = None
        self._waits_for = ""
        self._keys: dict[int, dict[str, bytes]] = {}
        self._own_puts: dict[str, KeyPut] = {}
        """What this process set in the newest generation, for members that are reached later."""
        self._awaited: list[set[str]] = []
        """For each call of `get` that waits: the keys that are still missing."""
        self._answers: dict[int, bytes] = {}
        self._numbers = 0
        self._evicted = ""
        self._finished = False
        self._stopped: GenerationEnd | None = None
        self.knock = threading.Event()
        """Set when somebody may be waiting outside of the current generation."""
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._next_beat = time.monotonic() + BEAT
        self._turned = 0.0
        """When the thread last looked around."""
        self._thread = threading.Thread(target=self._run, name="sres-mesh", daemon=True)

    @property
    def beat(self) -> float:
        """Seconds between two beats in a world of this size."""
        return beat_seconds(len(self._links))

    @property
    def silence(self) -> float:
        """Seconds without a word after which a peer counts as hung: at least three beats."""
        return max(self._silence, 3 * self.beat)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _usable(self) -> list[PeerConnection]:
        return [link for link in self._links.values() if link.peer and link.peer.seat >= 0]

    def _current(self) -> int:
        return self._view.generation if self._view else 0

    def _in_view(self, name: str) -> bool:
        return self._view is not None and self._view.rank_of(name) >= 0

    def _present(self) -> list[Member]:
        return [
            Member(self.me, self.status),
            *(Member(link.peer, link.status) for link in self._usable() if link.peer),
        ]

    def _unreached(self) -> list[Peer]:
        if self._view is None or self._end is not None:
            return []
        members = (member.peer for member in self._view.members)
        return [peer for peer in members if peer.id not in self._links and peer.id != self.me.id]

    # -- what the layers above make of it -------------------------------------------------------

    @abstractmethod
    def _run(self) -> None:
        """The thread."""

    @abstractmethod
    def _accept(self, _: int) -> None:
        """Somebody dials."""

    @abstractmethod
    def _proven(self, link: PeerConnection) -> None:
        """A link has become a peer's."""

    @abstractmethod
    def _hear(self, link: PeerConnection, message: Message) -> None:
        """A peer says something."""

    @abstractmethod
    def _gone(self, link: PeerConnection, why: str) -> None:
        """A link has come to its end."""

    @abstractmethod
    def _over(self, end: GenerationEnd) -> None:
        """A generation has ended."""
