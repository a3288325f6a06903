"""Decide the labels of a node with an incident, and find those that have outlived theirs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

from slurm_resilience.controller.actions import RenewLabels, TakeLabelsOff
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import open_findings
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT, RESET, SEVERITIES, Finding, Node
from slurm_resilience.slurm.node_labels import (
    FAULT_REASON,
    FAULT_TYPE,
    HEALTH,
    OLD_PREFIX,
    OURS,
    labels_of,
    with_labels,
)

PENDING_REBOOT, PENDING_REPLACEMENT = "pending-reboot", "pending-replacement"
PENDING = {REBOOT: PENDING_REBOOT, RESET: "pending-reset"}
VALIDATING, UNSCHEDULABLE = "validating", "unschedulable"


def labels_for(incident: Incident, found: Sequence[Finding] = ()) -> Mapping[str, str]:
    """Return the labels that the node of an incident has; empty: none, it is well or a person's.

    Args:
        incident: with its state.
        found: the faults that are found on the node now. Once it was repaired they count, and not
            the one that the incident began with.
    """
    match incident.state:
        case NodeState.SET_ASIDE | NodeState.EMPTY | NodeState.REPAIRING:
            health = PENDING.get(incident.action, PENDING_REPLACEMENT)
        case NodeState.VALIDATING | NodeState.RETURNING:
            health = VALIDATING
        case NodeState.QUARANTINED:
            health = UNSCHEDULABLE
        case NodeState.HEALTHY | NodeState.SUSPECT | NodeState.HELD:
            return {}
        case _ as other:
            assert_never(other)
    kind, reason = _fault_of(incident, found)
    return {HEALTH: health, FAULT_TYPE: kind, FAULT_REASON: reason}


def _fault_of(incident: Incident, found: Sequence[Finding]) -> tuple[str, str]:
    if incident.attempts and found:
        worst = max(found, key=lambda finding: SEVERITIES.index(finding.severity))
        return worst.check, worst.text
    check, sign, text = incident.reason.partition(": ")
    is_of_a_check = incident.kind == "sick" and bool(sign) and " " not in check
    return (check, text) if is_of_a_check else (incident.kind, incident.reason)


def outdated_labels(snapshot: ClusterSnapshot) -> Iterator[RenewLabels]:
    """Find nodes whose labels are not those of their incident: something else is found on them by
    now, or a person has written over the Comment."""
    for incident in (*snapshot.incidents.values(), *snapshot.at_rest.values()):
        node = snapshot.nodes.get(incident.node)
        if node is None:
            continue
        labels = labels_for(incident, open_findings(snapshot, node.name))
        if labels and with_labels(node.comment, labels) != node.comment:
            yield RenewLabels(node.name, incident.id)


def stale_labels(snapshot: ClusterSnapshot) -> Iterator[TakeLabelsOff]:
    """Find nodes without an incident that have labels: Slurm did not take their end, say."""
    for name, node in notable(snapshot.nodes).items():
        if name in snapshot.incidents or not has_our_labels(node):
            continue
        rest = snapshot.at_rest.get(name)
        if rest is not None and labels_for(rest):
            continue
        yield TakeLabelsOff(name)


def has_our_labels(node: Node) -> bool:
    """Tell whether a node's Comment has labels that sresctld has written there."""
    if not node.comment:
        return False
    is_old = node.comment.startswith(OLD_PREFIX)
    return is_old or not labels_of(node.comment).keys().isdisjoint(OURS)
