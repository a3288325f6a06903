"""A step over many nodes loses one: its next attempt does not wait for the dead one.

Slurm's own end of a step changes with its size: over more than seven nodes slurmstepd reports
through a tree, which waits a minute for a dead child.

    SRES_TEST_SIZES=8,18,32 scripts/test tests/cluster/test_many_nodes.py -s    prints the seconds
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, events

from slurm_resilience.lab import Lab, LabSpec

SIZES = tuple(int(size) for size in os.environ.get("SRES_TEST_SIZES", "18").split(","))
LOST = "n3"

# What HyperPod's published script does in each task before it starts torchrun.
SCRIPT = """\
#!/bin/bash
began=$(date +%s.%N)
NODE_LIST=$(scontrol show jobid=$SLURM_JOBID | awk -F= '/NodeList=/{print $2}' | grep -v Exc)
MASTER_NODE=$(scontrol show hostname $NODE_LIST | head -n 1)
MASTER_ADDR=$(scontrol show node=$MASTER_NODE | awk -F= '/NodeAddr=/{print $2}' | \
awk '{print $1}')
printf '{"attempt":%s,"rank":%s,"nodes":%s,"master":"%s","began":%s}\\n' "$SRES_ATTEMPT" \
"$SLURM_NODE" "$SLURM_NNODES" "$MASTER_ADDR" "$began" >> begun
while [ ! -e end ]; do sleep 0.5; done
"""


@pytest.mark.parametrize("gres", [None, "gpu:2"] if "SRES_TEST_SIZES" in os.environ else [None])
@pytest.mark.parametrize("size", SIZES)
def test_a_large_step_loses_a_node(
    fresh_lab: Callable[[LabSpec], Lab],
    wait_for: Callable[..., Any],
    tmp_path: Path,
    size: int,
    gres: str | None,
) -> None:
    script = tmp_path / "script.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    lab = fresh_lab(LabSpec(nodes=size + 1, network=True, gres=gres))
    more = ["--no-kill", f"--gres={gres}"] if gres else []
    job = Job(lab, tmp_path, *more, srun=f"srun --auto-resume=1 {script}", nodes=size)
    wait_for(lambda: begun(job, 1, size), 60, job)
    lab.power_off(LOST)
    tasks = wait_for(lambda: begun(job, 2, size), 30, job)
    assert [task["rank"] for task in tasks] == list(range(size))
    assert {task["nodes"] for task in tasks} == {size}
    assert {task["master"] for task in tasks} == {lab.node_fields()["n1"]["NodeAddr"]}
    wait_for(lambda: "recovered: attempt 2" in job.log(), 15, job)
    assert job.log().index("starting attempt 2") < job.log().index("recovered")
    print(phases(lab, job, size, gres, max(task["began"] for task in tasks)))
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def begun(job: Job, attempt: int, size: int) -> list[dict[str, Any]]:
    """The tasks of an attempt, by rank; none while some are missing."""
    path = job.folder / "begun"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    tasks = [task for task in map(json.loads, lines) if task["attempt"] == attempt]
    return sorted(tasks, key=lambda task: task["rank"]) if len(tasks) == size else []


def phases(lab: Lab, job: Job, size: int, gres: str | None, last_began: float) -> str:
    """Seconds from the mark until each phase was over."""
    marked = next(e["at"] for e in events(lab) if (e["node"], e["kind"]) == (LOST, "marked"))
    at = {"marked": marked, "all run": last_began}
    for line in (job.folder / "events").read_text().splitlines():
        event = json.loads(line)
        at.setdefault(event["event"].replace("_", " "), event["at"])
    names = ("step ended", "nodes ready", "relaunched", "all run")
    told = ", ".join(f"{name} {at[name] - marked:.2f}" for name in names)
    return f"\n{size} nodes, {gres or 'no GRES'}: {told} s after the mark"
