"""Decide, for one incident: from its marking to the day the node is back. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import (
    Action,
    RaiseAlarm,
    ReturnNode,
    StartReplacement,
    Transition,
)
from slurm_resilience.controller.diagnose import NodeDiagnosis
from slurm_resilience.controller.journal import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, Node

RESUME_AGAIN = 10.0
"""Seconds until a node resume that Slurm does not show is given again."""


def progress(
    world: ClusterSnapshot, config: Config, incident: Incident, verdict: NodeDiagnosis | None
) -> Iterator[Action]:
    node = world.nodes.get(incident.node)
    if node is None:
        yield Transition(
            incident.node, incident.id, "cancelled", "Slurm does not know this node any more"
        )
        return
    if node.reason_unclear and incident.state in ("marked", "returning", "resumed"):
        text = f"a reason that cannot be read for certain holds the node: {node.reason}"
        yield Transition(node.name, incident.id, "cancelled", text)
        return
    match incident.state:
        case "open":
            yield from _from_open(incident, node, verdict)
        case "marked":
            yield from _from_marked(world, config, incident, node)
        case "replacing":
            yield from _from_replacing(world, config, incident, node)
        case "returning":
            yield from _from_returning(world, config, incident, node)
        case "resumed":
            yield from _from_resumed(world, config, incident, node)
        case _:
            return


def _from_open(incident: Incident, node: Node, verdict: NodeDiagnosis | None) -> Iterator[Action]:
    """sresctld was stopped between opening and marking."""
    if node.requested_action:
        yield Transition(node.name, incident.id, "marked", "Slurm shows the reason")
    elif verdict is None or verdict.kind not in ("dead", "sick", "suspect"):
        text = verdict.reason if verdict else "gone"
        yield Transition(node.name, incident.id, "cancelled", f"not marked; now: {text}")


def _from_marked(
    world: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    if not node.requested_action or not (node.is_fail or node.is_down or node.is_drain):
        yield Transition(
            node.name, incident.id, "cancelled", f"{node.state}: the reason was taken back"
        )
        return
    if node.requested_action != incident.action:
        text = f"{node.requested_action} was asked for instead"
        yield Transition(node.name, incident.id, "cancelled", text)
        return
    if node.has_work:
        if world.now - incident.marked > config.recovery.drain_alarm:
            hours = (world.now - incident.marked) / 3600
            text = f"jobs have kept this node from its replacement for {hours:.0f} h"
            yield RaiseAlarm(f"drain-{incident.id}", text, node.name, incident=incident.id)
        return
    if not world.can_replace:
        text = "no replacement program is configured (replace.program): waiting for a person"
        yield RaiseAlarm(f"program-{incident.id}", text, node.name, incident=incident.id)
        return
    running = sum(i.state == "replacing" for i in world.incidents.values())
    if world.now >= incident.next_try and running < config.replace.max_running:
        yield StartReplacement(node.name, incident.id)


def _from_replacing(
    world: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    if not (node.reason and (node.is_fail or node.is_down or node.is_drain)):
        # Node resume takes the reason away, or the state only (24.11), whatever the machine does.
        text = "an administrator resumed the node"
        yield Transition(node.name, incident.id, "cancelled", text, stop_run=True)
        return
    run = world.runs.get(incident.id)
    if run is None or run.state == "running":
        return
    if run.state == "ended" and run.rc == 0:
        yield Transition(node.name, incident.id, "returning", "the program ended well")
        return
    last = run.output.splitlines()[-1:] or ["it printed nothing"]
    how = "disappeared" if run.state == "lost" else f"exited {run.rc}"
    yield _failed(world, config, incident, f"the program {how}: {last[0][:200]}")


def _failed(world: ClusterSnapshot, config: Config, incident: Incident, why: str) -> Transition:
    if incident.attempts >= config.replace.attempts:
        text = f"{why}; given up after {incident.attempts} attempts, a person must look"
        return Transition(incident.node, incident.id, "gave_up", text)
    wait = config.replace.backoff * 2 ** max(0, incident.attempts - 1)
    text = f"{why}; again in {wait:.0f} s (attempt {incident.attempts} failed)"
    return Transition(incident.node, incident.id, "marked", text, next_try=world.now + wait)


def _from_returning(
    world: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    if node.is_available:
        yield Transition(node.name, incident.id, "closed", "back in service")
    elif _is_back(world, incident, node):
        yield ReturnNode(node.name, incident.id)
    elif world.now - incident.run_ended > config.replace.return_timeout:
        seconds = config.replace.return_timeout
        yield _failed(world, config, incident, f"the node did not come back within {seconds:.0f} s")


def _is_back(world: ClusterSnapshot, incident: Incident, node: Node) -> bool:
    """Its sresd speaks from another boot or machine, and slurmd answers."""
    agent = world.agents.get(node.name)
    before = (incident.boot_before, incident.instance_before)
    if agent is not None and agent.spoke and not agent.said_goodbye:
        speaks = agent.connected and agent.silence < 5.0
        if not speaks or (any(before) and (agent.boot_id, agent.instance) == before):
            return False
    elif any(before):
        return False
    elapsed = world.now - incident.run_ended
    probes = [p for p in world.probes.get(node.name, ()) if world.moment - p.started <= elapsed]
    return bool(probes) and probes[-1].answer == "answered"


def _from_resumed(
    world: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    if node.is_available:
        seconds = world.now - incident.opened
        verb = "rebooted" if incident.action == REBOOT else "replaced"
        yield Transition(
            node.name, incident.id, "closed", f"{verb} and back in service after {seconds:.1f} s"
        )
    elif node.requested_action and incident.reason_at not in ("", node.reason_at):
        text = f"{node.reason} was asked for again by {node.reason_by or 'somebody'}"
        yield Transition(node.name, incident.id, "cancelled", text)
    elif node.requested_action and world.now - incident.resumed > RESUME_AGAIN:
        yield ReturnNode(node.name, incident.id)
    elif world.now - incident.resumed > config.replace.return_timeout:
        yield _failed(world, config, incident, f"after its resume the node is {node.state}")
