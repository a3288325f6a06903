"""Decide: which nodes are marked, and what holds a mark back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from worlds import (
    MARKED,
    NOW,
    SICK,
    WAITING,
    actions,
    agent,
    config,
    dead,
    decision,
    finding,
    incident,
    job,
    node,
    probes,
    supervised,
    world,
)

from slurm_resilience.controller import actions as act
from slurm_resilience.controller.decide import breaker, marking
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.journal.records import (
    BreakerState,
    Fault,
    JournalMemory,
    PendingRequeue,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REPLACE
from slurm_resilience.slurm.companion_job import with_companions

# -- marking ----------------------------------------------------------------------------------


def test_all_well_is_nothing_to_do() -> None:
    said = decision(world(node(), agents=(agent(),)))
    assert said.actions == ()
    assert said.sentence == "7 nodes: nothing to do"


def test_a_sick_node_is_failed_and_its_jobs_go_on() -> None:
    seen = world(node(state="ALLOCATED"), jobs=(job(),), watched=(supervised(),), agents=(SICK,))
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.state, mark.action, mark.shrink, mark.requeued) == ("fail", REPLACE, (), ())


def test_a_dead_node_goes_down_after_its_jobs_were_shrunk() -> None:
    survivor = job(7, ("n2", "n1"))
    seen = world(node(state="ALLOCATED"), jobs=(survivor,), watched=(supervised(),), **dead())
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.state, mark.action) == ("down", REPLACE)
    assert mark.shrink == (act.ShrinkJob(7, ("n2",)),)
    assert mark.requeued == ()


def test_nodes_that_die_together_leave_the_job_in_one_change() -> None:
    silent = {name: probes("silent", "silent") for name in ("n1", "n2")}
    seen = world(
        node(state="ALLOCATED"),
        node("n2", state="ALLOCATED"),
        jobs=(job(7, ("n3", "n1", "n2")),),
        watched=(supervised(),),
        agents=(agent("n1", silence=6.0), agent("n2", silence=6.0)),
        probes=silent,
    )
    marks = actions(seen, act.MarkNode)
    assert [mark.shrink for mark in marks] == [(act.ShrinkJob(7, ("n3",)),)] * 2


@pytest.mark.parametrize(
    ("the_job", "more"),
    [
        (job(nodes=("n1", "n2")), {}),
        (job(nodes=("n2", "n1"), gres="gpu:2"), {}),
        (job(nodes=("n1",)), {}),
        (job(nodes=("n2", "n1")), {"permits_expansion": False}),
    ],
    ids=["it is the batch host", "GRES", "the only node", "the site forbids it"],
)
def test_a_job_that_cannot_be_shrunk_is_requeued_and_started_at_once(
    the_job: Any, more: dict[str, Any]
) -> None:
    seen = world(
        node(state="ALLOCATED"), jobs=(the_job,), watched=(supervised(),), **dead(), **more
    )
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.shrink, mark.requeued) == ((), (7,))


@pytest.mark.parametrize(("size", "keeps"), [(2, ("n2", "n3")), (3, ()), (0, ())])
def test_a_job_with_spares_loses_a_node_also_with_gres(size: int, keeps: tuple[str, ...]) -> None:
    """It never has to grow again; without a spare it is requeued, with all of its nodes."""
    entry = msgspec.structs.replace(supervised(), size=size)
    the_job = job(nodes=("n2", "n1", "n3"), gres="gpu:2")
    seen = world(node(state="ALLOCATED"), jobs=(the_job,), watched=(entry,), **dead())
    (mark,) = actions(seen, act.MarkNode)
    shrink = (act.ShrinkJob(7, keeps),) if keeps else ()
    assert (mark.shrink, mark.requeued) == (shrink, () if keeps else (7,))


def test_gres_on_any_node_of_the_job_forbids_a_swap() -> None:
    with_gpu = node("n2", "ALLOCATED", gres="gpu:2")
    the_job = job(nodes=("n2", "n1"))
    seen = world(
        node(state="ALLOCATED"), with_gpu, jobs=(the_job,), watched=(supervised(),), **dead()
    )
    assert not marking.can_shrink(seen, the_job, "n1")


def test_a_job_is_not_made_smaller_while_a_listing_lacks_one_of_its_nodes() -> None:
    """It may be the one with the GPU."""
    the_job = job(nodes=("n2", "n1"))
    seen = world(
        node(state="ALLOCATED"),
        jobs=(the_job,),
        watched=(supervised(),),
        agents=(*dead()["agents"], agent("n2")),
        probes=dead()["probes"],
    )
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.shrink, mark.requeued) == ((), (7,))


def test_jobs_that_did_not_ask_do_not_die_by_us_sooner_than_by_slurm() -> None:
    def seen(silence: float, **more: Any) -> ClusterSnapshot:
        others = (job(7, ("n2", "n1")),)
        return world(node(state="ALLOCATED"), jobs=others, **dead(silence=silence), **more)

    # Slurm may reach the node where sresctld does not.
    assert actions(seen(9999.0), act.MarkNode) == []
    is_down = node(state="DOWN+NOT_RESPONDING", reason="Not responding", reason_by="slurm")
    (mark,) = actions(world(is_down, **dead(silence=301.0)), act.MarkNode)
    assert (mark.shrink, mark.requeued) == ((), ())
    own = config(detect={"dead_after_unsupervised": 30.0})
    assert actions(seen(29.0), act.MarkNode, own) == []
    assert len(actions(seen(31.0), act.MarkNode, own)) == 1


def test_a_companion_of_a_supervised_job_does_not_wait_for_slurm() -> None:
    main, beside = job(7, ("n2",)), job(8, ("n1",))
    named = {"restarts": 0, "uid": main.uid, "companion_of": (7, 0)}
    beside = msgspec.structs.replace(beside, **named)
    watched = supervised(7)
    jobs = tuple(with_companions({7: main, 8: beside}).values())
    seen = world(node(state="ALLOCATED"), jobs=jobs, watched=(watched,), **dead())
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.node, mark.state, mark.shrink, mark.requeued) == ("n1", "down", (), ())
    # Named so by a user whose job has no supervisor: it is left to Slurm.
    seen = world(node(state="ALLOCATED"), jobs=jobs, **dead())
    assert actions(seen, act.MarkNode) == []


def test_one_job_that_did_not_ask_keeps_its_node_from_down_and_the_others_are_told() -> None:
    both = (job(7, ("n2", "n1")), job(8, ("n1",)))
    seen = world(node(state="MIXED"), jobs=both, watched=(supervised(7),), **dead())
    assert actions(seen, act.MarkNode) == []
    told = actions(seen, act.NotifySupervisor)
    assert [(tell.job, tell.node, tell.kind) for tell in told] == [(7, "n1", "dead")]
    assert decision(seen).left == {"n1"}


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING"])
def test_a_job_that_ends_or_waits_keeps_no_node(state: str) -> None:
    seen = world(node(state="DOWN+COMPLETING"), jobs=(job(7, ("n1",), state=state),), **dead())
    assert len(actions(seen, act.MarkNode)) == 1


def test_a_node_that_is_busy_with_what_is_not_listed_is_not_set_down() -> None:
    assert actions(world(node(state="ALLOCATED"), **dead()), act.MarkNode) == []


def test_a_job_that_may_not_be_requeued_is_not_followed() -> None:
    for the_job in (job(requeue=False), job(is_batch=False, nodes=("n1",))):
        seen = world(node(state="ALLOCATED"), jobs=(the_job,), watched=(supervised(),), **dead())
        assert actions(seen, act.MarkNode)[0].requeued == ()


def test_an_administrators_reason_stays_when_its_node_dies() -> None:
    busy = node(state="ALLOCATED+DRAIN", reason="new disk")
    seen = world(busy, jobs=(job(),), watched=(supervised(),), **dead())
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.state, mark.action) == ("down", "")


def test_dead_while_failing_and_busy_goes_down_within_the_same_incident() -> None:
    known = incident(kind="sick", opened=NOW - 400)
    lost = node(state="ALLOCATED+FAIL", reason=REPLACE)
    seen = world(lost, jobs=(job(),), watched=(supervised(),), incidents=(known,), **dead())
    (mark,) = actions(seen, act.MarkNode)
    assert mark.state == "down"
    assert actions(seen, act.StartReplacement) == []


@pytest.mark.parametrize("state", [s for s in NodeState if s.is_in_repair])
def test_silence_during_a_replacement_is_normal(state: NodeState) -> None:
    seen = world(MARKED, incidents=(incident(state=state),), **dead())
    assert actions(seen, act.MarkNode) == []


# -- what holds it back -----------------------------------------------------------------------


def lost_nodes(count: int, others: int, **more: Any) -> ClusterSnapshot:
    names = [f"n{i}" for i in range(1, count + 1)]
    return world(
        *[node(name) for name in names],
        agents=tuple(agent(name, silence=6.0) for name in names),
        probes={name: probes("silent", "silent") for name in names},
        others=others,
        **more,
    )


@pytest.mark.parametrize(
    ("count", "others", "marks"),
    [(2, 1, 2), (3, 1, 0), (2, 6, 2), (3, 6, 0), (2, 200, 2), (3, 200, 0)],
)
def test_too_many_at_once_are_not_marked(count: int, others: int, marks: int) -> None:
    """A larger cluster allows no more of them."""
    seen = lost_nodes(count, others)
    assert len(actions(seen, act.MarkNode)) == marks
    assert bool(actions(seen, act.RaiseAlarm)) == (marks == 0)


def faults(*names: str, ago: float = 60.0, **more: Any) -> dict[str, Fault]:
    known: dict[str, Any] = {"cause": "", "partitions": (), "is_over": True}
    return {name: Fault(name, began=NOW - ago, **(known | more)) for name in names}


def test_a_silent_node_that_cannot_be_probed_is_an_alarm_and_no_more() -> None:
    """Its name is gone from DNS, say."""
    seen = world(node(), agents=(agent(silence=90.0),))
    assert actions(seen, act.MarkNode) == []
    (alarm,) = actions(seen, act.RaiseAlarm)
    assert "cannot be probed" in alarm.text and alarm.node == "n1"


def test_those_that_failed_a_moment_ago_count_whatever_became_of_them() -> None:
    assert actions(lost_nodes(1, 6, faults=faults("y1", "y2")), act.MarkNode) == []
    older = faults("y1", "y2", ago=121.0)
    assert len(actions(lost_nodes(1, 6, faults=older), act.MarkNode)) == 1
    within_an_hour = faults(*(f"y{i}" for i in range(8)), ago=3599.0)
    assert actions(lost_nodes(1, 6, faults=within_an_hour), act.MarkNode) == []


def test_a_partition_and_a_check_have_limits_of_their_own() -> None:
    generous = {"nodes_at_once": 50, "nodes_per_hour": 50}
    of_gpu = faults("y1", "y2", partitions=("gpu",))
    here = {"n1": msgspec.structs.replace(node(), partitions=("gpu",))}
    settings_ = config(breaker=generous)
    seen = lost_nodes(1, 6, faults=of_gpu)
    assert len(actions(seen, act.MarkNode, settings_)) == 1
    seen = msgspec.structs.replace(seen, nodes=dict(seen.nodes) | here)
    assert actions(seen, act.MarkNode, settings_) == []
    same = faults("y1", "y2", "y3", "y4", cause="xid 79", ago=1000.0)
    for code, marks in (("79", 0), ("64", 1)):
        sick = agent(findings=(finding(code=code),))
        seen = world(node(), agents=(sick,), faults=same)
        assert len(actions(seen, act.MarkNode, settings_)) == marks


def test_a_fault_that_is_over_is_forgotten_after_an_hour() -> None:
    old = faults("y1", ago=3600.0)
    said = decision(world(node(), agents=(agent(),), faults=old))
    assert said.notes == (act.NoteFault(old["y1"], is_forgotten=True),)
    assert said.snapshot.memory.faults == {}


def test_a_storm_is_one_alarm_that_follows_it() -> None:
    first = lost_nodes(3, 1)
    said = decision(first)
    (alarm,) = [a for a in said.actions if isinstance(a, act.RaiseAlarm)]
    known = said.snapshot
    assert known.memory.breaker.is_tripped
    more = lost_nodes(40, 1, faults=known.memory.faults, breaker=known.memory.breaker, now=NOW + 1)
    (later,) = actions(more, act.RaiseAlarm)
    assert later.key == alarm.key and later.text != alarm.text
    assert len(later.text) < 500


def test_a_tripped_breaker_still_moves_supervised_jobs_off_dead_nodes() -> None:
    names = [f"n{i}" for i in range(1, 7)]
    jobs = tuple(job(i, (name,)) for i, name in enumerate(names[:5], 1))
    seen = world(
        *[node(name, "ALLOCATED" if name != "n6" else "IDLE") for name in names],
        jobs=jobs,
        watched=tuple(supervised(i, (name,)) for i, name in enumerate(names[:4], 1)),
        agents=tuple(agent(name, silence=6.0) for name in names),
        probes={name: probes("silent", "silent") for name in names},
    )
    # n5 has a job of its own; n6 would be offered to those that move.
    assert [mark.node for mark in actions(seen, act.MarkNode)] == ["n6", *names[:4]]
    waiting = tuple(incident(name, NodeState.EMPTY, id=i) for i, name in enumerate(names, 1))
    marked = msgspec.structs.replace(
        seen,
        jobs={},
        nodes={name: node(name, "DOWN", REPLACE) for name in names},
        incidents={known.node: known for known in waiting},
        memory=JournalMemory(faults=faults(*names, is_over=False)),
    )
    settings_ = config(replace={"silent_for": 5.0})
    assert actions(marked, act.StartReplacement, settings_) == []


def test_nodes_of_one_switch_are_counted_by_themselves() -> None:
    """Over an hour, and where they are too few for the other limits."""
    known = faults("x3", ago=1500.0, domain="s1") | faults("x4", ago=900.0, domain="s1")
    for behind in ("s1", "s2"):
        seen = lost_nodes(1, 6, faults=known, domains={"n1": behind})
        said = decision(seen, config(breaker={"switch_per_hour": 2}))
        assert said.snapshot.memory.faults["n1"].domain == behind
        assert said.snapshot.memory.breaker.is_tripped == (behind == "s1")
    text = said.snapshot.memory.breaker.text
    assert "s1" not in text
    tripped = decision(
        lost_nodes(1, 6, faults=known, domains={"n1": "s1"}),
        config(breaker={"switch_per_hour": 2}),
    )
    assert "3 nodes of one switch or block (s1) failed within an hour" in (
        tripped.snapshot.memory.breaker.text
    )


@pytest.mark.parametrize(
    ("with_it", "among", "trips"), [(2, 7, True), (3, 7, True), (4, 7, False), (7, 7, False)]
)
def test_nodes_with_a_new_driver_are_counted_by_themselves(
    with_it: int, among: int, trips: bool
) -> None:
    """Not those with a driver that most have: that is no reason for which some fail."""
    versions = dict.fromkeys(("n1", *(f"x{i}" for i in range(1, with_it))), ("nvidia 570.1",))
    known = faults("x7", ago=1500.0, drivers=("nvidia 570.1",))
    known |= faults("x8", ago=900.0, drivers=("nvidia 570.1",))
    seen = lost_nodes(1, among - 1, faults=known)
    agents = {
        name: msgspec.structs.replace(view, drivers=versions.get(name, ("nvidia 535.9",)))
        for name, view in seen.agents.items()
    }
    seen = msgspec.structs.replace(seen, agents=agents)
    said = decision(seen, config(breaker={"driver_per_hour": 2}))
    assert said.snapshot.memory.breaker.is_tripped == trips
    expected = ("nvidia 570.1",) if trips else ()
    assert said.snapshot.memory.faults["n1"].drivers == expected
    if trips:
        text = "3 nodes with a driver that most do not have (nvidia 570.1) failed within an hour"
        assert text in said.snapshot.memory.breaker.text


def test_what_a_storm_left_counts_once_more_when_the_breaker_closes() -> None:
    tripped = BreakerState(NOW - 700.0, NOW - 601.0, "3 nodes")
    left = faults("n1", "n2", ago=700.0, is_over=False)
    said = decision(lost_nodes(2, 6, faults=left, breaker=tripped))
    memory = said.snapshot.memory
    assert not memory.breaker.is_tripped
    assert [mark.node for mark in said.actions if isinstance(mark, act.MarkNode)] == ["n1", "n2"]
    # They were marked now: a third one within the window is one too many.
    more = lost_nodes(3, 6, faults=memory.faults, breaker=memory.breaker, now=NOW + 1.0)
    assert decision(more).snapshot.memory.breaker.is_tripped
    # The limit of a partition holds for those that are left as well.
    of_gpu = faults("n1", "n2", ago=700.0, is_over=False, partitions=("gpu",))
    seen = lost_nodes(2, 6, faults=of_gpu, breaker=tripped)
    one = config(breaker={"partition_at_once": 1})
    assert decision(seen, one).snapshot.memory.breaker.is_tripped


def test_faults_that_a_pause_kept_from_marks_count_as_new_at_its_end() -> None:
    """They are marked together then, however far apart they began."""
    said = decision(
        lost_nodes(2, 6, paused="a switch is exchanged", faults=faults("n1", ago=900.0))
    )
    held = said.snapshot.memory.faults
    assert all(fault.waits_for_pause for fault in held.values())
    said = decision(lost_nodes(2, 6, faults=held, now=NOW + 600.0))
    assert [mark.node for mark in said.actions if isinstance(mark, act.MarkNode)] == ["n1", "n2"]
    again = said.snapshot.memory.faults
    assert {(fault.began, fault.waits_for_pause) for fault in again.values()} == {
        (NOW + 600.0, False)
    }
    three = decision(lost_nodes(3, 6, faults=again, now=NOW + 660.0))
    assert three.snapshot.memory.breaker.is_tripped
    # Three that failed hours apart are three at once for those who mark them.
    apart = faults("n1", "n2", ago=900.0, is_over=False, waits_for_pause=True)
    assert decision(lost_nodes(3, 6, faults=apart)).snapshot.memory.breaker.is_tripped
    # What a person has answered stays so, and what is marked was counted.
    answered = BreakerState(reset_at=NOW - 800.0)
    said = decision(lost_nodes(3, 6, faults=apart, breaker=answered))
    assert not said.snapshot.memory.breaker.is_tripped
    marked = world(
        MARKED, incidents=(incident(),), faults=faults("n1", is_over=False), paused="x", **dead()
    )
    assert not decision(marked).snapshot.memory.faults["n1"].waits_for_pause


def test_a_storm_marks_no_empty_nodes_for_jobs_that_look_for_none() -> None:
    """A job that ends, runs again, or was made smaller by its owner needs no node of the storm."""
    names = [f"n{i}" for i in range(1, 5)]
    entry = msgspec.structs.replace(supervised(9, ("m1", "m2")), size=2)
    at_nine = job(9, ("m1", "m2"))

    def marked(the_job: Any, state: str = "IDLE", **more: Any) -> list[str]:
        seen = world(
            *[node(name, state) for name in names],
            *[node(name, "ALLOCATED") for name in ("m1", "m2")],
            jobs=(the_job,),
            agents=(*[agent(name, silence=6.0) for name in names], agent("m1"), agent("m2")),
            probes={name: probes("silent", "silent") for name in names},
            **({"watched": (entry,)} | more),
        )
        return [mark.node for mark in actions(seen, act.MarkNode)]

    replace_ = msgspec.structs.replace
    assert marked(replace_(at_nine, state="COMPLETING")) == []
    assert marked(replace_(at_nine, nodes=("m1",))) == []
    requeue = PendingRequeue(9, "its node died", False, 0, NOW - 1.0)
    assert marked(replace_(at_nine, restarts=1), pending_requeues={9: requeue}) == []
    assert (
        marked(replace_(at_nine, state="PENDING", nodes=()), pending_requeues={9: requeue}) == names
    )
    lost = (replace_(entry, lost=("m2",)),)
    assert marked(replace_(at_nine, nodes=("m1",)), watched=lost) == names
    # Any user may ask for a requeue. It counts where the job has to leave a node, or has left one.
    asked = PendingRequeue(9, "a node of mine died", True, 0, NOW - 1.0)
    assert marked(at_nine, pending_requeues={9: asked}) == []
    waits = replace_(at_nine, state="PENDING", nodes=())
    assert marked(waits, pending_requeues={9: asked}) == []
    had_one = (replace_(entry, nodes=("n1", "m2")),)
    assert marked(waits, watched=had_one, pending_requeues={9: asked}) == names
    # Slurm offers no node that is DOWN.
    known = faults(*names, is_over=False)
    assert marked(replace_(at_nine, nodes=("m1",)), "DOWN", watched=lost, faults=known) == []


def test_a_node_goes_down_only_by_a_fresh_probe() -> None:
    old = dead(silence=60.0) | {"probes": {"n1": probes("silent", "silent", ago=6.0)}}
    seen = world(node(), **old)
    assert actions(seen, act.MarkNode) == []
    assert act.ProbeNode("n1", is_urgent=True) in decision(seen).actions
    assert len(actions(world(node(), **dead()), act.MarkNode)) == 1
    # Slurm's picture is no younger where it takes seconds to answer.
    slow = world(node(), picture_age=9.0, **old)
    assert len(actions(slow, act.MarkNode)) == 1
    assert actions(world(node(), picture_age=0.5, **old), act.MarkNode) == []
    # It frees no job: what Slurm has DOWN already is marked at once.
    is_down = world(node(state="DOWN", reason="Not responding"), **old)
    assert len(actions(is_down, act.MarkNode)) == 1


def test_the_breaker_closes_when_the_storm_is_over_for_a_while_or_a_person_says_so() -> None:
    tripped = BreakerState(NOW - 700.0, NOW - 599.0, "3 nodes")
    quiet = world(node(), agents=(agent(),), breaker=tripped)
    assert decision(quiet).snapshot.memory.breaker.is_tripped
    later = msgspec.structs.replace(quiet, now=NOW + 2)
    closed = decision(later)
    assert not closed.snapshot.memory.breaker.is_tripped
    assert act.NoteBreaker(closed.snapshot.memory.breaker) in closed.notes
    # Three that stay dead are the same storm, however old.
    old = faults("n1", "n2", "n3", ago=7000.0, is_over=False)
    lasting = lost_nodes(3, 6, faults=old, breaker=tripped, now=NOW + 2)
    assert decision(lasting).snapshot.memory.breaker.is_tripped
    assert actions(lasting, act.MarkNode) == []
    reset = JournalMemory(faults=old, breaker=breaker.reset(tripped, NOW))
    answered = msgspec.structs.replace(lasting, memory=reset)
    assert len(actions(answered, act.MarkNode)) == 3


def test_nodes_that_slurm_had_down_for_long_keep_no_other_from_being_marked() -> None:
    off = [node(f"o{i}", "DOWN+NOT_RESPONDING", "Not responding") for i in range(5)]
    tried = {known.name: probes("silent", "silent") for known in off}
    new = dead()
    seen = world(node(), *off, agents=new["agents"], probes=tried | new["probes"])
    assert [mark.node for mark in actions(seen, act.MarkNode)] == ["n1"]
    assert [alarm.key for alarm in actions(seen, act.RaiseAlarm)] == ["long-down"]


def test_of_nodes_that_slurm_had_down_those_that_are_back_already_count_too() -> None:
    """Two were marked, and were replaced within the window; the third one waits for its end."""
    off = node("o3", "DOWN+NOT_RESPONDING", "Not responding")
    tried = {"o3": probes("silent", "silent")}
    lately = tuple((NOW - 90.0, name) for name in ("x1", "x2"))
    seen = world(off, probes=tried, deaths=lately)
    assert actions(seen, act.MarkNode) == []
    assert [alarm.key for alarm in actions(seen, act.RaiseAlarm)] == ["long-down"]
    earlier = tuple((NOW - 130.0, name) for name in ("x1", "x2"))
    later = world(off, probes=tried, deaths=earlier)
    assert [mark.node for mark in actions(later, act.MarkNode)] == ["o3"]


def test_a_node_whose_sresd_was_missing_for_long_gets_its_time_all_the_same() -> None:
    """Its slurmd answered a moment ago; then it was rebooted by hand."""
    down = node(state="DOWN+FAIL", reason=REPLACE)
    hers = incident(state=NodeState.EMPTY, marked=NOW - 5)
    for silent_for, starts in ((20.0, 0), (301.0, 1)):
        tried = (*probes("answered", ago=silent_for), *probes("silent", "silent"))
        seen = world(down, agents=(agent(silence=3600.0),), probes={"n1": tried}, incidents=(hers,))
        found = actions(seen, act.StartReplacement, config(replace=WAITING))
        assert len(found) == starts


def test_a_node_that_died_after_its_sresd_said_goodbye_does_not_wait_for_ever() -> None:
    hers = incident(state=NodeState.EMPTY, marked=NOW - 5000)
    stopped = agent(silence=4000.0, said_goodbye=True)
    tried = {"n1": (*probes("silent", ago=301.0), *probes("silent", "silent"))}
    for state, starts in (("DOWN+FAIL", 0), ("DOWN+FAIL+NOT_RESPONDING", 1)):
        lost = node(state=state, reason=REPLACE)
        seen = world(lost, agents=(stopped,), probes=tried, incidents=(hers,))
        found = actions(seen, act.StartReplacement, config(replace=WAITING))
        assert len(found) == starts


def test_ten_dead_nodes_that_a_person_asks_for_are_no_blast() -> None:
    names = [f"n{i}" for i in range(10)]
    seen = world(
        *[node(name, "IDLE+FAIL", REPLACE) for name in names],
        agents=tuple(agent(name, silence=6.0) for name in names),
        probes={name: probes("silent", "silent") for name in names},
    )
    assert {a.node for a in actions(seen, act.OpenRequested)} == set(names)


def test_mode_none_says_it_and_does_nothing() -> None:
    quiet = config(recovery={"mode": "none"})
    for seen in (lost_nodes(1, 6), world(MARKED, agents=(agent(),))):
        kinds = {type(action) for action in decision(seen, quiet).actions}
        assert kinds == {act.RaiseAlarm}


def test_a_pause_stops_everything_but_looking() -> None:
    seen = lost_nodes(1, 6, paused="maintenance", incidents=(incident("x1"),))
    said = decision(seen)
    assert {type(action) for action in said.actions} <= {act.ProbeNode}
    assert said.sentence == "paused (maintenance): nothing is done"


def test_a_near_miss_is_an_alarm_with_its_correction_and_no_act() -> None:
    seen = world(node(state="IDLE+FAIL", reason="action:replace"), agents=(agent(),))
    (alarm,) = decision(seen).actions
    assert isinstance(alarm, act.RaiseAlarm) and "write exactly Action:Replace" in alarm.text
