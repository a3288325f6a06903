"""Following the kernel log: a FIFO, and this machine's own /dev/kmsg where it may be written."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_resilience.agent.drill_window import DrillWindow
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.kernel_log_reader import READ_BYTES, KernelLogReader, KernelLogSource
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import SystemClock
from slurm_resilience.model import Finding, Severity
from slurm_resilience.simulate.cluster.sim_clock import SimClock
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.wire.messages import ChangeDrill

XID = "NVRM: Xid (PCI:0000:%02x:00): %d, x"
KMSG = Path("/dev/kmsg")


class Following:
    """A follower in a thread, and what it has put up so far."""

    def __init__(self, path: Path, accept_injected: bool = False) -> None:
        self.news = threading.Event()
        self.outbox = Outbox(self.news.set)
        self.stop = threading.Event()
        clock = SystemClock()
        intake = FindingIntake(self.outbox)
        self.drill = DrillWindow(path.with_name("drill.json"), "boot", accept_injected, clock)
        self.follower = KernelLogReader(path, self.drill, self.outbox, intake, clock, self.stop)
        self.thread = threading.Thread(target=self.follower.run, daemon=True)
        self.thread.start()

    def wait(self, wanted: Callable[[Finding], bool], seconds: float = 10.0) -> Finding:
        deadline = time.monotonic() + seconds
        while True:
            self.news.clear()
            findings = self.outbox.take_all().findings
            if found := [finding for finding in findings if wanted(finding)]:
                return found[0]
            left = deadline - time.monotonic()
            assert left > 0, f"last seen: {findings}"
            self.news.wait(left)

    def end(self) -> None:
        self.stop.set()
        self.follower.wake()
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    return path


@pytest.fixture
def following(fifo: Path) -> Iterator[Following]:
    one = Following(fifo)
    yield one
    one.end()


def test_writers_come_and_go(fifo: Path, following: Following) -> None:
    for code, wanted in ((13, "job"), (48, "reset"), (64, "replace")):
        with fifo.open("w", encoding="utf-8") as log:
            log.write(XID % (1, code) + "\n")
        assert following.wait(lambda f, w=wanted: f.severity == w).subject == "0000:01:00"


def test_a_programs_line_counts_during_a_drill_alone(fifo: Path, following: Following) -> None:
    def write(bus: int) -> None:
        with fifo.open("w", encoding="utf-8") as log:
            log.write("<12>" + XID % (bus, 79) + "\n")

    write(1)
    before = following.wait(lambda f: f.subject == "0000:01:00")
    assert (before.severity, before.injected) == (Severity.MONITOR, True)
    following.drill.change(ChangeDrill("open", 600.0))
    write(2)
    during = following.wait(lambda f: f.subject == "0000:02:00")
    assert (during.severity, during.injected) == (Severity.REBOOT, True)
    assert during.text.endswith("(injected)")
    following.drill.change(ChangeDrill("close"))
    write(3)
    assert following.wait(lambda f: f.subject == "0000:03:00").severity is Severity.MONITOR


def test_a_line_from_before_counts_by_its_own_time(tmp_path: Path) -> None:
    one = Following(tmp_path / "later")
    one.drill.change(ChangeDrill("open", 600.0))
    now = time.monotonic()
    for bus, uptime in ((1, now / 2), (2, now + 1.0), (3, now + 700.0)):
        line = f"12,1,{int(uptime * 1e6)},-;{XID % (bus, 79)}"
        one.follower.feed(line, 0.0, is_from_before=True)
    severities = {f.subject: f.severity for f in one.outbox.kernel_findings()}
    assert severities == {
        "0000:01:00": Severity.MONITOR,
        "0000:02:00": Severity.REBOOT,
        "0000:03:00": Severity.MONITOR,
    }
    one.end()


@pytest.mark.parametrize("error", [-7200.0, -90.0, 90.0, 7200.0])
def test_another_way_tells_of_the_same_xid_whatever_the_date_is_set_to(
    error: float, tmp_path: Path
) -> None:
    """The date is set after sresd's start, or the kernel's own clock has drifted in a long time."""
    schedule, stop = Schedule(), threading.Event()
    clock, outbox = SimClock(schedule), Outbox(lambda: None)
    intake = FindingIntake(outbox)
    drill = DrillWindow(tmp_path / "drill.json", "boot", False, clock)
    reader = KernelLogReader(tmp_path, drill, outbox, intake, clock, stop)

    class Source:
        """A device of which the second Xid is written while it is followed."""

        is_device = True
        fileno = staticmethod(os.eventfd(1).__index__)

        def __init__(self) -> None:
            self.bus = 0

        def read(self) -> Iterator[str]:
            self.bus += 1
            if self.bus == 2:
                clock.step = error
                stop.set()
            yield f"4,1,{int(clock.monotonic() * 1e6)},-;{XID % (self.bus, 79)}"
            schedule.run(1000.0)

    source = Source()
    reader._follow(source)  # type: ignore[arg-type]
    os.close(source.fileno())
    first, second = outbox.kernel_findings()
    assert (first.subject, second.subject) == ("0000:01:00", "0000:02:00")
    assert abs(second.at - clock.now()) < 1
    of_dcgm = Finding("xid", Severity.REBOOT, "DCGM: Xid 79", clock.now(), code="79")
    assert intake.knows(of_dcgm), "else the node is rebooted where a GPU is to be reset"
    assert second.uptime == pytest.approx(clock.monotonic())


def test_a_line_in_pieces_is_one_line(fifo: Path, following: Following) -> None:
    with fifo.open("wb", buffering=0) as log:
        log.write(b"\xff\xfe noise\nNVRM: Xid (PCI:0000")
        log.write(b":02:00): 79, gone\n")
    assert following.wait(lambda f: True).severity is Severity.REBOOT


def test_a_flood_of_other_lines_hides_nothing(fifo: Path, following: Following) -> None:
    with fifo.open("wb", buffering=0) as log:
        for number in range(2000):
            log.write(b"kernel: something else %d\n" % number)
        log.write((XID % (3, 79) + "\n").encode())
    assert following.wait(lambda f: True).subject == "0000:03:00"


def test_a_log_that_is_not_there_yet_is_unjudged(tmp_path: Path) -> None:
    one = Following(tmp_path / "later")
    deadline = time.monotonic() + 5
    while not (results := one.outbox.take_all().results):
        assert time.monotonic() < deadline
        one.news.wait(1)
    assert (results[0].check, results[0].verdict) == ("kernel_log", "unjudged")
    assert "No such file" in results[0].text
    one.end()


def test_a_plain_file_is_no_kernel_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(OSError, match="neither a kernel log device nor a FIFO"):
        KernelLogSource(tmp_path / "log")


@pytest.fixture
def written() -> str:
    """A line in this machine's kernel log that no other program writes; harmless if taken for
    real."""
    if not os.access(KMSG, os.R_OK | os.W_OK):
        pytest.skip("/dev/kmsg cannot be read and written here")
    address = os.getpid() % 0xFFFF
    line = f"NVRM: Xid (PCI:{address:04x}:7f:00): 63, written by a test of slurm-resilience"
    with KMSG.open("w", encoding="utf-8") as log:
        log.write(line + "\n")
    return f"{address:04x}:7f:00"


def test_the_kernels_own_log_tells_what_came_before_the_start(written: str) -> None:
    before = time.time()
    one = Following(KMSG, accept_injected=True)
    finding = one.wait(lambda f: f.subject == written)
    one.end()
    assert finding.injected
    assert finding.severity is Severity.MONITOR
    assert abs(finding.at - before) < 60, "the record's own time, on our clock"


def test_a_record_that_was_overrun_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[bytes | OSError] = iter(
        [OSError(32, "Broken pipe"), b"6,1,1,-;after", BlockingIOError()]
    )

    def read(fd: int, size: int) -> bytes:
        assert size == READ_BYTES
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    # Any character device that all users may open: what it reads is given.
    source = KernelLogSource(Path("/dev/null"))
    monkeypatch.setattr(os, "read", read)
    assert list(source.read()) == ["6,1,1,-;after"]
    source.close()
