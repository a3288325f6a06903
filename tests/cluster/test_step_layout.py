"""A step's tasks are told of that very step, whatever chose its nodes, and so is sresctld."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, all_idle, events

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.slurm.hostlists import expand

WaitFor = Callable[..., Any]
Tasks = list[dict[str, Any]]


def check_step(lab: Lab, tasks: Tasks) -> None:
    """All tasks of a step agree, and what they were told is true of it."""
    by_rank = sorted(tasks, key=lambda task: task["procid"])
    hosts = [task["host"] for task in by_rank]
    addresses = {node: fields["NodeAddr"] for node, fields in lab.node_fields().items()}
    assert len({task["master_port"] for task in tasks}) == 1, tasks
    for task in by_rank:
        assert set(expand(task["node_list"])) == set(hosts), tasks
        assert task["nnodes"] == task["slurm_nnodes"] == len(set(hosts)), tasks
        assert task["master_node"] == hosts[0], tasks
        assert task["master_addr"] == addresses[hosts[0]], tasks
    ranks = {task["host"]: task["node_rank"] for task in by_rank}
    # A launcher starts its rendezvous on the node with number 0.
    assert sorted(ranks.values()) == list(range(len(ranks))), tasks
    assert ranks[hosts[0]] == 0, tasks


def on_nodes(job: Job, *nodes: str) -> Tasks:
    """The tasks that run on exactly these nodes and were told so; none while one is missing."""
    found = [task for task in job.tasks() if set(expand(task["node_list"])) == set(nodes)]
    return found if {task["host"] for task in found} == set(nodes) else []


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ("-N2 -n2 -r 2", ("n3", "n4")),
        ("-N2 -n2 -F hosts", ("n2", "n4")),
        ("-N2 -n4 -x n1,n3", ("n2", "n4")),
        ("-N4 -n4 --ntasks-per-node=1 -m cyclic", ("n1", "n2", "n3", "n4")),
        ("-N2 -n2 --export=NONE -w n[3-4]", ("n3", "n4")),
        ("-n4 -m arbitrary -w n3,n1,n1,n2", ("n1", "n2", "n3")),
        ("-n4 -m arbitrary -w n3,n1,n1,n2 --export=NONE", ("n1", "n2", "n3")),
    ],
)
def test_whatever_chooses_the_nodes(
    shared_lab: Callable[[LabSpec], Lab],
    wait_for: WaitFor,
    tmp_path: Path,
    options: str,
    nodes: tuple[str, ...],
) -> None:
    lab = shared_lab(LabSpec(nodes=4, network=True))
    prepare = "printf 'n4\\nn2\\n' > hosts; export PATH; "
    job = Job(lab, tmp_path, srun=f"{prepare}srun --auto-resume=1 {options}")
    tasks = wait_for(lambda: on_nodes(job, *nodes), 30, job)
    check_step(lab, tasks)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    wait_for(lambda: all_idle(lab), 30, "all nodes are idle again")


def test_two_sruns_of_one_job(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Each is told of its own nodes; a node of the second one dies, and only that one recovers."""
    lab = fresh_lab(LabSpec(nodes=6, network=True))
    one = "srun --auto-resume=1 -N2 -n2 -w n[1-2]"
    other = "srun --auto-resume=1 -N2 -n2"
    events_of_one = tmp_path / "events-of-one"
    srun = f"SRES_EVENTS={events_of_one} {one} ./task.sh & "
    # The second one takes what the first one leaves.
    srun += f"while ! grep -qs laid_out {events_of_one}; do sleep 0.1; done; {other}"
    job = Job(lab, tmp_path, srun=srun)
    first = wait_for(lambda: on_nodes(job, "n1", "n2"), 30, job)
    second = wait_for(lambda: on_nodes(job, "n3", "n4"), 30, job)
    check_step(lab, first)
    check_step(lab, second)
    assert first[0]["master_port"] != second[0]["master_port"]
    lab.power_off("n4")
    again = wait_for(lambda: [t for t in job.tasks() if t["attempt"] == 2], 60, job)
    again = wait_for(lambda: on_nodes(job, "n3", *_fifth(job)), 60, job)
    check_step(lab, again)
    # The supervisor tells of it when Slurm shows the tasks.
    wait_for(lambda: "n4 exchanged for" in job.log(), 30, job)
    # The first one never noticed.
    assert [t["attempt"] for t in job.tasks() if t["host"] in ("n1", "n2")] == [1, 1]
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    wait_for(lambda: all_idle(lab), 60, "all nodes are idle again")
    marked = {event["node"] for event in events(lab) if event["kind"] == "marked"}
    assert marked == {"n4"}


def _fifth(job: Job) -> list[str]:
    return sorted({t["host"] for t in job.tasks() if t["attempt"] == 2} - {"n3"})


def test_where_the_topology_orders_the_tasks(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Seen on 26.05: with more tasks than nodes, rank 0 is not on the step's first node."""
    switches = ("s1 Nodes=n2,n4", "s2 Nodes=n1,n3", "top Switches=s[1-2]")
    topology = tuple(f"SwitchName={line}" for line in switches)
    lab = fresh_lab(LabSpec(nodes=4, network=True, topology=topology))
    job = Job(lab, tmp_path, srun="srun --auto-resume=1 -N4 -n8")
    tasks = wait_for(lambda: job.running_on(1, 8), 60, job)
    check_step(lab, tasks)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
