"""The watch over the rules, in one process."""

from __future__ import annotations

from slurm_resilience.training.guards.left_out import LeftOutUpdates
from slurm_resilience.training.guards.replica_check import ReplicaCheck
from slurm_resilience.training.guards.seed_watch import SeedWatch
from slurm_resilience.training.guards.state_watch import StateWatch
from slurm_resilience.training.guards.witness import Witness


class RuleGuards:
    """They outlive every world.

    Args:
        digest_every: steps between two comparisons of replicas; None: as often as is cheap.
        heals: the parts that heal a rank in its living process are on.
    """

    def __init__(self, digest_every: int | None, *, heals: bool) -> None:
        self.replicas = ReplicaCheck(digest_every)
        self.seeds = SeedWatch()
        self.state = StateWatch()
        self.witness = Witness()
        self.left_out = LeftOutUpdates(heals=heals)
