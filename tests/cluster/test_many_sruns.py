"""Many supervised sruns at once, a fifth of which lose a node within a second.

    SRES_TEST_SRUNS=100 scripts/test tests/cluster/test_many_sruns.py -s    prints the seconds

One srun in five has a job of two nodes, and loses the one that is not its batch host. The others
share jobs of one node, eight to a job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Job, events

from slurm_resilience.lab import Lab, LabSpec

SRUNS = int(os.environ.get("SRES_TEST_SRUNS", "100"))
LOSERS = SRUNS // 5
TOGETHER = 8
JOBS = (SRUNS - LOSERS) // TOGETHER
SECONDS = 300
LOOK = {"LOOK_SECONDS": "2"}
"""Between two looks of a task whether it may end: each is a process, of a hundred tasks."""
FLAGGED = "srun --auto-resume=1 --overlap -N1 -n1 ./task.sh"

if "SRES_TEST_SRUNS" in os.environ:  # it starts 70 nodes

    def test_all_that_lose_a_node_recover(
        fresh_lab: Callable[[LabSpec], Lab], wait_for: Callable[..., Any], tmp_path: Path
    ) -> None:
        options = {
            "breaker": {"nodes_at_once": 1000, "partition_at_once": 1000},
            # On a small machine the last slurmd starts long after sresctld.
            "detect": {"start_grace": 120.0},
        }
        spec = LabSpec(nodes=3 * LOSERS + JOBS, network=True, sres_options=options, cpus=TOGETHER)
        lab = fresh_lab(spec)
        several = f"for i in $(seq {TOGETHER - 1}); do {FLAGGED} & done; srun --auto-resume=1"
        losers = [Job(lab, tmp_path, "--no-kill", nodes=2, env=LOOK) for _ in range(LOSERS)]
        others = [
            Job(lab, tmp_path, srun=f"{several} --overlap -N1 -n1", nodes=1, env=LOOK)
            for _ in range(JOBS)
        ]
        for job in losers:
            wait_for(lambda j=job: j.running_on(1, 2), SECONDS, job)
        for job in others:
            wait_for(lambda j=job: len(j.tasks()) == TOGETHER, SECONDS, job)
        lost = [job.running_on(1, 2)[1]["host"] for job in losers]
        used, began = processor_seconds(lab), time.time()
        lab.power_off(",".join(lost))
        off = time.time() - began
        for job in losers:
            wait_for(lambda j=job: j.running_on(2, 2), SECONDS, job)
        for job in losers:
            wait_for(lambda j=job: at(j, "running"), 60, job)
        ran = sorted(at(job, "running") - began for job in losers)
        share = (processor_seconds(lab) - used) / (time.time() - began)
        known = [e for e in events(lab) if e["kind"] == "marked" and e["node"] in lost]
        marked = max(e["at"] for e in known) - began
        print(
            f"\n{LOSERS + JOBS * TOGETHER} sruns, {LOSERS} nodes off within {off:.1f} s: marked "
            f"within {marked:.1f} s, run again after {ran[0]:.1f} to {ran[-1]:.1f} s (median "
            f"{ran[len(ran) // 2]:.1f}); sresctld used {share:.2f} cores"
        )
        assert share < 1
        assert {task["attempt"] for job in others for task in job.tasks()} == {1}
        assert {task["restarts"] for job in losers for task in job.tasks()} == {0}
        for job in (*losers, *others):
            job.let_end()
        for job in (*losers, *others):
            wait_for(lambda j=job: "srun ended with 0" in j.ended(), SECONDS, job)


def processor_seconds(lab: Lab) -> float:
    """Return the processor time that sresctld has used, with the commands that it has run."""
    shown = lab.run(["sh", "-c", "cat /proc/$(pgrep -x sresctld)/stat"], check=True).stdout
    fields = shown.rpartition(")")[2].split()
    # proc(5): utime, stime, cutime, cstime.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def at(job: Job, event: str) -> float:
    """Return when the supervisor wrote an event; 0: it has not."""
    path = job.folder / "events"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((e["at"] for e in map(json.loads, lines) if e["event"] == event), default=0.0)
