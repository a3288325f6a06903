"""A job with GRES gets a second allocation in place of a lost node: one world over both."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, all_idle

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.resume.srun.environment import PORT_BASE, PORT_SPAN
from slurm_resilience.slurm.cli import TOP_PRIORITY

WaitFor = Callable[..., Any]
GRES = LabSpec(nodes=5, network=True, gres="gpu:2")
AGREED = (
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
    "NODE_LIST",
    "NNODES",
    "MASTER_ADDR",
    "MASTER_NODE",
    "MASTER_PORT",
    "SRES_TOKEN",
    "SRES_DIR",
)
OWN = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "NODE_RANK", "SLURM_NODE")

# Each rank meets all others, tells what it sees, and ends when the test says so.
PROGRAM = """\
import json, os, sys, time
from dataclasses import replace
from pathlib import Path

agreed, own = {agreed!r}, {own!r}
line = {{name: os.environ.get(name) for name in (*agreed, *own)}}
line |= {{"host": os.uname().nodename, "companion": os.environ.get("SRES_COMPANION_JOB", "")}}
line |= {{"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "argument": sys.argv[1:]}}
with open("views", "a") as file:
    file.write(json.dumps(line) + "\\n")
rank, world = int(line["SLURM_PROCID"]), int(line["SLURM_NTASKS"])
own = Path("met.{{}}.{{}}".format(line["SRES_TOKEN"], rank))
own.touch()
while not all(own.with_suffix("." + str(other)).exists() for other in range(world)):
    time.sleep(0.02)
print("rank", rank, "of", world, "met all", flush=True)
while not Path("end").exists():
    time.sleep(0.05)
sys.exit(int(Path("end").read_text().split()[rank] or 0))
"""


class WorldJob(Job):
    """A job of four nodes with two tasks on each."""

    def __init__(self, lab: Lab, base: Path, *sbatch: str, srun: str = "", **more: Any) -> None:
        program = base / "world.py"
        program.write_text(PROGRAM.format(agreed=AGREED, own=OWN))
        words = f"srun --auto-resume=1 --ntasks-per-node=2 {srun} {sys.executable} {program}"
        super().__init__(lab, base, "--no-kill", "--gres=gpu:2", *sbatch, srun=words, **more)

    def views(self, attempt: int, tasks: int = 8) -> list[dict[str, Any]]:
        """Return what an attempt's tasks have told, by rank; nothing while some are missing."""
        path = self.folder / "views"
        # The last line may be half written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        views = [json.loads(line) for line in lines]
        mine = [view for view in views if view["SRES_TOKEN"].endswith(f".{attempt}")]
        return sorted(mine, key=lambda v: int(v["SLURM_PROCID"])) if len(mine) == tasks else []

    def end_with(self, *codes: int) -> None:
        path = self.folder / "end.new"
        path.write_text(" ".join(map(str, codes)))
        path.replace(self.folder / "end")


def companions(lab: Lab) -> list[str]:
    """Return the companions that Slurm shows: id, name, state and nodes of each."""
    shown = lab.run(["squeue", "-h", "-o", "%A|%j|%T|%N|%l"], check=True).stdout
    return [line for line in shown.splitlines() if "|sres-companion-of-" in line]


def check_one_world(lab: Lab, views: list[dict[str, Any]], hosts: list[str]) -> None:
    """Check that all tasks are told of one world, and each of its own place in it."""
    assert [view["host"] for view in views] == [host for host in hosts for _ in range(2)]
    for name in AGREED:
        assert len({view[name] for view in views}) == 1, (name, views)
    first = views[0]
    shown = lab.run(["scontrol", "show", "hostnames", first["NODE_LIST"]], check=True).stdout
    assert shown.split() == hosts
    assert first["SLURM_JOB_NODELIST"] == first["SLURM_STEP_NODELIST"] == first["NODE_LIST"]
    assert first["MASTER_ADDR"] == lab.node_fields()[hosts[0]]["NodeAddr"]
    assert PORT_BASE <= int(first["MASTER_PORT"]) < PORT_BASE + PORT_SPAN
    assert {first[name] for name in AGREED[:3]} == {str(len(hosts))}
    assert first["SLURM_NTASKS"] == str(2 * len(hosts))
    for rank, view in enumerate(views):
        node = str(rank // 2)
        assert [view[name] for name in OWN] == [str(rank), node, str(rank % 2), node, node]
        assert view["gpus"] == "0,1"


def test_a_companion_takes_the_place_of_a_lost_node(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(GRES)
    job = WorldJob(lab, tmp_path, srun="--label")
    wait_for(lambda: job.views(1), 60, job)
    lab.power_off("n2")
    views = wait_for(lambda: job.views(2), 60, job)
    check_one_world(lab, views, ["n1", "n3", "n4", "n5"])
    (companion,) = companions(lab)
    number, name, state, nodes, _ = companion.split("|")
    assert (state, nodes) == ("RUNNING", "n5") and name.startswith(f"sres-companion-of-{job.id}.0-")
    assert {view["companion"] for view in views[:6]} == {""}
    assert {view["companion"] for view in views[6:]} == {number}
    wait_for(lambda: "recovered: attempt 2" in job.log(), 30, job)
    # Each line by its task in the world, also those of the companion's own tasks 0 and 1.
    wait_for(lambda: all(f"\n{r}: rank {r} of 8 met" in job.log() for r in range(8)), 30, job)
    assert f"a second allocation, job {number}, gives n5; now on n[1,3-5]" in job.log()
    # A task of the companion's part fails: its code is the set's, and the program is at fault.
    job.end_with(0, 0, 0, 0, 0, 0, 0, 0)
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    wait_for(lambda: not companions(lab), 15, "the companion is given back")
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


def test_a_companion_comes_before_the_queue_and_nothing_that_is_named_like_one(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """No node is idle, and another user's jobs wait for the one that comes back."""
    lab = fresh_lab(LabSpec(nodes=2, network=True, gres="gpu:2"))
    job = WorldJob(lab, tmp_path, nodes=2)
    wait_for(lambda: job.views(1, 4), 60, job)
    whole = ["sbatch", "--parsable", "--exclusive", "--output=/dev/null", "--chdir=/", "--time=1"]
    name = f"--job-name=sres-companion-of-{job.id}.0-1"
    others = [
        lab.run([*whole, *words, "--wrap=sleep 600"], user="alice", check=True).stdout.strip()
        for words in ([], [name], [name])
    ]
    lab.power_off("n2")
    views = wait_for(lambda: job.views(2, 4), 90, job)
    assert views[-1]["companion"] and views[-1]["host"] == "n2"
    shown = lab.run(["squeue", "-h", "-j", ",".join(others), "-o", "%T %Q"], check=True).stdout
    states, priorities = zip(*(line.split() for line in shown.splitlines()), strict=True)
    assert set(states) == {"PENDING"} and max(map(int, priorities)) < TOP_PRIORITY, shown
    job.end_with(0, 0, 0, 0)
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def with_companion(job: WorldJob, wait_for: WaitFor, lost: str) -> str:
    """Take a node's power away; return the number of the companion that takes its place."""
    wait_for(lambda: job.views(1, 4), 60, job)
    job.lab.power_off(lost)
    views = wait_for(lambda: job.views(2, 4), 60, job)
    return str(views[-1]["companion"])


def test_no_companion_outlives_its_job(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(LabSpec(nodes=6, network=True, gres="gpu:2"))
    killed, cancelled = (WorldJob(lab, tmp_path, nodes=2) for _ in range(2))
    numbers = [with_companion(killed, wait_for, "n2"), with_companion(cancelled, wait_for, "n4")]
    assert all(numbers) and len(companions(lab)) == 2
    # Nothing of the first one's supervisor is left to end its companion.
    pids = lab.run(["pgrep", "-f", "sres-resume"], node="n1", check=True).stdout.split()
    lab.run(["kill", "-9", *pids], node="n1", check=True)
    wait_for(lambda: "srun ended with 137" in killed.ended(), 20, killed)
    lab.run(["scancel", str(cancelled.id)], check=True)
    wait_for(lambda: not companions(lab), 30, "both companions have ended")
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


@pytest.mark.parametrize("grace", [0, 20])
def test_a_companion_that_slurm_preempts_is_lost_though_its_tasks_end_well(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, grace: int
) -> None:
    """Tasks that save their work at SIGTERM: the others would wait for them without end. With a
    GraceTime, Slurm's first word is that of a person who cancels the step."""
    main = f"main Nodes=ALL Default=YES MaxTime=INFINITE GraceTime={grace}"
    preempts = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    preempts |= {"PartitionName": main}
    lab = fresh_lab(replace(GRES, options=preempts, partitions=("high Nodes=ALL PriorityTier=9",)))
    saves = """sh -c 'trap "exit 0" TERM; "$@" & wait' sh"""
    job = WorldJob(lab, tmp_path, "--requeue", srun=saves)
    wait_for(lambda: job.views(1), 60, job)
    lab.power_off("n2")
    wait_for(lambda: job.views(2), 60, job)
    words = ["sbatch", "--partition=high", "-wn5", "--exclusive", "--wrap", "exec sleep 600"]
    lab.run(words, cwd=tmp_path, check=True)
    wait_for(lambda: "has ended with 0: ending the others" in job.log(), 30, job)
    wait_for(lambda: job.views(3), 90, job)
    job.end_with(0, 0, 0, 0, 0, 0, 0, 0)
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_a_companion_of_two_nodes_that_loses_one_ends_whole(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Even without sresctld, and with its supervisor gone: its script has died with its node."""
    lab = fresh_lab(LabSpec(nodes=5, network=True, gres="gpu:2", daemons=False))
    job = WorldJob(lab, tmp_path, nodes=3)
    wait_for(lambda: job.views(1, 6), 60, job)
    lab.power_off("n[2-3]")
    lab.run(["scontrol", "update", "node=n[2-3]", "state=down", "reason=gone"], check=True)
    views = wait_for(lambda: job.views(2, 6), 60, job)
    check_one_world(lab, views, ["n1", "n4", "n5"])
    assert len({view["companion"] for view in views[2:]}) == 1
    pids = lab.run(["pgrep", "-f", "sres-resume"], node="n1", check=True).stdout.split()
    lab.run(["kill", "-9", *pids], node="n1", check=True)
    lab.power_off("n4")
    lab.run(["scontrol", "update", "node=n4", "state=down", "reason=gone"], check=True)
    wait_for(lambda: not companions(lab), 30, "the companion has ended")


def test_the_ladder_goes_on_where_no_companion_comes(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    spec = LabSpec(nodes=2, network=True, gres="gpu:2", daemons=False)
    lab = fresh_lab(replace(spec, sres_options={"resume": {"swap_wait": 3.0}}))
    job = WorldJob(lab, tmp_path, "--requeue", nodes=2)
    wait_for(lambda: job.views(1, 4), 60, job)
    lab.power_off("n2")
    lab.run(["scontrol", "update", "node=n2", "state=down", "reason=gone"], check=True)
    wait_for(lambda: "waiting for 1 node(s) in job" in job.log(), 30, job)
    wait_for(lambda: job.state() == "PENDING", 30, job)
    assert companions(lab) == []
    assert "no second allocation within 3 s" in job.log()
