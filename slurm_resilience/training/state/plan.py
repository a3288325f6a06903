"""Who heals whom, from what the members say of themselves. Pure: every member makes the same plan.

A member *holds* a part at a step if its state is whole (not dirty), belongs to the part that its
rank has now, and was ever made equal to the others' (a fresh process at step 0 has weights of its
own). Peers can heal the world to step S if every part has a holder at S; the newest such S is
taken. A member beyond S, whose other parts are lost, goes back to S with the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from slurm_resilience.mesh.model import PeerStatus, View
from slurm_resilience.training.state.routing import Route, spread

Kind = Literal["nothing", "peers", "memory", "disk", "fresh", "impossible"]


class HealPlan(msgspec.Struct, frozen=True):
    """What brings every member to the same step."""

    kind: Kind
    """nothing: all are there; peers: from members' live state; memory: everybody goes back to its
    in-memory copy; disk: everybody reads the checkpoint; fresh: nothing was trained yet, the first
    replica's initial state goes to the others; impossible: state is lost, and nothing has it."""
    step: int
    """Committed steps that everybody has afterwards; -1 if impossible."""
    reason: str
    """One sentence for the log."""
    transfers: tuple[Route, ...] = ()

    def incoming(self, rank: int) -> tuple[Route, ...]:
        """What a rank receives, in the order of the shares."""
        return tuple(t for t in self.transfers if t.target_rank == rank)

    def outgoing(self, rank: int) -> tuple[Route, ...]:
        """What a rank sends."""
        return tuple(t for t in self.transfers if t.source_rank == rank)


def checkpointless_recovery_feasible(view: View, checksum: bool = False) -> tuple[bool, str]:
    """Whether live peers can bring everybody to one step without memory copies or disk.

    Args:
        view: the generation.
        checksum: also ask that holders of the same part and step have equal digests.

    Returns:
        The answer, and the sentence that explains it.
    """
    found = plan(view, checksum=checksum)
    return found.kind in ("nothing", "peers"), found.reason


def plan(view: View, *, checksum: bool = False) -> HealPlan:
    """Decide how the members of a generation get equal state.

    Args:
        view: the generation, with every member's status.
        checksum: refuse peers if two holders of the same part and step differ in their digests.
            A holder without a digest is not judged.
    """
    holders = _holders(view)
    common = _common_step(holders)
    if common < 0:
        trouble = _why_no_peers(view, holders)
    else:
        trouble = _disagreement(view, holders, common) if checksum else ""
        if not trouble:
            return _from_peers(view, holders, common)
    memory = _from_memory(view, trouble)
    disk = min((m.status.disk for m in view.members), default=-1)
    if memory and memory.step >= disk:
        return memory
    if disk >= 0:
        return HealPlan("disk", disk, f"{trouble}: everybody reads the checkpoint of step {disk}")
    return _fresh(view) or _impossible(view, trouble)


def _fits(view: View, rank: int, status: PeerStatus) -> bool:
    """Whether what a member holds is the part that its rank has now."""
    return view.replica_size == 1 or status.position == view.position(rank)


def _blank(status: PeerStatus) -> bool:
    """A process that was never made equal to others, and trained nothing."""
    return status.generation == 0 and status.step <= 0


def _holders(view: View) -> list[dict[int, list[int]]]:
    """For each part: step → ranks that hold it, both ascending."""
    found: list[dict[int, list[int]]] = [{} for _ in range(view.replica_size)]
    for rank, member in enumerate(view.members):
        status = member.status
        if status.healthy and not _blank(status) and _fits(view, rank, status):
            found[view.position(rank)].setdefault(status.step, []).append(rank)
    return found


def _common_step(holders: list[dict[int, list[int]]]) -> int:
    """The newest step at which every part is held; -1: there is none."""
    return max(set.intersection(*(set(part) for part in holders)), default=-1)


def _from_peers(view: View, holders: list[dict[int, list[int]]], step: int) -> HealPlan:
    transfers: list[Route] = []
    for part, steps in enumerate(holders):
        have = set(steps[step])
        targets = [r for r in range(part, view.size, view.replica_size) if r not in have]
        transfers += spread(view, part, steps[step], targets)
    if not transfers:
        return HealPlan("nothing", step, f"all {view.size} members have step {step}")
    healed = {t.target_rank for t in transfers}
    ahead = sorted(r for part in holders for s, ranks in part.items() if s > step for r in ranks)
    back = f"; {_ranks(ahead)} went back, no peer has the other parts of that step" if ahead else ""
    reason = f"{_ranks(healed)} healed to step {step} from peers{back}"
    return HealPlan("peers", step, reason, tuple(transfers))


def _disagreement(view: View, holders: list[dict[int, list[int]]], step: int) -> str:
    """Which holders of the same part and step have different digests; empty: none."""
    for part, steps in enumerate(holders):
        digests: dict[str, int] = {}
        for rank in steps[step]:
            if mine := view.members[rank].status.digest:
                digests.setdefault(mine, rank)
        if len(digests) > 1:
            which = f"part {part} of " if view.replica_size > 1 else ""
            return f"{_ranks(digests.values())} differ in {which}step {step} by their checksums"
    return ""


def _why_no_peers(view: View, holders: list[dict[int, list[int]]]) -> str:
    lost = [part for part, steps in enumerate(holders) if not steps]
    if len(lost) == view.replica_size:
        return "no member has a whole state"
    if lost:
        moved = any(
            m.status.healthy and m.status.position in lost and not _fits(view, rank, m.status)
            for rank, m in enumerate(view.members)
        )
        hint = " (a rank that holds it was given another part)" if moved else ""
        return f"nobody holds part {lost[0]} of {view.replica_size}{hint}"
    newest = {part: max(steps) for part, steps in enumerate(holders)}
    high, low = max(newest, key=lambda p: newest[p]), min(newest, key=lambda p: newest[p])
    return (
        f"the parts are held at different steps (part {high} at {newest[high]}, "
        f"part {low} at {newest[low]})"
    )


def _from_memory(view: View, trouble: str) -> HealPlan | None:
    """Everybody to its in-memory copy; a lost one comes from who keeps it, or from who holds the
    same part. None: not possible.

    A new copy is published only when everybody has it whole, and the one before is kept until
    everybody has published (see `Partner`). So members may differ by one round, and the older of
    the two is still there at all.
    """
    taken = [m.status.snapshot for m in view.members if m.status.snapshot >= 0]
    if not taken:
        return None
    step = min(taken)
    own = [
        m.status.snapshot >= 0 and _fits(view, rank, m.status)
        for rank, m in enumerate(view.members)
    ]
    keepers: dict[int, int] = {}
    twins: dict[int, int] = {}
    for rank, member in enumerate(view.members):
        if own[rank]:
            twins.setdefault(view.position(rank), rank)
            for seat in member.status.keeps:
                keepers.setdefault(seat, rank)
    transfers = []
    for rank, member in enumerate(view.members):
        if own[rank]:
            continue
        part = view.position(rank)
        source = keepers.get(member.peer.seat, twins.get(part))
        if source is None:
            return None
        transfers.append(Route(source, rank, part))
    reason = f"{trouble}: everybody goes back to the copies in memory of step {step}"
    return HealPlan("memory", step, reason, tuple(transfers))


def _fresh(view: View) -> HealPlan | None:
    """Nothing was trained: equal replicas by the first clean one. None: something was trained."""
    statuses = [m.status for m in view.members]
    if any(s.step > 0 or s.snapshot >= 0 or s.disk >= 0 for s in statuses):
        return None
    transfers: list[Route] = []
    for part in range(view.replica_size):
        mine = range(part, view.size, view.replica_size)
        clean = [r for r in mine if not statuses[r].dirty]
        if not clean:
            return None
        transfers += spread(view, part, clean[:1], [r for r in mine if r != clean[0]])
    return HealPlan("fresh", 0, "fresh start: nobody has any state yet", tuple(transfers))


def _impossible(view: View, trouble: str) -> HealPlan:
    seen = [m for m in view.members if m.status.disk >= 0]
    blind = [r for r, m in enumerate(view.members) if m.status.disk < 0]
    disk = f"{_ranks(blind)} can read no checkpoint" if seen else "there is no checkpoint"
    reason = f"{trouble}, there is no common copy in memory, and {disk}: "
    return HealPlan("impossible", -1, reason + "will not start from scratch by itself")


def _ranks(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 1, 2', 'ranks 0, 1, 2 and 61 more'."""
    known = sorted(ranks)
    if len(known) == 1:
        return f"rank {known[0]}"
    shown = ", ".join(map(str, known[:8]))
    return f"ranks {shown}" + (f" and {len(known) - 8} more" if len(known) > 8 else "")
