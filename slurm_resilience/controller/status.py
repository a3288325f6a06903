"""The answers to those who ask after a cycle: supervisors, and people with `sres`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from slurm_resilience import __version__
from slurm_resilience.config import Config
from slurm_resilience.controller.actions import MarkNode
from slurm_resilience.controller.alarms import FollowedAlarm
from slurm_resilience.controller.calm.agent_views import AgentView
from slurm_resilience.controller.decide.decision import Decision
from slurm_resilience.controller.decide.intake import REMOVED_AFTER_SECONDS
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.query.upcoming import next_acts
from slurm_resilience.controller.spares.spares_view import spares_view
from slurm_resilience.controller.standby.act_gate import StandbyFacts
from slurm_resilience.controller.standby.pair_states import PairState
from slurm_resilience.model import REBOOT, Node
from slurm_resilience.wire.messages import NodeVerdict


def for_supervisors(
    diagnosis: NodeDiagnosis, node: Node, incident: Incident | None, is_left: bool = False
) -> NodeVerdict:
    """Return the answer to a supervisor that asks about a node.

    It leaves a node that is dead, sick or requested, so these words are kept for nodes that every
    job must leave: the marked ones. A node that was found faulty but not marked (paused,
    ``recovery.mode`` none, too many at once) is suspect.

    Args:
        diagnosis: the node's.
        node: as Slurm shows it.
        incident: the open one.
        is_left: it is dead, and unmarked only for the sake of jobs without a supervisor.
    """
    kind = diagnosis.kind
    is_marked = incident is not None and incident.state.is_marked
    if kind == "held" or kind == "down":
        kind = "dead" if node.is_down else "unknown"  # draining: jobs may end on it
    elif kind in ("dead", "sick") and not is_marked and not is_left:
        kind = "suspect"
    return NodeVerdict(
        diagnosis.node, kind, diagnosis.reason, diagnosis.action, incident.id if incident else 0
    )


def status(
    decision: Decision,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    incidents: Mapping[str, Incident],
    alarms: Mapping[str, FollowedAlarm],
) -> dict[str, Any]:
    """Return what `sres status` and `sres node` show, as plain data.

    Args:
        decision: the cycle's.
        diagnoses: the cycle's.
        config: sresctld's.
        incidents: the open incident of each node, after the cycle's acts.
        alarms: those to show, by key.
    """
    snapshot = decision.snapshot
    jobs_on: dict[str, list[int]] = {}
    for job in snapshot.jobs.values():
        for name in job.nodes:
            jobs_on.setdefault(name, []).append(job.id)
    following = next_acts(snapshot, diagnoses, config, incidents, decision.left)
    return {
        "version": __version__,
        "at": snapshot.now,
        "uptime": snapshot.site.uptime,
        "mode": config.recovery.mode,
        "paused": snapshot.paused,
        "can_replace": snapshot.site.can_replace,
        "can_reboot": snapshot.site.can_repair(REBOOT),
        "permits_expansion": snapshot.site.permits_expansion,
        "sentence": decision.sentence,
        "marks_now": sum(isinstance(action, MarkNode) for action in decision.actions),
        "breaker": breaker_view(decision.snapshot),
        "standby": standby_view(snapshot.site.standby),
        "spares": spares_view(decision.snapshot, diagnoses, config),
        "alarms": sorted((msgspec.to_builtins(a) for a in alarms.values()), key=_first_raised),
        "unlisted": [
            _unlisted_view(incident)
            for name, incident in incidents.items()
            if name not in snapshot.nodes
        ],
        "nodes": _NodeViews(snapshot, diagnoses, config, incidents, following, jobs_on),
        "jobs": {
            str(job): {"attempt": s.attempt, "nodes": list(s.nodes), "since": s.since}
            for job, s in snapshot.supervised.items()
        },
    }


class NodeVerdicts(Mapping[str, NodeVerdict]):
    """The answer of each node for supervisors, made when it is asked for."""

    def __init__(
        self,
        decision: Decision,
        diagnoses: Mapping[str, NodeDiagnosis],
        incidents: Mapping[str, Incident],
    ) -> None:
        """
        Args:
            decision: the cycle's.
            diagnoses: the cycle's.
            incidents: the open incident of each node, after the cycle's acts.
        """
        self._nodes = decision.snapshot.nodes
        self._left = decision.left
        self._diagnoses = diagnoses
        self._incidents = incidents

    def __len__(self) -> int:
        return len(self._diagnoses)

    def __iter__(self) -> Iterator[str]:
        return iter(self._diagnoses)

    def __getitem__(self, name: str) -> NodeVerdict:
        incident, is_left = self._incidents.get(name), name in self._left
        return for_supervisors(self._diagnoses[name], self._nodes[name], incident, is_left)


class _NodeViews(Mapping[str, dict[str, Any]]):
    """Each node as `sres node` shows it, made when it is asked for: few rounds are looked at."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        diagnoses: Mapping[str, NodeDiagnosis],
        config: Config,
        incidents: Mapping[str, Incident],
        following: Mapping[str, dict[str, Any]],
        jobs_on: Mapping[str, list[int]],
    ) -> None:
        self._snapshot = snapshot
        self._diagnoses = diagnoses
        self._config = config
        self._incidents = incidents
        self._following = following
        self._jobs_on = jobs_on

    def __len__(self) -> int:
        return len(self._snapshot.nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot.nodes)

    def __getitem__(self, name: str) -> dict[str, Any]:
        node, diagnosis = self._snapshot.nodes[name], self._diagnoses[name]
        agent, incident = self._snapshot.agents.get(name), self._incidents.get(name)
        return {
            "state": node.state,
            "mode": self._config.recovery.mode_of(name, node.partitions),
            "verdict": diagnosis.kind,
            "why": diagnosis.reason,
            "reason": node.reason,
            "reason_by": node.reason_by,
            "sresd": _sresd(agent, self._config.detect.silent_after),
            "findings": [msgspec.to_builtins(f) for f in agent.findings] if agent else [],
            "unjudged": list(agent.unjudged) if agent else [],
            "incident": incident_view(incident) if incident else None,
            "gave_up": _gave_up(self._snapshot, node),
            "next": self._following.get(name),
            "boot_id": agent.boot_id if agent else "",
            "instance": agent.instance if agent else "",
            "jobs": self._jobs_on.get(name, []),
        }


def breaker_view(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Return the breaker's state, and the faults that it counts, as plain data."""
    faults = snapshot.memory.faults.values()
    counted = [fault for fault in faults if fault.began > snapshot.memory.breaker.reset_at]
    view: dict[str, Any] = msgspec.to_builtins(snapshot.memory.breaker)
    return view | {"faults": [msgspec.to_builtins(fault) for fault in counted]}


def standby_view(facts: StandbyFacts | None) -> dict[str, Any] | None:
    """Return the facts about the standby as plain data; None: there is one controller only."""
    if facts is None:
        return None
    view: dict[str, Any] = msgspec.to_builtins(facts)
    return view | {"has_journal": facts.state is PairState.PAIRED}


def incident_view(incident: Incident) -> dict[str, Any]:
    """Return an incident as flat, plain data."""
    view: dict[str, Any] = msgspec.to_builtins(incident)
    times, before = view.pop("times"), view.pop("before")
    view |= times | {f"{name}_before": value for name, value in before.items()}
    return view


def _unlisted_view(incident: Incident) -> dict[str, Any]:
    """Return the incident of a node that Slurm does not list, as flat, plain data."""
    text = f"Slurm does not list it; after {REMOVED_AFTER_SECONDS:.0f} s it counts as removed"
    return incident_view(incident) | {"reason": f"{text} ({incident.reason})"}


def _first_raised(alarm: dict[str, Any]) -> float:
    return float(alarm["at"])


def _sresd(agent: AgentView | None, silent_after: float) -> str:
    if agent is None:
        return "never seen"
    # The connection of a node that lost its power stays open for minutes.
    if agent.is_connected and agent.silence < silent_after:
        return "connected"
    return "stopped" if agent.was_stopped else "silent"


def _gave_up(snapshot: ClusterSnapshot, node: Node) -> dict[str, Any] | None:
    """Return the incident that was given up, while the request it was about still stands."""
    incident = snapshot.at_rest.get(node.name)
    if incident is None or incident.state is not NodeState.QUARANTINED:
        return None
    if not node.requested_action or incident.reason_at != node.reason_at:
        return None
    return incident_view(incident)
