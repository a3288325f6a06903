"""Plan how every member of a generation gets equal state: who heals whom, and in which messages.
Pure: every member makes the same plan from what the members say of themselves.

A member *holds* a part at a step if its state is whole (not dirty), belongs to the part that its
rank has now, and was ever made equal to the others' (a fresh process at step 0 has weights of its
own). Peers can heal the world to step S if every part has a holder at S; the newest such S is
taken. A member beyond S, whose other parts are lost, goes back to S with the rest.

Sources serve targets evenly, and from near. Both ends cut a part's bytes into messages alike, from
the sizes alone: a big tensor into slices that are sent from, and received into, its own storage;
small ones are packed together.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from slurm_resilience.mesh.model import PeerStatus, View

Kind = Literal["nothing", "peers", "memory", "disk", "fresh", "impossible"]


class HealPlan(msgspec.Struct, frozen=True):
    """The way that brings every member to the same step."""

    kind: Kind
    """nothing: all are there; peers: from members' live state; memory: all go back to their
    in-memory copies; disk: all read the checkpoint; fresh: nothing was trained yet, the first
    replica's initial state goes to the others; impossible: state is lost, and nothing has it."""
    step: int
    """Committed steps that all have afterwards; -1 if impossible."""
    reason: str
    """One sentence for the log."""
    transfers: tuple[Route, ...] = ()

    def incoming(self, rank: int) -> tuple[Route, ...]:
        """Return what a rank receives, in the order of the shares."""
        return tuple(t for t in self.transfers if t.target_rank == rank)

    def first_whole(self, size: int) -> int:
        """Return the lowest rank that receives nothing; -1: all receive something.

        Args:
            size: ranks of the world.
        """
        healed = {t.target_rank for t in self.transfers}
        return next((rank for rank in range(size) if rank not in healed), -1)

    def outgoing(self, rank: int) -> tuple[Route, ...]:
        """Return what a rank sends."""
        return tuple(t for t in self.transfers if t.source_rank == rank)


def checkpointless_recovery_feasible(view: View, checksum: bool = False) -> tuple[bool, str]:
    """Tell whether live peers can bring all to one step without memory copies or disk.

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
        return HealPlan("disk", disk, f"{trouble}: all read the checkpoint of step {disk}")
    return _fresh(view) or _impossible(view, trouble)


def _fits(view: View, rank: int, status: PeerStatus) -> bool:
    """Tell whether a member holds the part that its rank has now."""
    return view.replica_size == 1 or status.position == view.position(rank)


def _blank(status: PeerStatus) -> bool:
    """Tell whether a process was never made equal to others, and trained nothing."""
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
    """Return the newest step at which every part is held; -1: there is none."""
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
    """Name the holders of the same part and step with different digests; empty: none."""
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
        return f"no rank holds part {lost[0]} of {view.replica_size}{hint}"
    newest = {part: max(steps) for part, steps in enumerate(holders)}
    high, low = max(newest, key=lambda p: newest[p]), min(newest, key=lambda p: newest[p])
    return (
        f"the parts are held at different steps (part {high} at {newest[high]}, "
        f"part {low} at {newest[low]})"
    )


def _from_memory(view: View, trouble: str) -> HealPlan | None:
    """Plan that all go back to their in-memory copies; a lost one comes from the rank that keeps
    it, or from a holder of the same part. None: not possible.

    A new copy is published only when every rank has it whole, and the one before is kept until
    every rank has published (see `Partner`). So members may differ by one round, and the older of
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
    reason = f"{trouble}: all go back to the copies in memory of step {step}"
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
    return HealPlan("fresh", 0, "fresh start: no rank has any state yet", tuple(transfers))


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


MOST_SOURCES = 4
"""Sources that share one target; more would only queue at the target's own link."""
LONGEST_CHAIN = 4
"""Targets that pass the state on one to the next; more form a tree, two at each."""


class Route(msgspec.Struct, frozen=True):
    """One rank sends (a share of) one part to another."""

    source_rank: int
    target_rank: int
    part: int
    share: int = 0
    """Number of the share among equal shares of the part's bytes: 0 … shares-1."""
    shares: int = 1
    relay: bool = False
    """The source is itself healed now: it passes on what it has just received."""


def spread(view: View, part: int, sources: Sequence[int], targets: Sequence[int]) -> list[Route]:
    """Give every target its bytes.

    With enough sources, each target has its own, up to `MOST_SOURCES` equally near ones that send
    a share each. With fewer sources than targets, each source serves one target, which passes the
    state on: every link is used once or twice, however many there are.

    Args:
        view: the generation.
        part: what they hold.
        sources: ranks with the state, at least one if there are targets.
        targets: ranks that need it.
    """
    if not targets:
        return []
    served = _match(view, sources, targets)
    if len(targets) > len(sources):
        found = []
        for source in sorted(served):
            found += _tree(part, source, served[source])
        return found
    by_target = {target: [source] for source, mine in served.items() for target in mine}
    idle = [source for source in sources if source not in served]
    while idle:
        waiting = [t for t in targets if len(by_target[t]) < MOST_SOURCES]
        more = _match(view, idle, waiting, at_most=lambda t: _distance(view, by_target[t][0], t))
        if not more:
            break
        for source, mine in more.items():
            by_target[mine[0]].append(source)
        idle = [source for source in idle if source not in more]
    return [
        Route(source, target, part, share, len(by_target[target]))
        for target in targets
        for share, source in enumerate(by_target[target])
    ]


def _tree(part: int, source: int, targets: Sequence[int]) -> list[Route]:
    width = 1 if len(targets) <= LONGEST_CHAIN else 2
    found = [Route(source, targets[0], part)]
    for place in range(1, len(targets)):
        parent = targets[(place - 1) // width]
        found.append(Route(parent, targets[place], part, relay=True))
    return found


def _near(view: View) -> tuple[Callable[[int], Hashable], ...]:
    """Keys of nearness, nearest first: ranks with an equal key are that near to each other."""

    def node(rank: int) -> Hashable:
        peer = view.members[rank].peer
        return (peer.domain, peer.node) if peer.node else ("", "", rank)

    def domain(rank: int) -> Hashable:
        return view.members[rank].peer.domain or ("", rank)

    return node, domain, lambda rank: ""


def _distance(view: View, one: int, other: int) -> int:
    """0: the same node; 1: the same domain; 2: farther."""
    return next(level for level, key in enumerate(_near(view)) if key(one) == key(other))


def _match(
    view: View,
    sources: Sequence[int],
    targets: Sequence[int],
    at_most: Callable[[int], int] | None = None,
) -> dict[int, list[int]]:
    """Pair targets with sources, nearest first, in rounds in which each source takes one target.

    With `at_most` (the greatest distance for a target) there is one round, and targets may stay
    without a source.
    """
    served: dict[int, list[int]] = defaultdict(list)
    waiting = list(targets)
    while waiting:
        free = set(sources)
        for level, key in enumerate(_near(view)):
            pools: dict[Hashable, deque[int]] = defaultdict(deque)
            for source in sources:
                if source in free:
                    pools[key(source)].append(source)
            still = []
            for target in waiting:
                pool = pools.get(key(target))
                if pool and (at_most is None or level <= at_most(target)):
                    source = pool.popleft()
                    free.discard(source)
                    served[source].append(target)
                else:
                    still.append(target)
            waiting = still
        if at_most is not None:
            break
    return dict(served)


DIRECT_BYTES = 1 << 20
"""Slices of this size and above go without packing. One message costs about as much as copying
this much."""


class Piece(NamedTuple):
    """Bytes [start, stop) of one tensor."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Chunk(NamedTuple):
    """One message."""

    pieces: tuple[Piece, ...]
    packed: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.size for piece in self.pieces)


def cut(sizes: Sequence[int], bucket_bytes: int) -> tuple[Chunk, ...]:
    """Cut tensors into messages.

    Args:
        sizes: bytes of each tensor.
        bucket_bytes: greatest size of a message, at least 1.
    """
    least = min(DIRECT_BYTES, bucket_bytes)
    found: list[Chunk] = []
    pack: list[Piece] = []
    packed = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            if size - start >= least:
                piece = Piece(number, start, min(size, start + bucket_bytes))
                found.append(Chunk((piece,), packed=False))
            else:
                piece = Piece(number, start, min(size, start + bucket_bytes - packed))
                pack.append(piece)
                packed += piece.size
                if packed == bucket_bytes:
                    found.append(Chunk(tuple(pack), packed=True))
                    pack, packed = [], 0
            start = piece.stop
    if pack:
        found.append(Chunk(tuple(pack), packed=True))
    return tuple(found)


def share(chunks: Sequence[Chunk], shares: int) -> tuple[int, ...]:
    """Give each chunk to the share that has the fewest bytes so far, so that shares differ by at
    most one chunk."""
    loads = [0] * shares
    found = []
    for chunk in chunks:
        lightest = loads.index(min(loads))
        loads[lightest] += chunk.size
        found.append(lightest)
    return tuple(found)


def partners(view: View) -> tuple[int, ...]:
    """Return the rank that keeps each rank's copy: on another node, and in another domain, if
    possible.

    The ranks are laid in a circle, grouped by domain and node, and each takes the one that is as
    many places ahead as the largest group is wide. That place is always outside its own group, as
    long as no group holds more than half of the ranks.

    Args:
        view: the generation.

    Returns:
        For each rank its partner's rank: a permutation, without fixed points if there are two or
        more members.
    """
    peers = [member.peer for member in view.members]
    size = len(peers)
    circle = sorted(range(size), key=lambda r: (peers[r].domain, peers[r].node, r))
    shift = size // 2
    domains = Counter(peer.domain for peer in peers)
    # A node of unknown domain counts with all others of unknown domain; its name still separates.
    nodes = Counter((peer.domain, peer.node) for peer in peers)
    for groups in (nodes, domains):
        if size and 2 * max(groups.values()) <= size:
            shift = max(groups.values())
    found = [0] * size
    for place, rank in enumerate(circle):
        found[rank] = circle[(place + shift) % size]
    return tuple(found)
