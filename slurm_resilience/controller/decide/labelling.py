"""Decide the labels of a node with an incident, and find those that have outlived theirs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import assert_never

from slurm_resilience.controller.actions import TakeLabelsOff
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REBOOT
from slurm_resilience.slurm.node_labels import (
    FAULT_REASON,
    FAULT_TYPE,
    HEALTH,
    OLD_PREFIX,
    OURS,
    labels_of,
)

PENDING_REBOOT, PENDING_REPLACEMENT = "pending-reboot", "pending-replacement"
VALIDATING, UNSCHEDULABLE = "validating", "unschedulable"


def labels_for(incident: Incident) -> Mapping[str, str]:
    """Return the labels that the node of an incident has; empty: none, it is well or a person's."""
    match incident.state:
        case NodeState.SET_ASIDE | NodeState.EMPTY | NodeState.REPAIRING:
            health = PENDING_REBOOT if incident.action == REBOOT else PENDING_REPLACEMENT
        case NodeState.VALIDATING | NodeState.RETURNING:
            health = VALIDATING
        case NodeState.QUARANTINED:
            health = UNSCHEDULABLE
        case NodeState.HEALTHY | NodeState.SUSPECT | NodeState.HELD:
            return {}
        case _ as other:
            assert_never(other)
    check, sign, text = incident.reason.partition(": ")
    is_of_a_check = incident.kind == "sick" and bool(sign) and " " not in check
    return {
        HEALTH: health,
        FAULT_TYPE: check if is_of_a_check else incident.kind,
        FAULT_REASON: text if is_of_a_check else incident.reason,
    }


def stale_labels(snapshot: ClusterSnapshot) -> Iterator[TakeLabelsOff]:
    """Find nodes without an incident that have labels: Slurm did not take their end, say."""
    for name, node in snapshot.nodes.items():
        if not node.comment or name in snapshot.incidents:
            continue
        rest = snapshot.at_rest.get(name)
        if rest is not None and labels_for(rest):
            continue
        if node.comment.startswith(OLD_PREFIX) or not labels_of(node.comment).keys().isdisjoint(
            OURS
        ):
            yield TakeLabelsOff(name)
