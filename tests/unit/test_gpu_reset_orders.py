"""A GPU is reset once for each order, on a node without jobs, and looked at afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from worlds import (
    NOW,
    FakeClock,
    actions,
    agent,
    config,
    finding,
    incident,
    node,
    probes,
    world,
)

from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.orders.gpu_reset import GpuReset, address_of
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.controller import actions as act
from slurm_resilience.controller.act.reset_replacer import ASK_AGAIN, GpuResetReplacer
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.records import Repair
from slurm_resilience.errors import SresError, WireError
from slurm_resilience.model import REBOOT, REPLACE, RESET, Finding, Severity
from slurm_resilience.replace.program import THIS_HOST
from slurm_resilience.replace.repair_order import RepairOrder, Run, RunExists
from slurm_resilience.wire.messages import GpusReset, NodeAnswer, ResetGpus

SMI = """\
#!/bin/sh
echo "$@" >> {folder}/calls
case "$1" in
--query-gpu*) cat {folder}/gpus ;;
--query-compute-apps*) cat {folder}/apps 2>/dev/null; true ;;
--gpu-reset) [ ! -e {folder}/fails ] || {{ cat {folder}/fails; exit 3; }}
    echo "GPU $3 was successfully reset." ;;
esac
"""
XID = Finding("xid", Severity.RESET, "Xid 46: GPU stopped", 1.0, "0000:3b:00", "46")


class Node:
    """A node with two GPUs and a stand-in of nvidia-smi."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.smi = folder / "nvidia-smi"
        self.smi.write_text(SMI.format(folder=folder))
        self.smi.chmod(0o755)
        self.put("gpus", "00000000:3B:00.0\n00000000:5E:00.0\n")
        self.outbox = Outbox()
        self.intake = FindingIntake(self.outbox)
        self.is_busy = False
        self.checks = 0

    def put(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def resets(self) -> list[str]:
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line for line in lines if line.startswith("--gpu-reset")]

    def sresd(self) -> GpuReset:
        def check(seconds: float) -> None:
            self.checks += 1

        return GpuReset(
            str(self.smi),
            self.folder / "state",
            self.outbox,
            self.intake,
            lambda: self.is_busy,
            check,
            FakeClock(),
            threading.Event(),
        )


@pytest.fixture
def machine(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_gpu_that_asks_is_reset_and_its_finding_is_gone(machine: Node) -> None:
    machine.intake.from_log(XID)
    answer = machine.sresd().answer(ResetGpus("1-1", 60.0))
    assert answer.is_well, answer
    assert machine.resets() == ["--gpu-reset -i 00000000:3B:00.0"]
    assert machine.outbox.holding() == () and machine.checks == 1


def test_an_order_is_carried_out_once_over_a_restart_of_sresd(machine: Node) -> None:
    machine.intake.from_log(XID)
    first = machine.sresd().answer(ResetGpus("1-1", 60.0))
    assert machine.sresd().answer(ResetGpus("1-1", 60.0)) == first
    assert len(machine.resets()) == 1
    machine.put("state/gpu-reset.json", '{"order":"2-1"}')
    machine.intake.from_log(XID)
    ended = machine.sresd().answer(ResetGpus("2-1", 60.0))
    assert (ended.is_well, ended.text) == (False, "sresd ended in the middle of the reset")
    assert len(machine.resets()) == 1


@pytest.mark.parametrize(
    ("what", "refusal"),
    [
        ({}, "no GPU has a finding"),
        ({"findings": [XID], "busy": True}, "a job's step runs"),
        ({"findings": [XID], "apps": "00000000:3B:00.0, 4711\n"}, "process 4711 has the GPU"),
        ({"findings": [XID], "gpus": "00000000:5E:00.0\n"}, "knows no GPU 0000:3b:00"),
        (
            {"findings": [msgspec.structs.replace(XID, check="sxid", subject="switch 3")]},
            "sxid asks for the reset of no GPU",
        ),
    ],
)
def test_nothing_is_begun_where_it_may_not_be(
    machine: Node, what: dict[str, Any], refusal: str
) -> None:
    for found in what.get("findings", ()):
        machine.intake.from_log(found)
    machine.is_busy = what.get("busy", False)
    for name in ("apps", "gpus"):
        if name in what:
            machine.put(name, what[name])
    with pytest.raises(SresError, match=refusal):
        machine.sresd().answer(ResetGpus("1-1", 60.0))
    assert machine.resets() == []


def test_a_node_without_the_program_refuses(machine: Node) -> None:
    machine.intake.from_log(XID)
    machine.smi.unlink()
    with pytest.raises(SresError, match="is not there"):
        machine.sresd().answer(ResetGpus("1-1", 60.0))


def test_a_gpu_in_use_is_tried_again_and_other_trouble_is_told(machine: Node) -> None:
    machine.intake.from_log(XID)
    machine.put("fails", "GPU 00000000:3B:00.0 is in use by another client.\n")
    answer = machine.sresd().answer(ResetGpus("1-1", 60.0))
    assert not answer.is_well and "in use by another client" in answer.text
    assert len(machine.resets()) == 3
    machine.put("fails", "Unable to reset this GPU.\n")
    answer = machine.sresd().answer(ResetGpus("1-2", 60.0))
    assert not answer.is_well and "Unable to reset" in answer.text
    assert len(machine.resets()) == 4
    assert machine.outbox.holding()


def test_what_a_reset_does_not_mend_is_told(machine: Node) -> None:
    machine.intake.from_log(XID)
    machine.intake.from_log(Finding("xid", Severity.REPLACE, "Xid 64", 200.0, "0000:3b:00", "64"))
    answer = machine.sresd().answer(ResetGpus("1-1", 60.0))
    assert not answer.is_well and "found after the reset: xid: Xid 64" in answer.text


def test_addresses_are_compared_however_they_are_written() -> None:
    assert address_of("0000:3b:00") == address_of("00000000:3B:00.0") == (0, 0x3B, 0)
    assert address_of("0001:3b:00") != address_of("0000:3b:00")
    assert address_of("switch 3") is None


# -- sresctld's side ----------------------------------------------------------------------------


class Asked:
    """Takes questions, and answers when the test says so."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.answer: Any = None

    def __call__(self, name: str, kind: str, body: Any, seconds: float, done: Any) -> None:
        self.orders.append(msgspec.msgpack.decode(body, type=ResetGpus).order)
        self.answer = done


def order(tmp_path: Path) -> RepairOrder:
    return RepairOrder(tmp_path / "runs" / "1-1.gpu-reset", "reset", "n1", RESET, 3600.0)


def test_an_order_survives_a_restart_of_sresctld(tmp_path: Path) -> None:
    asked, one = Asked(), order(tmp_path)
    replacer = GpuResetReplacer(asked, THIS_HOST, lambda: None)
    replacer.start(one, node(), NOW)
    assert replacer.status(one, node(), NOW + 1) == Run("running", by="its sresd")
    with pytest.raises(RunExists):
        replacer.start(one, node(), NOW + 1)
    anew = GpuResetReplacer(asked, THIS_HOST, lambda: None)
    assert anew.status(one, node(), NOW + 2).next_act == ASK_AGAIN
    anew.start(one, node(), NOW + 2)
    assert len(set(asked.orders)) == 1 and len(asked.orders) == 2
    body = msgspec.Raw(msgspec.msgpack.encode(GpusReset(True, "reset it")))
    asked.answer(NodeAnswer(1, body))
    ended = anew.status(one, node(), NOW + 3)
    assert (ended.state, ended.rc, ended.output) == ("ended", 0, "reset it")


def test_a_refusal_and_a_silence_are_failures(tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise WireError("the sresd of n1 is not connected")

    one = order(tmp_path)
    GpuResetReplacer(refuse, THIS_HOST, lambda: None).start(one, node(), NOW)
    ended = GpuResetReplacer(refuse, THIS_HOST, lambda: None).status(one, node(), NOW)
    assert (ended.rc, ended.output) == (1, "the sresd of n1 is not connected")
    silent = order(tmp_path / "silent")
    replacer = GpuResetReplacer(Asked(), THIS_HOST, lambda: None)
    replacer.start(silent, node(), NOW)
    assert replacer.status(silent, node(), NOW + 311.0).rc == 124


# -- what is decided ------------------------------------------------------------------------------

SICK = agent(findings=(finding(Severity.RESET, code="46"),))


@pytest.mark.parametrize(
    ("resets", "reboots", "settings", "action"),
    [
        (0, 0, {}, RESET),
        (1, 0, {}, REBOOT),
        (1, 1, {}, REPLACE),
        (1, 0, {"max_resets": 2}, RESET),
    ],
)
def test_a_reset_that_did_not_last_is_met_by_more(
    resets: int, reboots: int, settings: dict[str, Any], action: str
) -> None:
    before = [Repair("n1", number, RESET, "machine-n1") for number in range(resets)]
    before += [Repair("n1", 9, REBOOT, "machine-n1") for _ in range(reboots)]
    seen = world(node(), agents=(SICK,), can_reset=True, repairs=tuple(before))
    (mark,) = actions(seen, act.MarkNode, config(recovery=settings))
    assert (mark.action, mark.state) == (action, "fail")


def test_where_none_is_reset_it_is_rebooted() -> None:
    (mark,) = actions(world(node(), agents=(SICK,)), act.MarkNode)
    assert mark.action == REBOOT


def repairing(run: Run, **more: Any) -> Any:
    known = incident(
        state=NodeState.REPAIRING, kind="sick", action=RESET, attempts=1, run_started=NOW - 9
    )
    known = msgspec.structs.replace(known, **more)
    shown = node(state="IDLE+FAIL", reason=RESET)
    return world(shown, agents=(SICK,), incidents=(known,), runs={1: run}, can_reset=True)


def test_a_reset_that_fails_becomes_a_reboot() -> None:
    (move,) = actions(repairing(Run("ended", 1, "not reset", NOW)), act.Transition)
    assert (move.event, move.action) == (NodeEvent.REPLACEMENT_FAILED, REBOOT)
    # One that was never begun is tried again, and a person's request stays what it is.
    (move,) = actions(repairing(Run("lost")), act.Transition)
    assert (move.event, move.action) == (NodeEvent.REPLACEMENT_FAILED, "")
    failed = Run("ended", 1, "no GPU has a finding", NOW)
    (move,) = actions(repairing(failed, kind="requested"), act.Transition)
    assert move.action == ""


def test_a_reset_that_fails_becomes_a_replacement_where_the_reboots_are_used_up() -> None:
    seen = repairing(Run("ended", 1, "not reset", NOW))
    memory = msgspec.structs.replace(
        seen.memory, repairs=(Repair("n1", 9, REBOOT, "machine-n1"), Repair("n1", 1, RESET, ""))
    )
    seen = msgspec.structs.replace(seen, memory=memory)
    (move,) = actions(seen, act.Transition)
    assert (move.event, move.action) == (NodeEvent.REPLACEMENT_FAILED, REPLACE)
    assert move.reason.endswith("not reset; it is replaced")
    more = config(recovery={"max_reboots": 2})
    assert [move.action for move in actions(seen, act.Transition, more)] == [REBOOT]


def test_a_node_is_given_back_in_the_same_boot_once_nothing_is_found() -> None:
    known = incident(
        state=NodeState.VALIDATING,
        kind="sick",
        action=RESET,
        attempts=1,
        run_ended=NOW - 9,
        boot_before="boot-1",
        instance_before="machine-n1",
    )
    shown, tried = node(state="IDLE+FAIL", reason=RESET), {"n1": probes("answered")}
    well = world(shown, agents=(agent(),), incidents=(known,), probes=tried)
    assert actions(well, act.ReturnNode) == [act.ReturnNode("n1", 1)]
    sick = world(shown, agents=(SICK,), incidents=(known,), probes=tried)
    assert actions(sick, act.ReturnNode) == []
    (move,) = actions(sick, act.Transition)
    assert move.action == REBOOT


def test_a_person_asks_for_a_reset_by_the_exact_reason() -> None:
    assert node(reason=RESET).requested_action == RESET
    assert node(reason="action: reset").near_miss == RESET
