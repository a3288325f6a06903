"""Peer state: what is tracked, who heals whom, and moving it from memory to memory."""

from slurm_resilience.training.state.describe import Capture
from slurm_resilience.training.state.errors import HealFailed, StateError
from slurm_resilience.training.state.partner import Partner
from slurm_resilience.training.state.plan import (
    HealPlan,
    Route,
    checkpointless_recovery_feasible,
    partners,
    plan,
)
from slurm_resilience.training.state.tracked import Tracked
from slurm_resilience.training.state.transfer import TransferReport, transfer

__all__ = [
    "Capture",
    "HealFailed",
    "HealPlan",
    "Partner",
    "Route",
    "StateError",
    "Tracked",
    "TransferReport",
    "checkpointless_recovery_feasible",
    "partners",
    "plan",
    "transfer",
]
