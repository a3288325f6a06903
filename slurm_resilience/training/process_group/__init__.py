"""Process groups that start without a root and can be left at any moment."""

from __future__ import annotations

from slurm_resilience.training.process_group.form import ProcessGroups, form
from slurm_resilience.training.process_group.mesh_store import MeshStore
from slurm_resilience.training.process_group.rootless import RootlessWorld, rootless

__all__ = ["MeshStore", "ProcessGroups", "RootlessWorld", "form", "rootless"]
