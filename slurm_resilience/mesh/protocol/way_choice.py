"""The best of several ways to a peer on another node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.protocol.links import NO_KEY, Found, Key, Links, Near, Offers, Ways


class Chosen(NamedTuple):
    """The best ways to a peer. None: there is none."""

    peer_id: str
    far: Found | None
    """Over a link of this process, of which the ranks of its node are told."""
    own: Found | None
    """For this process itself."""


class WayChoice:
    """Chooses among what is offered."""

    def __init__(self, me: Peer, links: Links, offers: Offers, near: Near, ways: Ways) -> None:
        """
        Args:
            me: this process.
            links: that there are.
            offers: what is reached over them.
            near: the other ranks of this node.
            ways: that are taken, and that the ranks of this node were told of.
        """
        self._me = me
        self._links = links
        self._offers = offers
        self._near = near
        self._ways = ways

    def of(self, peers: Iterable[str]) -> Iterator[Chosen]:
        """Choose for several peers, of which most are offered over the same link."""
        known: dict[int, tuple[Key, bool, bool]] = {}
        for peer_id in peers:
            found, far = [], []
            for link, offer in self._offers.to(peer_id).items():
                facts = known.get(link)
                if facts is None:
                    facts = known[link] = self._facts(link)
                key, is_far, answers = facts
                one = (key, offer, -link, answers)
                if is_far:
                    far.append(one)
                if key > NO_KEY:
                    found.append(one)
            kept, way = self._ways.passed.get(peer_id), self._ways.to.get(peer_id)
            yield Chosen(
                peer_id,
                _best(far, -1 if kept is None else kept[0]),
                _best(found, -1 if way is None or way.chosen is None else way.chosen[0]),
            )

    def may_take(self, link: int) -> bool:
        """Tell whether this process itself may go over a link: its end here is known to speak."""
        return self._facts(link)[0] > NO_KEY

    def _facts(self, link: int) -> tuple[Key, bool, bool]:
        """Return the key of the rank of this node that holds the next link of a way; whether that
        leads to another node; and whether its other end answers."""
        peer = self._links.peers[link]
        holder = self._me.id if peer.node != self._me.node else peer.id
        key = self._near.keys.get(holder, NO_KEY)
        return key, self._links.is_far(link), peer.id not in self._near.silent


def _best(ways: Sequence[Found], kept: int) -> Found | None:
    """Return the best of several ways. Of two that are alike it is the one over the link that is
    taken already, else over the older one: a change costs a greeting."""
    if len(ways) < 2:
        return ways[0] if ways else None

    def preference(found: Found) -> tuple[bool, Key, Key, bool, int]:
        near, offer, order, answers = found
        return answers, offer.key, near, -order == kept, order

    return max(ways, key=preference)
