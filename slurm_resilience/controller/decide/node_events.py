"""Decide, for one incident: what has happened to its node, and what comes next. Pure.

This module finds the event; which state follows is the table's (`node_lifecycle`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import (
    Action,
    RaiseAlarm,
    ReturnNode,
    StartReplacement,
    Transition,
)
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.diagnose import (
    NodeDiagnosis,
    is_kept_by_a_person,
    is_kept_instead,
    is_out_of_service,
)
from slurm_resilience.controller.journal import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, Node

RESUME_AGAIN_SECONDS = 10.0
"""Until a node resume that Slurm does not show is given again."""
MAX_SILENCE_SECONDS = 5.0
"""A node that comes back has beaten within this time."""
MAX_OUTPUT = 200
"""Characters of the program's last line in a reason."""


def leave_rest(snapshot: ClusterSnapshot) -> Iterator[Transition]:
    """Find the answers of people to whom a node was left."""
    for incident in snapshot.at_rest.values():
        node = snapshot.nodes.get(incident.node)
        if node is None:
            continue
        is_kept = is_kept_by_a_person(node)
        is_requested = bool(node.requested_action) and is_out_of_service(node)
        if incident.state is NodeState.QUARANTINED:
            if is_kept:
                yield _move(incident, NodeEvent.TAKEN_OVER, f"kept out by a person: {node.reason}")
            elif not is_out_of_service(node):
                text = f"{node.state}: the node was put back into service"
                yield _move(incident, NodeEvent.RELEASED, text)
        elif not is_kept and not is_requested:
            text = f"{node.state}: no person keeps the node any more"
            yield _move(incident, NodeEvent.RELEASED, text)


def progress_of_all(
    snapshot: ClusterSnapshot,
    config: Config,
    diagnoses: Mapping[str, NodeDiagnosis],
    moved: Collection[str] = (),
) -> Iterator[Action]:
    """Find the progress of open incidents, oldest first: replacements take turns.

    Args:
        snapshot: the observation.
        config: limits (`[recovery]`, `[replace]`).
        diagnoses: of the snapshot.
        moved: nodes that are marked in this round: they go on in the next.
    """
    incidents = sorted(snapshot.incidents.values(), key=lambda incident: incident.id)
    running = sum(incident.state.is_running_program for incident in incidents)
    for incident in incidents:
        if incident.node in moved:
            continue
        for action in progress(snapshot, config, incident, diagnoses.get(incident.node)):
            if isinstance(action, StartReplacement):
                if running >= config.replace.max_running:
                    continue
                running += 1
            yield action


def progress(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, diagnosis: NodeDiagnosis | None
) -> Iterator[Action]:
    """Find what has happened to the node of an open incident, and what is to be done next."""
    node = snapshot.nodes.get(incident.node)
    if node is None:
        yield _move(incident, NodeEvent.REMOVED, "Slurm does not know this node any more")
        return
    if node.reason_unclear and incident.state.is_marked and not incident.state.is_running_program:
        # Whatever the reason says, it may be a person's.
        text = f"a reason that cannot be read for certain holds the node: {node.reason}"
        yield _move(incident, NodeEvent.TAKEN_OVER, text)
        return
    if incident.state.is_coming_back and is_kept_instead(node, incident.action):
        text = f"{node.state}: kept out for {node.reason!r}"
        yield _move(incident, NodeEvent.TAKEN_OVER, text)
        return
    match incident.state:
        case NodeState.SUSPECT:
            yield from _from_suspect(incident, node, diagnosis)
        case NodeState.SET_ASIDE | NodeState.EMPTY:
            answer = _answer_of_a_person(incident, node)
            if answer is not None:
                yield answer
            else:
                yield from _towards_repair(snapshot, config, incident, node)
        case NodeState.REPAIRING:
            yield from _from_repairing(snapshot, config, incident, node)
        case NodeState.VALIDATING:
            yield from _from_validating(snapshot, config, incident, node)
        case NodeState.RETURNING:
            yield from _from_returning(snapshot, config, incident, node)
        case _:
            return


def _move(incident: Incident, event: NodeEvent, reason: str, next_try: float = 0.0) -> Transition:
    return Transition(incident.node, incident.id, event, reason, next_try)


def _from_suspect(
    incident: Incident, node: Node, diagnosis: NodeDiagnosis | None
) -> Iterator[Action]:
    """sresctld was stopped, or Slurm refused, between the incident's opening and the mark."""
    if node.requested_action:
        yield _move(incident, NodeEvent.MARKED, "Slurm shows the reason")
    elif is_kept_by_a_person(node):
        yield _move(incident, NodeEvent.TAKEN_OVER, f"not marked; kept by a person: {node.reason}")
    elif diagnosis is None or diagnosis.kind not in ("dead", "sick", "suspect"):
        text = diagnosis.reason if diagnosis else "gone"
        yield _move(incident, NodeEvent.RECOVERED, f"not marked; now: {text}")


def _answer_of_a_person(incident: Incident, node: Node) -> Transition | None:
    """Return a person's answer to the request, where its reason has gone or was changed."""
    if is_kept_by_a_person(node):
        return _move(incident, NodeEvent.TAKEN_OVER, f"{node.state}: kept out for {node.reason!r}")
    if not node.requested_action or not is_out_of_service(node):
        return _move(incident, NodeEvent.RELEASED, f"{node.state}: the reason was taken back")
    if node.requested_action != incident.action:
        text = f"{node.requested_action} was asked for instead"
        return _move(incident, NodeEvent.ASKED_ANEW, text)
    return None


def _towards_repair(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    waited = snapshot.now - incident.times.marked
    if node.has_work:
        if incident.state is NodeState.EMPTY:
            yield _move(incident, NodeEvent.OCCUPIED, f"{node.state}: a job is on the node")
        if waited > config.recovery.drain_alarm:
            text = f"jobs have kept this node from its replacement for {waited / 3600:.0f} h"
            key = f"drain-{incident.id}"
            yield RaiseAlarm(key, text, node.name, incident=incident.id, remember=True)
        return
    if incident.state is NodeState.SET_ASIDE:
        yield _move(incident, NodeEvent.EMPTIED, "no job is left on the node")
    if not snapshot.site.can_replace:
        text = "no replacement program is configured (replace.program): waiting for a person"
        yield RaiseAlarm(f"program-{incident.id}", text, node.name, incident=incident.id)
        return
    if snapshot.now >= incident.next_try:
        yield StartReplacement(node.name, incident.id)


def _from_repairing(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    if not (node.reason and is_out_of_service(node)):
        # Node resume takes the reason away, or the state only (24.11), whatever the machine does.
        yield _move(incident, NodeEvent.RELEASED, "an administrator resumed the node")
        return
    run = snapshot.runs.get(incident.id)
    if run is None or run.state == "running":
        return
    if run.state == "ended" and run.rc == 0:
        yield _move(incident, NodeEvent.REPLACED, "the program ended well")
        return
    last_line = (run.output.splitlines()[-1:] or ["it printed nothing"])[0][:MAX_OUTPUT]
    ending = "disappeared" if run.state == "lost" else f"exited {run.rc}"
    yield _failed(snapshot, config, incident, f"the program {ending}: {last_line}")


def _failed(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, cause: str
) -> Transition:
    if incident.attempts >= config.replace.attempts:
        text = f"{cause}; given up after {incident.attempts} attempts, a person must look"
        return _move(incident, NodeEvent.GAVE_UP, text)
    wait = config.replace.backoff * 2 ** max(0, incident.attempts - 1)
    text = f"{cause}; again in {wait:.0f} s (attempt {incident.attempts} failed)"
    return _move(incident, NodeEvent.REPLACEMENT_FAILED, text, next_try=snapshot.now + wait)


def _from_validating(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    timeout = config.replace.return_timeout
    if node.is_available:
        yield _move(incident, NodeEvent.CLOSED, "back in service")
    elif _is_back(snapshot, incident, node):
        yield ReturnNode(node.name, incident.id)
    elif snapshot.now - incident.times.run_ended > timeout:
        cause = f"the node did not come back within {timeout:.0f} s"
        yield _failed(snapshot, config, incident, cause)


def _is_back(snapshot: ClusterSnapshot, incident: Incident, node: Node) -> bool:
    """Tell whether its sresd speaks from another boot or machine, and slurmd answers."""
    agent, before = snapshot.agents.get(node.name), incident.before
    if agent is not None and agent.is_heard:
        speaks = agent.is_connected and agent.silence < MAX_SILENCE_SECONDS
        is_the_old_one = before.is_known and (agent.boot_id, agent.instance) == (
            before.boot_id,
            before.instance,
        )
        if not speaks or is_the_old_one:
            return False
    elif before.is_known:
        return False
    elapsed = snapshot.now - incident.times.run_ended
    later_probes = [
        probe
        for probe in snapshot.probes.get(node.name, ())
        if snapshot.moment - probe.started <= elapsed
    ]
    return bool(later_probes) and later_probes[-1].answer == "answered"


def _from_returning(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    since_resume = snapshot.now - incident.times.resumed
    if node.is_available:
        seconds = snapshot.now - incident.times.opened
        verb = "rebooted" if incident.action == REBOOT else "replaced"
        text = f"{verb} and back in service after {seconds:.1f} s"
        yield _move(incident, NodeEvent.CLOSED, text)
    elif node.requested_action and incident.reason_at not in ("", node.reason_at):
        by = node.reason_by or "an unknown user"
        yield _move(incident, NodeEvent.ASKED_ANEW, f"{node.reason} was asked for again by {by}")
    elif node.requested_action and since_resume > RESUME_AGAIN_SECONDS:
        yield ReturnNode(node.name, incident.id)
    elif since_resume > config.replace.return_timeout:
        yield _failed(snapshot, config, incident, f"after its resume the node is {node.state}")
