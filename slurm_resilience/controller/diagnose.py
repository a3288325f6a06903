"""Diagnose: what is each node's trouble, if any? Pure: a world in, verdicts out."""

from __future__ import annotations

from typing import Literal

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.inbox import AgentView
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.probe import ProbeResult
from slurm_resilience.model import FAULTY, REBOOT, REPLACE, SEVERITIES, Finding, Node, Severity

Kind = Literal[
    "healthy",
    "unknown",  # nobody speaks for it, and nothing says that it is ill
    "suspect",  # silent; being probed
    "dead",  # silent to sresd's connection and to probes
    "sick",  # it answers, and a finding says that it must go
    "requested",  # its reason is Action:Replace or Action:Reboot
    "held",  # an administrator (or power saving) keeps it out: hands off
    "down",  # Slurm says so, for a reason that is not ours to judge
]


class NodeDiagnosis(msgspec.Struct, frozen=True):
    """One node's diagnosis, with its reason in words."""

    node: str
    kind: Kind
    reason: str
    action: str = ""
    """Action:Replace or Action:Reboot, where one is called for."""
    probe: bool = False
    """A probe would tell more."""


# Reasons that slurmctld and slurmd write themselves. Everything else is a person's (or another
# program's) word, and stays.
_SLURMS_OWN = (
    "Not responding",
    "Node unexpectedly rebooted",
    "Low ",
    "gres/",
    "Kill task failed",
    "Prolog error",
    "Epilog error",
    "batch job complete failure",
    "Duplicate jobid",
    "ResumeTimeout reached",
    "Invalid slurmd version",
)
MIN_SILENT_PROBES = 2


def diagnose(world: ClusterSnapshot, config: Config) -> dict[str, NodeDiagnosis]:
    """A verdict for every node.

    Args:
        world: one observation.
        config: thresholds (`[detect]`).
    """
    return {name: _node(world, config, node) for name, node in world.nodes.items()}


def _node(world: ClusterSnapshot, config: Config, node: Node) -> NodeDiagnosis:
    agent = world.agents.get(node.name)
    life = _life(world, config, node, agent)
    out_of_service = node.is_fail or node.is_down or node.is_drain
    occupied = node.has_work and not node.is_down
    if node.is_powered_off_on_purpose:
        return NodeDiagnosis(node.name, "held", f"{node.state}: powered off by Slurm")
    if node.base == "FUTURE" or "REBOOT_ISSUED" in node.flags:
        # Not there yet, or going down and up by Slurm's own order, with its own time limit.
        return NodeDiagnosis(node.name, "held", f"{node.state}: silence is expected")
    if node.reason_unclear:
        text = f"its reason cannot be read for certain, so nothing is done: {node.reason}"
        return NodeDiagnosis(node.name, "held", text)
    if node.requested_action and out_of_service:
        if life.kind == "dead" and occupied:
            # It was to be left gracefully, and died meanwhile: its jobs must be freed now.
            return NodeDiagnosis(node.name, "dead", life.reason, node.requested_action)
        by = f" by {node.reason_by}" if node.reason_by else ""
        return NodeDiagnosis(
            node.name,
            "requested",
            f"{node.reason}{by}",
            node.requested_action,
            probe=life.probe and occupied,
        )
    if out_of_service and is_a_persons(node):
        if life.kind == "dead" and occupied:
            # Its jobs must be freed, its reason stays: no action, so nobody replaces it. Without
            # jobs there is nothing to do: people power off what they have drained.
            return NodeDiagnosis(node.name, "dead", f"{life.reason}; kept out: {node.reason}")
        return NodeDiagnosis(node.name, "held", _held(node), probe=life.probe and occupied)
    if "MAINTENANCE" in node.flags and not node.has_work:
        return NodeDiagnosis(node.name, "held", f"{node.state}: in a maintenance reservation")
    if life.kind in ("dead", "suspect"):
        return life
    sick = _sick(node, agent, world.settled.get(node.name, 0.0))
    if sick is not None:
        return sick
    if node.is_down or node.is_drain or node.is_fail:
        reason = node.reason or "no reason given"
        return NodeDiagnosis(node.name, "down", f"{node.state}: {reason}", probe=life.probe)
    return life


def is_a_persons(node: Node) -> bool:
    # Slurm writes its own behind an earlier one, which may be blank: `  : Not responding`.
    reason = node.reason.lstrip(" :")
    return bool(reason) and not reason.startswith(_SLURMS_OWN)


def _held(node: Node) -> str:
    if node.near_miss:
        return (
            f"reason {node.reason!r} is not {node.near_miss!r}, so nothing is done; write exactly "
            f"{node.near_miss}"
        )
    return f"kept out by {node.reason_by or 'an administrator'}: {node.reason}"


def _life(
    world: ClusterSnapshot, config: Config, node: Node, agent: AgentView | None
) -> NodeDiagnosis:
    """Is it alive? Silence alone is never death: the probes must agree."""
    detect = config.detect
    speaks = agent is not None and not agent.said_goodbye
    if agent is not None and speaks:
        if not agent.spoke and world.uptime < detect.start_grace:
            return NodeDiagnosis(
                node.name, "unknown", "sresctld has just started; waiting for its sresd"
            )
        if agent.silence <= detect.silent_after:
            if not node.is_responding:
                # slurmd is gone or hung; the machine is not. Slurm will say DOWN if it stays so.
                return NodeDiagnosis(
                    node.name, "unknown", "sresd beats, slurmd does not answer Slurm"
                )
            return NodeDiagnosis(node.name, "healthy", "sresd beats")
        heard_at, silence = agent.heard_at, agent.silence
        said = f"no beat for {silence:.1f} s"
    elif node.is_responding:
        why = "sresd was stopped" if agent else "no sresd has spoken for it"
        return NodeDiagnosis(node.name, "unknown", why)
    else:
        # Nobody beats for it, and Slurm itself gets no answer.
        heard_at, silence, said = world.moment - 600.0, 600.0, "Slurm gets no answer"
    probes = [p for p in world.probes.get(node.name, ()) if p.started > heard_at]
    return _judge_probes(world, config, node, probes, silence, said)


def _judge_probes(
    world: ClusterSnapshot,
    config: Config,
    node: Node,
    probes: list[ProbeResult],
    silence: float,
    said: str,
) -> NodeDiagnosis:
    detect = config.detect
    answered = [index for index, p in enumerate(probes) if p.answer == "answered"]
    if answered:
        since = probes[answered[-1] + 1 :]
        if len(since) < MIN_SILENT_PROBES or silence <= detect.dead_after:
            text = f"{said}, but slurmd's port answers: sresd is missing"
            return NodeDiagnosis(node.name, "unknown", text, probe=True)
        probes = since
    refused = [p for p in probes if p.answer == "refused"]
    if refused:
        gone_for = world.moment - refused[0].started
        if gone_for > detect.refused_after and len(probes) >= MIN_SILENT_PROBES:
            text = f"{said}; the machine has refused slurmd's port for {gone_for:.0f} s"
            return NodeDiagnosis(node.name, "dead", text, REPLACE)
        text = f"{said}; the machine answers, slurmd does not run ({gone_for:.0f} s)"
        return NodeDiagnosis(node.name, "suspect", text, probe=True)
    if silence > detect.dead_after and len(probes) >= MIN_SILENT_PROBES:
        text = f"{said}, {len(probes)} probes of slurmd's port unanswered"
        return NodeDiagnosis(node.name, "dead", text, REPLACE)
    return NodeDiagnosis(node.name, "suspect", f"{said}; probing", probe=True)


def _sick(node: Node, agent: AgentView | None, settled: float) -> NodeDiagnosis | None:
    if agent is None:
        return None
    # The kernel log keeps its lines: an administrator who resumed the node has answered them.
    faulty = [f for f in agent.findings if f.severity in FAULTY and f.at > settled]
    if not faulty:
        return None
    worst = max(faulty, key=_gravity)
    # A GPU reset needs an idle node and is not ours to do yet; a reboot resets it as well.
    action = REPLACE if worst.severity is Severity.REPLACE else REBOOT
    return NodeDiagnosis(node.name, "sick", f"{worst.check}: {worst.text}", action)


def _gravity(finding: Finding) -> tuple[int, float]:
    return (SEVERITIES.index(finding.severity), -finding.at)
