"""Diagnose: what is each node's trouble, if any? Pure: a snapshot in, diagnoses out.

`RULES` is the whole judgement, in order: the first rule that answers decides. A rule is a small
function of one node's `NodeCase`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from slurm_resilience.config import Config, DetectSettings
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.probe import ProbeResult
from slurm_resilience.controller.registry import AgentView
from slurm_resilience.model import FAULTY, REBOOT, REPLACE, SEVERITIES, Finding, Node, Severity

Kind = Literal[
    "healthy",
    "unknown",  # no sresd reports for it, and nothing says that it is ill
    "suspect",  # silent; being probed
    "dead",  # silent to sresd's connection and to probes
    "sick",  # it answers, and a finding says that it must go
    "requested",  # its reason is Action:Replace or Action:Reboot
    "held",  # an administrator (or power saving) keeps it out: sresctld leaves it alone
    "down",  # Slurm says so, for a reason that is not sresctld's to judge
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


# Reasons that slurmctld and slurmd write themselves. Every other reason was written by a person (or
# another program), and stays.
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
NEVER_HEARD_SECONDS = 600.0
"""The silence of a node that no sresd reports for, and that does not answer Slurm either."""


class NodeCase(msgspec.Struct, frozen=True):
    """One node, and all that its diagnosis may rest on."""

    node: Node
    agent: AgentView | None
    life: NodeDiagnosis
    """The diagnosis from its beats and probes alone."""
    settled: float
    """Findings from before this moment (epoch) are dealt with."""

    @property
    def is_occupied(self) -> bool:
        """Jobs on it would be freed by setting it DOWN."""
        return self.node.has_work and not self.node.is_down

    @property
    def has_died_with_jobs(self) -> bool:
        return self.life.kind == "dead" and self.is_occupied

    def is_(self, kind: Kind, reason: str, action: str = "", probe: bool = False) -> NodeDiagnosis:
        return NodeDiagnosis(self.node.name, kind, reason, action, probe)


def diagnose(snapshot: ClusterSnapshot, config: Config) -> dict[str, NodeDiagnosis]:
    """Return a diagnosis for every node.

    Args:
        snapshot: one observation.
        config: thresholds (`[detect]`).
    """
    diagnoses = {}
    for name, node in snapshot.nodes.items():
        agent = snapshot.agents.get(name)
        life = _life(snapshot, config.detect, node, agent)
        case = NodeCase(node, agent, life, snapshot.settled.get(name, 0.0))
        diagnoses[name] = next(answer for rule in RULES if (answer := rule(case)) is not None)
    return diagnoses


# -- the rules --------------------------------------------------------------------------------


def _powered_off(case: NodeCase) -> NodeDiagnosis | None:
    if case.node.is_powered_off_on_purpose:
        return case.is_("held", f"{case.node.state}: powered off by Slurm")
    return None


def _expected_to_be_away(case: NodeCase) -> NodeDiagnosis | None:
    """Recognise a node that is not there yet, or goes down and up by Slurm's own order."""
    if case.node.base == "FUTURE" or "REBOOT_ISSUED" in case.node.flags:
        return case.is_("held", f"{case.node.state}: silence is expected")
    return None


def _unclear_reason(case: NodeCase) -> NodeDiagnosis | None:
    if case.node.reason_unclear:
        return case.is_(
            "held", f"its reason cannot be read for certain, so nothing is done: {case.node.reason}"
        )
    return None


def _requested(case: NodeCase) -> NodeDiagnosis | None:
    node = case.node
    if not (node.requested_action and is_out_of_service(node)):
        return None
    if case.has_died_with_jobs:
        # It was to be left gracefully, and died meanwhile: its jobs must be freed now.
        return case.is_("dead", case.life.reason, node.requested_action)
    by = f" by {node.reason_by}" if node.reason_by else ""
    probe = case.life.probe and case.is_occupied
    return case.is_("requested", f"{node.reason}{by}", node.requested_action, probe)


def _kept_by_a_person(case: NodeCase) -> NodeDiagnosis | None:
    node = case.node
    if not (is_out_of_service(node) and is_a_persons(node)):
        return None
    if case.has_died_with_jobs:
        # Its jobs must be freed, its reason stays: no action, so it is not replaced. Without jobs
        # there is nothing to do: people power off what they have drained.
        return case.is_("dead", f"{case.life.reason}; kept out: {node.reason}")
    return case.is_("held", _held(node), probe=case.life.probe and case.is_occupied)


def _maintenance(case: NodeCase) -> NodeDiagnosis | None:
    if "MAINTENANCE" in case.node.flags and not case.node.has_work:
        return case.is_("held", f"{case.node.state}: in a maintenance reservation")
    return None


def _silent(case: NodeCase) -> NodeDiagnosis | None:
    return case.life if case.life.kind in ("dead", "suspect") else None


def _sick(case: NodeCase) -> NodeDiagnosis | None:
    if case.agent is None:
        return None
    # The kernel log keeps its lines: an administrator who resumed the node has answered them.
    faulty = [f for f in case.agent.findings if f.severity in FAULTY and f.at > case.settled]
    if not faulty:
        return None
    worst = max(faulty, key=_gravity)
    # A GPU reset needs an idle node and is not sresctld's to do; a reboot resets it as well.
    action = REPLACE if worst.severity is Severity.REPLACE else REBOOT
    return case.is_("sick", f"{worst.check}: {worst.text}", action)


def _out_of_service(case: NodeCase) -> NodeDiagnosis | None:
    if not is_out_of_service(case.node):
        return None
    reason = case.node.reason or "no reason given"
    return case.is_("down", f"{case.node.state}: {reason}", probe=case.life.probe)


def _as_it_lives(case: NodeCase) -> NodeDiagnosis | None:
    return case.life


RULES: Sequence[Callable[[NodeCase], NodeDiagnosis | None]] = (
    _powered_off,
    _expected_to_be_away,
    _unclear_reason,
    _requested,
    _kept_by_a_person,
    _maintenance,
    _silent,
    _sick,
    _out_of_service,
    _as_it_lives,
)
"""In this order; the first answer counts. The last one always answers."""


def is_out_of_service(node: Node) -> bool:
    """Slurm starts no job on it because it is DOWN, draining or failing."""
    return node.is_fail or node.is_down or node.is_drain


def is_a_persons(node: Node) -> bool:
    """Tell whether the reason is neither empty nor one of Slurm's own."""
    # Slurm writes its own behind an earlier one, which may be blank: `  : Not responding`.
    reason = node.reason.lstrip(" :")
    return bool(reason) and not reason.startswith(_SLURMS_OWN)


def is_kept_by_a_person(node: Node) -> bool:
    """Tell whether a person keeps the node out of service, for a reason that asks nothing of
    sresctld."""
    if node.reason_unclear:
        return True
    return is_out_of_service(node) and is_a_persons(node) and not node.requested_action


def is_kept_instead(node: Node, action: str) -> bool:
    """Tell whether a person put a reason in the place of this request.

    A reboot by Slurm only adds to the request: `Action:Reboot : reboot issued`.
    """
    return is_kept_by_a_person(node) and not node.reason.startswith(action)


def _held(node: Node) -> str:
    if node.near_miss:
        return (
            f"reason {node.reason!r} is not {node.near_miss!r}, so nothing is done; write exactly "
            f"{node.near_miss}"
        )
    return f"kept out by {node.reason_by or 'an administrator'}: {node.reason}"


def _gravity(finding: Finding) -> tuple[int, float]:
    return (SEVERITIES.index(finding.severity), -finding.at)


# -- is it alive? -----------------------------------------------------------------------------


def _life(
    snapshot: ClusterSnapshot, detect: DetectSettings, node: Node, agent: AgentView | None
) -> NodeDiagnosis:
    """Judge by beats; where they are missing, by probes. Silence alone is never death."""
    if agent is not None and not agent.was_stopped:
        if not agent.is_heard and snapshot.site.uptime < detect.start_grace:
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
        sign = f"no beat for {silence:.1f} s"
    elif node.is_responding:
        text = "sresd was stopped" if agent else "no sresd has reported for it"
        return NodeDiagnosis(node.name, "unknown", text)
    else:
        # No sresd beats for it, and Slurm itself gets no answer.
        silence = NEVER_HEARD_SECONDS
        heard_at, sign = snapshot.moment - silence, "Slurm gets no answer"
    probes = [p for p in snapshot.probes.get(node.name, ()) if p.started > heard_at]
    return _judge_probes(snapshot.moment, detect, node, probes, silence, sign)


def _judge_probes(
    moment: float,
    detect: DetectSettings,
    node: Node,
    probes: Sequence[ProbeResult],
    silence: float,
    sign: str,
) -> NodeDiagnosis:
    """Judge a silent node by the probes since its last beat.

    Args:
        moment: now, of the monotonic clock.
        detect: thresholds.
        node: the silent node.
        probes: oldest first.
        silence: seconds without a beat.
        sign: the silence in words.
    """
    answered = [index for index, p in enumerate(probes) if p.answer == "answered"]
    if answered:
        later = probes[answered[-1] + 1 :]
        if len(later) < MIN_SILENT_PROBES or silence <= detect.dead_after:
            text = f"{sign}, but slurmd's port answers: sresd is missing"
            return NodeDiagnosis(node.name, "unknown", text, probe=True)
        probes = later
    refused = [p for p in probes if p.answer == "refused"]
    if refused:
        refused_for = moment - refused[0].started
        if refused_for > detect.refused_after and len(probes) >= MIN_SILENT_PROBES:
            text = f"{sign}; the machine has refused slurmd's port for {refused_for:.0f} s"
            return NodeDiagnosis(node.name, "dead", text, REPLACE)
        text = f"{sign}; the machine answers, slurmd does not run ({refused_for:.0f} s)"
        return NodeDiagnosis(node.name, "suspect", text, probe=True)
    if silence > detect.dead_after and len(probes) >= MIN_SILENT_PROBES:
        text = f"{sign}, {len(probes)} probes of slurmd's port unanswered"
        return NodeDiagnosis(node.name, "dead", text, REPLACE)
    return NodeDiagnosis(node.name, "suspect", f"{sign}; probing", probe=True)
