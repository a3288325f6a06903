"""Find whose fault it is that training stands still. Pure.

A peer that is not heard of has stopped as a whole, or its machine is gone. One that is heard of but
has entered fewer collectives than the others holds them up: they wait in the one that it has not
come to. torch counts collectives in every process, whether the program marks them or not; where the
count is unknown, the marks tell: who is at an earlier step, or outside of a collective while all
others are in one.

A rank that is behind but moves is slow, not hung: a culprit has itself stood still for the limit.
Where all wait alike (the network, a device), no rank is accused until the ceiling.

A rank that returned from its block will come to nothing any more. If another waits in a
collective that it has not entered, that is certain, and needs none of the patience of a first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from slurm_resilience.training.watch.progress import COLLECTIVE, PAUSED, RETURNED

Kind = Literal["silent", "behind", "outside", "returned", "alone", "unknown"]


class RankSign(msgspec.Struct, frozen=True):
    """The last sign of life of a process in this world."""

    id: str
    seat: int
    step: int = -1
    phase: str = ""
    """Its last mark; empty: it has made none."""
    collectives: int = -1
    """Collectives that it has entered in this world; -1: unknown."""
    since: float = 0.0
    """Seconds since its main thread did anything, when it said so."""
    heard: float = 0.0
    """Seconds since it said so; 0 for this process."""

    @property
    def still(self) -> float:
        """Seconds for which it has stood still, as far as is known."""
        return self.since + self.heard


class HangVerdict(msgspec.Struct, frozen=True):
    """A stall's kind and reason."""

    kind: Kind
    reason: str
    culprit: str = ""
    """Id of the peer at fault; empty: none in particular."""
    seat: int = -1
    """Its seat."""


def judge(
    own: RankSign, peers: Sequence[RankSign], limit: float, ceiling: float, silence: float
) -> HangVerdict | None:
    """Judge whether this world is stalled, and by which rank.

    Args:
        own: this process.
        peers: the other members of this world.
        limit: seconds, from `limit.learn`.
        ceiling: seconds after which a stall is one, even if no rank can be accused.
        silence: seconds without a word after which a peer is silent.

    Returns:
        None: no stall, or it is not certain yet.
    """
    if not own.phase or own.phase == PAUSED:
        return None
    silent = max(peers, key=lambda peer: (peer.heard, -peer.seat), default=None)
    if own.still > limit and silent is not None and silent.heard > silence:
        text = f"seat {silent.seat} was not heard of for {silent.heard:.1f} s"
        return HangVerdict("silent", text, silent.id, silent.seat)
    if own.still <= limit:
        return None
    ranks = [own, *(peer for peer in peers if peer.phase)]
    if any(one.phase == PAUSED for one in ranks):
        return None
    for behind in (_fewer_collectives, _earlier_step, _outside):
        kind, late, text = behind(ranks)
        if not late or 2 * len(late) > len(ranks):
            continue
        first = max(late, key=lambda one: (one.still, -one.seat))
        if first.still <= limit and own.still <= ceiling:
            return None  # slow, not hung
        others = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
        reason = f"seat {first.seat}{others} {text}, still for {first.still:.1f} s"
        kind = "returned" if first.phase == RETURNED else kind
        return HangVerdict(kind, f"{reason}, limit {limit:.1f} s", first.id, first.seat)
    if own.still <= ceiling:
        return None
    idle = [peer for peer in peers if not peer.phase]
    if idle:
        # It may build for as long as it likes before `s.track`, where the others wait unjudged.
        first = max(idle, key=lambda one: (one.still, -one.seat))
        text = f"seat {first.seat} has not come to its first batch in this world"
        return HangVerdict("behind", f"{text}, still for {first.still:.1f} s", first.id, first.seat)
    return HangVerdict("unknown", _all_wait(own, ranks))


def judge_returned(own: RankSign, peers: Sequence[RankSign], limit: float) -> HangVerdict | None:
    """Judge whether this process waits for one that returned.

    Args:
        own: this process.
        peers: the other members of this world.
        limit: seconds, from `limit.learn`.

    Returns:
        None: no, or where collectives are not counted.
    """
    if own.still <= limit or own.phase in (PAUSED, RETURNED):
        return None
    late = [one for one in peers if one.phase == RETURNED]
    # One that began no step in this world has no count.
    late = [one for one in late if one.collectives < own.collectives]
    if not late:
        return None
    first = max(late, key=lambda one: (one.still, -one.seat))
    others = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    text = f"seat {first.seat}{others} returned in {_step(first)}, others are {_at(own)}"
    return HangVerdict("returned", f"{text} in collective {own.collectives}", first.id, first.seat)


def _step(sign: RankSign) -> str:
    return f"step {sign.step}" if sign.step >= 0 else "the time before its first step"


def _at(sign: RankSign) -> str:
    return f"at step {sign.step}" if sign.step >= 0 else "before their first"


_Late = tuple[Kind, list[RankSign], str]


def _fewer_collectives(ranks: list[RankSign]) -> _Late:
    if any(one.collectives < 0 for one in ranks):
        return "behind", [], ""
    most = max(one.collectives for one in ranks)
    late = _lowest(ranks, lambda one: one.collectives)
    text = f"has not come to collective {most}"
    return "behind", late, f"{text} in {late[0].phase} of step {late[0].step}" if late else text


def _earlier_step(ranks: list[RankSign]) -> _Late:
    late = _lowest(ranks, lambda one: one.step)
    most = max(one.step for one in ranks)
    text = f"{_doing(late[0])} at step {late[0].step}, others at {most}" if late else ""
    return "behind", late, text


def _outside(ranks: list[RankSign]) -> _Late:
    late = [one for one in ranks if one.phase != COLLECTIVE]
    late = late if len(late) < len(ranks) else []
    text = f"{_doing(late[0])} while the others wait for it" if late else ""
    return "outside", late, text


def _doing(sign: RankSign) -> str:
    return "returned" if sign.phase == RETURNED else f"is in {sign.phase}"


def _lowest(ranks: list[RankSign], key: Callable[[RankSign], int]) -> list[RankSign]:
    """Return the ranks with the lowest value; none where all are alike."""
    least = min(map(key, ranks))
    late = [one for one in ranks if key(one) == least]
    return late if len(late) < len(ranks) else []


def _all_wait(own: RankSign, ranks: list[RankSign]) -> str:
    phases = sorted({one.phase for one in ranks})
    return (
        f"all {len(ranks)} ranks stand still at step {own.step} ({', '.join(phases)}) "
        f"for {own.still:.1f} s and none is behind: unknown"
    )
