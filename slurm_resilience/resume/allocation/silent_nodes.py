"""Tell which nodes of a failed launch do not answer: the next attempt does without them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.slurm.client import SlurmClient

if TYPE_CHECKING:
    from slurm_resilience.slurm.slurmd_port import PortsSeen

MOST_COMPARED = 4
"""Other nodes of the step to which a connection is made as well."""


def silent_nodes(
    failed: Collection[str],
    others: Iterable[str],
    client: SlurmClient,
    doubts: Callable[[tuple[str, ...]], dict[str, str]],
    look_at_ports: Callable[[Iterable[Node]], PortsSeen],
) -> dict[str, str]:
    """Return those nodes that do not answer, with the reason.

    Slurm's word counts, then sresctld's. Slurm notices it late, so a connection to slurmd counts
    as well, which srun has tried in vain already; but only where another node of the step takes
    one: else it may be this machine that is cut off.

    Args:
        failed: nodes on which srun could start no task.
        others: the other nodes of its step.
        client: asks Slurm.
        doubts: asks sresctld about nodes.
        look_at_ports: connects to the slurmd of nodes.
    """
    try:
        shown = {node.name: node for node in client.nodes()}
    except SresError:
        return {}
    told = {
        name: f"Slurm shows {shown[name].state}"
        for name in failed
        if name in shown and not shown[name].is_responding
    }
    unclear = tuple(name for name in failed if name in shown and name not in told)
    if unclear:
        told |= doubts(unclear)
    unclear = tuple(name for name in unclear if name not in told)
    compared = [name for name in others if name in shown][:MOST_COMPARED]
    if unclear and compared:
        seen = look_at_ports([shown[name] for name in (*compared, *unclear)])
        if not seen.answering.isdisjoint(compared):
            silent = seen.silent.intersection(unclear)
            told |= dict.fromkeys(silent, "its slurmd takes no connection")
    return told
