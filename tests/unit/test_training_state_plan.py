"""The plan of healing: every byte once, never from a bad source, evenly, fallbacks in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.mesh.model import Member, Peer, PeerStatus, View
from slurm_resilience.training.state import (
    HealPlan,
    checkpointless_recovery_feasible,
    partners,
    plan,
)
from slurm_resilience.training.state.plan import cut, share


def view_of(
    statuses: list[PeerStatus], replica_size: int = 1, nodes: list[int] | None = None, wide: int = 2
) -> View:
    """Ranks with these statuses; a domain is `wide` nodes."""
    places = nodes or list(range(len(statuses)))
    members = tuple(
        Member(Peer(f"p{rank}", rank, node=f"n{place}", domain=f"d{place // wide}"), status)
        for rank, (place, status) in enumerate(zip(places, statuses, strict=True))
    )
    return View(5, members, replica_size, len(members))


def at(step: int, position: int = 0, **more: Any) -> PeerStatus:
    return PeerStatus(generation=4, step=step, position=position, **more)


LOST = PeerStatus()


@st.composite
def views(draw: st.DrawFn) -> View:
    size = draw(st.integers(1, 4))
    copies = draw(st.integers(1, 9))
    statuses = [
        PeerStatus(
            generation=draw(st.sampled_from([0, 4])),
            step=draw(st.sampled_from([-1, 0, 7, 7, 7, 8])),
            dirty=draw(st.sampled_from([False, False, True])),
            position=draw(st.sampled_from([rank % size] * 6 + [-1, 0])),
            digest=draw(st.sampled_from(["", "a", "a", "a", "b"])),
            snapshot=draw(st.sampled_from([-1, 5, 5, 6])),
            keeps=draw(st.sampled_from([(), ((rank + 1) % (size * copies),)])),
            disk=draw(st.sampled_from([-1, 4, 6])),
        )
        for rank in range(size * copies)
    ]
    nodes = draw(st.lists(st.integers(0, 5), min_size=len(statuses), max_size=len(statuses)))
    return view_of(statuses, size, nodes)


def holds(view: View, rank: int, step: int) -> bool:
    status = view.members[rank].status
    trained = status.generation > 0 or status.step > 0
    fits = view.replica_size == 1 or status.position == view.position(rank)
    return status.step == step and not status.dirty and trained and fits


@settings(max_examples=400)
@given(views(), st.booleans())
def test_every_target_gets_every_byte_once_from_good_sources_only(
    view: View, checksum: bool
) -> None:
    found = plan(view, checksum=checksum)
    assert found == plan(
        msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=View), checksum=checksum
    )
    assert found.reason and "\n" not in found.reason
    if found.kind not in ("peers", "nothing"):
        return
    targets = {t.target_rank for t in found.transfers}
    assert targets == {r for r in range(view.size) if not holds(view, r, found.step)}
    served: dict[int, Counter[int]] = {}
    for rank in targets:
        mine = found.incoming(rank)
        assert [t.share for t in mine] == list(range(mine[0].shares))
        assert {t.shares for t in mine} == {len(mine)}
        assert len({t.source_rank for t in mine}) == len(mine)
        for one in mine:
            assert one.part == view.position(rank) == view.position(one.source_rank)
            if one.relay:
                assert one.source_rank in targets
            else:
                assert holds(view, one.source_rank, found.step)
                served.setdefault(one.part, Counter())[one.source_rank] += 1
        # Following relays upwards ends at a holder: no ranks wait in a circle.
        seen, above = {rank}, mine[0]
        while above.relay:
            assert above.source_rank not in seen
            seen.add(above.source_rank)
            above = found.incoming(above.source_rank)[0]
    for part, counts in served.items():
        assert max(counts.values()) == 1, "a source serves one target; relays do the rest"
        sources = [
            r for r in range(part, view.size, view.replica_size) if holds(view, r, found.step)
        ]
        mine_targets = [r for r in targets if view.position(r) == part]
        assert len(counts) >= min(len(sources), len(mine_targets))
    assert max((len(found.outgoing(r)) for r in range(view.size)), default=0) <= 3


@settings(max_examples=400)
@given(views(), st.booleans())
def test_a_fallback_is_taken_only_without_peers_and_only_where_all_can(
    view: View, checksum: bool
) -> None:
    found = plan(view, checksum=checksum)
    statuses = [m.status for m in view.members]
    common = {
        step
        for step in (0, 7, 8)
        if all(
            any(holds(view, r, step) for r in range(part, view.size, view.replica_size))
            for part in range(view.replica_size)
        )
    }
    assert checkpointless_recovery_feasible(view, checksum) == (
        found.kind in ("nothing", "peers"),
        found.reason,
    )
    if common and not checksum:
        assert found.kind in ("nothing", "peers")
        assert found.step == max(common)
    elif found.kind == "memory":
        assert found.step == min(s.snapshot for s in statuses if s.snapshot >= 0)
        healed = {t.target_rank for t in found.transfers}
        assert not healed & {t.source_rank for t in found.transfers}
        assert all(statuses[r].snapshot >= found.step for r in set(range(view.size)) - healed)
        assert found.step >= min(s.disk for s in statuses)
    elif found.kind == "disk":
        assert found.step == min(s.disk for s in statuses) >= 0
    elif found.kind == "fresh":
        assert not any(s.step > 0 or s.snapshot >= 0 or s.disk >= 0 for s in statuses)
        assert not any(statuses[t.source_rank].dirty and not t.relay for t in found.transfers)
    elif found.kind == "impossible":
        assert found.step == -1 and not found.transfers


def pairs(found: HealPlan) -> list[tuple[int, int]]:
    return [(t.source_rank, t.target_rank) for t in found.transfers]


def test_all_at_one_step_is_nothing() -> None:
    assert plan(view_of([at(3), at(3)])).kind == "nothing"


def test_the_newest_step_wins_and_the_rest_are_healed() -> None:
    found = plan(view_of([at(3), at(4), at(4, dirty=True), LOST]))
    assert (found.kind, found.step) == ("peers", 4)
    assert pairs(found) == [(1, 0), (0, 2), (2, 3)]
    assert found.reason == "ranks 0, 2, 3 healed to step 4 from peers"


def test_several_idle_sources_share_one_target() -> None:
    found = plan(view_of([LOST] + [at(4)] * 7, nodes=list(range(8)), wide=8))
    assert {t.shares for t in found.transfers} == {4}


def test_a_near_source_is_not_helped_by_far_ones() -> None:
    found = plan(view_of([at(4), at(4), at(4), LOST], nodes=[0, 1, 2, 2], wide=1))
    assert pairs(found) == [(2, 3)]


def test_same_domain_before_farther() -> None:
    found = plan(view_of([at(4), at(4), LOST, LOST], nodes=[0, 2, 3, 1]))
    assert pairs(found) == [(1, 2), (0, 3)]


def test_one_source_and_many_targets_form_a_tree() -> None:
    found = plan(view_of([at(4)] + [LOST] * 100))
    assert all(len(found.outgoing(rank)) <= 2 for rank in range(101))
    deepest = 0
    for rank in range(1, 101):
        depth, above = 1, found.incoming(rank)[0]
        while above.relay:
            depth, above = depth + 1, found.incoming(above.source_rank)[0]
        deepest = max(deepest, depth)
    assert deepest <= 7


HSDP: dict[str, Any] = {"replica_size": 2}


def test_hsdp_heals_part_by_part() -> None:
    found = plan(view_of([at(4, 0), LOST, at(4, 0), at(4, 1)], **HSDP))
    assert pairs(found) == [(3, 1)]
    assert found.transfers[0].part == 1


def test_hsdp_goes_back_one_step_if_the_newer_one_is_not_whole() -> None:
    found = plan(view_of([at(5, 0), LOST, at(4, 0), at(4, 1)], **HSDP))
    assert (found.kind, found.step) == ("peers", 4)
    assert pairs(found) == [(2, 0), (3, 1)]
    assert found.reason.endswith("rank 0 went back, no peer has the other parts of that step")


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([at(5, 0), LOST], "no rank holds part 1 of 2"),
        ([at(5, 0), at(4, 1)], "the parts are held at different steps (part 0 at 5, part 1 at 4)"),
        ([at(5, 1), at(5, 0)], "no member has a whole state"),
        (
            [at(5, 0), LOST, at(5, 1), at(5, 0, dirty=True)],
            "no rank holds part 1 of 2 (a rank that holds it was given another part)",
        ),
    ],
)
def test_hsdp_without_a_whole_step_says_why(statuses: list[PeerStatus], said: str) -> None:
    found = plan(view_of(statuses, **HSDP))
    assert found.kind == "impossible"
    assert found.reason.startswith(said + ", there is no common copy in memory")


def test_checksums_that_differ_send_everybody_to_disk() -> None:
    view = view_of([at(5, digest="a", disk=3), at(5, digest="b", disk=4)])
    assert plan(view).kind == "nothing"
    found = plan(view, checksum=True)
    assert (found.kind, found.step) == ("disk", 3)
    assert found.reason.startswith("ranks 0, 1 differ in step 5 by their checksums")
    assert checkpointless_recovery_feasible(view, checksum=True) == (False, found.reason)


def test_copies_in_memory_come_before_an_older_checkpoint() -> None:
    statuses = [
        at(9, 0, snapshot=8, keeps=(1,), disk=5),
        PeerStatus(disk=5),
        at(9, 0, snapshot=8, keeps=(3,), disk=5),
        at(9, 1, dirty=True, snapshot=8, keeps=(2,), disk=5),
    ]
    found = plan(view_of(statuses, replica_size=4))
    assert found.kind == "disk", "position 2 does not fit a replica of four"
    statuses[2] = at(9, 2, snapshot=8, disk=5)
    statuses[3] = at(9, 3, dirty=True, snapshot=8, disk=5)
    found = plan(view_of(statuses, replica_size=4))
    assert (found.kind, found.step, pairs(found)) == ("memory", 8, [(0, 1)])
    newer = [msgspec.structs.replace(s, disk=9) for s in statuses]
    assert plan(view_of(newer, replica_size=4)).kind == "disk"


def test_rounds_of_copies_that_were_published_by_some_only() -> None:
    statuses = [at(9, 0, dirty=True, snapshot=8), at(9, 1, dirty=True, snapshot=6)]
    found = plan(view_of(statuses, **HSDP))
    assert (found.kind, found.step) == ("memory", 6)


def test_the_first_generation_takes_the_first_replica() -> None:
    fresh = PeerStatus(step=0)
    found = plan(view_of([fresh] * 4, **HSDP))
    assert (found.kind, found.step, found.reason) == (
        "fresh",
        0,
        "fresh start: no rank has any state yet",
    )
    assert pairs(found) == [(0, 2), (1, 3)]
    assert plan(view_of([fresh])).transfers == ()


def test_a_newcomer_with_weights_of_its_own_is_healed_at_step_zero() -> None:
    found = plan(view_of([PeerStatus(step=0), at(0)]))
    assert (found.kind, pairs(found)) == ("peers", [(1, 0)])


def test_a_restarted_job_reads_its_checkpoint() -> None:
    found = plan(view_of([PeerStatus(step=0, disk=40), PeerStatus(step=0, disk=40)]))
    assert (found.kind, found.step) == ("disk", 40)


def test_lost_state_never_becomes_a_fresh_start() -> None:
    found = plan(view_of([at(7, dirty=True), PeerStatus(step=0)]))
    assert found.kind == "impossible"
    assert found.reason == (
        "no member has a whole state, there is no common copy in memory, and there is no "
        "checkpoint: will not start from scratch by itself"
    )
    found = plan(view_of([PeerStatus(disk=5), PeerStatus()]))
    assert found.kind == "impossible"
    assert "rank 1 can read no checkpoint" in found.reason


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(1, 3))
def test_partners_are_a_permutation_away_from_home(nodes: list[int], wide: int) -> None:
    view = view_of([LOST] * len(nodes), nodes=nodes, wide=wide)
    found = partners(view)
    assert sorted(found) == list(range(len(nodes)))
    if len(nodes) > 1:
        assert all(found[rank] != rank for rank in range(len(nodes)))
    for key in (lambda n: n, lambda n: n // wide):
        if 2 * max(Counter(map(key, nodes)).values()) <= len(nodes):
            assert all(key(nodes[rank]) != key(nodes[found[rank]]) for rank in range(len(nodes)))


@given(
    st.lists(st.sampled_from([0, 1, 5, 1000, (1 << 20) - 1, 1 << 20, 5 << 20]), max_size=12),
    st.sampled_from([1000, 1 << 20, 3_000_000]),
    st.integers(1, 4),
)
def test_chunks_cover_every_byte_once_and_shares_are_even(
    sizes: list[int], bucket: int, shares: int
) -> None:
    sizes = [min(size, 40 * bucket) for size in sizes]
    chunks = cut(sizes, bucket)
    pieces = sorted(piece for chunk in chunks for piece in chunk.pieces)
    for tensor, size in enumerate(sizes):
        mine = [p for p in pieces if p.tensor == tensor]
        assert sum(p.size for p in mine) == size
        ends = [0, *(p.stop for p in mine)]
        assert [p.start for p in mine] == ends[: len(mine)]
    assert all(0 < chunk.size <= bucket for chunk in chunks)
    assert all(len(chunk.pieces) == 1 for chunk in chunks if not chunk.packed)
    owners = share(chunks, shares)
    loads = [
        sum(c.size for c, o in zip(chunks, owners, strict=True) if o == s) for s in range(shares)
    ]
    assert max(loads) - min(loads) <= bucket
