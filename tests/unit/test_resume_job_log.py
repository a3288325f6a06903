"""The cause of a step's end by the job's own log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_resilience.resume.decide.signatures import Category
from slurm_resilience.resume.srun.job_log import JobLog

LIMIT = "slurmstepd-n3: error: *** STEP {} ON n3 CANCELLED AT 2026-11-29T13:20:58 DUE TO TIME LIMIT"


@pytest.mark.parametrize(
    ("job", "step", "is_own"),
    [("12", "12.0", True), ("12", "13.0", False), ("12", "1.0", False), ("", "13.0", True)],
)
def test_the_end_of_a_companion_is_no_cause(
    tmp_path: Path, job: str, step: str, is_own: bool
) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    log = JobLog(job, (descriptor,))
    os.write(descriptor, f"step 7\n{LIMIT.format(step)} ***\n".encode())
    told = log.explain()
    os.close(descriptor)
    assert (told is not None and told.category is Category.TIME_LIMIT) == is_own
