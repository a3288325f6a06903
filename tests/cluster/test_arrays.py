"""An element of a job array is one job: what happens to it happens to no other element."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Job, all_idle

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]


def test_one_element_is_requeued_and_the_other_goes_on(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """One of them has the array's own number, by which Slurm means all of them."""
    lab = fresh_lab(LabSpec(nodes=5, network=True))
    words = "printf '%s %s %s\\n' $SLURM_JOB_ID $SLURM_ARRAY_JOB_ID $(hostname) >> elements; "
    job = Job(lab, tmp_path, "--array=1-2", srun=f"{words}srun --auto-resume=1", nodes=2)
    tasks = wait_for(lambda: _all_four(job), 60, job)
    first_attempts = {task["token"] for task in tasks}
    assert len(first_attempts) == 2, job
    # The element with the array's number; its batch host cannot be exchanged, so it is requeued.
    rows = [line.split() for line in (job.folder / "elements").read_text().splitlines()]
    (host,) = [host for own, array, host in rows if own == array]
    words_of_admin = ["scontrol", "update", f"node={host}", "state=fail", "reason=Action:Replace"]
    lab.run(words_of_admin, check=True)
    wait_for(lambda: len(_elements(job)) > 2, 60, job)
    # Each of its tasks writes for itself, so the first one is not yet the whole attempt.
    wait_for(lambda: job.running_on(3, tasks=2), 60, job)
    restarts = [task["restarts"] for task in job.tasks()]
    assert (restarts.count(0), restarts.count(1)) == (4, 2), job
    job.let_end()
    wait_for(lambda: job.ended().count("srun ended with 0") == 2, 60, job)
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")
    # The other one was never started again.
    assert len(_elements(job)) == 3, job


def test_a_rank_of_each_element_is_relaunched(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Each supervisor finds its own step among those of the array, and ends no other one."""
    lab = fresh_lab(LabSpec(nodes=4, network=True))
    job = Job(lab, tmp_path, "--array=1-2", srun="srun --auto-resume=1", nodes=2)
    tasks = wait_for(lambda: _all_four(job), 60, job)
    for token in {task["token"] for task in tasks}:
        victim = next(t["host"] for t in tasks if t["token"] == token and t["procid"] == 1)
        pid = lab.run(["pgrep", "-f", r"task\.sh$"], node=victim, check=True).stdout.split()[0]
        lab.run(["kill", "-SEGV", pid], node=victim, check=True)
    wait_for(lambda: len(job.tasks()) == 8, 60, job)
    assert sorted(task["attempt"] for task in job.tasks()) == [1] * 4 + [2] * 4, job
    job.let_end()
    wait_for(lambda: job.ended().count("srun ended with 0") == 2, 60, job)


def _all_four(job: Job) -> list[dict[str, Any]]:
    return job.tasks() if len(job.tasks()) == 4 else []


def _elements(job: Job) -> list[str]:
    path = job.folder / "elements"
    return path.read_text().splitlines() if path.exists() else []
