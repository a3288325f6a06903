"""The environment of each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slurm_resilience.launcher.node_rank import NodeRank
from slurm_resilience.mesh.rank_variables import OF_A_RANK


class NodeSeats(msgspec.Struct, frozen=True):
    """The part of the environment that all ranks of this node share."""

    here: NodeRank
    ranks: int
    """On each node."""
    meet: str
    name: str
    """The node's."""
    secret: str = ""
    keeper: str = ""
    """Path of the launcher's socket."""
    role: str = "default"
    replacements: int = 0
    master: tuple[str, int] | None = None
    """MASTER_ADDR and MASTER_PORT, for scripts that make their first group themselves."""
    virtual: bool = False
    """torchrun's --virtual-local-rank: each rank sees its own GPU only, as number 0."""
    nodes_told: int = 0
    """Nodes of the whole training, by a supervisor's word; 0: it said nothing."""

    @property
    def all_nodes(self) -> int:
        """The nodes by which a world's size is told: a script may count those of its own step, or
        of a job that has changed since."""
        return self.nodes_told or self.here.nodes.most

    @property
    def seats(self) -> int:
        return self.ranks * self.here.nodes.most

    def seat(self, local: int) -> int:
        return self.here.rank * self.ranks + local


def without_outer_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a launcher's environment without what another one told the rank that started it.

    A rank may run a program of its own, or submit a job: its ranks would else meet those of that
    rank's training, and take their seats.
    """
    outer = OF_A_RANK if "SRES_SEAT" in environment else ()
    return {name: value for name, value in environment.items() if name not in outer}


def common(environment: Mapping[str, str], node: NodeSeats) -> dict[str, str]:
    """Return what a standby needs before it knows its seat: threads are counted when libraries
    load."""
    result = {"TORCHELASTIC_RUN_ID": node.here.run}
    if node.ranks > 1 and "OMP_NUM_THREADS" not in environment:
        result["OMP_NUM_THREADS"] = "1"
    return result


def nodes_told(environment: Mapping[str, str], ranks: int) -> int:
    """Return the nodes of the training that a step joins, as the supervisor tells it; 0: this is no
    such step.

    Args:
        environment: the launcher's.
        ranks: on each node.
    """
    seats = environment.get("SRES_SEATS", "") if "SRES_TOKEN" in environment else ""
    if not seats.isdecimal():
        return 0
    # It names seats where a task has one: those of launchers, or of single ranks.
    return int(seats) if "SRES_SEATS_HERE" in environment else int(seats) // ranks


def of_rank(
    environment: Mapping[str, str], node: NodeSeats, local: int, incarnation: int
) -> dict[str, str]:
    """Return what a rank finds in addition to the launcher's own environment.

    Args:
        environment: the launcher's.
        node: this node.
        local: 0 … ranks-1.
        incarnation: processes that sat on this seat before.
    """
    seat, seats, nodes = node.seat(local), node.seats, node.here.nodes
    result = common(environment, node) | {
        "SRES_SEAT": str(seat),
        "SRES_SEATS": str(node.ranks * node.all_nodes),
        "SRES_INCARNATION": str(incarnation),
        "SRES_MEET": node.meet,
        "SRES_NODE": node.name,
        "RANK": str(seat),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(seats),
        "LOCAL_WORLD_SIZE": str(node.ranks),
        "GROUP_RANK": str(node.here.rank),
        "GROUP_WORLD_SIZE": str(nodes.most),
        "ROLE_NAME": node.role,
        "ROLE_RANK": str(seat),
        "ROLE_WORLD_SIZE": str(seats),
        "TORCHELASTIC_RESTART_COUNT": str(incarnation),
        "TORCHELASTIC_MAX_RESTARTS": str(node.replacements),
        # There is no agent whose store a rank could use.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if nodes.least < nodes.most and "SRES_MIN_WORLD" not in environment:
        result["SRES_MIN_WORLD"] = str(nodes.least * node.ranks)
    if node.secret:
        result["SRES_SECRET"] = node.secret
    if node.keeper:
        result["SRES_KEEPER"] = node.keeper
    if node.master is not None:
        result["MASTER_ADDR"], result["MASTER_PORT"] = node.master[0], str(node.master[1])
    if node.virtual:
        seen = environment.get("CUDA_VISIBLE_DEVICES", "")
        devices = seen.split(",") if seen else [str(index) for index in range(node.ranks)]
        if local < len(devices):
            result |= {"CUDA_VISIBLE_DEVICES": devices[local].strip(), "LOCAL_RANK": "0"}
    return result
