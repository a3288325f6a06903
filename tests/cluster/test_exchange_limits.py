"""Check that an exchange respects what a job says of its nodes, and lets a sick node go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]


@pytest.mark.parametrize(
    ("sbatch", "srun"), [(["--exclude=n4"], ""), ([], "--exclude=n4 "), (["--constraint=new"], "")]
)
def test_an_exchange_brings_a_node_that_the_job_may_have(
    fresh_lab: Callable[[LabSpec], Lab],
    wait_for: WaitFor,
    tmp_path: Path,
    sbatch: list[str],
    srun: str,
) -> None:
    lab = fresh_lab(LabSpec(nodes=5, network=True))
    for name in ("n1", "n2", "n3", "n5"):
        lab.run(["scontrol", "update", f"node={name}", "availablefeatures=new"], check=True)
        lab.run(["scontrol", "update", f"node={name}", "activefeatures=new"], check=True)
    job = Job(lab, tmp_path, *sbatch, srun=f"srun --auto-resume=1 {srun}", nodes=3)
    wait_for(lambda: job.running_on(1, 3), 30, job)
    # n4 would be Slurm's next choice.
    lab.power_off("n3")
    second = wait_for(lambda: job.running_on(2, 3), 60, job)
    assert [task["host"] for task in second] == ["n1", "n2", "n5"], job
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_a_sick_node_is_given_back_when_the_allocation_has_others(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Its replacement would wait for the job's end."""
    lab = fresh_lab(LabSpec(nodes=4, network=True))
    job = Job(lab, tmp_path, srun="srun --auto-resume=1 -N3 -n3", nodes=4)
    wait_for(lambda: job.running_on(1, 3), 30, job)
    lab.kmsg("n3", "NVRM: Xid (PCI:0000:04:00): 64, Failed to persist row remap table")
    second = wait_for(lambda: job.running_on(2, 3), 60, job)
    assert [task["host"] for task in second] == ["n1", "n2", "n4"], job
    wait_for(lambda: lab.node_states()["n3"] == "IDLE", 60, "n3 is replaced while the job runs")
    assert job.state() == "RUNNING"
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
