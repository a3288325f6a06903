"""The peers that a speaker looks for on other nodes, and when it dials which. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from slurm_resilience.mesh.model import Peer

SEARCH_SECONDS = 0.2
"""Between two ranks of a node that are tried."""


class SpeakerSearch:
    """Ranks that are known, by their node. One that answers for its node is enough."""

    def __init__(self, me: Peer) -> None:
        self._me = me
        self._nodes: dict[str, dict[str, Peer]] = {}
        self._tries: dict[str, int] = {}
        """Ranks of each node that were tried."""
        self._speakers: dict[str, tuple[int, int]] = {}
        """The newest key that was heard of each node; the second number is the speaker's seat,
        negative."""
        self._near: set[str] = set()
        """Ranks of this node that are expected."""
        self._dead: set[str] = set()
        self._urgent = False
        """A node has been reached before: it is not left to the other side to dial."""
        self.next_at = math.inf
        """When the next one is due."""

    def know(self, peer: Peer, now: float) -> None:
        """Note a rank of another node."""
        if peer.seat < 0 or peer.id in self._dead or peer.node == self._me.node:
            return
        ranks = self._nodes.setdefault(peer.node, {})
        if peer.id not in ranks:
            ranks[peer.id] = peer
            self.next_at = min(self.next_at, now)

    def note_speaker(self, node: str, key: tuple[int, int]) -> None:
        """Note the speaker of a node: it is tried first."""
        self._speakers[node] = max(key, self._speakers.get(node, key))

    def expect(self, peer: Peer) -> None:
        """Note a rank of this node."""
        if peer.id not in self._dead and peer.id != self._me.id:
            self._near.add(peer.id)

    def expects_near(self, linked: Collection[str]) -> bool:
        """Tell whether a rank of this node that is expected has no link yet."""
        return not self._near <= set(linked)

    def absent(self, peer_id: str) -> None:
        """Note that no process listens where a rank did."""
        self.dead(peer_id)

    def dead(self, peer_id: str) -> None:
        """Note a death: processes do not come back."""
        self._dead.add(peer_id)
        self._near.discard(peer_id)
        for node, ranks in list(self._nodes.items()):
            if ranks.pop(peer_id, None) is not None and self.next_at < math.inf:
                self.next_at = 0.0
            if not ranks:
                del self._nodes[node]

    def is_dead(self, peer_id: str) -> bool:
        """Tell whether a process is known to have ended."""
        return peer_id in self._dead

    def hurry(self, now: float) -> None:
        """Look now: a node has lost its speaker, or this process has begun to speak."""
        self._tries.clear()
        self._urgent = True
        self.next_at = now

    def due(self, reached: Collection[str], now: float) -> list[Peer]:
        """Return the ranks to be dialed now, one of each node that is not reached."""
        if now < self.next_at:
            return []
        found = []
        for node, ranks in self._nodes.items():
            if node in reached:
                continue
            speaker = -self._speakers.get(node, (0, 1))[1]
            order = sorted(
                ranks.values(), key=lambda p: (p.seat != speaker, p.seat, p.incarnation, p.id)
            )
            tries = self._tries.get(node, 0)
            self._tries[node] = tries + 1
            # Of two that look for each other one dials first, so that there is one link mostly.
            if tries > 0 or self._urgent or self._me.seat < order[0].seat:
                found.append(order[tries % len(order)])
        self._urgent = False
        missing = any(node not in reached for node in self._nodes)
        self.next_at = now + SEARCH_SECONDS if missing else math.inf
        return found
