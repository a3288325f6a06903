"""A site's own programs as checks: their exit codes, their first line, and what is not run."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from slurm_resilience import config
from slurm_resilience.agent import once
from slurm_resilience.clock import SystemClock
from slurm_resilience.health import check_registry
from slurm_resilience.health.check import CheckContext, Unjudged
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.programs import program_checks
from slurm_resilience.model import CheckResult


def program(folder: Path, text: str, name: str = "own") -> Path:
    folder.chmod(0o755)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def run(folder: Path) -> CheckResult:
    (check,) = program_checks.program_checks(str(folder))
    return CheckRunner([check], CheckContext(now=5.0), SystemClock()).run_one(check)


@pytest.mark.parametrize(
    ("text", "verdict", "severity", "said"),
    [
        ("exit 0", "pass", "", "well"),
        ("echo all fans turn; exit 0", "pass", "", "all fans turn"),
        ("echo; echo a fan is slow; exit 1", "fail", "monitor", "a fan is slow"),
        ("echo 'replace: a fan'; exit 1", "fail", "monitor", "a fan"),
        ("echo a fan is dead; exit 2", "fail", "reboot", "a fan is dead"),
        ("echo 'Replace: a fan is dead'; exit 2", "fail", "replace", "a fan is dead"),
        ("echo 'reset: GPU 3'; exit 2", "fail", "reset", "GPU 3"),
        ("echo 'fan3: dead'; exit 2", "fail", "reboot", "fan3: dead"),
        ("exit 2", "unjudged", "", "own ended with 2 and said nothing"),
        ("if", "unjudged", "", "own ended with 2 and said nothing"),
        ("ls /nowhere", "unjudged", "", "own ended with 2 and said nothing"),
        ("exit 1", "fail", "monitor", "own ended with 1"),
        ("echo no ipmitool; exit 3", "unjudged", "", "own ended with 3: no ipmitool"),
        ("kill -TERM $$", "unjudged", "", "own was ended by signal 15"),
        ("no-such-command", "unjudged", "", "own ended with 127"),
        ("yes", "fail", "monitor", "y"),
    ],
)
def test_the_end_of_a_program(
    tmp_path: Path, text: str, verdict: str, severity: str, said: str
) -> None:
    program(tmp_path, text)
    result = run(tmp_path)
    assert result.verdict == verdict, result
    assert "".join(finding.severity for finding in result.findings) == severity
    assert result.text.startswith(said)


@pytest.mark.parametrize("first_line", ["#!/no/such/shell", "no first line of a script"])
def test_a_program_that_cannot_be_started_is_told_why(tmp_path: Path, first_line: str) -> None:
    """Python's own words would say that the program is not there, which is."""
    program(tmp_path, "exit 0").write_text(f"{first_line}\nexit 2\n")
    result = run(tmp_path)
    assert result.verdict == "unjudged"
    assert result.text.startswith(f"{tmp_path / 'own'} cannot be started: ")
    assert "does its first line name a program" in result.text


def test_a_program_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_checks, "TIMEOUT_SECONDS", 0.5)
    program(tmp_path, "cat < $0.fifo")
    os.mkfifo(tmp_path / "own.fifo")
    result = run(tmp_path)
    assert (result.verdict, result.text) == ("unjudged", "no end within 0.5 s; it was killed")


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """One process a minute on each node, for as long as the node is up."""
    program(tmp_path, "sleep 1000 & echo $! > $0.pid; echo fine")
    assert run(tmp_path).text == "fine"
    process = psutil.Process(int((tmp_path / "own.pid").read_text()))
    process.wait(10)


def test_a_program_that_others_may_write_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    file = program(tmp_path, f"touch {mark}")
    file.chmod(0o775)
    assert "chmod go-w" in run(tmp_path).text
    file.chmod(0o755)
    tmp_path.chmod(0o777)
    assert run(tmp_path).verdict == "unjudged"
    assert not mark.exists()


def test_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    """A link of root's to a program whose place a user could take."""
    mark, home, checks = tmp_path / "ran", tmp_path / "home", tmp_path / "checks.d"
    home.mkdir(), checks.mkdir()
    file = program(home, f"touch {mark}")
    (checks / file.name).symlink_to(file)
    assert run(checks).verdict == "pass"
    mark.unlink()
    home.chmod(0o777)
    assert "may be written by others" in run(checks).text
    home.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(home, 12345, 12345)
        assert f"{home} belongs to user 12345" in run(checks).text
    file.unlink()
    assert program_checks.program_checks(str(checks)) == (), "a link that leads nowhere"
    assert not mark.exists()


def test_the_directories_above_count_too(tmp_path: Path) -> None:
    site, mark = tmp_path / "site", tmp_path / "ran"
    (site / "a" / "checks.d").mkdir(parents=True)
    program(site / "a" / "checks.d", f"touch {mark}")
    site.chmod(0o777)
    assert "may be written by everyone" in run(site / "a" / "checks.d").text
    assert not mark.exists()
    site.chmod(0o1777)  # as /tmp
    assert run(site / "a" / "checks.d").verdict == "pass"


def test_only_executables_are_checks(tmp_path: Path) -> None:
    program(tmp_path, "exit 0", "fans")
    program(tmp_path, "exit 0", ".hidden")
    program(tmp_path, "exit 0", "off")
    (tmp_path / "README").write_text("no program")
    (tmp_path / "folder").mkdir()
    found = program_checks.program_checks(str(tmp_path), ("off",))
    assert [check.name for check in found] == ["fans"]
    assert program_checks.program_checks("") == ()
    (gone,) = program_checks.program_checks(str(tmp_path / "gone"))
    with pytest.raises(Unjudged, match="cannot be read: No such file"):
        gone.probe(CheckContext())


def test_a_program_replaces_a_check_of_its_name(tmp_path: Path) -> None:
    program(tmp_path, "echo ours; exit 0", "disk")
    checks = program_checks.with_programs(
        check_registry.BUILT_IN, program_checks.program_checks(str(tmp_path))
    )
    assert sorted(check.name for check in checks) == sorted(c.name for c in check_registry.BUILT_IN)
    (disk,) = (check for check in checks if check.name == "disk")
    assert CheckRunner([disk], CheckContext(), SystemClock()).run_one(disk).text == "ours"


def test_the_agent_runs_them(tmp_path: Path) -> None:
    program(tmp_path, "echo a fan is slow; exit 1", "fans")
    settings = config.Config(
        checks=config.CheckSettings(directory=str(tmp_path)),
        agent=config.AgentSettings(kernel_log=str(tmp_path / "none")),
    )

    class Facts:
        def ask_node(self, again: bool = False) -> None:
            return None

    results = {one.check: one for one in once.run(settings, Facts(), SystemClock())}  # type: ignore[arg-type]
    assert (results["fans"].verdict, results["fans"].text) == ("fail", "a fan is slow")


def test_a_program_has_a_log_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, logs = tmp_path / "checks.d", tmp_path / "log" / "checks"
    folder.mkdir()
    program(folder, "echo a fan is slow; echo fan 3: 12 rpm; echo no sensor 4 >&2; exit 1")
    (check,) = program_checks.program_checks(str(folder), logs=logs)
    runner, log = CheckRunner([check], CheckContext(), SystemClock()), logs / "own.log"
    for _ in range(2):
        assert runner.run_one(check).text == "a fan is slow"
    stamp, *lines = log.read_text().splitlines()
    assert stamp.endswith("Z ended with 1")
    assert lines == ["  a fan is slow", "  fan 3: 12 rpm", "  no sensor 4"], "told once"
    monkeypatch.setattr(program_checks, "MAX_LOG_BYTES", 10)
    program(folder, "exit 0")
    runner.run_one(check)
    assert log.read_text().endswith("Z ended with 0\n")
    assert log.with_name("own.log.1").read_text().startswith(stamp), "the older one is kept"
    assert log.stat().st_mode & 0o007 == 0, "other users do not read it"
    log.unlink()
    log.mkdir()
    program(folder, "echo again")
    assert runner.run_one(check).verdict == "pass", "without its log"
