"""A search for nodes: Slurm is asked again while the others go on."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.clock import SystemClock
from slurm_resilience.config import Config
from slurm_resilience.errors import SlurmError, SlurmUnreachable
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.live_step import node_search
from slurm_resilience.resume.live_step.live_events import FaultyNode, SearchKind, StartSearch

CONTEXT: Any = SimpleNamespace(clock=SystemClock())


class Slurm:
    """Fails some times, then answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def ask(self) -> str:
        self.failures -= 1
        if self.failures >= 0:
            raise SlurmUnreachable("Socket timed out on send/recv operation")
        return "nodes"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_search, "RETRY_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("nodes", "excluded", "is_left"), [(4, "", True), (3, "", False), (4, "n4", False)]
)
def test_a_node_that_takes_no_task_is_left_only_where_another_one_is_idle(
    nodes: int, excluded: str, is_left: bool
) -> None:
    slurm = FakeSlurm(nodes)
    slurm.submit(3, no_kill=True)
    allocation = Allocation(slurm, slurm.job(1), Event(), patience=0.0, permits_expansion=True)
    allocation.suspects.update({excluded} - {""})
    context: Any = SimpleNamespace(
        allocation=allocation, limits=Config().resume, client=slurm, clock=SystemClock()
    )
    unfit = FaultyNode("n3", "it takes none", False)
    wanted = StartSearch(SearchKind.TASKS, (unfit,), ("n1", "n2", "n3"), 3, 0, (unfit,))
    found = node_search.check_nodes(context, wanted, Event())
    assert found.bad == ({"n3": "it takes none"} if is_left else {})
    assert found.nodes == (() if is_left else ("n3",))


def test_who_goes_on_is_not_ended_for_want_of_an_answer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert node_search.ask_until_answered(CONTEXT, Slurm(3).ask, lambda: True, Event()) == "nodes"
    assert capfd.readouterr().err.count("asked again") == 1


def test_where_nobody_goes_on_the_answer_stands() -> None:
    with pytest.raises(SlurmError):
        node_search.ask_until_answered(CONTEXT, Slurm(1).ask, lambda: False, Event())


def test_nobody_wants_it_any_more() -> None:
    stop = Event()
    stop.set()
    with pytest.raises(SlurmError):
        node_search.ask_until_answered(CONTEXT, Slurm(1).ask, lambda: True, stop)
