"""Spare nodes inside the allocation: one takes the place of a lost node."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, all_idle

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.slurm.hostlists import expand

WaitFor = Callable[..., Any]
SPARES = "srun --auto-resume=1 --auto-resume-spares=1"
STEPS, STOP = 30, 10
"""The first attempt waits at the second one, of all."""

# A training without torch: each rank's part depends on its rank, and their sum on its order.
TRAINING = """\
import json, math, os, sys, time
from pathlib import Path
from slurm_resilience.resume import attempt

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["NNODES"])
names = ("NODE_LIST", "MASTER_NODE", "MASTER_ADDR", "SLURM_NNODES", "SLURM_JOB_NODELIST")
line = {name.lower(): os.environ[name] for name in names}
line |= {"procid": rank, "token": attempt.token(), "host": os.uname().nodename, "nnodes": world}
line |= {"node_rank": int(os.environ["NODE_RANK"]), "at": time.time()}
line |= {"restarts": int(os.environ["SRES_RESTARTS"])}
with open("tasks", "a") as file:
    file.write(json.dumps(line) + "\\n")


def place(path, text):
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_text(text)
    own.replace(path)


def parts(step):
    return [Path(f"part.{line['token']}.{step}.{other}") for other in range(world)]


saved = Path("checkpoint")
step, state = json.loads(saved.read_text()) if saved.exists() else (0, 0.5)
while step < STEPS:
    place(parts(step)[rank], repr(math.sin(state * (rank + 1))))
    while not all(path.exists() for path in parts(step)):
        time.sleep(0.01)
    for path in parts(step):
        state += float(path.read_text()) / 3
    step += 1
    if rank == 0 and step % 5 == 0 and attempt.is_current():
        place(saved, json.dumps((step, state)))
        attempt.report(step)
    while step == STOP and line["token"].endswith(".1"):
        time.sleep(0.01)
if rank == 0:
    place(Path("result"), repr(state))
"""


def result(world: int) -> str:
    """Return the outcome of the training where nothing fails."""
    state = 0.5
    for _ in range(STEPS):
        parts = [math.sin(state * (rank + 1)) for rank in range(world)]
        for part in parts:
            state += part / 3
    return repr(state)


def check_world(lab: Lab, tasks: list[dict[str, Any]], hosts: list[str]) -> None:
    """Check that each task is told of the step as Slurm holds it, which has no spare in it."""
    assert [task["host"] for task in tasks] == hosts
    address = lab.node_fields()[hosts[0]]["NodeAddr"]
    for rank, task in enumerate(tasks):
        assert task["procid"] == task["node_rank"] == rank
        assert task["nnodes"] == int(task["slurm_nnodes"]) == len(hosts)
        assert expand(task["node_list"]) == tuple(hosts)
        assert (task["master_node"], task["master_addr"]) == (hosts[0], address)
        assert task["restarts"] == 0


@pytest.mark.parametrize(
    ("gres", "options", "daemons", "fault"),
    [
        (None, [], True, "power"),
        ("gpu:2", ["--no-kill", "--gres=gpu:2"], True, "power"),
        ("gpu:2", ["--gres=gpu:2"], True, "power"),
        ("gpu:2", ["--gres=gpu:2"], True, "admin"),
        (None, ["--no-kill"], False, "power"),
    ],
    ids=["plain", "gres-no-kill", "gres", "gres-sick", "without-sresctld"],
)
def test_a_spare_takes_the_place_of_a_lost_node(
    fresh_lab: Callable[[LabSpec], Lab],
    wait_for: WaitFor,
    tmp_path: Path,
    gres: str | None,
    options: list[str],
    daemons: bool,
    fault: str,
) -> None:
    lab = fresh_lab(LabSpec(nodes=4, network=True, gres=gres, daemons=daemons))
    program = tmp_path / "train.py"
    program.write_text(f"STEPS, STOP = {STEPS}, {STOP}\n{TRAINING}")
    job = Job(lab, tmp_path, *options, srun=f"{SPARES} {sys.executable} {program}")
    check_world(lab, wait_for(lambda: job.running_on(1, 3), 60, job), ["n1", "n2", "n3"])
    wait_for(lambda: f"[{STOP}," in read(job, "checkpoint"), 60, job)
    if fault == "power":
        lab.power_off("n2")
    if fault == "admin" or not daemons:
        # Without sresctld Slurm sets the node DOWN by itself, after SlurmdTimeout.
        state = "fail" if fault == "admin" else "down"
        words = ["scontrol", "update", "node=n2", f"state={state}", "reason=Action:Replace"]
        lab.run(words, check=True)
    # No node outside of the job is idle, so no other one could have taken the place.
    check_world(lab, wait_for(lambda: job.running_on(2, 3), 60, job), ["n1", "n3", "n4"])
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, job)
    assert read(job, "result") == result(3)
    log = job.log()
    assert "recovered: attempt 2" in log and "goes on from step 10" in log
    assert "n4 takes the place of n2" in log
    assert "since step 10 was reported" in log
    if daemons:
        wait_for(lambda: all_idle(lab), 60, "every node is idle again")


def test_with_fewer_nodes_it_goes_on_before_it_waits_for_another(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(LabSpec(nodes=4, network=True, gres="gpu:2"))
    srun = "srun --auto-resume=1 --auto-resume-min-nodes=2 -n6"
    job = Job(lab, tmp_path, "--no-kill", "--gres=gpu:2", srun=srun, nodes=3)
    wait_for(lambda: job.running_on(1, 6), 60, job)
    lab.power_off("n2")
    tasks = wait_for(lambda: job.running_on(2, 4), 60, job)
    assert [task["host"] for task in tasks] == ["n1", "n1", "n3", "n3"]
    assert {(task["nnodes"], task["restarts"]) for task in tasks} == {(2, 0)}
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    assert "2 of 3 nodes are left, --auto-resume-min-nodes=2 allows it" in job.log()


def read(job: Job, name: str) -> str:
    path = job.folder / name
    return path.read_text() if path.exists() else ""
