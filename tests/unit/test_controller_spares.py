"""Pools of spare nodes: kept, refilled, spread over zones, left to people who change them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import (
    NOW,
    FakeClock,
    actions,
    agent,
    decision,
    finding,
    incident,
    job,
    node,
    supervised,
    world,
)

from slurm_resilience.config import Config, SparePoolSettings, parse
from slurm_resilience.controller.act.spare_acts import SpareActs
from slurm_resilience.controller.actions import AskForGift, AskForPool, RaiseAlarm, RequeueJob
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import PendingRequeue
from slurm_resilience.controller.spares.gift_lifecycle import (
    GIFT_TABLE,
    GiftEvent,
    GiftState,
    next_gift_state,
)
from slurm_resilience.controller.spares.pool_lifecycle import (
    POOL_TABLE,
    PoolEvent,
    PoolState,
    next_state,
)
from slurm_resilience.controller.spares.pool_plan import choose, resumed, size_of, spread
from slurm_resilience.controller.spares.pool_records import (
    Gift,
    MoveGift,
    MovePool,
    SpareMemory,
    SparePool,
    after_move,
)
from slurm_resilience.controller.spares.spares_view import spare_alarms, spares_view
from slurm_resilience.errors import ConfigError, IllegalTransition, SlurmError, SlurmUnreachable
from slurm_resilience.slurm.reservations import Reservation, read_reservations

TERMS = "StartTime=2026-01-01T00:00:00 Users=root"
NAME = "sres-spares-main-1"
SETTINGS = Config(spares={"main": SparePoolSettings(nodes=2)})


def seen(*names: str, pool: SparePool | None = None, **more: Any) -> Any:
    """Return a cluster of idle nodes of the partition main, with a reservation of these names."""
    nodes = more.pop("nodes", [node(f"n{i}", partitions=("main",)) for i in range(1, 5)])
    shown = (Reservation(NAME, names, 1.0, more.pop("terms", TERMS)),) if names else ()
    shown += more.pop("others", ())
    memory = SpareMemory({"main": pool} if pool else {})
    agents = more.pop("agents", tuple(agent(one.name) for one in nodes))
    more.setdefault("reservations", shown)
    return world(*nodes, agents=agents, spares=memory, **more)


def kept(*names: str, **more: Any) -> SparePool:
    return SparePool(
        "main",
        **(
            {"state": PoolState.KEPT, "name": NAME, "nodes": names, "wanted": names, "terms": TERMS}
            | more
        ),
    )


def asked(snapshot: Any, settings: Config = SETTINGS) -> list[tuple[PoolEvent, tuple[str, ...]]]:
    return [(one.event, one.nodes) for one in actions(snapshot, AskForPool, settings)]


def moved(snapshot: Any) -> list[PoolEvent]:
    return [note.event for note in decision(snapshot, SETTINGS).notes if isinstance(note, MovePool)]


def test_no_pool_no_reservation() -> None:
    assert asked(seen(), Config()) == []


def test_a_pool_is_made_and_filled_up() -> None:
    assert asked(seen()) == [(PoolEvent.MAKE, ("n1", "n2"))]
    assert asked(seen("n3", pool=kept("n3"))) == [(PoolEvent.CHANGE, ("n1", "n3"))]
    assert asked(seen("n3", "n4", pool=kept("n3", "n4"))) == []


def test_a_pool_that_is_configured_no_more_is_removed() -> None:
    assert asked(seen("n3", pool=kept("n3")), Config()) == [(PoolEvent.REMOVE, ())]
    held = kept("n3", state=PoolState.HELD)
    assert asked(seen("n3", pool=held), Config()) == []


@pytest.mark.parametrize(
    "bad",
    [
        node("n1", "ALLOCATED", partitions=("main",)),
        node("n1", "IDLE+COMPLETING", partitions=("main",)),
        node("n1", "IDLE+DRAIN", "RMA", partitions=("main",)),
        node("n1", "DOWN", "Not responding", partitions=("main",)),
        node("n1", "IDLE+MAINTENANCE", partitions=("main",)),
        node("n1", "IDLE", partitions=("other",)),
    ],
)
def test_a_node_that_is_busy_kept_or_ill_is_no_spare(bad: Any) -> None:
    busy = node("n4", "ALLOCATED", partitions=("main",))
    nodes = [bad, *(node(f"n{i}", partitions=("main",)) for i in (2, 3)), busy]
    assert asked(seen(nodes=nodes)) == [(PoolEvent.MAKE, ("n2", "n3"))]
    had = kept("n1", "n2")
    assert asked(seen("n1", "n2", pool=had, nodes=nodes)) == [(PoolEvent.CHANGE, ("n2", "n3"))]


def test_a_sick_spare_is_replaced_by_another_node() -> None:
    sick = (agent("n1", findings=(finding(),)), *(agent(f"n{i}") for i in (2, 3, 4)))
    had = seen("n1", "n2", pool=kept("n1", "n2"), agents=sick)
    assert asked(had) == [(PoolEvent.CHANGE, ("n2", "n3"))]


def test_a_node_of_another_reservation_is_left_alone() -> None:
    others = (Reservation("course", ("n1", "n2"), NOW + 3600, "Users=bob"),)
    assert asked(seen(others=others)) == [(PoolEvent.MAKE, ("n3", "n4"))]


def test_on_a_full_cluster_a_repaired_node_is_kept_before_the_queue_gets_it() -> None:
    busy = [node(f"n{i}", "ALLOCATED", partitions=("main",)) for i in (1, 2, 3)]
    back = node("n4", "IDLE+FAIL", "Action:Replace", partitions=("main",))
    returning = incident("n4", NodeState.VALIDATING)
    full = seen(nodes=[*busy, back], incidents=(returning,))
    assert asked(full) == [(PoolEvent.MAKE, ("n4",))]
    # The incident is a person's only in the next cycle.
    drained = node("n4", "IDLE+DRAIN", "RMA 4711", partitions=("main",))
    assert asked(seen(nodes=[*busy, drained], incidents=(returning,))) == []
    held = seen("n4", nodes=[*busy, drained], pool=kept("n4"), incidents=(returning,))
    assert asked(held) == [(PoolEvent.REMOVE, ())]


def test_a_restart_of_slurmctld_empties_no_pool() -> None:
    nodes = [node(f"n{i}", "IDLE+NOT_RESPONDING", partitions=("main",)) for i in range(1, 5)]
    assert asked(seen("n1", "n2", pool=kept("n1", "n2"), nodes=nodes)) == []


def test_nothing_is_done_while_reservations_cannot_be_read_or_in_a_pause() -> None:
    blind = seen(pool=kept("n1", "n2"), reservations=None)
    assert asked(blind) == [] and moved(blind) == []
    assert asked(seen(paused="work")) == []


@pytest.mark.parametrize(
    ("pool", "shown", "event"),
    [
        (kept(state=PoolState.MAKING, wanted=("n1",), terms=""), ("n1",), PoolEvent.MADE),
        (kept(state=PoolState.ABSENT, wanted=("n1",), terms=""), ("n1",), PoolEvent.MADE),
        (kept(state=PoolState.MAKING, wanted=("n1",), terms=""), ("n2",), PoolEvent.PERSON),
        (kept("n1", state=PoolState.CHANGING, wanted=("n2",)), ("n2",), PoolEvent.CHANGED),
        (kept("n1", state=PoolState.CHANGING, wanted=("n2",)), ("n1",), PoolEvent.UNCHANGED),
        (kept("n1", state=PoolState.CHANGING, wanted=("n2",)), ("n3",), PoolEvent.PERSON),
        (kept("n1", wanted=("n2",)), ("n2",), PoolEvent.CHANGED),  # it took effect later
        (kept("n1", "gone"), ("n1",), PoolEvent.CHANGED),  # out of Slurm's configuration
        (kept("n1"), ("n1", "n2"), PoolEvent.PERSON),
        (kept("n1"), (), PoolEvent.PERSON),
        # Slurm said that it was made: gone by the first look, it was deleted.
        (kept("n1", terms=""), (), PoolEvent.PERSON),
        (kept("n1", terms=""), ("n2",), PoolEvent.PERSON),
        (kept("n1", terms=""), ("n1",), PoolEvent.MADE),
        (kept("n1", terms="EndTime=2027-01-01T00:00:00 Users=root"), (), PoolEvent.PERSON),
        (kept("n1", terms="EndTime=1970-01-02T00:00:00 Users=root"), (), PoolEvent.REMOVED),
        (kept("n1", terms="Users=root,bob"), ("n1",), PoolEvent.PERSON),
        (kept("n1", state=PoolState.REMOVING), (), PoolEvent.REMOVED),
    ],
)
def test_slurm_tells_what_has_become_of_a_request(
    pool: SparePool, shown: tuple[str, ...], event: PoolEvent
) -> None:
    snapshot = seen(*shown, pool=pool)
    assert moved(snapshot) == [event]
    assert asked(snapshot) == []
    assert (pool.state, event) in POOL_TABLE


def test_a_request_that_was_written_down_is_made_under_the_same_name() -> None:
    (again,) = actions(
        seen(pool=kept(state=PoolState.MAKING, wanted=("n3",))), AskForPool, SETTINGS
    )
    assert (again.name, again.nodes, again.is_begun) == (NAME, ("n3",), True)


def test_after_a_refusal_slurm_is_asked_again_but_not_at_once() -> None:
    refused = kept("n3", refused_at=NOW - 5.0)
    assert asked(seen("n3", pool=refused)) == []
    assert asked(seen("n3", pool=msgspec.structs.replace(refused, refused_at=NOW - 11.0)))


def test_a_held_pool_raises_an_alarm_and_goes_on_by_a_persons_word() -> None:
    held = kept("n1", state=PoolState.HELD, why="its reservation was deleted")
    for snapshot, event in (
        (seen(pool=held), PoolEvent.FORGOTTEN),
        (seen("n3", pool=held), PoolEvent.RESUMED),
    ):
        assert asked(snapshot) == [] and moved(snapshot) == []
        (alarm,) = actions(snapshot, RaiseAlarm, SETTINGS)
        assert "sres spares resume" in alarm.text
        (move,) = resumed(snapshot)
        after = after_move(held, move, next_state(held.state, move.event), NOW)
        assert move.event is event and after.nodes == move.nodes


def test_what_people_see() -> None:
    nodes = [node(name, partitions=("main",)) for name in ("n1", "n2")]
    snapshot = seen("n1", pool=kept("n1"), nodes=nodes)
    (pool,) = spares_view(snapshot, diagnose(snapshot, SETTINGS), SETTINGS)
    assert (pool["size"], pool["kept"], pool["missing"]) == (1, ["n1"], 0)
    wrong = Config(spares={"mian": SparePoolSettings(nodes=1)})
    unknown = spares_view(snapshot, diagnose(snapshot, wrong), wrong)
    assert unknown[0]["why"] == "Slurm has no node in a partition mian; did you mean main?"
    other = Config(spares={"gpu": SparePoolSettings(nodes=1)})
    unknown = spares_view(snapshot, diagnose(snapshot, other), other)
    assert unknown[0]["why"] == "Slurm has no node in a partition gpu"


@pytest.mark.parametrize("left", [(), ("n2",), ("n1", "n3")])
def test_of_a_held_pool_people_see_what_slurm_keeps(left: tuple[str, ...]) -> None:
    """A person has deleted the reservation, or changed its nodes."""
    held = kept("n1", "n2", state=PoolState.HELD, why="it was deleted")
    snapshot = seen(*left, pool=held)
    (pool,) = spares_view(snapshot, diagnose(snapshot, SETTINGS), SETTINGS)
    assert (pool["kept"], pool["missing"]) == ([*left], 2 - len(left))
    unread = seen(pool=held, reservations=None)
    (pool,) = spares_view(unread, diagnose(unread, SETTINGS), SETTINGS)
    assert pool["kept"] == ["n1", "n2"]


names = st.lists(st.sampled_from([f"n{i}" for i in range(12)]), unique=True)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.data())
def test_spares_that_are_spread_stay_as_they_are(zones: list[str], data: Any) -> None:
    names = [f"n{i}" for i in range(len(zones))]
    where = dict(zip(names, zones, strict=True))
    chosen = data.draw(st.sets(st.sampled_from(names)))
    fixed = data.draw(st.sets(st.sampled_from(names)))
    free = [name for name in names if name not in chosen]
    after = spread(sorted(chosen), fixed, free, where)
    assert len(set(after)) == len(chosen) and chosen & fixed <= set(after)
    left = [name for name in names if name not in after]
    assert spread(after, fixed, left, where) == after
    count = Counter(where[name] for name in after)
    gone = [count[where[name]] for name in after if name not in fixed]
    assert not (gone and left) or max(gone) - min(count[where[name]] for name in left) < 2


@given(
    st.integers(0, 12),
    names,
    names,
    st.dictionaries(
        st.sampled_from([f"n{i}" for i in range(12)]), st.sampled_from(["", "a", "b", "c"])
    ),
)
def test_a_choice_is_never_too_large_and_keeps_what_it_can(
    size: int, members: list[str], candidates: list[str], zones: dict[str, str]
) -> None:
    chosen = choose(size, members, candidates, zones)
    every = {*members, *candidates}
    assert len(chosen) == len(set(chosen)) == min(size, len(every))
    assert set(chosen) <= every
    if len(members) <= size:
        assert set(members) <= set(chosen)
    assert set(choose(size, chosen, candidates, zones)) == set(chosen)  # it comes to rest
    if not members:
        counts = dict.fromkeys({zones.get(name, "") for name in candidates}, 0)
        for name in chosen:
            counts[zones.get(name, "")] += 1
        for zone, count in counts.items():
            left = [n for n in candidates if n not in chosen and zones.get(n, "") == zone]
            assert not left or count >= max(counts.values()) - 1


@pytest.mark.parametrize(
    ("text", "nodes", "size"),
    [
        ("nodes = 3", 10, 3),
        ("nodes = 3", 2, 1),  # one is left to jobs
        ("nodes = 1", 1, 0),
        ("nodes = 1", 0, 0),
        ("percent = 5", 21, 2),
        ("percent = 100", 4, 3),
    ],
)
def test_sizes(text: str, nodes: int, size: int) -> None:
    assert size_of(parse(f"[spares.main]\n{text}").spares["main"], nodes) == size


def test_a_pool_that_would_take_a_whole_partition_is_told() -> None:
    """`nodes = 10` in a partition of four: no job started there any more, without a word."""
    nodes = [node(f"n{i}", partitions=("main",)) for i in range(4)]
    config = parse("[spares.main]\nnodes = 10\n[spares.gone]\nnodes = 1")
    (alarm,) = spare_alarms(world(*nodes), config)
    assert "asks for 10 of the 4 nodes of partition main" in alarm.text
    assert "3 are kept" in alarm.text
    assert not list(spare_alarms(world(*nodes), parse("[spares.main]\nnodes = 3")))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nodes = 0",
        "nodes = -1",
        "nodes = 1\npercent = 5",
        "percent = 0.5",
        "percent = 101",
        "nodse = 1",
    ],
)
def test_a_bad_pool_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"spares\.main|nodse"):
        parse(f"[spares.main]\n{text}")


class FakeReservations:
    """Slurm's reservations in memory."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.shown: dict[str, Reservation] = {}
        self.fault = fault

    def reservations(self) -> tuple[Reservation, ...]:
        return tuple(self.shown.values())

    def keep_nodes(self, name: str, nodes: Any, user: str) -> None:
        if self.fault is not None:
            raise self.fault
        self.shown[name] = Reservation(name, tuple(nodes), 1.0, f"Users={user}")

    def change_nodes(self, name: str, nodes: Any) -> None:
        self.keep_nodes(name, nodes, "root")

    def delete_reservation(self, name: str) -> None:
        del self.shown[name]


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (None, PoolState.KEPT),
        (SlurmUnreachable("no answer"), PoolState.MAKING),
        (SlurmError("Requested nodes are busy"), PoolState.ABSENT),
    ],
)
def test_a_request_stands_in_the_journal_before_slurm_hears_of_it(
    fault: Exception | None, state: PoolState, tmp_path: Path
) -> None:
    journal, client = Journal(tmp_path / "journal.db"), FakeReservations(fault)
    acts = SpareActs(client, journal, FakeClock())
    action = AskForPool("main", PoolEvent.MAKE, NAME, ("n1",))
    try:
        acts.ask(seen(), action)
    except (SlurmError, SlurmUnreachable) as error:
        assert error is fault
    pool = journal.spares().pools["main"]
    assert (pool.state, pool.name, pool.wanted) == (state, NAME, ("n1",))
    assert bool(pool.refused_at) == (state is PoolState.ABSENT)
    assert [event["kind"] for event in journal.events()][-1] == "spares"
    journal.close()


def test_nodes_that_a_person_puts_back_at_once_stay(tmp_path: Path) -> None:
    journal, client = Journal(tmp_path / "journal.db"), FakeReservations()
    acts = SpareActs(client, journal, FakeClock())
    acts.ask(seen(), AskForPool("main", PoolEvent.MAKE, NAME, ("n1",)))
    made = client.shown[NAME]
    pool = journal.spares().pools["main"]
    before = seen("n1", pool=pool, terms=made.terms)
    acts.ask(before, AskForPool("main", PoolEvent.CHANGE, NAME, ("n2",)))
    assert client.shown[NAME].nodes == ("n2",)
    client.shown[NAME] = made
    pool = journal.spares().pools["main"]
    journal.close()
    assert moved(seen("n1", pool=pool, terms=made.terms)) == [PoolEvent.PERSON]


def test_a_gift_that_a_person_deletes_at_once_is_not_made_again(tmp_path: Path) -> None:
    class Script(GiftSlurm):
        """Has each reservation deleted by a script of its owner's."""

        def give_nodes(self, name: str, nodes: Any, user: str) -> None:
            super().give_nodes(name, nodes, user)
            super().delete_reservation(name)

    snapshot = lossy()
    journal, client = Journal(tmp_path / "journal.db"), Script(*snapshot.jobs.values())
    SpareActs(client, journal, FakeClock()).ask_for_gift(snapshot, *gifts_of(snapshot))  # type: ignore[arg-type]
    known = journal.spares().gifts[7]
    journal.close()
    later = msgspec.structs.replace(known, since=NOW)
    assert [ask.event for ask in gifts_of(lossy(gift=later))] == [GiftEvent.END]


def test_a_reservation_that_has_changed_since_the_look_is_left_alone(tmp_path: Path) -> None:
    journal, client = Journal(tmp_path / "journal.db"), FakeReservations()
    client.shown[NAME] = Reservation(NAME, ("n4",), 1.0, TERMS)
    acts = SpareActs(client, journal, FakeClock())
    acts.ask(seen("n1", pool=kept("n1")), AskForPool("main", PoolEvent.REMOVE, NAME))
    assert list(client.shown) == [NAME] and journal.events() == []
    journal.close()


def test_the_table_refuses_what_it_does_not_have() -> None:
    with pytest.raises(IllegalTransition, match="held does not know 'change'"):
        next_state(PoolState.HELD, PoolEvent.CHANGE)
    assert {state for state, _ in POOL_TABLE} == set(PoolState)
    assert {event for _, event in POOL_TABLE} == set(PoolEvent)


def test_a_reservation_is_read() -> None:
    text = (
        "ReservationName=sres-spares-main-1 StartTime=2026-11-23T00:00:00 "
        "EndTime=2027-11-23T00:00:00 Duration=365-00:00:00 Nodes=n[1-2] NodeCnt=2 CoreCnt=8 "
        "Features=(null) PartitionName=main Flags=SPEC_NODES TRES=cpu=8 Users=root Groups=(null) "
        "Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) Watts=n/a "
        "MaxStartDelay=(null)\n"
    )
    (found,) = read_reservations(text)
    assert found.nodes == ("n1", "n2") and "Users=root" in found.terms
    (larger,) = read_reservations(
        text.replace("n[1-2] NodeCnt=2 CoreCnt=8", "n[1-3] NodeCnt=3 CoreCnt=12")
    )
    assert larger.terms == found.terms


# -- gifts ------------------------------------------------------------------------------------

LOST = msgspec.structs.replace(supervised(7, ("n1", "n5")), lost=("n5",), size=2)
GIFT = Gift(
    7,
    GiftState.OFFERED,
    "sres-gift-7-1",
    1000,
    0,
    "main",
    ("n3",),
    ("n3",),
    False,
    TERMS,
    NOW - 5.0,
    1,
)


def lossy(*more_jobs: Any, gift: Gift | None = None, shown: Any = (), **more: Any) -> Any:
    """Return a cluster in which job 7 has n1, lost n5, and n3 and n4 are spares."""
    nodes = [
        node("n1", "ALLOCATED", partitions=("main",)),
        node("n2", "ALLOCATED", partitions=("main",)),
        node("n3", partitions=("main",)),
        node("n4", partitions=("main",)),
    ]
    own = more.pop("own", job(7, ("n1",), partition="main"))
    request = job(9, (), state="PENDING", is_batch=False, num_nodes=1, partition="main")
    other = job(8, ("n2",), uid=2000, partition="main")
    pool = SparePool("main", PoolState.KEPT, NAME, ("n3", "n4"), ("n3", "n4"), TERMS)
    memory = SpareMemory({"main": pool}, {7: gift} if gift else {})
    reserved = (Reservation(NAME, ("n3", "n4"), 1.0, TERMS), *shown)
    jobs = (own, other, *(more_jobs or (request,)))
    agents = tuple(agent(one.name) for one in nodes)
    known: dict[str, Any] = {"watched": (LOST,), "reservations": reserved, "spares": memory}
    return world(*nodes, jobs=jobs, agents=agents, **(known | more))


def gifts_of(snapshot: Any) -> list[AskForGift]:
    return actions(snapshot, AskForGift, SETTINGS)


def test_a_job_that_waits_for_a_node_in_exchange_gets_one_spare() -> None:
    (ask,) = gifts_of(lossy())
    assert (ask.event, ask.gift.job, ask.gift.uid) == (GiftEvent.MAKE, 7, 1000)
    assert ask.gift.spares == ask.gift.nodes == ("n3",)
    assert ask.gift.name.startswith("sres-gift-7-")
    assert asked(lossy()) == []  # the spare stays in the pool until the job has it


def given(domains: dict[str, str], settings: Config = SETTINGS) -> tuple[str, ...]:
    """Return the spares that job 7 is given, for n5."""
    shown = lossy(domains=domains)
    nodes = dict(shown.nodes) | {"n5": node("n5", "DOWN", "Not responding", partitions=("main",))}
    shown = msgspec.structs.replace(shown, nodes=nodes)
    (ask,) = actions(shown, AskForGift, settings)
    return ask.gift.spares


def test_a_spare_of_the_lost_nodes_block_comes_first() -> None:
    blocks = {"n1": "b1", "n3": "b1", "n4": "b2", "n5": "b2"}
    assert given(blocks) == ("n4",)
    # Without one there, one near the nodes that the job keeps.
    assert given({"n1": "b1", "n4": "b1", "n3": "b2", "n5": "b9"}) == ("n4",)
    # What the site itself calls a zone goes before Slurm's topology.
    zoned = Config(spares={"main": SparePoolSettings(nodes=2, zone="rack-")})
    assert given(blocks, zoned) == given({}) == ("n3",)


def test_spares_are_spread_over_the_leaf_switches() -> None:
    switches = {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}
    assert asked(seen(domains=switches)) == [(PoolEvent.MAKE, ("n1", "n3"))]


def test_spares_of_one_switch_are_spread_as_soon_as_nodes_of_others_are_free() -> None:
    """The others were away, or full of jobs, when they were chosen: with this switch all spares
    would be lost."""
    switches = {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}
    one_sided = seen("n1", "n2", pool=kept("n1", "n2"), domains=switches)
    assert asked(one_sided) == [(PoolEvent.CHANGE, ("n1", "n3"))]
    even = seen("n1", "n3", pool=kept("n1", "n3"), domains=switches)
    assert asked(even) == []
    unread = seen("n1", "n2", pool=kept("n1", "n2"), domains={})
    assert asked(unread) == []
    busy = [node(f"n{i}", "ALLOCATED" if i > 2 else "IDLE", partitions=("main",)) for i in range(5)]
    full = seen("n1", "n2", pool=kept("n1", "n2"), domains=switches, nodes=busy[1:])
    assert asked(full) == []


@pytest.mark.parametrize(
    "snapshot",
    [
        lossy(job(9, (), state="PENDING", is_batch=False, num_nodes=2, partition="main")),
        lossy(job(9, (), state="PENDING", is_batch=False, num_nodes=1, partition="main", uid=5)),
        lossy(watched=(supervised(7, ("n1",)),)),  # it lost no node
        lossy(own=job(7, ("n1",), partition="other")),
        lossy(own=job(7, ("n1",), partition="main", reservation="course")),
        lossy(paused="work"),
        lossy(reservations=None),
        lossy(shown=(Reservation("course", ("n3", "n4"), 1.0, TERMS),)),  # people come first
    ],
)
def test_no_other_job_is_given_a_spare(snapshot: Any) -> None:
    assert gifts_of(snapshot) == []


def test_a_gift_ends_when_the_job_has_its_nodes_or_does_not_take_them() -> None:
    there = (Reservation(GIFT.name, ("n3",), 1.0, TERMS),)
    assert gifts_of(lossy(gift=GIFT, shown=there)) == []
    merged = job(7, ("n1", "n3"), partition="main")
    (taken,) = gifts_of(lossy(gift=GIFT, shown=there, own=merged))
    assert (taken.event, taken.is_taken) == (GiftEvent.END, True)
    late = msgspec.structs.replace(GIFT, since=NOW - 31.0)
    (left,) = gifts_of(lossy(gift=late, shown=there))
    assert (left.event, left.is_taken) == (GiftEvent.END, False)
    # Slurm may take long to end a run whose batch host is dead.
    ending = job(7, ("n1",), partition="main", state="COMPLETING")
    requeued = msgspec.structs.replace(late, state=GiftState.READY, is_requeue=True)
    (still,) = gifts_of(lossy(gift=requeued, shown=there, own=ending))
    assert still.event is GiftEvent.OFFERED


def test_a_job_that_leaves_its_gifts_gets_no_more_of_them() -> None:
    over = msgspec.structs.replace(GIFT, state=GiftState.OVER, since=NOW - 61.0)
    assert [ask.gift.tries for ask in gifts_of(lossy(gift=over))] == [2]
    assert gifts_of(lossy(gift=msgspec.structs.replace(over, since=NOW - 59.0))) == []
    assert gifts_of(lossy(gift=msgspec.structs.replace(over, tries=3))) == []


def test_a_gift_that_a_person_changed_is_left_alone() -> None:
    there = (Reservation(GIFT.name, ("n3",), 1.0, "Users=bob"),)
    snapshot = lossy(gift=GIFT, shown=there)
    (note,) = [n for n in decision(snapshot, SETTINGS).notes if isinstance(n, MoveGift)]
    assert note.event is GiftEvent.PERSON and gifts_of(snapshot) == []


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "EXPEDITING"])
def test_a_requeued_job_keeps_its_sound_nodes_and_gets_what_it_lacks(state: str) -> None:
    """Once it is PENDING, the nodes that it had are not its own any more."""
    own = job(7, ("n1",) if state == "RUNNING" else (), partition="main", state=state, num_nodes=2)
    pending = {7: PendingRequeue(7, "a node died", True, 0, NOW)}
    (ask,) = gifts_of(lossy(own=own, pending_requeues=pending))
    assert ask.gift.is_requeue and ask.gift.restarts == 0
    both = (("n1", "n3"), ("n3",)) if state == "RUNNING" else (("n3", "n4"), ("n3", "n4"))
    assert (ask.gift.nodes, ask.gift.spares) == both


def test_a_job_that_lost_its_batch_host_keeps_its_nodes_as_it_is_requeued() -> None:
    zombie = job(7, ("n1",), partition="main", batch_host="n5")
    said = decision(lossy(own=zombie), SETTINGS).actions
    kinds = [type(action) for action in said]
    (ask,) = [action for action in said if isinstance(action, AskForGift)]
    assert (ask.gift.nodes, ask.gift.is_requeue) == (("n1", "n3"), True)
    assert kinds.index(AskForGift) < kinds.index(RequeueJob)


def crowded(*, idle: bool = False, state: NodeState = NodeState.EMPTY, **more: Any) -> Any:
    """Return a cluster without spares: job 7 has n1, and n5 died with its batch script."""
    nodes = [
        node("n1", "ALLOCATED", partitions=("main",)),
        node("n2", "IDLE" if idle else "ALLOCATED", partitions=("main",)),
        node("n5", "DOWN", "Action:Replace", partitions=("main",)),
    ]
    own = more.pop("own", job(7, ("n1",), partition="main", batch_host="n5"))
    jobs = (own,) if idle else (own, job(8, ("n2",), uid=2000, partition="main"))
    known: dict[str, Any] = {"watched": (LOST,), "reservations": (), "spares": SpareMemory()}
    agents = tuple(agent(one.name) for one in nodes[:2])
    known |= {"incidents": (incident("n5", state),), "jobs": jobs, "agents": agents}
    return world(*nodes, **(known | more))


def test_without_a_spare_a_requeued_job_keeps_its_nodes_until_the_lost_one_is_back() -> None:
    said = decision(crowded(), Config()).actions
    kinds = [type(action) for action in said]
    (ask,) = [action for action in said if isinstance(action, AskForGift)]
    assert (ask.gift.nodes, ask.gift.spares, ask.gift.is_requeue) == (("n1", "n5"), (), True)
    assert ask.text == "job 7 keeps n1 until n5 is back"
    assert kinds.index(AskForGift) < kinds.index(RequeueJob)
    # Once others may have them, it is too late.
    pending = {7: PendingRequeue(7, "a node died", True, 0, NOW)}
    own = job(7, (), partition="main", state="PENDING", num_nodes=2)
    assert actions(crowded(own=own, pending_requeues=pending), AskForGift, Config()) == []


@pytest.mark.parametrize(
    "snapshot",
    [
        crowded(idle=True),  # it starts at once
        crowded(state=NodeState.QUARANTINED),  # it waits for a person
        crowded(watched=()),
        crowded(reservations=None),
    ],
)
def test_nodes_are_not_kept_in_vain(snapshot: Any) -> None:
    assert actions(snapshot, AskForGift, Config()) == []


@pytest.mark.parametrize(("age", "ends"), [(121.0, False), (901.0, True)])
def test_a_repair_is_waited_for_longer_than_a_spare(age: float, ends: bool) -> None:
    gift = msgspec.structs.replace(GIFT, nodes=("n1", "n5"), spares=(), is_requeue=True)
    memory = SpareMemory({}, {7: msgspec.structs.replace(gift, since=NOW - age)})
    there = (Reservation(GIFT.name, ("n1", "n5"), 1.0, TERMS),)
    own = job(7, (), partition="main", state="PENDING", num_nodes=2)
    asks = actions(crowded(own=own, spares=memory, reservations=there), AskForGift, Config())
    assert [ask.event for ask in asks] == ([GiftEvent.END] if ends else [])


@pytest.mark.parametrize(
    ("age", "state", "ends"),
    [
        (31.0, NodeState.REPAIRING, False),
        (31.0, NodeState.QUARANTINED, True),
        (29.0, NodeState.QUARANTINED, False),
    ],
)
def test_a_node_that_is_not_repaired_is_not_waited_for(
    age: float, state: NodeState, ends: bool
) -> None:
    """Its job was bound to it for a quarter of an hour, beside idle nodes."""
    gift = msgspec.structs.replace(GIFT, nodes=("n1", "n5"), spares=(), is_requeue=True)
    memory = SpareMemory({}, {7: msgspec.structs.replace(gift, since=NOW - age)})
    there = (Reservation(GIFT.name, ("n1", "n5"), 1.0, TERMS),)
    own = job(7, (), partition="main", state="PENDING", num_nodes=2, reservation=GIFT.name)
    shown = crowded(own=own, state=state, spares=memory, reservations=there)
    asks = actions(shown, AskForGift, Config())
    assert [ask.event for ask in asks] == ([GiftEvent.END] if ends else [])


@pytest.mark.parametrize(
    ("age", "companion", "lent", "ends"),
    [
        (5.0, None, False, False),
        (31.0, None, False, True),
        (5.0, 1000, False, True),
        (5.0, 1000, True, False),
        (5.0, 2000, False, False),
    ],
)
def test_a_job_that_outlives_its_node_keeps_none_from_others(
    age: float, companion: int | None, lent: bool, ends: bool
) -> None:
    """Slurm does not tell which jobs do. A second allocation of its own user says that it does."""
    gift = msgspec.structs.replace(GIFT, nodes=("n1", "n5"), spares=(), is_requeue=True)
    memory = SpareMemory({}, {7: msgspec.structs.replace(gift, since=NOW - age)})
    there = (Reservation(GIFT.name, ("n1", "n5"), 1.0, TERMS),)
    own = job(7, ("n1",), partition="main", batch_host="n1")
    jobs = [own, job(8, ("n2",), uid=2000, partition="main")]
    if companion is not None:
        named = {"companion_of": (7, 0), "is_lent": lent}
        jobs.append(job(9, (), uid=companion, state="PENDING", **named))
    shown = crowded(own=own, jobs=tuple(jobs), spares=memory, reservations=there)
    asks = actions(shown, AskForGift, Config())
    assert [ask.event for ask in asks] == ([GiftEvent.END] if ends else [])


def test_each_event_of_a_gift_leads_on() -> None:
    with pytest.raises(IllegalTransition, match="none does not know 'offered'"):
        next_gift_state(GiftState.NONE, GiftEvent.OFFERED)
    assert {event for _, event in GIFT_TABLE} == set(GiftEvent)
    for state in GiftState:
        assert state.is_open == any((state, e) in GIFT_TABLE for e in GiftEvent if e != "make")


class GiftSlurm(FakeReservations):
    """Slurm's reservations with jobs."""

    def __init__(self, *known: Any, fault: Exception | None = None) -> None:
        super().__init__(fault)
        self.known = {one.id: one for one in known}
        self.put: list[tuple[int, str]] = []

    def give_nodes(self, name: str, nodes: Any, user: str) -> None:
        self.keep_nodes(name, nodes, user)

    def put_job_in(self, job_id: int, name: str) -> None:
        self.put.append((job_id, name))
        self.known[job_id] = msgspec.structs.replace(self.known[job_id], reservation=name)

    def exchange_requests(self, taker: Any, nodes: int) -> tuple[int, ...]:
        return tuple(one.id for one in self.known.values() if one.state == "PENDING")

    def jobs(self) -> tuple[Any, ...]:
        return tuple(self.known.values())

    def delete_reservation(self, name: str) -> None:
        assert all(one.reservation != name for one in self.known.values())
        super().delete_reservation(name)


def test_a_gift_is_made_offered_and_ended(tmp_path: Path) -> None:
    snapshot = lossy()
    journal, client = Journal(tmp_path / "journal.db"), GiftSlurm(*snapshot.jobs.values())
    acts = SpareActs(client, journal, FakeClock())  # type: ignore[arg-type]
    (make,) = gifts_of(snapshot)
    acts.ask_for_gift(snapshot, make)
    known = journal.spares().gifts[7]
    assert known.state is GiftState.OFFERED and client.put == [(9, known.name)]
    assert client.shown[known.name].terms == "Users=1000"
    shown = lossy(gift=known, shown=tuple(client.shown.values()))
    acts.ask_for_gift(shown, AskForGift(known, GiftEvent.END, "taken", is_taken=True))
    assert client.shown == {} and client.put[1:] == [(9, "")]
    after = journal.spares().gifts[7]
    assert (after.state, after.tries) == (GiftState.ENDING, 0)
    journal.close()


def test_a_pending_job_that_is_no_request_gets_nothing(tmp_path: Path) -> None:
    snapshot = lossy()
    (make,) = gifts_of(snapshot)
    journal, client = Journal(tmp_path / "journal.db"), GiftSlurm(snapshot.jobs[7])
    clock = FakeClock()
    acts = SpareActs(client, journal, clock)  # type: ignore[arg-type]
    acts.ask_for_gift(snapshot, make)
    assert client.shown == {} and journal.spares().gifts == {}
    client.known[9] = snapshot.jobs[9]
    acts.ask_for_gift(snapshot, make)
    assert client.put == []  # it has only just been looked for
    clock.pass_time(0.5)
    acts.ask_for_gift(snapshot, make)
    assert [number for number, _ in client.put] == [9]
    journal.close()


def test_a_companion_has_the_spare_in_place_of_its_job() -> None:
    """Slurm cannot grow a job with GRES."""
    gpus = job(7, ("n1",), partition="main", gres="gpu:2")
    (ask,) = gifts_of(lossy(own=gpus))
    assert ask.gift.spares == ("n3",)
    there = (Reservation(GIFT.name, ("n3",), 1.0, TERMS),)
    beside = job(9, ("n3",), partition="main", reservation=GIFT.name)
    (taken,) = gifts_of(lossy(beside, gift=GIFT, shown=there, own=gpus))
    assert (taken.event, taken.is_taken) == (GiftEvent.END, True)


def test_a_gift_that_slurm_refuses_is_ended(tmp_path: Path) -> None:
    snapshot = lossy()
    journal, client = (
        Journal(tmp_path / "journal.db"),
        GiftSlurm(*snapshot.jobs.values(), fault=SlurmError("busy")),
    )
    acts = SpareActs(client, journal, FakeClock())  # type: ignore[arg-type]
    with pytest.raises(SlurmError):
        acts.ask_for_gift(snapshot, gifts_of(snapshot)[0])
    assert journal.spares().gifts[7].state is GiftState.ENDING
    journal.close()
