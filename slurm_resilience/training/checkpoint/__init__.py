"""Asynchronous, atomic, verified checkpoints: the fallback when no peer has the state.

`Checkpointer` is the public door. It is loaded when it is used, so that what only looks at a
directory of checkpoints does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_resilience.training.checkpoint.checkpointer import Checkpointer, Counts

__all__ = ["Checkpointer", "Counts"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from slurm_resilience.training.checkpoint import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
