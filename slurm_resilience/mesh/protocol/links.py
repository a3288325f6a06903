"""Links, the peers that are offered over them, and the ways that are taken. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set

import msgspec

from slurm_resilience.mesh.model import Member, Peer

Key = tuple[int, int]
"""The order of the speakers of a node: the higher key counts, which is a later one, or a lower
seat."""
NO_KEY: Key = (-1, 0)
"""The key of a rank that does not speak."""
RETIRED: Key = (-2, 0)
"""The word of a rank that does not speak any more, and will not."""


ENDED_SECONDS = 60.0
"""So long a death is told to those that come anew; later all have judged it by its silence."""


class Offer(msgspec.Struct, frozen=True):
    """A peer that is reached over a link."""

    member: Member
    key: Key
    """The key of the speaker on the peer's node."""
    stamp: int
    """A newer one is another way, which may have lost messages."""


class Offers:
    """The peers that are reached over each link, as its other end says."""

    def __init__(self) -> None:
        self.stamp = 0
        """The number of the newest word on what is reached."""
        self._over: dict[int, dict[str, Offer]] = {}
        self._to: dict[str, dict[int, Offer]] = {}
        """The same by peer: a speaker has a link to each node, and looks for one peer's often."""

    def over(self, link: int) -> Mapping[str, Offer]:
        """Return what is reached over a link, by the peer's id."""
        return self._over.get(link, _NONE_OVER)

    @property
    def peers(self) -> Set[str]:
        """Return the ids of all that are reached over any link."""
        return self._to.keys()

    def to(self, peer_id: str) -> Mapping[int, Offer]:
        """Return the offers of one peer, by link."""
        return self._to.get(peer_id, _NONE_TO)

    def put(self, link: int, offers: Mapping[str, Offer]) -> None:
        """Note offers, by the peer's id, in place of what was offered of these over this link."""
        self._over.setdefault(link, {}).update(offers)
        to = self._to
        for peer_id, offer in offers.items():
            if peer_id in to:
                to[peer_id][link] = offer
            else:
                to[peer_id] = {link: offer}

    def withdraw(self, link: int, peer_id: str) -> None:
        """Forget what is offered of a peer over a link, if it is."""
        if self._over.get(link, {}).pop(peer_id, None) is not None:
            self._forget(link, peer_id)

    def drop_link(self, link: int) -> Mapping[str, Offer]:
        """Forget a link; return what was reached over it."""
        lost = self._over.pop(link, {})
        for peer_id in lost:
            self._forget(link, peer_id)
        return lost

    def _forget(self, link: int, peer_id: str) -> None:
        links = self._to[peer_id]
        del links[link]
        if not links:
            del self._to[peer_id]

    def drop_peer(self, peer_id: str) -> None:
        """Forget a peer."""
        for link in self._to.pop(peer_id, {}):
            del self._over[link][peer_id]


_NONE_OVER: Mapping[str, Offer] = {}
_NONE_TO: Mapping[int, Offer] = {}

Found = tuple[Key, Offer, int, bool]
"""A way that could be taken: the key of the speaker here, the offer, the link (negative: the older
one is the greater), and whether the speaker here answers."""


class Way(msgspec.Struct, eq=False):
    """A connection to a peer on another node, as the membership sees it."""

    peer: Peer
    number: int
    """Negative; 0: the membership has closed it."""
    chosen: tuple[int, int] | None
    """Link and stamp of the offer; None: it is held open."""
    is_wanted: bool = False
    """The membership has closed it, and asked for the peer again while no link led there."""
    lost_at: float = 0.0
    opened: int = 0
    """Number of the last `Opened` that was sent."""
    seen: int = 0
    """Number of the last `Opened` that was received."""


class Ways:
    """The ways to all peers on other nodes."""

    def __init__(self) -> None:
        self.to: dict[str, Way] = {}
        """By the peer's id."""
        self.passed: dict[str, tuple[int, int, Key]] = {}
        """The ways that the ranks of this node were told of, as in `Way.chosen`, and the key."""
        self.held: dict[str, Way] = {}
        """Those of them that are held open: no link leads along them now."""
        self.by_number: dict[int, str] = {}
        """The peer of each connection that the membership sees."""

    def over(self, links: Collection[int]) -> list[Way]:
        """Return the ways that lead over one of these links."""
        ways = self.to.values()
        return [way for way in ways if way.chosen is not None and way.chosen[0] in links]


Route = tuple[int, tuple[str, ...]]
"""A link, and the ids of the peers that are reached over it; none: all that are."""


class Routes:
    """The links over which messages to many go, kept until a way changes."""

    def __init__(self) -> None:
        self.numbers: Sequence[int] | None = None
        """The connections of the last broadcast, as the membership names them."""
        self.links: tuple[int, ...] = ()
        """Those of them that are links."""
        self.ways: list[Route] = []
        """The others."""
        self.far: list[Route] | None = None
        """Those of a message from a rank of this node to all on others."""

    def clear(self) -> None:
        """Forget them: a way has changed."""
        self.numbers = self.far = None


class Links:
    """All connections whose other side is known."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.peers: dict[int, Peer] = {}
        self.superseded: set[int] = set()
        """Those that their other side ends on purpose."""
        self._numbers: dict[str, list[int]] = {}
        self._near: dict[str, int] | None = None
        self._far: tuple[int, ...] | None = None
        """As last returned; None: a link has come or gone since."""
        self._heard: dict[int, float] = {}
        """When anything was heard over each link."""

    def add(self, number: int, peer: Peer, now: float) -> None:
        """Note one."""
        self.peers[number] = peer
        self._heard[number] = now
        self._near = self._far = None
        self._numbers.setdefault(peer.id, []).append(number)

    def drop(self, number: int) -> tuple[Peer | None, bool]:
        """Forget one; return its peer, and whether it was the last to it."""
        peer = self.peers.pop(number, None)
        self._heard.pop(number, None)
        self.superseded.discard(number)
        if peer is None:
            return None, False
        self._near = self._far = None
        self._numbers[peer.id].remove(number)
        if self._numbers[peer.id]:
            return peer, False
        del self._numbers[peer.id]
        return peer, True

    def mark(self, number: int, now: float) -> Peer | None:
        """Note that something was heard over a link; return its peer; None: it is unknown."""
        if number in self._heard:
            self._heard[number] = now
        return self.peers.get(number)

    def catch_up(self, late: float, now: float) -> None:
        """Count no time in which this process did not run."""
        for number, heard in self._heard.items():
            self._heard[number] = min(now, heard + late)

    def silent_far(self, now: float, patience: float) -> dict[int, str]:
        """Return the links to other nodes over which nothing was heard for so long, with the id of
        their peer."""
        return {
            number: self.peers[number].id
            for number in self.far()
            if now - self._heard[number] > patience
        }

    def to(self, peer_id: str) -> int | None:
        """Return a link to a peer."""
        return next(iter(self._numbers.get(peer_id, ())), None)

    def all_to(self, peer_id: str) -> tuple[int, ...]:
        """Return all links to a peer."""
        return tuple(self._numbers.get(peer_id, ()))

    def is_far(self, number: int) -> bool:
        """Tell whether a link leads to a rank of another node."""
        peer = self.peers.get(number)
        return peer is not None and peer.seat >= 0 and peer.node != self._node

    def far(self) -> tuple[int, ...]:
        """Return the links to other nodes."""
        if self._far is None:
            self._far = tuple(number for number in self.peers if self.is_far(number))
        return self._far

    def near(self) -> Mapping[str, int]:
        """Return a link to each other rank of this node, by its id."""
        if self._near is None:
            self._near = {
                peer.id: self._numbers[peer.id][0]
                for peer in self.peers.values()
                if peer.seat >= 0 and peer.node == self._node
            }
        return self._near


class Near:
    """The other ranks of this node: which of them speak, and answer."""

    def __init__(self, patience: Callable[[], float]) -> None:
        self.patience = patience
        """Seconds of a speaker's silence after which another one speaks."""
        self.heard: dict[str, float] = {}
        """When anything was heard of each other rank."""
        self._met: dict[str, float] = {}
        """When each of them came."""
        self.silent: set[str] = set()
        """Those of whom nothing was heard for too long."""
        self.keys: dict[str, Key] = {}
        """By id, as far as they have said; this process too, if it speaks."""
        self._ended: dict[str, float] = {}
        """When each rank has ended, as far as that is known for sure."""
        self._term = 0
        """The newest term of those that are forgotten: other nodes may still count it."""

    def learn_key(self, peer_id: str, key: Key) -> None:
        """Take a rank's word on its key. Keys only grow until it retires: over the older of two
        connections, or the newer, an old word may come late."""
        known = self.keys.get(peer_id, NO_KEY)
        if RETIRED in (key, known):
            self._term = max(self._term, known[0])
            self.keys[peer_id] = RETIRED
        else:
            self.keys[peer_id] = max(key, known)

    @property
    def best_key(self) -> Key:
        """Return the key of the speaker that counts."""
        return max(self.keys.values(), default=NO_KEY)

    @property
    def next_term(self) -> int:
        """Return a term that makes a higher key than any speaker of this node has had."""
        return max(self._term, self.best_key[0]) + 1

    @property
    def was_spoken_for(self) -> bool:
        """Tell whether a rank of this node has spoken for it: no other one is waited for then."""
        return self.next_term > 1

    def is_silent(self, peer_id: str, now: float) -> bool:
        """Tell whether nothing was heard of a rank for too long."""
        return now - self.heard.get(peer_id, now) > self.patience()

    def meet(self, peer_id: str, now: float) -> None:
        """Note that a rank is linked."""
        self.heard[peer_id] = now
        self._met.setdefault(peer_id, now)

    @property
    def _speaker(self) -> str | None:
        """Return the speaker that counts, if it has taken this part on purpose."""
        best = max(self.keys, key=lambda peer_id: self.keys[peer_id], default=None)
        return best if best is not None and self.keys[best][0] > 0 else None

    def is_spoken_for(self, now: float) -> bool:
        """Tell whether there is a speaker, and it answers."""
        speaker = self._speaker
        return speaker is not None and not self.is_silent(speaker, now)

    def may_speak(self, peer_id: str, now: float) -> bool:
        """Tell whether a rank answers, and may take a silent speaker's place at once: one that came
        after that was heard last waits at its start for a word of it."""
        if self.keys.get(peer_id) == RETIRED:
            return False
        last = self.heard.get(self._speaker or "", now)
        return not self.is_silent(peer_id, now) and self._met.get(peer_id, now) <= last

    def catch_up(self, late: float, now: float) -> None:
        """Count no time in which this process did not run."""
        for peer_id, heard in self.heard.items():
            self.heard[peer_id] = min(now, heard + late)

    def change_silent(self, now: float) -> list[str]:
        """Return those that have fallen silent, or are heard again."""
        limit = self.patience()
        changed = [
            peer_id
            for peer_id, heard in self.heard.items()
            if (now - heard > limit) != (peer_id in self.silent)
        ]
        self.silent ^= set(changed)
        return changed

    def end(self, peer_id: str, now: float) -> None:
        """Note that a process has ended."""
        self._ended[peer_id] = now

    def ended(self, now: float) -> tuple[str, ...]:
        """Return those that have ended a while ago: other nodes may not know."""
        self._ended = {p: at for p, at in self._ended.items() if now - at <= ENDED_SECONDS}
        return tuple(self._ended)

    def forget(self, peer_id: str) -> None:
        """Forget one that has no link any more."""
        self.heard.pop(peer_id, None)
        self._met.pop(peer_id, None)
        self.silent.discard(peer_id)
        self._term = max(self._term, self.keys.pop(peer_id, NO_KEY)[0])
