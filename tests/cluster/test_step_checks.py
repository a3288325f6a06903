"""A step that dies on real Slurm: its nodes check themselves, and that verdict decides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Job, all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
VICTIM = "n2"


def fabric(root: Path, state: str) -> Path:
    """Lay out one EFA device with one port."""
    device = root / "rdmap0s29"
    (device / "device").mkdir(parents=True)
    (device / "device" / "vendor").write_text("0x1d0f\n")
    (device / "device" / "device").write_text("0xefa2\n")
    (device / "ports" / "1").mkdir(parents=True)
    (device / "ports" / "1" / "state").write_text(f"{state}\n")
    return root


def kill_task(lab: Lab, node: str) -> None:
    """Kill the task on a node that is not the batch host, where srun has the same words."""
    lab.run(["pkill", "-9", "-f", "/task.s[h]"], node=node, check=True)


def test_a_fault_that_no_line_announced_is_found_as_the_step_dies(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "sys" / "class").mkdir(parents=True)
    (root / "proc").symlink_to("/proc")
    ports = fabric(root / "sys" / "class" / "infiniband", "4: ACTIVE")
    broken = fabric(tmp_path / "broken", "1: DOWN")
    # The checks' own next round is an hour away.
    agent = {"sysroot": str(root), "check_interval": 3600.0}
    resume = {"check_wait": 20.0, "backoff": 0.0}
    options = {"agent": agent, "resume": resume}
    lab = fresh_lab(LabSpec(nodes=4, network=True, sres_options=options))
    wait_for(lambda: all_idle(lab), 60, "every node is idle")
    job = Job(lab, tmp_path, "--nodelist=n[1-2]", nodes=2)
    wait_for(lambda: job.running_on(1, 2), 30, job)

    kill_task(lab, VICTIM)
    second = wait_for(lambda: job.running_on(2, 2), 60, job)
    assert {task["host"] for task in second} == {"n1", VICTIM}, job
    assert "checks of n[1-2] took" in job.log() and "no fault was found" in job.log()
    assert not [e for e in events(lab) if e["kind"] == "detected"]

    lab.run(["mount", "--bind", str(broken), str(ports)], node=VICTIM, check=True)
    kill_task(lab, VICTIM)
    third = wait_for(lambda: job.running_on(3, 2), 60, job)
    assert VICTIM not in {task["host"] for task in third}, job
    wait_for(lambda: f"at fault: {VICTIM}" in job.log(), 30, job)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    wait_for(lambda: "closed" in kinds(lab, VICTIM), 60, "it was repaired and is back")
    (detected,) = [e for e in events(lab) if e["kind"] == "detected"]
    assert detected["node"] == VICTIM
    assert "EFA ports that were active are down: rdmap0s29/1 (1: DOWN)" in detected["text"]
