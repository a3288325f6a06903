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
from slurm_resilience.controller.decide import marking
from slurm_resilience.controller.decide.decision import decide
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState, SideAct, step
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.controller.journal import PendingRequeue
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, REPLACE, Severity
from slurm_resilience.replace.program import Run

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


def test_gres_on_any_node_of_the_job_forbids_a_swap() -> None:
    with_gpu = node("n2", "ALLOCATED", gres="gpu:2")
    the_job = job(nodes=("n2", "n1"))
    seen = world(
        node(state="ALLOCATED"), with_gpu, jobs=(the_job,), watched=(supervised(),), **dead()
    )
    assert not marking.can_shrink(seen, the_job, "n1")


def test_jobs_that_did_not_ask_are_left_to_slurm() -> None:
    seen = world(node(state="ALLOCATED"), jobs=(job(7, ("n2", "n1")),), **dead())
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.shrink, mark.requeued) == ((), ())


def test_a_job_that_may_not_be_requeued_is_not_followed() -> None:
    for the_job in (job(requeue=False), job(is_batch=False, nodes=("n1",))):
        seen = world(node(state="ALLOCATED"), jobs=(the_job,), watched=(supervised(),), **dead())
        assert actions(seen, act.MarkNode)[0].requeued == ()


def test_an_administrators_reason_stays_when_its_node_dies() -> None:
    seen = world(node(state="ALLOCATED+DRAIN", reason="new disk"), **dead())
    (mark,) = actions(seen, act.MarkNode)
    assert (mark.state, mark.action) == ("down", "")


def test_dead_while_failing_and_busy_goes_down_within_the_same_incident() -> None:
    known = incident(kind="sick", opened=NOW - 400)
    lost = node(state="ALLOCATED+FAIL", reason=REPLACE)
    seen = world(lost, jobs=(job(),), incidents=(known,), **dead())
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
    [(2, 0, 2), (3, 0, 0), (2, 6, 2), (3, 6, 0), (3, 12, 3), (4, 12, 0), (20, 80, 20), (21, 80, 0)],
)
def test_too_many_at_once_are_not_marked(count: int, others: int, marks: int) -> None:
    seen = lost_nodes(count, others)
    assert len(actions(seen, act.MarkNode)) == marks
    assert bool(actions(seen, act.RaiseAlarm)) == (marks == 0)


def test_those_marked_a_moment_ago_count() -> None:
    recent = tuple(incident(f"y{i}", opened=NOW - 60, id=i) for i in (1, 2))
    assert actions(lost_nodes(1, 6, incidents=recent), act.MarkNode) == []
    older = tuple(incident(i.node, id=i.id, opened=NOW - 121) for i in recent)
    assert len(actions(lost_nodes(1, 6, incidents=older), act.MarkNode)) == 1


def test_another_blast_is_another_alarm() -> None:
    def key(count: int) -> str:
        (alarm,) = actions(lost_nodes(count, 0), act.RaiseAlarm)
        return str(alarm.key)

    assert key(3) == key(3) != key(4)


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
    assert advance(world(incidents=(incident("gone"),))).event is NodeEvent.REMOVED


def test_an_empty_node_that_a_job_came_to_and_that_died_moves_once() -> None:
    busy = node(state="ALLOCATED+FAIL", reason=REPLACE)
    known = incident(state=NodeState.EMPTY)
    gone = {"n1": probes("silent", "silent")}
    seen = world(busy, agents=(agent(silence=6.0),), incidents=(known,), probes=gone)
    assert [mark.node for mark in actions(seen, act.MarkNode)] == ["n1"]
    apply_to_table(seen, decision(seen).actions)


@pytest.mark.parametrize("state", [s for s in NodeState if s.is_coming_back])
def test_a_node_that_slurm_forgot_is_not_probed(state: NodeState) -> None:
    seen = world(incidents=(incident("gone", state=state),))
    assert actions(seen, act.ProbeNode) == []
    assert advance(seen).event is NodeEvent.REMOVED


def test_marked_without_work_is_replaced() -> None:
    seen = world(MARKED, agents=(agent(),), incidents=(incident(),))
    assert actions(seen, act.StartReplacement) == [act.StartReplacement("n1", 1)]


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
    later = incident(next_try=NOW + 1)
    assert actions(world(MARKED, agents=(agent(),), incidents=(later,)), act.StartReplacement) == []
    running = tuple(incident(f"x{i}", state=NodeState.REPAIRING, id=i) for i in range(2, 5))
    one_at_a_time = config(replace={"max_running": 3})
    seen = world(MARKED, agents=(agent(),), incidents=(incident(), *running))
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
    seen = world(*nodes, agents=tuple(map(agent, names)), incidents=(running, *waiting))
    started = actions(seen, act.StartReplacement, three_at_a_time)
    assert [start.node for start in started] == ["n1", "n2"]


def replacing(run: Run | None, **more: Any) -> ClusterSnapshot:
    runs = {1: run} if run else {}
    known = incident(state=NodeState.REPAIRING, attempts=1, **more)
    return world(MARKED, agents=(agent(),), incidents=(known,), runs=runs)


def test_a_run_is_waited_for() -> None:
    assert decision(replacing(Run("running"))).actions == ()
    assert decision(replacing(None)).actions == ()


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
    assert SideAct.STOP_PROGRAM in step(NodeState.REPAIRING, move.event).acts


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


def resumed(the_node: Any, ago: float, **more: Any) -> ClusterSnapshot:
    known = incident(state=NodeState.RETURNING, attempts=1, resumed=NOW - ago, **more)
    return world(the_node, agents=(agent(),), incidents=(known,))


def test_resumed_and_available_is_the_end() -> None:
    move = advance(resumed(node(), 1.0))
    assert (move.event, move.reason) == (
        NodeEvent.CLOSED,
        "replaced and back in service after 300.0 s",
    )


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
    recent = [
        i
        for i in seen.incidents.values()
        if i.kind in ("dead", "sick")
        and NOW - i.times.opened < marking.AT_ONCE_SECONDS
        and i.state is not NodeState.SUSPECT
    ]
    limit = max(2, int(len(seen.nodes) * 0.2))
    assert not marks or len(marks) + len(recent) <= limit
    for mark in marks:
        marked = seen.nodes[mark.node]
        assert verdicts[mark.node].kind in ("dead", "sick")
        assert mark.action in (REPLACE, REBOOT) or marked.reason
        if marked.reason in ("bad disk", "action:replace", "Action:Replace "):
            assert mark.action == "" or not (marked.is_fail or marked.is_down or marked.is_drain)
        for out in mark.shrink:
            shrunk = seen.jobs[out.job]
            dying = {
                m.node
                for m in marks
                if m.state == "down" and seen.nodes[m.node].is_down == marked.is_down
            }
            assert mark.node in dying
            assert out.keep and set(out.keep) == set(shrunk.nodes) - dying
            assert not any(seen.nodes[name].gres for name in shrunk.nodes)
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
    if state is not NodeState.REPAIRING:
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
