"""Peer state: what is tracked, who heals whom, and moving it from memory to memory.

The decisions (`plan`, `partners`) need no torch; everything else loads torch when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# `plan` must stay an eager import: it replaces the module of the same name as this attribute.
from slurm_resilience.training.state.errors import HealFailed, StateError
from slurm_resilience.training.state.pairs import partners
from slurm_resilience.training.state.plan import (
    HealPlan,
    checkpointless_recovery_feasible,
    plan,
)
from slurm_resilience.training.state.routing import Route

if TYPE_CHECKING:
    from slurm_resilience.training.state.capture import Capture
    from slurm_resilience.training.state.partner import Partner
    from slurm_resilience.training.state.tracked import Tracked
    from slurm_resilience.training.state.transfer import TransferReport, transfer

_ROOM = "slurm_resilience.training.state"
_LAZY = {
    "Capture": "capture",
    "Partner": "partner",
    "Report": "move",
    "Tracked": "tracked",
    "transfer": "move",
}

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {_ROOM!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{_ROOM}.{_LAZY[name]}"), name)
