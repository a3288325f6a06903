"""The messages that wait for the end of a turn, bundled for each link. Pure.

A process that reads many messages before its turn ends passes them on in one frame for each link.
So the frames of a busy process grow with its links, and not with the messages: the more there is
to do, the less each message costs.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_resilience.mesh.messages import Bundle, Bundled, Reachable, Relayed
from slurm_resilience.mesh.model import Member

BUNDLE_BYTES = 1 << 20
"""With so many bytes of bodies a bundle is full: a frame has a limit."""


class _Words:
    """A message from one process to others."""

    __slots__ = ("message", "targets")

    def __init__(self, message: Relayed) -> None:
        self.message = message
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

    def __init__(self) -> None:
        self._items: list[_Words | _Offers | Bundled] = []
        self._where: dict[tuple[str, bytes], int] = {}
        """The newest item of a source and a body."""
        self._last: dict[str, int] = {}
        """The newest item for each target."""
        self._for_all = -1
        """The newest item that is for all: none after it may join one before it."""
        self._offers: _Offers | None = None
        """Takes more members in; None: a message after it would be overtaken."""
        self._bytes = 0
        self.quiet = True
        """None of the messages needs to be read at once."""
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
        if isinstance(message, Relayed):
            self.quiet = self.quiet and message.quiet
            self._relay(message)
            return
        self.quiet = False
        if not isinstance(message, Reachable):
            self._offers = None
            self._items.append(message)
        elif self._offers is not None and self._offers.key == message.key:
            self._offers.add(message)
        else:
            self._offers = _Offers(message)
            self._items.append(self._offers)

    def _relay(self, message: Relayed) -> None:
        key, targets = (message.source, message.body), message.targets
        at = self._where.get(key, -1)
        before = self._items[at] if at > self._for_all else None
        free = all(self._last.get(target, -1) < at for target in targets)
        if isinstance(before, _Words) and targets and free:
            before.targets += targets
        else:
            at = self._where[key] = len(self._items)
            self._items.append(_Words(message))
            self._bytes += len(message.body)
        if not targets:
            self._for_all = at
        for target in targets:
            self._last[target] = at

    def take(self, reached: Collection[str]) -> Bundled | Bundle:
        """Return all as one message.

        Args:
            reached: ids of all that are reached over the link: a message for all names none.
        """
        items = tuple(_message(item, reached) for item in self._items)
        # What names its targets is passed on, and not left unread for long.
        quiet = self.quiet and not self._last
        return items[0] if len(items) == 1 and not quiet else Bundle(items, quiet)


def _message(item: _Words | _Offers | Bundled, reached: Collection[str]) -> Bundled:
    if isinstance(item, _Offers):
        return Reachable(item.key, tuple(item.members.values()))
    if not isinstance(item, _Words):
        return item
    targets = tuple(item.targets)
    if len(targets) >= len(reached) and set(reached) <= set(targets):
        targets = ()
    return Relayed(item.message.source, targets, item.message.body, item.message.quiet)


class Bundles:
    """The bundles of all links."""

    def __init__(self, now: float) -> None:
        self.by_link: dict[int, LinkBundle] = {}
        self.now = now
        """The time of this turn."""

    def add(self, link: int, message: Bundled) -> bool:
        """Add a message; tell whether the bundle has to be sent before the next one is added."""
        bundle = self.by_link.get(link)
        if bundle is None:
            bundle = self.by_link[link] = LinkBundle()
        bundle.add(message, self.now)
        return bundle.is_full
