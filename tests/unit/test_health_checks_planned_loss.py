"""A notice that the node goes: a file or an executable, and what is no notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resilience.agent.check_loop import checks_of
from slurm_resilience.clock import SystemClock
from slurm_resilience.config import AgentSettings, Config
from slurm_resilience.health.check import CheckContext
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.host import planned_loss
from slurm_resilience.model import CheckResult, Severity

AWS = '{"action": "terminate",\n "time": "2026-09-18T08:22:00Z"}'


def look(path: Path) -> CheckResult:
    check = planned_loss.notice_check(str(path))
    return CheckRunner([check], CheckContext(), SystemClock()).run_one(check)


def executable(folder: Path, body: str) -> Path:
    program = folder / "notice"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return program


def test_a_file_is_a_notice_while_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    assert look(file).verdict == "pass"
    file.write_text(" \n")
    assert look(file).verdict == "pass"
    file.write_text(AWS)
    found = look(file)
    assert (found.verdict, found.text) == ("fail", "this node goes at 2026-09-18T08:22:00Z")
    assert found.findings[0].severity is Severity.REPLACE
    file.unlink()
    assert look(file).verdict == "pass"


@pytest.mark.parametrize(
    ("body", "verdict", "text"),
    [
        ("true", "pass", "no notice"),
        ("echo FALSE", "pass", "no notice"),
        ("echo NONE", "pass", "no notice"),
        ("echo TRUE", "fail", "this node goes: TRUE"),
        ("yes x", "unjudged", "notice ended with 1: x"),
        ("echo 2026-09-18 08:22 host maintenance", "fail", "this node goes at 2026-09-18 08:22"),
        ("echo preempted", "fail", "this node goes: preempted"),
        ("echo no route; exit 7", "unjudged", "notice ended with 7: no route"),
    ],
)
def test_an_executable_prints_a_notice(tmp_path: Path, body: str, verdict: str, text: str) -> None:
    found = look(executable(tmp_path, body))
    assert (found.verdict, found.text) == (verdict, text)


def test_an_executable_that_hangs_is_no_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_loss, "TIMEOUT_SECONDS", 0.1)
    found = look(executable(tmp_path, "echo TRUE; sleep 60"))
    assert (found.verdict, found.findings) == ("unjudged", ())


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_notice(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "notice")
    found = look(tmp_path / "notice")
    assert (found.verdict, found.text) == ("unjudged", f"{tmp_path / 'notice'} is no file")


def test_an_executable_that_any_user_may_write_is_not_run(tmp_path: Path) -> None:
    program = executable(tmp_path, f"touch {tmp_path}/ran")
    program.chmod(0o777)
    assert look(program).verdict == "unjudged"
    assert not (tmp_path / "ran").exists()


def test_a_file_that_any_user_may_write_is_no_notice(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    file.write_text("forged")
    file.chmod(0o666)
    assert look(file).verdict == "unjudged"
    file.chmod(0o644)
    tmp_path.chmod(0o1777)
    assert look(file).verdict == "unjudged"


def test_a_long_notice_is_cut() -> None:
    found = planned_loss.judge("x" * 4000, CheckContext())
    assert len(found.text) == planned_loss.MAX_CHARACTERS


def test_it_costs_nothing_where_none_is_named() -> None:
    names = {check.name for check in checks_of(Config())}
    named = {check.name for check in checks_of(Config(agent=AgentSettings(loss_notice="/x")))}
    assert named - names == {"planned_loss"}
