"""The messages that wait for the end of a turn, bundled for each link. Pure.

A process that reads many messages before its turn ends passes them on in one frame for each link.
So the frames of a busy process grow with its links, and not with the messages: the more there is
to do, the less each message costs. And the ranks of a world say the same most of the time: what
several say in the same words to the same others is sent once, with all their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TypeVar

from slurm_resilience.mesh.events import Send
from slurm_resilience.mesh.messages import Bundle, Bundled, Reachable, Relayed, Unreachable
from slurm_resilience.mesh.model import Member, Peer
from slurm_resilience.mesh.protocol.links import Links, Offers

Key = TypeVar("Key")

BUNDLE_BYTES = 1 << 20
"""With so many bytes of bodies a bundle is full: a frame has a limit."""


GATHER_SECONDS = 0.01
"""So long a word of peers that are reached waits for more of them, at least."""
GATHER_SEAT_SECONDS = 1e-4
"""And so long for each rank of a world that is coming: a large one takes longer to come, and each
word of a part of it costs every rank a turn."""
GATHER_MOST_SECONDS = 0.1
"""But no longer than this."""


class Haste(IntEnum):
    """The haste of the messages that wait for one link: the place of its seconds in `Waits`."""

    NONE = 0
    """There are none."""
    QUIET = 1
    """Heartbeats: they need not be read at once."""
    CALM = 2
    """Words that the others do not wait for."""
    GATHERS = 3
    """They begin by telling of peers that are reached: others may follow at once, and each word of
    one costs all that hear of it a greeting. What comes after waits with them, unless it tells of a
    loss."""
    URGENT = 4
    """One of them has others go on."""
    LOSS = 5
    """One of them tells of a loss."""

    def with_one_more(self, later: Haste) -> Haste:
        """Return the haste of these messages with one more, or several, behind them."""
        if self in (Haste.NONE, later):
            return later
        if Haste.LOSS in (self, later):
            return Haste.LOSS
        if self is Haste.GATHERS or (self is Haste.CALM and later is Haste.GATHERS):
            return Haste.GATHERS
        return Haste.URGENT


def _haste(message: Bundled) -> Haste:
    match message:
        case Relayed(quiet=True):
            return Haste.QUIET
        case Relayed(calm=True):
            return Haste.CALM
        case Reachable():
            return Haste.GATHERS
        case Unreachable():
            return Haste.LOSS
        case _:
            return Haste.URGENT


Waits = tuple[float, ...]
"""Seconds that words wait for others on their link, one for each `Haste`: found by its place, since
a speaker of a large world looks at hundreds of links in each turn."""


def waits_of(*, quiet: float, calm: float, gathers: float) -> Waits:
    """Return them, in the order of `Haste`; what is urgent waits for nothing."""
    return 0.0, quiet, calm, gathers, 0.0, 0.0


def gather_seconds(coming: int) -> float:
    """Return how long a word of peers that are reached waits for more of them.

    Args:
        coming: ranks that are expected to come now.
    """
    return min(max(GATHER_SECONDS, GATHER_SEAT_SECONDS * coming), GATHER_MOST_SECONDS)


class _Words:
    """A message from some processes to others."""

    __slots__ = ("message", "sources", "targets")

    def __init__(self, message: Relayed) -> None:
        self.message = message
        self.sources = list(message.sources)
        self.targets = list(message.targets)


class _Offers:
    """Members that are reached, all with the same key."""

    __slots__ = ("key", "members")

    def __init__(self, message: Reachable) -> None:
        self.key = message.key
        self.members: dict[str, Member] = {}
        self.add(message)

    def add(self, message: Reachable) -> None:
        """Add more; of one peer the newest word counts."""
        self.members |= {member.peer.id: member for member in message.members}


class LinkBundle:
    """The messages for one link, in order."""

    def __init__(self, apart: str = "") -> None:
        """
        Args:
            apart: a source whose messages are not joined with those of others; empty: none.
        """
        self._apart = (apart,)
        self._items: list[_Words | _Offers | Bundled] = []
        self._where: dict[tuple[bool, bytes], int] = {}
        """The newest item of a body, of the source apart or of others."""
        self._last: dict[str, int] = {}
        """The newest item for each target."""
        self._of: dict[str, int] = {}
        """The newest item of each source."""
        self._for_all = -1
        """The newest item that is for all: none after it may join one before it."""
        self._offers: _Offers | None = None
        """Takes more members in; None: a message after it would be overtaken."""
        self._told = -1
        """The newest item that tells who is reached: what a new source says comes after it."""
        self._bytes = 0
        self.haste = Haste.NONE
        self.since = 0.0
        """Since when the first one waits."""

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_full(self) -> bool:
        """Tell whether it has to be sent before more is added."""
        return self._bytes >= BUNDLE_BYTES

    def add(self, message: Bundled, now: float) -> None:
        """Add a message behind all others, or to one that says the same to others."""
        if not self._items:
            self.since = now
        self.haste = self.haste.with_one_more(_haste(message))
        if isinstance(message, Relayed):
            self._relay(message)
            return
        if not isinstance(message, Reachable):
            self._offers = None
            self._told = len(self._items)
            self._items.append(message)
        elif self._offers is not None and self._offers.key == message.key:
            self._offers.add(message)
        else:
            self._offers = _Offers(message)
            self._told = len(self._items)
            self._items.append(self._offers)

    def _relay(self, message: Relayed) -> None:
        sources, targets = message.sources, message.targets
        key = (sources == self._apart, message.body)
        at = self._where.get(key, -1)
        item = self._items[at] if at >= 0 else None
        if isinstance(item, _Words):
            if message.quiet and item.targets == list(targets):
                # Of two beats of one process, the first tells what the second does.
                sources = tuple(one for one in sources if one not in item.sources)
            if self._may_join(at, sources) and item.targets == list(targets):
                item.sources += sources
                self._of.update(dict.fromkeys(sources, at))
                return
            if targets and self._may_reach(at, targets) and item.sources == list(sources):
                item.targets += targets
                self._last.update(dict.fromkeys(targets, at))
                return
        at = self._where[key] = len(self._items)
        self._items.append(_Words(message))
        self._bytes += len(message.body)
        self._of.update(dict.fromkeys(sources, at))
        self._last.update(dict.fromkeys(targets, at))
        if not targets:
            self._for_all = at

    def _may_join(self, at: int, sources: Sequence[str]) -> bool:
        """Tell whether more sources may say the words of an item: none has said anything in it, or
        after it, and what tells of them is before it."""
        newest = self._of
        return at > self._told and all(newest.get(source, -1) < at for source in sources)

    def _may_reach(self, at: int, targets: Sequence[str]) -> bool:
        """Tell whether more targets may read the words of an item: neither it, nor one after it, is
        for any of them."""
        newest = self._last
        return at > self._for_all and all(newest.get(target, -1) < at for target in targets)

    def extend(self, later: LinkBundle) -> None:
        """Add all messages of another bundle behind those of this one. None joins them here."""
        if not self._items:
            self.since = later.since
        self.haste = self.haste.with_one_more(later.haste)
        self._items += later._items
        self._bytes += later._bytes
        self._where.clear()
        self._offers = None
        self._told = self._for_all = len(self._items) - 1
        self._last |= later._last

    def take(self, reached: Collection[str] = ()) -> Bundled | Bundle:
        """Return all as one message.

        Args:
            reached: ids of all that are reached over the link: a message for all names none.
        """
        items = tuple(_message(item, reached) for item in self._items)
        # What names its targets is passed on, and not left unread for long.
        quiet = self.haste is Haste.QUIET and not self._last
        return items[0] if len(items) == 1 and not quiet else Bundle(items, quiet)


def _message(item: _Words | _Offers | Bundled, reached: Collection[str]) -> Bundled:
    if isinstance(item, _Offers):
        return Reachable(item.key, tuple(item.members.values()))
    if not isinstance(item, _Words):
        return item
    targets = tuple(item.targets)
    if len(targets) >= len(reached) and set(reached) <= set(targets):
        targets = ()
    words = item.message
    return Relayed(tuple(item.sources), targets, words.body, words.quiet, words.calm)


class Outboxes:
    """The bundles of all links, until they are sent.

    What goes to all ranks of this node, or to all other nodes, is bundled once for all. Heartbeats
    have bundles of their own: they wait for others, and what must not wait does not take them along
    in many small parts.
    """

    def __init__(
        self, me: Peer, links: Links, offers: Offers, send: Callable[[Send], None], now: float
    ) -> None:
        """
        Args:
            me: this process.
            links: that there are.
            offers: what is reached over them.
            send: is called with each bundle that is due.
            now: the time.
        """
        self.now = now
        """The time of this turn."""
        self._me = me
        self._links = links
        self._offers = offers
        self._send = send
        self._boxes: dict[tuple[int, bool], LinkBundle] = {}
        """By link, and whether all in it are quiet."""
        self._common: dict[tuple[bool, bool], LinkBundle] = {}
        """Those for all links to other nodes, or (``False``) for all near ones, and the same. They
        come behind what waits for one link."""

    def add(self, numbers: Iterable[int], message: Bundled) -> None:
        """Add a message to what is sent over these links at the end of the turn, in order."""
        is_quiet = isinstance(message, Relayed) and message.quiet
        for number in numbers:
            is_far = self._links.is_far(number)
            common = self._common.pop((is_far, is_quiet), None)
            if common is not None:
                for each in self._all(is_far):
                    self._box(each, is_quiet).extend(common)
            box = self._box(number, is_quiet)
            box.add(message, self.now)
            if box.is_full:
                self.empty(number, is_quiet)

    def add_for_all(self, message: Bundled, *, is_far: bool) -> None:
        """Add a message that names no targets for all near links, or for all to other nodes."""
        if not self._all(is_far):
            return
        key = is_far, isinstance(message, Relayed) and message.quiet
        common = self._common.get(key)
        if common is None:
            common = self._common[key] = LinkBundle("" if is_far else self._me.id)
        common.add(message, self.now)
        if common.is_full:
            self._empty_common(*key)

    def flush(self, waits: Waits) -> None:
        """Send what has waited for long enough."""
        for key in self._due(self._common, waits):
            self._empty_common(*key)
        for link in self._due(self._boxes, waits):
            self._empty_box(*link)

    def _due(self, boxes: Mapping[Key, LinkBundle], waits: Waits) -> list[Key]:
        now = self.now
        return [key for key, box in boxes.items() if now >= box.since + waits[box.haste]]

    def next_at(self, waits: Waits) -> float:
        """Return when `flush` has something to send, if no more is added."""
        boxes = (*self._boxes.values(), *self._common.values())
        return min([box.since + waits[box.haste] for box in boxes], default=math.inf)

    def empty(self, number: int, is_quiet: bool) -> None:
        """Send what waits for a link."""
        common = self._common.get((self._links.is_far(number), is_quiet))
        if common is not None:
            self._box(number, is_quiet).extend(common)
        self._empty_box(number, is_quiet)

    def drop(self, number: int) -> None:
        """Forget what waits for a link that is gone."""
        for is_quiet in (True, False):
            self._boxes.pop((number, is_quiet), None)

    def _all(self, is_far: bool) -> tuple[int, ...]:
        return self._links.far() if is_far else tuple(self._links.near().values())

    def _box(self, number: int, is_quiet: bool) -> LinkBundle:
        box = self._boxes.get((number, is_quiet))
        if box is None:
            # To a rank of this node, messages of this process may have to be passed on to other
            # nodes, and those of others not: they stay apart.
            apart = "" if self._links.is_far(number) else self._me.id
            box = self._boxes[number, is_quiet] = LinkBundle(apart)
        return box

    def _empty_common(self, is_far: bool, is_quiet: bool) -> None:
        common = self._common.pop((is_far, is_quiet))
        alone = []
        for number in self._all(is_far):
            if (number, is_quiet) in self._boxes:
                self._box(number, is_quiet).extend(common)
                self._empty_box(number, is_quiet)
            else:
                alone.append(number)
        if alone:
            self._send(Send(tuple(alone), common.take()))

    def _empty_box(self, number: int, is_quiet: bool) -> None:
        box = self._boxes.pop((number, is_quiet), None)
        if box is not None and number in self._links.peers:
            self._send(Send((number,), box.take(self._offers.over(number).keys())))
