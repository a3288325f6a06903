"""Nodes that Slurm alone set DOWN are given back when they live again, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import (
    NOW,
    actions,
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
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import BreakerState, Fault
from slurm_resilience.model import REBOOT, REPLACE

SLURMS = "Not responding"
DIED = Fault("n1", "", (), NOW - 60, is_over=True)


def came_back(*nodes: Any, settings: Any = None, **more: Any) -> list[str]:
    known: dict[str, Any] = {"agents": (agent(),), "faults": {"n1": DIED}}
    seen = world(*(nodes or (node(state="DOWN", reason=SLURMS),)), **(known | more))
    found = actions(seen, act.OpenCameBack, *([settings] if settings else []))
    return [action.node for action in found]


@pytest.mark.parametrize("breaker", [BreakerState(), BreakerState(NOW - 50, NOW - 1, "a storm")])
def test_a_node_that_died_in_a_storm_is_given_back(breaker: BreakerState) -> None:
    assert came_back(breaker=breaker) == ["n1"]


def test_it_is_where_slurm_has_written_that_it_rebooted() -> None:
    """26.05 does, over its "Not responding"."""
    assert came_back(node(state="DOWN", reason="Node unexpectedly rebooted")) == ["n1"]


@pytest.mark.parametrize(
    "what",
    [
        {"nodes": (node(state="DOWN", reason="RMA 4711"),)},
        {"nodes": (node(state="DOWN", reason=SLURMS, reason_by="alice"),)},
        {"nodes": (node(state="DOWN", reason="Kill task failed"),)},
        {"nodes": (node(state="IDLE+DRAIN", reason=SLURMS),)},
        {"faults": {}},
        {"faults": {"n1": Fault("n1", "gpu_health 79", (), NOW - 60, is_over=True)}},
        {"agents": (agent(silence=3.0),)},
        {"agents": (agent(findings=(finding(),)),)},
        {"returns_by_itself": True},
        {"settings": config(recovery={"mode": "none"})},
        {"settings": config(recovery={"mode": "observe"})},
        {"incidents": (incident(state=NodeState.EMPTY),)},
        {"at_rest": (incident(state=NodeState.QUARANTINED),)},
        dead(),
    ],
)
def test_no_other_node_is(what: dict[str, Any]) -> None:
    assert came_back(*what.pop("nodes", ()), **what) == []


def test_a_node_that_comes_and_goes_is_left_to_a_person() -> None:
    down = node(state="DOWN", reason=SLURMS)
    seen = world(down, agents=(agent(),), faults={"n1": DIED}, flaps={"n1": 99})
    assert actions(seen, act.OpenCameBack) == []
    assert "came and went 100 times" in str(actions(seen, act.RaiseAlarm))


def test_its_incident_begins_with_the_look_at_what_came_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    opened = journal.open_incident("n1", NodeEvent.CAME_BACK, "dead", "Action:Replace", "it", NOW)
    assert opened.state is NodeState.VALIDATING
    assert opened.is_flap and opened.times.run_ended == NOW and not opened.times.marked
    assert journal.flaps(NOW - 1) == {"n1": 1}
    journal.close()


@pytest.mark.parametrize("state", [NodeState.VALIDATING, NodeState.RETURNING])
@pytest.mark.parametrize(
    ("marked", "event"), [(0.0, NodeEvent.JUDGED_ANEW), (NOW - 60, NodeEvent.GONE_AGAIN)]
)
def test_lost_again_it_is_judged_anew_where_it_was_never_marked(
    state: NodeState, marked: float, event: NodeEvent
) -> None:
    """It would go to replacement by a mark that no ceiling counts."""
    times = {"marked": marked, "run_ended": NOW - 30, "resumed": NOW - 2000}
    known = incident(state=state, is_flap=True, **times)
    down = node(state="DOWN", reason=SLURMS)
    seen = world(down, incidents=(known,), faults={"n1": DIED}, **dead())
    assert [move.event for move in actions(seen, act.Transition)] == [event]


@pytest.mark.parametrize(
    ("more", "is_back"),
    [
        ({}, True),
        ({"attempts": 0}, False),
        ({"instance_before": "machine-n1"}, False),
        ({"instance_before": ""}, False),
        ({"action": REBOOT}, False),
        ({"agents": (agent(findings=(finding(check="lifecycle"),)),)}, False),
        ({"agents": (agent(silence=30.0),)}, False),
    ],
)
def test_a_request_that_failed_ends_when_it_brought_another_machine_that_is_sound(
    more: dict[str, Any], is_back: bool
) -> None:
    """A script kept the new machine out, a person mended that: there is nothing left to ask for."""
    agents = more.pop("agents", (agent(),))
    known = {"instance_before": "machine-of-before", "attempts": 1, "kind": "requested"}
    asked = incident(state=NodeState.EMPTY, next_try=NOW + 3600, **(known | more))
    seen = world(node(state="IDLE+FAIL", reason=asked.action), agents=agents, incidents=(asked,))
    events = [action.event for action in actions(seen, act.Transition)]
    assert events == ([NodeEvent.CAME_BACK] if is_back else [])


def test_a_request_that_failed_is_tried_again_while_the_new_machine_is_not_sound() -> None:
    asked = incident(
        state=NodeState.EMPTY, attempts=1, kind="requested", instance_before="machine-of-before"
    )
    sick = agent(findings=(finding(check="lifecycle"),))
    seen = world(node(state="IDLE+FAIL", reason=REPLACE), agents=(sick,), incidents=(asked,))
    assert actions(seen, act.StartReplacement) == [act.StartReplacement("n1", 1)]


@pytest.mark.parametrize(
    ("more", "is_started"),
    [
        ({}, False),
        ({"probes": {"n1": probes("answered")}}, False),
        (dead(silence=600.0), True),
        ({"agents": (agent(),)}, True),
        ({"run_ended": 0.0}, True),
        ({"attempts": 0, "run_started": 0.0, "run_ended": 0.0}, True),
        ({"action": REBOOT}, False),
        ({"agents": ()}, False),
    ],
    ids=["silent", "answers", "dead", "same", "failed", "untried", "reboot", "no-sresd"],
)
def test_who_asked_once_gets_no_second_machine_that_was_not_looked_at(
    more: dict[str, Any], is_started: bool
) -> None:
    """The program has ended well, and what came of it is not known: as after a fault, it is done
    once more where the node is dead, or where the old machine is still there."""
    known: dict[str, Any] = {"attempts": 1, "run_started": NOW - 900, "run_ended": NOW - 800}
    known |= {"action": REPLACE, "instance_before": "machine-n1"}
    known |= {key: more[key] for key in more if key in known}
    asked = incident(state=NodeState.EMPTY, kind="requested", **known)
    out = node(state="IDLE+FAIL", reason=asked.action)
    seen = {"agents": (agent(silence=30.0),)} | {k: more[k] for k in more if k not in known}
    starts = actions(world(out, incidents=(asked,), **seen), act.StartReplacement)
    assert bool(starts) is is_started


VALIDATED = {"validate": ("/usr/local/sbin/validate",), "validate_timeout": 600.0}


@pytest.mark.parametrize(
    ("judged", "settings", "is_given_back"),
    [
        (("validation",), VALIDATED, True),
        (("disk",), VALIDATED, False),
        (("disk",), {}, True),
    ],
)
def test_a_node_is_given_back_once_its_sresd_has_validated_it(
    judged: tuple[str, ...], settings: dict[str, Any], is_given_back: bool
) -> None:
    known = incident(state=NodeState.VALIDATING, run_ended=NOW - 60, instance_before="old-one")
    seen = world(
        node(state="IDLE+FAIL", reason=REPLACE),
        agents=(agent(judged=judged),),
        incidents=(known,),
        probes={"n1": probes("answered")},
    )
    found = actions(seen, act.ReturnNode, config(recovery=settings))
    assert found == ([act.ReturnNode("n1", 1)] if is_given_back else [])


def returning(sresd: Any, ended: float = 60.0, **more: Any) -> Any:
    known = incident(
        state=NodeState.VALIDATING, run_ended=NOW - ended, instance_before="old-one", **more
    )
    return world(
        node(state="IDLE+FAIL", reason=REPLACE),
        agents=(sresd,),
        incidents=(known,),
        probes={"n1": probes("answered")},
    )


@pytest.mark.parametrize("ended", [60.0, 9000.0])
def test_a_sresd_that_does_not_know_of_the_validation_costs_no_machine(ended: float) -> None:
    """`recovery.validate` was set for sresctld alone: that is no fault of the node's."""
    seen = returning(agent(judged=("disk",)), ended, attempts=1)
    found = decision(seen, config(recovery=VALIDATED)).actions
    found = [one for one in found if not isinstance(one, act.ProbeNode)]
    assert [type(one) for one in found] == [act.RaiseAlarm]
    assert "write it into sres.toml on the node and restart sresd there" in str(found)
    assert actions(seen, act.ReturnNode, config(recovery={})) == [act.ReturnNode("n1", 1)]


@pytest.mark.parametrize(
    "news",
    [
        {"judged": ()},
        {"judged": ("validation",), "reported": False},
        {"judged": ("disk",), "reported": False},
    ],
)
def test_a_sresd_that_has_told_nothing_yet_is_waited_for(news: dict[str, Any]) -> None:
    """The verdicts that are known may be those of the machine before."""
    settings = config(recovery=VALIDATED)
    seen = returning(agent(**news))
    found = decision(seen, settings).actions
    assert not [one for one in found if isinstance(one, act.RaiseAlarm | act.ReturnNode)]
    late = returning(agent(steady=9000.0, **news), 9000.0, attempts=1)
    (failed,) = actions(late, act.Transition, settings)
    assert failed.event is NodeEvent.REPLACEMENT_FAILED


def test_a_node_that_came_back_by_itself_under_such_a_sresd_is_given_back() -> None:
    seen = returning(agent(judged=("disk",)), is_flap=True, marked=NOW - 90)
    found = actions(seen, act.ReturnNode, config(recovery=VALIDATED))
    assert found == [act.ReturnNode("n1", 1)]


def test_a_sresd_that_was_restarted_for_the_setting_has_its_time_from_then_on() -> None:
    seen = returning(agent(unjudged=("validation",), steady=30.0), 9000.0, attempts=1)
    assert actions(seen, act.Transition, config(recovery=VALIDATED)) == []


@pytest.mark.parametrize(
    ("ended", "text"), [(1499.0, ""), (1501.0, "its sresd could not run recovery.validate")]
)
def test_a_validation_has_its_own_time_and_an_end(ended: float, text: str) -> None:
    known = incident(state=NodeState.VALIDATING, run_ended=NOW - ended, attempts=1)
    seen = world(
        node(state="IDLE+FAIL", reason=REPLACE),
        agents=(agent(unjudged=("validation",), steady=ended),),
        incidents=(known,),
        probes={"n1": probes("answered")},
    )
    moves = actions(seen, act.Transition, config(recovery=VALIDATED))
    # One that began has a limit of its own: this one could not be begun, which no repair mends.
    assert [move.event for move in moves] == ([NodeEvent.GAVE_UP] if text else [])
    assert all(text in move.reason for move in moves)
