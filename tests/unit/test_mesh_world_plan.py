"""The members of the next generation: pure, for any set of survivors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.mesh.model import (
    Member,
    Peer,
    PeerStatus,
    View,
    counter_of,
    generation_number,
)
from slurm_resilience.mesh.protocol.world_plan import (
    SEARCH_SECONDS,
    WorldRules,
    arrange,
    choose,
    last_holders,
    may_leave,
    one_a_seat,
    other_side,
    propose,
)


def member(
    seat: int, step: int = 0, position: int = -1, dirty: bool = False, incarnation: int = 0
) -> Member:
    peer = Peer(f"{seat}.{incarnation}", seat, incarnation, node=f"n{seat}")
    return Member(peer, PeerStatus("ready", 1, step, dirty, position))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Member], int]:
    size = draw(st.sampled_from([1, 2, 3, 4]))
    seats = draw(st.sets(st.integers(0, 4 * size - 1)))
    members = [
        member(
            seat,
            draw(st.integers(-1, 3)),
            draw(st.integers(-1, size - 1)),
            draw(st.booleans()),
        )
        for seat in sorted(seats)
    ]
    return members, size


@given(worlds())
def test_whole_replicas_and_everyone_once(world: tuple[list[Member], int]) -> None:
    members, size = world
    chosen = arrange(members, size)
    assert len(chosen) == len(members) // size * size
    assert len({m.peer.id for m in chosen}) == len(chosen)
    assert {m.peer.id for m in chosen} <= {m.peer.id for m in members}


@given(worlds())
def test_a_part_that_somebody_holds_is_in_the_world(world: tuple[list[Member], int]) -> None:
    members, size = world
    chosen = arrange(members, size)
    if not chosen:
        return
    for part in range(size):
        held = [m for m in members if m.status.healthy and m.status.position == part]
        if held:
            assert any(m in chosen for m in held), f"part {part} was left out"


@given(worlds())
def test_one_rank_a_replica_keeps_the_order_of_seats(world: tuple[list[Member], int]) -> None:
    members, _ = world
    assert arrange(members, 1) == tuple(members)


def test_a_whole_world_is_as_at_the_start() -> None:
    members = [member(seat, 5, seat % 2) for seat in range(4)]
    assert arrange(members, 2) == tuple(members)


def test_the_holder_of_the_lost_part_moves_over() -> None:
    # Seat 1 held part 1 of the first replica; of the second, seats 2 and 3 are left.
    members = [member(0, 5, 0), member(2, 5, 0), member(3, 5, 1)]
    chosen = arrange(members, 2)
    assert [m.peer.seat for m in chosen] == [0, 3]


def test_who_alone_holds_a_part() -> None:
    members = [member(0, 5, 0), member(1, 5, 1), member(2, 5, 0), member(3, 5, 1, dirty=True)]
    assert last_holders(members, 2) == {"1.0"}
    assert last_holders([*members, member(5, -1)], 2) == {"1.0"}
    assert last_holders([member(0, 5, 0), member(1, 5, 0)], 1) == frozenset()


ELASTIC = WorldRules(seats=8, min_world=2, replica_size=2, core=2)


def test_one_that_is_asked_to_leave_leaves_no_part_behind_alone() -> None:
    core = [member(0, 5, 0), member(1, 5, 1)]
    lent = [member(2, 5, 0), member(3, 5, 1), member(4, 5, 0), member(5, 5, 1)]
    assert all(may_leave(one, [*core, *lent], ELASTIC) for one in lent)
    # The holder of part 1 in the core is lost: of two twins that are asked at once, one stays.
    here = [core[0], *lent]
    assert [may_leave(one, here, ELASTIC) for one in lent] == [True, False, True, True]
    newcomer = member(6, -1)
    assert may_leave(newcomer, [*here, newcomer], ELASTIC), "it holds nothing"


def test_a_holder_of_an_older_step_does_not_count() -> None:
    me, other = member(2, 5, 0), member(0, 5, 0)
    assert may_leave(me, [me, other], ELASTIC, 5)
    assert not may_leave(me, [me, other], ELASTIC, 6), "it came out of its block without step 6"


def test_newcomers_wait_for_the_ranks_of_the_job_s_own_nodes() -> None:
    rules = WorldRules(seats=6, min_world=2, core=2)

    def begin(*members: Member, waited: float = 0.0) -> bool:
        return propose(members, {}, (), rules, waited, False).members is not None

    assert begin(member(0), member(1)) and begin(member(0), member(1), member(2))
    assert not begin(member(2), member(3)) and not begin(member(2), member(3), waited=1000.0)
    assert not begin(member(0), member(3))
    again = [member(0, -1, incarnation=1), member(1, -1, incarnation=1)]
    assert not begin(*again), "ranks on lent nodes may have the state"
    assert begin(*again, waited=SEARCH_SECONDS)


def test_newcomers_wait_longer_for_a_rank_that_had_the_state() -> None:
    """It lives on, perhaps, and they would begin anew beside it."""
    rules = WorldRules(seats=6, min_world=2, core=2)
    away = [member(3).peer]
    newcomers = [member(0, -1, incarnation=1), member(1, -1, incarnation=1)]
    proposal = propose(newcomers, {}, (), rules, SEARCH_SECONDS, False, away)
    assert proposal.members is None
    assert proposal.reason.endswith(": seat 3 (n3) had it, and may live on the other side of a cut")
    assert proposal.again == rules.start_patience - SEARCH_SECONDS
    assert propose(newcomers, {}, (), rules, rules.start_patience, False, away).members
    found = [*newcomers, member(2, 5, 0)]
    assert propose(found, {}, (), rules, 0.0, False, away).members, "another one has the state"


def test_the_newest_process_has_the_seat() -> None:
    old, new = member(1), member(1, incarnation=2)
    assert one_a_seat([new, member(0), old]) == (member(0), new)


NAMED = WorldRules(seats=8, min_world=1, core=2, sizes=(2, 4, 8))


def test_a_world_has_one_of_the_sizes_that_were_named() -> None:
    everyone = [member(seat, 3, 0) for seat in range(8)]
    sizes = [len(choose(everyone[:ranks], NAMED)) for ranks in range(9)]
    assert sizes == [0, 1, 2, 2, 4, 4, 4, 4, 8], "with fewer than two, ranks were lost"
    pairs = WorldRules(seats=8, min_world=2, replica_size=2, core=2, sizes=(2, 3, 6))
    parts = [member(seat, 3, seat % 2) for seat in range(8)]
    assert [len(choose(parts[:ranks], pairs)) for ranks in range(9)] == [0, 0, 2, 2, 2, 2, 6, 6, 6]


def test_those_who_stand_in_come_on_top_of_a_size() -> None:
    four, stand_in = [member(seat, 3, 0) for seat in range(4)], member(8)
    assert len(choose([*four, stand_in], NAMED)) == 5
    assert len(choose([*four[1:], stand_in], NAMED)) == 4, "the sick one has left"


@given(worlds(), st.sets(st.integers(1, 16), min_size=1))
def test_the_state_is_among_those_who_are_chosen(
    world: tuple[list[Member], int], sizes: set[int]
) -> None:
    members, size = world
    allowed = tuple(sorted(sizes))
    chosen = choose(members, WorldRules(16, 1, replica_size=size, sizes=allowed))
    for part in range(size if chosen else 0):
        held = [m for m in members if m.status.healthy and m.status.position == part]
        assert not held or any(m in chosen for m in held), f"part {part} was left out"


def test_a_standby_may_leave_once_the_others_have_gone_on() -> None:
    running = PeerStatus("running", 2, 5, position=0)
    others = [Member(Peer(f"{seat}.0", seat), running) for seat in range(2)]
    standby = member(2, 5, 0)
    assert may_leave(standby, [standby, *others], NAMED)
    assert not may_leave(member(2, 6, 0), [standby, *others], NAMED), "they lack its last step"


RULES = WorldRules(seats=4, min_world=2)


def view(*members: Member) -> View:
    return View(generation_number(1, 0), tuple(members), seats=4)


def test_waits_for_all_at_the_start() -> None:
    proposal = propose([member(0), member(1)], {}, [], RULES, 1.0, started=False)
    assert proposal.members is None
    assert proposal.again is not None
    later = propose([member(0), member(1)], {}, [], RULES, 601.0, started=False)
    assert later.members is not None


def test_waits_for_no_more_than_the_core_of_an_elastic_job() -> None:
    rules = WorldRules(seats=4, min_world=1, core=2, patience=60.0)
    alone = propose([member(0)], {}, [], rules, 1.0, started=False)
    assert alone.members is None
    for ranks in (2, 3, 4):
        present = [member(seat) for seat in range(ranks)]
        found = propose(present, {}, [], rules, 0.0, started=ranks > 2)
        assert (found.members is not None and f"{ranks} of 4" in found.reason) or ranks == 4


def test_goes_on_at_once_after_a_loss() -> None:
    all4 = [member(seat, 3) for seat in range(4)]
    left = all4[:2] + all4[3:]
    proposal = propose(left, {all4[2].peer.id: True}, [view(*all4)], RULES, 0.0, started=True)
    assert proposal.members == tuple(left)


def test_too_few_wait() -> None:
    all4 = [member(seat, 3) for seat in range(4)]
    lost = {m.peer.id: True for m in all4[1:]}
    proposal = propose(all4[:1], lost, [view(*all4)], RULES, 99.0, started=True)
    assert proposal.members is None
    assert "min_world" in proposal.reason


@given(st.sets(st.integers(0, 7), min_size=0, max_size=8))
def test_two_halves_of_a_cut_never_both_go_on(side: set[int]) -> None:
    everyone = [member(seat, 3) for seat in range(8)]
    whole = View(generation_number(1, 0), tuple(everyone), seats=8)
    rules = WorldRules(seats=8, min_world=1)

    def goes_on(here: set[int]) -> bool:
        there = {m.peer.id: False for m in everyone if m.peer.seat not in here}
        present = [m for m in everyone if m.peer.seat in here]
        if not present:
            return False
        return propose(present, there, [whole], rules, 0.0, started=True).members is not None

    other = set(range(8)) - side
    assert not (goes_on(side) and goes_on(other))
    assert goes_on(side) or goes_on(other)


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**5))
def test_numbers_order_generations(counter: int, one: int, other: int) -> None:
    assert generation_number(counter + 1, one) > generation_number(counter, other)
    assert counter_of(generation_number(counter, one)) == counter
    if one < other:
        assert generation_number(counter, one) > generation_number(counter, other)


def test_a_newcomer_does_not_sit_on_the_last_place_of_a_part() -> None:
    seated = [member(0, position=0), member(1, step=-1), member(2, position=0)]
    holder = member(3, position=1)
    assert arrange([*seated, holder], 3)[1] == holder


PARTS = st.lists(st.sampled_from(["here", "there", "dead"]), min_size=1, max_size=6)


@given(PARTS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_two_sides_that_may_go_on_have_a_voter_in_common(
    parts: list[str], told: list[bool]
) -> None:
    """A death that only one side knows of does not have both go on."""
    members = tuple(member(seat) for seat in range(len(parts)))
    world = View(generation_number(1, 0), members, seats=len(parts))

    def goes_on(side: str, knows: bool) -> bool:
        here = {m.peer.id for m, part in zip(members, parts, strict=True) if part == side}
        lost = {
            m.peer.id: part == "dead" and (told[seat] is knows)
            for seat, (m, part) in enumerate(zip(members, parts, strict=True))
            if part != side
        }
        return bool(here) and not other_side([world], here, lost)

    assert not (goes_on("here", True) and goes_on("there", False))


def test_each_world_that_may_go_on_counts() -> None:
    everyone = [member(seat) for seat in range(4)]
    older = View(generation_number(1, 0), tuple(everyone), seats=4)
    newer = View(generation_number(2, 2), (everyone[2], everyone[3]), seats=4)
    here = {m.peer.id for m in everyone[:3]}
    assert not other_side([older], here, {})
    assert "1 of 2 ranks fell silent" in other_side([older, newer], here - {"2.0"}, {"2.0": True})
    assert not other_side([newer], here, {})
    assert not other_side([older, newer], {"0.0", "1.0"}, {"2.0": True, "3.0": True})
