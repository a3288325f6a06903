"""Two supervised sruns of one job that lose a node each in the same moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Job

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
BOTH = """\
srun --auto-resume=1 -N2 -n2 -w n1,n3 ./task.sh &
srun --auto-resume=1 -N2 -n2 -w n2,n4 ./task.sh & wait; true\
"""


def test_neither_takes_what_the_other_goes_on_with(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Slurm shows a step of neither for a moment. With one idle node one of them waits for the
    other's lost node to be replaced; the two never share a node."""
    lab = fresh_lab(LabSpec(nodes=5, network=True, slurmdbd=True))
    job = Job(lab, tmp_path, "--no-kill", srun=BOTH, nodes=4)
    wait_for(lambda: len(job.tasks()) == 4, 40, job)
    lab.power_off("n3,n4")
    again = wait_for(lambda: len(job.tasks()) == 8 and job.tasks()[4:], 120, job)
    assert len({task["host"] for task in again}) == 4, job
    assert {(task["attempt"], task["restarts"]) for task in again} == {(2, 0)}, job
    job.let_end()
    wait_for(lambda: "srun ended" in job.ended(), 30, job)
