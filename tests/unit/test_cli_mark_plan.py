"""The effect of an administrator's request on nodes, and the grounds to refuse it."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.cli.mark_plan import MarkRequest, mark, release, what_next
from slurm_resilience.errors import UsageError
from slurm_resilience.model import REBOOT, REPLACE, Job, Node


def nodes(*found: Node) -> dict[str, Node]:
    return {node.name: node for node in found}


def node(name: str = "n1", state: str = "IDLE", reason: str = "", by: str = "root") -> Node:
    base, *flags = state.split("+")
    return Node(name, base, frozenset(flags), reason=reason, reason_by=by if reason else "")


def job(number: int, *names: str, state: str = "RUNNING", requeue: bool = False) -> Job:
    return Job(number, 1000, state, nodes=names, requeue=requeue)


def test_an_idle_node_is_failed() -> None:
    plan = mark(nodes(node()), (), REPLACE, force=False, yes=False)
    assert plan.changes == (MarkRequest(("n1",), "fail", REPLACE),)
    assert plan.lines == {"n1": "fail, Action:Replace; no job runs on it"}


def test_jobs_end_first_and_those_under_auto_resume_are_moved() -> None:
    jobs = (job(12, "n1", "n2"), job(13, "n1"), job(14, "n1", state="PENDING"), job(15, "n3"))
    found = nodes(node("n1", "ALLOCATED"), node("n2", "ALLOCATED"), node("n3", "ALLOCATED"))
    plan = mark(found, jobs, REPLACE, force=False, yes=False, supervised=frozenset({12}))
    assert plan.lines["n1"].endswith(
        "2 jobs run on it and end first (job 12 is moved off by auto-resume)"
    )
    assert plan.lines["n2"].endswith(
        "1 job runs on it and ends first (job 12 is moved off by auto-resume)"
    )
    assert plan.lines["n3"].endswith("1 job runs on it and ends first (job 15)")


def test_what_is_marked_already_is_left_alone() -> None:
    found = nodes(node("n1", "IDLE+FAIL", REPLACE), node("n2", "IDLE+DRAIN", REPLACE))
    assert mark(found, (), REPLACE, force=False, yes=False).changes == ()
    down = nodes(node("n1", "DOWN", REPLACE))
    assert mark(down, (), REPLACE, force=True, yes=False).changes == ()
    assert mark(down, (), REPLACE, force=False, yes=False).changes == ()


def test_a_request_that_was_given_up_is_made_anew() -> None:
    failed = node("n2", "IDLE+FAIL", REPLACE)
    gave_up = frozenset({"n2", "n3"})
    found = nodes(node("n1", "IDLE+FAIL", REPLACE), failed, node("n3"))
    plan = mark(found, (), REPLACE, force=False, yes=False, gave_up=gave_up)
    assert plan.changes == (
        MarkRequest(("n3",), "fail", REPLACE),
        MarkRequest(("n2",), "", REPLACE, renew=True),
    )
    assert "already" in plan.lines["n1"]
    forced = mark(nodes(failed), (), REPLACE, force=True, yes=True, gave_up=gave_up)
    assert forced.changes == (MarkRequest(("n2",), "down", REPLACE, renew=True),)


def test_a_graceful_request_can_be_made_a_forced_one() -> None:
    found = nodes(node("n1", "ALLOCATED+FAIL", REPLACE))
    plan = mark(found, (job(7, "n1"),), REPLACE, force=True, yes=True)
    assert plan.changes == (MarkRequest(("n1",), "down", REPLACE),)
    assert "job 7 ends at once" in plan.lines["n1"]


def test_a_node_that_is_down_or_failing_keeps_its_state() -> None:
    """Slurm refuses to fail a failing node, and a down one has no jobs to wait for."""
    found = nodes(node("n1"), node("n2", "DOWN", "Not responding"), node("n3", "IDLE+FAIL", "x"))
    plan = mark(found, (), REBOOT, force=False, yes=True)
    assert plan.changes == (
        MarkRequest(("n1",), "fail", REBOOT),
        MarkRequest(("n2", "n3"), "", REBOOT),
    )


def test_force_names_the_jobs_that_die_and_wants_a_yes() -> None:
    found = nodes(node("n1", "MIXED"), node("n2", "ALLOCATED"))
    jobs = (job(3, "n1", requeue=True), job(4, "n1", "n2"))
    with pytest.raises(UsageError, match=r"n\[1-2\] die at once: 3 \(is requeued\), 4 \(is lost\)"):
        mark(found, jobs, REPLACE, force=True, yes=False)
    with pytest.raises(UsageError, match=r"reboot --force: no job runs on n1 now"):
        mark(nodes(node()), (), REBOOT, force=True, yes=False)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "held",
    [
        node("n2", "IDLE+DRAIN", "fan broken", "bob"),
        node("n2", "DOWN", "do not touch", "bob"),
        node("n2", "IDLE+FAIL", REBOOT),
        node("n2", "IDLE+DRAIN", "action:reboot"),
        node("n2", "IDLE+POWERED_DOWN"),
    ],
)
def test_one_node_that_somebody_holds_stops_all(held: Node, force: bool) -> None:
    found = nodes(node("n1"), held)
    with pytest.raises(UsageError, match=r"^n2 .*add --yes"):
        mark(found, (), REPLACE, force=force, yes=False)
    plan = mark(found, (), REPLACE, force=force, yes=True)
    assert {name for change in plan.changes for name in change.nodes} == {"n1", "n2"}


@pytest.mark.parametrize("reason", ["action:replace", "Action: Replace", "Action:Replace."])
def test_a_near_miss_is_corrected_without_asking(reason: str) -> None:
    found = nodes(node("n1", "IDLE+DRAIN", reason))
    plan = mark(found, (), REPLACE, force=False, yes=False)
    assert plan.changes == (MarkRequest(("n1",), "fail", REPLACE),)


def test_slurms_own_reason_is_nobodys() -> None:
    found = nodes(node("n1", "DOWN", "Not responding", "slurm"))
    assert mark(found, (), REPLACE, force=False, yes=False).changes


def seen(**fields: Any) -> dict[str, Any]:
    return {"nodes": {"n1": {"incident": None, "findings": [], **fields}}}


def test_a_request_is_taken_back() -> None:
    found = nodes(node("n1", "IDLE+FAIL", REPLACE), node("n2", "IDLE+DRAIN", "action:reboot"))
    plan = release(found, seen(incident={"state": "set-aside"}), yes=False)
    assert plan.changes == (MarkRequest(("n1", "n2"), "resume", ""),)
    assert plan.lines["n1"] == "resume, Action:Replace taken back"


def test_nothing_to_cancel_is_an_error_that_names_the_nodes() -> None:
    found = nodes(node("n1", "IDLE+FAIL", REPLACE), node("n2"), node("n3", "DOWN", "fan"))
    with pytest.raises(UsageError, match=r"nothing to cancel on n\[2-3\]"):
        release(found, seen(), yes=True)


@pytest.mark.parametrize("state", ["repairing", "validating", "returning"])
def test_a_replacement_that_runs_is_aborted_only_with_yes(state: str) -> None:
    found = nodes(node("n1", "IDLE+FAIL", REPLACE))
    with pytest.raises(UsageError, match="runs already"):
        release(found, seen(incident={"state": state}), yes=False)
    assert release(found, seen(incident={"state": state}), yes=True).changes


def test_without_sresctld_a_cancel_wants_a_yes() -> None:
    found = nodes(node("n1", "IDLE+FAIL", REPLACE))
    with pytest.raises(UsageError, match="sresctld does not answer"):
        release(found, None, yes=False)
    assert release(found, None, yes=True).changes


def test_a_cancel_warns_of_what_will_mark_the_node_again() -> None:
    finding = {"severity": "replace", "check": "xid", "text": "Xid 79"}
    found = nodes(node("n1", "IDLE+FAIL", REPLACE))
    assert (
        "still has the finding xid: Xid 79"
        in release(found, seen(findings=[finding]), yes=False).lines["n1"]
    )
    dead = nodes(node("n1", "DOWN+NOT_RESPONDING", REPLACE))
    assert "does not answer Slurm" in release(dead, seen(), yes=False).lines["n1"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "does not answer"),
        ({"paused": "think first"}, "paused (think first)"),
        ({"mode": "none", "can_replace": True}, "recovery.mode is none"),
        ({"mode": "observe", "can_replace": True}, "recovery.mode is observe"),
        (
            {"mode": "automatic", "can_replace": True, "nodes": {"n2": {"mode": "observe"}}},
            "recovery.mode of n2 is observe: nothing follows by itself",
        ),
        ({"mode": "automatic", "can_replace": False}, "by a person"),
        ({"mode": "automatic", "can_replace": True}, "sres node watch n[1-2]"),
    ],
)
def test_what_follows_is_said_as_it_is(status: dict[str, Any] | None, words: str) -> None:
    assert words in what_next(REPLACE, status, "n[1-2]", ["n1", "n2"])


def test_a_reboot_may_follow_where_no_replacement_does() -> None:
    status = {"mode": "automatic", "can_replace": False, "can_reboot": True}
    assert "sres node watch n1" in what_next(REBOOT, status, "n1", ["n1"])
    assert "by a person" in what_next(REPLACE, status, "n1", ["n1"])
