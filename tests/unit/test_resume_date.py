"""The batch host's date is set while a supervised step runs: what the log tells stays true."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from supervised_srun import supervisor_of, watch_of

from slurm_resilience.resume.decide.classify import Ending
from slurm_resilience.resume.report import RecoveryBlock
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.simulate.cluster.sim_clock import SimClock
from slurm_resilience.simulate.schedule import Schedule


@pytest.mark.parametrize("step", [-3600.0, 365 * 86400.0])
def test_a_date_that_is_set_makes_no_recovery_longer(
    step: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It booted with a wrong one, say, and NTP sets it while a step is lost."""
    monkeypatch.chdir(tmp_path)
    slurm, schedule = FakeSlurm(2), Schedule()
    clock = SimClock(schedule)
    supervisor = supervisor_of(slurm, slurm.job(slurm.submit(2)), clock=clock)
    now, history = supervisor._context.clock.now, supervisor._history
    began = now()
    history.start(1, ("n1", "n2"), began)
    schedule.run(20.0)
    noticed = now()
    clock.step = step
    lost = supervisor._fence.lost_seconds(began, now())
    ended = Ending(137, 20.0, False, "RUNNING", {"n2": "dead"}, ended_at=now())
    history.end(ended, "n2: dead", -1, lost)
    history.start(2, ("n1", "n2"), now())
    watch_of(
        supervisor, SimpleNamespace(main=SimpleNamespace(reports=StepReports("")))
    )._say_recovered(RecoveryBlock("n2: dead", ("n2",), "again", 2, now(), now(), 0.0, noticed))
    supervisor._clean_up()
    said = capfd.readouterr().err
    assert "how long      0.0 s (step ended 0.0 s, nodes ready 0.0 s)" in said
    assert "what was lost 20 s of work" in said
