"""sresd against the real server: hello, full report, beats, kernel log lines, reconnects."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from slurm_resilience import config
from slurm_resilience.agent import agent_link
from slurm_resilience.agent.agent_link import TOLD_SECONDS
from slurm_resilience.agent.daemon import Daemon
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.clock import SystemClock
from slurm_resilience.daemon_log import RecentLines
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.health import check_registry
from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import CheckResult, Severity
from slurm_resilience.wire.messages import (
    Beat,
    Goodbye,
    Hello,
    LogTail,
    Message,
    NodeAnswer,
    NodeHello,
    NodeRequest,
    Report,
    RunCheck,
    SendLog,
)
from slurm_resilience.wire.server import Client, Server

LINE = "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', GPU has fallen off the bus."


class Recorder:
    """A sresctld that writes down what it hears, with the time."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[float, str, Message]] = queue.Queue()
        self.peers: list[Client] = []

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        return ("192.0.2.1:6818",)

    def opened(self, peer: Client) -> None:
        self.peers.append(peer)

    def received(self, peer: Client, message: Message) -> None:
        self.heard.put((time.monotonic(), peer.subject, message))

    def closed(self, peer: Client) -> None:
        pass

    def wait_for(self, wanted: Callable[[Message], bool], seconds: float = 10.0) -> Message:
        deadline, last = time.monotonic() + seconds, None
        while (left := deadline - time.monotonic()) > 0:
            try:
                _, _, last = self.heard.get(timeout=left)
            except queue.Empty:
                break
            if wanted(last):
                return last
        raise AssertionError(f"not heard within {seconds} s; the last message was {last}")


class NoSlurm:
    """Slurm does not answer."""

    def info(self) -> object:
        raise SlurmUnreachable("no answer")

    def node(self, name: str) -> object:
        raise SlurmUnreachable("no answer")


@pytest.fixture(scope="module")
def munged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not shutil.which("munged"):
        pytest.skip("munged is not installed")
    place = tmp_path_factory.mktemp("munge")
    place.chmod(0o755)
    key = place / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    socket = place / "socket"
    words = [f"--socket={socket}", f"--key-file={key}", f"--pid-file={place}/pid"]
    words += [f"--seed-file={place}/seed", f"--log-file={place}/log", "--foreground", "--force"]
    process = subprocess.Popen(["munged", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    tick = threading.Event()
    while not socket.exists():
        assert time.monotonic() < deadline, f"munged did not start: {process.poll()}"
        tick.wait(0.02)
    yield str(socket)
    process.terminate()
    process.wait()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def server(recorder: Recorder, munged: str) -> Iterator[Server]:
    one = Server(recorder, 0, "127.0.0.1", munged)
    one.start()
    yield one
    one.stop()


class Running:
    """A sresd in this process, on a kernel log that the test writes."""

    def __init__(self, port: int, munged: str, place: Path, beat: float = 0.1) -> None:
        self.fifo = place / "kmsg"
        if not self.fifo.exists():
            os.mkfifo(self.fifo)
        base = config.Config()
        settings = msgspec.structs.replace(
            base,
            controller=msgspec.structs.replace(base.controller, host="127.0.0.1", port=port),
            wire=config.WireSettings(munge_socket=munged),
            agent=msgspec.structs.replace(base.agent, beat=beat, kernel_log=str(self.fifo)),
        )
        self.stop = threading.Event()
        facts = SlurmFacts(NoSlurm(), "n1")  # type: ignore[arg-type]
        self.recent = RecentLines()
        self.daemon = Daemon(settings, "n1", facts, SystemClock(), self.stop, self.recent)
        self.code: list[int] = []
        self.thread = threading.Thread(
            target=lambda: self.code.append(self.daemon.run(self.fifo)), daemon=True
        )
        self.thread.start()

    def write(self, text: str) -> None:
        with self.fifo.open("w", encoding="utf-8") as log:
            log.write(text + "\n")

    def end(self) -> int:
        self.stop.set()
        self.thread.join(5)
        assert not self.thread.is_alive(), "sresd did not end"
        return self.code[0]


@pytest.fixture
def sresd(server: Server, munged: str, tmp_path: Path) -> Iterator[Running]:
    one = Running(server.port, munged, tmp_path)
    yield one
    one.end()


def test_hello_then_a_full_report_then_beats(sresd: Running, recorder: Recorder) -> None:
    hello = recorder.wait_for(lambda m: True)
    assert isinstance(hello, NodeHello)
    assert hello.boot_id
    first = recorder.wait_for(lambda m: True)
    assert isinstance(first, Report)
    assert first.full
    beats = [recorder.wait_for(lambda m: isinstance(m, Beat)) for _ in range(3)]
    numbers = [b.seq for b in beats if isinstance(b, Beat)]
    assert numbers == sorted(set(numbers))  # their places among the frames


def test_a_kernel_line_is_reported_once_and_again_after_a_reconnect(
    sresd: Running, recorder: Recorder, server: Server
) -> None:
    recorder.wait_for(lambda m: isinstance(m, Beat))
    sresd.write("\n".join([LINE] * 50))

    def tells(message: Message) -> bool:
        return isinstance(message, Report) and bool(message.findings)

    report = recorder.wait_for(tells)
    assert isinstance(report, Report)
    (finding,) = report.findings
    assert (finding.severity, finding.code) == (Severity.REBOOT, "79")
    assert finding.subject == "0000:91:00"
    recorder.peers[0].close()
    again = recorder.wait_for(lambda m: isinstance(m, Report) and m.full)
    assert isinstance(again, Report)
    assert again.findings == (finding,)


def test_two_early_beats_follow_a_report(
    server: Server, recorder: Recorder, munged: str, tmp_path: Path
) -> None:
    sresd = Running(server.port, munged, tmp_path, beat=3600.0)
    try:
        recorder.wait_for(lambda m: isinstance(m, Beat))
        sresd.write(LINE)
        recorder.wait_for(lambda m: isinstance(m, Report) and bool(m.findings))
        for _ in TOLD_SECONDS:
            recorder.wait_for(lambda m: isinstance(m, Beat))
    finally:
        sresd.end()


def test_a_stop_says_goodbye_at_once(sresd: Running, recorder: Recorder) -> None:
    recorder.wait_for(lambda m: isinstance(m, Beat))
    assert sresd.end() == 0
    recorder.wait_for(lambda m: isinstance(m, Goodbye), 2.0)


def test_sresd_waits_for_a_controller_that_comes_later(munged: str, tmp_path: Path) -> None:
    recorder = Recorder()
    holder = Server(recorder, 0, "127.0.0.1", munged)
    port = holder.port
    holder.stop()
    one = Running(port, munged, tmp_path)
    try:
        server = Server(recorder, port, "127.0.0.1", munged)
        server.start()
        try:
            recorder.wait_for(lambda m: isinstance(m, Beat))
        finally:
            server.stop()
    finally:
        assert one.end() == 0


def test_beats_go_on_while_a_check_hangs_and_the_kernel_log_floods(
    server: Server,
    munged: str,
    tmp_path: Path,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs, go = threading.Event(), threading.Event()

    def probe(context: CheckContext) -> bool:
        hangs.set()
        return go.wait(30)

    check = Check("hangs", probe, lambda seen, context: Judgement("ok"), timeout=30.0)
    monkeypatch.setattr(check_registry, "checks", lambda disabled: (check,))
    one = Running(server.port, munged, tmp_path)
    try:
        assert hangs.wait(10)
        flood = threading.Thread(target=lambda: [one.write("noise\n" * 500) for _ in range(50)])
        flood.start()
        first = recorder.wait_for(lambda m: isinstance(m, Beat))
        assert isinstance(first, Beat)
        recorder.wait_for(lambda m: isinstance(m, Beat) and m.seq >= first.seq + 5)
        flood.join(10)
    finally:
        go.set()
        one.end()


def test_late_beats_are_dropped() -> None:
    assert agent_link.next_due(10.0, 0.5, 10.1) == 10.5
    assert agent_link.next_due(10.0, 0.5, 17.0) == 17.5


def test_backoff_is_short_capped_and_spread() -> None:
    assert agent_link.backoff(0, 0.999) <= agent_link.FIRST_BACKOFF_SECONDS
    assert (
        agent_link.MAX_BACKOFF_SECONDS / 2
        <= agent_link.backoff(30, 0.0)
        <= agent_link.MAX_BACKOFF_SECONDS
    )
    assert agent_link.backoff(3, 0.1) != agent_link.backoff(3, 0.9)


def asked(recorder: Recorder, kind: str, question: msgspec.Struct, number: int = 1) -> NodeAnswer:
    """sresd's answer to a question of sresctld's."""
    body = msgspec.Raw(msgspec.msgpack.encode(question))
    recorder.peers[-1].send(NodeRequest(number, kind, 10.0, body))
    answer = recorder.wait_for(lambda m: isinstance(m, NodeAnswer) and m.id == number)
    assert isinstance(answer, NodeAnswer)
    return answer


def test_sresd_sends_its_log_and_what_the_kernel_said(sresd: Running, recorder: Recorder) -> None:
    logging.getLogger().addHandler(sresd.recent)
    try:
        sresd.write(LINE)
        recorder.wait_for(lambda m: isinstance(m, Report) and bool(m.findings))
        answer = asked(recorder, SendLog.kind, SendLog(1000))
    finally:
        logging.getLogger().removeHandler(sresd.recent)
    tail = msgspec.msgpack.decode(answer.body, type=LogTail)
    assert [finding.code for finding in tail.findings] == ["79"]
    assert any("fallen off the bus" in line for line in tail.lines)


def test_sresd_runs_a_check_and_answers_the_log_meanwhile(
    munged: str, server: Server, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def probe(context: CheckContext) -> str:
        began.set()
        assert go_on.wait(20)
        return "seen"

    def judge(seen: str, context: CheckContext) -> Judgement:
        return Judgement(seen, ())

    slow = Check("slow", probe, judge, 30.0)
    monkeypatch.setattr(check_registry, "checks", lambda disabled: (slow,))
    one = Running(server.port, munged, tmp_path)
    try:
        recorder.wait_for(lambda m: isinstance(m, Beat))
        assert began.wait(10), "the round of checks has begun"
        body = msgspec.Raw(msgspec.msgpack.encode(RunCheck("slow")))
        recorder.peers[-1].send(NodeRequest(7, RunCheck.kind, 10.0, body))
        assert asked(recorder, SendLog.kind, SendLog()).refused == ""
        assert "still runs" in asked(recorder, RunCheck.kind, RunCheck("slow"), 8).refused
        go_on.set()
        answer = recorder.wait_for(lambda m: isinstance(m, NodeAnswer) and m.id == 7)
        assert isinstance(answer, NodeAnswer)
        result = msgspec.msgpack.decode(answer.body, type=CheckResult)
        assert (result.check, result.verdict, result.text) == ("slow", "pass", "seen")
        assert (
            "no check 'x'; it has slow" in asked(recorder, RunCheck.kind, RunCheck("x"), 9).refused
        )
    finally:
        go_on.set()
        one.end()


def test_sresd_refuses_a_question_of_a_newer_sresctld(sresd: Running, recorder: Recorder) -> None:
    recorder.wait_for(lambda m: isinstance(m, Beat))
    assert "does not know 'defragment'" in asked(recorder, "defragment", SendLog()).refused
    recorder.wait_for(lambda m: isinstance(m, Beat))


def test_the_end_of_a_log_is_bounded_in_lines_and_bytes() -> None:
    recent = RecentLines()
    for number in range(2000):
        recent.emit(logging.LogRecord("x", logging.INFO, "", 0, f"line {number}", None, None))
    assert len(recent.tail(5000, 1 << 20)) == 1000
    assert [line.rpartition(" ")[2] for line in recent.tail(2, 1 << 20)] == ["1998", "1999"]
    assert sum(map(len, recent.tail(1000, 500))) <= 500
    assert recent.tail(0, 500) == () == recent.tail(5, 0)
    recent.emit(logging.LogRecord("x", logging.INFO, "", 0, "y" * 10_000, None, None))
    assert len(recent.tail(1, 1 << 20)[0]) == 1000
