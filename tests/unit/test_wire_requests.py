"""The wire: what supervisors, administrators and users ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from wire_peers import ALICE, NEEDS_MUNGE, Sresctld, run_as, said_by, until

from slurm_resilience.controller import inbox
from slurm_resilience.errors import WireError
from slurm_resilience.model import CheckResult, Finding, Job, Severity
from slurm_resilience.wire import limits
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    FRAMES,
    MAX_FRAME_BYTES,
    AttemptStarted,
    Evidence,
    EvidenceRequest,
    LogTail,
    NodeAnswer,
    NodeHello,
    NodeQuestion,
    NodeRequest,
    NodeVerdict,
    PauseRequest,
    Report,
    RunStepChecks,
    SendLog,
    Status,
    StatusRequest,
    StepChecksRun,
)
from slurm_resilience.wire.server import Client, Server

pytestmark = NEEDS_MUNGE


def test_a_supervisor_is_answered_and_heard(sresctld: Sresctld) -> None:
    with sresctld.connect("job", "7") as connection:
        answer = connection.ask(EvidenceRequest(("n1", "n9")))
        assert isinstance(answer, Evidence) and answer.asked
        assert [(v.node, v.verdict) for v in answer.verdicts] == [
            ("n1", "unknown"),
            ("n9", "unknown"),
        ]
        connection.send(AttemptStarted(1, ("n1",)))
        (heard,) = until(sresctld.inbox.take, "the attempt is known")
        assert (heard.job, heard.message) == (7, AttemptStarted(1, ("n1",)))


def test_a_verdict_from_before_a_job_was_there_is_not_told_to_it(sresctld: Sresctld) -> None:
    """A person resumes a node, and a job starts there before the next round: it is not kept out."""
    old = {"n1": NodeVerdict("n1", "dead", "kept out by root: memory")}
    job = Job(7, ALICE, "RUNNING", nodes=("n1",))
    sresctld.inbox.know((), {})
    sresctld.inbox.publish(old, {})
    sresctld.inbox.know((), {7: job})
    with sresctld.connect("job", "7") as connection:
        early = connection.ask(EvidenceRequest(("n1",)))
        sresctld.inbox.publish(old, {})
        later = connection.ask(EvidenceRequest(("n1",)))
    assert isinstance(early, Evidence) and isinstance(later, Evidence)
    assert [early.verdicts[0].verdict, later.verdicts[0].verdict] == ["unknown", "dead"]


@pytest.mark.parametrize("beside", [(), ("n1",)], ids=["one allocation", "a second one"])
def test_the_nodes_of_a_failed_step_check_themselves(
    sresctld: Sresctld, beside: tuple[str, ...]
) -> None:
    own = tuple(name for name in ("n1", "n2") if name not in beside)
    sresctld.jobs[7] = Job(7, ALICE, "RUNNING", nodes=own, companion_nodes=beside)
    finding = Finding("efa_devices", Severity.REBOOT, "1 EFA device is missing", 5.0)
    result = CheckResult("efa_devices", "fail", finding.text, (finding,))
    with sresctld.connect("node", "n1") as sresd, sresctld.connect("job", "7") as supervisor:
        until(lambda: sresctld.registry.agent_connection("n1"), "n1 is connected")
        answer = supervisor.ask(EvidenceRequest(("n1", "n2", "n3"), 20.0))
        assert isinstance(answer, Evidence) and answer.checks == "running"
        request = sresd.receive(10.0)
        assert isinstance(request, NodeRequest) and request.kind == RunStepChecks.kind
        sresd.send(Report((result,)))
        until(lambda: sresctld.registry.agents()["n1"].findings, "its finding is there")
        sresctld.registry.wake.clear()
        body = msgspec.msgpack.encode(StepChecksRun(1))
        sresd.send(NodeAnswer(request.id, msgspec.Raw(body)))
        until(sresctld.registry.wake.is_set, "a round begins")
        sresctld.inbox.take()
        sresctld.inbox.publish({"n1": NodeVerdict("n1", "sick", finding.text)}, {})
        told = supervisor.receive(10.0)
        assert isinstance(told, Evidence) and told.checks == "over"
        assert [(v.node, v.verdict) for v in told.verdicts] == [("n1", "sick"), ("n2", "unknown")]
        assert "at fault: n1; not checked: n2 (the sresd of n2 is not connected" in told.text


def test_checks_that_a_user_asks_for_again_and_again_begin_few_rounds(
    sresctld: Sresctld,
) -> None:
    wake, rounds = sresctld.registry.wake, 0
    for _ in range(50):
        wake.clear()
        sresctld.inbox._begin_round(ALICE)
        rounds += wake.is_set()
    assert inbox.WAKES_AT_ONCE_OF_USER <= rounds < 25
    wake.clear()
    sresctld.inbox._begin_round(0)
    assert wake.is_set(), "root's always do"


def test_a_user_who_talks_all_the_time_begins_few_rounds(sresctld: Sresctld) -> None:
    """Each round reads Slurm. What is said in between waits for the next one."""
    rounds = 0
    program = run_as(
        ALICE,
        sresctld,
        "c = connect('job', '7')\n"
        "for number in range(60): c.send(AttemptEnded(number, 1, 'again'))\n"
        "print(c.ask(EvidenceRequest(())).asked, flush=True)\n",
    )
    while program.poll() is None:
        if sresctld.registry.wake.wait(0.01):
            sresctld.registry.wake.clear()
            rounds += 1
    assert said_by(program) == "True\n"
    assert 1 <= rounds <= 10
    assert len(sresctld.inbox.take()) == 60


def test_what_users_say_leaves_room_for_an_administrator(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_WAITING_OF_USER", 30)
    monkeypatch.setattr(inbox, "MAX_QUEUED", 40)
    talk = (
        "try:\n"
        "    c = connect('job', '7')\n"
        "    for number in range(50): c.send(AttemptEnded(number, 1, 'again'))\n"
        "    print(c.receive(10).reason)\n"
        "except SresError as error: print(error)\n"
    )
    assert "messages within one cycle are too many" in said_by(run_as(ALICE, sresctld, talk))
    with sresctld.connect() as roots:
        assert roots.ask(PauseRequest("by hand")) == Status({"paused": "by hand"})
    heard = sresctld.inbox.take()
    assert len(heard) == 31 and heard[-1].message == PauseRequest("by hand")


def test_what_waits_for_a_round_takes_little_memory(sresctld: Sresctld) -> None:
    """A round may be long in coming, while Slurm cannot be read: a thousand messages of a user may
    wait, and each frame of his has room for a hundred thousand names."""
    program = run_as(
        ALICE,
        sresctld,
        "c = connect('job', '7')\n"
        "names = ('n1', 'far', *('%x' % n for n in range(80000)), 'n1', 'x' * 9999)\n"
        "c.send(AttemptStarted(1, names))\n"
        "c.send(AttemptEnded(1, 1, 'again ' * 80000))\n"
        "c.send(RequeueRequest('again ' * 80000))\n"
        "print(c.ask(EvidenceRequest(())).asked, flush=True)\n",
    )
    assert said_by(program) == "True\n"
    started, *others = (heard.message for heard in sresctld.inbox.take())
    assert isinstance(started, AttemptStarted)
    assert started.nodes[:2] == ("n1", "far") and len(started.nodes) < 200
    assert len(others) == 2
    assert all(len(msgspec.msgpack.encode(message)) < 10_000 for message in (started, *others))


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        ("connect('job', '7').ask(EvidenceRequest(())).asked", False),
        ("isinstance(connect().ask(StatusRequest('status')), Status)", True),
    ],
    ids=["a supervisor's", "a query's"],
)
def test_a_supervisor_does_not_pause_for_the_time_in_which_sresctld_waits(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch, call: str, counts: bool
) -> None:
    """It waits for a core then, on a busy machine, and a pause ten times as long had the
    supervisor's kernel give its connection up. A query may have it wait for the disk: that counts.
    """
    took: list[float] = []
    pause, received = limits.UserLimits.pause, sresctld.inbox.received

    def noted(of: limits.UserLimits, uid: int, seconds: float, now: float) -> float:
        took.append(seconds)
        return pause(of, uid, seconds, now)

    def later(*words: Any) -> None:
        threading.Event().wait(0.5)
        received(*words)

    monkeypatch.setattr(limits.UserLimits, "pause", noted)
    monkeypatch.setattr(sresctld.inbox, "received", later)
    assert said_by(run_as(ALICE, sresctld, f"print({call}, flush=True)\n")) == "True\n"
    assert took and (max(took) > 0.4) == counts


def test_root_may_pause(sresctld: Sresctld) -> None:
    with sresctld.connect() as connection:
        assert connection.ask(PauseRequest("by hand")) == Status({"paused": "by hand"})
    (heard,) = sresctld.inbox.take()
    assert (heard.message, heard.connection.uid) == (PauseRequest("by hand"), 0)


QUESTION = NodeQuestion("n1", SendLog.kind, msgspec.Raw(msgspec.msgpack.encode(SendLog(5))), 5.0)


def test_root_asks_a_node_and_its_sresd_answers(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd, sresctld.connect() as roots:
        sresd.send(NodeHello("boot"))
        until(lambda: "n1" in sresctld.registry.agents(), "it is known")
        roots.send(QUESTION)
        asked = sresd.receive(10)
        assert isinstance(asked, NodeRequest) and asked.kind == SendLog.kind
        assert msgspec.msgpack.decode(asked.body, type=SendLog).lines == 5
        tail = msgspec.msgpack.encode(LogTail(("all is well",), ()))
        sresd.send(NodeAnswer(asked.id, msgspec.Raw(tail)))
        answer = roots.receive(10)
        assert isinstance(answer, NodeAnswer)
        assert msgspec.msgpack.decode(answer.body, type=LogTail).lines == ("all is well",)


def test_a_node_that_does_not_answer_is_not_waited_for(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd, sresctld.connect() as roots:
        until(lambda: "n1" in sresctld.registry.agents(), "it is known")
        answer = roots.ask(msgspec.structs.replace(QUESTION, seconds=0.1))
        assert isinstance(answer, NodeAnswer) and "did not answer within 0.1 s" in answer.refused
        asked = sresd.receive(10)
        assert isinstance(asked, NodeRequest)
        roots.send(QUESTION)
        sresd.close()
        answer = roots.receive(10)
        assert isinstance(answer, NodeAnswer) and "was lost before it answered" in answer.refused
        with pytest.raises(WireError, match="the sresd of n2 is not connected"):
            roots.ask(msgspec.structs.replace(QUESTION, node="n2"))


def test_users_and_nodes_ask_no_node(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as sresd:
        until(lambda: "n1" in sresctld.registry.agents(), "it is known")
        said = said_by(
            run_as(
                ALICE,
                sresctld,
                "import msgspec\n"
                "question = NodeQuestion('n1', 'send-log', msgspec.Raw(b'\\xc0'))\n"
                "try: connect().ask(question)\n"
                "except SresError as error: print(type(error).__name__, error)\n",
            )
        )
        assert said == "NotPermitted only root and SlurmUser may ask nodes\n"
        sresd.send(QUESTION)
        sresd.send(NodeAnswer(12345))
        assert sresd.receive(0.2) is None


def test_a_server_that_stops_lets_go_of_everybody(munged: Callable[[str], str]) -> None:
    sresctld = Sresctld(munged("ours"))
    connection = sresctld.connect()
    sresctld.server.stop()
    with pytest.raises(WireError):
        connection.receive(10)
    again = Server(sresctld.inbox, sresctld.server.port, "127.0.0.1", munged("ours"))
    again.start()
    sresctld.connect().close()
    again.stop()


def test_a_fault_of_ours_ends_one_connection_only(
    sresctld: Sresctld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(peer: Client, message: Any) -> None:
        raise RuntimeError("a bug")

    other = sresctld.connect()
    with monkeypatch.context() as patch:
        patch.setattr(sresctld.inbox, "received", broken)
        for _ in range(3):
            with sresctld.connect() as connection, pytest.raises(WireError):
                connection.ask(StatusRequest("status"))
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == 1, "a user who has found it must not fill the disk"
    assert isinstance(other.ask(StatusRequest("status")), Status)


def test_a_host_that_is_no_name_is_one_line_too() -> None:
    """A typo in controller.host ended a thread of the supervisor, and sresd, with a traceback."""
    with pytest.raises(WireError, match=r"does not answer at ctl\.\.example:1"):
        Connection.open("ctl..example", 1, "query")


def test_frames_too_large_to_send_are_refused_here() -> None:
    with pytest.raises(WireError, match="too large"):
        FRAMES.pack(Status({"x": "y" * MAX_FRAME_BYTES}))
