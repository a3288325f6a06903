"""Batches by number, and a mapped cache of them that outlives the process."""

from slurm_resilience.training.data.loader import ReplayLoader
from slurm_resilience.training.data.order import SampleOrder

__all__ = ["ReplayLoader", "SampleOrder"]
