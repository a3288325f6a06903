"""A notice that a node goes: its job leaves first, the node is replaced; taken back, it returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Job, NodesOf, all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]


def findings(lab: Lab, node: str) -> list[Any]:
    done = lab.run([str(own_bin() / "sres"), "node", "show", node, "--format", "json"], check=True)
    (shown,) = json.loads(done.stdout)
    return list(shown["findings"])


def test_a_notice_is_a_planned_loss(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    program = tmp_path / "notice"
    program.write_text(f'#!/bin/sh\ncat {tmp_path}/"$(hostname)" 2>/dev/null || true\n')
    program.chmod(0o755)
    options = {"agent": {"loss_notice": str(program)}}
    lab = fresh_lab(LabSpec(nodes=3, network=True, sres_options=options))
    wait_for(lambda: all_idle(lab), 30, NodesOf(lab))

    # Taken back while a job that is not supervised keeps the node: it is not replaced.
    plain = Job(lab, tmp_path, "--nodelist=n3", srun="srun", nodes=1)
    wait_for(lambda: plain.running_on(1, 1), 30, plain)
    (tmp_path / "n3").write_text("2026-09-18T08:22:00Z")
    wait_for(lambda: "FAIL" in lab.node_states()["n3"], 30, NodesOf(lab))
    (detected,) = [e for e in events(lab) if e["kind"] == "detected"]
    assert "this node goes at 2026-09-18T08:22:00Z" in detected["text"]
    (tmp_path / "n3").unlink()
    wait_for(lambda: not findings(lab, "n3"), 30, "the notice is taken back")
    plain.let_end()
    wait_for(lambda: "closed" in kinds(lab, "n3"), 60, NodesOf(lab))
    assert "srun ended with 0" in plain.ended()
    assert "replacing" not in kinds(lab, "n3")

    # A supervised job goes on without the node, which is replaced once the job has left it.
    job = Job(lab, tmp_path, "--nodelist=n1,n2", nodes=2)
    wait_for(lambda: job.running_on(1, 2), 30, job)
    (tmp_path / "n2").write_text("2026-09-18T08:22:00Z")
    second = wait_for(lambda: job.running_on(2, 2), 60, job)
    assert {task["host"] for task in second} == {"n1", "n3"}
    wait_for(lambda: "replacing" in kinds(lab, "n2"), 60, NodesOf(lab))
    (tmp_path / "n2").unlink()  # the new machine has no notice
    wait_for(lambda: "closed" in kinds(lab, "n2"), 90, NodesOf(lab))
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, job)
