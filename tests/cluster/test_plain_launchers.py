"""A plain program under sres-run: its step lives on, and a spare takes a lost node's part."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, NodesOf

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.slurm.hostlists import expand

pytest.importorskip("torch", reason="torch is not installed")

WaitFor = Callable[..., Any]
LAUNCHER = Path(sys.executable).parent / "sres-run"

# It looks like a program of torch's, and its ranks wait as such do. None of them loads torch.
PROGRAM = """\
import json, os, sys, time
there = "torch" in sys.modules

def train():
    import torch

names = ("RANK", "NODE_RANK", "SRES_STEP", "SRES_TOKEN", "MASTER_ADDR", "SLURM_JOB_NODELIST")
line = {name.lower(): os.environ[name] for name in names}
line |= {"host": os.uname().nodename, "there": there, "hold": "SRES_HOLD" in os.environ}
with open("ranks", "a") as file:
    file.write(json.dumps(line) + "\\n")
while not os.path.exists("end"):
    time.sleep(0.05)
sys.exit(int(open("end").read()))
"""

LOADED = """\
import os
open(f"loaded.{os.uname().nodename}", "w").close()
"""
"""A module that a warm interpreter imports last."""


class Story:
    """All that sresctld, the supervisor and the tasks tell, for a wait that fails."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __str__(self) -> str:
        supervisor = (self._job.folder / "events").read_text()
        return f"{self._job}\n{supervisor}\n{NodesOf(self._job.lab)}"


class LaunchedJob(Job):
    """A job of three nodes under sres-run, and all that its ranks have told."""

    def ranks(self) -> list[dict[str, Any]]:
        path = self.folder / "ranks"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def told(self, event: str) -> bool:
        path = self.folder / "events"
        return path.exists() and f'"event": "{event}"' in path.read_text()


def test_a_prepared_spare_takes_the_part_of_a_lost_node(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(LabSpec(nodes=4, network=True))
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    srun = "srun --auto-resume=1 --auto-resume-spares=1 --ntasks-per-node=1"
    (tmp_path / "loaded_mark.py").write_text(LOADED)
    srun += f" env PYTHONPATH={tmp_path} {LAUNCHER} --standby-import=loaded_mark"
    srun += f" --nproc-per-node=1 --restart=all --warm {program}"
    job = LaunchedJob(lab, tmp_path, srun=srun)

    wait_for(lambda: len(job.ranks()) == 3, 60, job)
    wait_for(lambda: job.told("living"), 60, job)
    wait_for(lambda: len(list(job.folder.glob("loaded.*"))) == 3, 90, job)
    lab.power_off("n2")
    wait_for(lambda: len(job.ranks()) == 6, 60, Story(job))
    first, again = job.ranks()[:3], sorted(job.ranks()[3:], key=lambda rank: int(rank["rank"]))
    assert {rank["host"] for rank in first} == {"n1", "n2", "n3"}
    assert [rank["host"] for rank in again] == ["n1", "n4", "n3"]
    assert [rank["node_rank"] for rank in again] == ["0", "1", "2"]
    assert [rank["there"] for rank in first + again] == [False] * 3 + [True] * 3, job
    assert len({rank["sres_token"] for rank in job.ranks()}) == 1, "no other attempt was needed"
    assert [rank["sres_step"] for rank in again] == ["0", "1", "0"]
    assert {rank["master_addr"] for rank in again} == {first[0]["master_addr"]}
    assert job.told("preparing") and job.told("suspected")
    assert not any(rank["hold"] for rank in again)
    assert expand(again[1]["slurm_job_nodelist"]) == ("n1", "n3", "n4"), "as they are by then"
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, job)
    assert "healed: seats 1" in job.log() and "the end: 1 attempt" in job.log()


def test_a_job_with_gres_goes_on_with_a_second_allocation(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """No second allocation joins a step that lives on; its next attempt is one world over both."""
    lab = fresh_lab(LabSpec(nodes=4, network=True, gres="gpu:2"))
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    srun = f"srun --auto-resume=1 --ntasks-per-node=1 {LAUNCHER} --nproc-per-node=1 {program}"
    job = LaunchedJob(lab, tmp_path, "--no-kill", "--gres=gpu:2", srun=srun, nodes=3)
    wait_for(lambda: len(job.ranks()) == 3, 60, job)
    wait_for(lambda: job.told("living"), 60, job)
    lab.power_off("n2")
    wait_for(lambda: len(job.ranks()) == 6, 60, Story(job))
    again = sorted(job.ranks()[3:], key=lambda rank: int(rank["rank"]))
    assert [rank["host"] for rank in again] == ["n1", "n3", "n4"]
    assert [rank["node_rank"] for rank in again] == ["0", "1", "2"]
    assert len({rank["sres_token"] for rank in again}) == 1
    assert {expand(rank["slurm_job_nodelist"]) for rank in again} == {("n1", "n3", "n4")}
    wait_for(lambda: "gives n4; now on n[1,3-4]" in job.log(), 15, job)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, Story(job))
