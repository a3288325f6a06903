"""Xids from NVML's event set: through the real pynvml, and beside the kernel log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvml_library import StubDriver, built_library, stub_driver

from slurm_resilience import config
from slurm_resilience.agent.events import gpu_event_child, gpu_events
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.health import check_registry, xid
from slurm_resilience.health.gpu_event import GpuEvent, event_finding
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.model import Finding, Node, Severity

RESET_PENDING = "a GPU waits for its reset: its driver is left alone"


class Slurm:
    """Answers for one node; None: does not answer."""

    def __init__(self, gres: str | None) -> None:
        self.gres = gres

    def node(self, name: str) -> Node:
        if self.gres is None:
            raise SlurmUnreachable("no answer")
        return Node(name, "IDLE", gres=self.gres)


class Events:
    """`GpuEvents` in a thread, and what it has put up so far."""

    def __init__(self, sysroot: Path, gres: str | None = "gpu:2") -> None:
        self.news, self.stop = threading.Event(), threading.Event()
        self.outbox = Outbox(self.news.set)
        self.intake = FindingIntake(self.outbox)
        facts = SlurmFacts(Slurm(gres), "n1")  # type: ignore[arg-type]
        agent = config.AgentSettings(check_interval=0.02, sysroot=str(sysroot))
        settings = config.Config(agent=agent)
        clock = SystemClock()
        self.events = gpu_events.GpuEvents(
            settings, facts, self.outbox, self.intake, clock, self.stop
        )
        self.thread = threading.Thread(target=self.events.run, daemon=True)
        self.thread.start()

    def wait(self, seen: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 20
        while True:
            self.news.clear()
            if found := seen():
                return found
            left = deadline - time.monotonic()
            assert left > 0, f"last seen: {self.outbox.results()} {self.outbox.kernel_findings()}"
            self.news.wait(min(left, 0.05))

    def says(self, text: str) -> None:
        self.wait(lambda: [one for one in self.outbox.results() if text in one.text])

    def finding(self) -> Finding:
        found = self.wait(self.outbox.kernel_findings)
        assert isinstance(found[-1], Finding)
        return found[-1]

    def end(self) -> None:
        self.stop.set()
        self.events.wake()
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert waiting() == []


def waiting() -> list[psutil.Process]:
    """The processes that wait for events."""
    children = psutil.Process().children(recursive=True)
    name = gpu_event_child.__name__
    found = []
    for child in children:
        try:
            if name in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    monkeypatch.setattr(gpu_events, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(gpu_events, "RESET_SECONDS", 0.05)
    return stub_driver(tmp_path, library, monkeypatch)


@pytest.fixture
def events(driver: StubDriver, tmp_path: Path) -> Iterator[Events]:
    one = Events(tmp_path)
    one.says("following 2 GPUs")
    yield one
    one.end()


def test_an_xid_is_found_without_a_kernel_log(driver: StubDriver, events: Events) -> None:
    driver.event(1, 79)
    one = events.finding()
    assert (one.check, one.code, one.subject) == ("xid", "79", "0000:02:00")
    assert (one.severity, one.injected) == (Severity.REBOOT, False)
    assert one.evidence == "NVML event: Xid 79"


def test_with_xid_154_the_driver_is_asked_for_its_word(driver: StubDriver, events: Events) -> None:
    driver.says("gpu0.recovery=2")
    driver.event(0, 154)
    one = events.finding()
    assert (one.code, one.severity) == ("154", Severity.REBOOT)
    assert one.evidence == "NVML event: Xid 154, recovery action: node reboot"


def test_the_driver_is_let_go_until_a_reset_is_done(driver: StubDriver, events: Events) -> None:
    """A GPU that a process holds open cannot be reset."""
    driver.event(0, 48)
    assert events.finding().severity is Severity.RESET
    events.says(RESET_PENDING)
    assert waiting() == []
    events.intake.from_driver(GpuEvent("00000000:01:00.0", 154, "none"), time.time())
    events.says("following 2 GPUs")
    assert events.outbox.kernel_findings() == ()


def test_a_driver_that_hangs_is_left(
    driver: StubDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_events, "SILENT_SECONDS", 2.0)
    events = Events(tmp_path)
    events.says("following 2 GPUs")
    driver.says("hang=1")
    events.says("no word of the driver for 2 s; the process was killed")
    driver.says("")
    events.says("following 2 GPUs")
    events.end()


def test_a_lost_gpu_ends_the_wait_and_the_others_are_followed_on(
    driver: StubDriver, events: Events
) -> None:
    driver.says("gpu1.handle=15")
    driver.event(0, -15)
    events.says("GPU is lost")
    events.says("following 1 GPUs")


def test_a_process_that_dies_is_started_again(driver: StubDriver, events: Events) -> None:
    (child,) = waiting()
    child.kill()
    events.says("the process that waits for events has died")
    events.says("following 2 GPUs")


def test_what_is_no_line_of_ours_ends_the_wait(
    driver: StubDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may write to the same place."""
    module = tmp_path / "noisy.py"
    module.write_text("print('NVRM: hello', flush=True)\ninput()\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_events.gpu_event_child, "__name__", "noisy")
    events = Events(tmp_path)
    events.says("the driver's library writes lines of its own")
    events.end()


@pytest.mark.parametrize("gpu", ["", "GPU", "x:y:z", "00000000:3B:00.0", "000D:01:00"])
def test_any_address_makes_a_finding(gpu: str) -> None:
    assert event_finding(GpuEvent(gpu, 79), 5.0).subject in (gpu.lower(), "0000:3b:00")


@pytest.mark.parametrize(
    ("gres", "state", "said"),
    [
        ("", "", "no GPU, and Slurm expects none"),
        ("gpu:2", "init=9", "Driver Not Loaded"),
        ("gpu:2", "count=0", "no GPU tells of its errors by events"),
    ],
)
def test_nothing_to_follow(
    driver: StubDriver, tmp_path: Path, gres: str, state: str, said: str
) -> None:
    driver.says(state)
    events = Events(tmp_path, gres)
    events.says(said)
    events.end()


def test_a_node_that_may_have_no_gpu_says_nothing(
    driver: StubDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "libnvidia-ml.so.1").write_bytes(b"")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "none"))
    tries: list[float] = []
    wait = SystemClock.wait
    monkeypatch.setattr(
        SystemClock, "wait", lambda clock, e, s: tries.append(s) or wait(clock, e, s)
    )
    events = Events(tmp_path, None)
    events.wait(lambda: len(tries) > 1)
    assert events.outbox.results() == ()
    events.end()


def test_without_a_gpu_on_the_bus_nothing_is_started(driver: StubDriver, tmp_path: Path) -> None:
    """An AMD node, say, for which Slurm expects GPUs too."""
    (tmp_path / "sys" / "bus" / "pci" / "devices").mkdir(parents=True)
    events = Events(tmp_path)
    events.says("no NVIDIA GPU on the PCI bus")
    events.end()


def test_it_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    names = {check.name for check in check_registry.checks((gpu_events.NAME,))}
    assert names == {check.name for check in check_registry.BUILT_IN}
    assert caplog.records == [], "the name is known"


# --- beside the kernel log ------------------------------------------------------------------

BUS = "00000000:3B:00.0"
LINE = "NVRM: Xid (PCI:0000:3b:00): {}, pid=7, {}"
codes = st.one_of(st.sampled_from(sorted(xid.table())), st.integers(1, 999))


def logged(code: int, at: float, rest: str = "Fatal") -> list[Finding]:
    return Classifier().judge(LINE.format(code, rest), at)


@given(codes, st.sampled_from(["Fatal", "Nonfatal", "changed from 0x0 (None) to 0x1 (GPU Reset)"]))
def test_an_event_asks_for_no_more_than_the_line(code: int, rest: str) -> None:
    (line,) = logged(code, 5.0, rest)
    event = event_finding(GpuEvent(BUS, code), 5.0)
    assert event.key == line.key
    assert event.severity in (line.severity, xid.judge(code, "").action)
    if code not in xid.table():
        assert event.severity is Severity.MONITOR


@given(codes, st.floats(0, 1), st.booleans())
def test_the_same_from_both_within_a_second_is_one_incident(
    code: int, apart: float, log_first: bool
) -> None:
    outbox = Outbox()
    intake = FindingIntake(outbox)
    (line,) = logged(code, 5.0 if log_first else 5.0 + apart)
    event = GpuEvent(BUS, code)
    if log_first:
        intake.from_log(line)
        intake.from_driver(event, 5.0 + apart)
    else:
        intake.from_driver(event, 5.0)
        intake.from_log(line)
    alone = Outbox()
    FindingIntake(alone).from_log(line)
    assert [(f.key, f.severity) for f in outbox.kernel_findings()] == [
        (f.key, f.severity) for f in alone.kernel_findings()
    ]
    assert len(intake._incidents) <= 1


def test_a_driver_that_says_none_after_its_line_opens_no_incident() -> None:
    """The line "to None" ends the GPU's incidents; its event, a moment later, is no new one."""
    intake = FindingIntake(outbox := Outbox())
    (line,) = logged(154, 5.0, "changed from 0x1 (GPU Reset) to 0x0 (None)")
    intake.from_log(line)
    intake.from_driver(GpuEvent(BUS, 154), 5.1)
    assert outbox.kernel_findings() == ()


def test_a_line_that_a_program_wrote_hides_no_event() -> None:
    intake = FindingIntake(outbox := Outbox())
    for finding in Classifier().judge(LINE.format(79, "x"), 5.0, facility=1):
        intake.from_log(finding)
    intake.from_driver(GpuEvent(BUS, 79), 5.1)
    assert [str(one.severity) for one in outbox.kernel_findings()] == ["reboot"]


def test_other_gpus_and_later_errors_stay_apart() -> None:
    intake = FindingIntake(outbox := Outbox())
    for finding in logged(79, 5.0):
        intake.from_log(finding)
    intake.from_driver(GpuEvent("00000000:3C:00.0", 79), 5.1)
    assert {one.subject for one in outbox.kernel_findings()} == {"0000:3b:00", "0000:3c:00"}
    intake.from_driver(GpuEvent(BUS, 79), 6.5)
    assert max(one.lines for one in intake._incidents) == 2
