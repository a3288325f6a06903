"""The connections that the membership sees to peers on other nodes: one for each way. Pure.

They have negative numbers. A way that changes is another connection, in place of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurm_resilience.errors import WireError
from slurm_resilience.mesh.events import (
    ConnectionClosed,
    ConnectionProven,
    Event,
    MessageReceived,
    SameReceived,
    SeveralProven,
)
from slurm_resilience.mesh.messages import (
    FRAMES,
    GenerationEnded,
    Heartbeat,
    HungUp,
    Message,
    Opened,
    Relayed,
    StatusUpdate,
)
from slurm_resilience.mesh.model import CloseCause, Member, Peer, PeerStatus
from slurm_resilience.mesh.protocol.links import Found, Way, Ways
from slurm_resilience.mesh.protocol.routing import Routing


class WayConnections:
    """Opens and closes them, and delivers what comes over them."""

    def __init__(
        self,
        me: Peer,
        ways: Ways,
        routing: Routing,
        tell: Callable[[Event], None],
        status_of: Callable[[str], PeerStatus],
    ) -> None:
        """
        Args:
            me: this process.
            ways: that are taken.
            routing: sends messages over them.
            tell: is called with what the membership has to be told.
            status_of: the newest status of a peer.
        """
        self._me = me
        self._ways = ways
        self._routing = routing
        self._tell = tell
        self._status_of = status_of
        self._count = 0
        """Numbers that were given."""

    # -- opening and closing ----------------------------------------------------------------------

    def open_new(self, members: Sequence[Member], chosen: Sequence[tuple[int, int]]) -> None:
        """Have the membership see connections to peers to which there was no way.

        Args:
            members: the peers.
            chosen: the way to each, as in `Way.chosen`.
        """
        if not members:
            return
        first = self._count + 1
        self._count += len(members)
        numbers = tuple(range(-first, -self._count - 1, -1))
        peers = [member.peer for member in members]
        ids = [peer.id for peer in peers]
        self._ways.to.update(zip(ids, map(Way, peers, numbers, chosen), strict=True))
        self._ways.by_number.update(zip(numbers, ids, strict=True))
        self._tell(SeveralProven(numbers, tuple(members)))

    def change(self, way: Way, best: Found) -> None:
        """Have what is said to a peer go another way."""
        way.chosen = (-best[2], best[1].stamp)
        self._ways.held.pop(way.peer.id, None)
        if way.number < 0 or way.is_wanted:
            # Its way back may be as before: then it does not know that anything was lost.
            self._announce(way)
            self._open(way, best[1].member.status, rerouted=way.number < 0)

    def reopen(self, way: Way) -> None:
        """Open a way that the membership has closed, or do so as soon as a link leads along it."""
        if way.number == 0 and way.chosen is None:
            way.is_wanted = True
        elif way.number == 0:
            self._announce(way)
            self._open(way, PeerStatus(), rerouted=False)

    def _announce(self, way: Way) -> None:
        """Say that a way is opened (anew), before the membership says anything on it: there it
        would be refused, or be lost."""
        self._count += 1
        way.opened = self._count
        self._routing.tell(way.peer.id, Opened(way.opened))

    def _open(self, way: Way, status: PeerStatus, rerouted: bool) -> None:
        """Have the membership see a new connection, in place of the one before."""
        before, way.is_wanted = way.number, False
        self._count += 1
        way.number = -self._count
        self._ways.by_number[way.number] = way.peer.id
        # So the membership keeps the new one of the two.
        dialed = self._me.id < way.peer.id
        self._tell(ConnectionProven(way.number, way.peer, status, dialed, rerouted))
        if before < 0:
            self._ways.by_number.pop(before, None)
            self._tell(ConnectionClosed(before, "another way is taken", "reset"))

    def close(self, number: int) -> None:
        """Close a connection, as the membership wants it; the way stays."""
        way = self._ways.to.get(self._ways.by_number.get(number, ""))
        if way is not None and way.number == number:
            self._routing.send((number,), HungUp(way.seen, self._count))
            way.number = 0
        self._ways.by_number.pop(number, None)

    def forget(self, way: Way, reason: str, cause: CloseCause) -> None:
        """Forget a way, and close its connection."""
        self._routing.forget()
        del self._ways.to[way.peer.id]
        self._ways.held.pop(way.peer.id, None)
        if way.number < 0:
            self._ways.by_number.pop(way.number, None)
            self._tell(ConnectionClosed(way.number, reason, cause))

    # -- what comes over them ---------------------------------------------------------------------

    def deliver(self, relayed: Relayed, age: float) -> None:
        """Tell the membership what peers have said, so many seconds ago."""
        try:
            message = FRAMES.unpack(relayed.body)
        except WireError:
            return  # of another version: what it cannot say is asked for again
        ways = self._ways.to
        if not isinstance(message, StatusUpdate | GenerationEnded | Heartbeat):
            for source in relayed.sources:
                if source in ways:
                    self._deliver_from(ways[source], message, age)
            return
        heard = []
        for source in relayed.sources:
            way = ways.get(source)
            if way is not None and way.number < 0:
                heard.append(source)
            elif way is not None:
                self._deliver_from(way, message, age)
        if heard:
            self._tell(SameReceived(tuple(heard), message, age))

    def _deliver_from(self, way: Way, message: Message, age: float) -> None:
        match message:
            case Opened(number=number):
                if number < way.seen:
                    return  # over an older link, which has sent it again after a cut
                way.seen = number
                if way.chosen is not None:
                    self._open(way, self._status_of(way.peer.id), rerouted=way.number < 0)
                elif way.number == 0:
                    way.is_wanted = True
            case HungUp(seen=seen, at=at):
                if seen < way.opened or at < way.seen:
                    return  # one of the two has opened the way since
                number, way.number = way.number, 0
                if self._ways.by_number.pop(number, None) is not None:
                    self._tell(ConnectionClosed(number, "it counts this process as gone", "lost"))
            case _ if way.number < 0:
                self._tell(MessageReceived(way.number, way.peer.id, way.peer.id, message, age))
            case _:
                # It may not have heard: one of a pair that is cut off.
                self._routing.tell(way.peer.id, HungUp(way.seen, self._count))
