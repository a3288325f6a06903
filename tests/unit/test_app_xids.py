"""Xids of programs: one program's say nothing of a GPU, those of many users do."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import NOW, FakeClock

from slurm_resilience.agent import finding_intake
from slurm_resilience.agent.events.app_xid_memory import SAME_SECONDS, AppXidMemory
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.agent.processes.steps import LocalStep
from slurm_resilience.health.app_xids import (
    MAX_EVENTS,
    WINDOW_SECONDS,
    AppXid,
    remembered,
    suspect_gpus,
)
from slurm_resilience.model import Finding, Severity


def fault(job: int, user: int, gpu: str = "g0", code: str = "31", ago: float = 60.0) -> AppXid:
    return AppXid(gpu, code, job, user, NOW - ago)


def names(*events: AppXid) -> list[str]:
    return [one.gpu for one in suspect_gpus(events, NOW)]


def test_the_same_gpu_under_programs_of_many_users_is_suspect() -> None:
    events = [fault(1, 10), fault(2, 11, code="13"), fault(3, 12), fault(4, 10)]
    (found,) = suspect_gpus(events, NOW)
    assert (found.gpu, found.jobs, found.users, found.codes) == (
        "g0",
        (1, 2, 3, 4),
        3,
        ("13", "31"),
    )
    assert found.text.startswith("GPU g0: Xid 13, 31 in 4 jobs of 3 users within a week")


@pytest.mark.parametrize(
    "events",
    [
        [fault(job, 10) for job in range(50)],
        [fault(job, job % 2) for job in range(50)],
        [fault(1, user) for user in range(9)],
        [fault(job, job, gpu=f"g{job}") for job in range(9)],
        [fault(job, job, gpu=gpu) for job in range(9) for gpu in ("g0", "g1")],
        [fault(job, job, ago=WINDOW_SECONDS + 1) for job in range(9)],
        [fault(job, job, ago=-60.0) for job in range(9)],
    ],
    ids=["one user", "two users", "one job", "each its GPU", "several GPUs", "old", "wrong clock"],
)
def test_programs_with_bugs_make_no_gpu_suspect(events: list[AppXid]) -> None:
    assert names(*events) == []


def test_a_bad_gpu_is_found_among_buggy_programs() -> None:
    """Over 200 weeks of a node with 8 GPUs, half of them with a GPU that faults in 30 % of jobs."""
    found = wrong = bad_weeks = 0
    for seed in range(200):
        chance = random.Random(seed)
        bad = f"g{chance.randrange(8)}" if seed % 2 else ""
        buggy_users = set(chance.sample(range(12), 2))
        events = []
        for job in range(40):
            user = chance.randrange(12)
            gpus = [f"g{n}" for n in chance.sample(range(8), chance.choice((1, 2, 4, 8)))]
            at = chance.uniform(0, WINDOW_SECONDS - 60)
            if user in buggy_users and chance.random() < 0.5:
                events += [AppXid(gpu, "31", job, user, NOW - at) for gpu in gpus]
            elif bad in gpus and chance.random() < 0.3:
                events.append(AppXid(bad, "13", job, user, NOW - at))
        named = set(names(*events))
        bad_weeks += bool(bad)
        found += bool(bad) and bad in named
        wrong += len(named - {bad})
    print(f"recall {found / bad_weeks:.2f}, wrongly named {wrong} in 200 weeks")
    assert wrong == 0
    assert found / bad_weeks > 0.7


def test_no_more_is_remembered_than_counts() -> None:
    events = [fault(job, job, ago=float(job)) for job in range(3 * MAX_EVENTS)]
    kept = remembered(events, NOW)
    assert len(kept) == MAX_EVENTS and kept[-1].job == 0


ADDRESS = "0000:3b:00"


class Node:
    """A node whose jobs fault on a GPU."""

    def __init__(self, folder: Path, uuid: bool = True) -> None:
        self.folder, self.clock, self.looks = folder, FakeClock(), 0
        self.steps: tuple[LocalStep, ...] = ()
        if uuid:
            information = folder / "root/proc/driver/nvidia/gpus/0000:3b:00.0/information"
            information.parent.mkdir(parents=True)
            information.write_text("Model: H100\nGPU UUID: \t GPU-1b2c-3d\nBus Type: PCIe\n")
        self.start()

    def start(self) -> None:
        self.memory = AppXidMemory(
            self.folder / "state", self.folder / "root", self._steps, self.clock
        )

    def _steps(self) -> tuple[LocalStep, ...]:
        self.looks += 1
        return self.steps

    def runs(self, *jobs: tuple[int, int, int]) -> None:
        """Have jobs run: the job, its user, and the process of each."""
        made: list[Any] = []
        for job, user, pid in jobs:
            member = SimpleNamespace(pid=pid, uids=lambda user=user: SimpleNamespace(real=user))
            made.append(LocalStep(job, "0", members=(member,)))  # type: ignore[arg-type]
        self.steps = tuple(made)

    def faults(self, pid: int = 0, code: str = "31", **more: Any) -> Finding | None:
        self.clock.pass_time(SAME_SECONDS)
        line = f"NVRM: Xid (PCI:{ADDRESS}): {code}, pid={pid}, name=python"
        finding = Finding("xid", Severity.JOB, "x", NOW, ADDRESS, code, line, **more)
        return self.memory.note(finding)


def test_sresd_names_a_suspect_gpu_once_also_after_a_restart(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for job in (1, 2, 3):
        node.runs((job, 100 + job, 50), (99, 7, 51))
        assert node.faults(pid=50) is None
        node.start()
    node.runs((4, 101, 50))
    named = node.faults(pid=4711)  # gone already; only one job is here
    assert named is not None
    assert (named.check, named.severity, named.subject) == ("suspect_gpu", "monitor", ADDRESS)
    assert named.text.startswith("GPU GPU-1b2c-3d: Xid 31 in 4 jobs of 3 users")
    assert named.evidence == "jobs 1, 2, 3, 4"
    node.runs((5, 105, 50))
    assert node.faults(pid=50) is None, "it has been named"


def test_an_xid_of_an_unknown_job_counts_for_none(tmp_path: Path) -> None:
    node = Node(tmp_path, uuid=False)
    for job in range(9):
        node.runs((job, job, 50), (100 + job, 7, 51))
        assert node.faults(pid=99) is None
        assert node.faults(pid=50, code="79") is None
        assert node.faults(pid=50, injected=True) is None
    assert not (tmp_path / "state" / "app-xids.json").exists()


def test_a_look_that_hangs_holds_up_no_other_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs with a process's memory has each reader of its name hang as well."""
    monkeypatch.setattr(finding_intake, "LOOK_SECONDS", 0.1)
    free, looks = threading.Event(), []

    def look(finding: Finding) -> Finding | None:
        looks.append(finding.code)
        free.wait(60)
        return Finding("suspect_gpu", Severity.MONITOR, "late", NOW, ADDRESS)

    outbox = Outbox()
    intake = FindingIntake(outbox, look)

    def tell() -> None:
        for code, severity in (("31", Severity.JOB), ("13", Severity.JOB), ("79", Severity.REBOOT)):
            intake.from_log(Finding("xid", severity, "x", NOW, ADDRESS, code))

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    teller.join(30)
    told = {one.code for one in outbox.kernel_findings()}
    still_hangs = teller.is_alive()
    free.set()
    assert not still_hangs and "79" in told
    assert looks == ["31"], "one look at a time"
    deadline = time.monotonic() + 30
    while "suspect_gpu" not in {one.check for one in outbox.kernel_findings()}:
        assert time.monotonic() < deadline, "what a late look finds is told"
        threading.Event().wait(0.01)


def test_a_storm_of_lines_is_looked_into_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.runs((1, 100, 50))
    node.faults(pid=50)
    finding = Finding("xid", Severity.JOB, "x", NOW, ADDRESS, "31", "pid=50")
    for _ in range(1000):
        node.memory.note(finding)
    assert node.looks == 1


def test_a_memory_that_cannot_be_read_or_written_is_empty(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "app-xids.json").write_text("[{")
    node = Node(tmp_path)
    (tmp_path / "state" / "app-xids.new").mkdir()
    node.runs((1, 100, 50))
    assert node.faults(pid=50) is None


def test_what_follows_from_a_line_is_reported_beside_it() -> None:
    outbox = Outbox()
    suspect = Finding("suspect_gpu", Severity.MONITOR, "GPU 0", NOW, ADDRESS)
    intake = FindingIntake(outbox, lambda finding: suspect)
    intake.from_log(Finding("xid", Severity.JOB, "Xid 31", NOW, ADDRESS, "31"))
    assert [one.check for one in outbox.kernel_findings()] == ["xid", "suspect_gpu"]
