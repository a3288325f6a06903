"""Slurm's word on a node and sresctld's, side by side. Pure: these are also the JSON's shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_resilience.model import Job, Node
from slurm_resilience.slurm.node_labels import HEALTH, IN_SERVICE, labels_of

FAULTY_HEALTH = frozenset({"suspect", "dead", "sick", "requested", "held", "down"})
SILENT = "?"
"""Health and sresd of a node when sresctld does not answer."""
SLURMD_SILENT = "slurmd silent"
"""Health of a node of which no fault is known, but whose slurmd does not answer Slurm."""


def slurm_state(node: Node) -> str:
    """Write the state in Slurm's own words: base, ``*`` when it does not answer, flags."""
    star = "" if node.is_responding else "*"
    return "+".join([node.base + star, *sorted(node.flags - {"NOT_RESPONDING"})])


def _health(node: Node, seen: Mapping[str, Any], answers: bool) -> str:
    """Return sresctld's verdict; where it has none on a node that Slurm gets no answer from, that
    is what is known."""
    verdict = str(seen.get("verdict", "unknown" if answers else SILENT))
    return SLURMD_SILENT if verdict == "unknown" and not node.is_responding else verdict


def node_view(node: Node, jobs: Iterable[Job], status: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything known of one node.

    Args:
        node: as Slurm shows it now.
        jobs: all jobs; those on this node are listed.
        status: sresctld's; None: it does not answer, and its fields are empty.
    """
    seen: Mapping[str, Any] = (status or {}).get("nodes", {}).get(node.name, {})
    return {
        "node": node.name,
        "state": slurm_state(node),
        "reason": node.reason,
        "reason_by": node.reason_by,
        "reason_at": node.reason_at,
        "reason_unclear": node.reason_unclear,
        "jobs": sorted(job.id for job in jobs if node.name in job.nodes),
        "partitions": list(node.partitions),
        "gres": node.gres,
        "comment": node.comment,
        "labels": {HEALTH: IN_SERVICE} | labels_of(node.comment),
        "health": _health(node, seen, status is not None),
        "why": seen.get("why", ""),
        "mode": seen.get("mode", ""),
        "sresd": seen.get("sresd", SILENT if status is None else "never seen"),
        "findings": seen.get("findings", []),
        "unjudged": seen.get("unjudged", []),
        "incident": seen.get("incident"),
        "gave_up": seen.get("gave_up"),
        "next": seen.get("next"),
        "boot_id": seen.get("boot_id", ""),
        "instance": seen.get("instance", ""),
    }


def node_views(
    nodes: Iterable[Node], jobs: Iterable[Job], status: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """`node_view` of several nodes."""
    on: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        for name in job.nodes:
            on[name].append(job)
    return [node_view(node, on[node.name], status) for node in nodes]


def is_faulty(view: Mapping[str, Any]) -> bool:
    """Not simply in service: sresctld says so, or Slurm does."""
    out = any(word in view["state"] for word in ("DOWN", "DRAIN", "FAIL", "*"))
    return out or view["health"] in FAULTY_HEALTH


def near_misses(nodes: Iterable[Node]) -> list[dict[str, str]]:
    """Reasons that were meant to be an action, and are not: with what to write."""
    return [
        {"node": n.name, "reason": n.reason, "by": n.reason_by, "meant": n.near_miss}
        for n in nodes
        if n.near_miss
    ]


def by_value(views: Iterable[Mapping[str, Any]], key: str) -> dict[str, list[str]]:
    """Group node names by health, by state, or by any other value."""
    found: dict[str, list[str]] = defaultdict(list)
    for view in views:
        found[view[key]].append(view["node"])
    return dict(found)


def queue(views: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the next act on each node that has one, soonest first."""
    acts = [{"node": view["node"]} | view["next"] for view in views if view["next"]]
    return sorted(acts, key=lambda act: (not act["at"], act["at"], act["node"]))
