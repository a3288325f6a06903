"""Tell which node of how many this is. Pure.

The words of the command line come first, then our supervisor's variables, then Slurm's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher.flags import SeatSpan, nnodes
from slurm_resilience.mesh.rank_variables import ELASTIC_NODES, LENT


class NodeRank(msgspec.Struct, frozen=True):
    """This node's place in the training."""

    rank: int
    nodes: SeatSpan
    run: str
    """Names this run among others that meet at the same place."""
    note: str = ""
    """Something that the user should know."""

    @property
    def alone(self) -> bool:
        return self.nodes.most == 1


def find_node_rank(
    environment: Mapping[str, str],
    nodes: str | None = None,
    rank: int | None = None,
    run: str | None = None,
    standalone: bool = False,
) -> NodeRank:
    """Return this launcher's node rank, and the number of nodes.

    Args:
        environment: the launcher's.
        nodes: --nnodes.
        rank: --node-rank.
        run: --rdzv-id.
        standalone: --standalone.

    Raises:
        UsageError: the node rank is unknown or impossible, or this is not the node's only launcher.
    """
    in_step = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    run = run or own_run(environment, in_step=in_step) or "none"
    if standalone:
        if nodes is not None and nnodes(nodes).most > 1:
            raise UsageError("--standalone is for one node; leave it out, or --nnodes")
        return NodeRank(0, SeatSpan(1, 1), run)
    if in_step and environment.get("SLURM_LOCALID", "0") != "0":
        raise UsageError("one launcher for each node: srun --ntasks-per-node=1 …")
    note = ""
    if environment.get(ELASTIC_NODES):
        span = nnodes(environment[ELASTIC_NODES])
    elif nodes is not None:
        span = nnodes(nodes)
    elif "NNODES" in environment:
        span = nnodes(environment["NNODES"])
    else:
        count = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1")
        if not in_step and count != "1":
            note = (
                f"the job has {count} nodes, but this is no step: only this node trains; "
                "to use all, put srun --ntasks-per-node=1 before it"
            )
            count = "1"
        span = nnodes(count)
    if rank is None:
        rank = _rank(environment, span, in_step)
    # One that stands in for a sick node comes behind the last.
    if not 0 <= rank < span.most and not (rank >= 0 and environment.get(LENT) == "1"):
        raise UsageError(f"node rank {rank} does not exist: there are {span.most} nodes")
    return NodeRank(rank, span, run, note)


def _rank(environment: Mapping[str, str], span: SeatSpan, in_step: bool) -> int:
    if span.most == 1:
        return 0
    text = environment.get("NODE_RANK") or (environment.get("SLURM_NODEID", "") if in_step else "")
    if not text.isdigit():
        raise UsageError(
            "which node is this? Start the launchers with srun --ntasks-per-node=1, or give each "
            "one --node-rank"
        )
    return int(text)


def own_run(environment: Mapping[str, str], *, in_step: bool) -> str:
    """Return the name of this run that no other run of Slurm's has; empty: Slurm knows of none.

    Args:
        environment: the launcher's.
        in_step: each step is a run of its own.
    """
    if token := environment.get("SRES_TOKEN"):
        return token
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return ""
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return f"{job}.{restarts}.{environment['SLURM_STEP_ID']}" if in_step else f"{job}.{restarts}"
