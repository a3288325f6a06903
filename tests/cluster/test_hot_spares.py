"""Spares on real Slurm: kept, refilled, and given to jobs that lose a node before the queue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, NodesOf, events

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin

WaitFor = Callable[..., Any]
POOL = {"spares.main": {"nodes": 1}}
SWITCHES = (
    "SwitchName=s1 Nodes=n[1-2]",
    "SwitchName=s2 Nodes=n[3-4]",
    "SwitchName=top Switches=s[1-2]",
)


def pool(lab: Lab) -> dict[str, Any]:
    done = lab.run([str(own_bin() / "sres"), "spares", "--format", "json"])
    return json.loads(done.stdout)[0] if done.returncode == 0 and done.stdout else {}


def reservations(lab: Lab) -> str:
    return lab.run(["scontrol", "show", "reservation", "-o"]).stdout


def full_queue(lab: Lab) -> list[int]:
    """Have another user's jobs wait for whatever node is free next."""
    words = ["sbatch", "--parsable", "--nodes=1", "--exclusive", "--output=/dev/null", "--wrap"]
    bobs = [lab.run([*words, "sleep 600"], cwd="/", user="bob", check=True) for _ in range(8)]
    return [int(done.stdout) for done in bobs]


def kept(lab: Lab, count: int) -> list[str]:
    nodes = pool(lab).get("kept", [])
    return nodes if len(nodes) == count else []


def test_a_pool_is_kept_refilled_and_left_to_a_person(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    options = {"spares.main": {"nodes": 2}}
    lab = fresh_lab(LabSpec(nodes=4, network=True, topology=SWITCHES, sres_options=options))

    def spread() -> list[str]:
        found = set(kept(lab, 2))
        return sorted(found) if {"n1", "n2"} & found and {"n3", "n4"} & found else []

    first = wait_for(spread, 30, "one spare of each switch")
    lab.power_off(first[0])
    second = wait_for(lambda: (now := kept(lab, 2)) != first and now, 60, NodesOf(lab))
    assert first[0] not in second and first[1] in second
    name = pool(lab)["reservation"]
    assert name.startswith("sres-spares-main-") and "Users=root" in reservations(lab)
    lab.run(["scontrol", "update", f"reservationname={name}", "users=root,daemon"], check=True)
    wait_for(lambda: pool(lab).get("state") == "held", 30, "a person has changed it")
    assert "Users=root,daemon" in reservations(lab)
    assert "spares" in lab.run([str(own_bin() / "sres"), "status"]).stdout
    lab.run(["scontrol", "delete", f"reservationname={name}"], check=True)
    lab.run([str(own_bin() / "sres"), "spares", "resume"], check=True)
    wait_for(lambda: kept(lab, 2) and pool(lab)["reservation"] != name, 30, "it is made anew")


@pytest.mark.parametrize(
    ("gres", "position"),
    [(None, -1), ("gpu:2", -1), (None, 0)],
    ids=["exchange", "companion", "requeue"],
)
def test_a_job_that_loses_a_node_gets_the_spare_before_a_full_queue(
    fresh_lab: Callable[[LabSpec], Lab],
    wait_for: WaitFor,
    tmp_path: Path,
    gres: str | None,
    position: int,
) -> None:
    """With GRES an allocation cannot grow; without its batch host a job must be requeued."""
    lab = fresh_lab(LabSpec(nodes=4, network=True, gres=gres, sres_options=POOL))
    (spare,) = wait_for(lambda: kept(lab, 1), 30, "the pool is full")
    more = ["--gres=gpu:2"] if gres else []
    job = Job(lab, tmp_path, "--requeue", *more, nodes=3)
    wait_for(lambda: job.running_on(1, 3), 30, job)
    waiting = full_queue(lab)
    lost = job.running_on(1, 3)[position]["host"]
    died = time.monotonic()
    lab.power_off(lost)
    second = wait_for(lambda: job.running_on(2, 3), 60, (job, NodesOf(lab)))
    took = time.monotonic() - died
    known = events(lab)
    dead_at = next(e["at"] for e in known if e["kind"] == "detected" and e["node"] == lost)
    has_it = [e["at"] for e in known if e["kind"] == "spares" and "has its nodes" in e["text"]]
    print(f"runs again {took:.1f} s after the power loss")
    print(f"has its node {has_it[0] - dead_at:.1f} s after its loss was found" if has_it else "")
    assert spare in {task["host"] for task in second}
    assert lost not in {task["host"] for task in second}
    # But for the lost node, which may be repaired and in service again by now.
    words = ["squeue", "-h", "-t", "RUNNING", "-o", "%N", "-j", ",".join(map(str, waiting))]
    assert set(lab.run(words).stdout.split()) <= {lost}
    print(lab.run([str(own_bin() / "sres"), "spares"]).stdout)
    wait_for(lambda: "sres-gift" not in reservations(lab), 30, "the gift has ended")
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
