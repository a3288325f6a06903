"""Decide: the way of an incident from its request or its mark to the node's return."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from worlds import (
    CONFIG,
    EMPTY,
    MARKED,
    NOW,
    SICK,
    WAITING,
    actions,
    advance,
    agent,
    config,
    dead,
    decision,
    finding,
    incident,
    node,
    probes,
    world,
)

from slurm_resilience.controller import actions as act
from slurm_resilience.controller.decide.decision import decide
from slurm_resilience.controller.decide.node_events import PROGRAMS_HAND, REASON_GONE
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState, SideAct, step
from slurm_resilience.controller.journal.records import (
    JournalMemory,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, REPLACE, Node
from slurm_resilience.replace.repair_order import Run

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
        (Run("lost"), "the program disappeared: it printed nothing; the node may be repaired"),
    ],
)
def test_a_run_that_failed_is_tried_again_later(run: Run, says: str) -> None:
    move = advance(replacing(run))
    assert (move.event, move.next_try) == (NodeEvent.REPLACEMENT_FAILED, NOW + 60)
    assert move.reason.startswith(says)
    assert move.is_end_unknown is (run.state == "lost")


def test_the_wait_doubles_and_there_is_an_end() -> None:
    second = replacing(Run("ended", 1))
    known = msgspec.structs.replace(second.incidents["n1"], attempts=2)
    second = msgspec.structs.replace(second, incidents={"n1": known})
    assert advance(second).next_try == NOW + 120
    known = msgspec.structs.replace(known, attempts=3)
    third = msgspec.structs.replace(second, incidents={"n1": known})
    assert advance(third).event is NodeEvent.GAVE_UP


def test_a_program_that_cannot_be_started_uses_up_no_try() -> None:
    """It says nothing of the node: what an upgrade of this machine breaks for minutes would else
    leave each node that fails meanwhile to a person."""
    run = Run("unbegun", 127, "cannot be started: no such file")
    known = incident(state=NodeState.REPAIRING, attempts=9, unbegun=tuple(range(1, 9)))
    move = advance(world(MARKED, agents=(agent(),), incidents=(known,), runs={1: run}))
    assert (move.event, move.next_try) == (NodeEvent.REPLACEMENT_FAILED, NOW + 16 * 60)
    assert move.is_unbegun and "counts as no try" in move.reason
    waiting = incident(state=NodeState.EMPTY, attempts=9, unbegun=tuple(range(1, 10)))
    seen = world(MARKED, agents=(SICK,), incidents=(waiting,))
    (alarm,) = actions(seen, act.RaiseAlarm)
    assert "could not be started" in alarm.text and "n1" in alarm.text
    begun = msgspec.structs.replace(waiting, attempts=10)
    assert actions(world(MARKED, agents=(SICK,), incidents=(begun,)), act.RaiseAlarm) == []
    asked = node(state="DOWN+FAIL", reason=REBOOT)
    meanwhile = advance(world(asked, agents=(agent(),), incidents=(known,), runs={1: run}))
    assert meanwhile.is_unbegun and meanwhile.next_try == NOW


def test_a_person_who_resumes_the_node_stops_the_run() -> None:
    seen = world(node(), agents=(agent(),), incidents=(incident(state=NodeState.REPAIRING),))
    move = advance(seen)
    assert move.event is NodeEvent.RELEASED
    # A slurmctld that has lost its state looks the same: the log blames no person for it.
    assert move.reason == f"IDLE: {REASON_GONE}" and "Slurm forgot" in move.reason
    assert SideAct.STOP_PROGRAM in step(NodeState.REPAIRING, move.event).acts


@pytest.mark.parametrize("changed", [node(), node(state="DOWN+DRAIN", reason="being replaced")])
def test_a_program_that_changes_its_node_itself_learns_why_it_was_stopped(changed: Node) -> None:
    known = incident(state=NodeState.REPAIRING)
    ending = f"; the program is stopped ({PROGRAMS_HAND})"
    move = advance(world(changed, incidents=(known,), runs={1: Run("running")}))
    assert move.event.is_a_persons and move.reason.endswith(ending)
    for other in (Run("running", by="Slurm"), Run("ended", 0)):
        move = advance(world(changed, incidents=(known,), runs={1: other}))
        assert move.event.is_a_persons and not move.reason.endswith(ending)


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


@pytest.mark.parametrize("speaks", [agent(spoke=False, connected=False), agent(steady=1.0)])
def test_a_node_is_not_late_before_sresctld_has_looked(speaks: Any) -> None:
    """It, or slurmctld, was away for an upgrade, and the node may have come back meanwhile."""
    seen = returning(speaks, answered=False, ended=901.0)
    for sighted_for, moves in ((14.0, 0), (16.0, 1)):
        heard = msgspec.structs.replace(seen.heard, sighted_since=seen.moment - sighted_for)
        seen = msgspec.structs.replace(seen, heard=heard)
        assert len(actions(seen, act.Transition)) == moves


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
