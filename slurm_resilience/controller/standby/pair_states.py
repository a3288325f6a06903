"""The active sresctld and its standby: who needs whose word before an act. Pure.

One file in Slurm's StateSaveLocation, which both machines see, says whether a standby has the
journal (`Marker`). It is written before it holds, in both directions:

    paired   each act that cannot be undone waits until the standby has its record
    alone    nothing is waited for, and a standby that takes over knows that it lacks something

So a standby that takes over while the marker names it has the record of every such act that was
ever begun. The marker is only written when a standby comes or goes, not for each record.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

ACK_SECONDS = 5.0
"""A standby that has not acknowledged a record, or a sign of life, for so long is lost."""


class Marker(msgspec.Struct, frozen=True):
    """The active sresctld, as its file tells."""

    host: str
    """Its machine, by its name in SlurmctldHost."""
    history: str
    standby: str = ""
    """The one that has each record of an act before it is begun; empty: the active one is alone."""
    at: float = 0.0
    """When this was written (epoch), for people."""


class PairState(enum.StrEnum):
    """The stage of an active sresctld with its standby."""

    ALONE = "alone"
    """None is connected, and the marker says so."""
    CATCHING_UP = "catching up"
    """One is connected and lacks records; the marker still says that we are alone."""
    NAMING = "naming"
    """It has everything, and acts wait for it; the marker is being written."""
    PAIRED = "paired"
    """It has everything; the marker names it."""
    LOST = "lost"
    """It is gone, and the marker may still name it: nothing may be begun."""


class PairEvent(enum.StrEnum):
    """An event of the connection to a standby, or of the marker."""

    ATTACHED = "attached"
    CAUGHT_UP = "caught up"
    """It has all records."""
    NAMED = "named"
    """The marker names it."""
    GONE = "gone"
    MARKED_ALONE = "marked alone"
    """The marker says that we are alone."""


_S, _E = PairState, PairEvent
PAIR_TABLE: Mapping[tuple[PairState, PairEvent], PairState] = {
    (_S.ALONE, _E.ATTACHED): _S.CATCHING_UP,
    (_S.CATCHING_UP, _E.CAUGHT_UP): _S.NAMING,
    (_S.CATCHING_UP, _E.GONE): _S.ALONE,
    (_S.NAMING, _E.NAMED): _S.PAIRED,
    (_S.NAMING, _E.GONE): _S.LOST,
    (_S.PAIRED, _E.GONE): _S.LOST,
    (_S.LOST, _E.MARKED_ALONE): _S.ALONE,
}


class Pairing:
    """The records that the standby has, and whether an act may be begun. Not thread safe."""

    def __init__(self, position: int) -> None:
        """
        Args:
            position: the number of the last record; the marker says that we are alone.
        """
        self.state = PairState.ALONE
        self.standby = ""
        """The connected one."""
        self.committed = position
        self.acknowledged = 0
        self.heard_at = 0.0
        """When (monotonic) its last acknowledgement came."""

    def attach(self, standby: str, position: int, now: float) -> None:
        """Take in a standby whose copy of this history has come so far."""
        self._move(PairEvent.ATTACHED)
        self.standby, self.acknowledged, self.heard_at = standby, position, now

    def commit(self, number: int) -> None:
        """Note that a record was written to our own journal."""
        self.committed = number

    def acknowledge(self, number: int, now: float) -> None:
        """Note that the standby has written all records up to this one."""
        self.acknowledged = max(self.acknowledged, min(number, self.committed))
        self.heard_at = now

    @property
    def is_level(self) -> bool:
        """The standby has everything: `begin_naming`, then write the marker."""
        return self.state is PairState.CATCHING_UP and self.acknowledged == self.committed

    def begin_naming(self) -> None:
        """Let acts wait for the standby from now on: the marker is about to name it."""
        assert self.is_level
        self._move(PairEvent.CAUGHT_UP)

    def named(self) -> None:
        """Note that the marker names the standby, unless that was lost meanwhile."""
        if self.state is PairState.NAMING:
            self._move(PairEvent.NAMED)

    def gone(self) -> None:
        """Note that the standby is gone, or does not answer."""
        if self.is_connected:
            self._move(PairEvent.GONE)

    def marked_alone(self) -> None:
        """Note that the marker says that we are alone."""
        if self.state is PairState.LOST:
            self._move(PairEvent.MARKED_ALONE)

    def is_overdue(self, now: float, seconds: float) -> bool:
        """Tell whether the connected standby has been silent for longer than this."""
        return self.is_connected and now - self.heard_at > seconds

    @property
    def is_connected(self) -> bool:
        return self.state in (PairState.CATCHING_UP, PairState.NAMING, PairState.PAIRED)

    def may_begin(self, number: int) -> bool:
        """Tell whether an act may be begun whose record has this number."""
        match self.state:
            case PairState.ALONE | PairState.CATCHING_UP:
                return True
            case PairState.NAMING | PairState.PAIRED:
                return self.acknowledged >= number
            case PairState.LOST:
                return False

    def _move(self, event: PairEvent) -> None:
        self.state = PAIR_TABLE[self.state, event]


class Takeover(msgspec.Struct, frozen=True):
    """The judgement of a sresctld's journal when it becomes the active one."""

    is_whole: bool
    """Its journal has the record of every act that was begun."""
    text: str


def judge_takeover(
    own: str, history: str, marker: Marker | None, handed_over_by: str = ""
) -> Takeover:
    """Tell whether our journal may lack acts of another sresctld.

    Args:
        own: our machine.
        history: our journal's; empty: it was never shared.
        marker: as the last active one left it; None: there is none.
        handed_over_by: the machine whose sresctld has given us all of its journal, and does not
            act; empty: none has.
    """
    if marker is None:
        if not history:
            return Takeover(True, "it is the first to be active")
        return Takeover(False, "nothing tells which sresctld was the last active one")
    if marker.history != history:
        text = f"{marker.host} was active with a journal of which this machine has no part"
        return Takeover(False, text)
    if marker.host == own:
        return Takeover(True, "it was the last active one itself")
    if marker.host == handed_over_by:
        return Takeover(True, f"{marker.host} has handed its journal over")
    if marker.standby == own:
        return Takeover(True, f"{marker.host} began nothing of which there is no record here")
    return Takeover(False, f"{marker.host} was active without this standby at its end")


def next_history(own: str, *known: str) -> str:
    """Return the name of a new history: later than all known ones, and no other machine's.

    Args:
        own: our machine.
        known: names of histories; empty ones count as none.
    """
    return f"{1 + max((epoch_of(name) for name in known), default=0)}-{own}"


def epoch_of(history: str) -> int:
    """Return the number of a history: a later one has a higher number."""
    number = history.partition("-")[0]
    return int(number) if number.isdecimal() else 0
