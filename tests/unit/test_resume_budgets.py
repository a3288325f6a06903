"""No program is started again for ever, however long its runs take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.decide.classify import Cause, Ending
from slurm_resilience.resume.decide.plan import Plan, PlanFacts, plan

LIMITS = ResumeSettings()
LONG = LIMITS.progress_after + 1
NODES = ("n1", "n2", "n3")
ENDED = Ending(1, LONG, False, "RUNNING", nodes=NODES)
FACTS = PlanFacts((*NODES, "n4"), 3, True, False, False, False)
"""A spare inside, and no other way."""
PROGRAM = Cause("program", "it ended")


def ending(**more: Any) -> Ending:
    return msgspec.structs.replace(ENDED, **more)


def chosen(*history: Ending, facts: PlanFacts = FACTS, cause: Cause = PROGRAM) -> Plan:
    return plan(cause, facts, history, LIMITS)


@pytest.mark.parametrize("code", [1, 137])
@pytest.mark.parametrize("ran_for", [LONG, 8 * 3600.0])
def test_a_crash_loop_of_long_runs_is_a_bug(code: int, ran_for: float) -> None:
    tries = [ending(code=code, ran_for=ran_for + second) for second in range(4)]
    assert [chosen(*tries[:n]).kind for n in range(1, 5)] == ["relaunch"] * 3 + ["stop"]
    assert "it is a bug" in chosen(*tries).reason


@pytest.mark.parametrize(
    "other",
    [{"progressed": True}, {"ran_for": 3 * LONG}, {"code": 2}],
    ids=["progress", "elsewhere", "another"],
)
def test_failures_that_differ_are_no_loop(other: dict[str, Any]) -> None:
    assert chosen(ENDED, ENDED, ending(**other), ENDED).kind == "relaunch"


def test_a_node_s_fault_in_between_does_not_hide_a_loop() -> None:
    lost = ending(faulty={"n2": "dead"}, ran_for=50.0)
    assert chosen(ENDED, ENDED, lost, ENDED, ENDED).kind == "stop"


@given(
    runs=st.lists(st.floats(LONG, 1e6), min_size=100, max_size=100),
    code=st.sampled_from((1, 137)),
)
def test_a_program_that_never_reports_is_stopped_at_last(runs: list[float], code: int) -> None:
    history = [ending(code=code, ran_for=seconds) for seconds in runs]
    kinds = [chosen(*history[:n]).kind for n in range(1, 100)]
    assert "stop" in kinds[: LIMITS.max_same_failure + 1]


def test_an_hour_has_a_budget_whatever_the_cause() -> None:
    cause = Cause("node", "n2: dead", ("n2",))

    def lost(minutes: int, progressed: bool) -> list[Ending]:
        return [
            ending(ended_at=1e9 + 60 * minutes * n, faulty={"n2": "x"}, progressed=progressed)
            for n in range(LIMITS.max_per_hour)
        ]

    assert chosen(*lost(5, False), cause=cause).kind == "stop"
    assert chosen(*lost(5, False)[1:], cause=cause).kind == "relaunch"
    assert chosen(*lost(7, False), cause=cause).kind == "relaunch"
    assert chosen(*lost(5, True), cause=cause).kind == "relaunch"


def test_a_node_on_which_every_attempt_fails_first_is_left_once() -> None:
    on_n2 = ending(first_failed="n2", ran_for=60.0)
    assert chosen(on_n2).kind == "relaunch"
    left = chosen(on_n2, on_n2)
    assert (left.kind, left.nodes, left.leave) == ("relaunch", ("n1", "n3", "n4"), ("n2",))
    assert "n2 was the only one to fail" in left.reason
    elsewhere = ending(first_failed="n4", ran_for=60.0, nodes=("n1", "n3", "n4"))
    assert chosen(on_n2, on_n2, elsewhere).kind == "stop"


@pytest.mark.parametrize(
    ("endings", "facts"),
    [
        ((("n2", NODES), ("n1", NODES)), FACTS),
        ((("n2", ("n2",)), ("n2", ("n2",))), FACTS),
        ((("", NODES), ("", NODES)), FACTS),
        ((("n2", NODES), ("n2", NODES)), msgspec.structs.replace(FACTS, job_nodes=NODES)),
    ],
    ids=["several", "one node", "unknown", "no other node"],
)
def test_no_node_is_left_without_a_pattern(
    endings: tuple[tuple[str, tuple[str, ...]], ...], facts: PlanFacts
) -> None:
    history = [ending(first_failed=first, nodes=nodes, ran_for=60.0) for first, nodes in endings]
    assert chosen(*history, facts=facts).kind == "stop"
