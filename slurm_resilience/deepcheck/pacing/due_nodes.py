"""Choose the nodes whose deep check is due, from what Slurm shows of them. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from slurm_resilience.deepcheck.deep_marks import REQUESTED, booted_at, marked_at, status_of
from slurm_resilience.deepcheck.deep_results import DeepState
from slurm_resilience.deepcheck.node_choice import DeepReadiness, choose_node
from slurm_resilience.health.checks.host import software
from slurm_resilience.model import Node
from slurm_resilience.slurm.node_labels import HEALTH, labels_of

AGAIN_SECONDS = 86400.0
"""A node that could not be judged is looked at again after this time, or after the period."""
OWN_END_SECONDS = 120.0
"""A deep check is a job too, and Slurm sees it end about when its label is written."""


class DeepTrigger(enum.StrEnum):
    """The reason for a deep check. The first one comes first."""

    REQUESTED = "an administrator asks for it"
    RETURNED = "it was repaired since the last one failed"
    FIRST = "it has had none"
    SOFTWARE = "its driver, kernel or firmware has changed"
    USED = "it has run jobs since the last one"
    AGAIN = "the last one could not judge it"
    PERIODIC = "the last one is long ago"


class DueNode(NamedTuple):
    """A node whose deep check is due."""

    node: str
    trigger: DeepTrigger


def due_nodes(
    nodes: Iterable[Node],
    reserved: Mapping[str, str],
    wanted: Collection[str],
    changed: Collection[str],
    now: float,
    every_seconds: float,
    used: Collection[str] = (),
) -> tuple[DueNode, ...]:
    """Return the nodes to check, the most urgent first: idle ones that no waiting job could use.

    Args:
        nodes: as Slurm shows them now.
        reserved: by node, the reservation that has it, or will have it before a check could end.
        wanted: partitions in which jobs wait for nodes.
        changed: nodes whose software is another than at their last deep check.
        now: seconds since the epoch.
        every_seconds: a node that has passed is checked again after this time; 0: never.
        used: nodes whose jobs call for another check (`used_nodes`).
    """
    found = []
    for node in nodes:
        trigger = _trigger(node, node.name in changed, node.name in used, now, every_seconds)
        if trigger is not None and _is_free(node, reserved, wanted):
            found.append((DueNode(node.name, trigger), marked_at(node)))
    order = list(DeepTrigger)
    return tuple(due for due, _ in sorted(found, key=lambda one: (order.index(one[0][1]), one[1])))


def free_nodes(
    nodes: Iterable[Node], reserved: Mapping[str, str], wanted: Collection[str]
) -> tuple[str, ...]:
    """Return the idle nodes that no waiting job could use, by the arguments of `due_nodes`."""
    return tuple(node.name for node in nodes if _is_free(node, reserved, wanted))


def _is_free(node: Node, reserved: Mapping[str, str], wanted: Collection[str]) -> bool:
    if not set(wanted).isdisjoint(node.partitions):
        return False
    # An open incident is sresctld's: what it needs is done there.
    is_under_repair = HEALTH in labels_of(node.comment)
    return not is_under_repair and choose_node(node, reserved).readiness is DeepReadiness.READY


def used_nodes(
    nodes: Iterable[Node], busy_until: Mapping[str, float], now: float, seconds: float
) -> frozenset[str]:
    """Return the nodes that have run a job since their last deep check, which is some time ago.

    Args:
        nodes: as Slurm shows them now.
        busy_until: when each last ran a job, in seconds since the epoch.
        now: the same.
        seconds: a node is checked no sooner again.
    """
    return frozenset(
        node.name
        for node in nodes
        if busy_until.get(node.name, 0.0) > marked_at(node) + OWN_END_SECONDS
        and now - marked_at(node) >= seconds
    )


def changed_nodes(status: Mapping[str, Any]) -> frozenset[str]:
    """Return the nodes whose software is another than at their last deep check.

    Args:
        status: sresctld's, with the findings of each node.
    """
    return frozenset(
        name
        for name, node in status.get("nodes", {}).items()
        if any(finding["check"] == software.CHECK.name for finding in node.get("findings", ()))
    )


def _trigger(
    node: Node, is_changed: bool, is_used: bool, now: float, every_seconds: float
) -> DeepTrigger | None:
    status, age = status_of(node), now - marked_at(node)
    match status:
        case "":
            return DeepTrigger.FIRST
        case DeepState.IN_PROGRESS.value:
            return None
        case DeepState.FAILED.value:
            # Until it has been repaired, another one would find the same.
            return DeepTrigger.RETURNED if booted_at(node) > marked_at(node) else None
        case DeepState.UNJUDGED.value:
            again = min(AGAIN_SECONDS, every_seconds) if every_seconds else AGAIN_SECONDS
            return DeepTrigger.AGAIN if age >= again else None
        case status if status == REQUESTED:
            return DeepTrigger.REQUESTED
    if is_changed:
        return DeepTrigger.SOFTWARE
    if is_used:
        return DeepTrigger.USED
    return DeepTrigger.PERIODIC if every_seconds and age >= every_seconds else None
