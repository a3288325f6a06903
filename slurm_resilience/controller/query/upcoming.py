"""The next act on each node with a fault: when, why, and what would prevent it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, assert_never

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide import replacing
from slurm_resilience.controller.decide.marking import mode_of
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.decide.node_validation import (
    ValidationProgress,
    return_seconds,
    validation_progress,
)
from slurm_resilience.controller.diagnose import NodeDiagnosis, life_of
from slurm_resilience.controller.journal.records import HOUR_SECONDS, Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import ACTIONS, REPLACE, Node


class NextAct(msgspec.Struct, frozen=True):
    """The next act on a node."""

    what: str
    because: str
    unless: str
    at: float = 0.0
    """When (epoch); 0: it waits for something other than time."""
    waits_for: str = ""


OVERDUE_SECONDS = 5.0
"""A node that should have been found dead so long ago waits for something else than its time."""
_ANSWERS = "it answers before"
_PERSON = "a person gives it a Reason of his own, or resumes it"
_CANCEL = "the request is taken back (sres node cancel)"


def next_acts(
    snapshot: ClusterSnapshot,
    diagnoses: Mapping[str, NodeDiagnosis],
    config: Config,
    incidents: Mapping[str, Incident],
    left: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Return the next act on each node that has one, as plain data.

    Args:
        snapshot: the observation.
        diagnoses: of the snapshot.
        config: limits.
        incidents: the open incident of each node.
        left: dead nodes that are not marked for the sake of other jobs.
    """
    ceilings = replacing.Ceilings(snapshot, config, incidents.values())
    acts: dict[str, NextAct] = {}
    for name, diagnosis in notable(diagnoses).items():
        if diagnosis.kind not in ("suspect", "dead", "sick") or name in incidents:
            continue
        found = _of_fault(snapshot, config, diagnosis, name in left)
        if found is not None and mode_of(snapshot, config, name) == "automatic":
            acts[name] = found
    for name, incident in incidents.items():
        node = snapshot.nodes.get(name)
        if node is not None and mode_of(snapshot, config, name) == "automatic":
            acts[name] = _of_incident(snapshot, config, incident, node, ceilings)
    if snapshot.paused:
        text = "`sres unpause`"
        acts = {
            name: msgspec.structs.replace(act, at=0.0, waits_for=text) for name, act in acts.items()
        }
    return {name: msgspec.to_builtins(act) for name, act in acts.items()}


def _of_fault(
    snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis, is_left: bool
) -> NextAct | None:
    """Find what comes next for a node without an incident."""
    if diagnosis.kind == "suspect":
        seconds = _until_dead(snapshot, config, diagnosis)
        if seconds < -OVERDUE_SECONDS:
            # No node at all is heard, or this one cannot be probed: see the alarms.
            text = "probes that could be answered"
            return NextAct("found dead", diagnosis.reason, _ANSWERS, waits_for=text)
        return NextAct("found dead", diagnosis.reason, _ANSWERS, snapshot.now + max(0.0, seconds))
    if is_left:
        text = f"{diagnosis.reason}; jobs without auto-resume end by it"
        own = config.detect.dead_after_unsupervised
        if not own:
            return NextAct("marked", text, _ANSWERS, waits_for="Slurm's own DOWN (SlurmdTimeout)")
        due = snapshot.now + max(0.0, own - diagnosis.silence)
        return NextAct("set DOWN", text, _ANSWERS, due)
    if snapshot.memory.breaker.is_tripped:
        unless = _ANSWERS if diagnosis.kind == "dead" else _PERSON
        return NextAct("marked", diagnosis.reason, unless, waits_for="the breaker (sres breaker)")
    return None


def _until_dead(snapshot: ClusterSnapshot, config: Config, diagnosis: NodeDiagnosis) -> float:
    """Return the seconds until a suspect node is dead, if nothing answers."""
    heard = snapshot.moment - diagnosis.silence
    probes = snapshot.probes.get(diagnosis.node, ())
    refused = [p.started for p in probes if p.started > heard and p.answer == "refused"]
    if refused:
        # The machine answers, so it is given the time of a package upgrade.
        return refused[0] + config.detect.refused_after - snapshot.moment
    return config.detect.dead_after - diagnosis.silence


def _of_incident(
    snapshot: ClusterSnapshot,
    config: Config,
    incident: Incident,
    node: Node,
    ceilings: replacing.Ceilings,
) -> NextAct:
    times, limits = incident.times, config.replace
    because = incident.reason
    match incident.state:
        case NodeState.SUSPECT:
            return NextAct("marked", because, _ANSWERS, waits_for="Slurm")
        case NodeState.REPAIRING:
            due = times.run_started + limits.timeout
            return NextAct("its program stopped for its time limit", because, "it ends before", due)
        case NodeState.VALIDATING:
            progress = validation_progress(snapshot, config, incident)
            if progress is ValidationProgress.IMPOSSIBLE:
                text = "recovery.validate in sres.toml on the node, and a restart of its sresd"
                return NextAct("in service", because, _PERSON, waits_for=text)
            due = times.run_ended + return_seconds(config)
            unless = "it answers, sound, from another boot"
            if progress in (ValidationProgress.AWAITED, ValidationProgress.NOT_RUN):
                unless = f"{unless}, and its sresd has validated it"
            return NextAct("tried again", because, unless, due)
        case NodeState.RETURNING:
            return NextAct("in service", because, "Slurm does not take it", waits_for="Slurm")
        case (
            NodeState.SET_ASIDE
            | NodeState.EMPTY
            | NodeState.HEALTHY
            | NodeState.QUARANTINED
            | NodeState.HELD
        ):
            return _of_repair(snapshot, config, incident, node, ceilings)
        case _ as other:
            assert_never(other)


def _of_repair(
    snapshot: ClusterSnapshot,
    config: Config,
    incident: Incident,
    node: Node,
    ceilings: replacing.Ceilings,
) -> NextAct:
    """Find what comes next for a marked node: its replacement, when its turn has come."""
    what = ACTIONS.get(incident.action, ACTIONS[REPLACE])[1]
    unless = {"dead": _ANSWERS, "requested": _CANCEL}.get(incident.kind, _PERSON)
    act = NextAct(what, incident.reason, unless)

    def when(text: str) -> NextAct:
        return msgspec.structs.replace(act, waits_for=text)

    if node.has_work:
        return when("the end of its jobs")
    if not snapshot.site.can_repair(incident.action):
        return when("a person: no replacement program is configured")
    ready = replacing.readiness(snapshot, config, incident, node)
    if ready.kind == "lives":
        return NextAct("given back", ready.text, "a check finds a fault", waits_for="its checks")
    silence = life_of(snapshot, config.detect, node).silence
    due = incident.next_try
    if ready.kind == "wait" and incident.is_end_unknown and silence >= config.replace.silent_for:
        due = max(due, incident.times.run_lost + return_seconds(config))
    elif incident.kind == "dead" and 0 < silence < config.replace.silent_for:
        due = max(due, snapshot.now + config.replace.silent_for - silence)
    elif ready.kind == "wait" and not ready.probe:
        return when(f"a wait ({ready.text})")
    if incident.kind != "requested" and snapshot.memory.breaker.is_tripped:
        return when("the breaker (sres breaker)")
    if snapshot.repairs.no_room:
        return when(f"room on sresctld's disk: {snapshot.repairs.no_room}")
    if awaited := ceilings.awaited_end(node.name):
        return when(awaited)
    starts = snapshot.memory.starts
    if incident.kind != "requested" and len(starts) >= config.replace.max_per_hour:
        due = max(due, starts[0][0] + HOUR_SECONDS)
    return msgspec.structs.replace(act, at=max(due, snapshot.now))
