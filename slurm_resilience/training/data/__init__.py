"""Batches by number, and a mapped cache of them that outlives the process.

``ReplayLoader`` is the door. Names are loaded when they are used: the launcher takes ``clean`` and
``stale`` from here without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_resilience.training.data.cache.directory import clean, hold, stale
    from slurm_resilience.training.data.loader import ReplayLoader
    from slurm_resilience.training.data.order import SampleOrder

__all__ = ["ReplayLoader", "SampleOrder", "clean", "hold", "stale"]

_HOME = {"ReplayLoader": "loader", "Order": "order"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'place')}"), name)
