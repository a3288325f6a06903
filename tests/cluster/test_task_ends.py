"""A task's own end reaches the supervisor from slurmstepd; what is printed decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, all_idle

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]

FOREIGN = (
    "slurmstepd-n1: error: *** STEP 77.3 ON n1 CANCELLED AT 2026-11-20T12:00:00 ***\n"
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
)


@pytest.fixture
def lab(shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    return shared_lab(LabSpec(nodes=2, network=True))


def failing(tmp_path: Path, how: str) -> str:
    """A program of which task 1 fails in the first attempt; the other one waits for the end."""
    program = tmp_path / "fail.sh"
    first = '[ "$SRES_ATTEMPT" = 1 ] && [ "$SLURM_PROCID" = 1 ]'
    program.write_text(f'#!/bin/sh\nulimit -c 0\nif {first}; then\nsleep 1\n{how}\nfi\nexec "$@"\n')
    program.chmod(0o755)
    return str(program)


def end(job: Job, wait_for: WaitFor) -> None:
    job.let_end()
    wait_for(lambda: "srun ended with" in job.ended(), 30, job)
    wait_for(lambda: all_idle(job.lab), 30, "all nodes are idle again")


def test_kill_on_bad_exit_does_not_hide_the_programs_own_code(
    lab: Lab, wait_for: WaitFor, tmp_path: Path
) -> None:
    """srun ends the others by SIGTERM, and their code is the higher one."""
    program = failing(tmp_path, "exit 5").replace("fail.sh", "fail.sh")
    job = Job(lab, tmp_path, srun=f"srun --auto-resume=1 -K {program}", nodes=2)
    wait_for(lambda: "srun ended with" in job.ended(), 60, job)
    assert "task 1 on n2 ended with exit code 5" in job.log(), job
    assert "without progress: it is a bug" in job.log(), job
    assert len(job.attempts()) <= 1, job
    end(job, wait_for)


def test_the_words_of_another_job_do_not_stop_recovery(
    lab: Lab, wait_for: WaitFor, tmp_path: Path
) -> None:
    (tmp_path / "words").write_text(FOREIGN)
    program = failing(tmp_path, f"cat {tmp_path}/words >&2; sleep 1; kill -ABRT $$")
    job = Job(lab, tmp_path, srun=f"srun --auto-resume=1 -K {program}", nodes=2)
    wait_for(lambda: job.running_on(2, 2) or len(job.running_on(1, 2)) == 2, 60, job)
    wait_for(lambda: "recovered: attempt 2" in job.log(), 30, job)
    assert "task 1 on n2 ended with exit code 134 (SIGABRT)" in job.log(), job
    end(job, wait_for)


def test_the_others_do_not_wait_for_a_task_that_crashed(
    lab: Lab, wait_for: WaitFor, tmp_path: Path
) -> None:
    """Without -K srun would let them run on for ever."""
    program = failing(tmp_path, "kill -SEGV $$")
    job = Job(lab, tmp_path, srun=f"srun --auto-resume=1 {program}", nodes=2)
    wait_for(lambda: "recovered: attempt 2" in job.log(), 60, job)
    assert "task 1 on n2 ended with exit code 139 (SIGSEGV): ending the other tasks" in job.log()
    end(job, wait_for)


def test_the_user_may_let_the_others_go_on(lab: Lab, wait_for: WaitFor, tmp_path: Path) -> None:
    program = failing(tmp_path, "kill -SEGV $$")
    job = Job(lab, tmp_path, srun=f"srun --auto-resume=1 -K0 {program}", nodes=2)
    wait_for(lambda: "Segmentation fault" in job.log(), 30, job)
    job.let_end()
    # The other task ends by itself and well, and only then the step does.
    wait_for(lambda: "recovered: attempt 2" in job.log(), 60, job)
    assert "ending the other tasks" not in job.log()
    end(job, wait_for)


def test_a_cancelled_step_stays_cancelled(lab: Lab, wait_for: WaitFor, tmp_path: Path) -> None:
    job = Job(lab, tmp_path, srun="srun --auto-resume=1", nodes=2)
    wait_for(lambda: job.running_on(1, 2), 30, job)
    lab.run(["scancel", f"{job.id}.0"], check=True)
    wait_for(lambda: "srun ended with" in job.ended(), 60, job)
    assert len(job.attempts()) == 1, job
    assert "recovered" not in job.log(), job
    end(job, wait_for)
