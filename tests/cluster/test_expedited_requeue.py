"""A job with `--requeue=expedite` on a full cluster: Slurm requeues it by itself when its node goes
DOWN, and sresctld keeps its sound nodes for it until the lost one is back.

Slurm's own keeping is not enough: other people's waiting jobs take the idle nodes (26.05).

    SRES_TEST_LADDER=all scripts/test tests/cluster/test_expedited_requeue.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, NodesOf, events
from test_ladder import OPTIONS, crowd, idle

from slurm_resilience.errors import MissingTool
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.releases import VERSIONS, root_of

WaitFor = Callable[..., Any]

if os.environ.get("SRES_TEST_LADDER"):

    @pytest.mark.parametrize("lost", [0, 1], ids=["batch-host", "other-node"])
    def test_it_runs_again_on_its_nodes(
        shared_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, lost: int
    ) -> None:
        try:
            root = root_of(VERSIONS[-1])
        except MissingTool as error:
            pytest.skip(f"needs a lab: {error}")
        spec = LabSpec(
            nodes=5,
            network=True,
            gres="gpu:2",
            slurm_root=root,
            options={"SlurmctldParameters": "enable_expedited_requeue"},
            sres_options=OPTIONS,
        )
        lab = shared_lab(spec)
        wait_for(lambda: len(idle(lab)) == spec.nodes, 60, NodesOf(lab))
        job = Job(lab, tmp_path, "--requeue=expedite", "--gres=gpu:2", nodes=3)
        try:
            hosts = [t["host"] for t in wait_for(lambda: job.running_on(1, 3), 30, job)]
            wait_for(lambda: "attempt-started" in kinds_of(job), 10, job)
            crowd(lab, wait_for)
            lab.power_off(hosts[lost])
            again = wait_for(lambda: job.running_on(2, 3), 60, job)
            assert [task["host"] for task in again] == hosts, job
            # By Slurm: a requeue of ours would take its place.
            assert "requeue-asked" not in kinds_of(job), job
            job.let_end()
            wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
        finally:
            lab.run(["scancel", "--user=bob"])
            lab.run(["scancel", "--quiet", str(job.id)])


def kinds_of(job: Job) -> list[str]:
    """Return the kinds of a job's events in sresctld's journal."""
    return [event["kind"] for event in events(job.lab) if event["job"] == job.id]
