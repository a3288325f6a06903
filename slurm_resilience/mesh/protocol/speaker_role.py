"""The part that this process has on its node: it speaks for it, or not. Pure.

One rank of a node speaks on purpose: the one that is written down at the start, or else the lowest
seat that is there when none speaks. It keeps this part while it lives.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.protocol.links import NO_KEY, Key, Near
from slurm_resilience.mesh.protocol.speaker_search import START_SECONDS, SpeakerSearch


class Part(Enum):
    """The part of this process, until it is asked whether it should speak."""

    OPEN = "open"
    """It speaks if it is the lowest seat."""
    WRITTEN = "written"
    """It is written down as its node's speaker."""
    RETIRED = "retired"
    """It speaks never again."""


class SpeakerRole:
    """The part that this process has on its node."""

    def __init__(self, me: Peer, near: Near, search: SpeakerSearch, now: float) -> None:
        """
        Args:
            me: this process.
            near: the other ranks of its node.
            search: for those of other nodes.
            now: the time.
        """
        self._me = me
        self._near = near
        self._search = search
        self._part = Part.OPEN
        self._is_told = False
        """It was told, as it started, who is written down."""
        self._start_until = now + START_SECONDS
        """So long it waits for the ranks that are listed on its node, of which one may speak."""

    @property
    def key(self) -> Key:
        """Return the key with which this process speaks; `NO_KEY`: it does not."""
        return self._near.keys.get(self._me.id, NO_KEY)

    @property
    def speaks(self) -> bool:
        """Tell whether other nodes are reached over this process, on purpose."""
        return self.key[0] > 0

    @property
    def searches(self) -> bool:
        """Tell whether this process looks for the other nodes."""
        return self.key == self._near.best_key != NO_KEY

    @property
    def looks_beyond(self) -> bool:
        """Tell whether it has to know the ranks of other nodes that are written down, too."""
        return self.speaks or not self._is_told

    @property
    def is_retired(self) -> bool:
        """Tell whether it speaks never again."""
        return self._part is Part.RETIRED

    def begin(self, here: Peer, now: float) -> bool:
        """Take in who is written down as this process starts.

        Args:
            here: the speaker of its node.
            now: the time.

        Returns:
            Is it this process?
        """
        self._is_told = True
        self._part = Part.WRITTEN if here.id == self._me.id else Part.OPEN
        # Handshakes may take long, where all start at once on too few cores.
        self._start_until = now + max(START_SECONDS, self._near.patience())
        return self._part is Part.WRITTEN

    def is_starting(self, now: float) -> bool:
        """Tell whether the ranks of this node are left to dial each other as they find its speaker:
        two that dial each other have a connection too many."""
        return self._is_told and now < self._start_until

    def start_ends_at(self, now: float) -> float | None:
        """Return when it stops waiting for the ranks of its node; None: it does not wait."""
        return self._start_until if now < self._start_until else None

    def meet(self, now: float) -> None:
        """Note that a rank of this node has come: more may follow."""
        if now < self._start_until:
            self._start_until = max(self._start_until, now + START_SECONDS)

    def catch_up(self, late: float) -> None:
        """Count no time in which this process did not run."""
        self._start_until += late

    def should_speak(self, near: Iterable[Peer], now: float) -> bool:
        """Tell whether it has to speak: none does that answers, and it is written down, or the
        lowest seat that may speak at once.

        Args:
            near: the other ranks of its node.
            now: the time.
        """
        if self._near.is_spoken_for(now) or self.is_retired:
            return False
        if self._part is Part.WRITTEN:
            return True
        waits = now < self._start_until and self._search.expects_near
        if waits and not self._near.was_spoken_for:
            return False
        seats = [(p.seat, p.id) for p in near if self._near.may_speak(p.id, now)]
        return (self._me.seat, self._me.id) < min(seats, default=(self._me.seat + 1, ""))

    def take(self, term: int) -> bool:
        """Take a key of a term; tell whether it does so since it is written down: then the others
        find it, or it has found them."""
        is_written = self._part is Part.WRITTEN and term > 0
        self._near.keys[self._me.id] = (term, -self._me.seat)
        if is_written:
            self._part = Part.OPEN
        return is_written

    def retire(self) -> None:
        """Speak never again."""
        self._part = Part.RETIRED
        self._near.keys.pop(self._me.id, None)
