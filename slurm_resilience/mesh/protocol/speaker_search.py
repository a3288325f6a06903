"""The peers that a speaker looks for on other nodes, and when it dials which. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from slurm_resilience.mesh.model import Peer

SEARCH_SECONDS = 0.5
"""Between the first two ranks of a node that are tried."""
START_SECONDS = 3.0
"""So long it is waited for an answer at a start: a handshake takes its time where all start at
once, and a second speaker of a node would be one for good."""
LONGEST_SEARCH = 8
"""So many times longer it is between later ones: where all start at once, the first one has no
time to answer, and each that is tried beside it costs a connection."""


class SpeakerSearch:
    """Ranks that are known, by their node. One that answers for its node is enough."""

    def __init__(self, me: Peer) -> None:
        self._me = me
        self._nodes: dict[str, dict[str, Peer]] = {}
        self._tries: dict[str, int] = {}
        """Ranks of each node that were tried."""
        self._due: dict[str, float] = {}
        """When the next one of each node is."""
        self._speakers: dict[str, tuple[int, int]] = {}
        """The newest key that was heard of each node; the second number is the speaker's seat,
        negative."""
        self._near: set[str] = set()
        """Ranks of this node that are expected."""
        self._met: set[str] = set()
        """Those that have come, of which some may be gone again."""
        self._dead: set[str] = set()
        self._urgent = False
        """A node has been reached before: it is not left to the other side to dial."""
        self._patience: dict[str, float] = {}
        """Seconds until another rank of a node is dialed beside the first, where it is longer."""
        self._beside_at = 0.0
        """When one may be dialed beside another one that does not answer."""
        self.next_at = math.inf
        """When the next one is due."""
        self.written: dict[str, str] = {}
        """The nodes of the speakers that were found written down, by their id."""

    def know(self, peers: Iterable[Peer], at: float) -> list[str]:
        """Note ranks of other nodes, and when one of each node may be dialed, if none was known.

        Returns:
            The ids of those that are such ranks, and not known to have ended.
        """
        mine, dead, nodes, due = self._me.node, self._dead, self._nodes, self._due
        known = []
        for peer in peers:
            node = peer.node
            if peer.seat < 0 or node == mine or peer.id in dead:
                continue
            ranks = nodes.setdefault(node, {})
            if peer.id not in ranks:
                ranks[peer.id] = peer
                due_at = due.setdefault(node, at)
                if due_at < self.next_at:
                    self.next_at = due_at
            known.append(peer.id)
        return known

    def find(self, peer: Peer, now: float, patience: float, *, finds_me: bool) -> None:
        """Note the speaker of another node, as it is written down at a start.

        Args:
            peer: the speaker.
            now: the time.
            patience: seconds after which, if it is silent, another rank of its node speaks.
            finds_me: it came later than this process, finds it there, and dials it.
        """
        if peer.id in self._dead:
            return  # it could not take its word back
        self.note_speaker(peer.node, (1, -peer.seat))
        self.written[peer.id] = peer.node
        if peer.node in self._tries:
            return
        self._tries[peer.node] = -1 if finds_me else 0
        # Another rank that takes a silent one's place dials this process.
        self._patience[peer.node] = max(START_SECONDS, patience)
        self.know((peer,), now)

    def relies_on_speaker_of(self, node: str) -> bool:
        """Tell whether the written speaker of a node is enough: it was not dialed in vain."""
        return node in self.written.values() and self._tries.get(node, 0) <= 1

    def note_speaker(self, node: str, key: tuple[int, int]) -> None:
        """Note the speaker of a node: it is tried first."""
        self._speakers[node] = max(key, self._speakers.get(node, key))

    def expect(self, peer: Peer) -> None:
        """Note a rank of this node."""
        if peer.id not in self._dead and peer.id not in self._met and peer.id != self._me.id:
            self._near.add(peer.id)

    def meet(self, peer_id: str) -> None:
        """Note that a rank of this node has said if it speaks, or has gone before it did."""
        self._met.add(peer_id)
        self._near.discard(peer_id)

    @property
    def expects_near(self) -> bool:
        """Tell whether a rank of this node that is expected has not come yet."""
        return bool(self._near)

    def dead(self, peer_id: str) -> None:
        """Note a death: processes do not come back."""
        self._dead.add(peer_id)
        self.written.pop(peer_id, None)
        self._near.discard(peer_id)
        for node, ranks in list(self._nodes.items()):
            if ranks.pop(peer_id, None) is not None:
                self._due[node] = 0.0
                if self.next_at < math.inf:
                    self.next_at = 0.0
            if not ranks:
                del self._nodes[node]  # its next one that is found is dialed at once
                self._tries.pop(node, None)

    def is_dead(self, peer_id: str) -> bool:
        """Tell whether a process is known to have ended."""
        return peer_id in self._dead

    def hurry_to(self, node: str, now: float) -> None:
        """Look for a node now, if it is not being looked for: its ranks are in this process's
        world, so that it is not one that may write down its speaker yet."""
        if node in self._nodes and node not in self._tries:
            self._due[node] = min(now, self._due[node])
            self.next_at = min(now, self.next_at)

    def hurry(self, now: float) -> None:
        """Look now: a node has lost its speaker, or this process has begun to speak."""
        self._tries.clear()
        self._patience.clear()
        self._due = dict.fromkeys(self._nodes, now)
        self._urgent = True
        self.next_at = now

    def catch_up(self, late: float) -> None:
        """Count no time in which this process did not run, unless it has to look now: those that
        it dials may have shared it, and each that is tried beside them has to answer too."""
        if self._urgent or self.next_at <= 0:
            return
        for node in self._due:
            self._due[node] += late
        self.next_at += late

    def _pause(self, node: str, tries: int) -> float:
        """Return the seconds until the next try after so many; negative: the node dials first."""
        written = self._patience.get(node)
        if written is not None and tries <= 0:
            return START_SECONDS if tries < 0 else written
        return SEARCH_SECONDS * min(1 << max(0, tries), LONGEST_SEARCH)

    def due(self, reached: Collection[str], now: float, silent: Collection[str] = ()) -> list[Peer]:
        """Return the ranks to be dialed now, one of each node that is not reached.

        Args:
            reached: nodes.
            now: the time.
            silent: ids of ranks that are linked, and not heard: they are tried last.
        """
        if now < self.next_at:
            return []
        found, self.next_at = [], math.inf
        for node, ranks in self._nodes.items():
            if node in reached:
                continue
            if now >= self._due[node]:
                speaker = -self._speakers.get(node, (0, 1))[1]
                order = sorted(
                    ranks.values(),
                    key=lambda p: (
                        p.id in silent,
                        p.seat != speaker,
                        p.seat,
                        p.incarnation,
                        p.id,
                    ),
                )
                # Of two that look for each other one dials first, so that there is one link mostly.
                waits = self._me.seat > order[0].seat and not self._urgent
                tries = self._tries.get(node, -1 if waits else 0)
                # Not where the one before has ended, or it is the same one that is dialed again.
                beside = tries > 0 and self._due[node] > 0 and len(order) > 1
                if beside and now < self._beside_at:
                    self._due[node] = self._beside_at
                else:
                    self._tries[node] = tries + 1
                    self._due[node] = now + self._pause(node, tries)
                    if tries >= 0:
                        found.append(order[tries % len(order)])
                    if beside:
                        # Where few have answered yet, it is the machines that are slow.
                        pause = SEARCH_SECONDS * LONGEST_SEARCH / (1 + len(reached))
                        self._beside_at = now + pause
            self.next_at = min(self.next_at, self._due[node])
        self._urgent = False
        return found
