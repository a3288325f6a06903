"""sresd and the lifecycle scripts: it says which one failed, and runs them again when asked."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from slurm_resilience.agent.check_loop import checks_of
from slurm_resilience.agent.joining.lifecycle_check import judge_record
from slurm_resilience.agent.joining.lifecycle_rerun import OWN_UNIT, LifecycleRerun
from slurm_resilience.agent.processes import steps
from slurm_resilience.agent.processes.steps import LocalStep
from slurm_resilience.config import Config, LifecycleSettings
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.health.check import Unjudged
from slurm_resilience.lifecycle.run_record import RunRecord, ScriptResult
from slurm_resilience.model import Severity
from slurm_resilience.wire.messages import RunLifecycle

WELL = ScriptResult("10-a", 0, 1.5, boot_id="b1", at=100.0)
FAILED = ScriptResult("20-b", 1, 0.5, "no licence", boot_id="b1", at=101.0)


def test_a_script_that_failed_takes_the_node_out_and_is_named() -> None:
    record = RunRecord("n1", "b1", "i1", (WELL, FAILED), ended=102.0)
    text, (finding,) = judge_record(record, "b1", Severity.REBOOT, "/var/log/x")
    assert text == finding.text == "20-b failed (exit code 1): no licence"
    assert finding.severity is Severity.REBOOT
    assert finding.key == ("lifecycle", "20-b", "")
    assert finding.evidence == "/var/log/x/20-b.log on the node"


def test_scripts_that_ended_well_pass() -> None:
    record = RunRecord("n1", "b1", "i1", (WELL,), ended=102.0)
    assert judge_record(record, "b1", Severity.REBOOT, "") == ("1 scripts ran well in 1.5 s", ())


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (None, "have not run since the boot"),
        (RunRecord("n1", "b0", "i1", (WELL,), ended=102.0), "have not run since the boot"),
        (RunRecord("n1", "b1", "i1", (WELL,)), "run, or were cut off; 1 have ended"),
        (RunRecord("n1", "b1", "i1", (WELL, FAILED)), "run, or were cut off; 2 have ended"),
    ],
)
def test_what_did_not_run_to_its_end_is_not_judged(record: RunRecord | None, says: str) -> None:
    with pytest.raises(Unjudged, match=says):
        judge_record(record, "b1", Severity.REBOOT, "")


def test_a_node_without_scripts_has_no_such_check() -> None:
    def names(settings: Config) -> list[str]:
        return [check.name for check in checks_of(settings) if check.name == "lifecycle"]

    assert names(Config()) == []
    with_scripts = LifecycleSettings(directory="/etc/x")
    assert names(Config(lifecycle=with_scripts)) == ["lifecycle"]


class Site:
    """A node's directories and scripts."""

    def __init__(self, folder: Path) -> None:
        self.scripts = folder / "scripts"
        self.scripts.mkdir()
        self.started = folder / "slurmd"
        self.settings = LifecycleSettings(
            directory=str(self.scripts),
            state_dir=str(folder / "state"),
            log_dir=str(folder / "log"),
            start_slurmd=("touch", str(self.started)),
        )
        self.judged = 0
        self.rerun = self.made(self.settings)

    def made(self, settings: LifecycleSettings, **environ: str) -> LifecycleRerun:
        return LifecycleRerun(settings, "n1", self.judge, environ)

    def judge(self) -> None:
        self.judged += 1

    def script(self, name: str, body: str) -> None:
        (self.scripts / name).write_text(f"#!/bin/sh\n{body}\n")
        (self.scripts / name).chmod(0o755)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(steps, "running", lambda node: ())
    return Site(tmp_path)


def test_a_rerun_that_ends_well_starts_slurmd(site: Site) -> None:
    site.script("10-a", "exit 0")
    end = site.rerun.answer(RunLifecycle())
    assert (end.is_well, end.text) == (True, "")
    assert [(script.name, script.rc) for script in end.scripts] == [("10-a", 0)]
    assert site.started.exists() and site.judged == 1


def test_a_rerun_that_fails_says_why_and_starts_nothing(site: Site) -> None:
    site.script("10-a", "echo one; echo two; exit 4")
    end = site.rerun.answer(RunLifecycle())
    assert (end.is_well, end.text) == (False, "10-a failed (exit code 4): two")
    assert end.output == ("one", "two")
    assert not site.started.exists() and site.judged == 1
    site.script("10-a", "exit 0")
    assert site.rerun.answer(RunLifecycle()).is_well


def test_scripts_that_may_not_be_run_are_the_answer(site: Site) -> None:
    site.script("10-a", "exit 0")
    site.scripts.chmod(0o777)
    end = site.rerun.answer(RunLifecycle())
    assert not end.is_well
    assert "may be written by others" in end.text


def test_a_slurmd_that_does_not_start_is_the_answer(site: Site) -> None:
    site.script("10-a", "exit 0")
    settings = LifecycleSettings(
        directory=site.settings.directory,
        state_dir=site.settings.state_dir,
        log_dir=site.settings.log_dir,
        start_slurmd=("false",),
    )
    end = site.made(settings).answer(RunLifecycle())
    assert (end.is_well, end.text) == (False, "slurmd could not be started: exit code 1")


def test_nothing_runs_beside_a_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.script("10-a", "exit 0")
    monkeypatch.setattr(steps, "running", lambda node: (LocalStep(12, "0"),))
    with pytest.raises(SresError, match="job 12 runs on n1: drain the node first"):
        site.rerun.answer(RunLifecycle())
    assert not site.started.exists()


def test_a_node_without_scripts_refuses(site: Site) -> None:
    with pytest.raises(UsageError, match="has no lifecycle scripts"):
        site.made(LifecycleSettings()).answer(RunLifecycle())


def test_one_run_at_a_time_and_the_asker_may_leave(site: Site, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    site.script("10-a", f"while ! [ -e {go_on} ]; do sleep 0.05; done")
    with pytest.raises(SresError, match="still run after 0 s; look again: sres node check n1"):
        site.rerun.answer(RunLifecycle(0.0))
    with pytest.raises(SresError, match="run on n1 already"):
        site.rerun.answer(RunLifecycle(0.0))
    go_on.touch()
    for thread in threading.enumerate():
        if thread.name == "lifecycle":
            thread.join(30)
    assert site.started.exists() and site.judged == 1


def test_under_systemd_they_run_in_a_unit_of_their_own(site: Site) -> None:
    plain = site.rerun.command()
    assert plain[:5] == [sys.executable, "-P", "-m", "slurm_resilience.lifecycle", "--again"]
    assert site.made(site.settings, INVOCATION_ID="7").command() == [*OWN_UNIT, *plain]
