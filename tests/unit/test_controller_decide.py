"""Decide: supervisors, jobs, and what may never be decided."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import (
    CONFIG,
    NOW,
    actions,
    advance,
    agent,
    config,
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
from slurm_resilience.controller.journal.records import (
    PendingRequeue,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, REPLACE, Severity
from slurm_resilience.replace.repair_order import Run

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
    assert not {kind.__name__ for kind in get_args(act.Action)} & set(said.sentence.split())
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


@pytest.mark.parametrize("kind", ["dead", "requested"])
def test_a_program_that_was_told_to_stop_has_its_node_in_hand_until_it_has_ended(kind: str) -> None:
    """It may ignore that for an hour. Each look at it would ask Slurm anew, and log a line."""
    marked = node("n1", "DOWN+FAIL", REPLACE)
    known = incident("n1", NodeState.EMPTY, kind=kind, mark_reason_at=marked.reason_at)
    seen = {"agents": (agent(silence=400.0),), "probes": {"n1": probes("silent", "silent")}}
    for stopped, starts in ((frozenset(), 1), (frozenset({"n1"}), 0)):
        now = world(marked, incidents=(known,), stopped=stopped, **seen)
        assert len(actions(now, act.StartReplacement)) == starts
    late = msgspec.structs.replace(now, now=now.now + 700.0)
    (alarm,) = actions(late, act.RaiseAlarm)
    assert "its replacement waits" in alarm.text and "which a person stopped" in alarm.text
    # sresctld or slurmctld was away for those minutes.
    heard = msgspec.structs.replace(late.heard, sighted_since=late.moment - 2.0)
    assert actions(msgspec.structs.replace(late, heard=heard), act.RaiseAlarm) == []


def test_a_program_that_was_told_to_stop_counts_until_it_has_ended() -> None:
    other = node("n2", "DOWN+FAIL", REPLACE)
    limits = config(replace={"max_running": 1})
    seen = {"agents": (agent("n2", silence=400.0),), "probes": {"n2": probes("silent", "silent")}}
    known = incident("n2", NodeState.EMPTY, mark_reason_at=other.reason_at)
    for stopped, starts in ((frozenset(), 1), (frozenset({"n1"}), 0)):
        now = world(node(), other, incidents=(known,), stopped=stopped, **seen)
        assert len(actions(now, act.StartReplacement, limits)) == starts
