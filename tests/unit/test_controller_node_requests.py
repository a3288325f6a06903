"""Questions to nodes: one of a kind at a time, each with an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from slurm_resilience.controller import node_requests
from slurm_resilience.controller.node_requests import NodeRequests
from slurm_resilience.errors import UsageError, WireError
from slurm_resilience.wire.messages import NodeAnswer, NodeRequest

BODY = msgspec.Raw(b"\xc0")


class Agent:
    """A node's connection."""

    role, uid = "node", 0

    def __init__(self, node: str) -> None:
        self.subject = node
        self.asked: list[NodeRequest] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def send(self, message: NodeRequest) -> None:
        self.asked.append(message)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((seconds, call))


class Site:
    def __init__(self) -> None:
        self.agents: dict[str, Any] = {"n1": Agent("n1"), "n2": Agent("n2")}
        self.of_jobs: dict[int, list[Any]] = {7: [Agent("7")], 8: [Agent("8"), Agent("8")]}
        self.requests = NodeRequests(self)  # type: ignore[arg-type]
        self.answers: list[NodeAnswer] = []

    def agent_connection(self, node: str) -> Any:
        return self.agents.get(node)

    def supervisors(self, job: int) -> list[Any]:
        return self.of_jobs.get(job, [])

    def ask(self, node: str = "n1", kind: str = "send-log", seconds: float = 5.0) -> None:
        self.requests.ask(node, kind, BODY, seconds, self.answers.append)


@pytest.fixture
def site() -> Site:
    return Site()


def test_an_answer_goes_to_its_asker(site: Site) -> None:
    site.ask()
    (asked,) = site.agents["n1"].asked
    assert (asked.kind, asked.seconds, asked.body) == ("send-log", 5.0, BODY)
    answer = NodeAnswer(asked.id, msgspec.Raw(b"\xc3"))
    site.requests.answered(site.agents["n1"], answer)
    assert site.answers == [answer]
    site.requests.answered(site.agents["n1"], answer)
    assert len(site.answers) == 1, "an answer counts once"


def test_another_node_does_not_answer_for_it(site: Site) -> None:
    site.ask()
    (asked,) = site.agents["n1"].asked
    site.requests.answered(site.agents["n2"], NodeAnswer(asked.id))
    site.requests.answered(site.agents["n1"], NodeAnswer(99))
    assert site.answers == []


def test_one_question_of_a_kind_is_under_way_at_a_node(site: Site) -> None:
    site.ask()
    with pytest.raises(WireError, match="n1 is being asked for send-log already"):
        site.ask()
    site.ask(kind="run-check")
    site.ask("n2")
    site.requests.answered(site.agents["n1"], NodeAnswer(site.agents["n1"].asked[0].id))
    site.ask()


def test_a_question_ends_after_its_time(site: Site) -> None:
    site.ask(seconds=7.0)
    ((seconds, expire),) = site.agents["n1"].timers
    assert seconds == 7.0
    expire()
    assert [answer.refused for answer in site.answers] == ["n1 did not answer within 7 s"]
    site.requests.answered(site.agents["n1"], NodeAnswer(site.agents["n1"].asked[0].id))
    expire()
    assert len(site.answers) == 1, "what comes later is dropped"
    site.ask()


def test_a_lost_connection_ends_its_questions(site: Site) -> None:
    site.ask()
    site.ask("n2")
    site.requests.closed(site.agents["n1"])
    assert [answer.refused for answer in site.answers] == [
        "the connection to n1 was lost before it answered"
    ]
    site.agents["n1"].timers[0][1]()
    assert len(site.answers) == 1


def test_a_node_that_is_not_connected_is_not_asked(site: Site) -> None:
    with pytest.raises(WireError, match="the sresd of n3 is not connected"):
        site.ask("n3")


@pytest.mark.parametrize("seconds", [0.0, -1.0, 601.0, float("inf"), float("nan")])
def test_every_question_has_a_time_limit(site: Site, seconds: float) -> None:
    with pytest.raises(UsageError, match="at most 600 s"):
        site.ask(seconds=seconds)
    assert site.agents["n1"].asked == []


def test_an_answer_that_is_too_long_is_not_handed_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_requests, "MAX_ANSWER_BYTES", 10)
    site.ask()
    asked = site.agents["n1"].asked[0]
    site.requests.answered(site.agents["n1"], NodeAnswer(asked.id, msgspec.Raw(b"x" * 11)))
    assert "more than are taken" in site.answers[0].refused


def test_so_many_are_under_way_and_no_more(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_requests, "MAX_UNDER_WAY", 1)
    site.ask()
    with pytest.raises(WireError, match="1 nodes are being asked"):
        site.ask("n2")


def test_the_supervisor_of_a_job_is_asked(site: Site) -> None:
    site.requests.ask_supervisor(7, "resize", BODY, site.answers.append)
    (supervisor,) = site.of_jobs[7]
    (asked,) = supervisor.asked
    answer = NodeAnswer(asked.id)
    site.requests.answered(supervisor, answer)
    assert asked.kind == "resize" and site.answers == [answer]


@pytest.mark.parametrize(
    ("job", "why"), [(8, "has 2 supervised sruns now"), (9, "has no supervisor")]
)
def test_a_job_without_one_supervisor_is_not_asked(site: Site, job: int, why: str) -> None:
    with pytest.raises(WireError, match=f"job {job} {why}"):
        site.requests.ask_supervisor(job, "resize", BODY, site.answers.append)
