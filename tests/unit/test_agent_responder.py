"""sresd answers each kind of question by itself, and refuses what it does not know."""

from __future__ import annotations

import queue
import threading
from typing import Any

import msgspec
import pytest

from slurm_resilience.agent import responder
from slurm_resilience.agent.responder import Answerer, Responder
from slurm_resilience.errors import NotFound
from slurm_resilience.model import CheckResult
from slurm_resilience.wire.messages import LogTail, NodeAnswer, NodeRequest, RunCheck, SendLog


class Site:
    """Two kinds of questions; the check's answer comes when the test lets it."""

    def __init__(self) -> None:
        self.answers: queue.Queue[tuple[int, NodeAnswer]] = queue.Queue()
        self.go_on = threading.Event()
        self.responder = Responder(
            {
                SendLog.kind: Answerer(SendLog, lambda asked: LogTail(("line",) * asked.lines, ())),
                RunCheck.kind: Answerer(RunCheck, self.check),
            },
            lambda session, answer: self.answers.put((session, answer)),
        )

    def check(self, asked: RunCheck) -> CheckResult:
        if asked.check == "none":
            raise NotFound("this node has no check 'none'")
        if asked.check == "bug":
            raise RuntimeError("a bug")
        assert self.go_on.wait(10)
        return CheckResult(asked.check, "pass", "all well")

    def ask(self, kind: str, question: Any, number: int = 1) -> None:
        body = msgspec.Raw(msgspec.msgpack.encode(question))
        self.responder.take(5, NodeRequest(number, kind, 10.0, body))

    def answer(self) -> NodeAnswer:
        session, answer = self.answers.get(timeout=10)
        assert session == 5
        return answer


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_log_is_sent_while_a_check_runs(site: Site) -> None:
    site.ask(RunCheck.kind, RunCheck("disk"), 1)
    site.ask(SendLog.kind, SendLog(2), 2)
    tail = site.answer()
    assert (tail.id, tail.refused) == (2, "")
    assert msgspec.msgpack.decode(tail.body, type=LogTail).lines == ("line", "line")
    site.ask(RunCheck.kind, RunCheck("disk"), 3)
    assert site.answer() == NodeAnswer(3, refused="the run-check asked for before still runs")
    site.go_on.set()
    done = site.answer()
    assert done.id == 1
    assert msgspec.msgpack.decode(done.body, type=CheckResult).verdict == "pass"
    site.ask(RunCheck.kind, RunCheck("disk"), 4)
    assert site.answer().id == 4


@pytest.mark.parametrize(
    ("kind", "question", "why"),
    [
        ("dance", SendLog(), "does not know 'dance', only send-log, run-check: install"),
        ("x" * 1000, SendLog(), "does not know 'xxx"),
        (SendLog.kind, {"lines": "many"}, "the question cannot be read"),
        (RunCheck.kind, {}, "the question cannot be read"),
        (RunCheck.kind, RunCheck("none"), "this node has no check 'none'"),
        (RunCheck.kind, RunCheck("bug"), "RuntimeError: a bug"),
    ],
)
def test_a_question_without_an_answer_is_refused_with_the_reason(
    site: Site, kind: str, question: Any, why: str
) -> None:
    site.ask(kind, question)
    answer = site.answer()
    assert why in answer.refused and len(answer.refused) < 300
    site.go_on.set()
    site.ask(RunCheck.kind, RunCheck("disk"), 2)
    assert site.answer().refused == ""


def test_an_answer_that_is_too_long_is_not_sent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responder, "MAX_ANSWER_BYTES", 100)
    site.ask(SendLog.kind, SendLog(1000))
    assert "bytes" in site.answer().refused
