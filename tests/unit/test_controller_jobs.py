"""A job that waits for nodes in exchange comes before the queue, for as many as it lost. And its
supervisor hears of nodes that are down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
from worlds import incident

from slurm_resilience.controller.act.jobs import Notifier
from slurm_resilience.controller.actions import (
    EndPendingRequeue,
    NoteSupervised,
    NotifySupervisor,
    RaisePriority,
    RequeueJob,
)
from slurm_resilience.controller.calm.agent_views import AgentPresence, AgentView
from slurm_resilience.controller.decide.intake import notes_of
from slurm_resilience.controller.decide.jobs import notifications, priorities, requeues
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.heard import InboxMessage
from slurm_resilience.controller.journal.records import PendingRequeue, Supervised
from slurm_resilience.controller.observe import ClusterSnapshot, SiteFacts
from slurm_resilience.model import Job, Node
from slurm_resilience.wire.limits import Sender
from slurm_resilience.wire.messages import FRAMES, AttemptStarted, Evidence, NodeVerdict
from slurm_resilience.wire.served_connection import Client

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


def test_a_supervisor_hears_of_each_silence_of_a_node_once() -> None:
    """A silence that is not the same one as before is told again; it is no mark on the node."""
    silent = NodeDiagnosis("n2", "suspect", "no beat for 1.6 s; probing", probe=True)
    agent = AgentView("n2", AgentPresence.CONNECTED, 1.6, 50.0)
    seen = msgspec.structs.replace(world(JOB), agents={"n2": agent})
    (told,) = notifications(seen, {"n2": silent})
    assert told == NotifySupervisor(7, "n2", "suspect", "", silent.reason, 0, 50.0)
    sent: list[bytes] = []
    session: Any = SimpleNamespace(write=sent.append)
    loop: Any = SimpleNamespace(call_soon_threadsafe=lambda call: call())
    connection = Client(Sender("job", "7", 1000), "192.0.2.1", session, loop)
    registry: Any = SimpleNamespace(supervisors=lambda job: [connection])
    notifier = Notifier(registry)
    for heard_at in (50.0, 50.0, 80.0):
        notifier.tell(7, NodeVerdict("n2", "suspect", silent.reason, at=heard_at))
    told_at = [cast(Evidence, FRAMES.unpack(body)).verdicts[0].at for body in sent]
    assert told_at == [50.0, 80.0]


def heard_of(seen: ClusterSnapshot, *nodes: str) -> Supervised:
    """The entry of the job once one of its supervisors has named its nodes."""
    connection: Any = SimpleNamespace(uid=1000)
    heard = InboxMessage(connection, 7, AttemptStarted(1, nodes))
    (entry,) = [note.entry for note in notes_of(seen, heard) if isinstance(note, NoteSupervised)]
    return entry


def test_a_job_may_have_several_supervisors() -> None:
    """None of them makes sresctld forget the nodes of another one."""
    whole = msgspec.structs.replace(JOB, nodes=NODES)
    first = msgspec.structs.replace(world(whole), supervised={})
    assert heard_of(first, "n1", "n2").nodes == ("n1", "n2")
    seen = world(whole)
    seen = msgspec.structs.replace(seen, supervised={7: heard_of(first, "n1", "n2")})
    both = heard_of(seen, "n3", "n4")
    assert (set(both.nodes), both.size) == (set(NODES), 4)
    # What the job gave up, or had before a requeue, is no supervisor's any more.
    smaller = msgspec.structs.replace(seen, jobs={7: JOB}, supervised={7: both})
    assert set(heard_of(smaller, "n3").nodes) == set(JOB.nodes)
    again = {7: msgspec.structs.replace(whole, restarts=1)}
    assert heard_of(msgspec.structs.replace(seen, jobs=again), "n3").nodes == ("n3",)


def followed(seen: ClusterSnapshot, **more: Any) -> list[Any]:
    requeue = PendingRequeue(7, "node n4 died", False, 0, 1.0)
    entry = msgspec.structs.replace(requeue, **more)
    return list(requeues(msgspec.structs.replace(seen, pending_requeues={7: entry})))


def test_a_job_that_slurm_made_smaller_instead_is_not_followed() -> None:
    """With --no-kill it runs on without the dead node. As one that recovers it would keep other
    nodes from being held by the breaker."""
    (ended,) = followed(world(JOB))
    assert isinstance(ended, EndPendingRequeue) and "left it running" in ended.reason


def test_a_job_that_still_has_its_dead_node_is_followed_on() -> None:
    down = world(msgspec.structs.replace(JOB, nodes=NODES))
    down.nodes["n4"] = Node("n4", "DOWN")
    assert followed(down) == []
    in_hand = msgspec.structs.replace(world(JOB), incidents={"n2": incident("n2")})
    assert followed(in_hand) == []
    (again,) = followed(world(JOB), wanted=True)
    assert isinstance(again, RequeueJob)
