"""Checkpointless training with plain PyTorch: recover in the process, heal from a peer.

    from slurm_resilience.training import Session, resilient

    @resilient(min_world=2)
    def train(s: Session) -> None:
        model, opt = s.once(build)
        s.track(model=model, opt=opt)
        net = s.ddp(model)
        for batch in s.loader(dataset, global_batch=1024):
            loss(net, batch).backward()
            with s.update():
                opt.step()
                opt.zero_grad()

Names are loaded when they are used: the launcher lives in this room and starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_resilience.mesh.mesh import Mesh as Board
    from slurm_resilience.training import inject
    from slurm_resilience.training.block import resilient
    from slurm_resilience.training.checkpoint import Checkpointer
    from slurm_resilience.training.data import ReplayLoader
    from slurm_resilience.training.session import Session
    from slurm_resilience.training.state import checkpointless_recovery_feasible
    from slurm_resilience.training.watch import Watch

_WHERE = {
    "Board": ("slurm_resilience.mesh.mesh", "Mesh"),
    "Checkpointer": ("slurm_resilience.training.checkpoint", "Checkpointer"),
    "ReplayLoader": ("slurm_resilience.training.data", "ReplayLoader"),
    "Session": ("slurm_resilience.training.session", "Session"),
    "Watch": ("slurm_resilience.training.watch", "Watch"),
    "checkpointless_recovery_feasible": (
        "slurm_resilience.training.state",
        "checkpointless_recovery_feasible",
    ),
    "inject": ("slurm_resilience.training.inject", ""),
    "resilient": ("slurm_resilience.training.block", "resilient"),
}

__all__ = [
    "Board",
    "Checkpointer",
    "ReplayLoader",
    "Session",
    "Watch",
    "checkpointless_recovery_feasible",
    "inject",
    "resilient",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
