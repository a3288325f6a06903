"""Escalation over incidents: a reboot that did not help, a replacement that did not help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
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
    node,
    probes,
    world,
)

from slurm_resilience.controller import actions as act
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import IncidentFacts, MachineIdentity, Repair
from slurm_resilience.model import REBOOT, REPLACE, RESET, Severity

NEEDS_REBOOT = agent(findings=(finding(Severity.REBOOT),))


def mark(**more: Any) -> act.MarkNode:
    (found,) = actions(world(node("n1"), agents=(NEEDS_REBOOT,), **more), act.MarkNode)
    assert isinstance(found, act.MarkNode)
    return found


def repair(action: str, number: int = 9, machine: str = "machine-n1", name: str = "n1") -> Repair:
    return Repair(name, number, action, machine)


def test_the_first_fault_reboots_and_the_next_one_replaces() -> None:
    assert mark().action == REBOOT
    again = mark(repairs=(repair(REBOOT),))
    assert again.action == REPLACE
    assert again.reason.endswith("rebooted once already within 7 days")


@pytest.mark.parametrize(
    "known",
    [
        repair(REBOOT, machine="the one before"),
        repair(REBOOT, machine="machine-n2", name="n2"),
        repair(REPLACE),
    ],
)
def test_another_machines_reboot_does_not_count(known: Repair) -> None:
    assert mark(repairs=(known,)).action == REBOOT


def test_a_reboot_of_an_unknown_machine_counts() -> None:
    assert mark(repairs=(repair(REBOOT, machine=""),)).action == REPLACE


def test_a_reboot_counts_for_the_machine_under_another_name_too() -> None:
    assert mark(repairs=(repair(REBOOT, name="n2"),)).action == REPLACE


def lemon(repairs: int, **more: Any) -> Any:
    """A silent node whose machine was repaired so often, as another node too."""
    names = ("n7", "n1", "n1", "n1")
    known = tuple(repair(REBOOT, 10 + i, "machine-n1", names[i]) for i in range(repairs))
    seen = empty(replaced=0, **more)
    memory = msgspec.structs.replace(seen.memory, repairs=known)
    out = {"n1": node("n1", "DOWN", more.get("action", REPLACE))}
    return msgspec.structs.replace(seen, memory=memory, nodes=out)


@pytest.mark.parametrize("action", [REBOOT, REPLACE])
def test_a_machine_that_was_repaired_too_often_is_a_lemon(action: str) -> None:
    said = decision(lemon(3, action=action)).actions
    (given_up,) = [a for a in said if isinstance(a, act.Transition)]
    assert given_up.event is NodeEvent.GAVE_UP
    assert "its machine machine-n1 is a lemon: repaired 3 times within 7 d" in given_up.reason
    assert "(as n1, n7), a person must look" in given_up.reason
    assert not [a for a in said if isinstance(a, act.StartReplacement)]


def test_fewer_repairs_or_a_persons_request_make_no_lemon() -> None:
    for seen in (lemon(2), lemon(3, kind="requested")):
        assert len(actions(seen, act.StartReplacement)) == 1
    later = config(recovery={"max_repairs": 4})
    assert len(actions(lemon(3), act.StartReplacement, later)) == 1


def test_a_new_machine_under_the_name_is_none() -> None:
    seen = lemon(3)
    agents = {"n1": msgspec.structs.replace(seen.agents["n1"], instance="machine-new")}
    seen = msgspec.structs.replace(seen, agents=agents)
    assert len(actions(seen, act.StartReplacement)) == 1


def test_an_identity_that_two_nodes_show_is_no_machines_own() -> None:
    """The same placeholder in all firmwares would make a lemon of each node in turn."""
    seen = lemon(3)
    other = agent("n2", instance="machine-n1")
    shared = msgspec.structs.replace(seen, agents=dict(seen.agents) | {"n2": other})
    assert len(actions(shared, act.StartReplacement)) == 1
    old = msgspec.structs.replace(other, silence=60.0)  # the same machine, under its name of before
    moved = msgspec.structs.replace(seen, agents=dict(seen.agents) | {"n2": old})
    assert not actions(moved, act.StartReplacement)
    copies = (NEEDS_REBOOT, agent("n2", instance="machine-n1"))
    of_n2, of_n1 = repair(REBOOT, name="n2"), repair(REBOOT)
    for known, action in ((of_n2, REBOOT), (of_n1, REPLACE)):
        seen = world(node("n1"), node("n2"), agents=copies, repairs=(known,))
        assert [one.action for one in actions(seen, act.MarkNode)] == [action]


def test_more_reboots_may_be_allowed() -> None:
    two = config(recovery={"max_reboots": 2})
    seen = world(node("n1"), agents=(NEEDS_REBOOT,), repairs=(repair(REBOOT),))
    assert [a.action for a in actions(seen, act.MarkNode, two)] == [REBOOT]
    none = config(recovery={"max_reboots": 0})
    seen = world(node("n1"), agents=(NEEDS_REBOOT,))
    assert [a.action for a in actions(seen, act.MarkNode, none)] == [REPLACE]


def rebooted(*agents: Any, can_replace: bool = True, asked: str = REBOOT, **more: Any) -> list[str]:
    """Return what follows a reboot after which the node tells this, as actions."""
    known = incident(
        state=NodeState.VALIDATING, kind="sick", action=REBOOT, attempts=1, run_ended=NOW - 9,
        boot_before="boot-1", instance_before="machine-n1", **more,
    )  # fmt: skip
    seen = world(
        node("n1", "IDLE+FAIL", asked), agents=agents, incidents=(known,), can_replace=can_replace,
        can_reboot=True, repairs=(repair(REBOOT, 1),), probes={"n1": probes("answered")},
    )  # fmt: skip
    two = config(recovery={"max_reboots": 2})
    return [move.action for rule in (CONFIG, two) for move in actions(seen, act.Transition, rule)]


def test_a_reboot_after_which_the_fault_is_there_still_becomes_a_replacement() -> None:
    still = msgspec.structs.replace(NEEDS_REBOOT, boot_id="boot-2")
    assert rebooted(still) == [REPLACE, ""]
    assert rebooted(still, can_replace=False) == ["", ""]
    assert rebooted(msgspec.structs.replace(agent(), boot_id="boot-2")) == []  # it is well


def test_what_a_person_asked_for_meanwhile_is_not_overwritten() -> None:
    """The act would see the person's word and write nothing, in each round anew."""
    still = msgspec.structs.replace(NEEDS_REBOOT, boot_id="boot-2")
    assert rebooted(still, asked=RESET) == ["", ""]


def empty(kind: str = "dead", replaced: int = 3, **more: Any) -> Any:
    """A silent node that was replaced so often, each machine another one."""
    repairs = tuple(repair(REPLACE, i, f"machine {i}") for i in range(10, 10 + replaced))
    known = incident(state=NodeState.EMPTY, kind=kind, id=99, **more)
    silent = dead(silence=400.0, probes={"n1": probes("silent", "silent", ago=0.2)})
    return world(node("n1", "DOWN", REPLACE), incidents=(known,), repairs=repairs, **silent)


def test_a_node_that_was_replaced_too_often_is_left_to_a_person() -> None:
    said = decision(empty()).actions
    (given_up,) = [a for a in said if isinstance(a, act.Transition)]
    assert given_up.event is NodeEvent.GAVE_UP
    assert "replaced 3 times within 7 days already, a person must look" in given_up.reason
    assert not [a for a in said if isinstance(a, act.StartReplacement)]
    (alarm,) = [a for a in said if isinstance(a, act.RaiseAlarm)]
    assert alarm.key == "worn-99"


@pytest.mark.parametrize(
    "seen", [empty(replaced=2), empty(kind="requested")], ids=["fewer", "a person asks for it"]
)
def test_else_it_is_replaced(seen: Any) -> None:
    assert len(actions(seen, act.StartReplacement)) == 1


@pytest.mark.parametrize("known", [{"replaced": 3}, {"replaced": 0, "hourly": 3}])
def test_a_node_that_is_just_empty_is_not_replaced_past_the_limits(known: dict[str, int]) -> None:
    """Its last job has left in this very cycle: it is given up in the next one."""
    starts = tuple((NOW - 9, "n1") for _ in range(known.pop("hourly", 0)))
    seen = empty(**known)
    memory = msgspec.structs.replace(seen.memory, starts=starts)
    just_empty = msgspec.structs.replace(seen.incidents["n1"], state=NodeState.SET_ASIDE)
    seen = msgspec.structs.replace(seen, memory=memory, incidents={"n1": just_empty})
    said = [a for a in decision(seen).actions if not isinstance(a, act.ProbeNode)]
    assert [getattr(a, "event", a) for a in said] == [NodeEvent.EMPTIED]
    # Slurm shows no work, and a suspended job has its memory there.
    held = msgspec.structs.replace(seen.nodes["n1"], has_suspended_job=True)
    seen = msgspec.structs.replace(seen, nodes={**seen.nodes, "n1": held})
    assert not [a for a in decision(seen).actions if not isinstance(a, act.ProbeNode)]


def test_the_tries_of_one_incident_are_one_repair_and_a_drill_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    machine = MachineIdentity("boot", "serial-1")
    drill = "xid: Xid 79 (injected); rebooted once already"
    for event, name, reason in (
        (NodeEvent.DETECTED, "n1", "xid"),
        (NodeEvent.REQUESTED, "n2", "xid"),
        (NodeEvent.DETECTED, "n3", drill),
    ):
        kind = "requested" if event is NodeEvent.REQUESTED else "sick"
        known = journal.open_incident(name, event, kind, REBOOT, reason, NOW, machine)
        if kind == "sick":
            journal.apply(known.id, NodeEvent.MARKED, "", NOW)
        journal.apply(known.id, NodeEvent.EMPTIED, "", NOW)
        for _ in range(2):
            facts = IncidentFacts(before=machine)
            journal.apply(known.id, NodeEvent.REPLACING, "", NOW, facts)
            journal.apply(known.id, NodeEvent.REPLACEMENT_FAILED, "", NOW)
    assert journal.repairs(NOW - 1) == (Repair("n1", 1, REBOOT, "serial-1"),)
    assert journal.memory(NOW, 1.0, CONFIG.recovery.recurrence_window).repairs
    assert journal.repairs(NOW) == ()
