"""A search for nodes: Slurm is asked again while the others go on."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import SlurmError, SlurmUnreachable
from slurm_resilience.resume.live_step import node_search

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
