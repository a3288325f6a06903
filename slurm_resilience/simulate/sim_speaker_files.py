"""The ranks that speak for the nodes, as the simulated rendezvous has it."""

from __future__ import annotations

import itertools
import zlib
from typing import Protocol

from slurm_resilience.mesh.model import Peer, Speakers

UNREADABLE_SHARE = 0.15
"""The share of processes that find nothing written down and can write nothing, as on a full
disk."""


class SpeakerBook(Protocol):
    """The offer of `SpeakerFiles`."""

    def claim(self, me: Peer) -> None:
        """Write that a process speaks for its node, if none does."""
        ...

    def read(self, me: Peer) -> Speakers:
        """Return what is written down, as a process sees it."""
        ...

    def write(self, me: Peer) -> None:
        """Write that a process speaks for its node now."""
        ...


class SimSpeakerFiles:
    """The files, in memory. What has died stays in them, as in a directory."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = itertools.count()
        self._by_node: dict[str, tuple[Peer, int]] = {}

    def claim(self, me: Peer) -> None:
        self._check(me)
        if me.node not in self._by_node:
            self.write(me)

    def read(self, me: Peer) -> Speakers:
        self._check(me)
        here, since = self._by_node.get(me.node, (None, 0))
        if here is not None and here.id != me.id and me.incarnation == 0:
            return Speakers(here)
        others = [(peer, at) for peer, at in self._by_node.values() if peer.node != me.node]
        after = tuple(peer for peer, at in others if here == me and at > since)
        return Speakers(here, tuple(peer for peer, _ in others if peer not in after), after)

    def write(self, me: Peer) -> None:
        self._check(me)
        self._by_node[me.node] = (me, next(self._count))

    def _check(self, me: Peer) -> None:
        if zlib.crc32(f"{self._seed} {me.id}".encode()) % 100 < 100 * UNREADABLE_SHARE:
            raise OSError("the rendezvous is away")
