"""Decide: whether a replacement begins, or the node lives again."""

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
    actions,
    advance,
    agent,
    config,
    dead,
    decision,
    finding,
    incident,
    job,
    node,
    probes,
    world,
)

from slurm_resilience.controller import actions as act
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.diagnose import diagnose
from slurm_resilience.controller.journal.records import (
    JournalMemory,
)
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REPLACE, Node

# -- life is looked at again before what cannot be undone --------------------------------------


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


END_UNKNOWN = incident(
    state=NodeState.EMPTY,
    kind="requested",
    attempts=1,
    run_started=NOW - 100.0,
    run_lost=NOW - 70.0,
    boot_before="boot-0",
    instance_before="",
)


def test_a_request_whose_repair_left_no_exit_code_is_not_done_twice() -> None:
    """The disk of sresctld was read-only until its machine was started anew, say."""
    seen = world(MARKED, agents=(agent(),), incidents=(END_UNKNOWN,))
    assert actions(seen, act.StartReplacement) == []
    assert advance(seen).event is NodeEvent.CAME_BACK
    same_boot = world(MARKED, agents=(agent(boot_id="boot-0"),), incidents=(END_UNKNOWN,))
    assert len(actions(same_boot, act.StartReplacement)) == 1


@pytest.mark.parametrize("kind", ["dead", "requested"])
def test_a_silent_node_whose_repair_left_no_exit_code_is_given_its_time_to_boot(kind: str) -> None:
    known = msgspec.structs.replace(END_UNKNOWN, kind=kind)
    silent = dead(silence=400.0)
    seen = world(MARKED, incidents=(known,), **silent)
    assert actions(seen, act.StartReplacement) == []
    long_ago = msgspec.structs.replace(known.times, run_started=NOW - 999.0, run_lost=NOW - 950.0)
    later = msgspec.structs.replace(known, times=long_ago)
    assert len(actions(world(MARKED, incidents=(later,), **silent), act.StartReplacement)) == 1
    exited = msgspec.structs.replace(
        known, times=msgspec.structs.replace(known.times, run_lost=0.0)
    )
    failed = world(MARKED, incidents=(exited,), **silent)
    assert len(actions(failed, act.StartReplacement)) == 1


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
