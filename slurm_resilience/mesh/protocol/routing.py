"""The links over which messages go on their way to peers on other nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_resilience.mesh.messages import FRAMES, Heartbeat, Message, Relayed
from slurm_resilience.mesh.protocol.bundling import Outboxes
from slurm_resilience.mesh.protocol.links import Offers, Route, Routes, Ways


class Routing:
    """Gives messages to links. Most of them go to the same peers as the one before, so it keeps the
    routes until a way changes."""

    def __init__(
        self,
        me: str,
        ways: Ways,
        offers: Offers,
        outboxes: Outboxes,
    ) -> None:
        """
        Args:
            me: id of this process.
            ways: of this process.
            offers: peers that are reached over each link.
            outboxes: take the messages.
        """
        self._me = me
        self._ways = ways
        self._offers = offers
        self._outboxes = outboxes
        self._routes = Routes()

    def forget(self) -> None:
        """Find the routes anew: a way has changed."""
        self._routes.clear()

    def send(self, numbers: Sequence[int], message: Message, calm: bool = False) -> tuple[int, ...]:
        """Send a message of this process on some connections that its membership sees.

        Args:
            numbers: of the connections.
            message: the message.
            calm: the others do not wait for it.

        Returns:
            Those of them that are links: there it goes as it is.
        """
        routes, by_number = self._routes, self._ways.by_number
        if routes.numbers is not numbers:
            routes.links = tuple(number for number in numbers if number > 0)
            ids = [by_number[number] for number in numbers if number in by_number]
            routes.ways = self._over_ways(ids)
            routes.numbers = numbers
        self._relay(routes.ways, message, calm)
        return routes.links

    def tell(self, peer_id: str, message: Message) -> None:
        """Send a message of this process to one peer, if a way leads there."""
        self._relay(self._over_ways((peer_id,)), message)

    def pass_on(self, relayed: Relayed) -> None:
        """Pass on what a rank of this node says to others: to all that it was told of, where it
        names none."""
        if relayed.targets:
            routes = self._over_offers(relayed.targets)
        elif self._routes.far is None:
            routes = self._routes.far = self._over_offers(self._ways.passed)
        else:
            routes = self._routes.far
        self._give(routes, relayed)

    def _relay(self, routes: Sequence[Route], message: Message, calm: bool = False) -> None:
        if routes:
            body, quiet = FRAMES.encode(message), isinstance(message, Heartbeat)
            self._give(routes, Relayed((self._me,), (), body, quiet, calm))

    def _give(self, routes: Sequence[Route], relayed: Relayed) -> None:
        for link, targets in routes:
            self._outboxes.add((link,), addressed(relayed, targets))

    def _over_ways(self, ids: Iterable[str]) -> list[Route]:
        """Return the routes of this process's own messages."""
        to = self._ways.to
        groups: dict[int, list[str]] = {}
        last, group = 0, list[str]()
        for peer_id in ids:
            way = to.get(peer_id)
            if way is not None and way.chosen is not None:
                link = way.chosen[0]
                if link != last:  # most go over the same as the one before
                    last, group = link, groups.setdefault(link, [])
                group.append(peer_id)
        return self._named(groups)

    def _over_offers(self, ids: Iterable[str]) -> list[Route]:
        """Return the routes of what the ranks of this node say."""
        groups: dict[int, list[str]] = {}
        for peer_id in ids:
            passed = self._ways.passed.get(peer_id)
            if passed is not None:
                groups.setdefault(passed[0], []).append(peer_id)
        return self._named(groups)

    def _named(self, groups: Mapping[int, list[str]]) -> list[Route]:
        """Return routes that name their peers; none where these are all that a link reaches."""
        routes = []
        for link, ids in groups.items():
            reached = self._offers.over(link)
            is_all = len(ids) >= len(reached) and reached.keys() <= set(ids)
            routes.append((link, () if is_all else tuple(ids)))
        return routes


def addressed(relayed: Relayed, targets: tuple[str, ...]) -> Relayed:
    """Return the same words to others."""
    return Relayed(relayed.sources, targets, relayed.body, relayed.quiet, relayed.calm)
