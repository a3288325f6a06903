"""What others are told of a cycle: supervisors that ask, and people with `sres`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from slurm_resilience import __version__
from slurm_resilience.config import Config
from slurm_resilience.controller.actions import MarkNode
from slurm_resilience.controller.alarms import FollowedAlarm
from slurm_resilience.controller.decide.marking import Decision
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.inbox import AgentView
from slurm_resilience.controller.journal import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Node
from slurm_resilience.wire.messages import NodeVerdict


def for_supervisors(verdict: NodeDiagnosis, node: Node, incident: Incident | None) -> NodeVerdict:
    """What a supervisor that asks is told. It leaves a node that is dead, sick or requested, so
    these words are kept for nodes that everybody must leave: the marked ones. What was found but
    not marked (paused, ``recovery.mode`` none, too many at once) is a suspicion."""
    kind = verdict.kind
    marked = incident is not None and incident.state != "open"
    if kind == "held" or kind == "down":
        kind = "dead" if node.is_down else "unknown"  # draining: jobs may end on it
    elif kind in ("dead", "sick") and not marked:
        kind = "suspect"
    return NodeVerdict(
        verdict.node, kind, verdict.reason, verdict.action, incident.id if incident else 0
    )


def status(
    world: ClusterSnapshot,
    verdicts: dict[str, NodeDiagnosis],
    decision: Decision,
    config: Config,
    incidents: dict[str, Any],
    alarms: Mapping[str, FollowedAlarm],
) -> dict[str, Any]:
    """What `sres status` and `sres node` show, as plain data."""
    jobs_on: dict[str, list[int]] = {}
    for job in world.jobs.values():
        for name in job.nodes:
            jobs_on.setdefault(name, []).append(job.id)
    nodes = {}
    for name, node in world.nodes.items():
        agent, verdict = world.agents.get(name), verdicts[name]
        incident = incidents.get(name)
        nodes[name] = {
            "state": node.state,
            "verdict": verdict.kind,
            "why": verdict.reason,
            "reason": node.reason,
            "reason_by": node.reason_by,
            "sresd": _sresd(agent, config.detect.silent_after),
            "findings": [msgspec.to_builtins(f) for f in agent.findings] if agent else [],
            "unjudged": list(agent.unjudged) if agent else [],
            "incident": msgspec.to_builtins(incident) if incident else None,
            "gave_up": _gave_up(world, node),
            "boot_id": agent.boot_id if agent else "",
            "instance": agent.instance if agent else "",
            "jobs": jobs_on.get(name, []),
        }
    return {
        "version": __version__,
        "at": world.now,
        "uptime": world.uptime,
        "mode": config.recovery.mode,
        "paused": world.paused,
        "can_replace": world.can_replace,
        "permits_expansion": world.permits_expansion,
        "sentence": decision.sentence,
        "marks_now": sum(isinstance(a, MarkNode) for a in decision.actions),
        "alarms": sorted((msgspec.to_builtins(a) for a in alarms.values()), key=_first_raised),
        "nodes": nodes,
        "jobs": {
            str(job): {"attempt": s.attempt, "nodes": list(s.nodes), "since": s.since}
            for job, s in world.supervised.items()
        },
    }


def _first_raised(alarm: dict[str, Any]) -> float:
    return float(alarm["at"])


def _sresd(agent: AgentView | None, silent_after: float) -> str:
    if agent is None:
        return "never seen"
    # The connection of a node that lost its power stays open for minutes.
    if agent.connected and agent.silence < silent_after:
        return "connected"
    return "stopped" if agent.said_goodbye else "silent"


def _gave_up(world: ClusterSnapshot, node: Node) -> dict[str, Any] | None:
    """The incident that was given up, while the request it was about still stands."""
    incident = world.gave_up.get(node.name)
    if incident is None or not node.requested_action or incident.reason_at != node.reason_at:
        return None
    given_up: dict[str, Any] = msgspec.to_builtins(incident)
    return given_up
