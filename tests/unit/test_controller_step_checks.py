"""Checks after a failed step: which nodes are asked, and when its supervisor is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from worlds import FakeClock

from slurm_resilience.controller.checking import step_checks
from slurm_resilience.controller.checking.step_checks import StepChecks
from slurm_resilience.errors import WireError
from slurm_resilience.wire.messages import (
    Evidence,
    NodeAnswer,
    NodeVerdict,
    RunStepChecks,
    StepChecksRun,
)

SICK = {"n2": NodeVerdict("n2", "sick", "1 EFA devices, the profile expects 2", "Action:Reboot")}


def ran(checks: int = 12, unjudged: tuple[str, ...] = ()) -> NodeAnswer:
    return NodeAnswer(1, msgspec.Raw(msgspec.msgpack.encode(StepChecksRun(checks, unjudged))))


class Supervisor:
    """A supervisor's connection."""

    role, subject, uid = "job", "7", 1000

    def __init__(self) -> None:
        self.told: list[Evidence] = []
        self.later: list[Callable[[], None]] = []

    def send(self, message: Evidence) -> None:
        self.told.append(message)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append(call)


class Nodes:
    """The nodes that are asked, and the checks around them."""

    def __init__(self, *away: str) -> None:
        self.away = away
        self.asked: dict[str, Callable[[NodeAnswer], None]] = {}
        self.seconds: set[float] = set()
        self.clock, self.wake = FakeClock(), threading.Event()
        self.checks = StepChecks(self._ask, self._begin_round, self.clock)
        self.supervisor: Any = Supervisor()

    def _ask(self, node: str, kind: str, body: Any, seconds: float, done: Any) -> None:
        assert kind == RunStepChecks.kind
        self.seconds.add(msgspec.msgpack.decode(body, type=RunStepChecks).seconds)
        if node in self.away:
            raise WireError(f"the sresd of {node} is not connected")
        self.asked[node] = done

    def _begin_round(self, uid: int) -> None:
        assert uid == self.supervisor.uid
        self.wake.set()

    def begin(self, *names: str, of_job: tuple[str, ...] = (), seconds: float = 5.0) -> bool:
        return self.checks.begin(self.supervisor, names, of_job or names, seconds)

    def round(self, verdicts: dict[str, NodeVerdict] | None = None) -> list[Evidence]:
        """A whole round; return what the supervisor has been told by its end."""
        self.checks.round_began()
        self.checks.round_ended(verdicts or {})
        told, self.supervisor.told = self.supervisor.told, []
        return list(told)


def test_the_supervisor_is_told_after_the_round_that_has_seen_all_answers() -> None:
    site = Nodes()
    assert site.begin("n1", "n2")
    site.checks.round_began()
    site.asked["n1"](ran())
    assert not site.wake.is_set()
    site.asked["n2"](ran())
    assert site.wake.is_set()
    # This round had read the nodes' reports before the last one came.
    site.checks.round_ended({})
    assert site.supervisor.told == []
    site.clock.pass_time(0.4)
    (told,) = site.round(SICK)
    assert (told.asked, told.checks) == (True, "over")
    assert [(v.node, v.verdict) for v in told.verdicts] == [("n1", "unknown"), ("n2", "sick")]
    assert told.text == "checks of n[1-2] took 0.4 s: at fault: n2"
    assert site.round(SICK) == [], "once"


def test_a_node_that_was_marked_for_its_fault_is_named_too() -> None:
    site = Nodes()
    site.begin("n1", "n2")
    site.asked["n1"](ran())
    site.asked["n2"](ran())
    marked = NodeVerdict("n2", "requested", "Action:Reboot", "Action:Reboot")
    (told,) = site.round({"n2": marked})
    assert told.text.endswith("at fault: n2")


def test_a_fault_that_is_only_observed_is_no_clean_bill() -> None:
    site = Nodes()
    site.begin("n1")
    site.asked["n1"](ran())
    (told,) = site.round({"n1": NodeVerdict("n1", "suspect", "1 of 2 GPUs answers")})
    assert told.text.endswith(": n1 may be at fault (1 of 2 GPUs answers)")


def test_a_node_has_a_part_of_the_time_that_the_supervisor_waits() -> None:
    site = Nodes()
    site.begin("n1", seconds=5.0)
    assert site.seconds == {4.0}
    other = Nodes()
    other.begin("n1", seconds=1e6)
    assert other.seconds == {step_checks.MAX_SECONDS * step_checks.SHARE_OF_NODE}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_without_a_time_no_node_is_asked(seconds: float) -> None:
    site = Nodes()
    assert not site.begin("n1", seconds=seconds)
    assert site.asked == {}


def test_a_node_that_cannot_be_asked_holds_nothing_up() -> None:
    site = Nodes("n2")
    assert site.begin("n1", "n2", "n3")
    site.asked["n1"](ran())
    site.asked["n3"](NodeAnswer(1, refused="n3 did not answer within 4 s"))
    (told,) = site.round()
    assert told.text == (
        "checks of n1 took 0.0 s: no fault was found; not checked: n[2-3] "
        "(the sresd of n2 is not connected)"
    )


def test_checks_that_could_not_tell_vouch_for_no_node() -> None:
    site = Nodes()
    site.begin("n1", "n2")
    site.asked["n1"](ran(2, ("gpu_count", "efa_devices")))
    site.asked["n2"](NodeAnswer(1, msgspec.Raw(b"\xff")))
    (told,) = site.round()
    assert told.text.startswith(
        "n[1-2] did not answer with checks: none of its 2 checks could tell"
    )


def test_only_the_nodes_of_the_job_are_asked_and_none_again_and_again() -> None:
    site = Nodes()
    assert site.begin("n1", "n9", of_job=("n1", "n2"))
    assert set(site.asked) == {"n1"}
    assert not site.begin("n1"), "one set of checks for each supervisor"
    begun = 0
    for _ in range(10):
        site.asked["n1"](ran())
        site.round()
        begun += site.begin("n1")
    assert begun == step_checks.CHECKS_AT_ONCE_OF_NODE - 1
    site.clock.pass_time(10.0)
    assert site.begin("n1")


def test_a_supervisor_that_is_gone_is_not_told() -> None:
    site = Nodes()
    site.begin("n1")
    site.checks.closed(site.supervisor)
    site.asked["n1"](ran())
    assert site.round() == []


def test_thousands_of_nodes_are_asked_in_slices() -> None:
    site = Nodes()
    names = tuple(f"n{number}" for number in range(1000))
    assert site.begin(*names)
    assert len(site.asked) == step_checks.SLICE
    for name in names[: step_checks.SLICE]:
        site.asked[name](ran())
    assert site.round() == [], "the others have not been asked yet"
    while site.supervisor.later:
        site.supervisor.later.pop()()
    for name in names[step_checks.SLICE :]:
        site.asked[name](ran())
    (told,) = site.round()
    assert len(told.verdicts) == 1000
