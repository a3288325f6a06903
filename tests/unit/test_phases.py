"""The demo's account: three logs become the phases of one recovery."""

from __future__ import annotations

from typing import Any

from slurm_resilience.demo.phases import Account, account, complete

JOURNAL: list[dict[str, Any]] = [
    {"at": 90.0, "kind": "closed", "node": "n3"},  # of an earlier incident
    {"at": 104.0, "kind": "detected", "node": "n3"},
    {"at": 104.1, "kind": "marked", "node": "n3"},
    {"at": 104.2, "kind": "marked", "node": "n9"},
    {"at": 107.0, "kind": "closed", "node": "n3"},
]
SUPERVISOR: list[dict[str, Any]] = [
    {"at": 50.0, "event": "started"},
    {"at": 104.4, "event": "step_ended"},
    {"at": 104.6, "event": "nodes_ready"},
    {"at": 104.7, "event": "started"},
]


def steps(token: str, first: int, last: int, at: float) -> list[dict[str, Any]]:
    return [
        {"at": at + n - first, "step": n, "loss": n / 10, "token": token}
        for n in range(first, last + 1)
    ]


def power(training: list[dict[str, Any]]) -> Account:
    return account("power", 100.0, "n3", JOURNAL, SUPERVISOR, training)


def test_a_power_loss() -> None:
    # Steps 1 to 41, the last one half a second after the fault; then from checkpoint 30.
    found = power(steps("1.0.1", 1, 41, 60.5) + steps("1.0.2", 31, 50, 109.0))
    assert found.phases == {
        "detected": 4.0,
        "marked": 4.1,
        "step_ended": 4.4,
        "nodes_ready": 4.6,
        "relaunched": 4.7,
        "first_step": 9.0,
        "node_back": 7.0,
    }
    assert (found.last_step, found.resumed_from, found.steps_lost) == (41, 30, 11)
    assert found.caught_up == 19.0
    assert found.loss_before == found.loss_after == 4.1
    assert complete(found, "power")


def test_a_fault_right_behind_a_checkpoint_loses_no_step() -> None:
    found = power(steps("1.0.1", 1, 40, 60.5) + steps("1.0.2", 41, 50, 109.0))
    assert (found.last_step, found.resumed_from, found.steps_lost) == (40, 40, 0)
    assert found.caught_up == found.phases["first_step"] == 9.0
    assert found.loss_before is found.loss_after is None
    assert complete(found, "power")


def test_before_anything_has_happened() -> None:
    found = account("power", 100.0, "n3", [], SUPERVISOR[:1], steps("1.0.1", 1, 40, 60.5))
    assert set(found.phases.values()) == {None}
    assert found.last_step == 40
    assert not complete(found, "power")


def test_a_killed_rank_has_no_node_in_it() -> None:
    ours = [event for event in SUPERVISOR if event["event"] != "nodes_ready"]
    training = steps("1.0.1", 1, 40, 60.5) + steps("1.0.2", 31, 50, 109.0)
    found = account("rank", 100.0, "n3", [], ours, training)
    assert found.phases["detected"] == found.phases["step_ended"] == 4.4
    assert found.phases["marked"] is found.phases["node_back"] is None
    assert found.phases["nodes_ready"] is None
    assert complete(found, "rank")


def test_a_requeued_job_has_its_nodes_when_it_runs() -> None:
    ours = [event for event in SUPERVISOR if event["event"] != "nodes_ready"]
    training = steps("1.0.1", 1, 40, 60.5) + steps("1.1.1", 31, 50, 109.0)
    found = account("power", 100.0, "n3", JOURNAL, ours, training)
    assert found.phases["nodes_ready"] == found.phases["relaunched"] == 4.7
