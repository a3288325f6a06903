"""A supervised job that Slurm preempts: it runs again, as its PreemptMode says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
GRACE_SECONDS = 8
MAIN = f"main Nodes=ALL Default=YES MaxTime=INFINITE GraceTime={GRACE_SECONDS}"


RESUMED = "srun --auto-resume=1"
LEAVING = RESUMED + """ sh -c 'trap "exit 0" TERM; "$0" & wait $!; code=$?; sleep 1; exit $code'"""
"""As a program that has saved its work."""


@pytest.mark.parametrize("srun", [RESUMED, LEAVING], ids=["killed", "leaving"])
def test_a_job_that_ends_in_its_grace_time_is_requeued(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, srun: str
) -> None:
    """Its step ended when it was told to, the script with it: to Slurm it had ended by itself."""
    lab = fresh_lab(
        LabSpec(
            nodes=2,
            daemons=False,
            options={
                "PreemptType": "preempt/partition_prio",
                "PreemptMode": "REQUEUE",
                "PartitionName": MAIN,
            },
            partitions=("high Nodes=ALL PriorityTier=9",),
        )
    )
    job = Job(lab, tmp_path, "--requeue", nodes=2, srun=srun)
    wait_for(lambda: job.running_on(1, 2), 60, job)
    words = ["sbatch", "--parsable", "--partition=high", "-N2", "--exclusive"]
    high = lab.run([*words, "--wrap", "exec sleep 600"], cwd=tmp_path, check=True).stdout.strip()
    release = lab.run(["sinfo", "--version"], check=True).stdout.split()[-1]
    if release < "24.11":  # a newer one requeues it in any case
        wait_for(lambda: "srun stays until it takes the nodes" in job.log(), 30, job)
    state = ["squeue", "-h", "-o", "%T", "-j"]
    wait_for(lambda: lab.run([*state, high]).stdout.split() == ["RUNNING"], 60, job)
    wait_for(lambda: job.state() == "PENDING", 30, job)
    assert "the user sent" not in job.log(), job
    lab.run(["scancel", high], check=True)
    # Not within the second of its requeue: Slurm has revoked its credentials of that time.
    lab.run(["scontrol", "update", f"jobid={job.id}", "StartTime=now+2"], check=True)
    again = wait_for(lambda: job.running_on(2, 2), 60, job)
    assert {task["restarts"] for task in again} == {1}, job
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
