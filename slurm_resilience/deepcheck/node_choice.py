"""Choose the nodes that deep checks may load: idle, and kept for no other purpose. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slurm_resilience.model import Node
from slurm_resilience.slurm.reservations import Reservation


class DeepReadiness(enum.StrEnum):
    """A node's readiness for a deep check."""

    READY = "ready"
    BUSY = "busy"
    """It can be waited for."""
    AWAY = "away"
    """Down, held by a person, or kept for another purpose: it is left alone."""


class NodeChoice(NamedTuple):
    """The judgement of one node."""

    node: str
    readiness: DeepReadiness
    reason: str = ""


def choose_node(node: Node, reserved: Mapping[str, str], own: str = "") -> NodeChoice:
    """Judge one node.

    Args:
        node: as Slurm shows it now.
        reserved: by node, the reservation that has it or will have it before a check could end.
        own: the name of our own reservation, which does not count.
    """
    holder = reserved.get(node.name, "")
    if node.is_down or node.is_fail or node.is_drain or not node.is_responding:
        reason = f": {node.reason}" if node.reason else ""
        return NodeChoice(node.name, DeepReadiness.AWAY, f"{node.state}{reason}")
    if holder and holder != own:
        return NodeChoice(node.name, DeepReadiness.AWAY, f"kept by reservation {holder}")
    if node.has_work:
        return NodeChoice(node.name, DeepReadiness.BUSY, f"a job runs on it ({node.state})")
    if not (node.is_available or node.is_only_reserved) or node.base != "IDLE":
        return NodeChoice(node.name, DeepReadiness.AWAY, node.state)
    return NodeChoice(node.name, DeepReadiness.READY)


def kept_nodes(reservations: Iterable[Reservation], until: float) -> dict[str, str]:
    """Return the nodes of reservations that begin before a moment, with the name of one."""
    return {node: one.name for one in reservations if one.starts_at < until for node in one.nodes}


_COUNT = re.compile(r"(?:^|,)gpu(?::(?P<type>[^,:(]+))?:(?P<count>\d+)")
_NEURON = re.compile(r"trainium|inferentia|neuron", re.IGNORECASE)
"""Slurm names them so among the GPUs where gres.conf has `AutoDetect=nrt`."""


def gpus_of(gres: str) -> int:
    """Return the GPUs in a node's Gres: ``gpu:a100:8(S:0-1),shard:8`` → 8."""
    found = _COUNT.finditer(gres)
    return sum(int(one["count"]) for one in found if not _NEURON.search(one["type"] or ""))


def has_neuron(gres: str) -> bool:
    """Return whether a node's Gres names Neuron devices: ``gpu:trainium:16``, ``neuron:16``."""
    return _NEURON.search(gres) is not None


def gpu_request(gres: str) -> str:
    """Return srun's ``--gres`` for all that a node has of the GRES gpu; empty when it has none."""
    count = sum(int(one["count"]) for one in _COUNT.finditer(gres))
    return f"gpu:{count}" if count else ""


def by_gpus(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    """Return the names of nodes by what a job has to ask for to get all of their GPUs."""
    groups: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        asked = gpu_request(node.gres)
        groups[asked] = (*groups.get(asked, ()), node.name)
    return groups
