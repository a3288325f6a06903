"""Process groups that start without a root and can be left at any moment."""

from __future__ import annotations

from slurm_resilience.training.group.form import Group, form
from slurm_resilience.training.group.meshstore import MeshStore

__all__ = ["Group", "MeshStore", "form"]
