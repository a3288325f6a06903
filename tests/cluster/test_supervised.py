"""sresctld treats a job differently while a supervisor is connected."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from impatient import start_impatient
from jobs import Job, events, kinds

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
VICTIM = "n3"
RETURN_SECONDS = 4.0
"""So long is a supervisor waited for that has been lost."""
SRES = str(Path(sys.prefix) / "bin" / "sres")


def kinds_of_job(lab: Lab, job: Job) -> list[str]:
    """Kinds of a job's events, oldest first."""
    return [event["kind"] for event in events(lab) if event["job"] == job.id]


@pytest.mark.parametrize("end", ["by itself", "killed"])
def test_a_plain_srun_after_a_supervised_one_is_slurms(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, end: str
) -> None:
    """No process goes on without the dead node, so it is not taken out of the job: Slurm requeues
    it, as it does with any other job."""
    # Else the node goes DOWN, which ends the job, no sooner than Slurm would set it.
    quick = {"detect": {"dead_after_unsupervised": 6.0}}
    lab = fresh_lab(LabSpec(nodes=5, network=True, sres_options=quick))
    lab.kill_daemon("sresctld")
    start_impatient(lab, registry__RETURN_SECONDS=RETURN_SECONDS)
    between = "rm -f end; scancel $SLURM_JOB_ID.0"  # the step of a killed supervisor runs on
    job = Job(lab, tmp_path, srun=f"srun --auto-resume=1 ./task.sh; {between}; srun")
    first = wait_for(lambda: job.running_on(1, 4), 30, job)
    # A sresctld that is still starting would never hear of a supervisor that is gone by then.
    wait_for(lambda: "attempt-started" in kinds_of_job(lab, job), 30, "sresctld knows of it")
    if end == "killed":
        look = ["pgrep", "-f", "sres-resume --srun"]
        pid = lab.run(look, node=first[0]["host"], check=True).stdout.split()[0]
        lab.run(["kill", "-9", pid], node=first[0]["host"], check=True)
    else:
        job.let_end()
    plain = wait_for(lambda: job.running_on(2, 4), 30, job)
    assert {task["token"] for task in plain} == {""}
    wait_for(lambda: "unsupervised" in kinds_of_job(lab, job), 45, "it is not supervised any more")
    assert f'"{job.id}"' not in lab.run([SRES, "status", "--format=json"]).stdout
    lab.power_off(VICTIM)
    wait_for(lambda: job.state() == "PENDING", 30, job)
    assert "taken-out" not in kinds_of_job(lab, job)
    assert "marked" in kinds(lab, VICTIM)


def test_a_supervisor_that_returns_after_a_restart_keeps_its_job(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Also the second one of a job, and also long after sresctld came back."""
    lab = fresh_lab(LabSpec(nodes=5, network=True))
    job = Job(lab, tmp_path, srun="srun --auto-resume=1 ./task.sh; rm -f end; srun --auto-resume=1")
    wait_for(lambda: job.running_on(1, 4), 30, job)
    job.let_end()
    wait_for(lambda: len(job.tasks()) == 8, 30, job)
    lab.kill_daemon("sresctld", signal.SIGKILL)
    start_impatient(lab, registry__RETURN_SECONDS=RETURN_SECONDS)
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 2 * RETURN_SECONDS, 30, "no supervisor is awaited")
    assert len(job.tasks()) == 8
    lab.power_off(VICTIM)
    again = wait_for(lambda: job.running_on(2, 4), 60, job)
    assert {task["restarts"] for task in again} == {0}
    assert "taken-out" in kinds_of_job(lab, job)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_a_supervisor_notices_that_sresctld_s_machine_has_lost_its_power(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """No goodbye comes then, and a supervisor has nothing to send while all is well."""
    lab = fresh_lab(LabSpec(nodes=5, network=True))
    job = Job(lab, tmp_path)
    wait_for(lambda: job.running_on(1, 4), 30, job)
    wait_for(lambda: "attempt-started" in kinds_of_job(lab, job), 30, "sresctld knows of it")
    lab.run(["ip", "link", "set", "eth0", "down"], check=True)
    lab.kill_daemon("sresctld", signal.SIGKILL)
    # Else the kernel would go on saying goodbye.
    lab.run(["ss", "-K", "sport", "=", ":6829"])
    lab.run(["ip", "link", "set", "eth0", "up"], check=True)
    lab.start_daemon("sresctld")
    wait_for(lambda: kinds_of_job(lab, job).count("attempt-started") == 2, 40, "it is back")
    lab.power_off(VICTIM)
    again = wait_for(lambda: job.running_on(2, 4), 60, job)
    assert {task["restarts"] for task in again} == {0}
    assert "unsupervised" not in kinds_of_job(lab, job)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_a_forced_replacement_costs_no_two_minutes(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(LabSpec(nodes=5, network=True))
    job = Job(lab, tmp_path)
    wait_for(lambda: job.running_on(1, 4), 30, job)
    lab.run([SRES, "node", "replace", "--force", "--yes", VICTIM], check=True)
    second = wait_for(lambda: job.running_on(2, 4), 30, job)
    assert {task["restarts"] for task in second} == {1}
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
