"""A job that waits for nodes in exchange comes before the queue, for as many as it lost. And its
supervisor hears of nodes that are down."""

from __future__ import annotations

import msgspec

from slurm_resilience.controller.actions import NotifySupervisor, RaisePriority
from slurm_resilience.controller.decide.jobs import notifications, priorities
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal import Supervised
from slurm_resilience.controller.observe import ClusterSnapshot, SiteFacts
from slurm_resilience.model import Job, Node

NODES = ("n1", "n2", "n3", "n4")
JOB = Job(7, 1000, "RUNNING", nodes=NODES[:3], num_nodes=3)


def world(job: Job, size: int = 4, permits: bool = True) -> ClusterSnapshot:
    return ClusterSnapshot(
        now=1.0,
        moment=1.0,
        nodes={name: Node(name, "ALLOCATED") for name in NODES},
        jobs={job.id: job},
        supervised={7: Supervised(7, 1000, 1, NODES, 1.0, size, lost=NODES[3:])},
        site=SiteFacts(uptime=100.0, permits_expansion=permits),
    )


def test_as_many_as_it_lost() -> None:
    assert list(priorities(world(JOB))) == [RaisePriority(7, 1)]


def test_nobody_else() -> None:
    whole = msgspec.structs.replace(JOB, nodes=NODES)
    gone = msgspec.structs.replace(JOB, nodes=())
    over = msgspec.structs.replace(JOB, state="COMPLETING")
    gres = msgspec.structs.replace(JOB, gres="gpu:2")
    for job in (whole, gone, over, gres):
        assert list(priorities(world(job))) == []
    assert list(priorities(world(JOB, permits=False))) == []
    # It once held no more than it holds now.
    assert list(priorities(world(JOB, size=3))) == []


def test_a_supervisor_hears_of_a_node_that_a_person_keeps_down() -> None:
    seen = world(JOB)
    assert not list(notifications(seen, {"n4": NodeDiagnosis("n4", "held", "kept out by bob")}))
    seen.nodes["n4"] = Node("n4", "DOWN", frozenset({"DRAIN"}), reason="new disk")
    told = list(notifications(seen, {"n4": NodeDiagnosis("n4", "held", "kept out by bob")}))
    assert told == [NotifySupervisor(7, "n4", "dead", "", "it is down; kept out by bob", 0)]
