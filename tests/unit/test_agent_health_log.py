"""The node's health log: its fields, its bounds, and a disk that does not take it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience import config
from slurm_resilience.agent.health_log import (
    KEPT_FILES,
    MAX_WAITING,
    HealthLog,
    RotatedLines,
    log_path,
)
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import SystemClock
from slurm_resilience.health.grouping import FindingGroup, absorb
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.model import CheckResult, Finding, Severity


class Morning(SystemClock):
    def now(self) -> float:
        return 1_700_000_000.25


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def health_log(path: Path, max_bytes: int = 100_000) -> HealthLog:
    return HealthLog(path, max_bytes, "n1", "boot", Morning())


def write_all(one: HealthLog) -> None:
    one.close()
    one.run()


def test_each_change_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "health.jsonl"
    one = health_log(path)
    outbox = Outbox(health_log=one)
    finding = Finding("disk", Severity.MONITOR, "full", 5.0, subject="/")
    for result in (
        CheckResult("disk", "pass", "well"),
        CheckResult("disk", "pass", "well still"),
        CheckResult("disk", "fail", "full", (finding,), 0.5),
    ):
        outbox.result(result)
    incidents: tuple[FindingGroup, ...] = ()
    for text in ("NVRM: Xid (PCI:0000:3b:00): 163, x", "NVRM: Xid (PCI:0000:3b:00): 162, x"):
        for found in Classifier().judge(text, 5.0):
            change = absorb(incidents, found)
            incidents = change.incidents
            outbox.change(change)
    outbox.note(Finding("fence", Severity.MONITOR, "ended 1.0", 5.0))
    write_all(one)
    lines = written(path)
    assert [(line["kind"], line["check"]) for line in lines] == [
        ("result", "disk"),
        ("result", "disk"),
        ("finding", "xid"),
        ("cleared", "xid"),
        ("finding", "fence"),
    ]
    assert {(line["time"], line["node"], line["boot_id"]) for line in lines} == {
        ("2023-11-14T22:13:20.250Z", "n1", "boot")
    }
    assert lines[1]["verdict"] == "fail"
    assert lines[1]["findings"][0]["severity"] == "monitor"
    assert lines[2]["code"] == lines[3]["code"] == "163"
    assert path.stat().st_mode & 0o777 == 0o640


@given(sizes=st.lists(st.integers(1, 120), max_size=60), limit=st.integers(50, 300))
def test_it_is_bounded_and_loses_the_oldest(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "h"
    lines = RotatedLines(path, limit)
    for at, size in enumerate(sizes):
        assert lines.write(b"%d " % at + b"x" * size)
    files = sorted(path.parent.iterdir(), key=lambda file: -int(file.suffix[1:] or 0))
    assert len(files) <= KEPT_FILES + 1
    longest = max((size + 5 for size in sizes), default=0)
    assert all(file.stat().st_size <= max(limit, longest) for file in files)
    kept = [int(line.split()[0]) for file in files for line in file.read_bytes().splitlines()]
    assert kept == list(range(len(sizes)))[len(sizes) - len(kept) :]


def test_a_disk_that_is_full_costs_lines_and_they_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "health.jsonl"
    path.symlink_to("/dev/full")
    one = health_log(path)
    worker = threading.Thread(target=one.run)
    for _ in range(3):
        one.result(CheckResult("disk", "pass", "well"))
    worker.start()
    deadline = time.monotonic() + 20
    while one._dropped < 3:
        assert time.monotonic() < deadline, one._dropped
        threading.Event().wait(0.01)
    path.unlink()
    one.result(CheckResult("disk", "pass", "well"))
    one.close()
    worker.join(10)
    (line,) = written(path)
    assert line["dropped_before"] == 3
    (said,) = (record.message for record in caplog.records)
    assert said == f"{path} cannot be written: No space left on device"


def test_nothing_is_written_where_users_may_put_a_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, precious = tmp_path / "tmp", tmp_path / "precious"
    precious.write_text("a file of root's")
    shared.mkdir()
    shared.chmod(0o1777)
    path = shared / "health.jsonl"
    path.symlink_to(precious)
    one = health_log(path)
    one.result(CheckResult("disk", "pass", "well"))
    write_all(one)
    assert precious.read_text() == "a file of root's"
    (said,) = (record.message for record in caplog.records)
    assert said == f"{path} cannot be written: {shared} may be written by all users (chmod o-w)"


def test_a_disk_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    one = health_log(tmp_path / "h")
    for _ in range(MAX_WAITING + 7):
        one.result(CheckResult("disk", "pass", "well"))
    assert one._dropped == 7


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({}, {}, None),
        ({}, {"LOGS_DIRECTORY": "/var/log/a:/b"}, "/var/log/a/health.jsonl"),
        ({"health_log": "/x/y"}, {"LOGS_DIRECTORY": "/var/log/a"}, "/x/y"),
        ({"health_log": "/x/y", "health_log_bytes": 0}, {}, None),
    ],
)
def test_where_it_is_written(
    settings: dict[str, Any], environ: dict[str, str], expected: str | None
) -> None:
    path = log_path(config.AgentSettings(**settings), environ)
    assert (path and str(path)) == expected
