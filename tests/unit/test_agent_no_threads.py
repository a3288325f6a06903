"""A job that has taken all process numbers ends no part of sresd: each tries again later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from worlds import FakeClock

from slurm_resilience import config
from slurm_resilience.agent import check_loop
from slurm_resilience.agent.check_loop import CheckLoop
from slurm_resilience.agent.evidence.bug_report import BugReports, ReportState
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.hook_state import CHECK_PAUSE_SECONDS, HookState
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.agent.responder import Answerer, Responder
from slurm_resilience.clock import SystemClock
from slurm_resilience.health.check import Check, Judgement
from slurm_resilience.model import Finding, Severity
from slurm_resilience.wire.messages import LogTail, NodeAnswer, NodeRequest, SendLog

XID = Finding("xid", Severity.MONITOR, "a fault", 5.0, subject="0000:04:00", code="31")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let no thread start until the test has called this."""
    with monkeypatch.context() as patch:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        yield patch.undo


def test_a_question_is_refused_and_the_next_one_answered(full: Callable[[], None]) -> None:
    answers: list[NodeAnswer] = []
    answered = threading.Event()

    def send(session: int, answer: NodeAnswer) -> None:
        answers.append(answer)
        answered.set()

    responder = Responder({SendLog.kind: Answerer(SendLog, lambda _: LogTail((), ()))}, send)
    request = NodeRequest(1, SendLog.kind, 10.0, msgspec.Raw(msgspec.msgpack.encode(SendLog(1))))
    responder.take(1, request)
    assert "can start nothing" in answers.pop().refused
    full()
    answered.clear()
    responder.take(1, request)
    assert answered.wait(10) and not answers[0].refused


def test_a_finding_is_put_up_though_none_looks_further(full: Callable[[], None]) -> None:
    outbox = Outbox()
    FindingIntake(outbox).from_log(XID)
    assert outbox.kernel_findings() == (XID,)


def test_a_round_goes_on_and_the_next_one_runs_the_check(
    full: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check("disk", lambda context: 1, lambda seen, context: Judgement("well"))
    monkeypatch.setattr(check_loop, "checks_of", lambda settings, own: (check,))
    outbox = Outbox()
    facts = SlurmFacts(None, "n1")  # type: ignore[arg-type]
    loop = CheckLoop(config.Config(), facts, outbox, SystemClock(), threading.Event())
    asked = check_loop.CheckContext()
    loop._run_beside(check, asked)
    assert outbox.results() == ()
    full()
    loop._run_beside(check, asked)
    assert outbox.results()[0].verdict == "pass"


def test_the_hooks_state_is_written_and_their_checks_run_later(
    full: Callable[[], None], tmp_path: Path
) -> None:
    ran, clock = threading.Event(), FakeClock()
    state = HookState(
        tmp_path,
        Outbox(),
        lambda seconds: ran.set(),
        clock,
        threading.Event(),
        Path("/proc/uptime"),
    )
    (tmp_path / "wanted").touch()
    state.look()
    assert (tmp_path / "state").exists() and not ran.is_set()
    full()
    clock.pass_time(CHECK_PAUSE_SECONDS)
    state.look()
    assert ran.wait(10)


def test_no_bug_report_is_no_failure(full: Callable[[], None], tmp_path: Path) -> None:
    settings = config.Config(agent=config.AgentSettings(bug_report="true"))
    assert BugReports(settings, "n1", FakeClock()).begin().state is ReportState.ABSENT
