"""Decide: every rule, and what may never be decided."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import (
    CONFIG,
    NOW,
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
from slurm_resilience.controller.decide.decision import decide
from slurm_resilience.controller.decide.node_events import REASON_GONE
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState, SideAct, step
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.controller.journal.records import (
    BreakerState,
    Fault,
    JournalMemory,
    PendingRequeue,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, REPLACE, Node, Severity
from slurm_resilience.replace.repair_order import Run
from slurm_resilience.slurm.companion_job import with_companions

SICK = agent(findings=(finding(),))
MARKED = node(state="IDLE+FAIL", reason=REPLACE)


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


WAITING = {"silent_for": 300.0, "program": ("replace-node",)}


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


# -- requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [REPLACE, REBOOT])
def test_a_request_opens_an_incident_once(action: str) -> None:
    asked = node(state="IDLE+FAIL", reason=action)
    (adopt,) = actions(world(asked, agents=(agent(),)), act.OpenRequested)
    assert adopt.action == action
    known = incident(action=action)
    assert actions(world(asked, agents=(agent(),), incidents=(known,)), act.OpenRequested) == []


def test_a_request_that_was_given_up_waits_for_a_newer_one() -> None:
    tried = incident(state=NodeState.QUARANTINED, reason_at=MARKED.reason_at)
    assert actions(world(MARKED, agents=(agent(),), at_rest=(tried,)), act.OpenRequested) == []
    again = msgspec.structs.replace(MARKED, reason_at="2026-01-02T00:00:00")
    assert len(actions(world(again, agents=(agent(),), at_rest=(tried,)), act.OpenRequested)) == 1


def test_a_node_given_up_stays_so_when_it_dies() -> None:
    tried = incident(state=NodeState.QUARANTINED, reason_at=MARKED.reason_at)
    seen = world(MARKED, at_rest=(tried,), **dead())
    assert decision(seen).actions == ()


# -- an incident's way, also after a restart in the middle -------------------------------------


def advance(seen: ClusterSnapshot, settings: Any = CONFIG) -> act.Transition:
    (found,) = actions(seen, act.Transition, settings)
    return found  # type: ignore[no-any-return]


REBOOT_FAILED = f"{REBOOT} : reboot issued : reboot timed out"
"""The Reason of a node that Slurm could not reboot."""


def test_slurms_words_behind_a_request_are_no_persons() -> None:
    """They stand there after a reboot by Slurm that failed, given up or to be tried again."""
    left = node("n1", "DOWN+FAIL", REBOOT_FAILED)
    tried = incident(state=NodeState.QUARANTINED, action=REBOOT, reason_at=left.reason_at)
    assert actions(world(left, agents=(agent(),), at_rest=(tried,)), act.Transition) == []
    again = incident(state=NodeState.EMPTY, action=REBOOT)
    seen = world(left, agents=(agent(),), incidents=(again,))
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.state, mark.action) == ("down", REBOOT)
    theirs = node("n1", "DOWN+FAIL", f"{REBOOT_FAILED}, RMA 4711")
    (taken,) = actions(world(theirs, agents=(agent(),), at_rest=(tried,)), act.Transition)
    assert taken.event is NodeEvent.TAKEN_OVER


@pytest.mark.parametrize(
    ("due", "seen", "kinds"),
    [
        ("the Reason", node("n1", "IDLE+FAIL+POWERING_UP"), [act.ContinueReplacement]),
        ("", node("n1", "IDLE+FAIL+POWERING_UP"), [act.Transition]),
        ("the Reason", node("n1", "IDLE+POWERING_UP"), [act.Transition]),
        ("power it up", node("n1", "IDLE+DRAIN+POWERED_DOWN", "RMA"), [act.Transition]),
        ("power it up", node("n1", "IDLE+FAIL+POWERED_DOWN", REPLACE), [act.ContinueReplacement]),
    ],
)
def test_a_repair_goes_on_by_its_own_acts(
    due: str, seen: Node, kinds: list[type[act.Action]]
) -> None:
    """A Reason that Slurm took away is no person's answer while the repair says so; all else is."""
    known = incident(state=NodeState.REPAIRING, attempts=1)
    run = {known.id: Run("running", next_act=due)}
    decided = decide(world(seen, incidents=(known,), runs=run), {}, CONFIG)
    found = [type(one) for one in decided.actions if getattr(one, "incident", 0) == known.id]
    assert found == kinds


def test_open_and_marked_in_slurm_goes_on() -> None:
    seen = world(MARKED, agents=(agent(),), incidents=(incident(state=NodeState.SUSPECT),))
    assert advance(seen).event is NodeEvent.MARKED


def test_open_and_still_dead_is_marked_now() -> None:
    seen = world(node(), incidents=(incident(state=NodeState.SUSPECT),), **dead())
    assert len(actions(seen, act.MarkNode)) == 1
    assert actions(seen, act.Transition) == []


def test_open_and_well_again_is_cancelled() -> None:
    seen = world(node(), agents=(agent(),), incidents=(incident(state=NodeState.SUSPECT),))
    assert advance(seen).event is NodeEvent.RECOVERED


def test_open_and_drained_by_a_person_is_left_to_the_person() -> None:
    drained = node(state="IDLE+DRAIN", reason="I look at it")
    seen = world(drained, agents=(agent(),), incidents=(incident(state=NodeState.SUSPECT),))
    assert advance(seen).event is NodeEvent.TAKEN_OVER


def test_a_node_that_slurm_forgot_ends_its_incident() -> None:
    gone = {"incidents": (incident("gone"),)}
    assert decision(world(**gone)).actions == ()
    assert decision(world(**gone)).notes == (act.NoteMissing("gone", NOW),)
    for ago, moves in ((59.0, 0), (60.0, 1)):
        seen = world(**gone, missing={"gone": NOW - ago})
        assert len(actions(seen, act.Transition)) == moves
    assert advance(seen).event is NodeEvent.REMOVED


def test_a_node_that_one_listing_lacked_goes_on_as_before() -> None:
    known, spoken = incident("n1", NodeState.REPAIRING, run_started=NOW), (agent(),)
    lacking = world(incidents=(known,), agents=spoken, runs={1: Run("running")})
    said = decision(lacking)
    assert (said.actions, said.notes) == ((), (act.NoteMissing("n1", NOW),))
    back = world(
        MARKED, incidents=(known,), agents=spoken, runs={1: Run("running")}, missing={"n1": NOW - 9}
    )
    said = decision(back)
    assert (said.actions, said.notes) == ((), (act.NoteMissing("n1", 0.0),))


def test_an_agent_is_forgotten_only_when_its_node_stays_away() -> None:
    for ago, dropped in ((5.0, 0), (61.0, 1)):
        seen = world(agents=(agent("gone"),), missing={"gone": NOW - ago})
        notes = [n for n in decision(seen).notes if isinstance(n, act.DropAgent)]
        assert len(notes) == dropped


def test_an_empty_node_that_a_job_came_to_and_that_died_moves_once() -> None:
    busy = node(state="ALLOCATED+FAIL", reason=REPLACE)
    known = incident(state=NodeState.EMPTY)
    gone = {"n1": probes("silent", "silent")}
    seen = world(
        busy,
        agents=(agent(silence=6.0),),
        incidents=(known,),
        probes=gone,
        jobs=(job(),),
        watched=(supervised(),),
    )
    assert [mark.node for mark in actions(seen, act.MarkNode)] == ["n1"]
    apply_to_table(seen, decision(seen).actions)


@pytest.mark.parametrize("state", [s for s in NodeState if s.is_coming_back])
def test_a_node_that_slurm_forgot_is_not_probed(state: NodeState) -> None:
    seen = world(incidents=(incident("gone", state=state),), missing={"gone": NOW - 61})
    assert actions(seen, act.ProbeNode) == []
    assert advance(seen).event is NodeEvent.REMOVED


def test_marked_without_work_is_replaced() -> None:
    for known in (incident(kind="requested"), incident(kind="sick")):
        seen = world(MARKED, agents=(SICK,), incidents=(known,))
        assert actions(seen, act.StartReplacement) == [act.StartReplacement("n1", 1)]
    seen = world(MARKED, incidents=(incident(),), **dead(silence=301.0))
    assert actions(seen, act.StartReplacement) == [act.StartReplacement("n1", 1)]


def test_without_room_on_the_disk_no_try_is_counted() -> None:
    """Its program would not be started, and after three of them a person would have to look."""
    known = incident(state=NodeState.EMPTY, kind="requested")
    seen = world(MARKED, agents=(SICK,), incidents=(known,), no_room="8 KiB are free")
    assert actions(seen, act.StartReplacement) == []
    (alarm,) = actions(seen, act.RaiseAlarm)
    assert "8 KiB are free" in alarm.text and alarm.key.startswith("no-room")


# -- life is looked at again before what cannot be undone --------------------------------------

EMPTY = incident(state=NodeState.EMPTY, attempts=1)


@pytest.mark.parametrize("kind", ["dead", "sick"])
def test_a_node_that_lives_again_is_validated_and_not_replaced(kind: str) -> None:
    known = msgspec.structs.replace(EMPTY, kind=kind)
    seen = world(MARKED, agents=(agent(),), incidents=(known,))
    assert actions(seen, act.StartReplacement) == []
    assert advance(seen).event is NodeEvent.CAME_BACK
    # Also long before the next try.
    later = msgspec.structs.replace(known, next_try=NOW + 1000)
    assert advance(world(MARKED, agents=(agent(),), incidents=(later,))).event is (
        NodeEvent.CAME_BACK
    )


@pytest.mark.parametrize(
    "more",
    [
        {"agents": (agent(reported=False),)},
        {"agents": (agent(steady=1.0),)},
        dead(silence=3.0),
        dead(silence=299.0),
        {"agents": (agent(silence=301.0),), "probes": {"n1": probes("silent", "silent", ago=3.0)}},
        {"agents": (agent(silence=301.0),), "probes": {"n1": probes("silent")}},
        {"agents": (agent(silence=301.0),), "probes": {"n1": probes("silent", "answered")}},
        {
            "agents": (agent(silence=301.0, said_goodbye=True),),
            "probes": {"n1": probes("silent", "silent")},
        },
        {"agents": (agent(silence=301.0, spoke=False),), "uptime": 5.0},
    ],
    ids=[
        "not told yet",
        "just back",
        "suspect",
        "not long enough",
        "an old look",
        "one look",
        "its port answers",
        "sresd was stopped",
        "we have just started",
    ],
)
@pytest.mark.parametrize("kind", ["dead", "sick"])
def test_what_is_not_known_for_certain_starts_no_replacement(
    kind: str, more: dict[str, Any]
) -> None:
    seen = world(MARKED, incidents=(msgspec.structs.replace(EMPTY, kind=kind),), **more)
    assert actions(seen, act.StartReplacement) == []
    assert actions(seen, act.Transition) == []


def test_a_maintenance_reservation_keeps_a_node_from_its_replacement() -> None:
    reserved = node(state="IDLE+FAIL+MAINTENANCE", reason=REPLACE)
    seen = world(reserved, agents=(SICK,), incidents=(EMPTY,))
    assert actions(seen, act.StartReplacement) == []
    busy = node(state="ALLOCATED+MAINTENANCE")
    assert actions(world(busy, agents=(SICK,), jobs=(job(),)), act.MarkNode) == []


def test_a_node_that_replacements_do_not_help_is_left_to_a_person() -> None:
    """Counted over its incidents."""
    known = incident(state=NodeState.EMPTY, kind="sick")
    for before, starts in ((2, 1), (3, 0)):
        history = tuple((NOW - 600.0, "n1") for _ in range(before))
        seen = world(MARKED, agents=(SICK,), incidents=(known,), starts=history)
        assert len(actions(seen, act.StartReplacement)) == starts
    assert advance(seen).event is NodeEvent.GAVE_UP


def test_the_hours_limit_is_one_alarm_that_names_who_waits() -> None:
    names = [f"n{i}" for i in range(1, 4)]
    begun = tuple((NOW - 600.0, f"y{i}") for i in range(CONFIG.replace.max_per_hour))
    seen = world(
        *[node(name, "IDLE+FAIL", REPLACE) for name in names],
        agents=tuple(agent(name, findings=(finding(),)) for name in names),
        incidents=tuple(
            incident(name, NodeState.EMPTY, id=i, kind="sick", opened=NOW - 5000.0)
            for i, name in enumerate(names, 1)
        ),
        starts=begun,
    )
    assert actions(seen, act.StartReplacement) == []
    (alarm,) = actions(seen, act.RaiseAlarm)
    assert "n1,n2,n3" in alarm.text and "replace.max_per_hour" in alarm.text
    fewer = msgspec.structs.replace(seen, memory=JournalMemory(starts=begun[:5]))
    assert actions(fewer, act.RaiseAlarm) == []


def test_a_replacement_that_waits_for_its_turn_only_is_no_alarm_of_its_own() -> None:
    """Its last probe is old because it is not its turn: that keeps no person busy."""
    waiting = incident(state=NodeState.EMPTY, opened=NOW - 5000.0)
    begun = tuple((NOW - 600.0, f"y{i}") for i in range(CONFIG.replace.max_per_hour))
    old = dead(silence=900.0) | {"probes": {"n1": probes("silent", "silent", ago=6.0)}}
    seen = world(node(state="DOWN", reason=REPLACE), incidents=(waiting,), starts=begun, **old)
    keys = [alarm.key for alarm in actions(seen, act.RaiseAlarm)]
    assert len(keys) == 1 and keys[0].startswith("per-hour-")
    assert act.ProbeNode("n1", is_urgent=True) not in decision(seen).actions


def test_a_node_that_a_person_has_just_resumed_is_given_its_time_to_come_back() -> None:
    known = incident(state=NodeState.EMPTY, opened=NOW - 5.0)
    silent = dead(silence=2000.0)
    down = node(state="DOWN", reason=REPLACE)
    assert len(actions(world(down, incidents=(known,), **silent), act.StartReplacement)) == 1
    for ago, starts in ((299.0, 0), (301.0, 1)):
        resumed: dict[str, Any] = {"released": {"n1": NOW - ago}}
        seen = world(down, incidents=(known,), **silent, **resumed)
        assert len(actions(seen, act.StartReplacement)) == starts


def test_a_silence_that_only_probes_know_of_begins_with_them() -> None:
    silent = node(state="ALLOCATED+NOT_RESPONDING")
    tried = {"n1": probes("silent", "silent", "silent")}
    seen = world(silent, probes=tried, jobs=(job(),))
    assert actions(seen, act.MarkNode) == []
    assert diagnose(seen, CONFIG)["n1"].silence == pytest.approx(2.5)


def test_a_node_is_looked_at_urgently_only_when_nothing_else_is_missing() -> None:
    names = [f"n{i}" for i in range(6)]
    later = msgspec.structs.replace(EMPTY, next_try=NOW + 5)
    tried = {"n1": probes("silent", "silent", ago=2.5)}
    gone = (agent(silence=301.0),)

    def urgent(seen: ClusterSnapshot) -> list[bool]:
        return [probe.is_urgent for probe in actions(seen, act.ProbeNode)]

    assert urgent(world(MARKED, agents=gone, incidents=(EMPTY,), probes=tried)) == [True]
    assert urgent(world(MARKED, agents=gone, incidents=(later,), probes=tried)) == [False]
    early = (agent(silence=30.0),)
    assert urgent(world(MARKED, agents=early, incidents=(EMPTY,), probes=tried)) == [False]
    fresh = {"n1": probes("silent", "silent", ago=0.5)}
    assert urgent(world(MARKED, agents=early, incidents=(EMPTY,), probes=fresh)) == []
    many = world(
        *[node(name, "DOWN", REPLACE) for name in names],
        agents=tuple(agent(name, silence=301.0) for name in names),
        incidents=tuple(incident(n, NodeState.EMPTY, id=i) for i, n in enumerate(names, 1)),
    )
    looks = actions(many, act.ProbeNode, config(replace={"max_running": 2}))
    # Last of all: the next decision rests on their answers.
    assert [probe.is_urgent for probe in looks] == [False, False, False, False, True, True]
    assert decision(many, config(replace={"max_running": 2})).actions[-2:] == tuple(looks[-2:])


@pytest.mark.parametrize("flag", ["DRAIN", "FAIL"])
def test_a_node_whose_reason_slurm_has_taken_away_stays_a_persons(flag: str) -> None:
    """It does so as it powers a node up, and leaves the person's drain."""
    held = incident(state=NodeState.HELD, kind="sick")
    powered_up = node(state=f"IDLE+{flag}")
    assert actions(world(powered_up, agents=(agent(),), at_rest=(held,)), act.Transition) == []
    assert actions(world(powered_up, agents=(SICK,), at_rest=(held,)), act.MarkNode) == []


@pytest.mark.parametrize("flag", ["DRAIN", "FAIL"])
def test_so_it_does_without_an_incident(flag: str) -> None:
    powered_up = node(state=f"IDLE+{flag}")
    seen = world(powered_up, agents=(SICK,))
    kept = msgspec.structs.replace(seen, memory=JournalMemory(kept=frozenset({"n1"})))
    assert actions(seen, act.MarkNode) != []
    assert actions(kept, act.NoteKept) == []
    assert actions(kept, act.MarkNode) == []


def test_a_persons_resume_holds_in_the_same_cycle() -> None:
    held = incident(state=NodeState.HELD, kind="sick")
    seen = world(node(), agents=(SICK,), at_rest=(held,))
    assert advance(seen).event is NodeEvent.RELEASED
    assert actions(seen, act.MarkNode) == []


@pytest.mark.parametrize("state", [NodeState.SET_ASIDE, NodeState.QUARANTINED])
def test_a_resume_while_sresctld_was_away_waits_for_the_findings_that_it_answers(
    state: NodeState,
) -> None:
    """Else they would be new when the node's sresd tells them again."""
    known = incident(state=state, kind="sick")
    where: dict[str, Any] = (
        {"at_rest": (known,)} if state is NodeState.QUARANTINED else {"incidents": (known,)}
    )
    silent = agent(spoke=False, reported=False)
    assert actions(world(node(), agents=(silent,), uptime=3.0, **where), act.Transition) == []
    for seen in (
        world(node(), agents=(agent(),), uptime=3.0, **where),
        world(node(), agents=(silent,), uptime=11.0, **where),
        world(node(), uptime=3.0, **where),
    ):
        assert advance(seen).event is NodeEvent.RELEASED
    kept: dict[str, Any] = {"kept": frozenset({"n1"}), "uptime": 3.0}
    assert decision(world(node(), agents=(silent,), **kept)).notes == ()
    assert decision(world(node(), agents=(agent(),), **kept)).notes != ()


def down_by_slurm(reason: str, state: str = "DOWN", **more: Any) -> Node:
    return node(state=state, reason=reason, reason_by="slurm", **more)


@pytest.mark.parametrize(
    ("the_node", "is_held"),
    [
        (down_by_slurm("bad fan : Not responding"), True),
        (down_by_slurm("bad fan : Not responding", stale_reason="bad fan"), False),
        (down_by_slurm("bad fan : Not responding", "DOWN+DRAIN", stale_reason="bad fan"), True),
        (down_by_slurm("bad fan : mine : Not responding", stale_reason="bad fan"), True),
        (down_by_slurm("bad fans : Not responding", stale_reason="bad fan"), True),
        (down_by_slurm("bad fan", stale_reason="bad fan"), True),
    ],
)
def test_a_reason_that_is_over_holds_no_node(the_node: Node, is_held: bool) -> None:
    """24.11 keeps a Reason at a node resume, and writes its own behind it."""
    found = diagnose(world(the_node, **dead(silence=400.0)), CONFIG)["n1"]
    assert (found.kind == "held") is is_held


def test_a_reason_is_over_once_its_node_was_seen_in_service() -> None:
    resumed_on_24_11 = node(reason="bad fan", reason_by="alice")
    assert decision(world(resumed_on_24_11)).notes == (act.NoteStale("n1", "bad fan"),)
    seen = msgspec.structs.replace(resumed_on_24_11, stale_reason="bad fan")
    assert decision(world(seen)).notes == ()
    # Given once more, it counts.
    again = node(state="IDLE+DRAIN", reason="bad fan", stale_reason="bad fan", reason_by="alice")
    assert act.NoteStale("n1", "") in decision(world(again)).notes
    blank = node(stale_reason="bad fan")
    assert decision(world(blank)).notes == (act.NoteStale("n1", ""),)


def test_a_persons_resume_answers_what_was_found_meanwhile() -> None:
    """The node has no incident: the person's drain came first."""
    drained = node(state="IDLE+DRAIN", reason="bad fan")
    taken = decision(world(drained, agents=(agent(),)))
    assert taken.notes == (act.NoteKept("n1", True),)
    kept: dict[str, Any] = {"agents": (SICK,), "kept": frozenset({"n1"})}
    assert decision(world(drained, **kept)).notes == ()
    said = decision(world(node(), **kept))
    answered = act.NoteAnswered("n1", {("boot-1", *finding().key): finding().at})
    # In this order: a kill between the two must not lose the answer.
    assert said.notes == (answered, act.NoteKept("n1", False))
    assert actions(world(node(), **kept), act.MarkNode) == []
    # A request in the place of the person's reason answers nothing.
    asked = decision(world(node(state="IDLE+FAIL", reason=REPLACE), **kept))
    assert asked.notes == (act.NoteKept("n1", False),)
    unclear = msgspec.structs.replace(drained, reason_unclear=True)
    assert decision(world(unclear, **kept)).notes == ()


def test_a_reason_that_cannot_be_read_keeps_a_node_like_a_persons() -> None:
    """It may be one: what was found until it is taken back is answered then."""
    drained = node(state="IDLE+DRAIN", reason=REPLACE, reason_unclear=True)
    taken = decision(world(drained, agents=(SICK,)))
    assert taken.notes == (act.NoteKept("n1", True),)
    assert decision(world(drained, agents=(SICK,), kept=frozenset({"n1"}))).notes == ()
    clear = msgspec.structs.replace(drained, reason_unclear=False, reason="Not responding")
    said = decision(world(clear, agents=(agent(),), kept=frozenset({"n1"})))
    assert said.notes == (act.NoteKept("n1", False),)


def test_an_answer_ends_when_the_check_finds_it_no_more() -> None:
    known = ("boot-1", "memory", "", "")
    answered: dict[str, Any] = {"acknowledged": {"n1": {known: 5.0}}}
    passed = msgspec.structs.replace(agent(), judged=("memory",), reported=True)
    said = decision(world(node(), agents=(passed,), **answered))
    assert said.notes == (act.DropAnswers("n1", (known,)),)
    found = (finding(check="memory"),)
    for other in (
        msgspec.structs.replace(passed, findings=found),
        msgspec.structs.replace(passed, judged=(), unjudged=("memory",)),
        msgspec.structs.replace(passed, reported=False),
        msgspec.structs.replace(passed, boot_id="boot-2"),
    ):
        notes = decision(world(node(), agents=(other,), **answered)).notes
        assert not any(isinstance(note, act.DropAnswers) for note in notes)


def test_a_person_who_asks_gets_a_living_node_replaced() -> None:
    known = msgspec.structs.replace(EMPTY, kind="requested")
    seen = world(MARKED, agents=(agent(),), incidents=(known,))
    assert len(actions(seen, act.StartReplacement)) == 1


def test_a_node_that_comes_and_goes_is_left_to_a_person() -> None:
    seen = world(MARKED, agents=(agent(),), incidents=(EMPTY,), flaps={"n1": 2})
    assert advance(seen).event is NodeEvent.CAME_BACK
    seen = world(MARKED, agents=(agent(),), incidents=(EMPTY,), flaps={"n1": 3})
    assert advance(seen).event is NodeEvent.GAVE_UP
    assert "came and went 4 times" in actions(seen, act.RaiseAlarm)[0].text


def test_a_node_without_sresd_that_answers_again_lives() -> None:
    answers = {"n1": probes("silent", "answered")}
    seen = world(MARKED, incidents=(EMPTY,), probes=answers)
    assert advance(seen).event is NodeEvent.CAME_BACK


def test_forty_that_beat_again_are_not_replaced() -> None:
    names = [f"n{i}" for i in range(40)]
    seen = world(
        *[node(name, "DOWN", REPLACE) for name in names],
        agents=tuple(agent(name) for name in names),
        incidents=tuple(incident(n, NodeState.EMPTY, id=i) for i, n in enumerate(names, 1)),
    )
    assert actions(seen, act.StartReplacement) == []
    assert {move.event for move in actions(seen, act.Transition)} == {NodeEvent.CAME_BACK}


@pytest.mark.parametrize("state", [s for s in NodeState if s.is_coming_back])
def test_a_node_that_came_back_by_itself_and_goes_again_is_no_failed_replacement(
    state: NodeState,
) -> None:
    known = incident(state=state, run_ended=NOW - 1000, resumed=NOW - 1000, is_flap=True)
    seen = world(MARKED, incidents=(known,), **dead(silence=61.0))
    if state is NodeState.VALIDATING:
        assert advance(seen).event is NodeEvent.GONE_AGAIN


def test_the_same_boot_is_good_enough_for_a_node_that_was_not_replaced() -> None:
    known = incident(
        state=NodeState.VALIDATING, run_ended=NOW - 10, is_flap=True, boot_before="boot-1"
    )
    tried = {"n1": probes("answered")}
    seen = world(MARKED, agents=(agent(),), incidents=(known,), probes=tried)
    assert len(actions(seen, act.ReturnNode)) == 1
    sick = world(MARKED, agents=(SICK,), incidents=(known,), probes=tried)
    assert actions(sick, act.ReturnNode) == []
    assert advance(sick).event is NodeEvent.GONE_AGAIN


@pytest.mark.parametrize("state", ["ALLOCATED+FAIL", "MIXED+FAIL", "DOWN+COMPLETING"])
def test_marked_with_work_waits(state: str) -> None:
    seen = world(node(state=state, reason=REPLACE), agents=(agent(),), incidents=(incident(),))
    assert actions(seen, act.StartReplacement) == []


def test_a_long_wait_for_jobs_raises_its_alarm_as_long_as_it_lasts() -> None:
    busy = node(state="ALLOCATED+FAIL", reason=REPLACE)
    for marked, alarmed, expected in (
        (NOW - 90000, False, 1),
        (NOW - 90000, True, 1),  # said before; still shown
        (NOW, False, 0),
    ):
        known = incident(marked=marked, alarmed=alarmed)
        seen = world(busy, agents=(agent(),), incidents=(known,))
        assert len(actions(seen, act.RaiseAlarm)) == expected


@pytest.mark.parametrize(
    ("changed", "event"),
    [
        (node(), NodeEvent.RELEASED),
        (node(state="IDLE+DRAIN", reason="I look at it"), NodeEvent.TAKEN_OVER),
        (node(state="IDLE+FAIL"), NodeEvent.RELEASED),
        (node(state="IDLE+FAIL", reason=REBOOT), NodeEvent.ASKED_ANEW),
    ],
)
@pytest.mark.parametrize("state", [s for s in NodeState if s.waits_for_repair])
def test_marked_and_answered_by_a_person(state: NodeState, changed: Any, event: NodeEvent) -> None:
    seen = world(changed, agents=(agent(),), incidents=(incident(state=state),))
    assert advance(seen).event is event
    assert not step(state, event).state.is_under_way
    assert actions(seen, act.StartReplacement) == []


def test_a_replacement_waits_for_its_backoff_its_turn_and_a_program() -> None:
    later = incident(next_try=NOW + 1, kind="requested")
    assert actions(world(MARKED, agents=(agent(),), incidents=(later,)), act.StartReplacement) == []
    requested = incident(kind="requested")
    running = tuple(incident(f"x{i}", state=NodeState.REPAIRING, id=i) for i in range(2, 5))
    one_at_a_time = config(replace={"max_running": 3})
    seen = world(MARKED, agents=(agent(),), incidents=(requested, *running))
    assert actions(seen, act.StartReplacement, one_at_a_time) == []
    seen = world(MARKED, agents=(agent(),), incidents=(incident(),), can_replace=False)
    assert actions(seen, act.StartReplacement) == []
    assert "waiting for a person" in actions(seen, act.RaiseAlarm)[0].text


def test_nodes_that_are_empty_at_the_same_time_take_turns() -> None:
    names = ("n1", "n2", "n3", "n4")
    nodes = [node(name, "IDLE+FAIL", REPLACE) for name in names]
    waiting = tuple(incident(name, state=NodeState.EMPTY, id=i) for i, name in enumerate(names, 2))
    running = incident("x1", state=NodeState.REPAIRING)
    three_at_a_time = config(replace={"max_running": 3})
    seen = world(
        *nodes,
        agents=tuple(agent(name, findings=(finding(),)) for name in names),
        incidents=(running, *waiting),
    )
    started = actions(seen, act.StartReplacement, three_at_a_time)
    assert [start.node for start in started] == ["n1", "n2"]
    eleven = JournalMemory(starts=tuple((NOW - 1, "y") for _ in range(11)))
    within_the_hour = msgspec.structs.replace(seen, memory=eleven)
    started = actions(within_the_hour, act.StartReplacement)
    assert [start.node for start in started] == ["n1"]
    one_rack = config(replace={"max_running_partition": 2})
    shared = {
        name: msgspec.structs.replace(n, partitions=("gpu",)) for name, n in seen.nodes.items()
    }
    started = actions(msgspec.structs.replace(seen, nodes=shared), act.StartReplacement, one_rack)
    assert [start.node for start in started] == ["n1"]


def replacing(run: Run | None, **more: Any) -> ClusterSnapshot:
    runs = {1: run} if run else {}
    known = incident(state=NodeState.REPAIRING, attempts=1, **({"run_started": NOW - 5} | more))
    return world(MARKED, agents=(agent(),), incidents=(known,), runs=runs)


def test_a_run_is_waited_for() -> None:
    assert decision(replacing(Run("running"))).actions == ()
    assert decision(replacing(None)).actions == ()


def test_a_run_that_has_lost_its_time_limit_is_an_alarm() -> None:
    (alarm,) = decision(replacing(Run("running"), run_started=NOW - 3661)).actions
    assert isinstance(alarm, act.RaiseAlarm) and "past its limit" in alarm.text


def test_a_run_that_ended_well() -> None:
    assert advance(replacing(Run("ended", 0))).event is NodeEvent.REPLACED


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (Run("ended", 3, "first\nno spare left"), "the program exited 3: no spare left"),
        (Run("ended", 1), "the program exited 1: it printed nothing"),
        (Run("lost"), "the program disappeared: it printed nothing"),
    ],
)
def test_a_run_that_failed_is_tried_again_later(run: Run, says: str) -> None:
    move = advance(replacing(run))
    assert (move.event, move.next_try) == (NodeEvent.REPLACEMENT_FAILED, NOW + 60)
    assert move.reason.startswith(says)


def test_the_wait_doubles_and_there_is_an_end() -> None:
    second = replacing(Run("ended", 1))
    known = msgspec.structs.replace(second.incidents["n1"], attempts=2)
    second = msgspec.structs.replace(second, incidents={"n1": known})
    assert advance(second).next_try == NOW + 120
    known = msgspec.structs.replace(known, attempts=3)
    third = msgspec.structs.replace(second, incidents={"n1": known})
    assert advance(third).event is NodeEvent.GAVE_UP


def test_a_person_who_resumes_the_node_stops_the_run() -> None:
    seen = world(node(), agents=(agent(),), incidents=(incident(state=NodeState.REPAIRING),))
    move = advance(seen)
    assert move.event is NodeEvent.RELEASED
    # A slurmctld that has lost its state looks the same: the log blames no person for it.
    assert move.reason == f"IDLE: {REASON_GONE}" and "Slurm forgot" in move.reason
    assert SideAct.STOP_PROGRAM in step(NodeState.REPAIRING, move.event).acts


@pytest.mark.parametrize("state", [s for s in NodeState if s.is_in_repair])
@pytest.mark.parametrize("reason", ["RMA 4711, keep out", "Low voltage on PSU 2"])
def test_a_persons_drain_in_mid_replacement_stands(state: NodeState, reason: str) -> None:
    drained = node(state="DOWN+DRAIN", reason=reason)
    known = incident(state=state, attempts=1, run_ended=NOW - 10, run_started=NOW - 20)
    seen = world(
        drained,
        agents=(agent(boot_id="boot-2"),),
        incidents=(known,),
        probes={"n1": probes("answered")},
        runs={1: Run("running")},
    )
    assert actions(seen, act.ReturnNode) == []
    move = advance(seen)
    assert move.event is NodeEvent.TAKEN_OVER
    stops = SideAct.STOP_PROGRAM in step(state, move.event).acts
    assert stops is state.is_running_program


@pytest.mark.parametrize("state", [s for s in NodeState if s.waits_for_repair])
def test_the_same_words_of_another_hand_are_a_persons_request(state: NodeState) -> None:
    ours = incident(state=state, mark_reason_at=MARKED.reason_at)
    assert not [
        move
        for move in actions(world(MARKED, agents=(SICK,), incidents=(ours,)), act.Transition)
        if move.event.is_a_persons
    ]
    theirs = msgspec.structs.replace(MARKED, reason_at="2026-01-02T00:00:00")
    move = advance(world(theirs, agents=(SICK,), incidents=(ours,)))
    assert move.event is NodeEvent.ASKED_ANEW


def test_what_a_person_asked_for_during_a_repair_is_done_after_it() -> None:
    """The repair ended well; to give the node back would take the request away."""
    asked = node(state="DOWN+FAIL", reason=REPLACE)
    ours = incident(state=NodeState.VALIDATING, action=REBOOT)
    assert asked.requested_action == REPLACE
    move = advance(world(asked, incidents=(ours,)))
    assert (move.event, step(ours.state, move.event).state) == (
        NodeEvent.ASKED_ANEW,
        NodeState.HELD,
    )
    held = msgspec.structs.replace(ours, state=NodeState.HELD, mark_reason_at=asked.reason_at)
    memory = {"at_rest": (held,)}
    (opened,) = actions(world(asked, agents=(agent(),), **memory), act.OpenRequested)
    assert (opened.action, opened.kind) == (REPLACE, "requested")


def test_a_resume_during_validation_answers_what_a_new_sresctld_had_not_heard() -> None:
    ours = incident(state=NodeState.VALIDATING, run_ended=NOW - 10.0)
    unheard = agent(spoke=False, reported=False)
    early: dict[str, Any] = {"incidents": (ours,), "uptime": 1.0}
    assert actions(world(node(), agents=(unheard,), **early), act.Transition) == []
    assert advance(world(node(), agents=(SICK,), **early)).event is NodeEvent.RELEASED
    assert advance(world(node(), agents=(agent(),), **early)).event is NodeEvent.CLOSED
    assert advance(world(node(), agents=(SICK,), incidents=(ours,))).event is NodeEvent.CLOSED


@pytest.mark.parametrize("asked", [REBOOT, REPLACE])
def test_a_reboot_that_slurm_has_noted_is_no_request(asked: str) -> None:
    """A person who reboots a node that sresctld has marked asks for no replacement by that."""
    noted = node(state="DOWN+FAIL", reason=f"{asked} : reboot complete", reason_at="later")
    ours = incident(state=NodeState.EMPTY, action=asked, mark_reason_at=MARKED.reason_at)
    assert not noted.requested_action
    moves = actions(world(noted, incidents=(ours,)), act.Transition)
    assert not [move for move in moves if move.event.is_a_persons]


def test_our_own_mark_is_no_persons_request() -> None:
    """Its incident ended while the node was not listed."""
    left = incident(state=NodeState.HELD, kind="dead", mark_reason_at=MARKED.reason_at)
    (opened,) = actions(world(MARKED, agents=(agent(),), at_rest=(left,)), act.OpenRequested)
    assert (opened.kind, opened.mark_reason_at) == ("dead", MARKED.reason_at)
    theirs = msgspec.structs.replace(MARKED, reason_at="2026-01-02T00:00:00")
    (opened,) = actions(world(theirs, agents=(agent(),), at_rest=(left,)), act.OpenRequested)
    assert opened.kind == "requested"


def test_what_slurm_writes_over_our_mark_is_no_persons_answer() -> None:
    rebooted = node(state="DOWN", reason="Node unexpectedly rebooted")
    seen = world(rebooted, agents=(SICK,), incidents=(EMPTY,))
    assert actions(seen, act.Transition) == []
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.state, mark.action) == ("down", REPLACE)


def test_a_restart_changes_no_mind_before_the_node_was_heard() -> None:
    """Killed right after the journal's "marking": the finding comes again with the first report."""
    known = incident(state=NodeState.SUSPECT, kind="sick")
    for waiting in (agent(spoke=False, connected=False), agent(reported=False)):
        seen = world(node(), agents=(waiting,), incidents=(known,), uptime=3.0)
        assert actions(seen, act.Transition) == []
    assert len(actions(world(node(), agents=(SICK,), incidents=(known,)), act.MarkNode)) == 1


def returning(speaks: Any, answered: bool = True, ended: float = 10.0) -> ClusterSnapshot:
    known = incident(
        state=NodeState.VALIDATING,
        attempts=1,
        run_ended=NOW - ended,
        boot_before="boot-1",
        instance_before="machine-n1",
    )
    tried = {"n1": probes("answered")} if answered else {}
    spoken = (speaks,) if speaks else ()
    return world(MARKED, agents=spoken, incidents=(known,), probes=tried)


def test_back_is_a_new_boot_that_speaks_and_a_slurmd_that_answers() -> None:
    back = agent(boot_id="boot-2")
    assert actions(returning(back), act.ReturnNode) == [act.ReturnNode("n1", 1)]
    other_machine = agent(instance="machine-9")
    assert len(actions(returning(other_machine), act.ReturnNode)) == 1


@pytest.mark.parametrize(
    ("speaks", "answered"),
    [
        (agent(), True),
        (agent(boot_id="boot-2"), False),
        (agent(boot_id="boot-2", silence=6.0, connected=False), True),
        (agent(boot_id="boot-2", said_goodbye=True), True),
        (None, True),
    ],
    ids=["the old boot", "no slurmd", "silent", "stopped", "no agent"],
)
def test_not_back_yet(speaks: Any, answered: bool) -> None:
    assert actions(returning(speaks, answered), act.ReturnNode) == []


def test_a_node_that_comes_back_sick_is_not_resumed() -> None:
    back = agent(boot_id="boot-2", findings=(finding(code="79"),))
    assert actions(returning(back), act.ReturnNode) == []
    move = advance(returning(back))
    assert move.event is NodeEvent.REPLACEMENT_FAILED and "came back sick" in move.reason
    for more in ({"reported": False}, {"steady": 1.0}):
        early = agent(boot_id="boot-2", **more)
        assert actions(returning(early), act.ReturnNode) == []


def test_a_node_is_not_back_before_each_check_has_run() -> None:
    looks = agent(boot_id="boot-2", checked=False)
    assert actions(returning(looks), act.ReturnNode) == []
    assert actions(returning(looks), act.Transition) == []
    assert len(actions(returning(agent(boot_id="boot-2")), act.ReturnNode)) == 1


def test_a_node_that_its_sresd_never_vouches_for_is_left_to_a_person() -> None:
    """An older sresd does not say that it has looked. That is no fault of the machine's."""
    never = agent(boot_id="boot-2", checked=False, steady=902.0)
    assert advance(returning(never, ended=901.0)).event is NodeEvent.GAVE_UP
    (alarm,) = actions(returning(never, ended=901.0), act.RaiseAlarm)
    assert "a person must look" in alarm.text
    # Its sresd was started anew: it has its time from then on.
    anew = agent(boot_id="boot-2", checked=False, steady=10.0)
    assert actions(returning(anew, ended=901.0), act.Transition) == []


def test_a_node_in_service_before_its_sresd_speaks_is_waited_for() -> None:
    """slurmd was quicker: the silence is that of the old boot."""
    known = incident(state=NodeState.VALIDATING, run_ended=NOW - 3, boot_before="boot-1")
    seen = world(node(), incidents=(known,), **dead(silence=100.0))
    assert actions(seen, act.Transition) == [] and actions(seen, act.MarkNode) == []
    seen = world(node(), incidents=(known,), agents=(agent(boot_id="boot-2"),))
    assert advance(seen).event is NodeEvent.CLOSED


def test_a_resume_of_a_node_that_is_still_away_is_not_overruled() -> None:
    known = incident(state=NodeState.VALIDATING, boot_before="boot-1", run_ended=NOW - 901.0)
    gone = {"agents": (agent(silence=900.0),), "probes": {"n1": probes("silent", "silent")}}
    resumed = world(node(state="IDLE+NOT_RESPONDING"), incidents=(known,), **gone)
    assert advance(resumed).event is NodeEvent.RELEASED
    waits = world(
        node(state="IDLE+FAIL+NOT_RESPONDING", reason=REPLACE), incidents=(known,), **gone
    )
    assert advance(waits).event is NodeEvent.REPLACEMENT_FAILED


@pytest.mark.parametrize("state", [s for s in NodeState if s.is_coming_back])
def test_a_person_who_drains_a_node_on_its_way_back_keeps_it(state: NodeState) -> None:
    drained = node(state="IDLE+DRAIN", reason="I look at it")
    known = incident(state=state, run_ended=NOW - 10, resumed=NOW - 1)
    back, answers = agent(boot_id="boot-2"), {"n1": probes("answered")}
    seen = world(drained, agents=(back,), incidents=(known,), probes=answers)
    assert actions(seen, act.ReturnNode) == []
    assert advance(seen).event is NodeEvent.TAKEN_OVER


@pytest.mark.parametrize("reason", ["Action:Reboot : reboot issued", "Node unexpectedly rebooted"])
def test_what_slurm_adds_to_the_reason_keeps_no_node(reason: str) -> None:
    known = incident(state=NodeState.VALIDATING, action=REBOOT, run_ended=NOW - 10)
    back, answers = agent(boot_id="boot-2"), {"n1": probes("answered")}
    rebooted = node(state="DOWN", reason=reason)
    seen = world(rebooted, agents=(back,), incidents=(known,), probes=answers)
    assert actions(seen, act.ReturnNode) == [act.ReturnNode("n1", 1)]


def test_a_probe_from_before_the_programs_end_says_nothing() -> None:
    assert actions(returning(agent(boot_id="boot-2"), ended=0.2), act.ReturnNode) == []


def test_a_node_that_does_not_come_back_is_tried_again() -> None:
    assert advance(returning(None, ended=901.0)).event is NodeEvent.REPLACEMENT_FAILED


def test_a_silence_counts_from_when_any_node_was_heard_again() -> None:
    """The power of the hall was away for an hour; some boot later than others."""
    known = incident(state=NodeState.EMPTY)
    replaces = config(replace=WAITING)
    for heard_for, starts in ((299.0, 0), (301.0, 1)):
        seen = world(MARKED, incidents=(known,), **dead(silence=3600.0))
        heard = msgspec.structs.replace(seen.heard, since=seen.moment - heard_for)
        seen = msgspec.structs.replace(seen, heard=heard)
        assert len(actions(seen, act.StartReplacement, replaces)) == starts


def test_a_node_that_a_person_puts_back_is_not_replaced_for_its_silence() -> None:
    """Its sresd may not run at all: from then on it is judged like any node in service."""
    for ended, event in ((899.0, None), (901.0, NodeEvent.RELEASED)):
        known = incident(
            state=NodeState.VALIDATING, attempts=1, run_ended=NOW - ended, boot_before="boot-1"
        )
        seen = world(node(), incidents=(known,), **dead(silence=950.0))
        moves = [move.event for move in actions(seen, act.Transition)]
        assert moves == ([event] if event else [])
        assert actions(seen, act.StartReplacement) == []


def resumed(the_node: Any, ago: float, **more: Any) -> ClusterSnapshot:
    known = incident(state=NodeState.RETURNING, attempts=1, resumed=NOW - ago, **more)
    return world(the_node, agents=(agent(),), incidents=(known,))


def test_resumed_and_available_is_the_end() -> None:
    move = advance(resumed(node(), 1.0))
    assert (move.event, move.reason) == (
        NodeEvent.CLOSED,
        "replaced and back in service after 300.0 s",
    )


@pytest.mark.parametrize(
    ("uptime", "opened", "text"),
    [
        (310.0, 300.0, "replaced and back in service after 300.0 s"),
        (300.0, 300.0, "replaced and back in service"),  # opened by the sresctld before this one
        (1000.0, -3240.0, "replaced and back in service"),
    ],
)
def test_a_duration_is_left_out_where_the_date_may_have_been_set(
    uptime: float, opened: float, text: str
) -> None:
    known = incident(state=NodeState.RETURNING, attempts=1, resumed=NOW - 1.0, opened=NOW - opened)
    seen = world(node(), agents=(agent(),), incidents=(known,), uptime=uptime)
    assert advance(seen).reason == text


def test_a_resume_that_slurm_did_not_take_is_given_again() -> None:
    known = {"reason_at": MARKED.reason_at}
    assert actions(resumed(MARKED, 5.0, **known), act.ReturnNode) == []
    assert len(actions(resumed(MARKED, 11.0, **known), act.ReturnNode)) == 1


def test_a_request_after_our_resume_is_a_new_one() -> None:
    asked = msgspec.structs.replace(MARKED, reason_at="2026-01-02T00:00:00")
    seen = resumed(asked, 11.0, reason_at=MARKED.reason_at)
    assert actions(seen, act.ReturnNode) == []
    assert advance(seen).event is NodeEvent.ASKED_ANEW


# -- supervisors ------------------------------------------------------------------------------


def test_supervisors_hear_of_marked_nodes_only() -> None:
    busy = node(state="ALLOCATED+FAIL", reason=REPLACE)
    more: dict[str, Any] = {"jobs": (job(),), "watched": (supervised(),), "agents": (agent(),)}
    (tell,) = actions(world(busy, incidents=(incident(kind="sick"),), **more), act.NotifySupervisor)
    assert (tell.job, tell.node, tell.kind) == (7, "n1", "sick")
    assert actions(world(busy, **more), act.NotifySupervisor) == []
    elsewhere = more | {"watched": (supervised(nodes=("n3",)),)}
    assert actions(world(busy, incidents=(incident(),), **elsewhere), act.NotifySupervisor) == []


# -- jobs -------------------------------------------------------------------------------------

ZOMBIE = job(7, ("n2", "n3"), batch_host="n1")


def test_a_zombie_is_requeued_and_followed() -> None:
    found = decision(world(jobs=(ZOMBIE,))).actions
    assert found == (
        act.KeepPendingRequeue(PendingRequeue(7, "its batch host n1 is gone", True, 0, NOW)),
        act.RequeueJob(7, "its batch host n1 is gone"),
    )


def test_a_zombie_whose_batch_host_died_is_requeued_for_that_fault() -> None:
    dead = node(state="DOWN", reason=REPLACE)
    found = actions(world(dead, jobs=(ZOMBIE,), incidents=(incident(),)), act.RequeueJob)
    assert found == [act.RequeueJob(7, f"n1: {incident().reason}")]


def test_a_zombie_that_may_not_be_requeued_is_an_alarm() -> None:
    dead_script = msgspec.structs.replace(ZOMBIE, requeue=False)
    assert {type(a) for a in decision(world(jobs=(dead_script,))).actions} == {act.RaiseAlarm}


STRANDED = msgspec.structs.replace(ZOMBIE, requeue=False)


@pytest.mark.parametrize(
    ("lost", "abandoned", "restarts", "ends"),
    [
        (("n1",), {7}, 0, True),
        (("n1",), set(), 0, False),  # a supervisor lives, or may come back
        ((), {7}, 0, False),  # a person took its batch host away, which is sound
        (("n1",), {7}, 1, False),  # what is known is of another run
    ],
)
def test_a_supervised_job_that_can_never_go_on_is_ended(
    lost: tuple[str, ...], abandoned: set[int], restarts: int, ends: bool
) -> None:
    dead = node(state="DOWN", reason=REPLACE)
    entry = msgspec.structs.replace(
        supervised(nodes=("n1", "n2", "n3")), lost=lost, restarts=restarts
    )
    seen = world(dead, jobs=(STRANDED,), watched=(entry,), abandoned=frozenset(abandoned))
    if not lost:
        seen = msgspec.structs.replace(seen, nodes={**seen.nodes, "n1": node()})
    found = actions(seen, act.EndStrandedJob)
    assert [action.job for action in found] == [7] * ends
    kept = [note for note in decision(seen).notes if isinstance(note, act.DropSupervised)]
    assert kept == []


@pytest.mark.parametrize(
    ("the_job", "since", "wanted", "expected"),
    [
        (None, 1, True, act.EndPendingRequeue),
        (job(state="PENDING", nodes=(), restarts=1), 1, True, act.StartPendingJob),
        (job(state="PENDING", nodes=(), restarts=1), 601, True, act.EndPendingRequeue),
        (job(restarts=1), 1, True, act.EndPendingRequeue),
        (job(), 1, True, act.RequeueJob),
        (job(), 1, False, None),
        (ZOMBIE, 1, False, act.RequeueJob),
        (job(state="COMPLETING"), 1, True, None),
        (job(state="COMPLETING"), 601, True, act.EndPendingRequeue),
    ],
)
def test_a_requeued_job_is_followed(
    the_job: Any, since: float, wanted: bool, expected: type | None
) -> None:
    pending = PendingRequeue(7, "node n1 died", wanted, 0, NOW - since, pending_since=NOW - 1)
    seen = world(jobs=(the_job,) if the_job else (), pending_requeues={7: pending})
    assert [type(a) for a in decision(seen).actions] == ([expected] if expected else [])


def test_a_requeued_job_is_not_started_in_the_second_of_its_end() -> None:
    waiting = job(state="PENDING", nodes=(), restarts=1)
    pending = PendingRequeue(7, "node n1 died", True, 0, NOW)
    (noted,) = decision(world(jobs=(waiting,), pending_requeues={7: pending})).actions
    assert noted == act.KeepPendingRequeue(msgspec.structs.replace(pending, pending_since=NOW))
    seen = world(jobs=(waiting,), pending_requeues={7: noted.pending_requeue}, now=NOW + 0.9)
    assert decision(seen).actions == ()
    seen = world(jobs=(waiting,), pending_requeues={7: noted.pending_requeue}, now=NOW + 1.0)
    assert decision(seen).actions == (act.StartPendingJob(7),)


# -- what never happens -----------------------------------------------------------------------

STATES = (
    "IDLE",
    "ALLOCATED",
    "IDLE+NOT_RESPONDING",
    "ALLOCATED+FAIL",
    "IDLE+FAIL",
    "IDLE+DRAIN",
    "ALLOCATED+DRAIN",
    "DOWN",
    "DOWN+NOT_RESPONDING",
    "IDLE+MAINTENANCE",
    "IDLE+POWERED_DOWN",
    "IDLE+COMPLETING",
)
REASONS = ("", REPLACE, REBOOT, "action:replace", "bad disk", "Not responding", "Action:Replace ")
NAMES = tuple(f"n{i}" for i in range(1, 7))


@st.composite
def worlds_(draw: st.DrawFn) -> ClusterSnapshot:
    nodes, agents, tried, incidents = [], [], {}, []
    states = [state for state in NodeState if state is not NodeState.HEALTHY]
    for number, name in enumerate(NAMES, 1):
        gres = draw(st.sampled_from(("", "", "gpu:2")))
        nodes.append(
            node(name, draw(st.sampled_from(STATES)), draw(st.sampled_from(REASONS)), gres=gres)
        )
        if draw(st.booleans()):
            agents.append(
                agent(
                    name,
                    draw(st.sampled_from((0.1, 2.0, 6.0, 100.0))),
                    said_goodbye=draw(st.integers(0, 5)) == 0,
                    boot_id=draw(st.sampled_from(("boot-1", "boot-2"))),
                    findings=tuple(
                        finding(severity)
                        for severity in draw(st.lists(st.sampled_from(tuple(Severity)), max_size=2))
                    ),
                )
            )
        answers = draw(st.lists(st.sampled_from(("silent", "refused", "answered")), max_size=3))
        tried[name] = probes(*answers)
        state = draw(st.sampled_from((None, None, *states)))
        if state:
            incidents.append(
                incident(
                    name,
                    state,
                    id=number,
                    kind=draw(st.sampled_from(("dead", "sick", "requested"))),
                    opened=NOW - draw(st.sampled_from((10.0, 1000.0))),
                    attempts=draw(st.integers(0, 4)),
                    boot_before="boot-1",
                    resumed=NOW - draw(st.sampled_from((1.0, 20.0))),
                )
            )
    jobs, watched = [], []
    for job_id in range(1, draw(st.integers(0, 3)) + 1):
        held = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
        jobs.append(
            job(job_id, tuple(held), requeue=draw(st.booleans()), is_batch=draw(st.booleans()))
        )
        if draw(st.booleans()):
            watched.append(supervised(job_id, tuple(held)))
    return world(
        *nodes,
        jobs=tuple(jobs),
        agents=tuple(agents),
        incidents=tuple(known for known in incidents if known.state.is_under_way),
        at_rest=tuple(known for known in incidents if known.state.is_at_rest),
        watched=tuple(watched),
        probes=tried,
        others=draw(st.sampled_from((0, 4, 20))),
        runs={i: Run("ended", i % 2) for i in range(1, 7)},
        paused=draw(st.sampled_from(("", "", "", "by hand"))),
    )


@settings(max_examples=150, deadline=None)
@given(seen=worlds_())
def test_what_may_never_be_decided(seen: ClusterSnapshot) -> None:
    verdicts = diagnose(seen, CONFIG)
    said = decide(seen, verdicts, CONFIG)
    assert said == decide(seen, diagnose(seen, CONFIG), CONFIG), "the same world, another answer"
    assert said.sentence
    marks = [a for a in said.actions if isinstance(a, act.MarkNode)]
    moves = {mark.node for mark in marks if only_supervised_on(seen, mark.node)}
    written_over = {n for n in seen.incidents if not seen.nodes[n].requested_action}
    found_new = [m for m in marks if m.node not in moves | written_over]
    dying = {name for name, found in verdicts.items() if found.kind == "dead"}
    # Dead nodes without jobs are withheld from supervised jobs that look for nodes.
    may_be_more = bool(moves) or marking._is_recovering(seen, dying)
    assert may_be_more or len(found_new) <= 2 * CONFIG.breaker.nodes_at_once
    for mark in marks:
        marked = seen.nodes[mark.node]
        assert verdicts[mark.node].kind in ("dead", "sick") or mark.node in written_over
        if mark.state == "down" and not marked.is_down:
            assert mark.node in moves or not running_on(seen, mark.node)
        assert mark.action in (REPLACE, REBOOT) or marked.reason
        if marked.reason in ("bad disk", "action:replace", "Action:Replace "):
            assert mark.action == "" or not (marked.is_fail or marked.is_down or marked.is_drain)
        for out in mark.shrink:
            shrunk = seen.jobs[out.job]
            dying = {m.node for m in marks if m.state == "down"}
            assert mark.node in dying
            assert out.keep and set(out.keep) == set(shrunk.nodes) - dying
            has_gres = any(seen.nodes[name].gres for name in shrunk.nodes)
            assert not has_gres or 0 < seen.supervised[out.job].size <= len(out.keep)
            assert not (shrunk.is_batch and shrunk.batch_host == mark.node)
        assert all(seen.jobs[requeued].requeue for requeued in mark.requeued)
    for action in said.actions:
        if isinstance(action, act.StartReplacement):
            assert not seen.nodes[action.node].has_work
            assert seen.nodes[action.node].requested_action
        if isinstance(action, act.OpenRequested):
            assert seen.nodes[action.node].reason == action.action
    if seen.paused:
        assert all(isinstance(action, act.ProbeNode) for action in said.actions)
    nodes_moved = [a.node for a in said.actions if isinstance(a, act.Transition)]
    assert len(nodes_moved) == len(set(nodes_moved)), "two ways at once for one incident"
    apply_to_table(seen, said.actions)


def running_on(seen: ClusterSnapshot, name: str) -> list[int]:
    return [j.id for j in seen.jobs.values() if name in j.nodes and j.state == "RUNNING"]


def only_supervised_on(seen: ClusterSnapshot, name: str) -> bool:
    jobs = running_on(seen, name)
    return bool(jobs) and all(number in seen.supervised for number in jobs)


def apply_to_table(seen: ClusterSnapshot, decided: Any) -> None:
    """Follow every node through the table, as if each act went well: an event that the table does
    not know at that place raises."""
    known = [*seen.incidents.values(), *seen.at_rest.values()]
    states = {known.node: known.state for known in known}
    for action in decided:
        match action:
            case act.Transition():
                events = [action.event]
            case act.MarkNode() if action.action:
                is_open = action.node in seen.incidents
                events = [NodeEvent.MARKED] if is_open else [NodeEvent.DETECTED, NodeEvent.MARKED]
            case act.OpenRequested():
                events = [NodeEvent.REQUESTED]
            case act.StartReplacement():
                events = [NodeEvent.REPLACING]
            case act.ReturnNode():
                events = [NodeEvent.RESUMED]
            case _:
                continue
        for event in events:
            before = states.get(action.node, NodeState.HEALTHY)
            states[action.node] = step(before, event).state


@pytest.mark.parametrize("state", [state for state in NodeState if state.is_under_way])
@pytest.mark.parametrize("shown", ["IDLE+FAIL", "DOWN"])
def test_nothing_is_done_to_a_node_whose_reason_is_not_understood(
    state: NodeState, shown: str
) -> None:
    """A person wrote over ours in the middle of a replacement."""
    unclear = node(state=shown, reason=REPLACE, reason_unclear=True)
    known = incident(state=state, attempts=1, run_ended=NOW - 10, boot_before="boot-1")
    seen = world(
        unclear,
        agents=(agent(boot_id="boot-2"),),
        incidents=(known,),
        probes={"n1": probes("answered")},
        runs={1: Run("running")},
    )
    for kind in (act.MarkNode, act.StartReplacement, act.ReturnNode, act.OpenRequested):
        assert actions(seen, kind) == []
    assert advance(seen).event is NodeEvent.TAKEN_OVER


@pytest.mark.parametrize(("state", "reason"), [("IDLE", REPLACE), ("IDLE+NOT_RESPONDING", REPLACE)])
def test_a_node_that_was_resumed_with_its_reason_left_is_let_go(state: str, reason: str) -> None:
    """As 24.11 leaves it; the machine may be off meanwhile."""
    known = incident(state=NodeState.REPAIRING, attempts=1)
    resumed = node(state=state, reason=reason)
    move = advance(world(resumed, incidents=(known,), runs={1: Run("running")}))
    assert move.event is NodeEvent.RELEASED
    assert SideAct.STOP_PROGRAM in step(NodeState.REPAIRING, move.event).acts


def test_a_near_miss_left_on_a_node_in_service_is_no_alarm() -> None:
    assert actions(world(node(reason="action:replace"), agents=(agent(),)), act.RaiseAlarm) == []


def test_a_program_that_was_told_to_stop_counts_until_it_has_ended() -> None:
    other = node("n2", "DOWN+FAIL", REPLACE)
    limits = config(replace={"max_running": 1})
    seen = {"agents": (agent("n2", silence=400.0),), "probes": {"n2": probes("silent", "silent")}}
    known = incident("n2", NodeState.EMPTY, mark_reason_at=other.reason_at)
    for stopped, starts in ((frozenset(), 1), (frozenset({"n1"}), 0)):
        now = world(node(), other, incidents=(known,), stopped=stopped, **seen)
        assert len(actions(now, act.StartReplacement, limits)) == starts
