"""Measure an elastic job on real Slurm: a node becomes free, and a node turns sick.

A lab of four nodes; a job of two, which may grow to three by a preemptible companion. Another job
holds the other nodes, and ends: from then on until all ranks step in the larger world the time
counts (Slurm's scheduling, the start of Python and of torch, healing). Then the companion's node is
marked sick by a line of its kernel log: the ranks of another node come, and its own leave.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "training"))

from figures import Event, parse

from slurm_resilience.lab import Lab, LabSpec

PARTITIONS = (
    "main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
    "scavenge Nodes=ALL PriorityTier=1 GraceTime=30 PreemptMode=CANCEL MaxTime=INFINITE",
)
XID = "NVRM: Xid (PCI:0000:04:00): 64, Failed to persist row remap table"
PATIENCE_SECONDS = 180.0
LOOK_SECONDS = 0.05
STEP_SECONDS = 0.5
STEADY_STEPS = 10
"""For the length of a step."""


class ElasticJob:
    """The job, and what rank 0 told of its steps."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self._lab, self._directory = lab, directory
        (directory / "go").touch()
        worker = Path(__file__).parent / "training" / "workers" / "resized.py"
        launcher = f"{sys.executable} -m slurm_resilience.launcher --nproc-per-node=1 --standby=0"
        (directory / "job.sh").write_text(
            f"#!/bin/bash\nexport OMP_NUM_THREADS=1 BENCH_DIR={directory} BENCH_STEPS=100000 "
            f"BENCH_STEP_SECONDS={STEP_SECONDS}\n"
            f"srun --auto-resume=1 --auto-resume-max-nodes=3 {launcher} {worker}\n"
        )
        self.number = self.submit("--nodes=2", str(directory / "job.sh"))

    def submit(self, *words: str) -> str:
        """Submit a job; return its number."""
        sbatch = ["sbatch", "--parsable", "--exclusive", "--output=log.%j", *words]
        return self._lab.run(sbatch, cwd=self._directory, check=True).stdout.strip()

    def steps(self) -> list[Event]:
        """Return the steps of rank 0."""
        file = self._directory / "rank0.events"
        events = parse(file.read_text()) if file.exists() else []
        return [event for event in events if event.name == "step"]

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Wait for a state; return it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := holds()):
            if time.monotonic() > deadline:
                logs = [file.read_text() for file in self._directory.glob("log.*")]
                sys.exit(f"elastic: no {what}:\n" + "\n".join(logs)[-4000:])
            time.sleep(LOOK_SECONDS)
        return found

    def runs(self, number: str) -> bool:
        shown = self._lab.run(["squeue", "-h", "-j", number, "-o", "%T"]).stdout
        return shown.strip() == "RUNNING"

    def lent_node(self) -> str:
        """Return the node of the companion that runs; empty: none does."""
        words = ["squeue", "-h", "-t", "RUNNING", "-p", "scavenge", "-o", "%N"]
        return self._lab.run(words).stdout.strip()


def after(steps: Sequence[Event], since: float, world: int) -> list[Event]:
    """Return the steps in a world of this size, from a moment on. Pure."""
    return [step for step in steps if step.at > since and step.world == world]


def gaps(steps: Sequence[Event]) -> list[float]:
    """Return the seconds between steps. Pure."""
    return [after.at - before.at for before, after in pairwise(steps)]


def standstill_steps(steps: Sequence[Event], since: float, until: float) -> float:
    """Return the longest time without a step, in steps; 0: none came late. Pure.

    Args:
        steps: of one rank.
        since: monotonic seconds: the steps before it tell how long a step takes.
        until: the same.
    """
    usual = statistics.median(gaps([step for step in steps if step.at < since][-STEADY_STEPS:]))
    longest = max(gaps([step for step in steps if since - usual <= step.at <= until]))
    return max(0.0, longest / usual - 1)


def lost_steps(steps: Sequence[Event], since: float, until: float) -> float:
    """Return the steps that all standstills together have cost. Pure.

    Args:
        steps: of one rank.
        since: monotonic seconds: the steps before it tell how long a step takes.
        until: the same.
    """
    usual = statistics.median(gaps([step for step in steps if step.at < since][-STEADY_STEPS:]))
    made = [step.at for step in steps if since - usual <= step.at <= until]
    return max(0.0, (made[-1] - made[0]) / usual - (len(made) - 1))


def measure() -> dict[str, Any]:
    """Run it; the figures."""
    spec = LabSpec(
        nodes=4,
        network=True,
        options={
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "CANCEL",
            "PartitionName": PARTITIONS[0],
        },
        partitions=PARTITIONS[1:],
        sres_options={"elastic": {"partition": "scavenge", "snooze": 0.1}},
    )
    with (
        tempfile.TemporaryDirectory(prefix="sres-bench-") as folder,
        Lab.up(spec, name=f"elastic-{os.getpid()}") as lab,
    ):
        return _measure(ElasticJob(lab, Path(folder)), lab)


def _measure(job: ElasticJob, lab: Lab) -> dict[str, Any]:
    job.until(lambda: job.runs(job.number), "job")
    others = job.submit("--nodes=2", "--wrap=sleep 1000")
    job.until(lambda: after(job.steps(), 0.0, 2), "training")
    job.until(lambda: job.runs(others), "other job")
    free_at = time.monotonic()
    lab.run(["scancel", others], check=True)
    grown = job.until(lambda: after(job.steps(), free_at, 3), "growth")[0].at
    sick = job.until(job.lent_node, "companion")
    job.until(lambda: len(after(job.steps(), grown, 3)) > STEADY_STEPS, "steps")
    sick_at = time.monotonic()
    lab.kmsg(sick, XID)
    job.until(lambda: job.lent_node() not in ("", sick), "stand-in")
    job.until(lambda: sick not in job.lent_node().split(), "evacuation")
    left_at = time.monotonic()
    left = job.until(lambda: after(job.steps(), left_at, 3), "steps without it")[0].at
    lab.run(["scancel", job.number], check=True)
    return {
        "idle_to_grown_s": grown - free_at,
        "evacuation_standstill_steps": standstill_steps(job.steps(), sick_at, left),
        "evacuation_lost_steps": lost_steps(job.steps(), sick_at, left),
        "evacuation_step_s": statistics.median(gaps(job.steps()[-STEADY_STEPS:])),
    }
