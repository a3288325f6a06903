"""Name the rank that keeps the others waiting, from the dumps of all. Pure.

All ranks of a group must call the same collectives in the same order, so the calls can be laid side
by side by their numbers. Either two ranks called different things as number N, or some wait in
number N for others that have not called it. Those others may wait themselves, in another group: the
culprit is the rank that is waited for, and waits for none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from slurm_resilience.flight.rank_dump import CollectiveCall, GroupKey, RankDump

HangKind = Literal[
    "mismatch",  # ranks called different things
    "not-joined",  # ranks wait for one that did not call
    "no-dump",  # ranks wait for one of which there is no dump
    "not-started",  # all have called, and some GPUs have not come to it
    "deadlock",  # ranks wait for each other
    "in-transit",  # all are in it
    "none",  # no rank waits
]

SAME_SIZES = frozenset(
    {
        "all_reduce",
        "allreduce",
        "allreduce_coalesced",
        "broadcast",
        "reduce",
        "all_gather",
        "allgather",
        "_all_gather_base",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
    }
)
"""Collectives in which each rank gives and gets as much as each other."""
ALL_NEEDED = SAME_SIZES - {"broadcast", "reduce"} | {"barrier", "all_reduce_barrier"}
"""Those that no rank leaves before all have come."""
MAX_EVIDENCE_LINES = 20
MAX_LISTED_RANKS = 50
MAX_WAITED_FOR = 64
"""Ranks that one rank waits for: those that are furthest behind."""


class CulpritRank(msgspec.Struct, frozen=True):
    """A rank at fault, and its node where that is known."""

    rank: int
    node: str = ""


class HangDiagnosis(msgspec.Struct, frozen=True):
    """The answer to a set of dumps."""

    kind: HangKind
    reason: str
    culprits: tuple[CulpritRank, ...] = ()
    evidence: tuple[str, ...] = ()
    ranks: int = 0
    """Ranks that left a dump."""
    world_size: int = 0
    """Ranks that the dumps speak of."""


class Wait(NamedTuple):
    """A rank waits for another one, in a call."""

    rank: int
    waits_for: int
    group: GroupKey
    call: CollectiveCall


def diagnose_hang(
    dumps: Iterable[RankDump], nodes: Mapping[int, str] | None = None
) -> HangDiagnosis:
    """Return the cause that the dumps of a training name, and the ranks at fault.

    Args:
        dumps: one of each rank, as far as there are any.
        nodes: the node of each rank, where the dumps do not tell.
    """
    known = nodes or {}
    by_rank = {
        dump.rank: msgspec.structs.replace(dump, node=dump.node or known.get(dump.rank, ""))
        for dump in dumps
    }
    groups = _groups(by_rank)
    world = {rank for group in groups for rank in group.ranks} | set(by_rank)
    found = (
        _mismatch(by_rank, groups)
        or _waiting(by_rank, groups)
        or _all_joined(by_rank, groups)
        or HangDiagnosis("none", "no rank waits for another one")
    )
    missing = sorted(world - set(by_rank))
    evidence = found.evidence
    if missing and found.kind != "no-dump":
        evidence = (*evidence, f"{ranks_in_words(missing)} left no dump")
    return msgspec.structs.replace(
        found,
        culprits=tuple(
            CulpritRank(one.rank, one.node or known.get(one.rank, "")) for one in found.culprits
        ),
        evidence=evidence[:MAX_EVIDENCE_LINES],
        ranks=len(by_rank),
        world_size=len(world),
    )


def _groups(dumps: Mapping[int, RankDump]) -> dict[GroupKey, dict[int, RankDump]]:
    """Return the dumps of each group's members. A group whose ranks no dump tells has those that
    called something in it."""
    told: dict[GroupKey, dict[int, RankDump]] = defaultdict(dict)
    for dump in dumps.values():
        for key in dump.calls:
            told[key][dump.rank] = dump
    found = {}
    for key, callers in told.items():
        # A member that has called nothing in it yet knows the group all the same.
        members = {rank: dumps[rank] for rank in key.ranks if rank in dumps} | callers
        whole = key.ranks or tuple(sorted(callers))
        found[msgspec.structs.replace(key, ranks=whole)] = members
    return found


def _calls(dump: RankDump, group: GroupKey) -> tuple[CollectiveCall, ...]:
    made = dump.calls.get(group)
    if made is None:
        made = dump.calls.get(msgspec.structs.replace(group, ranks=()), ())
    return made


def _collectives(dump: RankDump, group: GroupKey) -> dict[int, CollectiveCall]:
    return {call.number: call for call in _calls(dump, group) if call.peer < 0}


def _entered(dump: RankDump, group: GroupKey) -> int:
    told = dump.entered.get(group)
    return dump.entered.get(msgspec.structs.replace(group, ranks=()), 0) if told is None else told


# -- different calls under one number -------------------------------------------------------------


def _mismatch(
    dumps: Mapping[int, RankDump], groups: Mapping[GroupKey, Mapping[int, RankDump]]
) -> HangDiagnosis | None:
    """Find the first call of a group that its ranks do not agree on."""
    for group, members in groups.items():
        rows: dict[int, dict[int, CollectiveCall]] = defaultdict(dict)
        for rank, dump in members.items():
            for number, call in _collectives(dump, group).items():
                rows[number][rank] = call
        for number in sorted(rows):
            differing = _differing(rows[number])
            if differing is not None:
                return _told_mismatch(dumps, group, number, rows[number], *differing)
    return None


def _differing(row: Mapping[int, CollectiveCall]) -> tuple[str, dict[int, str]] | None:
    """Return in what the calls under one number differ, and each rank's; None: they agree."""
    operations = {rank: call.operation for rank, call in row.items()}
    if len(set(operations.values())) > 1:
        return "a different collective", operations
    if not set(operations.values()) <= SAME_SIZES:
        return None
    types = {rank: ", ".join(call.types) for rank, call in row.items()}
    if len(set(types.values())) > 1:
        return "a different type", {rank: f"{operations[rank]} of {types[rank]}" for rank in row}
    sizes = {rank: call.sizes for rank, call in row.items()}
    if len(set(sizes.values())) > 1:
        return "a different size", {rank: call_in_words(call) for rank, call in row.items()}
    return None


def _told_mismatch(
    dumps: Mapping[int, RankDump],
    group: GroupKey,
    number: int,
    row: Mapping[int, CollectiveCall],
    what: str,
    said: Mapping[int, str],
) -> HangDiagnosis:
    camps: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(said):
        camps[said[rank]].append(rank)
    most = max(len(ranks) for ranks in camps.values())
    is_decided = sum(len(ranks) == most for ranks in camps.values()) == 1
    at_fault = [
        rank for ranks in camps.values() for rank in ranks if not is_decided or len(ranks) < most
    ]
    evidence = [
        f"{group.title}, collective {number}: {ranks_in_words(ranks)} called {text}"
        f"{_at(row[ranks[0]])}"
        for text, ranks in sorted(camps.items(), key=lambda camp: -len(camp[1]))
    ]
    named = ranks_in_words(at_fault)
    doubt = "" if is_decided else "; which of them is wrong the dumps do not tell"
    reason = f"{named} called {what} than the others as number {number} of {group.title}{doubt}"
    return HangDiagnosis("mismatch", reason, _culprits(dumps, at_fault), tuple(evidence))


# -- ranks that wait ------------------------------------------------------------------------------


def _waiting(
    dumps: Mapping[int, RankDump], groups: Mapping[GroupKey, Mapping[int, RankDump]]
) -> HangDiagnosis | None:
    waits = [wait for group, members in groups.items() for wait in _waits(group, members)]
    if not waits:
        return None
    waited_for = {wait.waits_for for wait in waits}
    blocked = {wait.rank for wait in waits}
    absent = sorted(rank for rank in waited_for - blocked if rank in dumps)
    lost = sorted(rank for rank in waited_for if rank not in dumps)
    if absent:
        return _not_joined(dumps, waits, absent)
    if lost:
        reason = f"the others wait for {ranks_in_words(lost)}, which left no dump"
        return HangDiagnosis("no-dump", reason, _culprits(dumps, lost), _wait_lines(waits, lost))
    circle = sorted(waited_for & blocked)
    if all(_is_message_between(wait, waits) for wait in waits if wait.rank in waited_for):
        reason = (
            f"{ranks_in_words(circle)} have both sides of a message, and it does not arrive: the "
            "network or a GPU between them does not move its data"
        )
        culprits = _culprits(dumps, circle)
        return HangDiagnosis("in-transit", reason, culprits, _wait_lines(waits, circle))
    reason = f"{ranks_in_words(circle)} wait for each other: they call in different orders"
    return HangDiagnosis("deadlock", reason, _culprits(dumps, circle), _wait_lines(waits, circle))


def _waits(group: GroupKey, members: Mapping[int, RankDump]) -> list[Wait]:
    """Return who waits for whom in a group: each rank for those that have not called what it is
    in, and for those without a dump."""
    waits: list[Wait] = []
    entered = {rank: _entered(dump, group) for rank, dump in members.items()}
    lost = [rank for rank in group.ranks if rank not in members]
    least = min(entered.values(), default=0)
    in_order = sorted(members, key=lambda rank: (entered[rank], rank))
    for rank, dump in members.items():
        call = _blocking(_collectives(dump, group), least)
        if call is not None:
            ends = bisect_left(in_order, call.number, key=lambda other: entered[other])
            behind = in_order[: min(ends, MAX_WAITED_FOR)]
            # A dump may be missing because it was not copied: those that are there come first.
            found = behind or lost[:MAX_WAITED_FOR]
            waits += [Wait(rank, other, group, call) for other in found]
        waits += _messages(rank, dump, group)
    return waits


def _blocking(calls: Mapping[int, CollectiveCall], least: int) -> CollectiveCall | None:
    """Return the first call that a rank is in.

    Args:
        calls: the rank's collectives in a group.
        least: the last one that every rank has called. A later one cannot be over, whatever its
            entry says: gloo's entry of a call that failed looks like that of one that is done.
    """
    for number in sorted(calls):
        call = calls[number]
        if call.progress != "completed" or (number > least and call.operation in ALL_NEEDED):
            return call
    return None


def _messages(rank: int, dump: RankDump, group: GroupKey) -> list[Wait]:
    open_calls = (c for c in _calls(dump, group) if c.peer >= 0 and c.progress != "completed")
    return [
        Wait(rank, group.ranks[call.peer], group, call)
        for call in open_calls
        if call.peer < len(group.ranks) and group.ranks[call.peer] != rank
    ]


def _is_message_between(wait: Wait, waits: Sequence[Wait]) -> bool:
    """Tell whether a wait is one side of a send and a receive that have met."""
    return wait.call.peer >= 0 and any(
        other.rank == wait.waits_for
        and other.waits_for == wait.rank
        and {other.call.operation, wait.call.operation} == {"send", "recv"}
        for other in waits
    )


def _not_joined(
    dumps: Mapping[int, RankDump], waits: Sequence[Wait], absent: Sequence[int]
) -> HangDiagnosis:
    of_first = next(wait for wait in waits if wait.waits_for == absent[0])
    call, group = of_first.call, of_first.group
    reason = (
        f"{ranks_in_words(absent)} did not join {call.operation}, number {call.number} of "
        f"{group.title}"
    )
    evidence = [*_wait_lines(waits, absent)]
    for rank in absent[:5]:
        last = max(
            _collectives(dumps[rank], group).values(),
            key=lambda one: one.number,
            default=None,
        )
        said = (
            f"its last there is number {last.number}, {call_in_words(last)}{_at(last)}"
            if last is not None
            else "it has called nothing there"
        )
        evidence.append(f"rank {rank}{_on(dumps, rank)}: {said}")
    return HangDiagnosis("not-joined", reason, _culprits(dumps, absent), tuple(evidence))


def _wait_lines(waits: Sequence[Wait], ranks: Sequence[int]) -> tuple[str, ...]:
    """Return a line for each call in which ranks wait for some of these."""
    waiting: dict[tuple[GroupKey, int, str], set[int]] = defaultdict(set)
    calls: dict[tuple[GroupKey, int, str], CollectiveCall] = {}
    wanted = set(ranks)
    for wait in waits:
        if wait.waits_for in wanted:
            key = (wait.group, wait.call.number, wait.call.operation)
            waiting[key].add(wait.rank)
            calls.setdefault(key, wait.call)
    return tuple(
        f"{group.title}, number {number}: {ranks_in_words(sorted(blocked))} "
        f"{'wait' if len(blocked) > 1 else 'waits'} in {call_in_words(calls[key])}"
        f"{_at(calls[key])}"
        for key, blocked in waiting.items()
        for group, number, _ in (key,)
    )


# -- all have called ------------------------------------------------------------------------------


def _all_joined(
    dumps: Mapping[int, RankDump], groups: Mapping[GroupKey, Mapping[int, RankDump]]
) -> HangDiagnosis | None:
    """Find a call that all members have called, and that does not end."""
    for group, members in groups.items():
        first: dict[int, CollectiveCall] = {}
        for rank, dump in members.items():
            open_calls = [c for c in _calls(dump, group) if c.progress != "completed"]
            if open_calls:
                first[rank] = min(open_calls, key=lambda call: call.number)
        if not first:
            continue
        number = min(call.number for call in first.values())
        inside = {rank: call for rank, call in first.items() if call.number == number}
        late = sorted(rank for rank, call in inside.items() if call.progress == "scheduled")
        call = inside[min(inside)]
        line = f"{group.title}, number {number}: {call_in_words(call)}{_at(call)}"
        counts = Counter(one.progress for one in inside.values())
        told = ", ".join(f"{count} {progress}" for progress, count in sorted(counts.items()))
        if late and len(late) < len(inside):
            reason = (
                f"{ranks_in_words(late)} called {call.operation}, number {number} of "
                f"{group.title}, as all did, and did not start it: earlier work does not end there"
            )
            culprits = _culprits(dumps, late)
            return HangDiagnosis("not-started", reason, culprits, (f"{line} ({told})",))
        reason = (
            f"all that take part are in {call.operation}, number {number} of {group.title}: the "
            "network or a GPU does not move its data; no rank is at fault by its calls"
        )
        return HangDiagnosis("in-transit", reason, (), (f"{line} ({told})",))
    return None


# -- words ----------------------------------------------------------------------------------------


def _culprits(dumps: Mapping[int, RankDump], ranks: Iterable[int]) -> tuple[CulpritRank, ...]:
    return tuple(
        CulpritRank(rank, dumps[rank].node if rank in dumps else "") for rank in sorted(ranks)
    )


def _on(dumps: Mapping[int, RankDump], rank: int) -> str:
    return f" on {dumps[rank].node}" if dumps[rank].node else ""


def _at(call: CollectiveCall) -> str:
    return f" ({call.place})" if call.place else ""


def call_in_words(call: CollectiveCall) -> str:
    """Return `all_reduce [4, 8] Float`."""
    inputs = " ".join(str(list(size)) for size in call.sizes[0]) if call.sizes else ""
    types = " ".join(dict.fromkeys(call.types))
    peer = f" (peer {call.peer})" if call.peer >= 0 else ""
    return " ".join(part for part in (call.operation, inputs[:100], types[:100]) if part) + peer


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 7`."""
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in pieces[:MAX_LISTED_RANKS]]
    more = ", …" if len(pieces) > MAX_LISTED_RANKS else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(shown)}{more}"
