"""A training that Slurm, or a person, asks to end writes a checkpoint of its last step: the next
start loses no step and no sample, on each Slurm of this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle

from slurm_resilience.errors import MissingTool
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.releases import VERSIONS, root_of

pytest.importorskip("torch", reason="torch is not installed")

WaitFor = Callable[..., Any]
TASK = Path(__file__).with_name("checkpointing_task.py")
BATCH = 4
GRACE_SECONDS = 10
MAIN = "main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF"
LOW = f"low Nodes=ALL PriorityTier=1 GraceTime={GRACE_SECONDS} PreemptMode=REQUEUE"


class Training:
    """Jobs that train one after the other in one directory."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.job = ""
        script = folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\nexport OMP_NUM_THREADS=1\n"
            f"srun --auto-resume=1 {sys.executable} {TASK}\n"
            f"code=$?\necho srun ended with $code\nexit $code\n"
        )

    def submit(self, *words: str) -> None:
        """Submit the next job."""
        words = ("--nodes=2", "--exclusive", "--output=log", "--open-mode=append", *words)
        argv = ["sbatch", "--parsable", *words, "job.sh"]
        self.job = self.lab.run(argv, cwd=self.folder, check=True).stdout.strip()

    def lines(self) -> list[tuple[str, int, list[int]]]:
        """Return the start of a job, the step, and a rank's samples, for each step of each rank."""
        files = self.folder.glob("steps.*")
        found = [line for file in files for line in file.read_text().split("\n")[:-1]]
        return [(start, step, samples) for start, step, samples in map(json.loads, found)]

    def steps(self, restarts: int = 0) -> list[int]:
        """Return the steps of a start of the last job."""
        start = f"{self.job}.{restarts}"
        return [step for name, step, _ in self.lines() if name == start]

    def state(self) -> str:
        shown = self.lab.run(["scontrol", "show", "job", self.job]).stdout
        return shown.partition("JobState=")[2].partition(" ")[0]

    def saved(self) -> int:
        """Return the newest step with a checkpoint."""
        return max(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step-*"))

    def check_samples(self) -> None:
        """Check that all steps came once, in one start each, with all their samples."""
        starts, samples = dict[int, set[str]](), dict[int, list[int]]()
        for start, step, indices in self.lines():
            starts.setdefault(step, set()).add(start)
            samples.setdefault(step, []).extend(indices)
        assert sorted(starts) == list(range(1, self.saved() + 1)), self
        assert not {step: names for step, names in starts.items() if len(names) > 1}, self
        for step, indices in samples.items():
            assert sorted(indices) == list(range((step - 1) * BATCH, step * BATCH)), step

    def text(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __repr__(self) -> str:
        return f"job {self.job}: {self.state()}\n{self.text()}"


def releases() -> list[str]:
    """All that are on this machine; where a run is for one of them, that one."""
    chosen = os.environ.get("SRES_TEST_SLURM")
    return [chosen] if chosen else list(VERSIONS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", releases())
def test_no_step_is_lost(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, version: str
) -> None:
    """Before its time limit; preempted, and requeued; and cancelled by a person."""
    try:
        root = root_of(version)
    except MissingTool as error:
        pytest.skip(f"needs a lab: {error}")
    options = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    lab = fresh_lab(
        LabSpec(
            nodes=2,
            slurm_root=root,
            network=True,
            options=options | {"PartitionName": MAIN},
            partitions=(LOW,),
        )
    )
    run = Training(lab, tmp_path)

    last = 0
    if version == releases()[0]:  # it takes half a minute, and no release does it in its own way
        run.submit("--time=10", "--signal=TERM@5")
        wait_for(lambda: len(run.steps()) > 4, 60, run)
        # Slurm sends the signal up to a minute sooner than it is asked to.
        lab.run(["scontrol", "update", f"jobid={run.job}", "TimeLimit=1"], check=True)
        wait_for(lambda: run.state() not in ("PENDING", "RUNNING", "COMPLETING"), 90, run)
        last = max(run.steps())
        assert run.saved() == last, run

    run.submit("--partition=low", "--requeue")
    wait_for(lambda: len(run.steps()) > 4, 60, run)
    assert min(run.steps()) == last + 1, run
    words = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"]
    other = lab.run([*words, "--wrap=sleep 300"], cwd=tmp_path, check=True).stdout.strip()
    running = ["squeue", "-h", "-j", other, "-t", "RUNNING", "-o", "%T"]
    # Slurm looks now and then.
    wait_for(lambda: lab.run(running).stdout, GRACE_SECONDS + 30, run)
    last = max(run.steps())
    assert run.saved() == last, run
    lab.run(["scancel", other], check=True)
    wait_for(lambda: run.state() == "PENDING", 60, run)
    # Not within the second of its requeue: Slurm has revoked its credentials of that time.
    lab.run(["scontrol", "update", f"jobid={run.job}", "starttime=now+2"], check=True)
    wait_for(lambda: len(run.steps(1)) > 4, 60, run)
    assert min(run.steps(1)) == last + 1, run

    lab.run(["scancel", run.job], check=True)
    wait_for(lambda: run.state() == "CANCELLED", 60, run)
    run.check_samples()
    ends = len({start for start, *_ in run.lines()})
    assert run.text().count("the training ends after step") == ends, run
    assert run.text().count("all ranks were asked to end") == ends, run
    assert "recovered" not in run.text(), run
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


@pytest.mark.timeout(300)
def test_those_that_outlive_the_batch_host_save_their_step(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Slurm ends the job, and requeues it."""
    lab = fresh_lab(LabSpec(nodes=4, network=True))
    run = Training(lab, tmp_path)
    run.submit("--nodes=3", "--export=ALL,SRES_CHECKPOINTLESS=1")
    wait_for(lambda: len(run.steps()) > 10, 60, run)
    lab.power_off("n1")
    before = max(run.steps())
    wait_for(lambda: len(run.steps(1)) > 4, 90, run)
    # A step that only the lost rank had finished would come again.
    assert min(run.steps(1)) in (before, before + 1), run
    lab.run(["scancel", run.job], check=True)
    wait_for(lambda: run.state() == "CANCELLED", 60, run)
