"""Small worlds for the tests of the controller's middle: what a test does not name is in order."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller import actions as act
from slurm_resilience.controller.calm.agent_views import AgentPresence, AgentView
from slurm_resilience.controller.decide.decision import Decision, decide
from slurm_resilience.controller.decide.labelling import labels_for
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import NodeDiagnosis, diagnose, open_findings
from slurm_resilience.controller.heard import Heard
from slurm_resilience.controller.journal.records import (
    Incident,
    IncidentTimes,
    JournalMemory,
    KnownAgent,
    MachineIdentity,
    Supervised,
)
from slurm_resilience.controller.observe import ClusterSnapshot, Repairs, SiteFacts
from slurm_resilience.controller.probe import Answer, ProbeResult
from slurm_resilience.model import REPLACE, Finding, Job, Node, Severity
from slurm_resilience.slurm.node_labels import with_labels

NOW, MOMENT = 1_000_000.0, 5_000.0
CONFIG = Config()


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.time, self.moment = NOW, MOMENT

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.moment

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.pass_time(seconds)
        return event.is_set()

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.moment += seconds


def config(**sections: dict[str, Any]) -> Config:
    """The defaults with some values changed: ``config(recovery={"mode": "none"})``."""
    changes = {
        name: msgspec.structs.replace(getattr(CONFIG, name), **values)
        for name, values in sections.items()
    }
    return msgspec.structs.replace(CONFIG, **changes)


def node(name: str = "n1", state: str = "IDLE", reason: str = "", **more: Any) -> Node:
    """``state`` as scontrol shows it: ``ALLOCATED+FAIL``."""
    base, *flags = state.split("+")
    known = {"address": f"192.0.2.{len(name)}", "reason_by": "root" if reason else ""}
    known |= {"reason_at": "2026-01-01T00:00:00" if reason else ""}
    return Node(name, base, frozenset(flags), reason, **(known | more))


def agent(
    name: str = "n1",
    silence: float = 0.2,
    *,
    connected: bool | None = None,
    spoke: bool = True,
    said_goodbye: bool = False,
    **more: Any,
) -> AgentView:
    is_connected = silence < 1 if connected is None else connected
    presence = AgentPresence.CONNECTED if is_connected else AgentPresence.LOST
    if said_goodbye:
        presence = AgentPresence.STOPPED
    elif not spoke:
        presence = AgentPresence.EXPECTED
    known = {"boot_id": "boot-1", "instance": f"machine-{name}", "steady": 60.0}
    known |= {"reported": True, "checked": True}
    return AgentView(name, presence, silence, MOMENT - silence, **(known | more))


def finding(severity: Severity = Severity.REPLACE, **more: Any) -> Finding:
    known = {"check": "xid", "text": "GPU has fallen off the bus", "at": NOW - 1}
    return Finding(severity=severity, **(known | more))


def probes(*answers: Answer, ago: float = 0.5) -> tuple[ProbeResult, ...]:
    """Probes one after another, the last one ``ago`` seconds before now."""
    count = len(answers)
    return tuple(
        ProbeResult(MOMENT - ago - (count - 1 - i), MOMENT - ago - (count - 1 - i) + 0.1, answer)
        for i, answer in enumerate(answers)
    )


def job(job_id: int = 7, nodes: tuple[str, ...] = ("n1", "n2"), **more: Any) -> Job:
    known = {
        "uid": 1000,
        "state": "RUNNING",
        "num_nodes": len(nodes),
        "batch_host": nodes[0] if nodes else "",
        "is_batch": True,
        "requeue": True,
        "exclusive": True,
    }
    return Job(id=job_id, nodes=nodes, **(known | more))


def incident(name: str = "n1", state: NodeState = NodeState.SET_ASIDE, **more: Any) -> Incident:
    """Times and the old machine's identity may be named like fields of the incident."""
    known = {"id": 1, "kind": "dead", "action": REPLACE, "reason": "no beat for 5.0 s"}
    times = {"opened": NOW - 300, "marked": NOW - 299}
    times |= {key: more.pop(key) for key in IncidentTimes.__struct_fields__ if key in more}
    before = MachineIdentity(more.pop("boot_before", ""), more.pop("instance_before", ""))
    return Incident(
        node=name, state=state, times=IncidentTimes(**times), before=before, **(known | more)
    )


def supervised(job_id: int = 7, nodes: tuple[str, ...] = ("n1", "n2")) -> Supervised:
    return Supervised(job_id, 1000, 1, nodes, NOW - 100)


def world(
    *nodes: Node,
    jobs: tuple[Job, ...] = (),
    agents: tuple[AgentView, ...] = (),
    incidents: tuple[Incident, ...] = (),
    at_rest: tuple[Incident, ...] = (),
    watched: tuple[Supervised, ...] = (),
    others: int = 6,
    **more: Any,
) -> ClusterSnapshot:
    """A world with these nodes and ``others`` healthy ones (x1, x2, …)."""
    rest = [node(f"x{i}") for i in range(1, others + 1)]
    speaking = [agent(known.name) for known in rest]
    known: dict[str, Any] = {"now": NOW, "moment": MOMENT}
    facts = {"uptime": 1000.0, "can_replace": True, "permits_expansion": True}
    facts |= {key: more.pop(key) for key in SiteFacts.__struct_fields__ if key in more}
    heard = more.pop("messages", ())
    memory = {key: more.pop(key) for key in JournalMemory.__struct_fields__ if key in more}
    repairs = {key: more.pop(key) for key in Repairs.__struct_fields__ if key in more}
    known_agents = {
        view.node: KnownAgent(view.node, view.boot_id, view.instance)
        for view in [*agents, *speaking]
    }
    snapshot = ClusterSnapshot(
        nodes={known.name: known for known in [*nodes, *rest]},
        jobs={known.id: known for known in jobs},
        agents={known.node: known for known in [*agents, *speaking]},
        incidents={known.node: known for known in incidents},
        at_rest={known.node: known for known in at_rest},
        supervised={known.job: known for known in watched},
        site=SiteFacts(**facts),
        memory=JournalMemory(**memory),
        repairs=Repairs(**repairs),
        heard=Heard(heard, more.pop("abandoned", frozenset()), known_agents),
        **(known | more),
    )
    return _labelled(snapshot)


def _labelled(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Give each node without a Comment the labels that its incident has written there."""
    nodes = dict(snapshot.nodes)
    for known in (*snapshot.incidents.values(), *snapshot.at_rest.values()):
        seen = nodes.get(known.node)
        if seen is not None and not seen.comment:
            comment = with_labels("", labels_for(known, open_findings(snapshot, known.node)))
            nodes[known.node] = msgspec.structs.replace(seen, comment=comment)
    return msgspec.structs.replace(snapshot, nodes=nodes)


def verdict(seen: ClusterSnapshot, name: str = "n1", settings: Config = CONFIG) -> NodeDiagnosis:
    return diagnose(seen, settings)[name]


def decision(seen: ClusterSnapshot, settings: Config = CONFIG) -> Decision:
    return decide(seen, diagnose(seen, settings), settings)


def actions(seen: ClusterSnapshot, kind: type, settings: Config = CONFIG) -> list[Any]:
    """Return the decisions of one kind."""
    return [action for action in decision(seen, settings).actions if isinstance(action, kind)]


def dead(name: str = "n1", **more: Any) -> dict[str, Any]:
    """Arguments of `world` that make a node dead: silent, probed in vain."""
    silence = more.pop("silence", 6.0)
    return {
        "agents": (agent(name, silence=silence),),
        "probes": {name: probes("silent", "silent")},
    } | more


SICK = agent(findings=(finding(),))
MARKED = node(state="IDLE+FAIL", reason=REPLACE)
EMPTY = incident(state=NodeState.EMPTY, attempts=1)
WAITING = {"silent_for": 300.0, "program": ("replace-node",)}


def advance(seen: ClusterSnapshot, settings: Any = CONFIG) -> act.Transition:
    """Return the one event that is decided."""
    (found,) = actions(seen, act.Transition, settings)
    return found  # type: ignore[no-any-return]
