"""The members of the next generation, and their ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from slurm_resilience.mesh.model import Member, Peer, PeerStatus, View

SEARCH_SECONDS = 3.0
"""Newcomers of an elastic job look for ranks that live so long before they begin anew."""
SHOWN = 8
"""Missing seats that a line for people names."""


class WorldRules(msgspec.Struct, frozen=True):
    """Rules that the program asked for."""

    seats: int
    """Size of the full world."""
    min_world: int
    """Ranks that are needed for a step, at least."""
    replica_size: int = 1
    """Ranks that hold one copy of the model together."""
    patience: float = 0.0
    """Seconds to wait for lost seats before going on with fewer."""
    start_patience: float = 600.0
    """Seconds to wait for all seats at the first start."""
    core: int = 0
    """Ranks that are there from the start, where others come and go with free nodes: only these are
    waited for. 0: all seats."""
    sizes: tuple[int, ...] = ()
    """Ranks that a world may have, the fewest first; empty: any number."""

    @property
    def awaited(self) -> int:
        """Return the ranks that are waited for."""
        return self.core or self.seats


class Proposal(NamedTuple):
    """The members in rank order; None while it is better to wait. And why, either way."""

    members: tuple[Member, ...] | None
    reason: str
    again: float | None = None
    """Seconds after which the answer may change although nothing else does."""


def propose(
    present: Sequence[Member],
    lost: Mapping[str, bool],
    possible: Sequence[View],
    rules: WorldRules,
    waited: float,
    started: bool,
    away: Sequence[Peer] | None = (),
) -> Proposal:
    """Return the members of a generation that should be formed now, if there are any.

    Args:
        present: all live peers, outside of their blocks.
        lost: peers of the last generation that are gone: id → True when it is known to be dead (its
            connection was closed, or an observer said so), False when it just fell silent.
        possible: the last generation that worked, and newer ones that may go on already.
        rules: what the program asked for.
        waited: seconds since the first of the present was ready.
        started: a generation has worked before.
        away: peers that had the training's state, may live, and are not here; None: that is not
            known.
    """
    chosen = choose(present, rules)
    split = other_side(possible, {member.peer.id for member in present}, lost)
    if split:
        return Proposal(None, split)
    core = {member.peer.seat for member in chosen if member.peer.seat < rules.awaited}
    again = away or any(member.peer.incarnation for member in chosen)
    if rules.core and not started and again and all(m.status.step < 0 for m in chosen):
        # Ranks on lent nodes may live, and have the state: these would begin anew.
        nothing_known = away is not None and not away
        left = (SEARCH_SECONDS if nothing_known else rules.start_patience) - waited
        if left > 0:
            return Proposal(None, _search(away), left)
    if rules.core and not started and not core:
        return Proposal(None, "the ranks of the job's own nodes are not there yet")
    full = len(chosen) >= rules.awaited and (started or len(core) == rules.awaited)
    if full:
        all_of = "all " if len(chosen) == rules.seats else f"{len(chosen)} of "
        return Proposal(chosen, f"{all_of}{rules.seats} seats are taken")
    if len(chosen) < max(rules.min_world, rules.replica_size):
        what = f"{len(chosen)} of {rules.seats} ranks are there"
        need = f"at least {rules.min_world} are needed (min_world)"
        return Proposal(None, f"{what}, {need}; missing: {_missing(present, rules.seats)}")
    patience = rules.patience if started else rules.start_patience
    if waited < patience:
        left = patience - waited
        reason = f"{len(chosen)} of {rules.seats} ranks; waits {left:.1f} s for the others"
        return Proposal(None, reason, left)
    return Proposal(chosen, f"goes on with {len(chosen)} of {rules.seats} ranks")


def choose(present: Sequence[Member], rules: WorldRules) -> tuple[Member, ...]:
    """Return those who would make a world now, in rank order; the others wait as standbys.

    Args:
        present: all live peers.
        rules: of the training.
    """
    seated = one_a_seat(present)
    return arrange(seated, rules.replica_size, world_size(seated, rules))


def world_size(seated: Sequence[Member], rules: WorldRules) -> int:
    """Return how many ranks a world has at most.

    It has one of the sizes that were asked for, if any were. Where there are fewer ranks than the
    smallest of them, nodes of the job itself are lost: then the training goes on with those that
    are left, from ``min_world`` on. Ranks that stand in for those of a sick node come on top until
    these have left.

    Args:
        seated: one process a seat.
        rules: of the training.
    """
    here = len(seated)
    sizes = [size for size in rules.sizes if size % rules.replica_size == 0]
    if not sizes or here < min(sizes):
        return here
    stand_ins = sum(member.peer.seat >= rules.seats for member in seated)
    possible = (size + more for size in sizes for more in (0, stand_ins))
    return max(size for size in possible if size <= here)


def one_a_seat(present: Sequence[Member]) -> tuple[Member, ...]:
    """On each seat the newest process, in the order of the seats."""
    best: dict[int, Member] = {}
    for member in present:
        held = best.get(member.peer.seat)
        if held is None or _rank_of(member.peer) > _rank_of(held.peer):
            best[member.peer.seat] = member
    return tuple(best[seat] for seat in sorted(best))


def _rank_of(peer: Peer) -> tuple[int, str]:
    return peer.incarnation, peer.id


def arrange(
    seated: Sequence[Member], replica_size: int, most: int | None = None
) -> tuple[Member, ...]:
    """Ranks such that as little state as possible has to move.

    Rank r holds part ``r % replica_size`` of replica ``r // replica_size``. Whole replicas only:
    who is left over waits. A healthy holder of a part stays on that part; the others (dirty ones,
    newcomers, holders of parts that are held more often) fill the gaps. With one rank a replica
    that is the order of the seats.

    Args:
        seated: one process a seat, in the order of the seats.
        replica_size: ranks that hold one copy of the model together.
        most: so many ranks at most; None: all.
    """
    size = len(seated) if most is None else min(most, len(seated))
    if replica_size == 1 and size == len(seated):
        return tuple(seated)
    replicas = size // replica_size
    slots: list[Member | None] = [None] * (replicas * replica_size)
    waiting: list[Member] = []
    # The seat's own place first: a world that is whole again looks as it did at the start.
    holders = [member for member in seated if _part(member, replica_size) >= 0]
    for member in holders:
        _seat_at_home(member, _part(member, replica_size), slots, replica_size, waiting)
    others = [member for member in seated if _part(member, replica_size) < 0]
    if others:
        # But a member without a part takes no slot that is the last one for a holder of it.
        for holder in waiting:
            own_slots = range(_part(holder, replica_size), len(slots), replica_size)
            if own_slots and all(slots[place] is None for place in own_slots):
                slots[own_slots[-1]] = holder
        placed = {slot.peer.id for slot in slots if slot is not None}
        waiting = [holder for holder in waiting if holder.peer.id not in placed]
    for member in others:
        _seat_at_home(member, member.peer.seat % replica_size, slots, replica_size, waiting)
    left: list[Member] = []
    for member in waiting:
        part = _part(member, replica_size)
        places = range(part, len(slots), replica_size) if part >= 0 else ()
        free = next((place for place in places if slots[place] is None), None)
        if free is not None:
            slots[free] = member
        else:
            left.append(member)
    fill = iter(left)
    for index in range(len(slots)):
        if slots[index] is None:
            slots[index] = next(fill)
    return tuple(member for member in slots if member is not None)


def _seat_at_home(
    member: Member,
    part: int,
    slots: list[Member | None],
    replica_size: int,
    waiting: list[Member],
) -> None:
    """Put a member on its seat's own place, if that is one for its part and free."""
    at_home = member.peer.seat
    if at_home < len(slots) and at_home % replica_size == part and slots[at_home] is None:
        slots[at_home] = member
    else:
        waiting.append(member)


def _part(member: Member, replica_size: int) -> int:
    """Return the part that a member holds whole; -1: none."""
    status = member.status
    return status.position if status.healthy and status.position < replica_size else -1


def holders(present: Iterable[Member], replica_size: int) -> frozenset[str]:
    """Return the ids of those that hold a part of the model."""
    return frozenset(one.peer.id for one in present if _part(one, replica_size) >= 0)


def last_holders(
    present: Sequence[Member], replica_size: int, silent: Set[str] = frozenset()
) -> frozenset[str]:
    """Ids of peers without whom a part of the model would be lost from memory.

    One that is silent may be dead: it does not make another one of its part dispensable.

    Args:
        present: all live peers.
        replica_size: ranks that hold one copy of the model together.
        silent: ids of those of them that were not heard for too long.
    """
    holders: dict[int, list[str]] = {}
    for member in present:
        if (part := _part(member, replica_size)) >= 0:
            holders.setdefault(part, []).append(member.peer.id)
    last = set[str]()
    for names in holders.values():
        heard = [name for name in names if name not in silent]
        last.update(heard if len(heard) == 1 else () if heard else names)
    return frozenset(last)


def may_leave(
    me: Member, present: Sequence[Member], rules: WorldRules, step: int | None = None
) -> bool:
    """Return whether a member of an elastic job may go: others keep all that it holds of the model.

    Members that are asked to leave at the same time see each other still, so not each of them
    counts for the other: only those of the core, which are never asked, and those on lower seats.

    Args:
        me: the one that was asked to leave.
        present: all live peers.
        rules: of the training.
        step: committed steps that its state contains; None: as it has told last.
    """
    own, step = me.status, me.status.step if step is None else step
    part = _part(me, rules.replica_size)
    if part < 0:
        return True
    return any(
        _part(member, rules.replica_size) == part and _keeps(member.status, own.generation, step)
        for member in present
        if member.peer.id != me.peer.id
        and (member.peer.seat < rules.core or member.peer.seat < me.peer.seat)
    )


def _keeps(status: PeerStatus, generation: int, step: int) -> bool:
    """Tell whether a holder of a part has this step, or will have it."""
    if status.generation > generation:  # this one waits as a standby, and the others went on
        return status.step >= step
    # One that comes from elsewhere may hold an older step.
    same = status.generation == generation
    return same and (status.phase == "running" or status.step >= step)


def other_side(possible: Iterable[View], here: Set[str], lost: Mapping[str, bool]) -> str:
    """Return why this side must not go on: the rest may live behind a cut. Empty: it may.

    Of each world that may go on already, all members are here or known to be dead; or more than
    half are here; or just half, and the lowest seat among them. So two sides that may both go on
    have a member in common.

    Args:
        possible: the worlds.
        here: ids of the peers on this side.
        lost: as in `propose`.
    """
    for world in possible:
        kept = [member for member in world.members if member.peer.id in here]
        # Only a death that is known counts: a member that was never connected may live too.
        missing = [member for member in world.members if member.peer.id not in here]
        silent = sum(1 for member in missing if not lost.get(member.peer.id))
        lowest = min(world.members, key=lambda member: member.peer.seat, default=None)
        if silent and (len(kept), lowest in kept) <= (len(missing), False):
            return (
                f"{silent} of {world.size} ranks fell silent and may live on the other side of a "
                f"cut; these {len(kept)} wait to be told"
            )
    return ""


def _search(away: Sequence[Peer] | None) -> str:
    """Return what newcomers of an elastic job wait for, in words."""
    what = "looks for ranks that have the training's state"
    if away is None:
        return f"{what}: the directory in which ranks meet cannot be read, or is new"
    if not away:
        return what
    seats = ", ".join(str(peer.seat) for peer in away[:SHOWN])
    more = f" and {len(away) - SHOWN} more" if len(away) > SHOWN else ""
    nodes = ", ".join(dict.fromkeys(peer.node for peer in away[:SHOWN]))
    return f"{what}: seat {seats}{more} ({nodes}) had it, and may live on the other side of a cut"


def _missing(present: Sequence[Member], seats: int) -> str:
    """Return the empty seats, in words."""
    taken = {member.peer.seat for member in present}
    free = [seat for seat in range(seats) if seat not in taken]
    more = f" and {len(free) - SHOWN} more" if len(free) > SHOWN else ""
    return "seat " + ", ".join(map(str, free[:SHOWN])) + more if free else "no seat, but spares"
