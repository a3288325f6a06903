"""NVIDIA's own bug report: beside everything else, bounded, and never twice at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import FakeClock

from slurm_resilience.agent.evidence import bug_report
from slurm_resilience.agent.evidence.bug_report import BugReports, ReportState
from slurm_resilience.config import AgentSettings, Config, LifecycleSettings, ReplaceSettings

Make = Callable[..., BugReports]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / bug_report.FOLDER


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make(tmp_path: Path, clock: FakeClock) -> Make:
    """Make a recorded stand-in for the tool, and what runs it."""

    def made(body: str, shared: str = "", **settings: Any) -> BugReports:
        tool = tmp_path / "nvidia-bug-report.sh"
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        agent = AgentSettings(**({"bug_report": str(tool)} | settings))
        lifecycle = LifecycleSettings(state_dir=str(tmp_path / "state"))
        replace = ReplaceSettings(evidence_directory=shared)
        return BugReports(Config(agent=agent, lifecycle=lifecycle, replace=replace), "n1", clock)

    return made


def ended(reports: BugReports) -> str:
    assert reports.begin().state is not ReportState.ABSENT
    progress = reports.wait(20)
    assert progress.state is ReportState.ENDED
    return progress.text


def test_a_node_without_the_tool_has_none(make: Make) -> None:
    for settings in ({"bug_report": "no-such-tool"}, {"bug_report_timeout": 0.0}):
        assert make("exit 0", **settings).begin() == (ReportState.ABSENT, "")


def test_a_report_lies_in_a_private_file_that_is_named(make: Make, folder: Path) -> None:
    reports = make('echo "$1 $2" | cat > "$3.gz"')
    text = ended(reports)
    (file,) = folder.iterdir()
    assert file.name.startswith("n1-") and file.name.endswith(".log.gz")
    assert text == f"{file} (26 bytes; ended with 0)"
    assert file.read_text() == "--safe-mode --output-file\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_one_runs_at_a_time_and_a_fresh_one_is_not_made_anew(
    make: Make, folder: Path, clock: FakeClock, tmp_path: Path
) -> None:
    fifo = tmp_path / "go-on"
    os.mkfifo(fifo)
    reports = make(f'echo x > "$3"; read word < {fifo}')
    assert reports.begin().state is ReportState.RUNNING
    clock.pass_time(bug_report.FRESH_SECONDS)
    running = reports.begin()
    assert running.state is ReportState.RUNNING and str(folder) in running.text
    fifo.write_text("go\n")
    assert reports.wait(20).state is ReportState.ENDED
    assert len(list(folder.iterdir())) == 1
    # An incident asks again: the one that ended is still fresh.
    clock.pass_time(1.0)
    fresh = make('echo x > "$3"')
    assert ended(fresh) == ended(fresh)
    assert len(list(folder.iterdir())) == 2


def test_one_that_hangs_is_killed_and_what_it_wrote_is_kept(make: Make, folder: Path) -> None:
    text = ended(make('echo half > "$3"; sleep 600', bug_report_timeout=0.3))
    (file,) = folder.iterdir()
    assert text == f"{file} (5 bytes; killed after 0.3 s)"


def test_a_report_cannot_fill_the_disk(make: Make, folder: Path) -> None:
    text = ended(make('yes > "$3"', bug_report_bytes=4096))
    (file,) = folder.iterdir()
    assert file.stat().st_size == 4096
    assert "4096 bytes" in text and text.endswith("cut off)")


def test_a_tool_that_writes_nothing_is_told(make: Make) -> None:
    assert "ended with 3, and wrote no file" in ended(make("exit 3"))


def test_old_reports_are_removed(make: Make, folder: Path, clock: FakeClock) -> None:
    reports = make('echo x > "$3"')
    for _ in range(bug_report.KEPT_REPORTS + 2):
        ended(reports)
        clock.pass_time(bug_report.FRESH_SECONDS)
    assert len(list(folder.iterdir())) == bug_report.KEPT_REPORTS


def test_it_is_copied_to_where_the_site_wants_it(make: Make, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    text = ended(make('echo x > "$3"', str(shared)))
    (file,) = shared.iterdir()
    assert text.endswith(f"; copied to {file}") and file.read_text() == "x\n"


def test_a_copy_that_fails_is_told(make: Make, tmp_path: Path) -> None:
    text = ended(make('echo x > "$3"', str(tmp_path / "missing")))
    assert f"not copied to {tmp_path}/missing" in text


def test_a_state_directory_of_users_takes_none(make: Make, folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert ended(make("exit 0")).startswith("none: ")
