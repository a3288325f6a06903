"""Another user puts a directory of his own in the place of `.sres` while the job runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Job

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
OTHER_USER = 65534
KEPT = {"run", "run/checkpoint", "token"}


def test_the_user_loses_nothing_elsewhere_and_the_job_goes_on(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Without a fence, which the log tells."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "run").mkdir(parents=True)
    for name in ("run/checkpoint", "token"):
        (elsewhere / name).write_text("the user's own\n")
    lab = fresh_lab(LabSpec(nodes=5, network=True))
    job = Job(lab, tmp_path, nodes=4)
    wait_for(lambda: job.running_on(1, 4), 30, job)
    shared = job.folder / ".sres"
    (own,) = (path for path in (shared / "0").iterdir() if path.is_dir())
    shared.rename(job.folder / "away")
    own.parent.mkdir(parents=True)
    for path in (shared, own.parent):
        os.chown(path, OTHER_USER, OTHER_USER)
    own.symlink_to(elsewhere)
    lab.power_off("n3")
    wait_for(lambda: job.running_on(2, 4), 60, job)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    assert {str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*")} == KEPT
    assert "the fence cannot be raised" in job.log()
